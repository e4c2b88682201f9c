"""Compare the records that ranks read with the checksums that the files state, without reading anything twice.

A rank reads only its own parts of a record. The CRC-32s of parts make that of the whole, so ranks exchange these. What
no rank keeps of a record, such as the padding of a flat partition, is read once, if it is little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

from ckptools.files.opening import OpenFiles
from ckptools.model.shards import Source
from ckptools.tensor_io.checksums import Record, crc32, crc32_combine, read_pieces

MOST_PIECES = 1024
"""A record of which a rank reads more pieces than this, such as columns of a matrix, is not compared."""


MOST_MISSING = 64 << 10
"""At most so many bytes of a record that no rank has read are read to compare it; of a large one a sixteenth."""


class RecordPart(NamedTuple):
    """Bytes `start` to `end` of a record, and their CRC-32."""

    start: int
    end: int
    crc: int


RecordParts = Mapping[Record, Sequence[RecordPart]]


class RecordChecks:
    """The records that one rank has read, in whole or in pieces."""

    def __init__(self) -> None:
        self._pieces: dict[Record, list[RecordPart]] = defaultdict(list)
        self._lock = Lock()
        self.right = 0

    def seen(self, source: Source, data: bytes | memoryview) -> None:
        """Note bytes that were read from the first element of a source on."""
        if not source.crc or not data:
            return
        found, start = crc32(data), source.offset - source.record_span[0]
        with self._lock:
            if found == source.crc and len(data) == source.record_span[1]:
                self.right += 1  # the usual case, in which nothing is left to do
            else:
                self._pieces[Record.of(source)].append(RecordPart(start, start + len(data), found))

    def pieces(self) -> dict[Record, list[RecordPart]]:
        """The pieces of each record, joined where one follows another; not of a record that was right as a whole."""
        return {record: joined for record, some in self._pieces.items() if len(joined := _joined(some)) <= MOST_PIECES}


class Checksums(NamedTuple):
    """The records that were read, as far as they state a checksum.

    Attributes:
        right: number of times that a record was read in whole and matches it.
        of: the same, and the number of records that ranks have read in parts or that do not match.
        damaged: records that do not match, with the CRC-32 of their bytes.
    """

    right: int
    of: int
    damaged: Mapping[Record, int] = {}


def compared(right: int, of_ranks: Iterable[RecordParts], files: OpenFiles) -> Checksums:
    """Compare the records of which ranks have read every byte, or nearly so.

    Args:
        right: number of records that single ranks have read in whole, and that match.
        of_ranks: the pieces of other records, for each rank.
        files: keeps sources open.

    Raises:
        ReadError: a file cannot be read.
    """
    pieces: dict[Record, set[RecordPart]] = defaultdict(set)
    for of_rank in of_ranks:
        for record, some in of_rank.items():
            pieces[record].update(some)
    joined = {record: _joined([*some, *_missing(record, some, files)]) for record, some in pieces.items()}
    found = {record: one[0].crc for record, one in joined.items() if [p[:2] for p in one] == [(0, record.nbytes)]}
    damaged = {record: crc for record, crc in found.items() if crc != record.crc}
    return Checksums(right + len(found) - len(damaged), right + len(pieces), damaged)


def _missing(record: Record, pieces: Iterable[RecordPart], files: OpenFiles) -> Iterator[RecordPart]:
    """Read the parts of a record that no rank has read, if they are few bytes."""
    read = _joined(pieces)
    ends = [(0, 0), *((piece.start, piece.end) for piece in read), (record.nbytes, record.nbytes)]
    gaps = [(end, start) for (_, end), (start, _) in pairwise(ends) if start > end]
    if sum(end - start for start, end in gaps) > max(MOST_MISSING, record.nbytes // 16):
        return
    for start, end in gaps:
        crc = 0
        with files.open(record.path) as file:
            for piece in read_pieces(file, record.offset + start, end - start):
                crc = crc32(piece, crc)
        yield RecordPart(start, end, crc)


def _joined(pieces: Iterable[RecordPart]) -> list[RecordPart]:
    """Join pieces that follow each other; a piece that begins inside of the last one is left out."""
    found: list[RecordPart] = []
    for piece in sorted(pieces):
        if found and piece.start == found[-1].end:
            crc = crc32_combine(found[-1].crc, piece.crc, piece.end - piece.start)
            found[-1] = RecordPart(found[-1].start, piece.end, crc)
        elif not found or piece.start > found[-1].end:
            found.append(piece)
    return found
