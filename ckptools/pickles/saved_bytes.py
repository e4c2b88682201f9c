"""Bytes in a checkpoint that `torch.save` or `pickle.dumps` wrote: the extra state of a module, most often.

They are read as a file is, from a temporary one, so that tensors in them have a place. `pickle.dumps` writes a tensor's
storage as a call of `_load_from_bytes` with the bytes of a torch.save file of before 1.6 that holds nothing else.
Source: torch/storage.py (`TypedStorage.__reduce__`, `_load_from_bytes`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.opening import File, Window
from ckptools.files.temporary import room_in, temporary_file
from ckptools.pickles.archive import read_archive
from ckptools.pickles.classes.rebuild import rebuilds
from ckptools.pickles.legacy import read_stream
from ckptools.pickles.machine import Machine, load_checked
from ckptools.pickles.machine_state import MachineState
from ckptools.pickles.objects import Storage

MOST = 256
"""Storages of one pickle that are read; each is looked for in all of it."""


def tree_in(data: bytes, original: Path) -> Any:
    """The tree of bytes that `torch.save` or `pickle.dumps` wrote; no code in it is run.

    None for other bytes, and where there is no room for the temporary file.

    Args:
        data: the bytes.
        original: the file that they were read from, which errors about values in them name.
    """
    if data[:1] != b"\x80" and data[:2] != b"PK":
        return None
    try:
        target = temporary_file(original, "saved-bytes")
        with room_in(target, original, len(data)):
            target.write_bytes(data)
            with File(target) as file:
                archive = content_of(head_of(file)) in ("zip", "legacy")
                return read_archive(file)[1] if archive else load_all(StorageReader(file), target)
    except CkptoolsError:
        return None


def load_all(machine: Machine, path: Path) -> Any:
    """The tree of a pickle that is all of a machine's bytes.

    Raises:
        ReadError: it is damaged, or ends before they do.
    """
    tree = load_checked(machine, path, "a value")
    if machine.stopped_at != len(machine.data):
        raise ReadError(path, "goes on behind its pickle")
    return tree


class StorageReader(Machine):
    """A machine for a file of `pickle.dumps`, in which each storage is a torch.save file of its own."""

    def __init__(self, file: File) -> None:
        super().__init__(file.read(0, file.size), self._place)
        self._file = file
        self._places: list[tuple[Path, int, str, int] | None] = []

    def _place(self, storage: Storage) -> tuple[Path, int, str, int] | None:
        return self._places[int(storage.key)]

    def storage_in(self, data: bytes) -> Storage | None:
        """The storage that some bytes of the pickle hold; None if they hold something else."""
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
    return m.storage_in(args[0]) if inside and isinstance(m, StorageReader) else None
