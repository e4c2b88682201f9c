"""Two values of every kind that a pickle of torch.save can hold, alike but for one leaf of theirs."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Thing:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    class Inside(enum.Enum):
        """An enum inside of a class, which protocol 2 cannot name."""

        A = "a"
        B = "b"


class Number(enum.IntEnum):
    """An enum of numbers."""

    NONE, ONE = 0, 1


class Flags(enum.Flag):
    """Flags."""

    NONE, ONE = 0, 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass with slots."""

    __slots__ = ("q", "r")
    q: int
    r: str


class List(list[Any]):
    """A list of a class of its own."""


class Dict(dict[Any, Any]):
    """A dict of a class of its own."""


class Set(set[Any]):
    """A set of a class of its own."""


class Int(int):
    """An integer of a class of its own."""


class Str(str):
    """A text of a class of its own."""


Pair = collections.namedtuple("Pair", "u v")


def with_attributes(value: Any, **attributes: Any) -> Any:
    """The value with attributes set on it."""
    for name, one in attributes.items():
        setattr(value, name, one)
    return value


def in_itself(v: Any) -> list[Any]:
    """A list that holds itself, and a value."""
    made: list[Any] = [v]
    made.append(made)
    return made


PYTHON: dict[str, Callable[[int], Any]] = {
    "int": lambda v: v,
    "large int": lambda v: 2**70 + v,
    "huge int": lambda v: (1 << 20_000) + v,
    "float": lambda v: v + 0.5,
    "float by one bit": lambda v: [0.1, np.nextafter(0.1, 1).item()][v],
    "sign of zero": lambda v: [0.0, -0.0][v],
    "sign of NaN": lambda v: [float("nan"), -float("nan")][v],
    "infinity": lambda v: [float("inf"), -float("inf")][v],
    "complex": lambda v: complex(1, v),
    "complex zero": lambda v: [0j, -0j][v],
    "flag": lambda v: bool(v),
    "None or False": lambda v: [None, False][v],
    "text": lambda v: f"a{v}",
    "text of a number": lambda v: [1, "1"][v],
    "long text": lambda v: "x" * 5000 + str(v),
    "text, case": lambda v: "aA"[v],
    "bytes": lambda v: b"a%d" % v,
    "long bytes": lambda v: b"x" * 5000 + b"%d" % v,
    "bytearray": lambda v: bytearray([v] * 4),
    "bytes or bytearray": lambda v: [b"ab", bytearray(b"ab")][v],
    "text or bytes": lambda v: ["a", b"a"][v],
    "int or float": lambda v: [1, 1.0][v],
    "int or flag": lambda v: [1, True][v],
    "list": lambda v: [1, v],
    "list or tuple": lambda v: [[1, 2], (1, 2)][v],
    "list or tuple of dicts": lambda v: [[{}, {"a": 1}], ({}, {"a": 1})][v],
    "lengths": lambda v: [1] * (20 + v),
    "empty": lambda v: [{}, []][v],
    "empty dicts": lambda v: [{}, collections.OrderedDict()][v],
    "long list": lambda v: [*range(2500), v, *range(2500)],
    "long list of floats": lambda v: [*np.arange(5000.0), [5.0, 5][v]],
    "object behind numbers": lambda v: [*range(20), Thing(a=v)],
    "dict behind numbers": lambda v: [*range(20), {"a": {"b": v}}],
    "set": lambda v: {1, 2 + v},
    "frozenset": lambda v: frozenset({v}),
    "set or frozenset": lambda v: [{1}, frozenset({1})][v],
    "set of tuples": lambda v: {(1, v), (3, 4)},
    "set of objects": lambda v: {Frozen(1, "a"), Frozen(v, "b")},
    "dict": lambda v: {"a": 1, "b": {"c": v}},
    "order of keys": lambda v: dict([("a", 1), ("b", 2)][:: 1 - 2 * v]),
    "key or text": lambda v: {[1, "1"][v]: 5},
    "key or flag": lambda v: {[1, True][v]: 5},
    "key or float": lambda v: {[1, 1.0][v]: 5},
    "key of floats": lambda v: {[1.0, "1.0"][v]: 5},
    "key of tuples": lambda v: {("a", v): 5},
    "key or text of a tuple": lambda v: {[("a", 1), "('a', 1)"][v]: 5},
    "key of an enum": lambda v: {Number(v): 5},
    "keys of objects": lambda v: {Frozen(1, "x" * 100): 1, Frozen(2, "x" * 100): v},
    "keys with dots": lambda v: {"a.b": 1, "a": {"b": v}},
    "OrderedDict": lambda v: collections.OrderedDict(a=v),
    "dict or OrderedDict": lambda v: [dict, collections.OrderedDict][v](a=1),
    "attribute of an OrderedDict": lambda v: with_attributes(collections.OrderedDict(a=1), _metadata={"version": v}),
    "other attribute": lambda v: with_attributes(collections.OrderedDict(a=1), hello=v),
    "attribute of an empty one": lambda v: with_attributes(collections.OrderedDict(), _metadata={"version": v}),
    "defaultdict": lambda v: collections.defaultdict(list, a=[v]),
    "factory": lambda v: collections.defaultdict([list, dict][v], a=1),
    "factory of one's own": lambda v: collections.defaultdict([Thing, List][v], {0: 1}),
    "Counter": lambda v: collections.Counter("ab" + "b" * v),
    "deque": lambda v: collections.deque([1, v]),
    "maxlen": lambda v: collections.deque([1], maxlen=5 + v),
    "deque of pairs": lambda v: collections.deque([(1, v), (1, 5)]),
    "deque of lists": lambda v: collections.deque([([1], v)]),
    "ChainMap": lambda v: collections.ChainMap({"a": v}),
    "UserDict": lambda v: collections.UserDict(a=v),
    "namedtuple": lambda v: Pair(1, v),
    "class of a list": lambda v: List([1, v]),
    "attribute of a list": lambda v: with_attributes(List([1, 2]), extra=v),
    "list or one of a class": lambda v: [[1, 2], List([1, 2])][v],
    "class of a dict": lambda v: Dict(a=v),
    "attribute of a dict": lambda v: with_attributes(Dict(a=1), extra=v),
    "class of a set": lambda v: Set([1, v]),
    "class of an int": lambda v: Int(v),
    "class of a text": lambda v: Str(f"a{v}"),
    "object": lambda v: Thing(a=v),
    "object in lists": lambda v: {"k": (1, [Thing(a=[Thing(b=v)])])},
    "object with an int key": lambda v: Thing(a={0: v}),
    "object in itself": lambda v: (lambda t: with_attributes(t, own=t, a=v))(Thing()),
    "list in itself": in_itself,
    "slots": lambda v: Frozen(v, "a"),
    "SimpleNamespace": lambda v: types.SimpleNamespace(a=v),
    "enum": lambda v: Number(v),
    "enum inside of a class": lambda v: [Thing.Inside.A, Thing.Inside.B][v],
    "flags": lambda v: Flags(v),
    "path": lambda v: pathlib.PurePosixPath(f"a/{v}"),
    "long path": lambda v: pathlib.PurePosixPath("a" * 100 + str(v)),
    "Decimal": lambda v: decimal.Decimal(f"1.{v}"),
    "Fraction": lambda v: fractions.Fraction(1 + v, 7),
    "UUID": lambda v: uuid.UUID(int=v),
    "datetime": lambda v: datetime.datetime(2026, 1, 1, microsecond=v),
    "time zone": lambda v: datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=v))),
    "date": lambda v: datetime.date(2026, 1, 1 + v),
    "time": lambda v: datetime.time(1, v),
    "timezone": lambda v: datetime.timezone(datetime.timedelta(hours=v)),
    "timedelta": lambda v: datetime.timedelta(seconds=v),
    "seconds": lambda v: [datetime.timedelta(seconds=5), 5.0][v],
    "range": lambda v: range(3, 10 + v),
    "slice": lambda v: slice(v),
    "Ellipsis": lambda v: [..., None][v],
    "class": lambda v: [dict, list][v],
    "partial": lambda v: functools.partial(int, base=2 + v),
    "exception": lambda v: ValueError(f"x{v}"),
    "array.array": lambda v: array.array("d", [1.0, v]),
    "code of an array.array": lambda v: array.array(["i", "I"][v], [1, 2]),
}  # fmt: skip
"""Values of Python's own classes, and of classes of a user: of 0 and of 1 they differ in one leaf."""

DTYPES = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D", "G", "S3", "U3", "V3",
    "M8[D]", "M8[25us]", "m8[s]", ">i4", ">f8",
]  # fmt: skip


def of_dtype(dtype: str, v: int, shape: tuple[int, ...] = (2, 3)) -> Any:
    """An array of some dtype whose last element alone depends on `v`."""
    made = np.zeros(shape, dtype)
    made.view(f"V{made.itemsize}").reshape(-1)[-1:] = bytes([v]) + bytes(made.itemsize - 1)
    return made


def scalar_of(dtype: str, v: int) -> Any:
    """A scalar of some dtype."""
    return of_dtype(dtype, v, (1,))[0]


RECORD = np.dtype([("a", "i4"), ("b", "f4")])

NUMPY: dict[str, Callable[[int], Any]] = {
    **{f"array of {d}": functools.partial(of_dtype, d) for d in DTYPES},
    **{f"scalar of {d}": functools.partial(scalar_of, d) for d in DTYPES},
    "0-d": lambda v: np.array(v + 0.5),
    "empty shapes": lambda v: np.zeros((0, 3 + v)),
    "shapes": lambda v: np.zeros([(2, 3), (3, 2)][v]),
    "dtypes": lambda v: np.zeros(2, ["i4", "f4"][v]),
    "byte orders": lambda v: np.zeros(2, ["<i4", ">i4"][v]),
    "columns": lambda v: np.asfortranarray(np.arange(6).reshape(2, 3) + v),
    "not contiguous": lambda v: np.arange(12).reshape(3, 4).T[:, ::2] + v,
    "objects": lambda v: np.array([{"z": v}, None], dtype=object),
    "texts as objects": lambda v: np.array(["run", f"tag{v}"], dtype=object),
    "objects in objects": lambda v: np.array([Thing(a=np.array([v, "a"], dtype=object)), 1], dtype=object),
    "records": lambda v: np.array([(1, v)], RECORD),
    "record": lambda v: np.array([(1, v)], RECORD)[0],
    "dtype of records": lambda v: [RECORD, np.dtype([("a", "i4"), ("c", "f4")])][v],
    "fields of records": lambda v: np.zeros(2, [RECORD, np.dtype([("a", "i4"), ("c", "f4")])][v]),
    "subarrays": lambda v: np.zeros(2, [("a", "f4", (2 + v,))]),
    "masked": lambda v: np.ma.array([1, 2, 3], mask=[0, v, 0]),
    "matrix": lambda v: np.matrix([[1, v]]),
    "array or matrix": lambda v: [np.array([[1, 2]]), np.matrix([[1, 2]])][v],
    "dtype": lambda v: np.dtype(["f4", "f8"][v]),
    "Generator": lambda v: np.random.default_rng(v),
    "RandomState": lambda v: np.random.RandomState(v),
    "SeedSequence": lambda v: np.random.SeedSequence(v),
    "number or scalar": lambda v: [1.0, np.float64(1)][v],
    "float32 or float64": lambda v: [np.float32(1), np.float64(1)][v],
    "array or tensor": lambda v: [np.ones(2, "f4"), torch.ones(2)][v],
}  # fmt: skip

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def tensor_of(dtype: torch.dtype, v: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """A tensor whose last element alone depends on `v`."""
    made = torch.zeros(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    made.view(-1)[-1:] = v
    return made.to(dtype)


TORCH: dict[str, Callable[[int], Any]] = {
    **{f"tensor of {d}": functools.partial(tensor_of, d) for d in TORCH_DTYPES},
    "number as a tensor": lambda v: torch.tensor(1.5 + v),
    "sign of a zero in a tensor": lambda v: torch.tensor([0.0, -0.0][v]),
    "sign of a NaN in a tensor": lambda v: torch.tensor([0x7FC00000, -0x400000][v]).int().view(torch.float32),
    "number or tensor": lambda v: [5, torch.tensor(5)][v],
    "dtype of a tensor": lambda v: torch.zeros(2, dtype=[torch.int32, torch.float32][v]),
    "shape of a tensor": lambda v: torch.zeros([(2, 3), (3, 2)][v]),
    "empty tensor": lambda v: torch.zeros(0, 3 + v),
    "requires_grad": lambda v: torch.zeros(2).requires_grad_(bool(v)),
    "parameter": lambda v: torch.nn.Parameter(torch.ones(1) + v),
    "tensor or parameter": lambda v: [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))][v],
    "tensor or buffer": lambda v: [torch.ones(2), torch.nn.Buffer(torch.ones(2))][v],
    "attribute of a tensor": lambda v: with_attributes(torch.ones(2), note=v),
    "attribute of a parameter": lambda v: with_attributes(torch.nn.Parameter(torch.ones(2)), note=v),
    "view": lambda v: torch.arange(12.0).view(3, 4).t()[1:] + v,
    "expanded": lambda v: torch.tensor([[1.0], [v]]).expand(2, 3),
    "conjugate": lambda v: torch.tensor([1 + 1j, v * 1j]).conj(),
    "sparse": lambda v: torch.sparse_coo_tensor([[0, v]], [1.0, 2.0], (4,), check_invariants=False),
    "values of a sparse one": lambda v: torch.sparse_coo_tensor([[0, 1]], [1.0, v], (4,), check_invariants=False),
    "quantized": lambda v: torch.quantize_per_tensor(torch.tensor([1.0, v]), 0.1, 0, torch.qint8),
    "tensor in an object": lambda v: Thing(a=[torch.ones(2) * v]),
    "tensor behind numbers": lambda v: [*range(20), torch.ones(2) * v],
    "Size": lambda v: torch.Size([1, v]),
    "Size or tuple": lambda v: [torch.Size([1, 2]), (1, 2)][v],
    "torch.dtype": lambda v: [torch.float32, torch.bfloat16][v],
    "device": lambda v: torch.device("cuda", v),
    "layout": lambda v: [torch.strided, torch.sparse_coo][v],
    "torch.Generator": lambda v: torch.Generator().manual_seed(v),
    "state of a generator": lambda v: torch.Generator().manual_seed(v).get_state(),
}  # fmt: skip

KINDS = PYTHON | NUMPY | TORCH
