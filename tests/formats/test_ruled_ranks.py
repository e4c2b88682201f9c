"""Slices that each rank saved as whole tensors, joined by rules; and options that are for other checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError, UsageError

TRUTH = {"w": torch.arange(60.0).reshape(10, 6), "b": torch.arange(10.0) + 100}


def slices(folder: Path, ranks: int = 4, with_names: bool = False) -> Path:
    """What each rank of FSDP2 has of the tensors, by `to_local()`: the last one has less."""
    folder.mkdir()
    cut = {name: torch.chunk(value, ranks) for name, value in TRUTH.items()}
    for rank in range(ranks):
        model = {name: pieces[rank].clone() for name, pieces in cut.items()}
        moments = {name: {"exp_avg": value / 2} for name, value in model.items()}
        optimizer = {"optimizer": {"state": moments, "param_groups": [{"params": [*model]}]}} if with_names else {}
        torch.save({"model": model, **optimizer, "step": 3}, folder / f"checkpoint_rank_{rank}.pt")
    return folder


def rules(folder: Path, **given: object) -> Path:
    path = folder / "rules.json"
    path.write_text(json.dumps(given or {"*": {"dim": 0}}))
    return path


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_are_joined_along_the_dimension_that_a_rule_says(tmp_path, ranks):
    ck = ckptools.open(slices(tmp_path / "run", ranks), rules=rules(tmp_path))
    ck.consolidate(tmp_path / "out.pt", only="model")
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(found[name], value) for name, value in TRUTH.items())


def test_moments_are_joined_as_the_parameters_that_they_are_named_by(tmp_path):
    ck = ckptools.open(slices(tmp_path / "run", with_names=True), rules=rules(tmp_path))
    ck.consolidate(tmp_path / "out.pt", only="all")
    state = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert all(torch.equal(state[name]["exp_avg"], value / 2) for name, value in TRUTH.items())


def test_slices_that_do_not_fit_a_rule_are_an_error(tmp_path):
    ck = ckptools.open(slices(tmp_path / "run"), rules=rules(tmp_path, w={"dim": 1}))
    assert ("CK104", "model.w") in [(p.code, p.tensor) for p in ck.problems]


def test_no_rank_is_preferred_where_ranks_have_slices(tmp_path):
    with pytest.raises(NotWholeError, match="prefer_rank 0 would write one rank's values for all: 2 of 2 tensors"):
        ckptools.consolidate(slices(tmp_path / "run"), tmp_path / "out.pt", only="model", prefer_rank=0)


def test_rules_that_fit_no_tensor_are_a_mistake(tmp_path):
    with pytest.raises(UsageError, match="no pattern fits a tensor here"):
        ckptools.open(slices(tmp_path / "run"), rules=rules(tmp_path, other={"dim": 0}))


@pytest.mark.parametrize("option", ["--rules", "--weights"])
def test_an_option_that_does_nothing_for_a_checkpoint_is_a_mistake(tmp_path, option):
    torch.save(TRUTH, tmp_path / "model.pt")
    value = rules(tmp_path) if option == "--rules" else "module"
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "model.pt"), option, str(value)])
    assert (done.exit_code, f"{option}: does nothing for" in done.stderr) == (2, True)
