"""`ckptools.open(RUN, step=N)`: the checkpoint of a step, with the errors of `--step` in Python's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptools


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4, each in one file."""
    for step in (2, 4):
        torch.save({"model": {"w": torch.full((3,), float(step))}, "step": step}, tmp_path / f"step-{step}.pt")
    return tmp_path


@pytest.mark.parametrize("step", [2, 4])
def test_the_checkpoint_of_a_step_is_opened(run, step):
    ck = ckptools.open(run, step=step)
    assert (ck.path, ck.step) == (run / f"step-{step}.pt", step)
    assert ck.model["w"].load().tolist() == [step] * 3


def test_every_path_may_be_given_with_its_step(run):
    assert ckptools.open([str(run)], step=2).step == 2
    assert ckptools.open(run / "step-2.pt", step=2).step == 2
    assert ckptools.doctor(run, step=2).verdict.whole


def test_another_step_is_refused(run):
    with pytest.raises(ckptools.CkptoolsError, match="none of 2 checkpoints is of step 3: there are 2, 4"):
        ckptools.open(run, step=3)
    with pytest.raises(ckptools.CkptoolsError, match="is of step 2, not of step 4"):
        ckptools.open(run / "step-2.pt", step=4)
    with pytest.raises(ckptools.CkptoolsError, match="is of step 2, not of step 4"):
        ckptools.doctor(run / "step-2.pt", step=4)


def test_a_checkpoint_that_states_no_step_is_refused_in_the_words_of_python(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(ckptools.CkptoolsError, match=r"leave out step$"):
        ckptools.open(tmp_path / "model.pt", step=1)


def test_what_is_no_path_is_refused():
    with pytest.raises(ckptools.CkptoolsError, match="expected a path, found 7"):
        ckptools.open(7, step=1)
