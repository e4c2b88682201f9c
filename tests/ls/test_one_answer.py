"""`ls`, `doctor` and the Python API name the same newest whole checkpoint, and each damaged newer save."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.doctor.answers import NEWEST, WHOLE, Diagnosis
from tests.thorough import examples

KINDS = ("file", "rank files", "dcp", "safetensors")
FATES = ("good", "good", "cut", "empty", "zeros", "unfinished")
STEPS = (100, 200, 300, 400)
MODEL = {"w": torch.ones(300), "b": torch.zeros(3)}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save of every kind and step, each in a folder of its own: `dcp/300/step-300/…`."""
    root = tmp_path_factory.mktemp("saves")
    for step in STEPS:
        for kind in KINDS:
            (root / kind / str(step)).mkdir(parents=True)
        torch.save({"model": MODEL, "step": step}, root / "file" / str(step) / f"ckpt-{step}.pt")
        for rank in range(2):
            torch.save({"model": MODEL, "step": step}, root / "rank files" / str(step) / f"ba{step}-rank{rank}.pt")
        dcp.save({"model": MODEL}, checkpoint_id=root / "dcp" / str(step) / f"step-{step}", no_dist=True)
        (root / "safetensors" / str(step) / f"epoch_{step}").mkdir()
        save_file(MODEL, root / "safetensors" / str(step) / f"epoch_{step}" / "model.safetensors")
    return root


def files_of(save: Path) -> list[Path]:
    return [path for path in sorted(save.rglob("*")) if path.is_file() and path.name != ".metadata"]


def damaged(save: Path, fate: str) -> None:
    """Damage the last file of a save; an unfinished one is what is there before the last file appears."""
    last = files_of(save)[-1]
    data = last.read_bytes()
    if fate == "unfinished":
        metadata = next(save.rglob(".metadata"), None)
        (metadata or last).rename((metadata or last).with_name(f"{(metadata or last).name}.tmp"))
    else:
        last.write_bytes({"cut": data[:60], "empty": b"", "zeros": bytes(len(data))}[fate])


def made(saves: Path, run: Path, kind: str, fates: dict[int, str]) -> Path:
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    for step, fate in fates.items():
        save = Path(shutil.copytree(saves / kind / str(step), run.parent / "one"))
        if fate != "good":
            damaged(save, fate)
        for entry in save.iterdir():
            entry.rename(run / entry.name)
        save.rmdir()
    for path in run.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))  # as a download leaves them
    return run


def texts(found: Diagnosis) -> Iterator[str]:
    return (f"{row.answer} {row.evidence}" for row in found.rows)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.sampled_from(FATES), min_size=2, max_size=4))
def test_every_command_gives_one_answer_about_a_run(saves, tmp_path_factory, kind, drawn):
    fates = dict(zip(STEPS, drawn, strict=False))
    run = made(saves, tmp_path_factory.mktemp("run") / "r", kind, fates)
    good = [step for step, fate in fates.items() if fate == "good"]
    if not good:
        return
    listed, found = ckptools.checkpoints_in(run), ckptools.doctor(run)
    assert listed.newest_whole is not None and str(max(good)) in Path(listed.newest_whole).name
    (newest,) = (row for row in found.rows if row.question == NEWEST)
    assert str(max(good)) in newest.answer
    newer = [step for step in fates if step > max(good)]
    assert all(any(str(step) in text for text in texts(found)) for step in newer)
    named = [step for step, fate in fates.items() if (kind, fate) != ("file", "unfinished")]  # else a left-over alone
    if named[-1] > max(good):
        assert str(named[-1]) in next(row.answer for row in found.rows if row.question == WHOLE)
    codes = [CliRunner().invoke(app, [command, str(run)]).exit_code for command in ("ls", "doctor")]
    assert codes == [int(not listed.ok)] * 2


def saved(path: Path, time: float = 1_700_000_000, **more: Any) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save({"model": MODEL, **more}, path)
    os.utime(path, (time, time))


def test_the_first_answer_about_a_run_is_on_its_newest_save(tmp_path):
    for step in (1000, 2000):
        saved(tmp_path / f"ckpt-{step}.pt", step=step)
    (tmp_path / "ckpt-3000.pt").write_bytes((tmp_path / "ckpt-2000.pt").read_bytes()[:900])
    found = ckptools.doctor(tmp_path)
    assert found.rows[0].ok is False and not found.ok
    assert (
        found.rows[0].answer.startswith("step 3000: is cut short") and "newest whole: step 2000" in found.rows[0].answer
    )


def test_a_number_in_the_name_counts_before_file_times(tmp_path):
    for n, time in ((2, 1_700_000_000), (10, 1_600_000_000)):
        saved(tmp_path / f"checkpoint_{n}.pt", time)
        (tmp_path / f"checkpoint_{n}.pt").rename(tmp_path / f"save_{n}.pt")
    found = ckptools.checkpoints_in(tmp_path)
    assert ([row.name for row in found.rows], found.ordered_by) == (["save_10.pt", "save_2.pt"], "name")
    assert found.notes[0].startswith("numbers in the names and file times disagree: save_10.pt was written before")


def test_of_one_file_time_the_optimizer_s_steps_say_which_is_newer(tmp_path):
    for name, step in (("a", 6), ("b", 3)):
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        for _ in range(step):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / f"{name}.pt")
        os.utime(tmp_path / f"{name}.pt", (1_700_000_000,) * 2)
    found = ckptools.checkpoints_in(tmp_path)
    assert ([row.name for row in found.rows], found.ordered_by) == (["a.pt", "b.pt"], "optimizer steps")


def test_that_nothing_says_which_is_the_newest_is_said(tmp_path):
    for name in ("a.pt", "b.pt"):
        saved(tmp_path / name)
    found = ckptools.checkpoints_in(tmp_path)
    assert found.ordered_by == "nothing" and "nothing says which is the newest of a.pt, b.pt" in found.notes[0]
    (newest,) = (row for row in ckptools.doctor(tmp_path).rows if row.question == NEWEST)
    assert newest.ok is None and newest.answer == "not known; a.pt is whole"


def test_the_step_of_a_file_is_that_of_the_json_with_the_number_in_its_name(tmp_path):
    for step, stated in ((5, 5), (10, 10), (15, 3)):
        saved(tmp_path / f"model_{step:06d}.pt")
        (tmp_path / f"meta_{step:06d}.json").write_text(f'{{"step": {stated}}}')
        for rank in range(2):
            saved(tmp_path / f"optim_{step:06d}_rank{rank}.pt")
    steps = [ckptools.open(tmp_path / f"model_{step:06d}.pt").step.value for step in (5, 10, 15)]
    assert steps == [5, 10, None]
    assert ckptools.open(tmp_path / "optim_000010_rank1.pt").step.sources == ("file name", "meta.step")


@pytest.mark.parametrize("content", [None, b"", b"\0" * 900])
def test_a_save_that_left_nothing_but_its_name_is_a_row(content, tmp_path):
    for step in (1, 2):
        saved(tmp_path / f"step-{step}" / "model.pt")
    if content is None:
        (tmp_path / "step-3").mkdir()
    else:
        (tmp_path / "step-3").mkdir()
        (tmp_path / "step-3" / "model.pt").write_bytes(content)
    found = ckptools.checkpoints_in(tmp_path)
    assert (found.ok, found.rows[0].step, found.rows[0].whole) == (False, 3, False)
    assert found.newest_whole == str(tmp_path / "step-2" / "model.pt")


def test_an_empty_folder_beside_runs_is_no_save(tmp_path):
    saved(tmp_path / "run_1" / "model.pt")
    (tmp_path / "run_2").mkdir()
    assert ckptools.checkpoints_in(tmp_path).checkpoints == 1
