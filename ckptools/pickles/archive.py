"""A torch.save archive: a zip with the object's pickle in `data.pkl` and each storage in a record of its own."""

from __future__ import annotations

from pathlib import Path
from sys import intern
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.opening import File, Window
from ckptools.files.zip_archive import Container
from ckptools.model.provenance import FILE_NAME, MAX_BYTES, Said
from ckptools.model.values import describe_for_error
from ckptools.pickles.loading import load_checked
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import Locate
from ckptools.pickles.objects import Storage
from ckptools.pickles.repeated_records import RepeatedRecords


def read_archive(file: File | Window, repeated: RepeatedRecords | None = None) -> tuple[Machine, Any]:
    """Read the torch.save archive that a file, or a part of one, is; return the machine that read it, and its tree.

    Raises:
        ReadError: it is cut, damaged, or no torch.save archive.
    """
    if content_of(head_of(file)) == "legacy":
        from ckptools.pickles.legacy import read_stream

        return read_stream(file)
    return read_zip(file, repeated)


def read_zip(file: File | Window, repeated: RepeatedRecords | None = None) -> tuple[Machine, Any]:
    """Read a torch.save archive as every torch since 1.6 writes it; see `read_archive`."""
    archive = Container(file)
    check_byte_order(archive)
    machine = Machine(archive.read("data.pkl"), locator(archive), repeated=repeated)
    machine.provenance = provenance_in(archive)
    return machine, load_checked(machine, file.path, "data.pkl")


def provenance_in(archive: Container) -> Said | None:
    """What an archive that `consolidate` wrote says of where it comes from; None for any other."""
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
        ReadError: it is one.
    """
    if "byteorder" in archive.records and archive.read("byteorder", 16) != b"little":
        raise ReadError(archive.file.path, "was written on a big-endian machine; its numbers are reversed")


def locator(archive: Container) -> Locate:
    """Make a function that tells where a storage lies: `(file, byte offset, record name, CRC-32)`.

    It raises a ReadError for a record that is missing, or not as long as the pickle says.
    """
    known: dict[str, int] = {}

    def locate(storage: Storage) -> tuple[Path, int, str, int]:
        record = intern(f"data/{storage.key}")
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
