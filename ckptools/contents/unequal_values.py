"""What ranks hold at a key where they do not hold the same: a row for each distinct value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptools.contents.entries import Entry
from ckptools.contents.leaves import leaves_of
from ckptools.contents.value_digests import content_of
from ckptools.contents.values import described, full_value, is_short
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.shown import RankValue
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.model.values import Absent

NOTHING = Absent()


class UnequalValues:
    """Finds what ranks of one checkpoint hold at its keys, where that is not the same."""

    def __init__(self, ck: Checkpoint, files: OpenFiles) -> None:
        self._files = files
        self._by_path = {**ck.unequal, **ck.per_rank}
        self._leaves: dict[KeyPath, Mapping[int, Mapping[KeyPath, Any]]] = {}

    def at(self, entry: Entry) -> tuple[RankValue, ...]:
        """A row for each distinct value, that of the lowest rank first; none where no rank is known to differ.

        Of a tensor there is none either: its shards say which rank holds what.
        """
        above = next((entry.path[:n] for n in range(len(entry.path) + 1) if entry.path[:n] in self._by_path), None)
        if above is None or isinstance(entry.value, Tensor):
            return ()
        if above not in self._leaves:
            self._leaves[above] = {rank: dict(leaves_of(value)) for rank, value in self._by_path[above].items()}
        below = entry.path[len(above) :]
        return self._rows({rank: leaves.get(below, NOTHING) for rank, leaves in self._leaves[above].items()})

    def _rows(self, values: Mapping[int, Any]) -> tuple[RankValue, ...]:
        ranks: dict[Any, list[int]] = {}
        for rank in sorted(values):
            ranks.setdefault(self._identity(values[rank]), []).append(rank)
        if len(ranks) < 2:
            return ()
        return tuple(_row(of, values[of[0]]) for of in ranks.values())

    def _identity(self, value: Any) -> Any:
        if isinstance(value, Absent):
            return None
        found = content_of(value, self._files)
        return found.digest or found


def _row(ranks: Iterable[int], value: Any) -> RankValue:
    if isinstance(value, Absent):
        return RankValue(tuple(ranks), None, "nothing there")
    return RankValue(tuple(ranks), full_value(value), "" if is_short(value) else described(value))
