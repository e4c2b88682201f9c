"""Read the directories of archives with the same entries by column: start offsets of payloads, and their CRC-32s.

Rank files of one run have thousands of entries of the same names and sizes. A directory that deviates from the first
one's is left to `zip_archive`, which reads it or reports its fault.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ckptools.files.opening import File, head_of
from ckptools.files.zip_archive import (
    CENTRAL,
    DESCRIPTOR,
    ENCRYPTED,
    LOCAL,
    MAX_32,
    MAX_PICKLE,
    STRUCTURE,
    Container,
    find_directory,
    zip64_span,
)

# Offsets of fields. Source: APPNOTE.TXT 4.3.12 (an entry of the directory), 4.3.7 (a local header) and 4.5.3 (zip64).
CRC, PACKED, SIZE, NAME, HEADER = 16, 20, 24, 28, 42
FLAGS, METHOD, LOCAL_CRC, LOCAL_SIZE, LOCAL_NAME, LOCAL_EXTRA = 6, 8, 14, 22, 26, 28
VARIES = (*range(CRC, SIZE + 4), NAME, NAME + 1, *range(HEADER, HEADER + 4))
"""Bytes of an entry that differ between similar files."""

SIGNATURE = int.from_bytes(b"PK\3\4", "little")

Ints = Any
"""An array of integers, one for each entry."""


class Columns(NamedTuple):
    """The parts of an archive that differ from another archive with the same entries.

    Attributes:
        pickle: the bytes of `data.pkl`.
        starts: the start offset of each requested entry's payload, in order.
        crcs: their CRC-32s.
        nbytes: size of the file.
        modified: its time, seconds since 1970.
        bytes_read: number of bytes read from it.
    """

    pickle: bytes
    starts: Ints
    crcs: Ints
    nbytes: int
    modified: float
    bytes_read: int


class Directory:
    """The directory of a zip archive, to be compared with the directories of other archives.

    Args:
        archive: the archive, in a file on the local disk.
        names: entries whose payloads are requested.
    """

    def __init__(self, archive: Container, names: Sequence[str]) -> None:
        file = archive.file
        start, size, _ = find_directory(file)
        data = np.frombuffer(file.read(start, size), np.uint8)
        self.offsets = _offsets(bytes(data))
        self.root = _root_of(bytes(data))
        heads, tails = self._split(data, self.offsets, len(self.root))
        self.name_lengths = _numbers(heads, NAME, 2) - len(self.root)
        self.last = len(data) - int(self.offsets[-1])
        self.fixed = np.delete(heads[:, : CENTRAL.size], VARIES, axis=1)
        self.full = _are_full(_fields(heads))
        self.wide = self._places_of_wide(bytes(data))
        self.tails = np.delete(tails, self.wide)
        fields = self._widened(heads, tails)
        self.order = np.argsort(fields[:, 3], kind="stable")
        self.place = np.argsort(self.order)
        by_header = {int(header): i for i, header in enumerate(fields[:, 3])}
        self.structure = [name for name in STRUCTURE if name in archive.records]
        records = [archive.records[name] for name in (*self.structure, *names)]
        self.asked = np.array([by_header[record.header] for record in records], np.int64)
        self.names = [record.full_name[len(self.root) :] for record in records]
        self.pickle = self.asked[0]
        self.sizes = np.delete(fields[:, 1], self.pickle)

    def _places_of_wide(self, data: bytes) -> Ints:
        """The places in the tails of the zip64 numbers that full fields refer to: a row of eight bytes for each."""
        starts: list[int] = []
        for i in np.flatnonzero(self.full.any(axis=1)).tolist():
            front = CENTRAL.size + len(self.root)
            extra = int(self.offsets[i]) + front + int(self.name_lengths[i])
            at, _ = zip64_span(data[extra : extra + CENTRAL.unpack_from(data, self.offsets[i])[11]])
            first = extra + at - (i + 1) * front
            starts += range(first, first + 8 * int(self.full[i].sum()), 8)
        return np.array(starts, np.int64)[:, None] + np.arange(8)

    @staticmethod
    def _split(data: Ints, offsets: Ints, root: int) -> tuple[Ints, Ints]:
        """The fixed parts of entries, a row each; and their remainders behind the root folder."""
        front = np.arange(CENTRAL.size + root)
        rows = data[offsets[:, None] + front]
        left = np.ones(len(data), bool)
        left[(offsets[:, None] + front).ravel()] = False
        return rows, data[left]

    def read(self, file: File) -> Columns | None:
        """Read the columns of another archive; None if it differs in other bytes, or is unusual in any way.

        Raises:
            ReadError: it is not an archive.
        """
        head_of(file)
        start, size, count = find_directory(file)
        data = np.frombuffer(file.read(start, size), np.uint8)
        root = _root_of(bytes(data))
        shift = len(root) - len(self.root)
        if (
            count != len(self.offsets)
            or size != int(self.offsets[-1]) + self.last + count * shift
            or not _is_name(root)
        ):
            return None
        rows, tails = self._split(data, self.offsets + shift * np.arange(count), len(root))
        if not np.array_equal(np.delete(rows[:, : CENTRAL.size], VARIES, axis=1), self.fixed):
            return None
        below_root = (rows[:, CENTRAL.size :] == np.frombuffer(root, np.uint8)).all()
        if not below_root or not np.array_equal(np.delete(tails, self.wide), self.tails):
            return None
        if (_numbers(rows, NAME, 2) - len(root) != self.name_lengths).any():
            return None
        if not np.array_equal(_are_full(_fields(rows)), self.full):
            return None
        fields = self._widened(rows, tails)
        _, sizes, packed, headers = fields.T
        limits = np.append(headers[self.order][1:], start)[self.place]
        odd = (fields >> 62).any() or (sizes != packed).any() or headers[self.order[0]]  # sums stay below 2^63
        odd = odd or (headers + LOCAL.size + len(root) + self.name_lengths + sizes > limits).any()
        if odd or not np.array_equal(np.delete(sizes, self.pickle), self.sizes):
            return None
        own, count = fields[self.asked], len(self.structure)
        starts = self._payloads(file, root, own, limits[self.asked])
        pickle = None if starts is None else self._pickle(file, starts[:count].tolist(), own[:count].tolist())
        if starts is None or pickle is None:
            return None
        nbytes = min(file.bytes_read, file.size)
        return Columns(pickle, starts[count:], own[count:, 0], file.size, file.modified, nbytes)

    def _widened(self, heads: Ints, tails: Ints) -> Ints:
        """The fields of entries; full ones are replaced by their zip64 values."""
        fields = _fields(heads)
        fields[self.full] = _numbers(tails[self.wide], 0, 8)
        return fields

    def _payloads(self, file: File, root: bytes, fields: Ints, limits: Ints) -> Ints | None:
        """The start offsets of the requested payloads, if their local headers agree with the directory."""
        crcs, sizes, _, headers = fields.T
        fixed, names = LOCAL.size, [root + name for name in self.names]
        lengths = np.array([fixed + len(name) for name in names], np.int64)
        data = np.frombuffer(file.read_each(headers.tolist(), lengths.tolist()), np.uint8)
        at = np.cumsum(lengths) - lengths
        local = data[at[:, None] + np.arange(fixed)]
        flags, size = _numbers(local, FLAGS, 2), _numbers(local, LOCAL_SIZE, 4)
        odd = (_numbers(local, LOCAL_CRC, 4) != crcs) | ((size != sizes) & (size != MAX_32))
        odd &= (flags & DESCRIPTOR) == 0
        odd |= (flags & ENCRYPTED) != 0
        odd |= (_numbers(local, 0, 4) != SIGNATURE) | (_numbers(local, METHOD, 2) != 0)
        odd |= _numbers(local, LOCAL_NAME, 2) + fixed != lengths
        starts = headers + lengths + _numbers(local, LOCAL_EXTRA, 2)
        odd |= starts + sizes > limits
        left = np.ones(len(data), bool)
        left[(at[:, None] + np.arange(fixed)).ravel()] = False
        return None if odd.any() or data[left].tobytes() != b"".join(names) else starts

    def _pickle(self, file: File, starts: Sequence[int], fields: Sequence[Sequence[int]]) -> bytes | None:
        """The pickle; None if it, or the byte order, is damaged."""
        found = []
        for start, (crc, size, _, _) in zip(starts, fields, strict=True):
            data = file.read(start, size) if size <= MAX_PICKLE else b""
            if len(data) < size or (crc and zlib.crc32(data) != crc):
                return None
            found.append(data)
        return found[0] if found[1:] in ([], [b"little"]) else None


def _offsets(data: bytes) -> Ints:
    """The start offsets of the entries of a parsed directory."""
    found, at = [], 0
    while at < len(data):
        found.append(at)
        at += CENTRAL.size + sum(CENTRAL.unpack_from(data, at)[10:13])
    return np.array(found, np.int64)


def _root_of(data: bytes) -> bytes:
    """The root folder in the first entry of a directory."""
    name = CENTRAL.unpack_from(data)[10] if len(data) >= CENTRAL.size else 0
    return data[CENTRAL.size :][:name].partition(b"/")[0]


def _is_name(root: bytes) -> bool:
    """Whether a root folder is accepted."""
    try:
        text = root.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return text not in ("", ".", "..") and "\0" not in text


def _fields(rows: Ints) -> Ints:
    """CRC-32, size, packed size and header offset of each entry, in zip64's order."""
    return np.stack([_numbers(rows, at, 4) for at in (CRC, SIZE, PACKED, HEADER)], 1)


def _are_full(fields: Ints) -> Ints:
    """Which fields are full and refer to zip64; a CRC-32 may be any number."""
    full: Ints = fields == MAX_32
    full[:, 0] = False
    return full


def _numbers(rows: Ints, at: int, width: int) -> Ints:
    """The little-endian numbers in some bytes of each row."""
    return sum(rows[:, at + i].astype(np.int64) << (8 * i) for i in range(width))
