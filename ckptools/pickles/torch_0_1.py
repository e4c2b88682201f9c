"""The files of torch 0.1: a tar of `sys_info`, `storages`, `tensors` and `pickle`.

- `storages`: a pickle of their number; for each a pickle of `(key, location, storage class)`, the number of elements as
  8 bytes, and the elements; then a pickle of the list of views, `(key, key of the storage, offset, numel)` in elements.
- `tensors`: a pickle of their number; for each a pickle of `(key, storage's key, tensor class)`, then 4 bytes of ndim,
  4 that mean nothing, ndim sizes, ndim strides and the storage offset, 8 bytes each.
- `pickle`: the object; a storage or tensor is its key as a persistent id, a class is `(class, source file, source)`.

All numbers are little-endian. Source: torch/serialization.py (`legacy_load` inside `_legacy_load`), which no longer
writes them; checked against what torch 2.13 makes of such a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.dtypes import ITEMSIZE, STORAGE_CLASS
from ckptools.errors import ReadError
from ckptools.files.opening import File, Window
from ckptools.files.zip_directory import MAX_RECORDS
from ckptools.model.tensor import Tensor
from ckptools.model.values import Global, describe_for_error
from ckptools.pickles.legacy import Stream, View, check_system, locator
from ckptools.pickles.limits import MAX_NDIM, PickleError
from ckptools.pickles.loading import load_checked
from ckptools.pickles.machine import Machine
from ckptools.pickles.objects import Storage
from ckptools.pickles.tensors import strided_tensor

Known = dict[int, "Storage | Tensor"]


class Torch01Machine(Machine):
    """A machine whose persistent ids are the keys of storages and tensors.

    Attributes:
        known: them, by key.
    """

    known: Mapping[int, Storage | Tensor]

    def persistent(self, pid: Any) -> Any:
        """Return the storage, tensor or class that a persistent id names."""
        if isinstance(pid, tuple) and pid and isinstance(pid[0], Global):
            return pid[0]
        key = int(pid) if type(pid) is int or (isinstance(pid, str) and pid[:32].isdecimal()) else None
        if key is None or key not in self.known:
            raise PickleError(f"a persistent id that nothing in the file has: {describe_for_error(pid)}")
        return self.known[key]


def read_torch_0_1(file: File, parts: Mapping[str, Window]) -> tuple[Machine, Any]:
    """Read a file of torch 0.1 from the members of its tar; return the machine that read the object, and its tree.

    Raises:
        ReadError: it is cut, damaged, or from a big-endian machine.
    """
    check_system(Stream(parts["sys_info"]))
    storages = Stream(parts["storages"])
    known: Known = {}
    places: dict[str, int] = {}
    for storage, at in _storages(storages):
        _add(file, known, int(storage.key), storage)
        places[storage.key] = at
    for key, view in _views(storages, known):
        _add(file, known, key, view)
    machine = Torch01Machine(parts["pickle"].read(0, parts["pickle"].size), locator(parts["storages"], places))
    try:
        for key, tensor in _tensors(Stream(parts["tensors"]), machine, known):
            _add(file, known, key, tensor)
    except ValueError as error:
        raise ReadError(file.path, f"its tensors: {error}") from error
    machine.known = known
    return machine, load_checked(machine, file.path, "the saved object")


def _add(file: File, known: Known, key: int, value: Storage | Tensor) -> None:
    if key in known:
        raise ReadError(
            file.path, f"has two storages or tensors with the key {describe_for_error(key)}; it is damaged or forged"
        )
    known[key] = value


def _count(stream: Stream, what: str) -> int:
    count = stream.load(f"the number of {what}")[1]
    if type(count) is not int or not 0 <= count <= MAX_RECORDS:
        raise ReadError(stream.file.path, f"has {describe_for_error(count)} {what}")
    return count


def _entry(stream: Stream, what: str) -> tuple[int, Any, Any]:
    """The three values of a pickle, of which the first is a key."""
    value = stream.load(f"one of its {what}")[1]
    if not isinstance(value, tuple) or len(value) != 3 or type(value[0]) is not int:
        raise ReadError(stream.file.path, f"one of its {what} is not what torch wrote; the file is damaged")
    return value


def _storages(stream: Stream) -> Iterator[tuple[Storage, int]]:
    """Each storage, and the byte offset of its elements in their member."""
    for _ in range(_count(stream, "storages")):
        key, location, kind = _entry(stream, "storages")
        name = kind.name if isinstance(kind, Global) else ""
        if name not in STORAGE_CLASS or not isinstance(location, str):
            raise ReadError(stream.file.path, f"has a storage of unknown type {describe_for_error(name or kind)}")
        numel = int.from_bytes(stream.take(8), "little")
        storage = Storage(name, str(key), location, numel)
        at = stream.at
        stream.skip(numel * ITEMSIZE[storage.dtype])
        yield storage, at


def _views(stream: Stream, known: Known) -> Iterator[tuple[int, View]]:
    views = stream.load("the list of views")[1]
    for view in views if isinstance(views, (list, tuple)) else (None,):
        if not isinstance(view, tuple) or len(view) != 4 or not all(type(n) is int and n >= 0 for n in view):
            raise ReadError(stream.file.path, "one of its views is not what torch wrote; the file is damaged")
        key, of, first, numel = view
        root = known.get(of)
        if not isinstance(root, Storage) or isinstance(root, View) or first + numel > root.numel:
            raise ReadError(
                stream.file.path, f"has a view of {describe_for_error(numel)} elements that its storage has not"
            )
        yield key, View(root, first, numel)


def _tensors(stream: Stream, machine: Machine, known: Known) -> Iterator[tuple[int, Tensor]]:
    for _ in range(_count(stream, "tensors")):
        key, of, _kind = _entry(stream, "tensors")
        storage = known.get(of) if type(of) is int else None
        if not isinstance(storage, Storage):
            raise ReadError(stream.file.path, f"has a tensor of storage {describe_for_error(of)}, which is not there")
        (ndim,) = struct.unpack("<i4x", stream.take(8))
        if not 0 <= ndim <= MAX_NDIM:
            raise ReadError(stream.file.path, f"has a tensor of {ndim} dimensions")
        numbers = struct.unpack(f"<{2 * ndim + 1}q", stream.take(16 * ndim + 8))
        yield key, strided_tensor(machine, storage, numbers[-1], numbers[:ndim], numbers[ndim:-1], storage.dtype)
