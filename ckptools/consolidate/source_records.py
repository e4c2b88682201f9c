"""Source records that state a checksum, compared with it from what was read of them anyway.

A record is read in pieces, by several threads and in any order; the CRC-32s of the pieces make the CRC-32 of the whole.
What nobody wanted of a record, such as the padding behind an uneven shard, is read for the checksum alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptools.cluster.team import current
from ckptools.errors import DamagedError, original_of
from ckptools.files.opening import OpenFiles
from ckptools.tensor_io.checksums import combine, crc32
from ckptools.tensor_io.records import Record, read_pieces
from ckptools.tensor_io.shared_work import in_ranks


class Piece(NamedTuple):
    """Consecutive bytes that were read: how many, their CRC-32, and for which tensor."""

    nbytes: int
    crc: int
    fqn: str


Key = tuple[str, str, int, int, int]
"""What a record is called among ranks, each of which may have its own temporary copy of a compressed file."""


def _key(record: Record) -> Key:
    return str(original_of(record.path)), record.name, record.offset, record.nbytes, record.crc


def joined_pieces(read: Mapping[int, Piece]) -> list[tuple[int, Piece]]:
    """The pieces of a record by their offset, those that follow each other as one."""
    found: list[tuple[int, Piece]] = []
    for offset, piece in sorted(read.items()):
        if found and found[-1][0] + found[-1][1].nbytes == offset:
            start, before = found.pop()
            crc = combine(before.crc, piece.crc, piece.nbytes)
            offset, piece = start, Piece(before.nbytes + piece.nbytes, crc, before.fqn)
        found.append((offset, piece))
    return found


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

    def compare(self, records: Iterable[Record] = ()) -> None:
        """Compare the records that were read in several pieces, or not in full, by whatever rank.

        Args:
            records: all that there are; needed where several ranks have read some.

        Raises:
            DamagedError: one is not what its checksum says.
            ReadError: one cannot be read.
        """
        team = current()
        if team.world_size > 1:
            here = {_key(record): record for record in records}
            self._take([(here[key], pieces) for other in team.gather(self._sent()) for key, pieces in other])
        in_several = sorted(self._pieces.items(), key=lambda read: _key(read[0]))
        right = in_ranks(self._compare_pieces, in_several, 1, lambda read: 1)
        self.right |= {record for (record, _), _ in zip(in_several, right, strict=True)}
        if team.world_size > 1:
            self.right |= {here[key] for keys in team.gather(list(map(_key, self.right))) for key in keys}

    def _compare_pieces(self, read: tuple[Record, Mapping[int, Piece]]) -> None:
        record, pieces = read
        crc = 0
        for nbytes, piece in self._all_of(record, pieces):
            crc = combine(crc, piece, nbytes)
        self._compare(record, crc, next(iter(pieces.values())).fqn)

    def _sent(self) -> list[tuple[Key, list[tuple[int, Piece]]]]:
        """What was read of records that were not compared yet, as few pieces of each as they make."""
        return [(_key(record), joined_pieces(read)) for record, read in self._pieces.items()]

    def _take(self, sent: Iterable[tuple[Record, list[tuple[int, Piece]]]]) -> None:
        """Take note of what all ranks have read."""
        self._pieces = {}
        for record, pieces in sent:
            known = self._pieces.setdefault(record, {})
            for offset, piece in pieces:
                if offset not in known or known[offset].nbytes < piece.nbytes:
                    known[offset] = piece

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
