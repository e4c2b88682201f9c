"""The checkpoints of a run: each is found, none that is damaged is called whole, and the newest whole one is that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.checks.run_folder.newest import NO_MODEL
from ckptools.errors import UnknownFormatError, UsageError
from ckptools.model.run_folder import CheckpointRow, RunFolder
from ckptools.training import CreateOptions, ModelSize
from ckptools.training.resume_options import ResumeOptions
from tests.training.forked import create_forked
from tests.truth import FIXTURES, WHOLE
from tests.views.made import HOSTILE

SMALL = ModelSize(vocab=31, width=20, layers=1, context=7)


def trained(out: Path, layout: str) -> Path:
    saves = ResumeOptions(save_every=2)
    return create_forked(CreateOptions(out, "fsdp1", 2, 6, layout, size=SMALL, resuming=saves)).out


@pytest.fixture(scope="session")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three saves of a real run, as `ep0-ba2-rank0.pt` and so on."""
    return trained(tmp_path_factory.mktemp("runs") / "run", "composer")


@pytest.fixture
def run(rank_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rank_files, tmp_path / "run"))


def of_step(run: Path, step: int, rank: int = 0) -> Path:
    return next(run.glob(f"*-ba{step}-rank{rank}.pt"))


def steps(found: RunFolder) -> list[int | None]:
    return [row.step for row in found.rows]


def newest(found: RunFolder) -> CheckpointRow | None:
    return next((row for row in found.rows if row.newest_whole), None)


def test_the_newest_is_first_and_every_rank_of_it_was_read(run):
    found = ckptools.checkpoints_in(run)
    assert (steps(found), found.ok, found.ordered_by) == ([6, 4, 2], True, "step")
    assert [row.looked_into for row in found.rows] == ["verify", "inspect", "inspect"]
    assert [row.newest_whole for row in found.rows] == [True, False, False]
    assert ckptools.open(str(found.newest_whole)).step.value == 6
    assert [(r.ranks, r.world_size, r.files, r.whole, r.format) for r in found.rows] == [
        (2, 2, 2, True, "rank_files")
    ] * 3
    assert found.to_dicts()[0]["name"] == of_step(run, 6).name


def cut(run: Path) -> None:
    path = of_step(run, 6, 1)
    path.write_bytes(path.read_bytes()[:5000])


def cut_the_first(run: Path) -> None:
    path = of_step(run, 6, 0)
    path.write_bytes(path.read_bytes()[:5000])


def delete(run: Path) -> None:
    of_step(run, 6, 1).unlink()


def swap(run: Path) -> None:
    one, two = of_step(run, 6, 0), of_step(run, 6, 1)
    one.rename(run / "aside")
    two.rename(one)
    (run / "aside").rename(two)


def copy_a_rank(run: Path) -> None:
    shutil.copy(of_step(run, 6, 0), of_step(run, 6, 1))


def copy_an_older_step(run: Path) -> None:
    shutil.copy(of_step(run, 4, 1), of_step(run, 6, 1))


def empty(run: Path) -> None:
    of_step(run, 6, 1).write_bytes(b"")


DAMAGES: dict[Callable[[Path], None], tuple[str, ...]] = {
    cut: ("CK002",),
    cut_the_first: ("CK002",),
    delete: ("CK001",),
    copy_a_rank: ("CK001", "CK009"),
    copy_an_older_step: ("CK006",),
    empty: ("CK002",),
}
"""What was done to the newest checkpoint, and codes of which at least one tells it."""


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_newest_that_is_damaged_is_passed_over(damage, run):
    damage(run)
    found = ckptools.checkpoints_in(run)
    assert (steps(found), found.ok, found.readable) == ([6, 4, 2], False, True)
    broken = found.rows[0]
    assert broken.whole is False and set(DAMAGES[damage]) & set(broken.codes), broken
    assert any(code in broken.why for code in DAMAGES[damage]) and broken.verdict != "whole"
    assert [row.looked_into for row in found.rows[1:]] == ["verify", "inspect"]
    assert found.newest_whole == str(of_step(run, 4))


def test_ranks_that_changed_their_names_are_no_damage_of_the_values_but_are_told(run):
    swap(run)
    row = ckptools.checkpoints_in(run).rows[0]
    assert "CK010" in row.codes


def test_a_flipped_bit_is_seen_with_deep_and_only_then(run):
    path = of_step(run, 6, 1)
    data = bytearray(path.read_bytes())
    shards = [s for tensor in ckptools.open(path).model.values() for s in tensor.shards]
    source = next(s.source for s in shards if s.rank == 1 and s.source is not None and s.box.numel)
    data[source.offset] ^= 8
    path.write_bytes(data)
    assert ckptools.checkpoints_in(run).newest_whole == str(of_step(run, 6))
    found = ckptools.checkpoints_in(run, deep=True)
    assert found.newest_whole == str(of_step(run, 4))
    assert [row.looked_into for row in found.rows] == ["verify --deep", "verify --deep", "inspect"]
    assert found.rows[0].codes == ("CK004",)


def test_none_is_whole_where_all_are_damaged(run):
    for step in (2, 4, 6):
        of_step(run, step, 1).unlink()
    found = ckptools.checkpoints_in(run)
    assert (found.newest_whole, found.ok, found.readable) == (None, False, True)


def test_what_cannot_be_opened_is_a_row_that_says_why(run):
    for rank in (0, 1):
        of_step(run, 6, rank).write_bytes(b"nothing that torch wrote")
    row = ckptools.checkpoints_in(run).rows[0]
    assert (row.step, row.whole, row.verdict, row.looked_into) == (6, False, "NOT WHOLE: cannot be opened", "nothing")
    assert row.why and row.files == 2


def test_the_step_is_what_the_files_say_and_a_name_that_tells_another_is_told(run):
    for rank in (0, 1):
        of_step(run, 6, rank).rename(run / f"ep0-ba1-rank{rank}.pt")
    found = ckptools.checkpoints_in(run)
    assert steps(found) == [6, 4, 2]
    row = found.rows[0]
    assert not row.step_agrees and row.codes == ("CK010",)
    assert row.verdict.startswith("whole, 1 warning: the name of the file or folder tells another step than ")
    assert found.newest_whole == str(run / "ep0-ba1-rank0.pt")


def test_file_times_that_contradict_the_steps_are_told(run):
    for rank in (0, 1):
        os.utime(of_step(run, 6, rank), (1e9, 1e9))
    found = ckptools.checkpoints_in(run)
    assert steps(found) == [6, 4, 2]
    assert "step 6 was written before step 4" in found.notes[0]


# -- trackers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(run: Path) -> Path:
    """The same run with a folder for each step."""
    for step in (2, 4, 6):
        (run / f"step-{step}").mkdir()
        for rank in (0, 1):
            of_step(run, step, rank).rename(run / f"step-{step}" / f"rank{rank}.pt")
    return run


def test_a_folder_for_each_step_is_a_checkpoint_each(folders):
    found = ckptools.checkpoints_in(folders)
    assert [row.name for row in found.rows] == ["step-6", "step-4", "step-2"]


@pytest.mark.parametrize(
    ("text", "severity", "says"),
    [
        ("step-6", "", ""),
        ("step-4", "warning", "names step 4; the newest whole one is step 6"),
        ("step-8", "error", "which is not here"),
        ("../elsewhere", "error", "not the plain name"),
        ("aside", "error", "holds no checkpoint"),
    ],
)
def test_a_tracker_that_lies_is_told(text, severity, says, folders):
    (folders / "aside").mkdir()
    (folders / "latest").write_text(text)
    found = ckptools.checkpoints_in(folders)
    (tracker,) = found.trackers
    assert (tracker.name, tracker.severity) == ("latest", severity)
    assert says in tracker.problem and ("CK016" in tracker.problem) == bool(severity)
    assert found.ok == (severity != "error") and found.newest_whole == str(folders / "step-6")


def test_a_tracker_of_a_checkpoint_that_is_not_whole_leads_astray(folders):
    (folders / "latest").write_text("step-6")
    (folders / "step-6" / "rank1.pt").unlink()
    (tracker,) = ckptools.checkpoints_in(folders).trackers
    assert (tracker.severity, tracker.step) == ("error", 6) and "is not whole" in tracker.problem


def test_links_of_all_ranks_to_one_checkpoint_are_one_tracker(run):
    for rank in (0, 1):
        (run / f"latest-rank{rank}.pt").symlink_to(of_step(run, 6, rank).name)
    found = ckptools.checkpoints_in(run)
    assert [(t.name, t.step, t.problem) for t in found.trackers] == [("latest-rank0.pt and 1 more", 6, "")]
    assert steps(found) == [6, 4, 2]


def test_a_link_out_of_the_folder_is_followed_only_when_asked_to(folders, tmp_path):
    (folders / "step-6").rename(tmp_path / "elsewhere")
    (folders / "step-6").symlink_to(tmp_path / "elsewhere")
    (folders / "latest").symlink_to(tmp_path / "elsewhere")
    found = ckptools.checkpoints_in(folders)
    assert steps(found) == [4, 2] and "step-6" in found.notes[0]
    assert "out of the folder" in found.trackers[0].problem
    assert 6 in steps(ckptools.checkpoints_in(folders, follow_symlinks=True))


def test_a_link_that_leads_in_a_circle_ends(folders):
    (folders / "step-6" / "again").symlink_to(folders)
    (folders / "round").symlink_to("round")
    assert steps(ckptools.checkpoints_in(folders, follow_symlinks=True)) == [6, 4, 2]


# -- what is not finished ----------------------------------------------------------------------------------------


def test_what_an_interrupted_write_left_is_listed_and_is_no_checkpoint(folders):
    (folders / "step-6").rename(folders / "step-8.tmp")
    (folders / ".ckptools-run").mkdir()
    (folders / "step-4" / "__0_0.distcp.tmp").write_bytes(b"x" * 100)
    found = ckptools.checkpoints_in(folders)
    assert steps(found) == [4, 2]
    assert [(one.name, one.bytes > 0) for one in found.left_over] == [
        (".ckptools-run", False),
        ("step-8.tmp", True),
        ("step-4/__0_0.distcp.tmp", True),
    ]
    assert found.ok


def test_what_was_written_just_now_and_is_not_whole_may_not_be_finished(run):
    path = of_step(run, 6, 1)
    path.write_bytes(path.read_bytes()[:5000])
    assert "it may not be finished" in ckptools.checkpoints_in(run).rows[0].notes[0]
    for rank in (0, 1):
        os.utime(of_step(run, 6, rank), (1e9, 1e9))
    assert ckptools.checkpoints_in(run).rows[0].notes == ()


# -- any format, any name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [k for k in WHOLE if k.shapes is None], ids=lambda k: k.name)
def test_every_format_is_found_from_the_folder_above_it(known):
    found = ckptools.checkpoints_in(FIXTURES / known.name)
    mine = ckptools.open(known.file)
    files = {f.path.resolve() for f in mine.files}
    at = [r for r in found.rows if files & {f.path.resolve() for f in ckptools.open(r.path).files}]
    assert [(r.step, r.world_size, r.whole) for r in at] == [(mine.step.value, mine.world_size.exact, True)]


def test_optimizers_and_random_states_beside_a_model_are_no_checkpoints_of_their_own(tmp_path):
    shutil.copytree(FIXTURES / "accelerate-fsdp2" / "ckpt", tmp_path / "run" / "checkpoint_0")
    found = ckptools.checkpoints_in(tmp_path / "run")
    assert [row.name for row in found.rows] == ["checkpoint_0"]


def test_single_files_are_a_checkpoint_each(tmp_path):
    source = next(FIXTURES.glob("lightning-trainer-ddp/ckpt/*.ckpt"))
    for name in ("epoch=0-step=5.ckpt", "last.ckpt"):
        shutil.copy(source, tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "cut.ckpt").write_bytes(source.read_bytes()[:3000])
    found = ckptools.checkpoints_in(tmp_path)
    assert sorted((row.name, row.whole) for row in found.rows) == [
        ("cut.ckpt", False),
        ("epoch=0-step=5.ckpt", True),
        ("last.ckpt", True),
    ]


def test_what_holds_no_weights_is_no_checkpoint(run):
    torch.save({"ids": torch.arange(40), "step": 9}, run / "dataset.pt")
    assert steps(ckptools.checkpoints_in(run)) == [6, 4, 2]


def test_what_holds_no_model_is_not_what_to_go_on_from(run):
    state = {0: {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}
    groups = [{"params": [0], "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}]
    torch.save({"optimizer": {"state": state, "param_groups": groups}, "step": 9}, run / "alone.pt")
    found = ckptools.checkpoints_in(run)
    assert found.rows[0].step == 9 and NO_MODEL in found.rows[0].notes
    assert found.newest_whole == str(of_step(run, 6))


def test_a_dcp_without_its_metadata_is_a_row_that_says_so(tmp_path):
    for step in (5, 6):
        shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / f"step-{step}")
    (tmp_path / "step-6" / ".metadata").unlink()
    found = ckptools.checkpoints_in(tmp_path)
    assert [(row.name, row.whole) for row in found.rows] == [("step-6", False), ("step-5", True)]
    assert ".metadata" in found.rows[0].why


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_is_listed_as_it_is(name, folders):
    try:
        (folders / "step-2").rename(folders / name)
    except (OSError, ValueError):  # no file system has such a name; then there is nothing to list
        assert "/" in name or "\0" in name or len(name.encode("utf-8", "surrogatepass")) > 255 or not name.isascii()
        return
    assert name in [row.name for row in ckptools.checkpoints_in(folders).rows]


def test_a_folder_without_checkpoints_is_said_to_have_none(tmp_path):
    with pytest.raises(UnknownFormatError, match="no checkpoint"):
        ckptools.checkpoints_in(tmp_path)
    (tmp_path / "step-8.tmp").mkdir()
    with pytest.raises(UnknownFormatError, match=r"step-8\.tmp is temporary"):
        ckptools.checkpoints_in(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        ckptools.checkpoints_in(FIXTURES / "README.md")


def test_three_hundred_checkpoints_take_no_longer_than_to_look_into_each(tmp_path):
    source = next(FIXTURES.glob("lightning-trainer-ddp/ckpt/*.ckpt"))
    paths = [tmp_path / f"epoch={n}-step=5.ckpt" for n in range(300)]
    for path in paths:
        os.link(shutil.copy(source, tmp_path / "source"), path)
    (tmp_path / "source").unlink()
    started = time.process_time()
    for path in paths[::10]:
        ckptools.open(path)
    one = (time.process_time() - started) / 30
    started = time.process_time()
    found = ckptools.checkpoints_in(tmp_path)
    assert (len(found.rows), found.ok) == (300, True)
    assert time.process_time() - started < 1.3 * 300 * one + 1


def test_listing_imports_neither_torch_nor_numpy(rank_files):
    code = "import sys, ckptools; ckptools.checkpoints_in(sys.argv[1]); print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code, str(rank_files)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
