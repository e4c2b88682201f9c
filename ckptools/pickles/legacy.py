"""Read torch.save's format of before torch 1.6, which it still writes on request: some pickles, then raw storages.

The file has, in this order:

1. a pickle of the magic number, one of the protocol version (1001), one of the writer's system (byte order, sizes);
2. the object's pickle, in which a storage is the persistent id
   `('storage', storage class, key, location, numel, view)`, and in files of whole modules a class is
   `('module', class, source file, source)`, of which only the class's name is used;
3. a pickle of the list of storage keys;
4. for each key in that order: the number of elements as 8 bytes, little-endian, then the elements.

A view is None, or `(its own key, offset, numel)` in elements of the storage that it lies in (torch before 0.4).
Source: torch/serialization.py (`_legacy_save`, `_legacy_load`), torch/csrc/serialization.cpp
(`THPStorage_writeFileRaw`).

The places of storages are stated behind the object's pickle, whose length is not stated. So the pickle is interpreted
twice: once to find its end and its storages, and again when the offset of each storage is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import LEGACY_MAGIC, File, Window
from ckptools.files.zip_archive import MAX_PICKLE
from ckptools.model.tree import Global, describe_for_error
from ckptools.pickles.machine import Machine, gc_paused, load_checked
from ckptools.pickles.machine_state import CutError, Locate, PickleError
from ckptools.pickles.objects import Storage

PROTOCOL_VERSION = 1001

FRONT = 1 << 14
"""Bytes that are read at first."""

GROWTH = 8


class StorageView(Storage):
    """A part of another storage.

    Attributes:
        first: index of its first element in the storage that `key` names.
    """

    __slots__ = ("first",)

    def __init__(self, root: Storage, first: int, numel: int) -> None:
        super().__init__(root.name.removeprefix("torch."), root.key, root.location, numel)
        self.first = first


class MoreNeeded(Exception):  # noqa: N818 - it is no error
    """A pickle extends beyond the bytes that have been read of its file."""


class LegacyMachine(Machine):
    """A machine for the persistent ids of these files.

    Attributes:
        views: views of storages, by their own key.
        more: whether the file continues behind the data, so that a cut pickle needs more bytes, not a slower retry.
    """

    more = False

    def _start(self, fast: bool) -> None:
        super()._start(fast)
        self.views: dict[str, StorageView] = {}

    def _load(self, at: int) -> Any:
        try:
            return super()._load(at)
        except CutError as error:
            if self.more:
                raise MoreNeeded from error
            raise

    def persistent(self, pid: Any) -> Any:
        """Return the storage, view or class that a persistent id describes."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Global):
            return pid[1]
        storage = super().persistent(pid)
        if storage.key in self.views:
            raise PickleError(f"storage {describe_for_error(storage.key)} is described in two ways")
        return storage if len(pid) == 5 or pid[5] is None else self._view(storage, pid[5])

    def _view(self, root: Storage, described: Any) -> StorageView:
        key, first, numel = described if isinstance(described, tuple) and len(described) == 3 else (None, None, None)
        if not isinstance(key, str) or type(first) is not int or type(numel) is not int:
            raise PickleError("a view of a storage that is not torch's")
        if min(first, numel) < 0 or first + numel > root.numel:
            text = (
                f"a view of {describe_for_error(numel)} elements at {describe_for_error(first)} "
                f"in storage {describe_for_error(root.key)}, which has"
            )
            raise PickleError(f"{text} {describe_for_error(root.numel)}")
        view = self.views.setdefault(key, StorageView(root, first, numel))
        if (view.key, view.first, view.numel) != (root.key, first, numel) or key in self.storages:
            raise PickleError(f"storage {describe_for_error(key)} is described in two ways")
        return view


class LegacyStream:
    """Consecutive pickles and numbers in a file; more bytes are read when a pickle needs them.

    Attributes:
        file: the file, or the part of one.
        at: offset of the next pickle or number.
    """

    def __init__(self, file: File | Window) -> None:
        self.file = file
        self.at = 0
        self._from = 0
        self._data = b""

    def _end(self) -> int:
        """The offset where reading ends: the end of the file, or of the longest pickle that is accepted."""
        return min(self.file.size, self._from + MAX_PICKLE)

    def _read_more(self) -> None:
        have = len(self._data)
        wanted = min(max(FRONT, GROWTH * have), self._end() - self._from)
        self._data += self.file.read(self._from + have, wanted - have)

    def read(self, at: int, length: int) -> bytes:
        """Read bytes of the file, from memory if they were read already."""
        start = at - self._from
        inside = start >= 0 and start + length <= len(self._data)
        return self._data[start : start + length] if inside else self.file.read(at, length)

    def take(self, length: int) -> bytes:
        """Read the next bytes.

        Raises:
            ReadError: the file ends too early.
        """
        self.skip(length)
        return self.read(self.at - length, length)

    def skip(self, length: int) -> None:
        """Skip the next bytes.

        Raises:
            ReadError: the file ends too early.
        """
        if self.at + length > self.file.size:
            raise ReadError(
                self.file.path,
                f"is cut short: byte {describe_for_error(self.at + length)} of {self.file.size} is needed",
                "cut",
            )
        self.at += length

    def load(self, what: str) -> tuple[LegacyMachine, Any]:
        """Interpret the next pickle, without locating its storages; `what` names it in errors.

        Raises:
            ReadError: it is cut or damaged.
        """
        if self.at > self._from + len(self._data):
            self._from, self._data = self.at, b""
        while True:
            machine = LegacyMachine(self._data, _nowhere)
            machine.more = self._end() > self._from + len(self._data)
            try:
                with gc_paused():
                    value = machine.load(self.at - self._from)
            except MoreNeeded:
                self._read_more()
                continue
            except CutError as error:
                raise self._cut(what) from error
            except PickleError as error:
                raise ReadError(self.file.path, f"{what}: {error}") from error
            self.at = self._from + (machine.stopped_at or 0)
            return machine, value

    def _cut(self, what: str) -> ReadError:
        if self._end() < self.file.size:
            return ReadError(self.file.path, f"{what} has more than {MAX_PICKLE} bytes; no more are read")
        return ReadError(self.file.path, f"is cut short: it ends at byte {self.file.size}, in {what}", "cut")


def _nowhere(storage: Storage) -> tuple[Path, int, str, int]:
    return Path(), 0, "", 0


def read_stream(file: File | Window) -> tuple[Machine, Any]:
    """Read a file of this format, or a part of one; return the machine that read the object, and its tree.

    Raises:
        ReadError: it is cut, damaged, from a big-endian machine, or of another protocol.
    """
    stream = LegacyStream(file)
    check_header(stream)
    start = stream.at
    machine, _ = stream.load("the saved object")
    end = stream.at
    _, keys = stream.load("the list of storages")
    places = _places(stream, keys, machine.storages)
    again = LegacyMachine(stream.read(start, end - start), _locator(file, places))
    return again, load_checked(again, file.path, "the saved object")


def check_header(stream: LegacyStream) -> None:
    """Read the magic number, the version and the system, and refuse unexpected values.

    Raises:
        ReadError: one of them is unexpected.
    """
    path = stream.file.path
    if (magic := stream.load("the magic number")[1]) != LEGACY_MAGIC:
        raise ReadError(path, f"begins with {describe_for_error(magic)} instead of torch.save's magic number")
    if (version := stream.load("the version")[1]) != PROTOCOL_VERSION:
        raise ReadError(
            path,
            f"is of protocol version {describe_for_error(version)}; {PROTOCOL_VERSION} is the one that torch wrote",
        )
    system = stream.load("the writer's system")[1]
    little = system.get("little_endian") if isinstance(system, dict) else None
    if little is not True:
        why = "was written on a big-endian machine; its numbers are reversed"
        raise ReadError(path, why if little is False else "does not say what system wrote it; the file is damaged")


def _places(stream: LegacyStream, keys: Any, storages: Mapping[str, Storage]) -> dict[str, int]:
    """Byte offset of each storage's elements: they follow each other from the last pickle to the end of the file.

    Raises:
        ReadError: the list and the object disagree, or the file's length contradicts them.
    """
    file, places = stream.file, dict[str, int]()
    if not isinstance(keys, list):
        raise ReadError(
            file.path, f"has {describe_for_error(keys)} for a list of its storages; the file is damaged or forged"
        )
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in places:
            again = "more than once" if storage else "that no tensor uses"
            raise ReadError(
                file.path, f"lists storage {describe_for_error(key)} {again}; the file is damaged or forged"
            )
        count = int.from_bytes(stream.take(8), "little", signed=True)
        if count != storage.numel:
            text = (
                f"storage {describe_for_error(key)} has {count} elements, "
                f"its tensors expect {describe_for_error(storage.numel)}; damaged"
            )
            raise ReadError(file.path, text)
        places[key] = stream.at
        stream.skip(count * ITEMSIZE[storage.dtype])
    missing = [key for key in storages if key not in places]
    if missing:
        raise ReadError(
            file.path, f"storage {describe_for_error(missing[0])} has no bytes in this file; the file is damaged"
        )
    if stream.at != file.size:
        raise ReadError(file.path, f"has {file.size - stream.at} bytes behind its last storage; bytes were added")
    return places


def _locator(file: File | Window, places: Mapping[str, int]) -> Locate:
    """Make a function that locates a storage, from the byte offset of each in `file`."""

    def locate(storage: Storage) -> tuple[Path, int, str, int]:
        first = storage.first if isinstance(storage, StorageView) else 0
        at = file.start + places[storage.key] + first * ITEMSIZE[storage.dtype]
        return file.path, at, f"storage {storage.key}", 0

    return locate
