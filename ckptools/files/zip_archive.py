"""The zip container of torch.save, walked without torch and without copying.

A `.pt` is a zip archive whose members are stored uncompressed below one root folder: `data.pkl`, `data/<key>`
for each storage, `version`, and since torch 2.1 `byteorder`. Local headers carry no sizes (bit 3 is set and a
data descriptor follows the payload), so the central directory is the only truth; the payload begins behind the
local header's own name and extra field. Source: caffe2/serialize/inline_container.cc and real files.

What a second reader could see differently is refused rather than guessed, here names or sizes that the local header
and the directory (`zip_directory`) spell differently.
"""

from __future__ import annotations

import zlib

from ckptools.errors import ReadError
from ckptools.files.opening import File, Window
from ckptools.files.zip_directory import (
    CENTRAL,
    DESCRIPTOR,
    ENCRYPTED,
    LOCAL,
    MAX_32,
    ZipEntry,
    check_has_object,
    find_directory,
    read_directory,
)
from ckptools.model.provenance import FILE_NAME
from ckptools.model.values import describe_for_error

MAX_PICKLE = 1 << 30
"""Bytes of a pickle that are read at all: four times what 1,024 ranks of a 7B model need."""

ENTRY_CRC, LOCAL_CRC = 16, 14
"""Offsets of the CRC-32 in an entry of the directory, and in a local header."""

STRUCTURE = ("data.pkl", "byteorder")
"""Records that are read of every archive that is opened."""

ALIGNED = 64
"""A payload begins at a multiple of this. Source: caffe2/serialize/inline_container.h, kFieldAlignment."""

DESCRIPTORS = (16, 24)
"""Bytes of a data descriptor behind a payload: with 32-bit or with 64-bit sizes (APPNOTE.TXT 4.3.9)."""

FRONT = 1024
"""Bytes in front of a payload in which its local header begins: names are those of files, padding is below 128."""


class Container:
    """A torch.save archive: its records, and where each one's bytes lie.

    Attributes:
        file: the open file, or the part of one that the archive is.
        records: by name without the root folder.
        cut: whether the archive is cut short, and `records` are those in front of the cut.
        salvage: whether an archive is read as far as it is here.
    """

    def __init__(self, file: File | Window, salvage: bool = False) -> None:
        """Read the directory; with `salvage` that of an archive that is cut short is found again by local headers."""
        self.file, self.cut, self.salvage = file, False, salvage
        try:
            self.records = read_directory(file)
        except ReadError as error:
            if not salvage or error.kind != "cut" or not file.size:
                raise
            from ckptools.files.zip_salvage import complete_records

            self.records, self.cut = complete_records(file), True
        if "constants.pkl" in self.records:
            raise ReadError(file.path, "a TorchScript archive (it holds constants.pkl), not a checkpoint")
        if "data.pkl" not in self.records and self.cut:
            raise ReadError(file.path, f"is cut short: {file.size} bytes, in its pickle: no name is left", "cut")
        check_has_object(file, self.records)
        said = [self.records[name] for name in (*STRUCTURE, FILE_NAME) if name in self.records]
        file.expect((record.header, record.limit) for record in said)

    def payload(self, name: str) -> tuple[int, int]:
        """Return `(offset, size)` in bytes of a record in the archive, after checking its local header.

        Raises:
            ReadError: there is no such record, or the two headers disagree.
        """
        record = self.records.get(name)
        if record is None:
            why = "torch.save failed before it wrote it, or the file is damaged"
            raise ReadError(self.file.path, f"record {describe_for_error(name)} is missing: {why}")
        if record.method or record.flags & ENCRYPTED:
            raise ReadError(self.file.path, f"record {name} is compressed or encrypted; torch.save writes neither")
        if self.file.descriptor is None and name not in STRUCTURE and (derived := _derived(record)) is not None:
            return derived, record.size
        fixed = LOCAL.size
        header = self.file.read(record.header, fixed + len(record.full_name))
        signature, _, flags, method, *_, crc, _, size, n_name, n_extra = LOCAL.unpack_from(header)
        start = record.header + fixed + n_name + n_extra
        same = signature == b"PK\3\4" and method == 0 and header[fixed:] == record.full_name[:n_name]
        same = same and not flags & ENCRYPTED
        if not flags & DESCRIPTOR:
            same = same and crc == record.crc and size in (record.size, MAX_32)
        if not same or n_name != len(record.full_name) or start + record.size > record.limit:
            raise ReadError(self.file.path, f"record {name}: local header and directory disagree; the file is damaged")
        return start, record.size

    def read(self, name: str, at_most: int = MAX_PICKLE) -> bytes:
        """Read a record whole and check its CRC-32.

        Raises:
            ReadError: it is larger than `at_most` bytes, or its checksum is wrong.
        """
        start, size = self.payload(name)
        if size > at_most:
            raise ReadError(self.file.path, f"record {name} has {size} bytes; at most {at_most} are read")
        data = self.file.read(start, size)
        crc = self.records[name].crc
        if crc and zlib.crc32(data) != crc:
            raise ReadError(self.file.path, f"record {name}: CRC-32 is wrong; the file is damaged")
        return data


def _derived(record: ZipEntry) -> int | None:
    """The offset of a payload as torch.save lays records out, where only one fits; else None.

    It begins at the first aligned byte behind the local header, which has a padding of 4 bytes or more, and ends just
    before the data descriptor and the next record. In a store each look at a header would be a request.
    """
    front = record.header + LOCAL.size + len(record.full_name)
    first = -(-(front + 4) // ALIGNED) * ALIGNED
    if not record.size and first <= record.limit:
        return first
    ends = {record.limit - record.size - nbytes for nbytes in DESCRIPTORS if record.flags & DESCRIPTOR}
    fits = [start for start in ends if not start % ALIGNED and 4 <= start - front < 2 * ALIGNED]
    return fits[0] if len(fits) == 1 else None


def has_local_header(file: File, name: str, start: int) -> bool:
    """Whether a record whose payload was only derived has a local header in front that says the same.

    Args:
        file: the file, in which the archive may be an item.
        name: of the record, without the root folder.
        start: offset of its payload in the file.
    """
    spelled = f"/{name}".encode()
    first = max(start - FRONT, 0)
    front = file.read(first, start - first)
    at = front.rfind(b"PK\3\4")
    while at >= 0:
        if len(front) - at >= LOCAL.size:
            _, _, flags, method, *_, n_name, n_extra = LOCAL.unpack_from(front, at)
            full_name = front[at + LOCAL.size :][:n_name]
            if at + LOCAL.size + n_name + n_extra == len(front) and full_name.endswith(spelled):
                return method == 0 and not flags & ENCRYPTED
        at = front.rfind(b"PK\3\4", 0, at)
    return False


def checksum_places(archive: Container, name: str) -> list[int]:
    """The offsets in an archive at which the CRC-32 of a record stands: in the directory, and at the record itself.

    There it is in the local header, or, as torch writes it, in a data descriptor behind the payload, whose signature
    may be left out (APPNOTE.TXT 4.3.9).
    """
    record = archive.records[name]
    start, size = archive.payload(name)
    entry = _entry_of(archive.file, record.full_name)
    if not record.flags & DESCRIPTOR:
        return [entry + ENTRY_CRC, record.header + LOCAL_CRC]
    signed = archive.file.read(start + size, 4) == b"PK\7\x08"
    return [entry + ENTRY_CRC, start + size + (4 if signed else 0)]


def _entry_of(file: File | Window, full_name: bytes) -> int:
    """The offset of a record's entry in the directory, which has one."""
    at, size, _ = find_directory(file)
    directory, entry = file.read(at, size), 0
    while True:
        n_name, n_extra, n_comment = CENTRAL.unpack_from(directory, entry)[10:13]
        names = entry + CENTRAL.size
        if directory[names : names + n_name] == full_name:
            return at + entry
        entry = names + n_name + n_extra + n_comment
