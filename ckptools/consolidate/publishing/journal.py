"""The journal of an unfinished output: lists the written regions, so that a second run continues from there.

Beside an output OUT, a folder `.OUT.resume` has the output's files under their own names, and

- `plan.json`: SHA-256 of what the plan follows from (`shares.plan_digests`): ckptools, the source's files with
  their sizes and times, every tensor's place in the output. A run with another plan does not touch the folder.
- `journal-*.jsonl`, one for each process that has written: a line per tensor, or part of one, once its bytes are
  written: 8 hexadecimal digits, the CRC-32 of the rest of the line; a space; a JSON object: `job` (number of the tensor
  in the plan), `offset` (bytes from the tensor's first byte), `nbytes`, `crc` (CRC-32 of the bytes), `odd` (whether NaN
  or infinity was seen), `read`: what was read for it of source records that state a CRC-32, a list of path, byte offset
  of the record, byte offset, bytes, CRC-32.

A line that is torn, or not what its own CRC-32 says, is passed over. Nothing else is believed either: the bytes that a
line is about are read from the output again, and count as written only if they have the CRC-32 that it states.
"""

from __future__ import annotations

import json
import os
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ckptools.cluster.team import current
from ckptools.consolidate.publishing.source_records import BytesRead, SourceRecords, WrittenRegion, joined_pieces
from ckptools.consolidate.shares import part_of
from ckptools.consolidate.writers.layout import Job
from ckptools.errors import RefusedError, WriteError, original_of
from ckptools.files.partial_files import write_text
from ckptools.tensor_io.checksums import CHUNK, Record, crc32, stored_records
from ckptools.tensor_io.fetch_ahead import in_ranks
from ckptools.tensor_io.stream import Band, Copy

PLAN = "plan.json"
SCHEMA = "ckptools/resume/1"

ReadPiece = tuple[str, int, int, int, int]
"""Path of a source file, byte offset of a record in it, and of what was read of that: byte offset, bytes, CRC-32."""


class JournalLine(NamedTuple):
    """A line of a journal: a written region, and the findings on its bytes."""

    region: WrittenRegion
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
        """Parse a line; None for one that is incomplete or damaged."""
        if len(line) < 10 or line[:9] != b"%08x " % crc32(line[9:].rstrip(b"\n")) or not line.endswith(b"\n"):
            return None
        fields = json.loads(line[9:])
        region = WrittenRegion(fields["job"], fields["offset"], fields["nbytes"], fields["crc"])
        return cls(region, fields["odd"], [tuple(piece) for piece in fields["read"]])


class Kept(NamedTuple):
    """The folder with the files kept of an unfinished run, and the digests of its plan."""

    folder: Path
    digests: Mapping[str, str]

    def begin(self) -> None:
        """Make the folder, or use the existing one."""
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
        """The plausible lines of all journals: in order, and no byte twice."""
        found: list[JournalLine] = []
        for path in sorted(self.folder.glob("journal-*.jsonl")):
            with path.open("rb") as file:
                found += filter(None, map(JournalLine.of_line, file))
        kept: list[JournalLine] = []
        for entry in sorted(found, key=lambda entry: entry.region):
            before = kept[-1].region if kept else WrittenRegion(-1, 0, 0, 0)
            if entry.region.job != before.job or entry.region.offset >= before.end:
                kept.append(entry)
        return kept

    @property
    def nbytes(self) -> int:
        """Bytes on the disk already."""
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

    def note(self, regions: Iterable[WrittenRegion], odd: bool, read: Iterable[tuple[Record, int, BytesRead]]) -> None:
        """Add regions whose bytes are written, with what was read of source records for them."""
        of_record: dict[Record, dict[int, BytesRead]] = {}
        for record, offset, piece in read:
            of_record.setdefault(record, {})[offset] = piece
        pieces = [
            (str(original_of(record.path)), record.offset, offset, piece.nbytes, piece.crc)
            for record, found in of_record.items()
            for offset, piece in joined_pieces(found)
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
    """Regions that an earlier run has written, read again and verified.

    Attributes:
        entries: in order; no byte is in two of them.
        regions: those of the entries.
    """

    def __init__(self, entries: Sequence[JournalLine] = ()) -> None:
        self.entries = entries
        self.regions = [entry.region for entry in entries]
        self._by_job: dict[int, list[WrittenRegion]] = {}
        for region in self.regions:
            self._by_job.setdefault(region.job, []).append(region)

    def restore(self, jobs: Sequence[Job], records: SourceRecords | None) -> set[str]:
        """Restore what the earlier run has read of source records; return the fqns in which it saw NaN or infinity."""
        if records is not None and self.entries:
            stored = stored_records((job.fqn, job.tensor) for job in jobs)
            keys = ((str(original_of(one.record.path)), one.record.offset) for one in stored)
            known = {key: one.record for key, one in zip(keys, stored, strict=True) if one.record.crc}
            for entry in self.entries:
                for path, start, offset, nbytes, crc in entry.read:
                    if (path, start) in known:
                        records.add(known[path, start], offset, BytesRead(nbytes, crc, jobs[entry.region.job].fqn))
        return {jobs[entry.region.job].fqn for entry in self.entries if entry.odd}

    def missing(self, job: int, part: Copy | Band) -> Iterator[Copy | Band]:
        """The rest of a part of a tensor that is not written yet."""
        regions, at, end = self._by_job.get(job, []), part.offset, part.offset + part.nbytes
        number = max(0, bisect_right(regions, at, key=lambda region: region.offset) - 1)
        if isinstance(part, Band):
            # A band is assembled in memory, so it was written whole or not at all.
            if number >= len(regions) or not regions[number].offset <= at < end <= regions[number].end:
                yield part
            return
        for region in [*regions[number:], WrittenRegion(job, end, 0, 0)]:
            if at < min(region.offset, end):
                yield part_of(part, at - part.offset, min(region.offset, end) - part.offset)
            at = max(at, region.end)


def take_done(kept: Kept | None, jobs: Sequence[Job], targets: Sequence[int], threads: int) -> Done:
    """The regions that an earlier run has written, each read again."""
    entries = current().gather(kept.entries() if kept and current().rank == 0 else [])[0]
    right = in_ranks(partial(_is_written, jobs, targets), entries, threads, lambda entry: entry.region.nbytes)
    return Done([entry for entry, is_right in zip(entries, right, strict=True) if is_right])


def _is_written(jobs: Sequence[Job], targets: Sequence[int], entry: JournalLine) -> bool:
    """Whether the output has the bytes listed in a line of a journal."""
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
