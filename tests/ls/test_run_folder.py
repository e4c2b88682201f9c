"""The checkpoints of a run: each is found, none that is damaged is called whole, and the newest whole one is that."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import ReadError, UnknownFormatError, UsageError
from ckptools.ls.record import CheckpointRow, RunFolder
from ckptools.ls.rows import NO_MODEL
from ckptools.training.options import CreateOptions, ModelSize, ResumeOptions
from tests.formats.deepspeed_writer import deepspeed_classes
from tests.training.forked import create_forked
from tests.truth import FIXTURES, WHOLE

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_ranks_that_changed_their_names_are_no_damage_of_the_values_but_are_told(run):
    swap(run)
    row = ckptools.checkpoints_in(run).rows[0]
    assert "CK022" in row.codes and row.whole and row.verdict.startswith("whole, not resumable as the files lie: ")


def test_a_left_over_folder_beside_single_files_is_no_checkpoint(tmp_path):
    for step in (6, 8):
        torch.save({"model": {"w": torch.ones(2)}, "step": step}, tmp_path / f"step-{step}.pt")
    shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / ".ckptools-deleted-ab-step-5")
    found = ckptools.checkpoints_in(tmp_path)
    assert (steps(found), len(found.left_over)) == ([8, 6], 1)


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


def test_the_step_of_what_cannot_be_opened_is_that_of_its_folder(tmp_path):
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "model.pt").write_bytes(b"PK\3\4 and no more")
    torch.save({"model": {"w": torch.ones(2)}, "step": 5}, tmp_path / "older.pt")
    assert [(row.step, row.whole) for row in ckptools.checkpoints_in(tmp_path).rows] == [(7, False), (5, True)]


@pytest.mark.slow
def test_the_step_is_what_the_files_say_and_a_name_that_tells_another_is_told(run):
    for rank in (0, 1):
        of_step(run, 6, rank).rename(run / f"ep0-ba1-rank{rank}.pt")
    found = ckptools.checkpoints_in(run)
    assert steps(found) == [6, 4, 2]
    row = found.rows[0]
    assert not row.step_agrees and row.codes == ("CK010",)
    assert str(found).count("name says another step") == 1
    assert row.verdict == "whole, 1 warning: file name and content disagree"
    assert found.newest_whole == str(run / "ep0-ba1-rank0.pt")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_folder_for_each_step_is_a_checkpoint_each(folders):
    found = ckptools.checkpoints_in(folders)
    assert [row.name for row in found.rows] == ["step-6", "step-4", "step-2"]


def lose(run: Path) -> None:
    (run / "step-6" / "rank1.pt").unlink()


def below(name: str, *steps: int, lost: bool = False) -> Callable[[Path], None]:
    """Move checkpoints into a folder; the newest of them may lose a rank."""

    def move(run: Path) -> None:
        (run / name).mkdir()
        for step in steps:
            (run / f"step-{step}").rename(run / name / f"step-{step}")
        if lost:
            lose(run / name)

    return move


def nothing(_: Path) -> None:
    pass


def twice(run: Path) -> None:
    shutil.copytree(run / "step-6", run / "step-6-copy")


OLDER = "CK016 names step {}; the newest whole one is step {}"
TRACKED: dict[str, tuple[Callable[[Path], None], str, str, str, int | None, str]] = {
    "the newest": (nothing, "latest", "step-6", "", 6, ""),
    "an older one": (nothing, "latest", "step-4", "warning", 4, OLDER.format(4, 6)),
    "one that is not here": (nothing, "latest", "step-8", "error", None, "CK016 .*which is not here"),
    "a place elsewhere": (nothing, "latest", "../elsewhere", "error", None, "CK016 .*not the plain name"),
    "a folder without any": (
        lambda run: (run / "aside").mkdir(),
        "latest",
        "aside",
        "error",
        None,
        "holds no checkpoint",
    ),
    "one that is not whole": (lose, "latest", "step-6", "error", 6, "CK016 .*is not whole"),
    "an older one of those that are whole": (lose, "latest", "step-2", "warning", 2, OLDER.format(2, 4)),
    "a folder of several, of which one is whole": (below("all", 4, 6, lost=True), "latest", "all", "", 4, ""),
    "an older one beside it": (below("b", 2, 4), "b/latest", "step-2", "warning", 2, OLDER.format(2, 4)),
    "one of two of the newest step": (twice, "latest", "step-6", "", 6, ""),
    "the other of two of the newest step": (twice, "latest", "step-6-copy", "", 6, ""),
}
"""What is done to a run, the tracker and its text, and what is told of it: severity, step, and words."""


@pytest.mark.parametrize("what", TRACKED)
def test_a_tracker_is_held_against_the_checkpoints(what, folders):
    prepare, path, text, severity, step, words = TRACKED[what]
    prepare(folders)
    (folders / path).write_text(text)
    found = ckptools.checkpoints_in(folders)
    (tracker,) = found.trackers
    assert (tracker.name.endswith("latest"), tracker.severity, tracker.step) == (True, severity, step)
    assert re.search(words, tracker.problem) if words else tracker.problem == ""
    whole = all(row.whole for row in found.rows)
    assert found.ok == (whole and severity != "error")


@pytest.mark.slow
def test_a_tracker_of_an_older_checkpoint_is_a_warning_in_words(folders):
    (folders / "latest").write_text("step-4")
    lines = str(ckptools.checkpoints_in(folders)).splitlines()
    assert "  tracker (warning) latest: CK016 names step 4; the newest whole one is step 6" in lines
    assert any(line.split()[-4:] == ["step-4", "latest", "points", "here"] for line in lines)


def test_checkpoints_without_a_step_are_in_the_order_of_their_times_and_called_by_their_names(tmp_path):
    for n, name in enumerate(("b.pt", "c.pt", "a.pt")):
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / name)
        os.utime(tmp_path / name, (1_700_000_000 + n * 60,) * 2)
    (tmp_path / "latest").write_text("c.pt")
    found = ckptools.checkpoints_in(tmp_path)
    assert ([row.name for row in found.rows], found.ordered_by) == (["a.pt", "c.pt", "b.pt"], "file time")
    assert found.newest_whole == str(tmp_path / "a.pt")
    assert [t.problem for t in found.trackers] == ["CK016 names c.pt; the newest whole one is a.pt"]


@pytest.mark.slow
def test_a_checkpoint_without_a_step_comes_after_those_that_have_one(run):
    torch.save({"model": {"w": torch.ones(2)}}, run / "new.pt")
    found = ckptools.checkpoints_in(run)
    assert (steps(found), found.ordered_by) == ([6, 4, 2, None], "step")
    assert found.newest_whole == str(of_step(run, 6))


@pytest.mark.slow
def test_two_steps_that_were_saved_in_one_second_contradict_nothing(folders):
    for file in folders.rglob("*.pt"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    assert not [note for note in ckptools.checkpoints_in(folders).notes if "disagree" in note]


@pytest.mark.slow
def test_a_checkpoint_was_saved_when_its_last_file_was(folders):
    for rank in (0, 1):
        os.utime(folders / "step-6" / f"rank{rank}.pt", (1_700_000_000 + rank * 60,) * 2)
    (row,) = [row for row in ckptools.checkpoints_in(folders).rows if row.step == 6]
    assert row.saved == "2023-11-14T22:14:20Z"


@pytest.mark.slow
def test_text_that_is_called_a_checkpoint_is_none(folders):
    (folders / "notes.pt").write_text("to do\n")
    found = ckptools.checkpoints_in(folders)
    assert found.ok and steps(found) == [6, 4, 2]


def test_links_of_all_ranks_to_one_checkpoint_are_one_tracker(run):
    for rank in (0, 1):
        (run / f"latest-rank{rank}.pt").symlink_to(of_step(run, 6, rank).name)
    found = ckptools.checkpoints_in(run)
    assert [(t.name, t.step, t.problem) for t in found.trackers] == [("latest-rank0.pt and 1 more", 6, "")]
    assert steps(found) == [6, 4, 2]


@pytest.mark.slow
def test_trackers_of_different_kinds_to_one_checkpoint_are_a_row_each(folders):
    for name in ("latest", "last_checkpoint"):
        (folders / name).write_text("step-6")
    found = ckptools.checkpoints_in(folders)
    assert {t.name: t.checkpoint for t in found.trackers} == {"latest": "step-6", "last_checkpoint": "step-6"}
    assert "latest, last_checkpoint point here" in str(found)


@pytest.mark.slow
def test_a_link_out_of_the_folder_is_followed_only_when_asked_to(folders, tmp_path):
    (folders / "step-6").rename(tmp_path / "elsewhere")
    (folders / "step-6").symlink_to(tmp_path / "elsewhere")
    (folders / "latest").symlink_to(tmp_path / "elsewhere")
    found = ckptools.checkpoints_in(folders)
    assert steps(found) == [4, 2]
    assert found.notes == ("1 link out of the folder, not followed (follow_symlinks=True): step-6",)
    assert "out of the folder" in found.trackers[0].problem
    assert 6 in steps(ckptools.checkpoints_in(folders, follow_symlinks=True))


@pytest.mark.slow
def test_a_link_out_of_the_folder_to_what_no_checkpoint_is_called_is_not_noted(folders, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (folders / "notes.txt").symlink_to(tmp_path / "notes.txt")
    assert ckptools.checkpoints_in(folders).notes == ()


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_was_written_just_now_and_is_not_whole_may_not_be_finished(run):
    path = of_step(run, 6, 1)
    path.write_bytes(path.read_bytes()[:5000])
    assert "it may not be finished" in ckptools.checkpoints_in(run).rows[0].notes[0]
    for rank in (0, 1):
        os.utime(of_step(run, 6, rank), (1e9, 1e9))
    torch.save({"model": {"w": torch.ones(2)}, "step": 9}, run / "whole.pt")
    found = ckptools.checkpoints_in(run)
    assert [(row.step, row.notes) for row in found.rows[:2]] == [(9, ()), (6, ())]


# -- any format, any name ----------------------------------------------------------------------------------------


@pytest.mark.slow
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


def test_a_folder_of_a_checkpoint_is_found_as_deep_as_it_is_opened_by_the_folder_above_all(folders, tmp_path):
    (tmp_path / "above" / "a" / "b" / "c").mkdir(parents=True)
    (folders / "step-6").rename(tmp_path / "above" / "a" / "b" / "c" / "step-6")
    assert steps(ckptools.checkpoints_in(tmp_path / "above")) == [ckptools.open(tmp_path / "above").step.value] == [6]


@pytest.mark.slow
def test_what_holds_no_weights_is_no_checkpoint(run):
    torch.save({"ids": torch.arange(40), "step": 9}, run / "dataset.pt")
    assert steps(ckptools.checkpoints_in(run)) == [6, 4, 2]


@pytest.mark.slow
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


def test_a_folder_without_checkpoints_is_said_to_have_none(tmp_path):
    with pytest.raises(UnknownFormatError, match="no checkpoint"):
        ckptools.checkpoints_in(tmp_path)
    (tmp_path / "step-8.tmp").mkdir()
    with pytest.raises(UnknownFormatError, match=r"step-8\.tmp is temporary"):
        ckptools.checkpoints_in(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        ckptools.checkpoints_in(FIXTURES / "README.md")
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "model.pt").touch()
    with pytest.raises(UsageError) as error:
        ckptools.checkpoints_in(tmp_path / "a run" / "model.pt")
    assert error.value.reason.endswith(f"ckptools ls '{tmp_path / 'a run'}'")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ReadError, match="no such file or folder") as error:
        ckptools.checkpoints_in(tmp_path / "gone")
    assert error.value.path == tmp_path / "gone"


def test_a_tracker_in_a_checkpoint_is_compared_with_what_lies_below_it_only(tmp_path):
    """The Trainer leaves DeepSpeed's `latest` in each of its checkpoints, and its own state beside the tag folder."""
    for step in (5, 6):
        folder = Path(shutil.copytree(FIXTURES / "deepspeed-z1-fp32" / "ckpt", tmp_path / f"checkpoint-{step}"))
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    states = folder / "global_step5" / "mp_rank_00_model_states.pt"
    with deepspeed_classes():
        torch.save(torch.load(states, weights_only=False) | {"global_steps": 6}, states)
    found = ckptools.checkpoints_in(tmp_path)
    assert [(row.name, row.step) for row in found.rows] == [("checkpoint-6", 6), ("checkpoint-5", 5)]
    assert [(t.name, t.checkpoint, t.problem) for t in found.trackers] == [
        ("checkpoint-5/latest", "checkpoint-5", ""),
        ("checkpoint-6/latest", "checkpoint-6", ""),
    ]


def test_of_what_cannot_be_opened_it_is_not_said_that_it_has_no_model(run):
    of_step(run, 6, 0).write_bytes(b"nothing that torch wrote")
    of_step(run, 6, 1).write_bytes(b"nothing that torch wrote")
    assert all(NO_MODEL not in row.notes for row in ckptools.checkpoints_in(run, deep=True).rows)
