"""The zip container of torch.save, walked without torch and without copying.

A `.pt` is a zip archive whose members are stored uncompressed below one root folder: `data.pkl`, `data/<key>`
for each storage, `version`, and since torch 2.1 `byteorder`. Local headers carry no sizes (bit 3 is set and a
data descriptor follows the payload), so the central directory is the only truth; the payload begins behind the
local header's own name and extra field. Source: caffe2/serialize/inline_container.cc and real files.

What a second reader could see differently is refused rather than guessed: duplicate names, two roots, bytes
before or behind the archive, overlapping records, names or sizes that the two headers spell differently.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.files.file_type import head_of, what_is
from ckptools.files.opening import File, Window
from ckptools.model.values import describe_for_error

EOCD = struct.Struct("<4s4H2LH")
EOCD64_LOCATOR = struct.Struct("<4sLQL")
EOCD64 = struct.Struct("<4sQ2H2L4Q")
CENTRAL = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")

MAX_DIRECTORY = 256 << 20
MAX_RECORDS = 1_000_000
"""Records of an archive; one for each storage, so more than any rank has tensors."""

MAX_PICKLE = 1 << 30
"""Bytes of a pickle that are read at all: four times what 1,024 ranks of a 7B model need."""

OTHER_ZIPS = dict.fromkeys(
    ("metadata.json", "config.json", "model.weights.h5"), "a Keras model (.keras), not a PyTorch checkpoint"
) | {"[Content_Types].xml": "an Office document, not a checkpoint"}
"""What a zip archive is that holds these beside each other, below no folder."""

ENTRY_CRC, LOCAL_CRC = 16, 14
"""Where the CRC-32 is in an entry of the directory, and in a local header."""

STRUCTURE = ("data.pkl", "byteorder")
"""Records that are read of every archive that is opened."""

ALIGNED = 64
"""A payload begins at a multiple of this. Source: caffe2/serialize/inline_container.h, kFieldAlignment."""

DESCRIPTORS = (16, 24)
"""Bytes of a data descriptor behind a payload: with 32-bit or with 64-bit sizes (APPNOTE.TXT 4.3.9)."""

MAX_32 = 0xFFFFFFFF
ENCRYPTED = 1
DESCRIPTOR = 1 << 3


FRONT = 1024
"""Bytes in front of a payload in which its local header begins: names are those of files, padding is below 128."""


class Record(NamedTuple):
    """A member of the archive.

    Attributes:
        name: without the root folder: `data.pkl`, `data/0`.
        header: offset of the local header in the file.
        full_name: as the directory spells it, in bytes.
        size: bytes.
        crc: CRC-32 of the payload; 0 when it was saved with checksums off.
        method: 0 for stored, the only one that torch writes.
        flags: general purpose bits.
        limit: offset that the payload may not pass: the next local header or the directory.
    """

    name: str
    header: int
    full_name: bytes
    size: int
    crc: int
    method: int
    flags: int
    limit: int


class Container:
    """A torch.save archive: its records, and where each one's bytes lie.

    Attributes:
        file: the open file, or the part of one that the archive is.
        records: by name without the root folder.
    """

    def __init__(self, file: File | Window) -> None:
        self.file = file
        self.records = _read_directory(file)
        if "constants.pkl" in self.records:
            raise ReadError(file.path, "a TorchScript archive (it holds constants.pkl), not a checkpoint")
        if "data.pkl" not in self.records:
            raise ReadError(file.path, "a zip archive without data.pkl, so not written by torch.save")
        said = [self.records[name] for name in STRUCTURE if name in self.records]
        file.expect((record.header, record.limit) for record in said)

    def payload(self, name: str) -> tuple[int, int]:
        """Return `(offset, size)` in bytes of a record in the archive, after checking its local header.

        Raises:
            ReadError: there is no such record, or the two headers disagree.
        """
        record = self.records.get(name)
        if record is None:
            raise ReadError(self.file.path, f"record {describe_for_error(name)} is missing; the file is damaged")
        if record.method or record.flags & ENCRYPTED:
            raise ReadError(self.file.path, f"record {name} is compressed or encrypted; torch.save writes neither")
        if self.file.descriptor is None and name not in STRUCTURE and (reckoned := _reckoned(record)) is not None:
            return reckoned, record.size
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


def _reckoned(record: Record) -> int | None:
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
    """Whether a record whose payload was only reckoned has a local header in front that says the same.

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
    at, size, _ = _find_directory(file)
    directory, entry = file.read(at, size), 0
    while True:
        n_name, n_extra, n_comment = CENTRAL.unpack_from(directory, entry)[10:13]
        names = entry + CENTRAL.size
        if directory[names : names + n_name] == full_name:
            return at + entry
        entry = names + n_name + n_extra + n_comment


def probe(file: File | Window) -> None:
    """Check that the file ends in a zip directory that lies where it should, without reading all of it.

    Raises:
        ReadError: it is cut short or no torch.save file.
    """
    start, size, _ = _find_directory(file)
    if size < CENTRAL.size or file.read(start, 4) != b"PK\1\2":
        raise ReadError(file.path, "zip directory is damaged")


def _read_directory(file: File | Window) -> dict[str, Record]:
    start, size, count = _find_directory(file)
    if size > MAX_DIRECTORY:
        raise ReadError(file.path, f"zip directory of {size} bytes; at most {MAX_DIRECTORY} are read")
    entries = _parse_entries(file, file.read(start, size), count)
    entries.sort(key=lambda e: e[1])
    headers = [e[1] for e in entries[1:]] + [start]
    records: dict[str, Record] = {}
    if entries[0][1]:
        raise ReadError(file.path, f"has {entries[0][1]} bytes before its first record; bytes were added or lost")
    spelled: set[str] = set()
    for (full, header, nbytes, packed, crc, method, flags), limit in zip(entries, headers, strict=True):
        name = _name_below_root(file, full, entries[0][0])
        # torch looks records up without regard to case.
        if name.lower() in spelled:
            raise ReadError(
                file.path, f"two records are called {describe_for_error(name)}; the file is damaged or forged"
            )
        if header + LOCAL.size + len(full) + packed > limit:
            raise ReadError(
                file.path, f"record {describe_for_error(name)} runs into the next one; the file is damaged or forged"
            )
        spelled.add(name.lower())
        records[name] = Record(name, header, full, nbytes, crc, method, flags, limit)
    return records


def _find_directory(file: File | Window) -> tuple[int, int, int]:
    """Return `(offset, size, entry count)` of the central directory, which must end where the end record begins."""
    at = file.size - EOCD.size
    end = file.read(at, EOCD.size) if at >= 0 else b""
    if end[:4] != b"PK\5\6" or end[-2:] != b"\0\0":
        raise _no_directory(file)
    _, _, _, _, count, size, start, _ = EOCD.unpack(end)
    wide = _find_zip64(file, at)
    if wide:
        # torch writes both ends; a full 32-bit field gives way to the wide one, any other must say the same.
        narrow, (at, *values) = (start, size, count), wide
        full = (MAX_32, MAX_32, 0xFFFF)
        if any(n not in (w, f) for n, w, f in zip(narrow, values, full, strict=True)):
            raise ReadError(file.path, "the two end records of the zip archive disagree")
        start, size, count = values
    if start + size != at:
        raise ReadError(file.path, "zip directory is not where the end record says; bytes were added or lost")
    return start, size, count


def _find_zip64(file: File | Window, eocd_at: int) -> tuple[int, int, int, int] | None:
    """Return `(its own offset, directory offset, directory size, entries)` of the zip64 end record, if any."""
    locator_at = eocd_at - EOCD64_LOCATOR.size
    locator = file.read(locator_at, EOCD64_LOCATOR.size) if locator_at >= 0 else b""
    if locator[:4] != b"PK\6\7":
        return None
    at = EOCD64_LOCATOR.unpack(locator)[2]
    if at + EOCD64.size != locator_at:
        raise ReadError(file.path, "zip64 end record is not where its locator says; bytes were added or lost")
    record = EOCD64.unpack(file.read(at, EOCD64.size))
    if record[0] != b"PK\6\6":
        raise ReadError(file.path, "zip64 end record is damaged")
    return at, record[9], record[8], record[7]


def _no_directory(file: File | Window) -> ReadError:
    if file.size == 0:
        return ReadError(file.path, "is empty", "cut")
    head = head_of(file)
    if head.startswith(b"PK\3\4"):
        text = f"is cut short: {file.size} bytes, and the zip directory at its end is absent"
        return ReadError(file.path, text, "cut")
    what = what_is(head)
    return ReadError(file.path, f"is {what or 'neither a zip archive nor an older file of torch.save'}")


Entry = tuple[bytes, int, int, int, int, int, int]
"""Full name, offset of the local header, size, size in the file, CRC-32, method, flags."""


def _parse_entries(file: File | Window, data: bytes, count: int) -> list[Entry]:
    if count > MAX_RECORDS:
        raise ReadError(file.path, f"zip directory of {count} records; at most {MAX_RECORDS} are read")
    entries: list[Entry] = []
    at = 0
    while at < len(data) and len(entries) <= count:
        if at + CENTRAL.size > len(data) or data[at : at + 4] != b"PK\1\2":
            raise ReadError(file.path, "zip directory is damaged")
        f = CENTRAL.unpack_from(data, at)
        flags, method, crc, packed, size, n_name, n_extra, n_comment, header = *f[3:5], *f[7:13], f[-1]
        names = at + CENTRAL.size
        at = names + n_name + n_extra + n_comment
        if at > len(data):
            raise ReadError(file.path, "zip directory is damaged")
        name, extra = data[names : names + n_name], data[names + n_name : names + n_name + n_extra]
        size, packed, header = _zip64_sizes(file, extra, size, packed, header)
        if method == 0 and size != packed:
            raise ReadError(file.path, "zip directory gives a stored record two sizes")
        entries.append((name, header, size, packed, crc, method, flags))
    if len(entries) != count or not entries:
        raise ReadError(file.path, f"zip directory has other entries than the {count} that its end record says")
    return entries


def _zip64_sizes(file: File | Window, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Replace each 32-bit field that is full by its 64-bit value from the extra field."""
    values = [size, packed, header]
    if MAX_32 not in values:
        return size, packed, header
    wide = _zip64_field(extra)
    for i, value in enumerate(values):
        if value == MAX_32:
            if len(wide) < 8:
                raise ReadError(file.path, "zip64 sizes are missing from the directory")
            values[i], wide = struct.unpack_from("<Q", wide)[0], wide[8:]
    return values[0], values[1], values[2]


def _zip64_field(extra: bytes) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def _name_below_root(file: File | Window, full: bytes, first: bytes) -> str:
    root = first.partition(b"/")[0]
    try:
        text = full.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadError(file.path, f"record name {describe_for_error(full)} is not UTF-8") from error
    parts = text.split("/")
    if (len(parts) == 1 and text in OTHER_ZIPS) or text.endswith(".npy"):
        raise ReadError(file.path, OTHER_ZIPS.get(text, "a zip archive of numpy arrays (.npz), not a checkpoint"))
    if full.partition(b"/")[0] != root or len(parts) < 2 or "\0" in text or not {"", ".", ".."}.isdisjoint(parts):
        raise ReadError(file.path, f"record name {describe_for_error(text)} is not below the archive's root folder")
    return text.partition("/")[2]
