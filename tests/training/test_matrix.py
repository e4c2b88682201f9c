"""Every strategy in every layout: consolidated bit for bit, called whole, and gone on from as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptools
from ckptools.training.options import LAYOUTS, STRATEGIES
from tests.training.resumed import equal, gone_on, put
from tests.training.trainings import FLAT, LOCAL, TRAININGS, Training, to_the_end, written_with
from tools.demo import same, tensors

NO_OPTIMIZER = ("huggingface",)
"""Layouts that hold the model alone."""

NO_RANDOM_STATES = ("torchtitan", "snapshot")
"""Layouts after which the losses are others, though everything that they hold is put where it was."""

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

JOINABLE = [case for case in CASES if case.values[0].choices != LOCAL | FLAT]
"""Not those of which `full.pt` has the shapes and not the order of the flattened parameters."""

RESUMED = [
    pytest.param(training, layout, id=f"{training.name}-{layout}")
    for training in TRAININGS
    if training.resumed
    for layout in training.layouts
]

PUT = [
    pytest.param(training, where, id=f"{training.name}-in-{where}")
    for training in TRAININGS
    for where in training.others
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """What came of the trainings that were asked for so far, by name."""
    return {}


def gone_on_from(training: Training, runs: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Train once and go on from everything; what came of it, by layout, other strategy and folder."""
    if training.name not in runs:
        for other in (other for other in TRAININGS if other.name in training.elsewhere):
            gone_on_from(other, runs, folder)
        runs[training.name] = gone_on(
            folder / training.name,
            training.strategy,
            *training.layouts,
            world_size=training.world_size,
            resumed=training.layouts if training.resumed else (),
            to_the_end=to_the_end(training),
            others=training.others,
            elsewhere=[str(folder / name) for name in training.elsewhere],
            **training.choices,
        )
    return runs[training.name]


def saved(training: Training, runs: dict[str, dict[str, Any]], folder: Path) -> Path:
    """The folder of a training, which has a folder for each layout, and `full.pt` of when they were saved."""
    gone_on_from(training, runs, folder)
    return folder / training.name


def told(training: Training, layout: str, full: Path) -> dict[str, Path]:
    """What a user has to tell, since the files do not: names of an optimizer, shapes of flat parameters."""
    numbered = {"names": full} if (training.strategy, layout) in NUMBERED else {}
    return numbered | ({"shapes": full} if training.choices.get("state_dict_type") == "local" else {})


def consolidated(folder: Path, out: Path, only: str | None, **told: Path) -> dict[str, torch.Tensor]:
    """What ckptools makes of a checkpoint: tensors of model and optimizer under fqns, by way of a DCP folder."""
    ckptools.open(folder, **told).consolidate(out / "all.dcp", only=only, layout="flat")
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


@pytest.mark.parametrize("trainings", [TRAININGS, [training for training in TRAININGS if training.resumed]])
def test_every_strategy_is_saved_and_resumed_in_every_layout_that_it_is_written_in(
    trainings: list[Training],
) -> None:
    tried = {(training.strategy, layout) for training in trainings for layout in training.layouts}
    assert tried == {(strategy, layout) for strategy in STRATEGIES for layout in written_with(strategy)}


def test_from_every_layout_a_run_goes_on_to_the_end() -> None:
    assert {layout for training in TRAININGS for layout in to_the_end(training)} == set(LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize(("training", "layout"), JOINABLE)
def test_what_is_consolidated_is_what_was_trained(
    training: Training, layout: str, runs: dict[str, dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    out = saved(training, runs, folder)
    only = "model" if layout in NO_OPTIMIZER else None
    found = consolidated(out / layout, tmp_path, only, **told(training, layout, out / "full.pt"))
    expected = truth(out / "full.pt", only, PREFIXES.get(layout, ""))
    if (training.strategy, layout) in TIED_ONCE:
        del expected["model / head.weight"]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same(found[name], expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(("training", "layout"), CASES)
def test_what_was_trained_is_called_whole(
    training: Training, layout: str, runs: dict[str, dict[str, Any]], folder: Path
) -> None:
    out = saved(training, runs, folder)
    report = ckptools.open(out / layout, **told(training, layout, out / "full.pt")).verify(deep=True)
    assert [problem.code for problem in report.problems if problem.severity == "error"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("training", "layout"), RESUMED)
def test_a_run_that_begins_with_it_is_bit_for_bit_the_one_that_was_not_stopped(
    training: Training, layout: str, runs: dict[str, dict[str, Any]], folder: Path
) -> None:
    found = gone_on_from(training, runs, folder)[layout]
    if layout in NO_OPTIMIZER:
        assert [name for name in found["put otherwise"] if name.startswith("model / ")] == []
        assert "not in this layout: optimizer, random states, position in the data; starts anew" in found["said"]
    elif layout in NO_RANDOM_STATES:
        assert found["put otherwise"] == (["at"] if layout == "snapshot" else [])
        assert any("random states" in line for line in found["said"])
    else:
        assert equal(found) if layout in to_the_end(training) else put(found), found


@pytest.mark.slow
@pytest.mark.parametrize(("training", "where"), PUT)
def test_another_strategy_has_the_same_tensors(
    training: Training, where: str, runs: dict[str, dict[str, Any]], folder: Path
) -> None:
    found = gone_on_from(training, runs, folder)[where]
    assert found["put otherwise"] == []


@pytest.mark.slow
def test_another_number_of_ranks_has_the_same_tensors(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    (pipeline,) = (training for training in TRAININGS if training.strategy == "pipeline")
    found = gone_on_from(pipeline, runs, folder)
    put = {path: one["put otherwise"] for path, one in found.items() if path.startswith(str(folder))}
    assert len(put) == len(written_with("fsdp2-tp", "huggingface")) + len(written_with("ddp", "huggingface"))
    # The place in the data is where all of the shares that there are now have seen equally much.
    assert {path: names for path, names in put.items() if names and Path(path).name != "snapshot"} == {}
