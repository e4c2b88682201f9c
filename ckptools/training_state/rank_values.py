"""Values that each rank has for itself: find the differing ones, and list them by rank.

Random number generators and positions in the data are each rank's own. Models, optimizers and schedulers are shared,
and so is another copy of the model (an average of the weights), anywhere in the tree. For all other values this is
unknown: if they differ, every rank's value is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import children_of, leaf_at, nodes_in, tensors_in
from ckptools.text import KeyPath
from ckptools.training_state.sections import Section, is_gathered, sections_of, tensors_of
from ckptools.training_state.steps import COUNTERS

if TYPE_CHECKING:
    from ckptools.files.opening import OpenFiles
    from ckptools.model.regions import Box
    from ckptools.tensor_io.replicas import Unequal

NOTHING = object()
"""Stands in for the value of a rank that has none."""

WHOLE = ("plain", "quantized", "storage")
"""Kinds of tensors that each rank may have in full for itself."""


class RankValues:
    """The ranks' own values in one checkpoint; `count` is the length of a list by rank."""

    def __init__(self, checkpoint: Checkpoint, files: OpenFiles) -> None:
        from ckptools.tensor_io.fetch_ahead import CopiesAhead

        self._checkpoint, self._files = checkpoint, files
        self._shared = Shared(sections_of(checkpoint))
        ranks = [f.rank for f in checkpoint.files if f.rank is not None]
        self.count = 1 + max([*ranks, *(r for values in checkpoint.per_rank.values() for r in values)], default=0)
        self._known: dict[KeyPath, bool] = {}
        self._ahead, self._equal = CopiesAhead(), set[KeyPath]()

    def at(self, path: KeyPath) -> Mapping[int, Any] | None:
        """The ranks' values at a key path of the tree; None if they do not differ."""
        values = self._checkpoint.per_rank.get(path)
        if values is None:
            return None
        if path not in self._known:
            self._known[path] = self._differs(path)
        return values if self._known[path] else None

    def _differs(self, path: KeyPath) -> bool:
        if any(p[: len(path)] == path for p in self._checkpoint.differing):
            return True
        merged = leaf_at(self._checkpoint.tree, path)
        return any(self.differing(tensor, (*path, *below)) for below, tensor in tensors_in(merged))

    def expect(self, tensors: Iterable[tuple[KeyPath, Tensor]], right: bool = False) -> None:
        """Announce tensors whose copies will be compared, in this order, so that remote copies are fetched together.

        `right` is that of `equal_copies`.
        """
        from ckptools.tensor_io.copies import equal_copies
        from ckptools.tensor_io.fetch_ahead import CopiesAhead

        listed = list(tensors)
        self._ahead, self._equal = CopiesAhead(listed), equal_copies(listed, self._files, right)

    def differing(self, tensor: Tensor, path: KeyPath) -> dict[Box, Unequal]:
        """The boxes of a tensor whose copies differ.

        Raises:
            ReadError: a file cannot be read.
        """
        if path in self._equal:
            return {}
        from ckptools.tensor_io.replicas import differing_boxes

        self._ahead.reach(path)
        return differing_boxes(tensor.found, self._files) if tensor.has_copies else {}

    def of_tensor(self, tensor: Tensor, path: KeyPath) -> Mapping[int, Tensor] | None:
        """Each rank's own copy of a tensor that ranks need not share; None if the copies are equal, or should be."""
        if self._shared.holds(path) or tensor.kind not in WHOLE or not self.differing(tensor, path):
            return None
        ranks = {s.rank for s in tensor.found if s.rank is not None}
        return {rank: replace(tensor, shards=tensor.on_rank(rank)) for rank in sorted(ranks)}

    def listed(self, values: Mapping[int, Any]) -> list[Any]:
        """The values in a list by rank; `NOTHING` for a rank without one."""
        return [values.get(rank, NOTHING) for rank in range(self.count)]

    def own(self) -> Iterator[KeyPath]:
        """Yield every key path where ranks have values of their own."""
        tensors = dict(tensors_of(sections_of(self._checkpoint)))
        self.expect((path, tensor) for path, tensor in tensors.items() if not self._shared.holds(path))
        yield from (path for path in self._checkpoint.per_rank if self.at(path) is not None)
        for path, tensor in tensors.items():
            above = any(path[: len(p)] == p for p in self._checkpoint.per_rank)
            if not above and self.of_tensor(tensor, path) is not None:
                yield path


# -- values that belong to a rank --------------------------------------------------------------------------------------


STRICT = ("model", "optimizer", "scheduler")
DATA_WORDS = frozenset(("sampler", "samplers", "dataloader", "dataloaders", "loader", "loaders", "dataset", "datasets"))
COPY_WORDS = frozenset(("ema", "swa", "shadow", "averaged"))
RUN_NAMES = ("run_name", "run_id", "rank_zero_seed")
"""Keys whose value belongs to the run, not to a rank; the last is Composer's."""


def is_own(section: Section) -> bool:
    """Whether a section is each rank's own: random number generators, a position in the data."""
    return section.kind == "rng" or bool(section.path and _words(section.path[-1]) & DATA_WORDS)


def own_paths(sections: Iterable[Section], world_size: Any) -> list[KeyPath]:
    """Key paths of values that only each rank's own file has, unlike random states that every file lists for all."""
    own = (section for section in sections if is_own(section))
    return [s.path for s in own if not (is_gathered(s.value) and len(s.value) == world_size)]


def counts_steps(path: KeyPath) -> bool:
    """Whether a value counts the steps of the training, which all ranks share."""
    return bool(path) and path[-1] in (*COUNTERS, "last_epoch", "_step_count")


def _words(key: Any) -> set[str]:
    return set(re.split(r"[^a-z]+", str(key).lower()))


def _covers(section: Section, path: KeyPath) -> bool:
    """Whether a path leads into a section; a state dict at the root has other values beside its tensors."""
    if section.path or section.kind != "model" or not path:
        return section.holds(path)
    mine = isinstance(section.value.get(path[0]), Tensor) or "_extra_state" in str(path[0])
    return section.holds(path) and mine


class Shared:
    """The key paths of a tree at which all ranks should have equal values."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._strict = [s for s in sections if s.kind in STRICT]
        others = [s for s in sections if s.kind not in STRICT and not is_own(s)]
        self._shapes = {
            str(path[-1]): tensor.shape
            for s in self._strict
            for path, tensor in (tensors_in(s.value) if s.kind == "model" and not s.keys else ())
            if path
        }
        self._copies = {path for s in others for path in self._copies_in(s)}

    def holds(self, path: KeyPath) -> bool:
        """Whether the value at a key path should be equal on all ranks."""
        if any(_covers(s, path) or s.path[: len(path)] == path for s in self._strict) or path in self._copies:
            return True
        return any(_words(key) & COPY_WORDS for key in path) and not any(_words(key) & DATA_WORDS for key in path)

    def _copies_in(self, section: Section) -> set[KeyPath]:
        """Tensors that have the names and shapes of the model's, or lie in a list with the shapes of several."""
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
