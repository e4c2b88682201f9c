"""Every strategy goes on from every layout that it is written in, in other strategies too, and after a death."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptools.training.options import LAYOUTS, STRATEGIES
from tests.training.resumed import SMALL, equal, gone_on
from tests.training.started import finish, start
from tests.training.test_command import leftovers
from tests.training.test_restart import same_end


def written_with(strategy: str, *without: str) -> tuple[str, ...]:
    return tuple(name for name, strategies in LAYOUTS.items() if strategy in strategies and name not in without)


@dataclass(frozen=True)
class Training:
    """One run that is saved in several layouts.

    Attributes:
        strategy: a name of `STRATEGIES`.
        layouts: those in which it is saved.
        world_size: ranks.
        choices: of the strategy.
        others: strategies that go on from the first layout, on as many ranks.
        elsewhere: names of trainings whose checkpoints this one goes on from as well, though of more ranks or fewer.
        broadcast: also go on with rank 0 reading for all.
    """

    strategy: str
    layouts: tuple[str, ...]
    world_size: int = 2
    choices: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    broadcast: bool = False

    @property
    def name(self) -> str:
        return "-".join([self.strategy, *(f"{key}-{value}" for key, value in self.choices.items())])


LOCAL = {"state_dict_type": "local"}
FLAT = {"use_orig_params": False}

TRAININGS = (
    Training("ddp", written_with("ddp")),
    Training("fsdp1", written_with("fsdp1", "verl")),
    Training("fsdp1", ("verl",), choices={"dtensor": True}),
    Training("fsdp1", ("composer", "accelerate"), choices=LOCAL, others=("ddp", "tp")),
    Training("fsdp1", ("composer", "accelerate"), choices=LOCAL | FLAT),
    Training("fsdp1", ("composer", "accelerate"), choices={"state_dict_type": "full"}),
    Training("fsdp2", written_with("fsdp2")),
    Training("hsdp", written_with("hsdp"), 4),
    Training("tp", written_with("tp")),
    Training("fsdp2-tp", written_with("fsdp2-tp"), 4, others=("ddp", "fsdp1", "fsdp2", "hsdp", "hsdp-tp", "tp")),
    Training("hsdp-tp", written_with("hsdp-tp"), 4, {"replicas": 1}, broadcast=True),
    Training("pipeline", written_with("pipeline"), 3, elsewhere=("fsdp2-tp", "ddp"), broadcast=True),
    Training("moe", written_with("moe"), others=("ddp", "fsdp1", "fsdp2", "pipeline")),
)
"""Every strategy with all its layouts, and the choices that change what is in a file."""

NO_RANDOM_STATES = ("torchtitan", "snapshot")
"""Layouts after which the losses are others, though everything that they hold is put where it was."""

MODEL_ONLY = ("huggingface",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumed")


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
            others=training.others,
            elsewhere=[str(folder / name) for name in training.elsewhere],
            broadcast=training.broadcast,
            **training.choices,
        )
    return runs[training.name]


CASES = [
    pytest.param(training, layout, id=f"{training.name}-{layout}")
    for training in TRAININGS
    for layout in (*training.layouts, *(["broadcast"] if training.broadcast else []))
]

PUT = [
    pytest.param(training, where, id=f"{training.name}-in-{where}")
    for training in TRAININGS
    for where in training.others
]


def test_every_strategy_goes_on_in_every_layout_that_it_is_written_in() -> None:
    tried = {(training.strategy, layout) for training in TRAININGS for layout in training.layouts}
    assert tried == {(strategy, layout) for strategy in STRATEGIES for layout in written_with(strategy)}


@pytest.mark.slow
@pytest.mark.parametrize(("training", "layout"), CASES)
def test_it_ends_bit_for_bit_as_the_run_that_was_not_stopped(
    training: Training, layout: str, runs: dict[str, dict[str, Any]], folder: Path
) -> None:
    found = gone_on_from(training, runs, folder)[layout]
    if layout in MODEL_ONLY:
        assert [name for name in found["put otherwise"] if name.startswith("model / ")] == []
        assert "not in this layout: optimizer, random states, position in the data; starts anew" in found["said"]
    elif layout in NO_RANDOM_STATES:
        assert found["put otherwise"] == (["at"] if layout == "snapshot" else [])
        assert any("random states" in line for line in found["said"])
    else:
        assert equal(found), found


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp-tp", "pipeline", "moe"])
def test_a_death_changes_nothing(strategy: str, runs: dict[str, dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    (training,) = (training for training in TRAININGS if training.strategy == strategy)
    gone_on_from(training, runs, folder)
    size = [word for name in ("vocab", "width", "layers", "context") for word in (f"--{name}", getattr(SMALL, name))]
    choices = [word for name, value in training.choices.items() for word in (f"--{name}", value)]
    asked = ("--strategy", strategy, "--world-size", training.world_size, "--steps", 6, "--batch", 128, "--full")
    dying = ("--save-every", 3, "--kill", "1:5", "--max-restarts", 1)
    ((code, out, err),) = finish([start(tmp_path / "run", *asked, *size, *choices, *dying)])
    assert code == 0, err
    assert "rank 1 is killed\n" in out
    assert ": step 3, epoch " in out
    assert same_end(tmp_path / "run", folder / training.name)
    assert leftovers(str(tmp_path)) == []
