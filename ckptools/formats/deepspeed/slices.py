"""How tensor-parallel ranks cut each parameter, as `universal_checkpoint_info` of the model states says.

AutoTP training writes it since 0.18.9, Megatron-DeepSpeed as client state before. Every list in it is of patterns that
match the beginning of a parameter's name. Asked in this order, which is that of DeepSpeed's own converter:

* `autotp_unsupported_parameter_patterns`: a layout that DeepSpeed itself cannot convert, with the reason.
* `affine_map.params` (0.19.8): `logical_shape`, and for each rank the pieces of it that its tensor holds, each with
  shape, offset and strides in both (as of `torch.as_strided`). A piece may be on several ranks, and may be scaled.
* `tp_replicated_parameter_patterns`, `parameter_to_average_patterns`: the same on every rank. The average of copies
  that differ would be no rank's value; copies that should be equal are compared.
* `parameter_with_2_sub_params_cat_dim_0`: two halves on every rank, each joined for itself along dimension 0.
* `parameter_with_sub_params`: parts along `partition_dim`, each cut into the widths of `sub_param_shard_widths`; before
  version 0.4 of this information into equal ones.
* `parameter_with_row_parallelism_patterns`: along dimension 1; everything else along dimension 0.

Padded rows of a vocabulary are kept, as the ranks hold them. Source: checkpoint/ds_to_universal.py (`merge_tp_slices`),
checkpoint/affine.py, module_inject/layers.py (`collect_autotp_universal_checkpoint_info`) of 0.19.6 and 0.19.8; checked
on real files of 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.tensor import Tensor

AFFINE_VERSION = 1
SIMPLE = re.compile(r"\^?(?:[\w.\-/:=, ]|\\[^\w]|\\d|\[[\w\-]+\]|[*+])*\$?")
MAX_REPEATS = 2
"""Patterns come from the file: with more `*` and `+` than this, or groups, matching one could take for ever."""
MAX_NAME = 1000
MAX_PIECES = 1 << 12
_UNESCAPED = re.compile(r"\\(.)", re.DOTALL)


class SliceError(Exception):
    """Why the slices of a parameter cannot be joined."""


class ParameterSlice(NamedTuple):
    """A box of one rank's tensor, and the box of the whole parameter that it is."""

    local: Box
    whole: Box


class Slices(NamedTuple):
    """A parameter's shape, and the pieces of it that each tensor-parallel rank holds."""

    shape: Ints
    by_rank: tuple[tuple[ParameterSlice, ...], ...]


class CutRules:
    """How parameters are cut, by what `universal_checkpoint_info` says of their names."""

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
            SliceError: the information or the shapes do not show it.
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
            found = Slices(shapes[0], tuple((ParameterSlice(Box.whole(s), Box.whole(s)),) for s in shapes))
        else:
            found = _along(shapes, *self._widths(fqn, shapes))
        _check(found, shapes)
        return found

    def _widths(self, fqn: str, shapes: Sequence[Ints]) -> tuple[int, list[list[int]]]:
        """The dimension along which a parameter is cut, and each of its parts' widths by rank."""
        fused = self.fused.of(fqn)
        halved, dim = self.halves.of(fqn) is not None, 0 if self.row_parallel.of(fqn) is None else 1
        if fused is not None and not halved:
            return _sub_params(self.info, fused[1], fused[0], shapes)
        if any(len(s) <= dim for s in shapes):
            raise SliceError(f"cut along dimension {dim} of {list(shapes[0])}")
        if halved:
            # torch.chunk's rule, which gives the first half one row more.
            return 0, [[-(-s[0] // 2) for s in shapes], [s[0] // 2 for s in shapes]]
        return dim, [[s[dim] for s in shapes]]


def _sub_params(
    info: Mapping[Any, Any], entry: Mapping[Any, Any], pattern: str, shapes: Sequence[Ints]
) -> tuple[int, list[list[int]]]:
    """The widths of a fused parameter's parts."""
    dim, spec = entry.get("partition_dim"), entry.get("shape")
    if type(dim) is not int or not isinstance(spec, (list, tuple)) or not 0 <= dim < len(spec):
        raise SliceError("parameter_with_sub_params has no partition_dim of its shape")
    if any(len(s) != len(spec) for s in shapes):
        raise SliceError(f"parameter_with_sub_params sees it as {list(spec)}, not as {list(shapes[0])}")
    stated = info.get("sub_param_shard_widths")
    widths = stated.get(pattern) if isinstance(stated, Mapping) else None
    version = info.get("universal_checkpoint_version")
    if widths is None and isinstance(version, (int, float)) and version >= 0.4:
        raise SliceError("no sub_param_shard_widths for its parts")
    if widths is None:
        total, parts = sum(s[dim] for s in shapes), spec[dim]
        sizes = list(parts) if isinstance(parts, (list, tuple)) else _equal(total, parts)
        if not sizes or any(type(n) is not int or n % len(shapes) for n in sizes):
            raise SliceError(f"parts of {sizes or parts} over {len(shapes)} ranks, and no widths are stated")
        widths = [[n // len(shapes)] * len(shapes) for n in sizes]
    if any(len(w) != len(shapes) or any(type(n) is not int or n < 0 for n in w) for w in widths):
        raise SliceError("sub_param_shard_widths are no number of each rank")
    return dim, [list(w) for w in widths]


def _equal(total: int, parts: Any) -> list[int]:
    return [total // parts] * parts if type(parts) is int and 0 < parts <= total and not total % parts else []


def _along(shapes: Sequence[Ints], dim: int, widths: Sequence[Sequence[int]]) -> Slices:
    """Parts behind each other along `dim`, each in pieces of so many elements by rank."""
    shape = tuple(sum(map(sum, widths)) if d == dim else n for d, n in enumerate(shapes[0]))
    pieces: list[list[ParameterSlice]] = [[] for _ in shapes]
    at, here = 0, [0] * len(shapes)
    for part in widths:
        for rank, width in enumerate(part):
            sizes = tuple(width if d == dim else n for d, n in enumerate(shape))
            local, whole = (tuple(o if d == dim else 0 for d in range(len(shape))) for o in (here[rank], at))
            pieces[rank].append(ParameterSlice(Box(local, sizes), Box(whole, sizes)))
            at, here[rank] = at + width, here[rank] + width
    return Slices(shape, tuple(map(tuple, pieces)))


def _from_affine_map(entry: Any, shapes: Sequence[Ints]) -> Slices:
    """The pieces of every rank, as the map lists them."""
    try:
        shape, ranks = tuple(entry["logical_shape"]), entry["ranks"]
        by_rank = [ranks[r] if r in ranks else ranks[str(r)] for r in range(len(shapes))]
        if len(ranks) != len(shapes) or [tuple(r["shard_shape"]) for r in by_rank] != list(shapes):
            raise SliceError(f"affine_map has other ranks or shapes than {[list(s) for s in shapes]}")
        pieces = tuple(tuple(_piece(p, shape, shapes[r]) for p in by_rank[r]["pieces"]) for r in range(len(shapes)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SliceError(f"affine_map has no pieces of it that can be read ({type(error).__name__})") from error
    return Slices(shape, pieces)


def _piece(entry: Mapping[Any, Any], shape: Ints, shard: Ints) -> ParameterSlice:
    if entry.get("scale", 1.0) != 1.0:
        raise SliceError(f"the ranks hold it scaled by {entry['scale']!r}, which is not undone")
    sizes, (at, steps), (whole_at, whole_steps) = tuple(entry["shape"]), entry["dest"], entry["source"]
    return ParameterSlice(_box(sizes, at, steps, shard), _box(sizes, whole_at, whole_steps, shape))


def _box(sizes: Ints, offset: int, strides: Sequence[int], shape: Ints) -> Box:
    """The box of a tensor of `shape` that a strided view of it is."""
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


def _check(found: Slices, shapes: Sequence[Ints]) -> None:
    """Every rank's pieces fill its tensor, inside the whole, and nothing of that is left out."""
    for shape, pieces in zip(shapes, found.by_rank, strict=True):
        inside = all(p.local.inside(shape) and p.whole.inside(found.shape) for p in pieces if p.local.numel)
        if len(pieces) > MAX_PIECES or not inside or sum(p.local.numel for p in pieces) != prod(shape):
            raise SliceError(f"its pieces do not make up {list(shape)} of {list(found.shape)}; not of one run")


class _Patterns:
    """Values by patterns of names: those of one name looked up, the others tried one by one."""

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
        """The value of the pattern that matches a name; None without."""
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
    """One weight of the state dicts that tensor-parallel ranks have, each with its global rank; a note where not."""
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
