"""Merge the trees of several ranks into one: shards side by side, replicas kept for comparison, other values compared.

No data is concatenated here. A tensor's place comes from its file's own description (shard list, placements); plain
tensors under one key are replicas of each other, whatever their values. Every disagreement is recorded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptools.model.extents import ExtentFile, ExtentLayout, Extents, extent_file
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import NAMES, Vote, difference, same_inside, same_value, vote
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Absent, NumpyArray, Opaque, empty_like
from ckptools.pickles.alike import Alike, CutKind, Pattern, kind_of, remade
from ckptools.text import KeyPath, fqn_of

# -- the trees of ranks whose files are alike, joined by columns: no object per shard, however many ranks --------------
# The result is that of `Merge` on the trees one by one, except for plain values, which are the first rank's.

MIN_RANKS = 16
"""Fewer ranks are merged one by one, without numpy."""

Ranked = Sequence[tuple[int, Any]]
"""The value of each rank, in rank order: a tree, or the `Alike` that builds one."""


class AlikeGroup(NamedTuple):
    """Ranks that are merged as one.

    Attributes:
        members: the rank and the content of each; a single rank if its file matches no pattern.
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
    groups = [
        AlikeGroup(group, remade(pattern.tree, _Joining(pattern, group).tensor, group[0][1].values))
        for pattern, group in several.items()
    ]
    for rank, content in ranked:
        if not isinstance(content, Alike):
            groups.append(AlikeGroup([(rank, content)], content))
        elif content.pattern not in several:
            groups.append(AlikeGroup([(rank, content)], content.tree()))
    return sorted(groups, key=lambda group: group.members[0][0])


class _Row(NamedTuple):
    """One shard of all tensors that are cut alike.

    Attributes:
        member: the index of its rank among the ranks; None if it is in no file here.
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
        offsets, sizes, files: as in `Extents`.
        locals: the distinct places in the local tensor.
        local_of: the index into `locals` of each shard; None for a shard that is in no file here.
        in_order: whether the members are all ranks, each once and in order.
    """

    members: list[int | None]
    offsets: list[tuple[int, ...]]
    sizes: list[tuple[int, ...]]
    files: list[ExtentFile]
    locals: list[Box]
    local_of: list[int | None]
    in_order: bool


class _Joining:
    def __init__(self, pattern: Pattern, ranked: Sequence[tuple[int, Alike]]) -> None:
        import numpy as np

        self.pattern, self.ranked = pattern, ranked
        self.meshes = [alike.meshes for _, alike in ranked]
        self.files = [extent_file(alike.path, rank, has_items=False) for rank, alike in ranked]
        self.starts = np.array([alike.starts for _, alike in ranked], np.uint64).T.copy()
        self.crcs = np.array([alike.crcs for _, alike in ranked], np.uint32).T.copy()
        self.of_kind: dict[CutKind, _Rows] = {}
        self.whole: dict[tuple[int, ...], _Rows] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        kind = kind_of(tensor)
        local: Tensor = tensor.detail.local if kind is not None else tensor
        source = next((shard.source for shard in local.shards), None)
        if source is None and not tensor.shards:
            return replace(tensor, detail=None)
        if source is None:  # a DTensor without an element on any rank
            assert kind is not None
            rows = self._cut(kind, tensor)
            pairs = zip(rows.offsets, rows.sizes, rows.files, strict=True)
            listed = tuple(Shard(Box(offsets, sizes), file.rank, None) for offsets, sizes, file in pairs)
            return replace(tensor, shards=listed, detail=None)
        if kind is None:
            rows = self.whole.get(tensor.shape) or self._whole(tensor.shape)
        else:
            rows = self.of_kind.get(kind) or self._cut(kind, tensor)
        return replace(tensor, shards=self._shards(source, rows), detail=None)

    def _whole(self, shape: tuple[int, ...]) -> _Rows:
        box = Box.whole(shape)
        self.whole[shape] = made = self._columns([_Row(i, rank, box, box) for i, (rank, _) in enumerate(self.ranked)])
        return made

    def _cut(self, kind: CutKind, tensor: Tensor) -> _Rows:
        """The rows of all tensors that are cut like this one: ranks' pieces, and listed pieces without a file here."""
        rows = [
            _Row(i, rank, place, local)
            for i, ((rank, _), meshes) in enumerate(zip(self.ranked, self.meshes, strict=True))
            for place, local in self.pattern.pieces(kind, tensor, meshes[kind.mesh])
        ]
        found = {row.box for row in rows}
        first = self.pattern.placed(tensor, self.ranked[0][1], self.meshes[0])
        listed = {s.box: s for s in first.shards if not s.was_read and 0 not in s.box.sizes and s.box not in found}
        if listed or len(found) > 1:
            others = [_Row(None, shard.rank, box, box) for box, shard in listed.items()]
            rows = sorted((*others, *rows), key=lambda row: (-1 if row.rank is None else row.rank, row.box.offsets))
        self.of_kind[kind] = made = self._columns(rows)
        return made

    def _columns(self, rows: Sequence[_Row]) -> _Rows:
        members = [row.member for row in rows]
        files = [extent_file(None, row.rank) if row.member is None else self.files[row.member] for row in rows]
        offsets, sizes = [row.box.offsets for row in rows], [row.box.sizes for row in rows]
        places = {box: i for i, box in enumerate(dict.fromkeys(row.local for row in rows))}
        local_of = [None if row.member is None else places[row.local] for row in rows]
        return _Rows(members, offsets, sizes, files, [*places], local_of, members == [*range(len(self.ranked))])

    def _shards(self, source: Source, rows: _Rows) -> Extents:
        at = self.pattern.records[source.record]
        starts, crcs = array("Q", self.starts[at].tobytes()), array("I", self.crcs[at].tobytes())
        if not rows.in_order:
            starts = array("Q", [0 if i is None else starts[i] for i in rows.members])
            crcs = array("I", [0 if i is None else crcs[i] for i in rows.members])
        found: list[ExtentLayout] = [ExtentLayout.of(source.part(box), source.record_span[0]) for box in rows.locals]
        layouts = [None if place is None else found[place] for place in rows.local_of]
        count = len(rows.members)
        return Extents(source.dtype, rows.offsets, rows.sizes, rows.files, starts, [0] * count, layouts, crcs)


# -- trees of several ranks --------------------------------------------------------------------------------------------


MIN_COLUMNS = 16
"""A tensor with at least this many shards keeps them by column; fewer are an object each."""


@dataclass
class Merge:
    """Merges the trees of several ranks, and records their differences.

    Attributes:
        disagreeing: key paths of tensors on whose shape, dtype or layout ranks disagree.
        uneven: key paths of 1-D tensors of different lengths, which may be pieces of a flattened parameter.
        differing: key paths of plain values that differ, with the ranks that have each value.
        partial: key paths that only some ranks have.
        unlike: key paths of foreign objects of one class with different contents.
        roots: the trees that were merged, or the `Alike`s that build them, by the key path where each was put.
    """

    disagreeing: dict[KeyPath, Problem] = field(default_factory=dict)
    uneven: list[KeyPath] = field(default_factory=list)
    differing: dict[KeyPath, Vote[Any]] = field(default_factory=dict)
    partial: list[KeyPath] = field(default_factory=list)
    unlike: list[KeyPath] = field(default_factory=list)
    roots: dict[KeyPath, Ranked] = field(default_factory=dict)
    _groups: dict[KeyPath, dict[int, AlikeGroup]] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        """Disagreements of ranks on the shape, dtype or layout of a tensor."""
        return list(self.disagreeing.values())

    def trees(self, ranked: Ranked, path: KeyPath = ()) -> Any:
        """Merge the subtrees that the ranks have at `path`. Recursion is bounded by the reader's depth budget."""
        self.roots[path] = ranked
        if len({rank for rank, _ in ranked}) < len(ranked):  # no rank stands for its group
            ranked = [(rank, content.tree() if isinstance(content, Alike) else content) for rank, content in ranked]
        if not any(isinstance(content, Alike) for _, content in ranked):
            return self._merged(ranked, path)

        groups = grouped(ranked)
        self._groups[path] = {group.members[0][0]: group for group in groups}
        return self._merged([(group.members[0][0], group.tree) for group in groups], path)

    def root_of(self, path: KeyPath) -> KeyPath | None:
        """The key path of the merged tree that contains `path`, or None."""
        return max((root for root in self.roots if path[: len(root)] == root), key=len, default=None)

    def of_groups(self, path: KeyPath) -> dict[int, Any]:
        """The value at a key path, once for ranks that share it; of each rank if they may differ."""
        root = self.root_of(path) or ()
        groups = self._groups.get(root, {}).values()
        below = path[len(root) :]
        if not groups or any(group.varies(below) for group in groups):
            return self.values(path)
        found = ((group.members[0][0], _at(group.tree, below)) for group in groups)
        return {rank: value for rank, value in found if value is not _NOTHING}

    def _every(self, ranked: Ranked, path: KeyPath) -> Ranked:
        """The values of `ranked` and of the ranks that were merged with them as one, by rank."""
        root = self.root_of(path) or ()
        groups, below = self._groups.get(root, {}), path[len(root) :]
        if all(len(groups[rank].members) == 1 for rank, _ in ranked if rank in groups):
            return ranked
        every: list[tuple[int, Any]] = []
        for first, value in ranked:
            varies = groups[first].varies(below)
            every += ((rank, _at(content, below) if varies else value) for rank, content in groups[first].members)
        return sorted(every, key=lambda pair: pair[0])

    def _varies(self, path: KeyPath) -> bool:
        root = self.root_of(path) or ()
        return any(group.varies(path[len(root) :]) for group in self._groups.get(root, {}).values())

    def values(self, path: KeyPath) -> dict[int, Any]:
        """Each rank's own value at a key path, without ranks that lack it."""
        return {rank: value for rank, value in self._ranked(path) if value is not _NOTHING}

    def values_or_absent(self, path: KeyPath) -> dict[int, Any]:
        """Each rank's value at a key path; `Absent` if its tree was read and lacks it."""
        values = self.values(path)
        return {rank: values.get(rank, ABSENT) for rank, _ in self._ranked(path)} if values else {}

    def _ranked(self, path: KeyPath) -> Ranked:
        """The value, or `_NOTHING`, at `path` of each rank whose tree was read there."""
        root = self.root_of(path)
        ranked = self.roots[root] if root is not None else ()
        return [(rank, _at(tree, path[len(root or ()) :])) for rank, tree in ranked]

    def _merged(self, ranked: Ranked, path: KeyPath) -> Any:
        first = ranked[0][1]
        if any(isinstance(v, Tensor) for _, v in ranked):
            return self._tensors(ranked, path)
        if all(isinstance(v, dict) for _, v in ranked):
            return self._dicts(ranked, path)
        if all(type(v) is type(first) and isinstance(v, (list, tuple)) and len(v) == len(first) for _, v in ranked):
            if not any(isinstance(x, (dict, list, tuple, Tensor)) for x in first):
                self._compare(ranked, path)
                return first
            items = [self._merged([(r, v[i]) for r, v in ranked], (*path, i)) for i in range(len(first))]
            return items if isinstance(first, list) else tuple(items)
        self._compare(ranked, path)
        return first

    def _dicts(self, ranked: Ranked, path: KeyPath) -> Any:
        first = ranked[0][1]
        flat = len(ranked) == 1 and not any(isinstance(v, (dict, list, tuple, Tensor)) for v in first.values())
        if flat and not self._varies(path):
            return first
        if any(isinstance(k, NAMES) for _, v in ranked for k in v):
            ranked = _same_keys(ranked)
            first = ranked[0][1]
        keys = dict.fromkeys(k for _, v in ranked for k in v)
        if len(keys) > len(first) and all(type(k) is int for k in keys):
            keys = dict.fromkeys(sorted(keys))
        merged = empty_like(first)
        for key in keys:
            having = [(r, v[key]) for r, v in ranked if key in v]
            if len(having) < len(ranked):
                self.partial.append((*path, key))
            merged[key] = self._merged(having, (*path, key))
        return merged

    def _compare(self, ranked: Ranked, path: KeyPath) -> None:
        ranked = self._every(ranked, path)
        found = vote(ranked, same_value)
        if not found.agree:
            self.differing[path] = found
        elif isinstance(first := ranked[0][1], (Opaque, NumpyArray)) and not all(
            same_inside(first, other) for _, other in ranked[1:]
        ):
            self.unlike.append(path)

    def _tensors(self, ranked: Ranked, path: KeyPath) -> Any:
        if any(isinstance(v, Tensor) and v.contradictions for _, v in ranked):
            return self._contradicting(ranked, path)
        first = next(v for _, v in ranked if isinstance(v, Tensor))
        if any(difference(first, other) for _, other in ranked):
            found = vote(self._every(ranked, path), lambda a, b: _either_way(a, b) is None)
            self.disagreeing[path] = _disagreement(found, path)
            usual = found.majority[1] if found.majority else ()
            kept = [(r, v) for r, v in ranked if r in usual and isinstance(v, Tensor)]
            return replace(kept[0][1], shards=self._joined(kept)) if kept else first
        if any(other.shape != first.shape for _, other in ranked):
            self.uneven.append(path)
        note = next((v.note for _, v in ranked if v.note), "")
        return replace(first, shards=self._joined(ranked), note=note)

    def _contradicting(self, ranked: Ranked, path: KeyPath) -> Any:
        """The majority's tensor, with the contradictions of the other ranks' pieces."""
        wrong = [
            (rank, why) for rank, v in ranked if isinstance(v, Tensor) for why in dict(v.contradictions[:1]).values()
        ]
        placed = [(r, replace(v, contradictions=()) if isinstance(v, Tensor) else v) for r, v in ranked]
        placed = [(r, v) for r, v in placed if not (isinstance(v, Tensor) and v.kind == "unreadable" and not v.note)]
        merged = self._tensors(placed, path) if placed else ranked[0][1]
        return replace(merged, contradictions=tuple(wrong)) if isinstance(merged, Tensor) else merged

    def _joined(self, ranked: Sequence[tuple[int, Tensor]]) -> Sequence[Shard]:
        """All ranks' own shards, and listed shards that no file has, in rank order."""
        shards = ranked[0][1].shards
        if len(ranked) == 1 and isinstance(shards, Extents):
            return shards
        if any(isinstance(tensor.shards, Extents) for _, tensor in ranked):
            return self._by_column(ranked)
        found: dict[Box, list[Shard]] = {}
        for rank, tensor in ranked:
            for shard in _own(rank, tensor):
                found.setdefault(shard.box, []).append(shard)
        listed = {s.box: s for s in shards if not s.was_read and 0 not in s.box.sizes}
        for box in found:
            listed.pop(box, None)
        every = (*listed.values(), *(s for of_box in found.values() for s in of_box))
        # Replicas are in the order of the ranks already.
        ordered = every if len(found) == 1 and not listed else in_rank_order(every)
        return Extents.of(ordered, ranked[0][1].dtype) if len(ordered) >= MIN_COLUMNS else ordered

    def _by_column(self, ranked: Sequence[tuple[int, Tensor]]) -> Extents:
        """The shards of `_joined`, as columns, for many ranks."""
        first, dtype = ranked[0][1].shards, ranked[0][1].dtype
        made = Extents(dtype, layouts=[], starts=array("Q"), crcs=array("I"))
        found = [
            tensor.extents if isinstance(tensor.shards, Extents) else Extents.of(_own(rank, tensor), dtype)
            for rank, tensor in ranked
        ]
        if not all(of.all_read for of in found):
            boxes = set().union(*(tensor.extents.boxes_read for _, tensor in ranked))
            listed = {s.box: s for s in first if not s.was_read and 0 not in s.box.sizes and s.box not in boxes}
            found = [of.read for of in found]
            made.extend(Extents.of([*listed.values()], dtype))
        for of in found:
            made.extend(of)
        return made.in_rank_order()


def _own(rank: int, tensor: Tensor) -> list[Shard]:
    return [shard if shard.rank == rank else shard._replace(rank=rank) for shard in tensor.found]


_NOTHING = object()

ABSENT = Absent()


def _at(tree: Any, path: KeyPath) -> Any:
    if isinstance(tree, Alike):
        node = _at(tree.pattern.tree, path)
        return node if node is _NOTHING else tree.at(node)
    for key in path:
        if isinstance(tree, dict) and isinstance(key, NAMES):
            tree = next((v for k, v in tree.items() if repr(k) == repr(key)), _NOTHING)
        elif isinstance(tree, dict):
            tree = tree.get(key, _NOTHING)
        else:
            ok = isinstance(tree, (list, tuple)) and type(key) is int and 0 <= key < len(tree)
            tree = tree[key] if ok else _NOTHING
    return tree


def put(tree: Any, path: KeyPath, value: Any) -> Any:
    """Put a value at a key path; dicts and lists of the tree are changed in place, tuples are rebuilt."""
    if not path:
        return value
    child = put(tree[path[0]], path[1:], value)
    if isinstance(tree, tuple):
        return (*tree[: path[0]], child, *tree[path[0] + 1 :])
    tree[path[0]] = child
    return tree


def _same_keys(ranked: Ranked) -> Ranked:
    """The same dicts with one shared object per name that is a key, such as `torch.float32` in a scaler's state."""
    known: dict[str, Any] = {}
    renamed = []
    for rank, values in ranked:
        copied = empty_like(values)
        for key, value in values.items():
            copied[known.setdefault(repr(key), key) if isinstance(key, NAMES) else key] = value
        renamed.append((rank, copied))
    return renamed


def _disagreement(found: Vote[Any], path: KeyPath) -> Problem:
    """Describe how two ranks disagree on a tensor, and name a rank that more than half contradict."""
    usual, usual_ranks = found.majority or found.groups[0]
    value, ranks = next(group for group in found.groups if group[1] != usual_ranks)
    differing = _either_way(usual, value)
    assert differing is not None
    whose = "" if found.odd else f" on rank {ranks[0]}"
    text = f"{differing[0]}{whose}, rank {usual_ranks[0]} has {differing[1]}; the ranks are not of one run"
    return Problem(Code.LAYOUT_DISAGREES, text, ranks[0] if found.odd else None, fqn_of(path), ranks=found.odd)


def _either_way(a: Any, b: Any) -> tuple[str, str] | None:
    """The `difference` between two values, in their order, if one of them is a tensor; else None."""
    if isinstance(a, Tensor):
        return difference(a, b)
    found = difference(b, a) if isinstance(b, Tensor) else None
    return (found[1], found[0]) if found else None
