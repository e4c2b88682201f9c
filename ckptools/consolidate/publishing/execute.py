"""Execution of a plan: a few threads copy bytes from file to file, in constant memory, and compute checksums.

If a checksum is needed, because the source states one to compare or the output has one (`.pt`), bytes pass through one
small buffer per thread and are searched for NaN and infinity. Otherwise the kernel copies between the files if it can,
and the bytes never enter this process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Event, local
from typing import TYPE_CHECKING

from ckptools.consolidate.publishing.source_records import BytesRead, SourceRecords, WrittenRegion, joined
from ckptools.consolidate.writers.layout import Job
from ckptools.dtypes import has_nonfinite
from ckptools.errors import CkptoolsError, ReadError, WriteError
from ckptools.files.opening import OpenFiles
from ckptools.files.partial_files import Target, write_at
from ckptools.model.source import Source
from ckptools.tensor_io.checksums import CHUNK, Record, crc32, read_pieces
from ckptools.tensor_io.fetch_ahead import Part, fetched_in_threads, parts_of
from ckptools.tensor_io.stream import Band, Copy, assemble
from ckptools.tensor_io.threads import Progress

if TYPE_CHECKING:
    from ckptools.consolidate.publishing.journal import Done, Journal
    from ckptools.consolidate.shares import Share

KERNEL_CHUNK = 64 << 20


class Stopped(CkptoolsError):  # noqa: N818 - it is a request, no error
    """Another thread failed or the user interrupted, so that this one stops."""

    def __init__(self) -> None:
        super().__init__(None, "stopped")


class Executor:
    """Run jobs into open output files, the targets.

    Attributes:
        checksums: whether the CRC-32 of every tensor is wanted.
        records: collects the bytes read of source records to compare their checksums; None for no comparison.
        share: what this rank writes; None for everything.
        done: regions that an earlier run has written, which are not written again; None for none.
        journal: lists the written regions; None for no journal.
        odd: fqns of tensors with NaN or infinity in the output; tensors with filled holes are not searched.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        files: OpenFiles,
        checksums: bool,
        compare: bool,
        progress: Progress,
        share: Share | None = None,
        done: Done | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.targets, self.files, self.checksums = targets, files, checksums or journal is not None
        self.share, self.done, self.journal = share, done, journal
        self.records = SourceRecords(files) if compare else None
        self.odd: set[str] = set()
        self._progress = progress
        self._stop = Event()
        self._local = local()
        self._kernel = hasattr(os, "copy_file_range")

    def _give_up(self) -> None:
        self._stop.set()
        for target in self.targets:
            if not isinstance(target, int):
                target.stop()

    def run(self, jobs: Sequence[Job], threads: int) -> list[WrittenRegion]:
        """Run every job, or this rank's share of each; return the written regions, with CRC-32 if wanted."""
        written = fetched_in_threads(
            lambda n: self._job(n, jobs[n]), range(len(jobs)), threads, lambda n: self._reads(n, jobs[n]), self._give_up
        )
        return [region for regions in written for region in regions]

    def _parts(self, number: int, job: Job) -> Iterator[Copy | Band]:
        """The parts of a tensor that this rank has to write."""
        for whole in job.parts() if self.share is None else self.share.parts(job):
            yield from (whole,) if self.done is None else self.done.missing(number, whole)

    def _reads(self, number: int, job: Job) -> Iterator[Part]:
        """The parts of files that a job reads."""
        for part in self._parts(number, job):
            if isinstance(part, Copy):
                yield part.source, part.source_offset, part.source_offset + part.nbytes
            else:
                overlapping = (shard for shard in job.tensor.found if shard.box.intersect(part.box))
                yield from (stored for shard in overlapping for stored in parts_of(shard))

    def _job(self, number: int, job: Job) -> list[WrittenRegion]:
        regions: list[WrittenRegion] = []
        self._local.read = []
        for part in self._parts(number, job):
            if self._stop.is_set():
                raise Stopped
            regions.append(WrittenRegion(number, part.offset, part.nbytes, self._part(job, part)))
        written = joined(regions, self.checksums)
        if self.journal is not None:
            self.journal.note(written, job.fqn in self.odd, self._local.read)
        return written

    def _part(self, job: Job, part: Copy | Band) -> int:
        """Write a part of a tensor; return its CRC-32, or 0 if the kernel copied the bytes."""
        if isinstance(part, Band):
            return self._assemble(job, part)
        compares = self.records is not None and part.record is not None and part.record.crc != 0
        if self.checksums or compares:
            return self._copy_checked(job, part)
        self._copy(job, part)
        return 0

    def _copy(self, job: Job, copy: Copy) -> None:
        """Let the kernel copy the bytes, or copy them through memory if it cannot."""
        done, target = 0, self.targets[job.file]
        with self.files.open(copy.source) as source:
            while self._kernel and isinstance(target, int) and source.descriptor is not None and done < copy.nbytes:
                n = min(KERNEL_CHUNK, copy.nbytes - done)
                try:
                    moved = os.copy_file_range(
                        source.descriptor, target, n, copy.source_offset + done, job.offset + copy.offset + done
                    )
                except OSError as error:
                    if error.errno in _NO_SPACE:
                        raise WriteError(None, f"{job.fqn}: {_reason(error)}") from error
                    break  # another file system, or one that cannot: copy through memory
                if moved == 0:
                    raise ReadError(copy.source, f"became shorter while {job.fqn} was read")
                done += moved
                self._report(moved, job.fqn)
        if done < copy.nbytes:
            rest = Copy(copy.source, copy.source_offset + done, copy.offset + done, copy.nbytes - done)
            self._copy_checked(job, rest)

    def _copy_checked(self, job: Job, copy: Copy) -> int:
        """Copy the bytes through a buffer; return their CRC-32."""
        crc, done = 0, 0
        for piece in self._pieces(copy):
            crc = crc32(piece, crc)
            self._write(job, copy.offset + done, piece)
            done += len(piece)
        if copy.record is not None:
            self._saw(copy.record, copy.source_offset, BytesRead(copy.nbytes, crc, job.fqn))
        return crc

    def _saw(self, record: Record, offset: int, piece: BytesRead) -> None:
        """Note bytes read of a record that may state a checksum."""
        if self.records is not None and record.crc:
            self.records.add(record, offset, piece)
            if self.journal is not None:
                self._local.read.append((record, offset, piece))

    def _seen(self, fqn: str, source: Source, data: bytes) -> None:
        """Note bytes read of a source from its offset on."""
        if source.crc:
            self._saw(Record.of(source), source.offset, BytesRead(len(data), crc32(data), fqn))

    def _pieces(self, copy: Copy) -> Iterator[memoryview]:
        buffer = getattr(self._local, "bytes", None)
        if buffer is None:
            buffer = self._local.bytes = memoryview(bytearray(CHUNK))
        with self.files.open(copy.source) as source:
            for piece in read_pieces(source, copy.source_offset, copy.nbytes, buffer):
                if self._stop.is_set():
                    raise Stopped
                yield piece

    def _assemble(self, job: Job, band: Band) -> int:
        """Assemble a region in memory, convert its dtype if asked, write it; return its CRC-32."""
        seen = None if self.records is None else partial(self._seen, job.fqn)
        data = assemble(job.tensor, band.box, job.dtype, self.files, seen)
        self._write(job, band.offset, data)
        return crc32(data) if self.checksums else 0

    def _write(self, job: Job, offset: int, data: memoryview) -> None:
        if not job.tensor.fill and job.fqn not in self.odd and has_nonfinite(data, job.dtype):
            self.odd.add(job.fqn)
        try:
            write_at(self.targets[job.file], job.offset + offset, data)
        except OSError as error:
            raise WriteError(None, f"{job.fqn}: {_reason(error)}") from error
        self._report(len(data), job.fqn)

    def _report(self, nbytes: int, fqn: str) -> None:
        if self._stop.is_set():
            raise Stopped
        self._progress(nbytes, fqn)


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the output's disk alone; EIO may come from either file, so one is read and the other written to see."""


def _reason(error: OSError) -> str:
    return f"cannot write: {(error.strerror or 'unknown error').lower()}"
