"""The zip container of torch.save, read without torch and without copying.

A `.pt` is a zip archive whose members are stored uncompressed below one root folder: `data.pkl`, `data/<key>`
for each storage, `version`, and since torch 2.1 `byteorder`. Local headers carry no sizes (bit 3 is set and a
data descriptor follows the payload), so the central directory is authoritative; the payload begins behind the
local header's own name and extra field. Source: caffe2/serialize/inline_container.cc and real files.

An archive that another reader could understand differently is refused, such as one whose local headers and directory
have different names or sizes. Messages call a zip entry a record, as torch does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import File, Window, head_of, what_is
from ckptools.model.provenance import FILE_NAME
from ckptools.model.tree import describe_for_error
from ckptools.text import plural

# -- the directory at the end of a zip archive, and its entries --------------------------------------------------------
# An archive that another reader could understand differently is refused: duplicate names, two roots, bytes before or
# behind the archive, overlapping entries. Source: APPNOTE.TXT 4.3.12 to 4.3.16, 4.5.3.


EOCD = struct.Struct("<4s4H2LH")
END_RECORD = b"PK\5\6"
EOCD64_LOCATOR = struct.Struct("<4sLQL")
EOCD64 = struct.Struct("<4sQ2H2L4Q")
CENTRAL = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")

MAX_DIRECTORY = 256 << 20
MAX_RECORDS = 1_000_000
"""Entries of an archive; there is one for each storage, so this is more than any rank has tensors."""

OTHER_ZIPS = dict.fromkeys(
    ("metadata.json", "config.json", "model.weights.h5"), "a Keras model (.keras), not a PyTorch checkpoint"
) | {"[Content_Types].xml": "an Office document, not a checkpoint"}
"""Other kinds of zip archives, by a set of entries that they have at the top level."""

MAX_32 = 0xFFFFFFFF
MAX_16 = 0xFFFF
ENCRYPTED = 1
DESCRIPTOR = 1 << 3
NOT_PLAIN = 1 | 1 << 5 | 1 << 6 | 1 << 13
"""Flags of an entry that is encrypted or a patch of another; torch reads neither (APPNOTE.TXT 4.4.4)."""

FOLDER = 0x10
"""The bit of the external attributes that makes an entry a folder, whose bytes torch does not read."""

COMMENT = MAX_16
"""Bytes at the end in which readers search for the end record; a comment is no longer."""


class ZipEntry(NamedTuple):
    """An entry of the archive.

    Attributes:
        name: without the root folder: `data.pkl`, `data/0`.
        header: offset of the local header in the file.
        full_name: the name in the directory, in bytes.
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


def probe(file: File | Window) -> None:
    """Check that the file ends in a zip directory at the right place, without reading all of it.

    Raises:
        ReadError: it is cut short or not a torch.save file.
    """
    start, size, count = find_directory(file)
    if size < CENTRAL.size or file.read(start, 4) != b"PK\1\2":
        raise ReadError(file.path, "zip directory is damaged")
    if count <= len(AROUND_AN_OBJECT) and b"/data.pkl" not in file.read(start, size):
        check_has_object(file, read_directory(file))


AROUND_AN_OBJECT = frozenset(
    {"version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment"}
)
"""Entries that torch.save writes beside each object, some before and some after it.

Source: torch/serialization.py (`_open_zipfile_writer_file`, `_save`), caffe2/serialize/inline_container.cc
(`writeEndOfFile`): if pickling raises, the archive is closed all the same.
"""


def check_has_object(file: File | Window, names: Collection[str]) -> None:
    """Refuse an archive without an object's pickle.

    Raises:
        ReadError: it has no pickle.
    """
    if "data.pkl" in names:
        return
    if "version" in names and AROUND_AN_OBJECT.issuperset(names):
        raise ReadError(
            file.path,
            "holds no object: torch.save began it and failed before it wrote the object; look for an exception of that"
            " save; nothing can be saved from it",
            "without object",
        )
    raise ReadError(file.path, "a zip archive without data.pkl, so not written by torch.save")


def read_directory(file: File | Window) -> dict[str, ZipEntry]:
    """The entries of an archive, by name without its root folder.

    Raises:
        ReadError: it has no directory, or one that two readers could understand differently.
    """
    start, size, count = find_directory(file)
    if size > MAX_DIRECTORY:
        raise ReadError(file.path, f"zip directory of {size} bytes; at most {MAX_DIRECTORY} are read")
    entries = _parse_entries(file, file.read(start, size), count)
    entries.sort(key=lambda e: e[1])
    headers = [e[1] for e in entries[1:]] + [start]
    records: dict[str, ZipEntry] = {}
    if entries[0][1]:
        raise ReadError(file.path, f"has {entries[0][1]} bytes before its first record; bytes were added or lost")
    spelled: set[str] = set()
    for (full, header, nbytes, packed, crc, method, flags), limit in zip(entries, headers, strict=True):
        name = name_below_root(file, full, entries[0][0])
        # torch looks entries up without regard to case.
        if name.lower() in spelled:
            raise ReadError(
                file.path, f"two records are called {describe_for_error(name)}; the file is damaged or forged"
            )
        if header + LOCAL.size + len(full) + packed > limit:
            raise ReadError(
                file.path, f"record {describe_for_error(name)} runs into the next one; the file is damaged or forged"
            )
        spelled.add(name.lower())
        records[name] = ZipEntry(name, header, full, nbytes, crc, method, flags, limit)
    return records


def root_of(head: bytes) -> str:
    """The root folder of an archive, from the header of its first entry; empty if `head` has no such header.

    torch uses the name of the written file without its suffix, or `archive` for a stream.
    Source: caffe2/serialize/inline_container.cc (`PyTorchStreamWriter`, `basename`).
    """
    if len(head) < LOCAL.size or not head.startswith(b"PK\3\4"):
        return ""
    name = head[LOCAL.size : LOCAL.size + LOCAL.unpack_from(head)[9]]
    root, below, _ = name.partition(b"/")
    return root.decode("utf-8", "replace") if below else ""


def find_directory(file: File | Window) -> tuple[int, int, int]:
    """Return `(offset, size, entry count)` of the central directory, which must end where the end record begins.

    Raises:
        ReadError: there is none, or the end records contradict each other.
    """
    at = file.size - EOCD.size
    end = file.read(at, EOCD.size) if at >= 0 else b""
    if end[:4] != END_RECORD or end[-2:] != b"\0\0":
        raise _no_directory(file)
    _, disk, directory_disk, here, count, size, start, _ = EOCD.unpack(end)
    wide = _find_zip64(file, at)
    _check_one_disk(file, wide is not None, disk, directory_disk, here, count)
    if wide:
        # torch writes both end records; a full 32-bit field defers to the 64-bit one, any other must equal it.
        narrow, (at, *values) = (start, size, count), wide
        full = (MAX_32, MAX_32, MAX_16)
        if any(n not in (w, f) for n, w, f in zip(narrow, values, full, strict=True)):
            raise ReadError(file.path, "the two end records of the zip archive disagree")
        start, size, count = values
    if start + size != at:
        raise ReadError(file.path, "zip directory is not where the end record says; bytes were added or lost")
    return start, size, count


def archive_before(file: File | Window, eocd_at: int) -> int | None:
    """The start of the archive whose end record may lie at a byte; None if there is no end record."""
    end = file.read(eocd_at, EOCD.size)
    size, start = EOCD.unpack(end)[5:7]
    locator_at = max(eocd_at - EOCD64_LOCATOR.size, 0)
    at = eocd_at
    if file.read(locator_at, 4) == b"PK\6\7" and locator_at >= EOCD64.size:
        at = locator_at - EOCD64.size
        size, start = EOCD64.unpack(file.read(at, EOCD64.size))[8:10]
    begins = at - size - start
    sound = begins >= 0 and size >= CENTRAL.size and file.read(at - size, 4) == b"PK\1\2"
    return begins if sound and file.read(begins, 4) == b"PK\3\4" else None


def _find_zip64(file: File | Window, eocd_at: int) -> tuple[int, int, int, int] | None:
    """Return `(its own offset, directory offset, directory size, entries)` of the zip64 end record, if any."""
    locator_at = eocd_at - EOCD64_LOCATOR.size
    locator = file.read(locator_at, EOCD64_LOCATOR.size) if locator_at >= 0 else b""
    if locator[:4] != b"PK\6\7":
        return None
    _, disk, at, disks = EOCD64_LOCATOR.unpack(locator)
    if at + EOCD64.size != locator_at:
        raise ReadError(file.path, "zip64 end record is not where its locator says; bytes were added or lost")
    record = EOCD64.unpack(file.read(at, EOCD64.size))
    if (record[0], record[1], disk, disks) != (b"PK\6\6", EOCD64.size - 12, 0, 1):
        raise ReadError(file.path, "zip64 end record is damaged")
    _check_one_disk(file, False, *record[4:8])
    return at, record[9], record[8], record[7]


def _check_one_disk(file: File | Window, wide: bool, disk: int, directory_disk: int, here: int, count: int) -> None:
    """Refuse an archive of several disks; a `wide` end record may leave full fields to the zip64 one before it."""
    full = (MAX_16,) if wide else ()
    if any(value not in (0, *full) for value in (disk, directory_disk)) or here not in (count, *full):
        raise ReadError(file.path, "the end record of the zip archive speaks of other disks; the file is damaged")


def _bytes_behind(file: File | Window) -> int:
    """The number of extra bytes behind a complete archive; 0 if there is no such archive."""
    first = max(file.size - COMMENT - EOCD.size, 0)
    tail = file.read(first, file.size - first)
    at = tail.rfind(END_RECORD)
    while at >= 0:
        whole = at + EOCD.size <= len(tail) and archive_before(file, first + at) == 0
        if whole:
            return len(tail) - at - EOCD.size
        at = tail.rfind(END_RECORD, 0, at)
    return 0


def _no_directory(file: File | Window) -> ReadError:
    if file.size == 0:
        return ReadError(file.path, "is empty", "cut")
    head = head_of(file)
    more = _bytes_behind(file)
    if more:
        return ReadError(
            file.path, f"has {plural(more, 'extra byte')} at the end, behind a zip archive of {file.size - more} bytes"
        )
    if head.startswith(b"PK\3\4"):
        text = f"is cut short: {file.size} bytes, and the zip directory at its end is absent"
        return ReadError(file.path, text, "cut")
    what = what_is(head)
    return ReadError(file.path, f"is {what or 'neither a zip archive nor an older file of torch.save'}")


RawEntry = tuple[bytes, int, int, int, int, int, int]
"""Full name, offset of the local header, size, size in the file, CRC-32, method, flags."""


def _parse_entries(file: File | Window, data: bytes, count: int) -> list[RawEntry]:
    if count > MAX_RECORDS:
        raise ReadError(file.path, f"zip directory of {count} records; at most {MAX_RECORDS} are read")
    entries: list[RawEntry] = []
    at = 0
    while at < len(data) and len(entries) <= count:
        if at + CENTRAL.size > len(data) or data[at : at + 4] != b"PK\1\2":
            raise ReadError(file.path, "zip directory is damaged")
        f = CENTRAL.unpack_from(data, at)
        flags, method, crc, packed, size, n_name, n_extra, n_comment, disk = *f[3:5], *f[7:14]
        attributes, header = f[-2:]
        names = at + CENTRAL.size
        at = names + n_name + n_extra + n_comment
        if at > len(data):
            raise ReadError(file.path, "zip directory is damaged")
        name, extra = data[names : names + n_name], data[names + n_name : names + n_name + n_extra]
        size, packed, header = _zip64_sizes(file, extra, size, packed, header)
        if method == 0 and size != packed:
            raise ReadError(file.path, "zip directory gives a stored record two sizes")
        if flags & NOT_PLAIN or attributes & FOLDER or disk not in (0, 1):
            text = f"record {describe_for_error(name.decode(errors='replace'))} is no plain file in the zip directory"
            raise ReadError(file.path, f"{text}: encrypted, a folder, or on another disk; damaged")
        entries.append((name, header, size, packed, crc, method, flags))
    if len(entries) != count or not entries:
        raise ReadError(file.path, f"zip directory has other entries than the {count} that its end record says")
    return entries


def _zip64_sizes(file: File | Window, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Replace each full 32-bit field by its 64-bit value from the extra field."""
    values = [size, packed, header]
    if MAX_32 not in values:
        return size, packed, header
    at, length = zip64_span(extra)
    wide = extra[at : at + length]
    for i, value in enumerate(values):
        if value == MAX_32:
            if len(wide) < 8:
                raise ReadError(file.path, "zip64 sizes are missing from the directory")
            values[i], wide = struct.unpack_from("<Q", wide)[0], wide[8:]
    return values[0], values[1], values[2]


def zip64_span(extra: bytes) -> tuple[int, int]:
    """Return `(start, length)` of the zip64 values in an entry's extra field; length 0 without any."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            return at + 4, length
        at += 4 + length
    return at, 0


def name_below_root(file: File | Window, full: bytes, first: bytes) -> str:
    """The name of an entry without the root folder of the archive, which its first entry names.

    Raises:
        ReadError: the entry lies elsewhere, or has a name that torch.save does not write.
    """
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


# -- a zip archive that is cut short: find the entries before the cut by their local headers ---------------------------
# torch writes a data descriptor behind each payload, which states its size and CRC-32; a payload without its descriptor
# is incomplete. Source: APPNOTE.TXT 4.3.7 (local header), 4.3.9 (data descriptor).


DESCRIPTOR_SIGNATURE = b"PK\7\x08"
CHUNK, MAX_CHUNK = 4 << 10, 4 << 20
"""Bytes searched at once for the end of a payload: doubled each time, because most payloads are small."""

NARROW, WIDE = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
"""Data descriptors with 32-bit and with 64-bit sizes."""


def complete_records(file: File | Window) -> dict[str, ZipEntry]:
    """The complete entries of a cut archive, by name without the root folder; reads the file up to the cut.

    Raises:
        ReadError: it does not begin as an archive, or no entry is complete.
    """
    records: dict[str, ZipEntry] = {}
    first, spelled = b"", set[str]()
    for entry in _entries(file):
        first = first or entry.full_name
        name = name_below_root(file, entry.full_name, first)
        if name.lower() in spelled or len(records) == MAX_RECORDS:
            break
        spelled.add(name.lower())
        records[name] = entry._replace(name=name)
    if not records:
        raise ReadError(file.path, f"is cut short: {file.size} bytes, and not one record in it is complete", "cut")
    return records


def _entries(file: File | Window) -> Iterator[ZipEntry]:
    """Walk local headers from the start, up to one that is incomplete or not of a plain stored file."""
    at = 0
    while at + LOCAL.size <= file.size:
        signature, _, flags, method, *_, crc, _, size, n_name, n_extra = LOCAL.unpack(file.read(at, LOCAL.size))
        start = at + LOCAL.size + n_name + n_extra
        if signature != b"PK\3\4" or method or flags & NOT_PLAIN or start > file.size:
            return
        full_name = file.read(at + LOCAL.size, n_name)
        end = start + size
        if flags & DESCRIPTOR:
            found = _descriptor(file, start)
            if found is None:
                return
            crc, size, end = found
        elif size == MAX_32 or end > file.size:
            return
        yield ZipEntry("", at, full_name, size, crc, method, flags, end)
        at = end


def _descriptor(file: File | Window, start: int) -> tuple[int, int, int] | None:
    """CRC-32 and size of a payload, and the end of its descriptor; None if that is behind the cut.

    A valid descriptor states the distance from the payload's first byte as its size, and precedes another header or the
    directory: bytes of a tensor could only match by knowing their own offset.
    """
    at, chunk = start, CHUNK
    while at < file.size:
        data = file.read(at, min(chunk + WIDE.size + 4, file.size - at))
        found = data.find(DESCRIPTOR_SIGNATURE)
        while 0 <= found < chunk:
            nbytes = at + found - start
            for form in (WIDE, NARROW):
                fields = data[found : found + form.size]
                if len(fields) < form.size:
                    continue
                _, crc, packed, size = form.unpack(fields)
                behind = data[found + form.size : found + form.size + 4]
                if packed == size == nbytes and behind in (b"PK\3\4"[: len(behind)], b"PK\1\2"[: len(behind)]):
                    return crc, size, at + found + form.size
            found = data.find(DESCRIPTOR_SIGNATURE, found + 1)
        at, chunk = at + chunk, min(2 * chunk, MAX_CHUNK)
    return None


# -- the archive -------------------------------------------------------------------------------------------------------


MAX_PICKLE = 1 << 30
"""Bytes of the largest pickle that is read: four times what 1,024 ranks of a 7B model need."""

ENTRY_CRC, LOCAL_CRC = 16, 14
"""Offsets of the CRC-32 in an entry of the directory, and in a local header."""

STRUCTURE = ("data.pkl", "byteorder")
"""Entries that are read of every archive that is opened."""

ALIGNED = 64
"""A payload begins at a multiple of this. Source: caffe2/serialize/inline_container.h, kFieldAlignment."""

DESCRIPTORS = (16, 24)
"""Sizes of a data descriptor behind a payload: with 32-bit or with 64-bit sizes (APPNOTE.TXT 4.3.9)."""

FRONT = 1024
"""Bytes before a payload in which its local header begins: names are as long as file names, padding is below 128."""


class Container:
    """A torch.save archive: its entries, and their byte ranges.

    Attributes:
        file: the open file, or the part of a file that is the archive.
        records: the entries by name without the root folder.
        cut: whether the archive is cut short; then `records` are the entries before the cut.
        salvage: whether a cut archive is read as far as it goes.
    """

    def __init__(self, file: File | Window, salvage: bool = False) -> None:
        """Read the directory; with `salvage`, rebuild a cut archive's directory from its local headers."""
        self.file, self.cut, self.salvage = file, False, salvage
        try:
            self.records = read_directory(file)
        except ReadError as error:
            if not salvage or error.kind != "cut" or not file.size:
                raise

            self.records, self.cut = complete_records(file), True
        if "constants.pkl" in self.records:
            raise ReadError(file.path, "a TorchScript archive (it holds constants.pkl), not a checkpoint")
        if "data.pkl" not in self.records and self.cut:
            raise ReadError(file.path, f"is cut short: {file.size} bytes, in its pickle: no name is left", "cut")
        check_has_object(file, self.records)
        said = [self.records[name] for name in (*STRUCTURE, FILE_NAME) if name in self.records]
        file.expect((record.header, record.limit) for record in said)

    def payload(self, name: str) -> tuple[int, int]:
        """Return `(offset, size)` in bytes of an entry's payload in the archive, after checking its local header.

        Raises:
            ReadError: there is no such entry, or the two headers disagree.
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
        """Read an entry in full and check its CRC-32.

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
    """Compute the offset of a payload from torch.save's layout of entries, if only one fits; else None.

    It begins at the first aligned byte behind the local header, which has a padding of 4 bytes or more, and ends just
    before the data descriptor and the next entry. In a store, reading a header would take a request.
    """
    front = record.header + LOCAL.size + len(record.full_name)
    first = -(-(front + 4) // ALIGNED) * ALIGNED
    if not record.size and first <= record.limit:
        return first
    ends = {record.limit - record.size - nbytes for nbytes in DESCRIPTORS if record.flags & DESCRIPTOR}
    fits = [start for start in ends if not start % ALIGNED and 4 <= start - front < 2 * ALIGNED]
    return fits[0] if len(fits) == 1 else None


def has_local_header(file: File, name: str, start: int) -> bool:
    """Whether an entry whose offset was only computed has a matching local header before it.

    Args:
        file: the file, in which the archive may be an item.
        name: of the entry, without the root folder.
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
    """The offsets in an archive of an entry's CRC-32s: in the directory, and at the entry itself.

    At the entry it is in the local header, or, as torch writes it, in a data descriptor behind the payload, whose
    signature is optional (APPNOTE.TXT 4.3.9).
    """
    record = archive.records[name]
    start, size = archive.payload(name)
    entry = _entry_of(archive.file, record.full_name)
    if not record.flags & DESCRIPTOR:
        return [entry + ENTRY_CRC, record.header + LOCAL_CRC]
    signed = archive.file.read(start + size, 4) == b"PK\7\x08"
    return [entry + ENTRY_CRC, start + size + (4 if signed else 0)]


def _entry_of(file: File | Window, full_name: bytes) -> int:
    """The offset of an entry in the directory, which has one of this name."""
    at, size, _ = find_directory(file)
    directory, entry = file.read(at, size), 0
    while True:
        n_name, n_extra, n_comment = CENTRAL.unpack_from(directory, entry)[10:13]
        names = entry + CENTRAL.size
        if directory[names : names + n_name] == full_name:
            return at + entry
        entry = names + n_name + n_extra + n_comment
