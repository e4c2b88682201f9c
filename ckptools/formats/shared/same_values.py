"""Whether two ranks say the same: values that pickles hold, foreign objects, and what is stated of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptools.model.tensor import Shard, Tensor
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, Size, TorchName

NAMES = (Global, TorchName, Device)
"""Stand-ins that are keys by identity, so that two files have two of one name."""


def _only_ints(values: Sequence[Any]) -> bool:
    """Python's random state is 625 of them, and a file may hold those of 1,024 ranks: too many to take one by one."""
    return set(map(type, values)) == {int}


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same, NaN included; foreign objects by name, tensors by what is stated of them."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, (NumpyArray, NumpyScalar)):
        return [getattr(a, name) for name in a.__slots__] == [getattr(b, name) for name in b.__slots__]
    if isinstance(a, (TorchName, Device, NumpyDtype)):
        return bool(repr(a) == repr(b))
    if isinstance(a, Global):
        return bool(a.dotted == b.dotted)
    if isinstance(a, Opaque):
        return bool(a.name == b.name)
    if isinstance(a, (list, tuple)) and not isinstance(a, Size):
        if _only_ints(a) and _only_ints(b):
            return bool(a == b)
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())
    if isinstance(a, Tensor):
        return difference(a, b) is None and same_records([*a.shards, *b.shards])
    return bool(a == b)


MAX_INSIDE = 100_000
"""Values in two foreign objects that are held against each other."""


def same_inside(a: Any, b: Any) -> bool:
    """Whether two foreign objects are seen to hold the same values; objects in them may hold one another."""
    stack, seen, left = [(a, b)], set[tuple[int, int]](), MAX_INSIDE
    while stack and left:
        x, y = stack.pop()
        left -= 1
        if type(x) is not type(y) or (id(x), id(y)) in seen:
            if type(x) is not type(y):
                return False
        elif isinstance(x, (Opaque, dict, list, tuple)):
            seen.add((id(x), id(y)))
            pairs = _children_of_both(x, y)
            if pairs is None:
                return False
            stack += pairs
        elif not same_value(x, y):
            return False
    return not stack


def _children_of_both(x: Any, y: Any) -> list[tuple[Any, Any]] | None:
    """What two containers hold at the same keys; None where their keys, or their classes, are not the same."""
    if isinstance(x, Opaque):
        if x.name != y.name:
            return None
        x, y = x.fields, y.fields
    if isinstance(x, dict):
        mine, other = ({repr(k) if isinstance(k, NAMES) else k: v for k, v in one.items()} for one in (x, y))
        return [(mine[k], other[k]) for k in mine] if mine.keys() == other.keys() else None
    return list(zip(x, y, strict=True)) if len(x) == len(y) else None


def difference(a: Tensor, b: Any) -> tuple[str, str] | None:
    """How two ranks describe one tensor differently, the second first; None when they agree.

    Plain tensors of different shapes are no contradiction yet: they may be pieces of a flattened parameter.
    """
    if not isinstance(b, Tensor):
        return f"a {type(b).__name__}", "a tensor"
    if a.kind != b.kind:
        return f"a {b.kind} tensor", f"a {a.kind} one"
    if a.dtype != b.dtype:
        return f"dtype {b.dtype}", a.dtype
    if a.shape != b.shape and not (a.kind == "plain" and len(a.shape) == len(b.shape) == 1):
        return f"shape {list(b.shape)}", str(list(a.shape))
    if a.placements != b.placements or a.mesh != b.mesh:
        return f"placements {b.placements} on mesh {b.mesh}", f"{a.placements} on {a.mesh}"
    if a.sharded and a.kind == "sharded_tensor" and not _same_layout(a, b):
        return "another shard list", f"{len(a.shards)} shards"
    return None


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return [s.box for s in a.shards] == [s.box for s in b.shards]


def same_records(shards: Iterable[Shard]) -> bool:
    """Whether the records that shards lie in have one checksum and length, as far as they state any."""
    stated = {
        tuple((source.crc, source.record_span[1]) for source in s.sources)
        for s in shards
        if s.was_read and all(source.crc for source in s.sources)
    }
    return len(stated) < 2
