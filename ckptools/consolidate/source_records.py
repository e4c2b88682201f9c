"""Source records that state a checksum, compared with it from what was read of them anyway.

A record is read in pieces, by several threads and in any order; the CRC-32s of the pieces make the CRC-32 of the whole.
What nobody wanted of a record, such as the padding behind an uneven shard, is read for the checksum alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptools.errors import DamagedError
from ckptools.files.opening import OpenFiles
from ckptools.model.tensor import Source
from ckptools.tensor_io.checksums import combine, crc32
from ckptools.tensor_io.records import Record, read_pieces


class Piece(NamedTuple):
    """Consecutive bytes that were read: how many, their CRC-32, and for which tensor."""

    nbytes: int
    crc: int
    fqn: str


class SourceRecords:
    """What was read of every record that states a CRC-32. Threads may share it.

    Attributes:
        right: the records that were compared so far.
    """

    def __init__(self, files: OpenFiles) -> None:
        self.files = files
        self.right: set[Record] = set()
        self._pieces: dict[Record, dict[int, Piece]] = {}

    def add(self, record: Record, offset: int, piece: Piece) -> None:
        """Note a piece of a record that was read from byte `offset` of its file; a whole record is compared at once.

        Raises:
            DamagedError: the record is not what its checksum says.
        """
        if not record.crc:
            return
        if (offset, piece.nbytes) == (record.offset, record.nbytes):
            self._compare(record, piece.crc, piece.fqn)
        else:
            self._pieces.setdefault(record, {})[offset] = piece

    def saw(self, fqn: str, source: Source, data: bytes) -> None:
        """Note the bytes that were read of a source from its offset on, for the tensor `fqn`; see `add`."""
        if source.crc:
            self.add(Record.of(source), source.offset, Piece(len(data), crc32(data), fqn))

    def compare(self) -> None:
        """Compare the records that were read in several pieces, or not in full.

        Raises:
            DamagedError: one is not what its checksum says.
            ReadError: one cannot be read.
        """
        for record, read in self._pieces.items():
            crc = 0
            for nbytes, piece in self._all_of(record, read):
                crc = combine(crc, piece, nbytes)
            self._compare(record, crc, next(iter(read.values())).fqn)

    def _all_of(self, record: Record, read: Mapping[int, Piece]) -> Iterator[tuple[int, int]]:
        """Length and CRC-32 of pieces that make up a record: those that were read, and what lies between them."""
        at = record.offset
        for offset, piece in sorted(read.items()):
            if offset < at:
                continue  # overlaps what was counted already; what it has beyond that is read below
            yield from self._read(record, at, offset)
            yield piece.nbytes, piece.crc
            at = offset + piece.nbytes
        yield from self._read(record, at, record.end)

    def _read(self, record: Record, start: int, end: int) -> Iterator[tuple[int, int]]:
        with self.files.open(record.path) as file:
            for data in read_pieces(file, start, end - start):
                yield len(data), crc32(data)

    def _compare(self, record: Record, crc: int, fqn: str) -> None:
        if crc != record.crc:
            raise DamagedError(record.path, fqn, record.damage(crc))
        self.right.add(record)
