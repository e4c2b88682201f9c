"""Comparison of source records with their stated checksums, before planning or from the bytes that are read anyway.

Writing an output compares every record. A comparison before that costs a second reading of the source, and is made if
damaged tensors are to be left out, or if nothing is to be written.

A record is read in pieces, by several threads and in any order; the CRC-32s of the pieces combine to that of the whole.
Bytes that no copy needs, such as the padding after an uneven shard, are read for the checksum alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckptools.cluster.team import current
from ckptools.consolidate.record import SourceChecksums
from ckptools.consolidate.writers.layout import Job
from ckptools.errors import CkptoolsError, DamagedError, original_of
from ckptools.files.opening import OpenFiles
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.checksums import (
    Record,
    combine,
    crc32,
    read_pieces,
    without_records,
)
from ckptools.tensor_io.fetch_ahead import in_ranks
from ckptools.tensor_io.file_records import count_without, damaged_records, records_of
from ckptools.tensor_io.threads import Progress
from ckptools.text import plural

Right = Mapping[Path, Collection[int]]
"""Records that match their stated CRC-32: their offsets, by file."""


class Compared(NamedTuple):
    """Records that match their stated CRC-32, their bytes, and records that do not, with the CRC-32 that they have."""

    right: Right
    nbytes: int
    damaged: Mapping[Record, int]


def compare(
    tensors: Iterable[tuple[str, Tensor]],
    files: OpenFiles,
    threads: int,
    progress: Progress,
    planned: Callable[[int], None],
) -> Compared:
    """Read every record of some tensors, given with their fqns, that states a CRC-32.

    Raises:
        ReadError: a file cannot be read.
    """
    records = records_of(tensor for _, tensor in tensors)
    nbytes = sum(sum(of.lengths) for of in records.values())
    planned(nbytes)
    wrong = damaged_records(records, files, threads, progress)
    right: dict[Path, Collection[int]] = {path: of.starts for path, of in records.items()}
    for record in wrong:
        right[record.path] = set(right[record.path]) - {record.offset}
    return Compared(right, nbytes - sum(record.nbytes for record in wrong), wrong)


def count(jobs: Iterable[Job], right: Right) -> SourceChecksums:
    """Count the records of some jobs that are right, and those without a checksum."""
    tensors = [job.tensor for job in jobs if job.tensor.kind != "meta"]
    found = records_of(tensors)
    return SourceChecksums(
        sum(len({*of.starts} & {*right.get(path, ())}) for path, of in found.items()), count_without(tensors)
    )


def without_damaged(tensor: Tensor, fqn: str, damage: Mapping[Record, int]) -> tuple[Tensor, Problem | None]:
    """Remove bytes in damaged records from a tensor; return it with the problem of the first such record, or None.

    `damage` has the damaged records with the CRC-32 that they have.
    """
    if not damage:
        return tensor, None
    read = [(shard, Record.of(source)) for shard in tensor.found for source in shard.sources]
    wrong = [(shard, record) for shard, record in read if record in damage]
    if not wrong:
        return tensor, None
    first, record = wrong[0]
    more = f" and {plural(len(wrong) - 1, 'more shard')}" if len(wrong) > 1 else ""
    text = f"{first.box}{more}: {original_of(record.path).name} is damaged: {record.damage(damage[record])}"
    return without_records(tensor, damage), Problem(Code.BAD_CHECKSUM, text, first.rank, fqn)


class BytesRead(NamedTuple):
    """Consecutive bytes that were read: their number, CRC-32 and tensor."""

    nbytes: int
    crc: int
    fqn: str


Key = tuple[str, str, int, int, int]
"""Identifies a record on all ranks, each of which may have its own temporary copy of a compressed file."""


def _key(record: Record) -> Key:
    return str(original_of(record.path)), record.name, record.offset, record.nbytes, record.crc


def joined_pieces(read: Mapping[int, BytesRead]) -> list[tuple[int, BytesRead]]:
    """The pieces of a record by their offset; consecutive ones are joined."""
    found: list[tuple[int, BytesRead]] = []
    for offset, piece in sorted(read.items()):
        if found and found[-1][0] + found[-1][1].nbytes == offset:
            start, before = found.pop()
            crc = combine(before.crc, piece.crc, piece.nbytes)
            offset, piece = start, BytesRead(before.nbytes + piece.nbytes, crc, before.fqn)
        found.append((offset, piece))
    return found


class SourceRecords:
    """The bytes read of every record that states a CRC-32, and those found `right` so far. Threads may share it."""

    def __init__(self, files: OpenFiles) -> None:
        self.files = files
        self.right: set[Record] = set()
        self._pieces: dict[Record, dict[int, BytesRead]] = {}

    @property
    def offsets(self) -> Right:
        """Those that were found right, by file."""
        found: dict[Path, list[int]] = defaultdict(list)
        for record in self.right:
            found[record.path].append(record.offset)
        return found

    def add(self, record: Record, offset: int, piece: BytesRead) -> None:
        """Note a piece of a record that was read from byte `offset` of its file; a whole record is compared at once."""
        if not record.crc:
            return
        if (offset, piece.nbytes) == (record.offset, record.nbytes):
            self._compare(record, piece.crc, piece.fqn)
        else:
            self._pieces.setdefault(record, {})[offset] = piece

    def compare(self, records: Iterable[Record] = ()) -> None:
        """Compare the records that were read in several pieces, or not in full; of several ranks, among all `records`.

        Raises:
            DamagedError: a record does not match its checksum.
            ReadError: a record cannot be read.
        """
        team = current()
        if team.world_size > 1:
            here = {_key(record): record for record in records}
            sent = [(_key(record), joined_pieces(read)) for record, read in self._pieces.items()]
            self._pieces = {}
            for key, pieces in chain.from_iterable(team.gather(sent)):
                known = self._pieces.setdefault(here[key], {})
                for offset, piece in pieces:
                    if offset not in known or known[offset].nbytes < piece.nbytes:
                        known[offset] = piece
        in_several = sorted(self._pieces.items(), key=lambda read: _key(read[0]))
        right = in_ranks(self._compare_pieces, in_several, 1, lambda read: 1)
        self.right |= {record for (record, _), _ in zip(in_several, right, strict=True)}
        if team.world_size > 1:
            self.right |= {here[key] for keys in team.gather(list(map(_key, self.right))) for key in keys}

    def _compare_pieces(self, read: tuple[Record, Mapping[int, BytesRead]]) -> None:
        record, pieces = read
        crc = 0
        for nbytes, piece in self._all_of(record, pieces):
            crc = combine(crc, piece, nbytes)
        self._compare(record, crc, next(iter(pieces.values())).fqn)

    def _all_of(self, record: Record, read: Mapping[int, BytesRead]) -> Iterator[tuple[int, int]]:
        """Length and CRC-32 of the pieces of a whole record: those that were read, and the gaps, read now."""
        at = record.offset
        for offset, piece in sorted(read.items()):
            if offset < at:
                continue  # overlaps bytes already counted; bytes beyond those are read below
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


class WrittenRegion(NamedTuple):
    """Consecutive bytes of a tensor, by its number in the plan, that were written; `crc` is 0 without checksums.

    `offset` counts from the tensor's own first byte.
    """

    job: int
    offset: int
    nbytes: int
    crc: int

    @property
    def end(self) -> int:
        """One past the last."""
        return self.offset + self.nbytes


def joined(regions: Iterable[WrittenRegion], checksums: bool) -> list[WrittenRegion]:
    """Join consecutive regions of one tensor, in order."""
    found: list[WrittenRegion] = []
    for region in sorted(regions):
        if found and found[-1].end == region.offset:
            before = found.pop()
            crc = combine(before.crc, region.crc, region.nbytes) if checksums else 0
            region = WrittenRegion(region.job, before.offset, before.nbytes + region.nbytes, crc)
        found.append(region)
    return found


def crcs_of(jobs: Sequence[Job], regions: Iterable[WrittenRegion], checksums: bool) -> list[int]:
    """The CRC-32 of every tensor from its regions; 0 without checksums.

    Raises:
        CkptoolsError: some bytes were not written, or twice.
    """
    found: list[list[WrittenRegion]] = [[] for _ in jobs]
    for region in regions:
        found[region.job].append(region)
    return [_crc_of(job, joined(own, checksums)) for job, own in zip(jobs, found, strict=True)]


def _crc_of(job: Job, regions: Sequence[WrittenRegion]) -> int:
    if not job.nbytes and not regions:
        return 0
    if len(regions) != 1 or (regions[0].offset, regions[0].nbytes) != (0, job.nbytes):
        spans = ", ".join(f"{r.offset} to {r.end}" for r in regions[:8]) or "none"
        raise CkptoolsError(None, f"{job.fqn}: of {job.nbytes} bytes these were written: {spans}; nothing was kept")
    return regions[0].crc
