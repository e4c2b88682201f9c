"""The trainings of the matrix: every strategy with all its layouts, and the choices that change what is in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptools.training.options import LAYOUTS


@dataclass(frozen=True)
class Training:
    """One run that is saved in several layouts, half-way.

    Attributes:
        strategy: a name of `STRATEGIES`.
        layouts: those in which it is saved.
        world_size: ranks.
        choices: of the strategy.
        resumed: another run begins with each layout, and goes on to the end from those of `to_the_end`.
        others: strategies that go on from the first layout, on as many ranks.
        elsewhere: names of trainings whose checkpoints this one goes on from as well, though of more ranks or fewer.
    """

    strategy: str
    layouts: tuple[str, ...]
    world_size: int = 2
    choices: dict[str, Any] = field(default_factory=dict)
    resumed: bool = True
    others: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.strategy, *(f"{key}-{value}" for key, value in self.choices.items())])


def written_with(strategy: str, *without: str) -> tuple[str, ...]:
    return tuple(name for name, strategies in LAYOUTS.items() if strategy in strategies and name not in without)


DTENSOR = {"dtensor": True}
FLAT = {"use_orig_params": False}
FULL, LOCAL = {"state_dict_type": "full"}, {"state_dict_type": "local"}
HYBRID = {"sharding": "hybrid"}

TRAININGS = (
    Training("ddp", written_with("ddp")),
    Training("fsdp1", written_with("fsdp1", "verl"), 3),
    Training("fsdp1", ("verl", "composer", "dcp"), 3, DTENSOR),
    Training("fsdp1", written_with("fsdp1", "verl"), 3, FLAT, resumed=False),
    Training("fsdp1", ("verl",), 3, FLAT | DTENSOR, resumed=False),
    Training("fsdp1", written_with("fsdp1", "verl"), 4, HYBRID, resumed=False),
    Training("fsdp1", ("verl", "composer", "dcp"), 4, HYBRID | DTENSOR, resumed=False),
    Training("fsdp1", ("composer", "accelerate"), 2, FULL),
    Training("fsdp1", ("composer", "accelerate"), 2, LOCAL, others=("ddp", "tp")),
    Training("fsdp1", ("composer", "accelerate"), 3, LOCAL | FLAT),
    Training("fsdp2", written_with("fsdp2"), 3),
    Training("hsdp", written_with("hsdp"), 4),
    Training("tp", written_with("tp")),
    Training("fsdp2-tp", written_with("fsdp2-tp"), 4, others=("hsdp", "hsdp-tp", "tp")),
    Training("hsdp-tp", written_with("hsdp-tp"), 8, resumed=False),
    Training("hsdp-tp", written_with("hsdp-tp"), 4, {"replicas": 1}),
    Training("pipeline", written_with("pipeline"), 3, elsewhere=("fsdp2-tp", "ddp")),
    Training("moe", written_with("moe"), others=("ddp", "fsdp1", "fsdp2", "pipeline")),
)


def to_the_end(training: Training) -> tuple[str, ...]:
    """The layouts from which a run goes on to the end: one for each training, and each layout once.

    A run whose weights, moments, hyperparameters, random states and place in the data are those of another has its end.
    """
    before = TRAININGS[: TRAININGS.index(training)]
    known = {layout for other in before if other.resumed for layout in other.layouts}
    first, *rest = training.layouts
    return (first, *(layout for layout in rest if layout not in known)) if training.resumed else ()
