"""What is one rank's by nature, and what ranks should share: told from the kind of a section, names and shapes.

Random number generators and positions in the data are each rank's own. Models, optimizers and schedulers are shared,
and so is another copy of the model (an average of the weights), wherever it lies. Of everything else nobody can tell:
what differs there is kept for every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, children_of, nodes_in, tensors_in
from ckptools.training_state.sections import Section
from ckptools.training_state.steps import COUNTERS

STRICT = ("model", "optimizer", "scheduler")
DATA_WORDS = frozenset(("sampler", "samplers", "dataloader", "dataloaders", "loader", "loaders", "dataset", "datasets"))
COPY_WORDS = frozenset(("ema", "swa", "shadow", "averaged"))
RUN_NAMES = ("run_name", "run_id", "rank_zero_seed")
"""What is one for a run and all of its ranks; the last is Composer's."""


def is_own(section: Section) -> bool:
    """Whether a section is each rank's own: random number generators, a position in the data."""
    return section.kind == "rng" or bool(section.path and _words(section.path[-1]) & DATA_WORDS)


def counts_steps(path: KeyPath) -> bool:
    """Whether a value counts the steps of the training, which all ranks do together."""
    return bool(path) and path[-1] in (*COUNTERS, "last_epoch", "_step_count")


def _words(key: Any) -> set[str]:
    return set(re.split(r"[^a-z]+", str(key).lower()))


def _covers(section: Section, path: KeyPath) -> bool:
    """Whether a path leads into a section; a state dict at the root holds what else was saved beside its tensors."""
    if section.path or section.kind != "model" or not path:
        return section.holds(path)
    mine = isinstance(section.value.get(path[0]), Tensor) or "_extra_state" in str(path[0])
    return section.holds(path) and mine


class Shared:
    """Tells where in a tree all ranks should have the same."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._strict = [s for s in sections if s.kind in STRICT]
        others = [s for s in sections if s.kind not in STRICT and not is_own(s)]
        self._shapes = {
            str(path[-1]): tensor.shape
            for s in self._strict
            for path, tensor in (tensors_in(s.value) if s.kind == "model" else ())
            if path
        }
        self._copies = {path for s in others for path in self._copies_in(s)}

    def holds(self, path: KeyPath) -> bool:
        """Whether what is at a key path should be the same on all ranks."""
        if any(_covers(s, path) or s.path[: len(path)] == path for s in self._strict) or path in self._copies:
            return True
        return any(_words(key) & COPY_WORDS for key in path) and not any(_words(key) & DATA_WORDS for key in path)

    def _copies_in(self, section: Section) -> set[KeyPath]:
        """Tensors that have the names and shapes of the model's, or in a list the shapes of several."""
        found: set[KeyPath] = set()
        for path, node in nodes_in(section.value, (dict, list, tuple)):
            tensors = [(key, child) for key, child in children_of(node) or () if isinstance(child, Tensor)]
            if self._repeat(tensors, isinstance(node, dict)):
                found |= {(*section.path, *path, key) for key, _ in tensors}
        return found

    def _repeat(self, tensors: Sequence[tuple[Any, Tensor]], named: bool) -> bool:
        if named:
            return any(t.shape and self._shapes.get(str(key)) == t.shape for key, t in tensors)
        known = set(self._shapes.values())
        return len(tensors) > 1 and all(t.shape in known for _, t in tensors) and any(t.shape for _, t in tensors)
