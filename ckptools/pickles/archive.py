"""Read a torch.save archive: a zip with the object's pickle in `data.pkl` and an entry for each storage."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from sys import intern
from threading import Lock
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import HEAD, File, Window, content_of, head_of
from ckptools.files.partial_files import room_in, temporary_file
from ckptools.files.remote.path import RemotePath
from ckptools.files.zip_archive import STRUCTURE, Container
from ckptools.model.provenance import FILE_NAME, MAX_BYTES, Said
from ckptools.model.tree import Opaque, describe_for_error
from ckptools.pickles.classes.tensors import rebuilds, strided_tensor
from ckptools.pickles.legacy import read_stream
from ckptools.pickles.machine import Machine, load_checked
from ckptools.pickles.machine_state import Locate, MachineState, RepeatedRecords
from ckptools.pickles.objects import Storage

# -- storages that were saved by themselves: each is shown, and written, as a tensor of one dimension ------------------
# torch.save writes a `torch.FloatStorage` or an `UntypedStorage` without a tensor as a bare persistent id. Source:
# `persistent_id` in `_save` and `_legacy_save` of torch/serialization.py.


CONTAINERS = (dict, list, tuple, Opaque)


def with_storages_as_tensors(m: MachineState, tree: Any) -> Any:
    """Replace each storage without a tensor by a tensor."""
    done: dict[int, Any] = {}
    path: set[int] = set()
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            done[id(node)] = _remade(node, done)
        elif id(node) in path or not isinstance(node, CONTAINERS):
            continue
        elif isinstance(node, Storage):
            view = strided_tensor(m, node, 0, (node.numel,), (1,), node.dtype)
            done[id(node)] = view if view.note else replace(view, kind="storage")
        else:
            path.add(id(node))
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if isinstance(child, CONTAINERS)]
    return done.get(id(tree), tree)


def _children(node: Any) -> list[Any]:
    return list(node.values() if isinstance(node, dict) else node.parts() if isinstance(node, Opaque) else node)


def _remade(node: Any, done: dict[int, Any]) -> Any:
    """Put tensors into a container; only a tuple becomes another object."""
    if isinstance(node, Opaque):
        node.args, node.state, node.keywords = (done.get(id(p), p) for p in (node.args, node.state, node.keywords))
        node.items = [done.get(id(item), item) for item in node.items]
    elif isinstance(node, dict):
        node.update({key: done[id(child)] for key, child in node.items() if id(child) in done})
    elif isinstance(node, list):
        node[:] = [done.get(id(child), child) for child in node]
    elif any(done.get(id(child), child) is not child for child in node):
        return tuple([done.get(id(child), child) for child in node])
    return node


# -- the archive -------------------------------------------------------------------------------------------------------


def read_archive(
    file: File | Window, repeated: RepeatedRecords | None = None, salvage: bool = False
) -> tuple[Machine, Any]:
    """Read the torch.save archive in a file, or in a part of one; return the machine that read it, and its tree.

    With `salvage`, a zip that is cut short is read as far as it goes; `cut` of the machine states that.

    Raises:
        ReadError: it is cut, damaged, or not a torch.save archive.
    """
    if content_of(head_of(file)) == "legacy":
        from ckptools.pickles.legacy import read_stream

        machine, tree = read_stream(file)
    else:
        machine, tree = read_zip(file, repeated, salvage)
    if machine.loose_storages:
        tree = with_storages_as_tensors(machine, tree)
    return machine, tree


def read_zip(
    file: File | Window, repeated: RepeatedRecords | None = None, salvage: bool = False
) -> tuple[Machine, Any]:
    """Read a torch.save archive in the zip form of torch 1.6 and later; see `read_archive`."""
    archive = Container(file, salvage)
    check_byte_order(archive)
    machine = Machine(archive.read("data.pkl"), locator(archive), repeated=repeated)
    tree = load_checked(machine, file.path, "data.pkl")
    machine.provenance, machine.cut = provenance_in(archive), archive.cut
    return machine, tree


def provenance_in(archive: Container) -> Said | None:
    """The provenance that `consolidate` wrote into an archive; None without one."""
    if FILE_NAME not in archive.records:
        return None
    try:
        return Said(archive.read(FILE_NAME, MAX_BYTES).decode("utf-8"))
    except ReadError as error:
        return Said("", error.reason)
    except UnicodeDecodeError:
        return Said("", f"record {FILE_NAME} is not UTF-8")


def check_byte_order(archive: Container) -> None:
    """Refuse a file from a big-endian machine.

    Raises:
        ReadError: it is big-endian.
    """
    if "byteorder" in archive.records and archive.read("byteorder", 16) != b"little":
        raise ReadError(archive.file.path, "was written on a big-endian machine; its numbers are reversed")


def locator(archive: Container) -> Locate:
    """Make a function that locates a storage: `(file, byte offset, name of the zip entry, CRC-32)`.

    It raises a ReadError for an entry that is missing, or whose length contradicts the pickle; in an archive that is
    salvaged it returns None for an entry that was cut off or never written.
    """
    known: dict[str, int] = {}

    def locate(storage: Storage) -> tuple[Path, int, str, int] | None:
        record = intern(f"data/{storage.key}")
        if archive.salvage and record not in archive.records:
            archive.cut = True
            return None
        if storage.key not in known:
            offset, size = archive.payload(record)
            expected = storage.numel * ITEMSIZE[storage.dtype]
            if size != expected:
                raise ReadError(
                    archive.file.path,
                    f"record {describe_for_error(record)} has {size} bytes, "
                    f"its tensors expect {describe_for_error(expected)}; damaged",
                )
            known[storage.key] = archive.file.start + offset
        return archive.file.path, known[storage.key], record, archive.records[record].crc

    return locate


# -- fetch many remote archives together: one by one, each takes two requests or more ----------------------------------


TOGETHER = 16
"""Files that are fetched at once, and that wait to be read."""

LARGEST = 3 << 20
"""Larger zip entries are not fetched ahead: a store's cache keeps no more of so many files."""


class FetchAhead:
    """Fetches the structures of remote files before they are read; does nothing for files on disk."""

    def __init__(self) -> None:
        self._coming: dict[Path, Future[None] | None] = {}
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    def add(self, paths: Iterable[Path]) -> None:
        """Announce that these files will be read, in this order."""
        with self._lock:
            self._coming |= dict.fromkeys(path for path in paths if isinstance(path, RemotePath))
            self._begin(*islice(self._coming, TOGETHER))

    def reach(self, path: Path) -> None:
        """Wait until an announced file is fetched; the next ones are fetched meanwhile."""
        with self._lock:
            if path not in self._coming:
                return
            self._begin(path)
            fetched = self._coming.pop(path)
            self._begin(*islice(self._coming, TOGETHER))
        assert fetched is not None
        fetched.result()

    def _begin(self, *paths: Path) -> None:
        for path in paths:
            self._pool = self._pool or ThreadPoolExecutor(TOGETHER)
            self._coming[path] = self._coming[path] or self._pool.submit(fetch, path)

    def close(self) -> None:
        """Start no further fetch."""
        with self._lock:
            self._coming.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def fetch(path: Path) -> None:
    """Fetch the bytes that reading a torch.save file's structure needs; errors are left to the reader.

    Args:
        path: the file; if it is not a zip archive, only its ends are fetched.
    """
    with suppress(CkptoolsError, OSError, MemoryError), File(path) as file:
        records = Container(file).records
        said = [records[name] for name in STRUCTURE if name in records]
        file.prefetch([(0, HEAD), *((record.header, record.limit) for record in said)], LARGEST)


# -- bytes in a checkpoint that `torch.save` or `pickle.dumps` wrote, most often the extra state of a module -----------
# They are read like a file, from a temporary one, so that their tensors have byte offsets. `pickle.dumps` writes a
# tensor's storage as a call of `_load_from_bytes` on the bytes of a torch.save file of before 1.6 that contains only
# the storage. Source: torch/storage.py (`TypedStorage.__reduce__`, `_load_from_bytes`).


MOST = 256
"""At most this many storages of one pickle are read; each takes a search through the whole pickle."""


def tree_in(data: bytes, original: Path) -> Any:
    """Read bytes that `torch.save` or `pickle.dumps` wrote; no code in them is run.

    None for other bytes, and if there is no room for the temporary file.

    Args:
        data: the bytes.
        original: the file that contains them, which errors about their values name.
    """
    if data[:1] != b"\x80" and data[:2] != b"PK":
        return None
    try:
        target = temporary_file(original, "saved-bytes")
        with room_in(target, original, len(data)):
            target.write_bytes(data)
            with File(target) as file:
                archive = content_of(head_of(file)) in ("zip", "legacy")
                return read_archive(file)[1] if archive else load_all(StorageMachine(file), target)
    except CkptoolsError:
        return None


def load_all(machine: Machine, path: Path) -> Any:
    """Interpret the one pickle that fills all of a machine's bytes, and return its tree.

    Raises:
        ReadError: it is damaged, or shorter than the bytes.
    """
    tree = load_checked(machine, path, "a value")
    if machine.stopped_at != len(machine.data):
        raise ReadError(path, "goes on behind its pickle")
    return tree


class StorageMachine(Machine):
    """A machine for a file of `pickle.dumps`, in which each storage is an embedded torch.save file."""

    def __init__(self, file: File) -> None:
        super().__init__(file.read(0, file.size), self._place)
        self._file = file
        self._places: list[tuple[Path, int, str, int] | None] = []

    def _place(self, storage: Storage) -> tuple[Path, int, str, int] | None:
        return self._places[int(storage.key)]

    def storage_in(self, data: bytes) -> Storage | None:
        """The storage that some bytes of the pickle contain; None if they contain another object."""
        if len(self._places) >= MOST:
            return None
        machine, storage = read_stream(Window(self._file, self.data.find(data), len(data)))
        if not isinstance(storage, Storage) or machine.locate is None:
            return None
        self._places.append(machine.locate(storage))
        storage.key = str(len(self._places) - 1)
        return storage


@rebuilds("torch.storage._load_from_bytes")
def _storage(m: MachineState, args: tuple[Any, ...]) -> Any:
    inside = len(args) == 1 and isinstance(args[0], bytes)
    return m.storage_in(args[0]) if inside and isinstance(m, StorageMachine) else None
