"""Carry out a plan: copy, check, and only then give the output its name."""

from __future__ import annotations

import errno
import json
import os
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event, Lock, local
from typing import NamedTuple

from ckptools.cluster.team import current
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.output_place import OutputPlace, Replaced, check_unchanged, replaced
from ckptools.consolidate.publishing.multipart import MultipartOutput
from ckptools.consolidate.shares import Share, part_of, shares_of
from ckptools.consolidate.source_records import CopiedBytes, Right, SourceRecords, crcs_of, joined, key_of
from ckptools.consolidate.writers.layout import Job, OutputLayout
from ckptools.dtypes import has_nonfinite
from ckptools.errors import CkptoolsError, ReadError, RefusedError, WriteError
from ckptools.files.opening import OpenFiles, is_remote
from ckptools.files.partial_files import PartialFiles, Target, write_at, write_text
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.shards import Source
from ckptools.tensor_io.checksums import CHUNK, Record, crc32, read_pieces
from ckptools.tensor_io.fetch_ahead import Part, Progress, begin_stage, fetched_in_threads, in_ranks, parts_of
from ckptools.tensor_io.stream import Band, Copy, assemble

# -- the journal of an unfinished output: lists the written regions, so that a second run continues from there ---------
# Beside an output OUT, a folder `.OUT.resume` has the output's files under their own names, and
#
# - `plan.json`: digests of everything that determines the plan (`shares.plan_digests`): ckptools' version, the source's
#   files with their sizes and times, every tensor's place in the output. A run with another plan does not touch the
#   folder.
# - `journal-*.jsonl`, a file for each process that has written. It gets a line for a tensor, or for a part of one, once
#   the bytes are written: 8 hexadecimal digits, the CRC-32 of the rest of the line; a space; a JSON object: `job`
#   (number of the tensor in the plan), `offset` (bytes from the tensor's first byte), `nbytes`, `crc` (CRC-32 of the
#   bytes), `odd` (whether NaN or infinity was seen), `read` (the pieces that were read of source records with a CRC-32:
#   lists of path, byte offset of the record, byte offset of the piece, its bytes, its CRC-32).
#
# A run ignores a line that is torn or that does not match its own CRC-32. It does not trust the other lines either: it
# reads their bytes from the output again, and counts them as written only if they have the CRC-32 that the line states.


PLAN = "plan.json"
SCHEMA = "ckptools/resume/1"

ReadPiece = tuple[str, int, int, int, int]
"""A piece of a source record: path of the file, byte offset of the record; byte offset, bytes, CRC-32 of the piece."""


class JournalLine(NamedTuple):
    """A line of a journal: a written region, whether it has NaN or infinity, and the source pieces read for it."""

    region: CopiedBytes
    odd: bool = False
    read: Sequence[ReadPiece] = ()

    def line(self) -> bytes:
        """The bytes of the line in the file."""
        job, offset, nbytes, crc = self.region
        fields = {"job": job, "offset": offset, "nbytes": nbytes, "crc": crc, "odd": self.odd, "read": self.read}
        text = json.dumps(fields, separators=(",", ":")).encode("ascii")
        return b"%08x %s\n" % (crc32(text), text)

    @classmethod
    def of_line(cls, line: bytes) -> JournalLine | None:
        """Parse a line; None if it is incomplete or damaged."""
        if len(line) < 10 or line[:9] != b"%08x " % crc32(line[9:].rstrip(b"\n")) or not line.endswith(b"\n"):
            return None
        fields = json.loads(line[9:])
        region = CopiedBytes(fields["job"], fields["offset"], fields["nbytes"], fields["crc"])
        return cls(region, fields["odd"], [tuple(piece) for piece in fields["read"]])


class Kept(NamedTuple):
    """The folder that keeps the files of an unfinished run, and the digests of its plan."""

    folder: Path
    digests: Mapping[str, str]

    def begin(self) -> None:
        """Make the folder, or use an existing one if it is of the same plan."""
        plan = self.folder / PLAN
        try:
            self.folder.mkdir(exist_ok=True)
            if not plan.exists():
                write_text(plan, json.dumps({"schema": SCHEMA, **self.digests}, indent=1) + "\n")
            stored = json.loads(plan.read_bytes())
        except OSError as error:
            raise WriteError(self.folder, f"cannot be made: {(error.strerror or '').lower()}") from error
        except ValueError:
            stored = None
        known = stored if isinstance(stored, dict) else {}
        others = [name for name, digest in self.digests.items() if known.get(name) != digest]
        if others:
            what = f"another {' and another '.join(others)}"
            raise RefusedError(self.folder, f"is of a run with {what}; remove it, and everything is written anew")

    def entries(self) -> list[JournalLine]:
        """The undamaged lines of all journals, in order; a line that overlaps an earlier one is dropped."""
        found: list[JournalLine] = []
        for path in sorted(self.folder.glob("journal-*.jsonl")):
            with path.open("rb") as file:
                found += filter(None, map(JournalLine.of_line, file))
        kept: list[JournalLine] = []
        for entry in sorted(found, key=lambda entry: entry.region):
            before = kept[-1].region if kept else CopiedBytes(-1, 0, 0, 0)
            if entry.region.job != before.job or entry.region.offset >= before.end:
                kept.append(entry)
        return kept

    @property
    def nbytes(self) -> int:
        """Bytes that the kept files take on the disk."""
        files = [path for path in self.folder.rglob("*") if path.is_file()] if self.folder.is_dir() else []
        return sum(path.stat().st_blocks * 512 for path in files)


def resume_folder(out: Path) -> Path:
    """The folder beside an output for the files of an unfinished run."""
    return out.with_name(f".{out.name[:200]}.resume")


class Journal:
    """A journal written by this process. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"journal-{secrets.token_hex(6)}.jsonl"
        self._lock = Lock()
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except OSError as error:
            raise WriteError(self._path, f"cannot be created: {(error.strerror or '').lower()}") from error

    def note(self, regions: Iterable[CopiedBytes], odd: bool, read: Iterable[tuple[Record, CopiedBytes]]) -> None:
        """Add regions whose bytes are written, with the pieces of source records that were read for them."""
        of_record: dict[Record, dict[int, CopiedBytes]] = {}
        for record, piece in read:
            of_record.setdefault(record, {})[piece.offset] = piece
        pieces = [
            (*key_of(record), *piece[1:]) for record, found in of_record.items() for piece in joined(found.values())
        ]
        for region in regions:
            data = JournalLine(region, odd, pieces).line()
            try:
                with self._lock:
                    while data:
                        data = data[os.write(self._file, data) :]
            except OSError as error:
                raise WriteError(self._path, f"cannot be written: {(error.strerror or '').lower()}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Done:
    """Regions that an earlier run has written, and that this run has read again and verified.

    Attributes:
        entries: the lines of the journals for these regions, in order; no byte is in two of them.
    """

    def __init__(self, entries: Sequence[JournalLine] = ()) -> None:
        self.entries = entries
        self.regions = [entry.region for entry in entries]
        self._by_job: dict[int, list[CopiedBytes]] = {}
        for region in self.regions:
            self._by_job.setdefault(region.job, []).append(region)

    def restore(self, jobs: Sequence[Job], records: SourceRecords | None) -> set[str]:
        """Restore what the earlier run has read of source records; return the fqns in which it saw NaN or infinity."""
        if records is not None:
            for entry in self.entries:
                for path, start, *read in entry.read:
                    if (path, start) in records.known:
                        records.add(records.known[path, start], CopiedBytes(entry.region.job, *read))
        return {jobs[entry.region.job].fqn for entry in self.entries if entry.odd}

    def missing(self, job: int, part: Copy | Band) -> Iterator[Copy | Band]:
        """Yield the pieces of a part of a tensor that are not written yet."""
        regions, at, end = self._by_job.get(job, []), part.offset, part.offset + part.nbytes
        number = max(0, bisect_right(regions, at, key=lambda region: region.offset) - 1)
        if not regions or isinstance(part, Band):
            # A band is assembled in memory, so it was written whole or not at all.
            if not regions or not regions[number].offset <= at < end <= regions[number].end:
                yield part
            return
        for region in [*regions[number:], CopiedBytes(job, end, 0, 0)]:
            if at < min(region.offset, end):
                yield part_of(part, at - part.offset, min(region.offset, end) - part.offset)
            at = max(at, region.end)


def take_done(kept: Kept | None, jobs: Sequence[Job], targets: Sequence[int], threads: int) -> Done:
    """Read again the regions that an earlier run says it has written; return the regions that are right."""
    if kept is None:
        return Done()
    entries = current().gather(kept.entries() if current().rank == 0 else [])[0]
    right = in_ranks(partial(_is_written, jobs, targets), entries, threads, lambda entry: entry.region.nbytes)
    return Done([entry for entry, is_right in zip(entries, right, strict=True) if is_right])


def _is_written(jobs: Sequence[Job], targets: Sequence[int], entry: JournalLine) -> bool:
    number, offset, nbytes, expected = entry.region
    if not 0 <= number < len(jobs) or not 0 <= offset < offset + nbytes <= jobs[number].nbytes:
        return False
    job, crc, done = jobs[number], 0, 0
    while done < nbytes:
        data = os.pread(targets[job.file], min(CHUNK, nbytes - done), job.offset + offset + done)
        if not data:
            return False
        crc, done = crc32(data, crc), done + len(data)
    return crc == expected


# -- execution of a plan: a few threads copy bytes from file to file, in constant memory, and compute checksums --------
# If a checksum is needed, for a comparison with the source's or because the output states it (`.pt`), bytes pass
# through a small buffer of each thread and are searched for NaN and infinity. Otherwise the kernel copies between the
# files if it can, and the bytes never enter this process.


KERNEL_CHUNK = 64 << 20


class Stopped(CkptoolsError):  # noqa: N818 - it is a request, no error
    """Another thread failed or the user interrupted, so that this thread stops."""

    def __init__(self) -> None:
        super().__init__(None, "stopped")


class Executor:
    """Copy the tensors of a plan, its jobs, into open output files, the targets.

    Attributes:
        checksums: whether the CRC-32 of every tensor is wanted.
        records: collects the bytes read of source records to compare their checksums; None for no comparison.
        share: the part of the plan that this rank writes.
        done: regions that an earlier run has written, which are not written again.
        journal: lists the written regions; None for no journal.
        odd: fqns of tensors with NaN or infinity in the output; tensors with filled holes are not searched.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        targets: Sequence[Target],
        files: OpenFiles,
        checksums: bool,
        records: SourceRecords | None,
        progress: Progress,
        share: Share,
        done: Done,
        journal: Journal | None,
    ) -> None:
        self.jobs, self.targets, self.files, self.checksums = jobs, targets, files, checksums
        self.records, self.share, self.done, self.journal = records, share, done, journal
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

    def run(self, threads: int) -> list[CopiedBytes]:
        """Copy this rank's share of every tensor; return the regions that were written, with CRC-32 if wanted."""
        numbers = range(len(self.jobs))
        written = fetched_in_threads(self._job, numbers, threads, self._reads, self._give_up)
        return [piece for pieces in written for piece in pieces]

    def _parts(self, number: int) -> Iterator[Copy | Band]:
        for whole in self.share.parts(self.jobs[number]):
            yield from self.done.missing(number, whole)

    def _reads(self, number: int) -> Iterator[Part]:
        for part in self._parts(number):
            if isinstance(part, Copy):
                yield part.source, part.source_offset, part.source_offset + part.nbytes
            else:
                overlapping = (shard for shard in self.jobs[number].tensor.found if shard.box.intersect(part.box))
                yield from (stored for shard in overlapping for stored in parts_of(shard))

    def _job(self, number: int) -> list[CopiedBytes]:
        pieces: list[CopiedBytes] = []
        self._local.read = []
        for part in self._parts(number):
            if self._stop.is_set():
                raise Stopped
            pieces.append(CopiedBytes(number, part.offset, part.nbytes, self._part(number, part)))
        written = joined(pieces, self.checksums)
        if self.journal is not None:
            self.journal.note(written, self.jobs[number].fqn in self.odd, self._local.read)
        return written

    def _part(self, number: int, part: Copy | Band) -> int:
        """Write a part of a tensor; return its CRC-32, or 0 if the kernel copied the bytes."""
        job = self.jobs[number]
        if isinstance(part, Band):
            seen = None if self.records is None else partial(self._seen, number)
            data = assemble(job.tensor, part.box, job.dtype, self.files, seen)
            self._write(job, part.offset, data)
            return crc32(data) if self.checksums else 0
        compares = self.records is not None and part.record is not None and part.record.crc != 0
        if self.checksums or compares:
            return self._copy_checked(number, part)
        self._copy(number, part)
        return 0

    def _copy(self, number: int, copy: Copy) -> None:
        """Let the kernel copy the bytes, or copy them through memory if it cannot."""
        job = self.jobs[number]
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
                    break  # The kernel cannot copy between these file systems: copy through memory.
                if moved == 0:
                    raise ReadError(copy.source, f"became shorter while {job.fqn} was read")
                done += moved
                self._report(moved, job.fqn)
        if done < copy.nbytes:
            rest = Copy(copy.source, copy.source_offset + done, copy.offset + done, copy.nbytes - done)
            self._copy_checked(number, rest)

    def _copy_checked(self, number: int, copy: Copy) -> int:
        """Copy the bytes through a buffer; return their CRC-32."""
        crc, done = 0, 0
        buffer = getattr(self._local, "bytes", None)
        if buffer is None:
            buffer = self._local.bytes = memoryview(bytearray(CHUNK))
        with self.files.open(copy.source) as source:
            for data in read_pieces(source, copy.source_offset, copy.nbytes, buffer):
                if self._stop.is_set():
                    raise Stopped
                crc = crc32(data, crc)
                self._write(self.jobs[number], copy.offset + done, data)
                done += len(data)
        if copy.record is not None:
            self._saw(copy.record, CopiedBytes(number, copy.source_offset, copy.nbytes, crc))
        return crc

    def _saw(self, record: Record, piece: CopiedBytes) -> None:
        if self.records is not None and record.crc:
            self.records.add(record, piece)
            if self.journal is not None:
                self._local.read.append((record, piece))

    def _seen(self, number: int, source: Source, data: bytes) -> None:
        if source.crc:
            self._saw(Record.of(source), CopiedBytes(number, source.offset, len(data), crc32(data)))

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
"""Errors that only the output's disk can cause. EIO may come from either file; a copy through memory shows which."""


def _reason(error: OSError) -> str:
    return f"cannot write: {(error.strerror or 'unknown error').lower()}"


# -- from the plan to the name -----------------------------------------------------------------------------------------


class DiskOutput:
    """The files of an output on a disk, under temporary names: rank 0 makes them, all ranks write into them.

    The files are open until the `stack` ends. Rank 0 then removes those that did not get their names, unless they are
    kept for a next run.

    Attributes:
        descriptors: the open files.
        paths: their current paths.
    """

    def __init__(self, layout: OutputLayout, place: OutputPlace, kept: Kept | None, stack: ExitStack) -> None:
        self._layout, team, made = layout, current(), PartialFiles(kept.folder if kept else None)
        self.descriptors: list[int] = []
        self.paths: list[Path] = []
        self._partial = stack.enter_context(made) if team.rank == 0 else None
        if self._partial is not None:
            if place.new_folder is not None and layout.folder is None:
                made.make_folder(place.new_folder)
            if kept is not None:
                kept.begin()
            if layout.folder is not None:
                made.create_folder(layout.folder)
            self.descriptors = [made.create(path, size) for path, size in layout.files]
            self.paths = [made.place(path) for path, _ in layout.files]
        self.paths = team.gather(self.paths)[0]
        if self._partial is None:
            for path, (final, _) in zip(self.paths, layout.files, strict=True):
                try:
                    self.descriptors.append(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0)))
                except OSError as error:
                    why = (error.strerror or "").lower()
                    text = f"the file that rank 0 has made for it cannot be opened here: {why}"
                    raise WriteError(final, text) from error
                stack.callback(os.close, self.descriptors[-1])

    @property
    def targets(self) -> Sequence[Target]:
        """The files that the executor writes into."""
        return self.descriptors

    def finish(self, crcs: Sequence[int]) -> None:
        """Write the bytes around the tensors, given the CRC-32 of each job; then all ranks see every byte."""
        if self._partial is not None:
            for number, descriptor in enumerate(self.descriptors):
                for framing in self._layout.framing(number):
                    write_at(descriptor, framing.offset, framing.data(crcs.__getitem__))
        if current().world_size > 1:
            for descriptor in self.descriptors:
                os.fsync(descriptor)
            current().gather(None)

    def compare(self, files: OpenFiles, threads: int, progress: Progress) -> str:
        """Let the format's own library read the files; return a summary of the comparison with their sources."""
        from ckptools.consolidate.publishing.read_back import compare

        return compare(self._layout, self.descriptors, self.paths, files, threads, progress)

    def publish(self, texts: Mapping[Path, str | bytes], earlier: Replaced | None) -> None:
        """Give the data files their names, then the small text files; remove the `earlier` files that they replace."""
        if self._partial is not None:
            for path, text in texts.items():
                self._partial.add_text(path, text)
            self._partial.publish(*(earlier or ()))


class WriteFindings(NamedTuple):
    """Findings on the source and the output while the output was written.

    Attributes:
        right: source records that match their stated CRC-32, by file; None if they were not compared.
        odd: fqns of tensors in which NaN or infinity was seen, in order.
        read_back: how the output was read back and compared; empty if it was not.
    """

    right: Right | None
    odd: tuple[str, ...] = ()
    read_back: str = ""


def write(
    checkpoint: Checkpoint,
    place: OutputPlace,
    layout: OutputLayout,
    texts: Mapping[Path, str | bytes],
    manifest: Path | None,
    files: OpenFiles,
    options: ConsolidateOptions,
    progress: Progress,
    kept: Kept | None,
) -> WriteFindings:
    """Write a planned output to its place; it appears whole, or not at all, and replaces an earlier one.

    An unfinished output leaves no files, except those in `kept`, from which the next run continues.

    Raises:
        DamagedError: a source does not match its checksum.
        ReadError: a source cannot be read, or changed meanwhile.
        WriteError: the output cannot be written, or differs when read back.
    """
    team, threads, in_bucket, read_back, added = current(), options.threads, is_remote(place.path), "", dict(texts)
    with ExitStack() as stack:
        output: DiskOutput | MultipartOutput
        output = stack.enter_context(MultipartOutput(layout)) if in_bucket else DiskOutput(layout, place, kept, stack)
        share = shares_of(layout.jobs, team.world_size)[team.rank]
        done = take_done(kept, layout.jobs, output.descriptors, threads)
        journal = stack.enter_context(closing(Journal(kept.folder))) if kept else None
        records = None if options.unchecked else SourceRecords(files, layout.jobs)
        checksums = layout.checksums or in_bucket or journal is not None
        executor = Executor(layout.jobs, output.targets, files, checksums, records, progress, share, done, journal)
        executor.odd |= done.restore(layout.jobs, records)
        begin_stage(progress, "writing")
        written = executor.run(threads)
        if records is not None:
            records.compare()
        regions = [*done.regions, *chain.from_iterable(team.gather(written))]
        try:
            output.finish(crcs_of(layout.jobs, regions, checksums))
            if options.check and not in_bucket:
                read_back = output.compare(files, threads, progress)
            if manifest is not None:
                from ckptools.consolidate.publishing.read_back import manifest_json

                added[manifest] = manifest_json(layout, output.descriptors, threads)
            if team.rank == 0:
                check_unchanged(checkpoint)
                output.publish(added, replaced(checkpoint, place.path, layout, texts) if options.force else None)
            if options.check and in_bucket:
                read_back = output.compare(files, threads, progress)
        except OSError as error:
            raise WriteError(layout.files[0][0], f"cannot write: {(error.strerror or '').lower()}") from error
    odd = set[str]().union(*team.gather(executor.odd))
    in_order = dict.fromkeys(job.fqn for job in layout.jobs if job.fqn in odd)
    return WriteFindings(None if records is None else records.offsets, tuple(in_order), read_back)
