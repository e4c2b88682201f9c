"""The journal of an output in the making: which regions are written, so that a second run takes up what is complete.

Beside an output OUT, a folder `.OUT.resume` has the output's files under their own names, and

- `plan.json`: SHA-256 of what the plan follows from (`plan_digest.plan_digests`): ckptools, the source's files with
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
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from ckptools.consolidate.plan import Job
from ckptools.consolidate.shares import part_of
from ckptools.consolidate.source_records import Piece, SourceRecords, joined_pieces
from ckptools.consolidate.written import Region
from ckptools.errors import RefusedError, WriteError, original_of
from ckptools.files.partial_files import write_text
from ckptools.tensor_io.byte_plan import Band, Copy
from ckptools.tensor_io.checksums import crc32
from ckptools.tensor_io.records import CHUNK, Record, stored_records

PLAN = "plan.json"
SCHEMA = "ckptools/resume/1"

ReadPiece = tuple[str, int, int, int, int]
"""Path of a source file, byte offset of a record in it, and of what was read of that: byte offset, bytes, CRC-32."""


@dataclass(frozen=True)
class Entry:
    """A line of a journal: a region that was written, and what was seen on the way."""

    region: Region
    odd: bool = False
    read: Sequence[ReadPiece] = ()

    def line(self) -> bytes:
        """As it is in the file."""
        job, offset, nbytes, crc = self.region
        told = {"job": job, "offset": offset, "nbytes": nbytes, "crc": crc, "odd": self.odd, "read": self.read}
        text = json.dumps(told, separators=(",", ":")).encode("ascii")
        return b"%08x %s\n" % (crc32(text), text)

    @classmethod
    def of_line(cls, line: bytes) -> Entry | None:
        """What a line says; None for one that was not written to its end, or is damaged."""
        if len(line) < 10 or line[:9] != b"%08x " % crc32(line[9:].rstrip(b"\n")) or not line.endswith(b"\n"):
            return None
        told = json.loads(line[9:])
        region = Region(told["job"], told["offset"], told["nbytes"], told["crc"])
        return cls(region, told["odd"], [tuple(piece) for piece in told["read"]])


@dataclass(frozen=True)
class Kept:
    """What stays of a run that does not come to its end.

    Attributes:
        folder: where it is.
        digests: of the plan that it follows.
    """

    folder: Path
    digests: Mapping[str, str]

    def begin(self) -> None:
        """Make the folder, or take up the one that is there.

        Raises:
            RefusedError: it is of another plan.
            WriteError: it cannot be made or read.
        """
        plan = self.folder / PLAN
        try:
            self.folder.mkdir(exist_ok=True)
            if not plan.exists():
                write_text(plan, json.dumps({"schema": SCHEMA, **self.digests}, indent=1) + "\n")
            told = json.loads(plan.read_bytes())
        except OSError as error:
            raise WriteError(self.folder, f"cannot be made: {(error.strerror or '').lower()}") from error
        except ValueError:
            told = None
        others = [
            name for name, digest in self.digests.items() if not isinstance(told, dict) or told.get(name) != digest
        ]
        if others:
            what = f"another {' and another '.join(others)}"
            raise RefusedError(self.folder, f"is of a run with {what}; remove it, and everything is written anew")

    def entries(self) -> list[Entry]:
        """What all journals say that can be true: in order, and no byte twice."""
        found: list[Entry] = []
        for path in sorted(self.folder.glob("journal-*.jsonl")):
            with path.open("rb") as file:
                found += [entry for entry in map(Entry.of_line, file) if entry is not None]
        kept: list[Entry] = []
        for entry in sorted(found, key=lambda entry: entry.region):
            before = kept[-1].region if kept else Region(-1, 0, 0, 0)
            if entry.region.job != before.job or entry.region.offset >= before.end:
                kept.append(entry)
        return kept

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the disk already."""
        files = [path for path in self.folder.rglob("*") if path.is_file()] if self.folder.is_dir() else []
        return sum(path.stat().st_blocks * 512 for path in files)


def resume_folder(out: Path) -> Path:
    """The folder beside an output that keeps what a run has written of it."""
    return out.with_name(f".{out.name[:200]}.resume")


class Journal:
    """A journal that this process writes. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Begin a new one.

        Raises:
            WriteError: it cannot be made.
        """
        self._path = folder / f"journal-{secrets.token_hex(6)}.jsonl"
        self._lock = Lock()
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except OSError as error:
            raise WriteError(self._path, f"cannot be created: {(error.strerror or '').lower()}") from error

    def note(self, entry: Entry) -> None:
        """Add a region whose bytes are written.

        Raises:
            WriteError: the disk does not let us.
        """
        data = entry.line()
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._file, data) :]
        except OSError as error:
            raise WriteError(self._path, f"cannot be written: {(error.strerror or '').lower()}") from error

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


@dataclass(frozen=True)
class Done:
    """What an earlier run has written, read again and found right.

    Attributes:
        entries: in order; no byte is in two of them.
    """

    entries: Sequence[Entry] = ()
    _by_job: dict[int, list[Region]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for entry in self.entries:
            self._by_job.setdefault(entry.region.job, []).append(entry.region)

    @property
    def regions(self) -> list[Region]:
        """The bytes that need not be written again."""
        return [entry.region for entry in self.entries]

    def missing(self, job: int, part: Copy | Band) -> Iterator[Copy | Band]:
        """What of a part of a tensor is to be written still."""
        regions, at, end = self._by_job.get(job, []), part.offset, part.offset + part.nbytes
        number = max(0, bisect_right(regions, at, key=lambda region: region.offset) - 1)
        if isinstance(part, Band):
            # It is put together whole, so it was written whole, or not at all.
            if number >= len(regions) or not regions[number].offset <= at < end <= regions[number].end:
                yield part
            return
        for region in [*regions[number:], Region(job, end, 0, 0)]:
            if at < min(region.offset, end):
                yield part_of(part, at - part.offset, min(region.offset, end) - part.offset)
            at = max(at, region.end)


def is_written(jobs: Sequence[Job], targets: Sequence[int], entry: Entry) -> bool:
    """Whether the output has the bytes that a journal says it has."""
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


def pieces_read(read: Iterable[tuple[Record, int, Piece]]) -> list[ReadPiece]:
    """What was read of records, for the journal: each with the byte offset and the piece, in as few as they make."""
    of_record: dict[Record, dict[int, Piece]] = {}
    for record, offset, piece in read:
        of_record.setdefault(record, {})[offset] = piece
    return [
        (str(original_of(record.path)), record.offset, offset, piece.nbytes, piece.crc)
        for record, pieces in of_record.items()
        for offset, piece in joined_pieces(pieces)
    ]


def take_read(entries: Iterable[Entry], jobs: Sequence[Job], records: SourceRecords) -> None:
    """Let records be compared with what an earlier run has read of them.

    Raises:
        DamagedError: one is not what its checksum says.
    """
    stored = stored_records((job.fqn, job.tensor) for job in jobs)
    known = {(str(original_of(one.record.path)), one.record.offset): one.record for one in stored if one.record.crc}
    for entry in entries:
        for path, start, offset, nbytes, crc in entry.read:
            if (path, start) in known:
                records.add(known[path, start], offset, Piece(nbytes, crc, jobs[entry.region.job].fqn))
