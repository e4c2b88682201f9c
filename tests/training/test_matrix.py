"""Every strategy in every layout: what ckptools consolidates is, bit for bit, what torch's collectives gathered."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptools
from ckptools.training.options import LAYOUTS, STRATEGIES, CreateOptions, ParallelOptions
from tests.demo import same, tensors
from tests.training.forked import run_ranks
from tests.training.matrix import train_and_save


@dataclass(frozen=True)
class Training:
    """One run that is saved in several layouts.

    Attributes:
        strategy: a name of `STRATEGIES`.
        layouts: those in which it is saved.
        world_size: ranks.
        parallel: choices of the strategy.
    """

    strategy: str
    layouts: tuple[str, ...]
    world_size: int = 3
    parallel: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.strategy, *(f"{key}-{value}" for key, value in self.parallel.items())])


def written_with(strategy: str, *without: str) -> tuple[str, ...]:
    return tuple(name for name, strategies in LAYOUTS.items() if strategy in strategies and name not in without)


TRAININGS = (
    Training("ddp", written_with("ddp")),
    Training("fsdp1", written_with("fsdp1", "verl")),
    Training("fsdp1", ("verl", "composer", "dcp"), parallel={"dtensor": True}),
    Training("fsdp1", written_with("fsdp1", "verl"), parallel={"use_orig_params": False}),
    Training("fsdp1", ("verl",), parallel={"use_orig_params": False, "dtensor": True}),
    Training("fsdp1", written_with("fsdp1", "verl"), 4, {"sharding": "hybrid"}),
    Training("fsdp1", ("verl", "composer", "dcp"), 4, {"sharding": "hybrid", "dtensor": True}),
    Training("fsdp1", ("composer", "accelerate"), parallel={"state_dict_type": "full"}),
    Training("fsdp1", ("composer", "accelerate"), parallel={"state_dict_type": "local"}),
    Training("fsdp2", written_with("fsdp2")),
    Training("hsdp", written_with("hsdp"), 4),
    Training("tp", written_with("tp"), 2),
    Training("fsdp2-tp", written_with("fsdp2-tp"), 4),
    Training("hsdp-tp", written_with("hsdp-tp"), 8),
    Training("pipeline", written_with("pipeline")),
    Training("moe", written_with("moe"), 2),
)
"""Every strategy with all its layouts, and the choices that change what is in a file."""

NO_OPTIMIZER = ("huggingface",)
"""Layouts that hold the model alone."""

PREFIXES = {"lightning": "model."}
"""What a layout has in front of the model's own names: the LightningModule's attribute."""

NUMBERED = {("ddp", "accelerate")}
"""An optimizer keyed by number beside safetensors, which are sorted: its names have to be told."""

TIED_ONCE = {("ddp", "accelerate"), *((strategy, "huggingface") for strategy in STRATEGIES)}
"""Layouts that have a tied weight under its first name only."""

CASES = [
    pytest.param(training, layout, id=f"{training.name}-{layout}")
    for training in TRAININGS
    for layout in training.layouts
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the trainings that were asked for so far."""
    return {"": tmp_path_factory.mktemp("matrix")}


def trained(training: Training, runs: dict[str, Path]) -> Path:
    """Train once for all layouts of a training; returns the folder that has a folder for each, and `full.pt`."""
    if training.name not in runs:
        out = runs[""] / training.name
        options = CreateOptions(out, training.strategy, steps=2, parallel=ParallelOptions(**training.parallel))
        run_ranks(training.world_size, train_and_save, options, training.layouts)
        runs[training.name] = out
    return runs[training.name]


def told(training: Training, layout: str, full: Path) -> dict[str, Path]:
    """What a user has to tell, since the files do not: names of an optimizer, shapes of flat parameters."""
    numbered = {"names": full} if (training.strategy, layout) in NUMBERED else {}
    return numbered | ({"shapes": full} if training.parallel.get("state_dict_type") == "local" else {})


def consolidated(folder: Path, out: Path, only: str | None, **told: Path) -> dict[str, torch.Tensor]:
    """What ckptools makes of a checkpoint: tensors of model and optimizer under fqns, by way of a DCP folder."""
    ckptools.open(folder, **told).consolidate(out / "all.dcp", only=only)
    dcp_to_torch_save(out / "all.dcp", out / "all.pt")
    state = torch.load(out / "all.pt", weights_only=False)  # generators of NumPy are in it
    optimizer = nested(state.get("optimizer", {}))
    return dict(tensors({"model": state["model"], "optimizer": optimizer}))


def nested(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by fqn, also where it was saved flat: `state.<fqn>.<slot>`."""
    found: dict[str, Any] = optimizer.get("state", {})
    for key in (key for key in optimizer if key.startswith("state.")):
        fqn, _, slot = key.removeprefix("state.").rpartition(".")
        found.setdefault(fqn, {})[slot] = optimizer[key]
    return found


def truth(full: Path, only: str | None, prefix: str) -> dict[str, torch.Tensor]:
    state = torch.load(full)
    parts = {"model": state["model"], "optimizer": {} if only else state["optimizer"]["state"]}
    return dict(tensors({part: {prefix + fqn: value for fqn, value in parts[part].items()} for part in parts}))


def test_every_strategy_is_trained_in_every_layout_that_it_is_written_in() -> None:
    trained = {(training.strategy, layout) for training in TRAININGS for layout in training.layouts}
    assert trained == {(strategy, layout) for strategy in STRATEGIES for layout in written_with(strategy)}


@pytest.mark.slow
@pytest.mark.parametrize(("training", "layout"), CASES)
def test_what_is_consolidated_is_what_was_trained(
    training: Training, layout: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    out = trained(training, runs)
    only = "model" if layout in NO_OPTIMIZER else None
    found = consolidated(out / layout, tmp_path, only, **told(training, layout, out / "full.pt"))
    expected = truth(out / "full.pt", only, PREFIXES.get(layout, ""))
    if (training.strategy, layout) in TIED_ONCE:
        del expected["model / head.weight"]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same(found[name], expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(("training", "layout"), CASES)
def test_what_was_trained_is_called_whole(training: Training, layout: str, runs: dict[str, Path]) -> None:
    out = trained(training, runs)
    report = ckptools.open(out / layout, **told(training, layout, out / "full.pt")).verify(deep=True)
    assert [problem.code for problem in report.problems if problem.severity == "error"] == []
