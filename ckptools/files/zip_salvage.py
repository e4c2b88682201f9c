"""Records of a zip archive that is cut short: those whose bytes are all in front of the cut, by their local headers.

torch writes a data descriptor behind each payload, which states its size and CRC-32; a payload whose descriptor is gone
is not complete. Source: APPNOTE.TXT 4.3.7 (local header), 4.3.9 (data descriptor); `zip_archive` for how torch does it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ckptools.errors import ReadError
from ckptools.files.opening import File, Window
from ckptools.files.zip_directory import DESCRIPTOR, LOCAL, MAX_32, MAX_RECORDS, NOT_PLAIN, ZipEntry, name_below_root

SIGNATURE = b"PK\7\x08"
CHUNK, MAX_CHUNK = 4 << 10, 4 << 20
"""Bytes that are searched at once for the end of a payload: twice as many each time, for most payloads are small."""

NARROW, WIDE = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
"""Data descriptors with 32-bit and with 64-bit sizes."""


def complete_records(file: File | Window) -> dict[str, ZipEntry]:
    """The records in front of the cut, by name without the root folder; the file is read up to the cut.

    Raises:
        ReadError: it does not begin as an archive, or not one record is complete.
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
    """Walk local headers from the start, until one is not complete or is no plain stored file."""
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
    """CRC-32 and size of a payload, and where its descriptor ends; None if that is behind the cut.

    A descriptor is one whose size is the distance from the first byte of the payload, in front of another header or of
    the directory: bytes of a tensor that look so would have to know where they lie.
    """
    at, chunk = start, CHUNK
    while at < file.size:
        data = file.read(at, min(chunk + WIDE.size + 4, file.size - at))
        found = data.find(SIGNATURE)
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
            found = data.find(SIGNATURE, found + 1)
        at, chunk = at + chunk, min(2 * chunk, MAX_CHUNK)
    return None
