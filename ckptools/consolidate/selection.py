"""What is going to be written, as `choose` selects it and the writers take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptools.model.checkpoint import Checkpoint
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
