"""Layout of every trainable parameter of one model-parallel rank in the flat tensors of its ZeRO ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptools.formats.deepspeed.states import OptimStates, Shapes
from ckptools.formats.deepspeed.zero_stages import PartitionRun
from ckptools.model.problems import Code, Problem

MAX_WORLD = 1 << 16
"""Most ranks that a group may be cut over; no cluster has more."""


@dataclass
class PartitionLayout:
    """Layout of the trainable parameters of one model-parallel rank in the flat tensors of its ZeRO ranks.

    Attributes:
        groups: names of the parameters by flat tensor: param group, or sub-group in ZeRO-3.
        lengths: elements of each flat tensor, padding included.
        world: ranks that it is cut over; 0 when unknown.
        refused: why a parameter has no place.
        problems: what is wrong with the layout; their ranks are those in the ZeRO group.
    """

    mp: int
    shapes: Shapes = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    runs: dict[str, list[PartitionRun]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    world: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, names: Iterable[str], why: str, rank: int) -> None:
        """Refuse parameters for one reason, which becomes one problem."""
        self.refused |= dict.fromkeys(names, why)
        self.problems.append(Problem(Code.LAYOUT_DISAGREES, why, rank))

    def add(self, runs: Iterable[PartitionRun]) -> None:
        """Add runs of parameters."""
        for run in runs:
            self.runs.setdefault(run.fqn, []).append(run)

    def refuses_other_state(self, optims: Mapping[int, OptimStates], groups: int) -> bool:
        """Refuse when the optimizer numbers other things than the flat tensors."""
        for dp, optim in sorted(optims.items()):
            if (found := len(optim.slots)) not in (0, groups):
                text = f"rank {dp}: the optimizer's state is of {found} tensors, expected {groups} flat ones"
                self.refuse(self.shapes, text, dp)
                return True
        return False
