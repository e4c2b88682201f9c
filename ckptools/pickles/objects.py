"""Objects that a pickle describes and ckptools keeps as data: storages, numpy's arrays, device meshes, attributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckptools.dtypes import STORAGE_CLASS
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Global, NumpyArray, NumpyDtype, Opaque, describe_for_error

MAX_NDIM = 64
"""Dimensions of a tensor or array; numpy and torch have the same limit."""


class Storage(Opaque):
    """A storage in a persistent id: the source of a tensor's elements.

    Attributes:
        key: the zip entry is `data/<key>`.
        dtype: of its elements; `uint8` for an untyped storage.
        numel: number of elements.
        location: device tag, such as `cpu` or `cuda:3`.
    """

    __slots__ = ("dtype", "key", "location", "numel")

    def __init__(self, kind: str, key: str, location: str, numel: int) -> None:
        super().__init__(f"torch.{kind}")
        self.key = key
        self.dtype = STORAGE_CLASS[kind]
        self.numel = numel
        self.location = location

    @classmethod
    def from_pid(cls, pid: Any) -> Storage:
        """Parse torch's persistent id: `('storage', storage class, key, location, numel)`.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise ValueError("a persistent id that is not torch's")
        kind, key, location, numel = pid[1:5]
        name = kind.name if isinstance(kind, Global) else ""
        if name not in STORAGE_CLASS or not isinstance(key, str) or not isinstance(location, str):
            raise ValueError(f"a storage of unknown type {describe_for_error(name or kind)}")
        if type(numel) is not int or numel < 0:
            raise ValueError(f"storage {describe_for_error(key)} has {describe_for_error(numel)} elements")
        return cls(name, key, location, numel)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object: its state is a dict, or `(dict, slots dict)` for classes with slots."""
    return attributes_in(value.state) if isinstance(value, Opaque) else {}


def attributes_in(state: Any) -> dict[str, Any]:
    """The attributes in a state for an object's `__setstate__`."""
    if isinstance(state, dict):
        return state
    parts = [part for part in state[:2] if isinstance(part, dict)] if isinstance(state, tuple) else []
    if len(parts) > 1:
        return {**parts[0], **parts[1]}
    return parts[0] if parts else {}


# -- the state of numpy's arrays and dtypes, read without numpy --------------------------------------------------------

# Source: numpy/_core/src/multiarray (`array_setstate`, `arraydescr_setstate`).


def build_dtype(target: NumpyDtype, state: Any) -> None:
    """Set a dtype's state: version, byte order, subarray, names, fields, size, alignment, flags, and a time's unit.

    Raises:
        ValueError: numpy does not write such a state.
    """
    _, order, subarray, names, fields, *rest = state
    itemsize, _, flags, last = (*rest, *(-1, 1, 0, None)[len(rest) :])[:4]  # older states are shorter
    if not isinstance(order, str) or order not in ("<", ">", "|", "="):
        raise ValueError(f"a numpy dtype of byte order {describe_for_error(order)}")
    if names is not None:
        record = target.dtype == RECORD
        target.dtype = structured(
            _fields(names, fields), itemsize, type(flags) is int and bool(flags & ALIGNED), record
        )
        return
    if subarray is not None:
        base, shape = subarray
        target.dtype = subarray_of(base.dtype, array_shape(shape if isinstance(shape, tuple) else (shape,)))
        return
    plain = target.dtype.lstrip("<>|=")
    if plain in ("M8", "m8"):
        plain += _time_unit(last)
    target.dtype = order.replace("=", "<") + plain


RECORD = "numpy.record"
ALIGNED = 0x80
"""`NPY_ALIGNED_STRUCT` among a dtype's flags; source: numpy/_core/include/numpy/ndarraytypes.h."""

MAX_SPELLED = 100_000
"""Characters of a dtype: fields may share their dtypes, so that few bytes of pickle unfold to many."""

Field = tuple[str, str, int, str | None]
"""Name, dtype, offset and title."""


def _fields(names: Any, fields: Any) -> list[Field]:
    found = []
    for name in names:
        dtype, offset, *title = fields[name]
        typed = (isinstance(name, str), isinstance(dtype, NumpyDtype), type(offset) is int)
        if not all(typed) or not all(t is None or isinstance(t, str) for t in title):
            raise ValueError("a numpy dtype with a field that is not numpy's")
        found.append((name, dtype.dtype, offset, *(title or [None])))
    return found


def structured(fields: Sequence[Field], itemsize: Any, aligned: bool, record: bool) -> str:
    """A structured dtype as the dict that `numpy.dtype` takes; for a record array, `numpy.record` and the dict.

    Raises:
        ValueError: it unfolds to far more than a dtype has.
    """
    columns = [[field[i] for field in fields] for i in range(4)]
    formats = ", ".join(_spelled(dtype) for _, dtype, _, _ in fields)
    titles = f", 'titles': {columns[3]}" if any(columns[3]) else ""
    tail = f", 'itemsize': {describe_for_error(itemsize)}{', ' + repr('aligned') + ': True' if aligned else ''}"
    text = f"{{'names': {columns[0]}, 'formats': [{formats}], 'offsets': {columns[2]}{titles}{tail}}}"
    return _within(f"('{RECORD}', {text})" if record else text)


def subarray_of(base: str, shape: Ints) -> str:
    """A dtype whose elements are arrays, as the pair that `numpy.dtype` takes."""
    return _within(f"({_spelled(base)}, {shape})")


def _spelled(dtype: str) -> str:
    return dtype if dtype[:1] in ("{", "(") else repr(dtype)


def _within(text: str) -> str:
    if len(text) > MAX_SPELLED:
        raise ValueError("a numpy dtype that unfolds to far more fields than any has")
    return text


def _time_unit(metadata: Any) -> str:
    """The unit of a numpy time as in its dtype: `[s]`, `[25us]`; "" for a time without one."""
    inner = metadata[1] if isinstance(metadata, tuple) and len(metadata) == 2 else None
    unit, count = inner[:2] if isinstance(inner, tuple) and len(inner) >= 2 else (None, None)
    if not isinstance(unit, bytes) or not unit.isalpha() or len(unit) > 7 or type(count) is not int:
        raise ValueError("a numpy time of unknown unit")
    return "" if unit == b"generic" else f"[{'' if count == 1 else describe_for_error(count)}{unit.decode()}]"


def build_array(target: NumpyArray, state: Any) -> None:
    """Set an array's state: version, shape, dtype, whether in Fortran's order, bytes or a list of objects.

    Raises:
        ValueError: numpy does not write such a state, or the number of bytes is wrong.
    """
    _, shape, dtype, fortran, data = state
    target.shape, target.fortran_order = array_shape(shape), fortran is True
    if isinstance(data, bytes) and isinstance(dtype, NumpyDtype):
        target.dtype, target.data = dtype.dtype, array_data(target.shape, dtype.dtype, data)
        target.objects = (dtype, data) if dtype.record else ()
    else:  # an array of Python objects
        target.dtype, target.data, target.objects = "|O", b"", data


def array_shape(shape: Any) -> tuple[int, ...]:
    """The shape of an array as in the file.

    Raises:
        ValueError: it is not a tuple of sizes.
    """
    ok = isinstance(shape, tuple) and len(shape) <= MAX_NDIM and all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
    if not ok:
        raise ValueError(f"a numpy array of shape {describe_for_error(shape)}")
    return tuple(shape)


def array_data(shape: tuple[int, ...], dtype: str, data: bytes) -> bytes:
    """Return `data` if it has the array's size; a dtype with fields or units states no size.

    Raises:
        ValueError: it has another size.
    """
    kind, width = dtype[1:2], dtype[2:]
    if dtype[1:] == "O":
        return b""
    if kind in "mM":
        width = "8"
    if kind in "biufcmMSUV" and width.isdecimal() and len(data) != prod(shape) * int(width) * (4 if kind == "U" else 1):
        raise ValueError(
            f"a numpy array of shape {describe_for_error(shape)} and dtype "
            f"{describe_for_error(dtype)} with {len(data)} bytes"
        )
    return data


# -- the DeviceMesh of a DTensor: the place of each rank, and the size of the world ------------------------------------
# DeviceMesh has three forms: up to 2.9 `mesh` (an int tensor of ranks), `_flatten_mesh_list` (the same numbers as plain
# ints) and `_coordinate_on_dim`; then `_layout`, `_flatten_rank_map` (of the root mesh), `_rank` and
# `_coordinate_on_dim`. So no tensor has to be read. A `_layout` is in 2.13 one `_FlatLayout(shape, stride)` per
# dimension, and before that one `shape` and one `stride` for all: numbers if a mesh was flattened, nested tuples if it
# was flattened from dimensions that do not follow each other.
#
# Source: torch/distributed/device_mesh.py, _mesh_layout.py; checked on files of torch 2.2.2, 2.3.1, 2.4.1, 2.6.0,
# 2.9.1, 2.11.0, 2.12.0 and 2.13.0.


MAX_MESH = 1 << 20
"""Ranks in a mesh; more than any cluster has, few enough to list."""

MAX_MESH_DIMS = 16

Claim = tuple[int | None, int]
"""Rank, which may be None, and world size."""


class Mesh(NamedTuple):
    """A device mesh as stated by one rank.

    Attributes:
        sizes: ranks per mesh dimension.
        coordinate: this rank's place in it; None on a rank outside the mesh.
        rank: this rank, if the file states it.
        ranks: rank of every coordinate in row-major order; None if the file does not state it.
        world_size: ranks of the world; None if the file does not state it.
        at_least: lower bound for the ranks of the world.
    """

    sizes: Ints
    coordinate: Ints | None
    rank: int | None
    ranks: Ints | None
    world_size: int | None
    at_least: int


def mesh_of(value: Any) -> Mesh:
    """Parse the state of a DeviceMesh.

    Raises:
        ValueError: torch has not written such a form, or it contradicts itself.
    """
    fields = attributes(value)
    layout = fields.get("_layout")
    axes = None if layout is None else _axes(layout)
    sizes = _mesh_shape(fields) if axes is None else tuple(prod(n for n, _ in axis) for axis in axes)
    if len(sizes) > MAX_MESH_DIMS or prod(sizes) > MAX_MESH:
        raise ValueError(f"a device mesh of {describe_for_error(sizes)} ranks")
    coordinate = fields.get("_coordinate_on_dim")
    place = tuple(coordinate) if isinstance(coordinate, (list, tuple)) and len(coordinate) == len(sizes) else None
    if place is not None and not all(type(c) is int and 0 <= c < n for c, n in zip(place, sizes, strict=True)):
        raise ValueError(f"a mesh coordinate {describe_for_error(place)} outside {describe_for_error(sizes)}")
    known = _rank_list(fields.get("_flatten_rank_map") or fields.get("_flatten_mesh_list"))
    rank = fields.get("_rank") if type(fields.get("_rank")) is int else None
    ranks = _ranks(known, sizes, axes, place, rank)
    if rank is None and ranks is not None and place is not None:
        rank = ranks[_flat_index(sizes, place)]
    return Mesh(sizes, place, rank, ranks, *worlds(_world_size(fields, sizes), ranks if layout is None else known))


def worlds(outermost: int, ranks: Ints | None) -> tuple[int | None, int]:
    """The number of ranks of the world, if known, and a lower bound for it.

    A mesh may be made over some of the ranks, as a pipeline stage's `DeviceMesh("cuda", [2, 3])` is.

    Args:
        outermost: number of ranks of the outermost known mesh.
        ranks: ranks of that mesh, or of a slice that does not name it; None if the file does not state them.
    """
    at_least = max(outermost, max(ranks or (0,)) + 1)
    whole = ranks is None or sorted(ranks) == list(range(at_least))
    return at_least if whole else None, at_least


def claims_of(claims: Iterable[Claim], meshes: Iterable[Mesh]) -> tuple[frozenset[Claim], bool]:
    """The claims of a file, and whether its world sizes are only lower bounds.

    Args:
        claims: claims of ShardedTensors.
        meshes: the meshes of a file, which may be parts of one world: the one with the most ranks counts.
    """
    listed, sure = list(meshes), max((world for _, world in claims), default=0)
    most = max((mesh.at_least for mesh in listed), default=0)
    known = max((mesh.world_size or 0 for mesh in listed), default=0)
    world = max(most, sure)
    return frozenset(claims) | {(mesh.rank, world) for mesh in listed}, world > max(known, sure)


Axis = list[tuple[int, int]]
"""Sizes and strides that make up a mesh dimension, outermost first: empty for one rank, several if it was flattened
from dimensions that do not follow each other.
"""


def _ranks(
    known: Ints | None, sizes: Ints, axes: list[Axis] | None, place: Ints | None, rank: int | None
) -> Ints | None:
    """Rank of every coordinate. With axes, `known` is the root mesh's list, and this mesh the slice with `rank`."""
    if known is None:
        return None
    if axes is None:
        return known if len(known) == prod(sizes) else None
    if rank not in known or place is None:
        return None
    inner = tuple(n for axis in axes for n, _ in axis)
    strides = tuple(s for axis in axes for _, s in axis)
    steps = zip(axes, place, strict=True)
    cell = [c for axis, at in steps for c in Box.whole(tuple(n for n, _ in axis)).index_of(at)]
    base = known.index(rank) - sum(c * s for c, s in zip(cell, strides, strict=True))
    if strides == contiguous_strides(inner):
        return known[base : base + prod(sizes)] if 0 <= base <= len(known) - prod(sizes) else None
    at = [base + sum(c * s for c, s in zip(cell, strides, strict=True)) for cell in product(*map(range, inner))]
    return tuple(known[i] for i in at) if all(0 <= i < len(known) for i in at) else None


def _axes(value: Any) -> list[Axis]:
    """The mesh dimensions of a `_MeshLayout`.

    Raises:
        ValueError: torch has not written such a form.
    """
    fields = attributes(value)
    listed = [attributes(axis) for axis in (fields.get("axes") or ())[: MAX_MESH_DIMS + 1]]
    pairs = [(axis.get("shape"), axis.get("stride")) for axis in listed]
    if not pairs:
        shape, stride = (_in_tuple(fields.get(name)) for name in ("shape", "stride"))
        pairs = list(zip(shape, stride, strict=False)) if len(shape) == len(stride) else []
    axes = [(_numbers(shape), _numbers(stride)) for shape, stride in pairs]
    if not axes or any(len(shape) != len(stride) for shape, stride in axes):
        raise ValueError("a device mesh of unknown layout")
    return [list(zip(shape, stride, strict=True)) for shape, stride in axes]


def _in_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value[: MAX_MESH_DIMS + 1]) if isinstance(value, (list, tuple)) else (value,)


def _numbers(value: Any) -> Ints:
    """The numbers of a mesh dimension, which may be in nested tuples.

    Raises:
        ValueError: it contains something else, or too many numbers.
    """
    found = _in_tuple(value)
    for _ in range(MAX_MESH_DIMS):
        if len(found) > MAX_MESH_DIMS or all(type(n) is int and 0 <= n <= MAX_MESH for n in found):
            break
        found = tuple(n for part in found for n in _in_tuple(part))
    numbers = _rank_list(found)
    if numbers is None or len(numbers) > MAX_MESH_DIMS:
        raise ValueError("a device mesh of unknown layout")
    return numbers


def _mesh_shape(fields: dict[str, Any]) -> Ints:
    mesh = fields.get("mesh", fields.get("_mesh"))
    if not isinstance(mesh, Tensor):
        raise ValueError("a device mesh of unknown form")
    return mesh.shape


def _world_size(fields: dict[str, Any], sizes: Ints) -> int:
    """Ranks of the outermost mesh from which this one was sliced."""
    world = prod(sizes)
    for _ in range(8):
        outer = fields.get("_root_mesh") or fields.get("_parent_mesh")
        if not isinstance(outer, Opaque):
            break
        fields = attributes(outer)
        known = _rank_list(fields.get("_flatten_rank_map") or fields.get("_flatten_mesh_list"))
        world = max(world, len(known or ()))
    return world


def _rank_list(value: Any) -> Ints | None:
    ok = isinstance(value, (list, tuple)) and len(value) <= MAX_MESH
    return tuple(value) if ok and all(type(r) is int and 0 <= r <= MAX_MESH for r in value) else None


def _flat_index(sizes: Ints, coordinate: Ints) -> int:
    index = 0
    for n, c in zip(sizes, coordinate, strict=True):
        index = index * n + c
    return index


OTHERS = Mesh((), None, None, None, None, 2)
"""Marks a file with only pieces of a tensor: there is at least one other rank."""
