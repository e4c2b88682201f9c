"""The trees of ranks whose files are alike, joined by columns: no object for each shard, whatever the ranks.

What this returns is what `Merge` would make of the trees one by one, but for plain values, which are the first rank's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.model.item_shards import HoldingFile, ItemShards
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.shards import Shards
from ckptools.model.source import ItemLayout, Source
from ckptools.model.tensor import Tensor
from ckptools.pickles.alike import Alike
from ckptools.pickles.patterns import CutKind, Pattern, kind_of
from ckptools.pickles.slot_trees import remade

MIN_RANKS = 16
"""Fewer ranks are merged one by one, without numpy."""

Ranked = Sequence[tuple[int, Any]]
"""What each rank has, in rank order: a tree, or the `Alike` that makes one."""


class AlikeGroup(NamedTuple):
    """Ranks that are merged as one.

    Attributes:
        members: the rank and the content of each; one rank where its file is like no other.
        tree: their trees, joined.
    """

    members: Sequence[tuple[int, Any]]
    tree: Any

    def varies(self, path: Sequence[Any]) -> bool:
        """Whether the ranks may have different plain values at a key path, or below it."""
        return len(self.members) > 1 and path in self.members[0][1].pattern.varying


def grouped(ranked: Ranked) -> list[AlikeGroup]:
    """The groups of ranks that are merged as one, in the order of their first ranks."""
    of_pattern: dict[Pattern, list[tuple[int, Alike]]] = {}
    for rank, content in ranked:
        if isinstance(content, Alike):
            of_pattern.setdefault(content.pattern, []).append((rank, content))
    several = {pattern: group for pattern, group in of_pattern.items() if len(group) >= MIN_RANKS}
    groups = [AlikeGroup(group, _joined(pattern, group)) for pattern, group in several.items()]
    for rank, content in ranked:
        if not isinstance(content, Alike):
            groups.append(AlikeGroup([(rank, content)], content))
        elif content.pattern not in several:
            groups.append(AlikeGroup([(rank, content)], content.tree()))
    return sorted(groups, key=lambda group: group.members[0][0])


class _Row(NamedTuple):
    """One shard of all tensors that are cut alike.

    Attributes:
        member: whose file holds it, by its place among the ranks; None for one that no file here holds.
        rank: that holds it.
        box: its place in the tensor.
        local: its place in the local tensor.
    """

    member: int | None
    rank: int | None
    box: Box
    local: Box


class _Rows(NamedTuple):
    """The columns that all tensors of one kind share.

    Attributes:
        members: as in `_Row`.
        offsets: as in `ItemShards`.
        sizes: likewise.
        files: likewise.
        locals: the places in the local tensor that occur.
        local_of: which of them each shard has; None for a shard that no file here holds.
        in_order: whether the members are all, each once and in order.
    """

    members: list[int | None]
    offsets: list[tuple[int, ...]]
    sizes: list[tuple[int, ...]]
    files: list[HoldingFile]
    locals: list[Box]
    local_of: list[int | None]
    in_order: bool


def _joined(pattern: Pattern, ranked: Sequence[tuple[int, Alike]]) -> Any:
    joining = _Joining(pattern, ranked)
    first = ranked[0][1]
    return remade(pattern.tree, joining.tensor, first.values)


class _Joining:
    """Joins the tensors of ranks that are alike."""

    def __init__(self, pattern: Pattern, ranked: Sequence[tuple[int, Alike]]) -> None:
        import numpy as np

        self.pattern, self.ranked = pattern, ranked
        self.meshes = [alike.meshes for _, alike in ranked]
        self.files = [HoldingFile(alike.path, rank, has_items=False) for rank, alike in ranked]
        self.elsewhere: dict[int | None, HoldingFile] = {}
        self.starts = np.array([alike.starts for _, alike in ranked], np.uint64).T.copy()
        self.crcs = np.array([alike.crcs for _, alike in ranked], np.uint32).T.copy()
        self.of_kind: dict[CutKind, _Rows] = {}
        self.whole: dict[tuple[int, ...], _Rows] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        kind = kind_of(tensor)
        source = _source_of(tensor.detail.local if kind is not None else tensor)
        if source is None:
            return replace(tensor, detail=None) if not tensor.shards else self._without_bytes(tensor)
        if kind is None:
            rows = self.whole.get(tensor.shape) or self._whole(tensor.shape)
        else:
            rows = self.of_kind.get(kind) or self._cut(kind, tensor)
        return replace(tensor, shards=self._shards(source, rows), detail=None)

    def _without_bytes(self, tensor: Tensor) -> Tensor:
        """A DTensor of which no rank has an element."""
        rows = self._cut(kind, tensor) if (kind := kind_of(tensor)) is not None else None
        assert rows is not None
        return replace(tensor, shards=self._listed(rows), detail=None)

    def _listed(self, rows: _Rows) -> Shards:
        pairs = zip(rows.offsets, rows.sizes, rows.files, strict=True)
        return tuple(Shard(Box(offsets, sizes), file.rank, None) for offsets, sizes, file in pairs)

    def _whole(self, shape: tuple[int, ...]) -> _Rows:
        box = Box.whole(shape)
        rows = [_Row(i, rank, box, box) for i, (rank, _) in enumerate(self.ranked)]
        self.whole[shape] = found = self._columns(rows)
        return found

    def _cut(self, kind: CutKind, tensor: Tensor) -> _Rows:
        """Where the ranks' pieces of such a tensor lie, and listed ones that no file here has."""
        rows = list(self._own(kind, tensor))
        found = {row.box for row in rows}
        first = self.pattern.placed(tensor, self.ranked[0][1], self.meshes[0])
        listed = {s.box: s for s in first.shards if not s.was_read and 0 not in s.box.sizes and s.box not in found}
        if listed or len(found) > 1:
            others = [_Row(None, shard.rank, box, box) for box, shard in listed.items()]
            rows = sorted((*others, *rows), key=lambda row: (-1 if row.rank is None else row.rank, row.box.offsets))
        self.of_kind[kind] = made = self._columns(rows)
        return made

    def _own(self, kind: CutKind, tensor: Tensor) -> Iterator[_Row]:
        for i, ((rank, _), meshes) in enumerate(zip(self.ranked, self.meshes, strict=True)):
            for place, local in self.pattern.pieces(kind, tensor, meshes[kind.mesh]):
                yield _Row(i, rank, place, local)

    def _columns(self, rows: Iterable[_Row]) -> _Rows:
        listed = list(rows)
        members = [row.member for row in listed]
        files = [self._file(row) for row in listed]
        offsets, sizes = [row.box.offsets for row in listed], [row.box.sizes for row in listed]
        places = {box: i for i, box in enumerate(dict.fromkeys(row.local for row in listed))}
        local_of = [None if row.member is None else places[row.local] for row in listed]
        return _Rows(members, offsets, sizes, files, [*places], local_of, members == [*range(len(self.ranked))])

    def _file(self, row: _Row) -> HoldingFile:
        if row.member is not None:
            return self.files[row.member]
        return self.elsewhere.setdefault(row.rank, HoldingFile(None, row.rank))

    def _shards(self, source: Source, rows: _Rows) -> Shards:
        at = self.pattern.records[source.record]
        starts, crcs = array("Q", self.starts[at].tobytes()), array("I", self.crcs[at].tobytes())
        if not rows.in_order:
            starts = array("Q", [0 if i is None else starts[i] for i in rows.members])
            crcs = array("I", [0 if i is None else crcs[i] for i in rows.members])
        found: list[ItemLayout] = [ItemLayout.of(source.part(box), source.record_span[0]) for box in rows.locals]
        layouts = [None if place is None else found[place] for place in rows.local_of]
        count = len(rows.members)
        return ItemShards(source.dtype, rows.offsets, rows.sizes, rows.files, starts, [0] * count, layouts, crcs)


def _source_of(tensor: Tensor) -> Source | None:
    """Where the values of a tensor of one shard lie; None of a tensor without values."""
    return next((shard.source for shard in tensor.shards), None)
