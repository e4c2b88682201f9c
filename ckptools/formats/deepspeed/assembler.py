"""Parameters and their optimizer state by name, put together from the flat tensors of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import eq
from typing import Any

from ckptools.formats.deepspeed.names import Place
from ckptools.formats.deepspeed.partition_layout import PartitionLayout
from ckptools.formats.deepspeed.slices import CutRules, ParameterSlice, SliceError, Slices
from ckptools.formats.deepspeed.states import ModelStates, OptimStates, group_of_ids
from ckptools.formats.deepspeed.zero_stages import PartitionRun, PlacedBox, RankOf, Where, places, shards_at
from ckptools.formats.flat_parameters.flat_runs import RunBox, flat_source
from ckptools.formats.shared.merge import Merge
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import Vote, same_value, vote
from ckptools.model.regions import Box, Ints, chunk
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.tensor_io.copied_files import stated_checksum

NOT_PER_ELEMENT = (
    "optimizer state of {numel} elements for a flat tensor of {length}: not one value per element, so it cannot be "
    "split by parameter; consolidate with --only model"
)

Holder = tuple[int, int]
"""`(mp, group)`."""


@dataclass
class Slot:
    """One slot of the optimizer state, such as `exp_avg`, on all ranks.

    Attributes:
        flats: flat tensors, one value per element.
        scalars: tensors of one element, and plain values, that a whole flat tensor shares.
        others: a tensor that belongs to no parameter in particular.
        divided: groups that have flat tensors of it.
    """

    flats: dict[Where, Source] = field(default_factory=dict)
    scalars: dict[Holder, dict[Where, Any]] = field(default_factory=dict)
    others: dict[Holder, Tensor] = field(default_factory=dict)
    divided: set[Holder] = field(default_factory=set)


class ZeroAssembler:
    """Assembles parameters and their optimizer state from the flat tensors of all ranks.

    Attributes:
        differing: plain values that differ between ranks, with the ranks that have each value.
        unequal: the value of each rank there.
    """

    def __init__(
        self, layouts: Mapping[int, PartitionLayout], optims: Mapping[Place, OptimStates], rank_of: RankOf, world: int
    ) -> None:
        self.layouts, self.rank_of, self.world = layouts, rank_of, world
        self.problems: list[Problem] = []
        self.differing: dict[KeyPath, Vote[Any]] = {}
        self.unequal: dict[KeyPath, Mapping[int, Any]] = {}
        self.optims = optims
        self.masters: dict[Where, Source] = {}
        self.slots: dict[str, Slot] = {}
        for (mp, dp), optim in optims.items():
            self._take(layouts[mp], mp, dp, optim)
        self.shapes: dict[str, Ints] = {}
        self.refused: dict[str, str] = {}
        self._known: dict[str, list[PlacedBox]] = {}
        self.slices: dict[str, Slices] = {}
        for one in layouts.values():
            for fqn, shape in one.shapes.items():
                self.shapes.setdefault(fqn, shape)
            self.refused |= one.refused

    def _take(self, layout: PartitionLayout, mp: int, dp: int, optim: OptimStates) -> None:
        """Sort the content of one rank's file by group and slot."""
        for k, source in enumerate(map(flat_source, optim.masters)):
            if source is not None:
                self.masters[mp, dp, k] = source
        for k, entry in enumerate(optim.slots):
            length = layout.lengths[k] if k < len(layout.lengths) else 0
            stored = self.masters[mp, dp, k].shape[0] if (mp, dp, k) in self.masters else length
            for name, value in entry.items():
                _sort(self.slots.setdefault(str(name), Slot()), str(name), (mp, dp, k), value, {length, stored})

    def join_slices(self, rules: CutRules, ranks: int) -> None:
        """Find how tensor-parallel ranks cut each parameter, from what the model states say; refuse the others.

        The layouts are those of one pipeline stage.
        """
        for fqn in self.shapes:
            shapes = [one.shapes.get(fqn) for one in self.layouts.values()]
            try:
                if len(shapes) != ranks or None in shapes:
                    raise SliceError(
                        f"the model states of {ranks} tensor-parallel ranks are needed, and not all have it"
                    )
                self.slices[fqn] = rules.slices(fqn, [shape for shape in shapes if shape is not None])
                self.shapes[fqn] = self.slices[fqn].shape
            except SliceError as error:
                self.refused.setdefault(fqn, f"tensor-parallel over {ranks} ranks: {error}")

    def check_shapes(self) -> None:
        """Refuse parameters on whose shape pipeline stages disagree; tensor-parallel ranks need not agree."""
        for one in self.layouts.values():
            for fqn, shape in one.shapes.items():
                if shape != self.shapes[fqn]:
                    text = f"shape {list(shape)} on model-parallel rank {one.mp}, {list(self.shapes[fqn])} on another"
                    self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{fqn}"))
                    self.refused[fqn] = text

    def masters_by_name(self) -> dict[str, Tensor]:
        """The fp32 copy of every trainable parameter."""
        return {fqn: self.tensor(fqn, self.masters) for fqn in self.shapes}

    def tensor(self, fqn: str, flats: Mapping[Where, Source]) -> Tensor:
        """One parameter, or one slot of its state, from the flat tensors that hold it."""
        shape, note = self.shapes[fqn], self.refused.get(fqn, "")
        listed = [] if note else self._places(fqn)
        dtype = self._dtype(fqn, listed, flats)
        return Tensor(shape, dtype, shards_at(listed, flats), "flat_pieces", world_size=self.world, note=note)

    def _places(self, fqn: str) -> list[PlacedBox]:
        """The boxes of a parameter; the same for its fp32 copy and every slot of its state."""
        if fqn not in self._known:
            # Ranks with the same pieces of it are cut at the same places, so that they are replicas.
            alike: dict[tuple[Ints, tuple[ParameterSlice, ...]], list[PartitionRun]] = {}
            for tp, one in enumerate(self.layouts.values()):
                pieces = self.slices[fqn].by_rank[tp] if fqn in self.slices else ()
                local = one.shapes[fqn] if pieces else self.shapes[fqn]
                if fqn in one.runs:
                    alike.setdefault((local, pieces), []).extend(one.runs[fqn])
            alike = alike or {(self.shapes[fqn], ()): []}
            placed = ((pieces, places(shape, runs, self.rank_of)) for (shape, pieces), runs in alike.items())
            boxes = [box for pieces, boxes in placed for box in (_moved(boxes, pieces) if pieces else boxes)]
            self._known[fqn] = sorted(boxes, key=lambda placed: placed.box.unread.rank or 0) if self.slices else boxes
        return self._known[fqn]

    def _dtype(self, fqn: str, listed: Sequence[PlacedBox], flats: Mapping[Where, Source]) -> str:
        dtypes = {flats[p.where].dtype: p.where for p in listed if p.where in flats}
        if len(dtypes) > 1:
            a, b = list(dtypes)[:2]
            rank = self.rank_of(dtypes[b])
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, f"dtype {b}, other ranks have {a}", rank, fqn))
        return next(iter(dtypes), None) or next((s.dtype for s in flats.values()), "float32")

    def state(self) -> dict[str, dict[str, Any]]:
        """`{fqn: {slot: tensor or value}}` of every parameter that has a state."""
        state: dict[str, dict[str, Any]] = {fqn: {} for fqn in self.shapes}
        holders: dict[str, list[Holder]] = {fqn: [] for fqn in self.shapes}
        for mp, one in self.layouts.items():
            for k, names in enumerate(one.groups):
                for fqn in names:
                    holders[fqn].append((mp, k))
        for name, slot in self.slots.items():
            shared: dict[Holder, Any] = {}
            for fqn, of_one in holders.items():
                value = self._slot(fqn, name, slot, of_one, shared)
                if value is not None:
                    state[fqn][name] = value
        return {fqn: entry for fqn, entry in state.items() if entry}

    def _slot(self, fqn: str, name: str, slot: Slot, holders: Sequence[Holder], shared: dict[Holder, Any]) -> Any:
        odd = next((h for h in holders if h in slot.others), None)
        if odd is not None and fqn not in self.refused:
            tensor, (mp, group) = slot.others[odd], odd
            note = NOT_PER_ELEMENT.format(numel=tensor.numel, length=self.layouts[mp].lengths[group])
            return Tensor(tensor.shape, tensor.dtype, (), note=note)
        if odd is not None or any(h in slot.divided for h in holders):
            return self.tensor(fqn, slot.flats)
        first = next((h for h in holders if h in slot.scalars), None)
        if first is not None and first not in shared:
            shared[first] = self._shared(("optimizer", "state", fqn, name), slot.scalars[first])
        return None if first is None else shared[first]

    def _shared(self, path: KeyPath, values: Mapping[Where, Any]) -> Any:
        """A value that the ranks of one flat tensor repeat: a replica of each, or the first if it is plain."""
        ranked = [(self.rank_of(where), value) for where, value in sorted(values.items(), key=lambda i: i[0])]
        stated = [(rank, stated_checksum(value, whole=True)) for rank, value in ranked]
        sums = vote([(rank, f"CRC-32 {known[1]:08x}") for rank, known in stated if known is not None], eq)
        merged = self._merged(ranked, path)
        if not sums.agree:
            self.differing[path] = sums
        return merged

    def _merged(self, ranked: Sequence[tuple[int, Any]], path: KeyPath) -> Any:
        merge = Merge()
        merged = merge.trees(ranked, path)
        self.problems += merge.problems
        self.differing |= merge.differing
        self.unequal |= {at: merge.values_or_absent(at) for at in merge.differing}
        return merged

    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups with the names of their parameters; those of pipeline stages are joined."""
        joined_groups: list[dict[str, Any]] = []
        for mp, one in self.layouts.items():
            ranked = [(self.rank_of((mp, dp, 0)), o.param_groups) for (m, dp), o in self.optims.items() if m == mp]
            ranked.sort(key=lambda r: r[0])
            groups = list(self._merged(ranked, ("optimizer", "param_groups"))) if ranked else []
            names = names_by_param_group(groups, one.groups)
            for i, settings in enumerate(groups or [{} for _ in one.groups]):
                _join_group(joined_groups, i, settings, names[i] if i < len(names) else [])
        return joined_groups


def _moved(placed: Iterable[PlacedBox], pieces: Sequence[ParameterSlice]) -> Iterator[PlacedBox]:
    """Boxes of one rank's tensor, as boxes of the whole parameter that the tensor has these pieces of."""
    for where, (unread, at, strides) in placed:
        for local, whole in pieces:
            common = unread.box.intersect(local)
            if common is not None:
                inner = common.seen_from(unread.box).offsets
                offsets = tuple(w + o for w, o in zip(whole.offsets, common.seen_from(local).offsets, strict=True))
                first = at + sum(o * step for o, step in zip(inner, strides, strict=True))
                yield PlacedBox(where, RunBox(Shard(Box(offsets, common.sizes), unread.rank, None), first, strides))


def _sort(slot: Slot, name: str, where: Where, value: Any, lengths: set[int]) -> None:
    source, holder = flat_source(value), (where[0], where[2])
    if source is not None and source.shape[0] in lengths and name != "step":
        slot.flats[where] = source
        slot.divided.add(holder)
    elif not isinstance(value, Tensor) or (value.numel == 1 and value.kind == "plain"):
        slot.scalars.setdefault(holder, {})[where] = value
    else:
        slot.others[holder] = value


def names_by_param_group(groups: list[dict[str, Any]], names: Sequence[Iterable[str]]) -> list[list[str]]:
    """The names of each param group, from those of its flat tensors; without param groups each is one."""
    if not groups:
        return [list(of_one) for of_one in names]
    found: list[dict[str, None]] = [{} for _ in groups]
    for number, of_one in zip(group_of_ids(groups), names, strict=False):
        found[number] |= dict.fromkeys(of_one)
    return [list(of_group) for of_group in found]


def _join_group(groups: list[dict[str, Any]], number: int, settings: Mapping[Any, Any], names: list[str]) -> None:
    """Add a stage's param group to the one of the same number and settings, else of the same settings."""
    kept = {k: v for k, v in settings.items() if k != "params"}
    alike = (g for g in (*groups[number : number + 1], *groups) if set(g) - {"params"} == set(kept))
    same = next((g for g in alike if all(same_value(g[k], v) for k, v in kept.items())), None)
    if same is None:
        groups.append({**kept, "params": list(names)})
    else:
        same["params"] += [fqn for fqn in names if fqn not in same["params"]]


def frozen_parameters(models: Sequence[ModelStates], cut: int, rank_of: RankOf, world: int) -> dict[str, Tensor]:
    """Frozen parameters of ZeRO-3, from every rank's piece, each a tensor of its own in its model states.

    These are of one model-parallel rank, the lowest first; `cut` is the number of ranks that parameters are cut over.
    """
    pieces = {(m.mp, m.dp, 0): m.fragments for m in models}
    found = {}
    for fqn, shape in models[0].frozen.items():
        flats = {w: s for w, own in pieces.items() if fqn in own and (s := flat_source(own[fqn])) is not None}
        ends = ((dp, chunk(prod(shape), cut, dp)) for dp in range(cut))
        runs = [PartitionRun(fqn, start, n, (models[0].mp, dp, 0), 0) for dp, (start, n) in ends if n]
        short = next((r for r in runs if r.where in flats and flats[r.where].shape[0] < r.length), None)
        dtypes, note = {s.dtype for s in flats.values()}, ""
        if short is not None:
            stored = flats[short.where].shape[0]
            note = f"rank {short.where[1]}: {stored} elements of a piece of {short.length}; damaged"
        if len(dtypes) > 1:
            note = f"ranks hold it as {' and '.join(sorted(dtypes))}; the files are not of one run"
        shards = () if note else shards_at(places(shape, runs, rank_of), flats)
        dtype = min(dtypes, default="float32")
        found[fqn] = Tensor(shape, dtype, shards, "flat_pieces", world_size=world, note=note)
    return found
