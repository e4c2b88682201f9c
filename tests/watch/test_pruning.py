"""Which checkpoints may go: never the newest proven one, and only files of the one that goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import UsageError
from ckptools.watch import run as follow
from ckptools.watch.run import WatchOptions, following
from tests.truth import FIXTURES
from tests.watch.runs import aged, flip, save, told


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6, 8):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def looked(run: Path, **options: object) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Events of one look without those of proofs, and the names that are left."""
    how = WatchOptions(state=run.parent / "state.json", **options)  # type: ignore[arg-type]
    with following(run, how, {}, lambda _: None) as watching:
        found = told(watching.look())
    return [e for e in found if e[0] not in ("proven", "problem")], sorted(path.name for path in run.iterdir())


def test_older_ones_are_named_and_nothing_is_deleted_by_itself(run):
    events, left = looked(run, keep=2)
    assert events == [("may go", 2), ("may go", 4)] and len(left) == 4


def test_older_ones_are_deleted_where_that_is_asked_for(run):
    assert looked(run, keep=2, deep=True, delete=True) == (
        [("deleted", 2), ("deleted", 4)],
        ["step-6.pt", "step-8.pt"],
    )


def test_what_is_broken_does_not_count_as_kept(run):
    flip(run / "step-6.pt")
    flip(run / "step-8.pt")
    events, left = looked(run, keep=1, deep=True, delete=True)
    assert events == [("deleted", 2)] and left == ["step-4.pt", "step-6.pt", "step-8.pt"]


def test_nothing_goes_where_fewer_are_proven_than_are_to_be_kept(run):
    for step in (4, 6, 8):
        flip(run / f"step-{step}.pt")
    assert looked(run, keep=2, deep=True, delete=True)[0] == []


def test_what_a_tracker_leads_to_stays(run):
    (run / "latest").write_text("step-2.pt")
    assert looked(run, keep=1)[0] == [("may go", 4), ("may go", 6)]


def test_nothing_goes_when_the_newest_proven_one_has_changed_since(run, monkeypatch):
    real = follow.may_go

    def meanwhile(*arguments):
        flip(run / "step-8.pt")
        (run / "step-8.pt").write_bytes((run / "step-8.pt").read_bytes()[:-1])
        return real(*arguments)

    monkeypatch.setattr(follow, "may_go", meanwhile)
    events, left = looked(run, keep=1, deep=True, delete=True)
    assert {event for event, _ in events} == {"not deleted"} and len(left) == 4


def test_a_folder_that_is_empty_then_goes_too_and_what_is_beside_it_stays(run):
    (run / "step-2").mkdir()
    (run / "step-2.pt").rename(run / "step-2" / "model.pt")
    (run / "notes.txt").write_text("of 2025")
    events, left = looked(run, keep=3, deep=True, delete=True)
    assert events == [("deleted", 2)] and left == ["notes.txt", "step-4.pt", "step-6.pt", "step-8.pt"]


@pytest.fixture
def with_dcp(run: Path) -> Path:
    """The run, with a DCP folder of step 5 in it."""
    shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", run / "step-5")
    for path in (run / "step-5").iterdir():
        aged(path)
    return run


def test_a_dcp_folder_goes_with_all_that_is_in_it(with_dcp):
    settings = with_dcp / "step-5" / "config.yaml"
    settings.write_text("lr: 1")
    aged(settings)
    events, left = looked(with_dcp, keep=2, deep=True, delete=True)
    assert ("deleted", 5) in events and left == ["step-6.pt", "step-8.pt"]


def test_a_deletion_that_is_cut_short_leaves_no_checkpoint_but_a_left_over(with_dcp, monkeypatch):
    def killed(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", killed)
    assert ("not deleted", 5) in looked(with_dcp, keep=2, deep=True, delete=True)[0]
    found = ckptools.checkpoints_in(with_dcp)
    assert [row.step for row in found.rows] == [8, 6]
    assert [row.name.startswith(".ckptools-deleted-") for row in found.left_over] == [True]


def test_a_link_out_of_the_run_is_not_deleted(run, tmp_path):
    elsewhere = (run / "step-2.pt").rename(tmp_path / "elsewhere.pt")
    (run / "step-2.pt").symlink_to(elsewhere)
    aged(elsewhere)
    looked(run, keep=1, deep=True, delete=True)
    assert elsewhere.exists() and (run / "step-2.pt").is_symlink()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep": 0}, "never deleted"),
        ({"delete": True}, "--keep"),
        ({"keep": 1, "delete": True}, "--deep"),
        ({"keep": 1, "deep": True, "delete": True, "dry_run": True}, "one of them"),
        ({"on_problem": "a 'b"}, "--on-problem"),
        ({"drift": 1.0}, "factor"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        WatchOptions(**options)
