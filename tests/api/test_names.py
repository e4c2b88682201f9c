"""What is at a name of a checkpoint, numbers that are numbers, and `print`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.truth import FIXTURES

RUN = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"


def text_of(*arguments: str) -> str:
    """What a command prints, without what it remarks beside it."""
    return CliRunner().invoke(app, arguments).stdout.rstrip("\n")


@pytest.fixture(scope="module")
def ck():
    return ckptools.open(RUN)


def test_a_checkpoint_is_a_mapping_of_its_names(ck):
    assert next(iter(ck)) == "model.gate" and len(ck) == len(list(ck)) > 100
    assert all(name in ck for name in ck) and ck[next(iter(ck))] is not None
    assert ck["model.gate"].shape == ck["gate"].shape == (3,) and "gate" in ck and "model" not in ck
    assert ck["step"] == 5 and bool(ck)


def test_the_beginning_of_names_is_a_mapping_of_what_is_below(ck):
    assert list(ck["model"]) == list(ck.model)
    assert set(ck["optim"]) > {name for name in ck["optim"] if name.startswith("state")}
    assert ck["optim"].load().keys() == ck["optim"].keys()


def test_a_name_that_is_not_there_is_told_with_the_nearest(ck):
    with pytest.raises(KeyError, match=r"no 'model\.gat' here; the nearest is 'model\.gate'"):
        ck["model.gat"]
    assert "model.gat" not in ck and 5 not in ck


def test_a_state_dict_loads_as_tensors_of_torch(ck):
    loaded = ck.model.load()
    assert loaded.keys() == ck.model.keys() and all(isinstance(value, torch.Tensor) for value in loaded.values())
    assert torch.equal(loaded["gate"], ck["gate"].load())


def test_a_step_is_a_number_with_its_sources(ck):
    assert ck.step == 5 and ck.step == 5 and int(ck.step) == 5 and range(9)[ck.step] == 5 and ck.step != 6
    assert ck.step.sources and hash(ck.step) == hash(5)
    assert ck.step != ck.step._replace(sources=()) and ck.step == ck.step._replace()


@pytest.mark.parametrize("value", [np.float64(0.25), np.float32(0.25), np.int16(-3), np.bool_(True), np.array(0.5)])
def test_hyperparameters_of_numpy_are_numbers(value, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = value if not isinstance(value, np.ndarray) else value[()]
    torch.save({"model": {"w": weight}, "optimizer": state}, tmp_path / "x.pt")
    (found,) = ckptools.open(tmp_path / "x.pt").optimizers["optimizer"].param_groups
    assert found.lr == value and type(found.lr) is type(value.item())


def test_print_shows_what_the_command_line_shows(ck):
    assert str(ck) == text_of("inspect", str(RUN))
    asked = ck.verify(deep=True, values=True)  # a check that was not asked for names its option, here its argument
    assert str(asked).splitlines()[:8] == text_of("verify", str(RUN), "--deep", "--values").splitlines()[:8]
    assert str(ck.records("model")) == text_of("tree", str(RUN), "--section", "model")
    assert str(ck.show("gate")) == text_of("show", str(RUN), "gate")
    assert [line.split()[0] for line in str(ck.sections).splitlines()][2:] == [s.name for s in ck.sections]
    assert len(repr(ck)) <= 120 and "\n" not in repr(ck.sections)
