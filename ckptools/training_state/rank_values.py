"""What each rank has for itself: which of it differs, and how it is laid side by side, as a list by rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, leaf_at, tensors_in
from ckptools.tensor_io.fetch_ahead import CopiesAhead
from ckptools.tensor_io.replicas import Unequal, differing_boxes
from ckptools.training_state.rank_own import Shared
from ckptools.training_state.sections import sections_of, tensors_of

NOTHING = object()
"""Stands where a rank has nothing."""

WHOLE = ("plain", "quantized")
"""Kinds of tensors that each rank may have all of for itself."""


class RankValues:
    """What ranks of one checkpoint have for themselves.

    Attributes:
        count: ranks that a list by rank has room for, missing ones included.
    """

    def __init__(self, checkpoint: Checkpoint, files: OpenFiles) -> None:
        self._checkpoint, self._files = checkpoint, files
        self._shared = Shared(sections_of(checkpoint))
        ranks = [f.rank for f in checkpoint.files if f.rank is not None]
        self.count = 1 + max([*ranks, *(r for values in checkpoint.per_rank.values() for r in values)], default=0)
        self._known: dict[KeyPath, bool] = {}
        self._ahead = CopiesAhead()

    def at(self, path: KeyPath) -> Mapping[int, Any] | None:
        """What each rank has at a key path of the tree, where they differ; None where they do not."""
        values = self._checkpoint.per_rank.get(path)
        if values is None:
            return None
        if path not in self._known:
            self._known[path] = self._differs(path)
        return values if self._known[path] else None

    def _differs(self, path: KeyPath) -> bool:
        """Whether a plain value does, or else a tensor."""
        if any(p[: len(path)] == path for p in self._checkpoint.differing):
            return True
        merged = leaf_at(self._checkpoint.tree, path)
        return any(self.differing(tensor, (*path, *below)) for below, tensor in tensors_in(merged))

    def expect(self, tensors: Iterable[tuple[KeyPath, Tensor]]) -> None:
        """Take note of tensors whose copies will be compared, in this order; a store is asked for many at once."""
        self._ahead = CopiesAhead(tensors)

    def differing(self, tensor: Tensor, path: KeyPath) -> dict[Box, Unequal]:
        """The regions of a tensor whose copies differ.

        Raises:
            ReadError: a file cannot be read.
        """
        self._ahead.reach(path)
        return differing_boxes(tensor.found, self._files)

    def of_tensor(self, tensor: Tensor, path: KeyPath) -> Mapping[int, Tensor] | None:
        """Each rank's own copy of a tensor that ranks need not share; None where all have the same, or should."""
        if self._shared.holds(path) or tensor.kind not in WHOLE or not self.differing(tensor, path):
            return None
        ranks = {s.rank for s in tensor.found if s.rank is not None}
        return {rank: replace(tensor, shards=tensor.on_rank(rank)) for rank in sorted(ranks)}

    def listed(self, values: Mapping[int, Any]) -> list[Any]:
        """The values by rank; `NOTHING` where a rank has none."""
        return [values.get(rank, NOTHING) for rank in range(self.count)]

    def own(self) -> Iterator[KeyPath]:
        """Every key path where ranks have something of their own."""
        tensors = dict(tensors_of(sections_of(self._checkpoint)))
        self.expect((path, tensor) for path, tensor in tensors.items() if not self._shared.holds(path))
        yield from (path for path in self._checkpoint.per_rank if self.at(path) is not None)
        for path, tensor in tensors.items():
            above = any(path[: len(p)] == p for p in self._checkpoint.per_rank)
            if not above and self.of_tensor(tensor, path) is not None:
                yield path
