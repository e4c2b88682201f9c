"""What is going to be written, as `choose` selects it and the writers take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.provenance import Filled
from ckptools.model.regions import Box
from ckptools.model.tree import KeyPath
from ckptools.training_state.sections import Section

FILLS = ("nan", "zero")
"""What may stand in a hole."""


@dataclass
class Selection:
    """What is going to be written.

    Attributes:
        tree: the subtree to write; its tensors have exactly one shard per region.
        model_paths: key paths of the tensors that belong to a model, for `--dtype`.
        left_out: what is not written, by key path: why.
        missing: tensors with holes, by key path: the regions that no file holds.
        filled: `nan` or `zero` where holes are filled with that; empty where such tensors are left out.
        notes: things to tell the user that are no problem.
        places: every section that is written, with its key path in `tree`.
        source: the checkpoint that it was chosen from.
        renamed: every name of the model with its new one; empty where none was asked for.
        part: what was asked for: `model`, `optimizer`, `all` or a glob.
        lost: those that are left out, by key path, because the source has lost them.
        carried: tensors that are written with values which were filled in when the source was, by key path.
        passed_over: errors of the source that are about what is written, and leave neither a gap nor a name.
        told: whether the output carries where it comes from.
    """

    tree: Any
    model_paths: frozenset[KeyPath] = frozenset()
    left_out: dict[KeyPath, str] = field(default_factory=dict)
    missing: dict[KeyPath, tuple[Box, ...]] = field(default_factory=dict)
    filled: str = ""
    notes: list[str] = field(default_factory=list)
    places: tuple[tuple[Section, KeyPath], ...] = ()
    source: Checkpoint | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    part: str = "all"
    lost: frozenset[KeyPath] = frozenset()
    carried: dict[KeyPath, Filled] = field(default_factory=dict)
    passed_over: tuple[Problem, ...] = ()
    told: bool = True

    def moved(self, move: Callable[[KeyPath], KeyPath]) -> Selection:
        """The selection with what is said of key paths said of those that they become; the tree is the caller's."""
        return replace(
            self,
            left_out={move(path): why for path, why in self.left_out.items()},
            missing={move(path): boxes for path, boxes in self.missing.items()},
            lost=frozenset(map(move, self.lost)),
            carried={move(path): filled for path, filled in self.carried.items()},
        )
