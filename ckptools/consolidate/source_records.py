"""Source records that state a checksum, compared with it from what was read of them anyway.

A record is read in pieces, by several threads and in any order; the CRC-32s of the pieces make the CRC-32 of the whole.
What nobody wanted of a record, such as the padding behind an uneven shard, is read for the checksum alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptools.consolidate.crc import combine
from ckptools.errors import ReadError
from ckptools.files import OpenFiles
from ckptools.model import Source

CHUNK = 4 << 20
"""Bytes held at a time."""


class Piece(NamedTuple):
    """Consecutive bytes that were read: how many, their CRC-32, and for which tensor."""

    nbytes: int
    crc: int
    fqn: str


class SourceRecords:
    """What was read of every record that states a CRC-32. Threads may share it."""

    def __init__(self, files: OpenFiles) -> None:
        self.files = files
        self._pieces: dict[tuple[Path, tuple[int, int], int], dict[int, Piece]] = {}

    def add(self, path: Path, record: tuple[int, int], stated: int, offset: int, piece: Piece) -> None:
        """Note a piece that was read; one that is its whole record is compared at once.

        Args:
            path: the file.
            record: byte offset and length of the record that the piece lies in.
            stated: the CRC-32 that its container states; 0 when it states none.
            offset: of the piece in the file.
            piece: what was read.

        Raises:
            ReadError: the record is not what its checksum says.
        """
        if not stated:
            return
        if (offset, piece.nbytes) == record:
            _compare(path, record, stated, piece)
        else:
            self._pieces.setdefault((path, record, stated), {})[offset] = piece

    def saw(self, fqn: str, source: Source, data: bytes) -> None:
        """Note the bytes that were read of a source from its offset on, for the tensor `fqn`; see `add`."""
        if source.crc:
            piece = Piece(len(data), zlib.crc32(data), fqn)
            self.add(source.path, source.record_span, source.crc, source.offset, piece)

    def compare(self) -> None:
        """Compare the records that were read in several pieces, or not in full.

        Raises:
            ReadError: one is not what its checksum says, or cannot be read.
        """
        for (path, record, stated), pieces in self._pieces.items():
            fqn = next(iter(pieces.values())).fqn
            crc = 0
            for nbytes, piece in self._all_of(path, record, pieces):
                crc = combine(crc, piece, nbytes)
            _compare(path, record, stated, Piece(record[1], crc, fqn))

    def _all_of(self, path: Path, record: tuple[int, int], pieces: dict[int, Piece]) -> Iterator[tuple[int, int]]:
        """Length and CRC-32 of pieces that make up a record: those that were read, and what lies between them."""
        start, nbytes = record
        at, end = start, start + nbytes
        for offset, piece in sorted(pieces.items()):
            if offset < at:
                continue  # overlaps what was counted already; what it has beyond that is read below
            yield from self._read(path, at, offset)
            yield piece.nbytes, piece.crc
            at = offset + piece.nbytes
        yield from self._read(path, at, end)

    def _read(self, path: Path, start: int, end: int) -> Iterator[tuple[int, int]]:
        with self.files.open(path) as file:
            for at in range(start, end, CHUNK):
                n = min(CHUNK, end - at)
                yield n, zlib.crc32(file.read(at, n))


def _compare(path: Path, record: tuple[int, int], stated: int, piece: Piece) -> None:
    if piece.crc != stated:
        text = f"{piece.fqn}: CRC-32 of the record at byte {record[0]} is wrong; the file is damaged"
        raise ReadError(path, text)
