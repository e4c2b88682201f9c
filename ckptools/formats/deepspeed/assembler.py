"""Join parameters and their optimizer state by name from the flat tensors of all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import eq
from typing import Any, NamedTuple

from ckptools.formats.deepspeed.files import Place
from ckptools.formats.deepspeed.zero_stages import (
    ModelStates,
    OptimStates,
    PartitionLayout,
    PartitionRun,
    PlacedBox,
    RankOf,
    Where,
    group_of_ids,
    places,
    shards_at,
)
from ckptools.formats.flat_parameters.units import RunBox, flat_source
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.tensor_parallel import BoxPair
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import Vote, same_value, vote
from ckptools.model.regions import Box, Ints, chunk, contiguous_strides
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.tensor_io.copies import stated_checksum
from ckptools.text import KeyPath

# -- how tensor-parallel ranks cut each parameter, by `universal_checkpoint_info` of the model states ------------------
# AutoTP training writes it since 0.18.9, Megatron-DeepSpeed as client state before. Every list in it has patterns that
# match the beginning of a parameter's name. They are tried in this order, which is that of DeepSpeed's own converter:
#
# * `autotp_unsupported_parameter_patterns`: a layout that DeepSpeed itself cannot convert, with the reason.
# * `affine_map.params` (0.19.8): `logical_shape`, and for each rank the pieces of it in its tensor, each with shape,
#   offset and strides in both (as of `torch.as_strided`). A piece may be on several ranks, and may be scaled.
# * `tp_replicated_parameter_patterns`, `parameter_to_average_patterns`: the same on every rank. The average of copies
#   that differ would be no rank's value; copies that should be equal are compared.
# * `parameter_with_2_sub_params_cat_dim_0`: two halves on every rank, each joined by itself along dimension 0.
# * `parameter_with_sub_params`: parts along `partition_dim`, each cut into the widths of `sub_param_shard_widths`;
#   before version 0.4 of this information into equal ones.
# * `parameter_with_row_parallelism_patterns`: along dimension 1; all other parameters along dimension 0.
#
# Padded rows of a vocabulary are kept, as on the ranks. Source: checkpoint/ds_to_universal.py
# (`merge_tp_slices`), checkpoint/affine.py, module_inject/layers.py (`collect_autotp_universal_checkpoint_info`) of
# 0.19.6 and 0.19.8; checked on real files of 0.19.8.

AFFINE_VERSION = 1
SIMPLE = re.compile(r"\^?(?:[\w.\-/:=, ]|\\[^\w]|\\d|\[[\w\-]+\]|[*+])*\$?")
MAX_REPEATS = 2
"""A pattern from the file with more `*` and `+` than this, or with groups, could match for ever, and is refused."""
MAX_NAME = 1000
MAX_PIECES = 1 << 12
_UNESCAPED = re.compile(r"\\(.)", re.DOTALL)


class SliceError(Exception):
    """Why the slices of a parameter cannot be joined."""


class Slices(NamedTuple):
    """A parameter's shape, and each tensor-parallel rank's pieces of it."""

    shape: Ints
    by_rank: tuple[tuple[BoxPair, ...], ...]


class CutRules:
    """How parameters are cut, by their names, according to `universal_checkpoint_info`."""

    def __init__(self, info: Mapping[Any, Any]) -> None:
        self.info = info
        affine = info.get("affine_map")
        self.affine: Mapping[Any, Any] = affine if isinstance(affine, Mapping) else {}
        self.unsupported = _Patterns(info.get("autotp_unsupported_parameter_patterns"))
        self.maps = _Patterns(self.affine.get("params"))
        replicated = ("tp_replicated_parameter_patterns", "parameter_to_average_patterns")
        self.replicated = _Patterns([pattern for key in replicated for pattern in info.get(key) or ()])
        self.halves = _Patterns(info.get("parameter_with_2_sub_params_cat_dim_0"))
        fused = [entry for entry in info.get("parameter_with_sub_params") or () if isinstance(entry, Mapping)]
        self.fused = _Patterns({p: (p, entry) for entry in reversed(fused) for p in entry.get("patterns") or ()})
        self.row_parallel = _Patterns(info.get("parameter_with_row_parallelism_patterns"))

    def slices(self, fqn: str, shapes: Sequence[Ints]) -> Slices:
        """How a parameter is cut over tensor-parallel ranks whose tensors have these shapes, in rank order.

        Raises:
            SliceError: the information or the shapes do not determine it.
        """
        unsupported = self.unsupported.of(fqn)
        if unsupported is not None:
            raise SliceError(f"DeepSpeed itself cannot convert it: {unsupported}")
        entry = self.maps.of(fqn)
        if entry is not None:
            if self.affine.get("version") != AFFINE_VERSION:
                raise SliceError(f"affine_map of version {self.affine.get('version')!r}, known is {AFFINE_VERSION}")
            found = _from_affine_map(entry, shapes)
        elif self.replicated.of(fqn) is not None:
            found = Slices(shapes[0], tuple((BoxPair(Box.whole(s), Box.whole(s)),) for s in shapes))
        else:
            found = _along(shapes, *self._widths(fqn, shapes))
        # Every rank's pieces must fill its tensor, lie inside the whole, and together cover it.
        for shape, pieces in zip(shapes, found.by_rank, strict=True):
            inside = all(p.local.inside(shape) and p.whole.inside(found.shape) for p in pieces if p.local.numel)
            if len(pieces) > MAX_PIECES or not inside or sum(p.local.numel for p in pieces) != prod(shape):
                raise SliceError(f"its pieces do not make up {list(shape)} of {list(found.shape)}; not of one run")
        return found

    def _widths(self, fqn: str, shapes: Sequence[Ints]) -> tuple[int, list[list[int]]]:
        """The dimension along which a parameter is cut, and each of its parts' widths by rank."""
        fused = self.fused.of(fqn)
        halved, dim = self.halves.of(fqn) is not None, 0 if self.row_parallel.of(fqn) is None else 1
        if fused is not None and not halved:
            return self._sub_params(fused[0], fused[1], shapes)
        if any(len(s) <= dim for s in shapes):
            raise SliceError(f"cut along dimension {dim} of {list(shapes[0])}")
        if halved:
            # torch.chunk's rule, which gives the first half one row more.
            return 0, [[-(-s[0] // 2) for s in shapes], [s[0] // 2 for s in shapes]]
        return dim, [[s[dim] for s in shapes]]

    def _sub_params(
        self, pattern: str, entry: Mapping[Any, Any], shapes: Sequence[Ints]
    ) -> tuple[int, list[list[int]]]:
        """The dimension and widths, as in `_widths`, of a fused parameter, as its `entry` states them."""
        dim, spec = entry.get("partition_dim"), entry.get("shape")
        if type(dim) is not int or not isinstance(spec, (list, tuple)) or not 0 <= dim < len(spec):
            raise SliceError("parameter_with_sub_params has no partition_dim of its shape")
        if any(len(s) != len(spec) for s in shapes):
            raise SliceError(f"parameter_with_sub_params sees it as {list(spec)}, not as {list(shapes[0])}")
        stated = self.info.get("sub_param_shard_widths")
        widths = stated.get(pattern) if isinstance(stated, Mapping) else None
        version = self.info.get("universal_checkpoint_version")
        if widths is None and isinstance(version, (int, float)) and version >= 0.4:
            raise SliceError("no sub_param_shard_widths for its parts")
        if widths is None:
            total, parts = sum(s[dim] for s in shapes), spec[dim]
            sizes = list(parts) if isinstance(parts, (list, tuple)) else []
            if type(parts) is int and 0 < parts <= total and not total % parts:
                sizes = [total // parts] * parts
            if not sizes or any(type(n) is not int or n % len(shapes) for n in sizes):
                raise SliceError(f"parts of {sizes or parts} over {len(shapes)} ranks, and no widths are stated")
            widths = [[n // len(shapes)] * len(shapes) for n in sizes]
        if any(len(w) != len(shapes) or any(type(n) is not int or n < 0 for n in w) for w in widths):
            raise SliceError("sub_param_shard_widths are no number of each rank")
        return dim, [list(w) for w in widths]


def _along(shapes: Sequence[Ints], dim: int, widths: Sequence[Sequence[int]]) -> Slices:
    """Parts one after the other along `dim`, each cut into pieces with the given widths by rank."""
    shape = tuple(sum(map(sum, widths)) if d == dim else n for d, n in enumerate(shapes[0]))
    pieces: list[list[BoxPair]] = [[] for _ in shapes]
    at, here = 0, [0] * len(shapes)
    for part in widths:
        for rank, width in enumerate(part):
            sizes = tuple(width if d == dim else n for d, n in enumerate(shape))
            local, whole = (tuple(o if d == dim else 0 for d in range(len(shape))) for o in (here[rank], at))
            pieces[rank].append(BoxPair(Box(local, sizes), Box(whole, sizes)))
            at, here[rank] = at + width, here[rank] + width
    return Slices(shape, tuple(map(tuple, pieces)))


def _from_affine_map(entry: Any, shapes: Sequence[Ints]) -> Slices:
    """Every rank's pieces, as the map lists them."""
    try:
        shape, ranks = tuple(entry["logical_shape"]), entry["ranks"]
        by_rank = [ranks[r] if r in ranks else ranks[str(r)] for r in range(len(shapes))]
        if len(ranks) != len(shapes) or [tuple(r["shard_shape"]) for r in by_rank] != list(shapes):
            raise SliceError(f"affine_map has other ranks or shapes than {[list(s) for s in shapes]}")
        pieces = tuple(tuple(_piece(p, shape, shapes[r]) for p in by_rank[r]["pieces"]) for r in range(len(shapes)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SliceError(f"affine_map has no pieces of it that can be read ({type(error).__name__})") from error
    return Slices(shape, pieces)


def _piece(entry: Mapping[Any, Any], shape: Ints, shard: Ints) -> BoxPair:
    if entry.get("scale", 1.0) != 1.0:
        raise SliceError(f"the ranks hold it scaled by {entry['scale']!r}, which is not undone")
    sizes, (at, steps), (whole_at, whole_steps) = tuple(entry["shape"]), entry["dest"], entry["source"]
    return BoxPair(_box(sizes, at, steps, shard), _box(sizes, whole_at, whole_steps, shape))


def _box(sizes: Ints, offset: int, strides: Sequence[int], shape: Ints) -> Box:
    """The box of a tensor of `shape` that equals a strided view of it."""
    if any(type(n) is not int or n < 0 for n in (*sizes, offset, *strides)) or len(sizes) != len(shape):
        raise SliceError("affine_map has a piece that is no box of it")
    steps = contiguous_strides(shape)
    if prod(sizes) and any(n > 1 and a != b for n, a, b in zip(sizes, strides, steps, strict=True)):
        raise SliceError("affine_map has a piece that is no box of it")
    at = []
    for n, step in zip(shape, steps, strict=True):
        place, offset = divmod(offset, step) if n > 1 else (0, offset)
        at.append(place)
    return Box(tuple(at), sizes)


class _Patterns:
    """Values by patterns of names: literal names are looked up, other patterns tried one by one."""

    def __init__(self, listed: Any) -> None:
        pairs = listed.items() if isinstance(listed, Mapping) else ((p, p) for p in listed or ())
        self.by_name: dict[str, Any] = {}
        self.others: list[tuple[str, Any]] = []
        for pattern, value in pairs:
            name = _UNESCAPED.sub(r"\1", str(pattern)[1:-1])
            if pattern == rf"^{re.escape(name)}$":
                self.by_name[name] = value
            else:
                self.others.append((pattern, value))

    def of(self, fqn: str) -> Any:
        """The value of the pattern that matches a name; None without one."""
        if fqn in self.by_name:
            return self.by_name[fqn]
        for pattern, value in self.others:
            if not isinstance(pattern, str) or not SIMPLE.fullmatch(pattern) or len(fqn) > MAX_NAME:
                raise SliceError("universal_checkpoint_info has a pattern that is not plain enough to be matched")
            if pattern.count("*") + pattern.count("+") > MAX_REPEATS:
                raise SliceError("universal_checkpoint_info has a pattern of too many repeats to be matched")
            if re.match(pattern, fqn):
                return value
        return None


def joined(fqn: str, modules: Sequence[tuple[int, Mapping[str, Any]]], cut: CutRules, ranks: int) -> Any:
    """Join a weight from the state dicts of tensor-parallel ranks, each with its global rank; a note says why not."""
    values = [(rank, module.get(fqn)) for rank, module in modules]
    tensors = [(rank, t) for rank, t in values if isinstance(t, Tensor)]
    if not tensors:
        return values[0][1]
    first = tensors[0][1]
    try:
        odd = next((t.note or t.kind for _, t in tensors if t.note or t.kind != "plain" or t.dtype != first.dtype), "")
        if odd or len(tensors) != ranks:
            raise SliceError(
                f"{len(tensors)} of {ranks} ranks have a plain tensor of one dtype ({odd or 'others not'})"
            )
        found = cut.slices(fqn, [t.shape for _, t in tensors])
    except SliceError as error:
        return replace(first, shards=(), note=f"tensor-parallel over {ranks} ranks: {error}")
    shards = in_rank_order(
        Shard(piece.whole, rank, source.part(piece.local))
        for (rank, tensor), pieces in zip(tensors, found.by_rank, strict=True)
        for source in (shard.source for shard in tensor.shards)
        for piece in pieces
        if source is not None
    )
    whole = replace(first, shape=found.shape, shards=shards)
    return replace(whole, kind="tensor_parallel", world_size=ranks) if len(set(found.by_rank)) > 1 else whole


# -- parameters and their state, put together --------------------------------------------------------------------------


Holder = tuple[int, int]
"""`(mp, group)`."""


@dataclass
class Slot:
    """One slot of the optimizer state, such as `exp_avg`, on all ranks.

    Attributes:
        flats: flat tensors, one value per element.
        scalars: tensors of one element, and plain values, shared by a whole flat tensor.
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
        unequal: each rank's value at those places.
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
                slot, flat = self.slots.setdefault(str(name), Slot()), flat_source(value)
                if flat is not None and flat.shape[0] in (length, stored) and str(name) != "step":
                    slot.flats[mp, dp, k] = flat
                    slot.divided.add((mp, k))
                elif not isinstance(value, Tensor) or (value.numel == 1 and value.kind == "plain"):
                    slot.scalars.setdefault((mp, k), {})[mp, dp, k] = value
                else:
                    slot.others[mp, k] = value

    def join_slices(self, rules: CutRules, ranks: int) -> None:
        """Determine how tensor-parallel ranks cut each parameter from the model states; refuse the others.

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
        """Refuse parameters whose shape differs between pipeline stages; tensor-parallel ranks need not agree."""
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
        """One parameter, or one slot of its state, from the flat tensors that contain it."""
        shape, note = self.shapes[fqn], self.refused.get(fqn, "")
        listed = [] if note else self._places(fqn)
        dtypes = {flats[p.where].dtype: p.where for p in listed if p.where in flats}
        if len(dtypes) > 1:
            a, b = list(dtypes)[:2]
            rank = self.rank_of(dtypes[b])
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, f"dtype {b}, other ranks have {a}", rank, fqn))
        dtype = next(iter(dtypes), None) or next((s.dtype for s in flats.values()), "float32")
        return Tensor(shape, dtype, shards_at(listed, flats), "flat_pieces", world_size=self.world, note=note)

    def _places(self, fqn: str) -> list[PlacedBox]:
        """The boxes of a parameter; the same for its fp32 copy and every slot of its state."""
        if fqn not in self._known:
            # Ranks with the same pieces of it are cut at the same offsets, so that they are replicas.
            alike: dict[tuple[Ints, tuple[BoxPair, ...]], list[PartitionRun]] = {}
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
            text = f"optimizer state of {tensor.numel} elements for a flat tensor of {self.layouts[mp].lengths[group]}"
            way = f"consolidate with {spelled('only', 'model')}"
            note = f"{text}: not one value per element, so it cannot be split by parameter; {way}"
            return Tensor(tensor.shape, tensor.dtype, (), note=note)
        if odd is not None or any(h in slot.divided for h in holders):
            return self.tensor(fqn, slot.flats)
        first = next((h for h in holders if h in slot.scalars), None)
        if first is not None and first not in shared:
            # The ranks of one flat tensor repeat it: keep a replica of each, or the first if it is plain.
            path = ("optimizer", "state", fqn, name)
            ranked = [(self.rank_of(w), value) for w, value in sorted(slot.scalars[first].items(), key=lambda i: i[0])]
            stated = [(rank, stated_checksum(value, whole=True)) for rank, value in ranked]
            sums = vote([(rank, f"CRC-32 {known[1]:08x}") for rank, known in stated if known is not None], eq)
            shared[first] = self._merged(ranked, path)
            if not sums.agree:
                self.differing[path] = sums
        return None if first is None else shared[first]

    def _merged(self, ranked: Sequence[tuple[int, Any]], path: KeyPath) -> Any:
        merge = Merge()
        merged = merge.trees(ranked, path)
        self.problems += merge.problems
        self.differing |= merge.differing
        self.unequal |= {at: merge.values_or_absent(at) for at in merge.differing}
        return merged

    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups with the names of their parameters; groups of pipeline stages are joined."""
        joined_groups: list[dict[str, Any]] = []
        for mp, one in self.layouts.items():
            ranked = [(self.rank_of((mp, dp, 0)), o.param_groups) for (m, dp), o in self.optims.items() if m == mp]
            ranked.sort(key=lambda r: r[0])
            groups = list(self._merged(ranked, ("optimizer", "param_groups"))) if ranked else []
            names = names_by_param_group(groups, one.groups)
            for i, settings in enumerate(groups or [{} for _ in one.groups]):
                _join_group(joined_groups, i, settings, names[i] if i < len(names) else [])
        return joined_groups


def _moved(placed: Iterable[PlacedBox], pieces: Sequence[BoxPair]) -> Iterator[PlacedBox]:
    """Map boxes of one rank's tensor to boxes of the whole parameter, given the tensor's pieces of it."""
    for where, (unread, at, strides) in placed:
        for local, whole in pieces:
            common = unread.box.intersect(local)
            if common is not None:
                inner = common.seen_from(unread.box).offsets
                offsets = tuple(w + o for w, o in zip(whole.offsets, common.seen_from(local).offsets, strict=True))
                first = at + sum(o * step for o, step in zip(inner, strides, strict=True))
                yield PlacedBox(where, RunBox(Shard(Box(offsets, common.sizes), unread.rank, None), first, strides))


def names_by_param_group(groups: list[dict[str, Any]], names: Sequence[Iterable[str]]) -> list[list[str]]:
    """The names in each param group, from the names in its flat tensors; by flat tensor without param groups."""
    if not groups:
        return [list(of_one) for of_one in names]
    found: list[dict[str, None]] = [{} for _ in groups]
    for number, of_one in zip(group_of_ids(groups), names, strict=False):
        found[number] |= dict.fromkeys(of_one)
    return [list(of_group) for of_group in found]


def _join_group(groups: list[dict[str, Any]], number: int, settings: Mapping[Any, Any], names: list[str]) -> None:
    """Add a stage's param group to the group of the same number and settings, else of the same settings."""
    kept = {k: v for k, v in settings.items() if k != "params"}
    alike = (g for g in (*groups[number : number + 1], *groups) if set(g) - {"params"} == set(kept))
    same = next((g for g in alike if all(same_value(g[k], v) for k, v in kept.items())), None)
    if same is None:
        groups.append({**kept, "params": list(names)})
    else:
        same["params"] += [fqn for fqn in names if fqn not in same["params"]]


def frozen_parameters(models: Sequence[ModelStates], cut: int, rank_of: RankOf, world: int) -> dict[str, Tensor]:
    """Frozen parameters of ZeRO-3, from every rank's piece, a tensor of its own in its model states.

    The `models` are those of one model-parallel rank, the lowest first; parameters are cut over `cut` ranks.
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
