"""Compare source records with their stated checksums, before planning or from the bytes that are copied anyway.

Writing an output compares every record. A comparison before that reads the source twice. It is made only if damaged
tensors may be left out or filled, or if nothing will be written.

A record is read in pieces, by several threads and in any order; the CRC-32s of the pieces combine to that of the whole.
Bytes that no copy needs, such as the padding after an uneven shard, are read for the checksum alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.cluster.team import current
from ckptools.consolidate.provenance import origin_of
from ckptools.consolidate.record import SourceChecksums
from ckptools.consolidate.writers.layout import Job
from ckptools.errors import CkptoolsError, DamagedError, RefusedError, UsageError, original_of
from ckptools.files.opening import OpenFiles, location, real_path
from ckptools.formats.open import open_again
from ckptools.formats.options import Options
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import Origin
from ckptools.model.records import grouped
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error, walk
from ckptools.option import spelled
from ckptools.tensor_io.checksums import (
    Record,
    count_without,
    crc32,
    crc32_combine,
    damaged_records,
    read_pieces,
    records_of,
    stored_records,
    without_records,
)
from ckptools.tensor_io.fetch_ahead import Progress, begin_stage, in_ranks
from ckptools.text import KeyPath, and_others, few, fqn_of, plural

Right = Mapping[Path, Collection[int]]
"""Records that match their stated CRC-32: their offsets, by file."""


class Compared(NamedTuple):
    """Records that match their stated CRC-32, the sum of their bytes, and damaged records with their actual CRC-32."""

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
    """Compare every record of some tensors, given with their fqns, that states a CRC-32.

    Raises:
        ReadError: a file cannot be read.
    """
    records = records_of(tensor for _, tensor in tensors)
    nbytes = sum(sum(of.lengths) for of in records.values())
    planned(nbytes)
    begin_stage(progress, "comparing checksums")
    wrong = damaged_records(records, files, threads, progress)
    right: dict[Path, Collection[int]] = {path: of.starts for path, of in records.items()}
    for record in wrong:
        right[record.path] = set(right[record.path]) - {record.offset}
    return Compared(right, nbytes - sum(record.nbytes for record in wrong), wrong)


def count(jobs: Iterable[Job], right: Right) -> SourceChecksums:
    """Count the records of some jobs that match their checksums, and the records without a checksum."""
    tensors = [job.tensor for job in jobs if job.tensor.kind != "meta"]
    found = records_of(tensors)
    return SourceChecksums(
        sum(len({*of.starts} & {*right.get(path, ())}) for path, of in found.items()), count_without(tensors)
    )


def without_damaged(tensor: Tensor, fqn: str, damage: Mapping[Record, int]) -> tuple[Tensor, Problem | None]:
    """Remove bytes in damaged records from a tensor; return it with the problem of the first such record, or None.

    `damage` has the damaged records with their actual CRC-32.
    """
    if not damage:
        return tensor, None
    read = [(shard, Record.of(source)) for shard in tensor.found for source in shard.sources]
    wrong = [(shard, record) for shard, record in read if record in damage]
    if not wrong:
        return tensor, None
    first, record = wrong[0]
    more = f" and {plural(len(wrong) - 1, 'more shard')}" if len(wrong) > 1 else ""
    name = original_of(record.path).name
    text = f"{first.box}{more}: {name} is damaged: {record.damage(damage[record])}"
    return without_records(tensor, damage), Problem(Code.BAD_CHECKSUM, text, first.rank, fqn, files=(name,))


class CopiedBytes(NamedTuple):
    """Consecutive bytes of a tensor, by its number in the plan, with their CRC-32; 0 without checksums.

    For bytes that were read, `offset` counts from the start of their file; for written bytes, from the tensor's first.
    """

    job: int
    offset: int
    nbytes: int
    crc: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.nbytes


def joined(pieces: Iterable[CopiedBytes], checksums: bool = True) -> list[CopiedBytes]:
    """Join consecutive pieces of one record, or of one tensor, in order."""
    found: list[CopiedBytes] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if found and found[-1].end == piece.offset:
            before = found.pop()
            crc = crc32_combine(before.crc, piece.crc, piece.nbytes) if checksums else 0
            piece = CopiedBytes(before.job, before.offset, before.nbytes + piece.nbytes, crc)
        found.append(piece)
    return found


def key_of(record: Record) -> tuple[str, int]:
    """The file and offset of a record: the same on all ranks, which may have temporary copies of a compressed file."""
    return str(original_of(record.path)), record.offset


class SourceRecords:
    """The bytes read of every record that states a CRC-32, and the records found `right`. Threads may share it."""

    def __init__(self, files: OpenFiles, jobs: Sequence[Job]) -> None:
        self.files, self.jobs = files, jobs
        self.right: set[Record] = set()
        self._pieces: dict[Record, dict[int, CopiedBytes]] = {}

    @property
    def offsets(self) -> Right:
        """The offsets of the records that were found right, by file."""
        found: dict[Path, list[int]] = defaultdict(list)
        for record in self.right:
            found[record.path].append(record.offset)
        return found

    @cached_property
    def known(self) -> dict[tuple[str, int], Record]:
        """Every record of the plan that states a CRC-32, by its key."""
        stored = stored_records((job.fqn, job.tensor) for job in self.jobs)
        return {key_of(one.record): one.record for one in stored if one.record.crc}

    def add(self, record: Record, piece: CopiedBytes) -> None:
        """Note a piece of a record that was read; a whole record is compared at once."""
        if not record.crc:
            return
        if (piece.offset, piece.nbytes) == (record.offset, record.nbytes):
            self._compare(record, piece.crc, piece.job)
        else:
            self._pieces.setdefault(record, {})[piece.offset] = piece

    def compare(self) -> None:
        """Compare the records that were read in several pieces, or by several ranks, or not in full.

        Raises:
            DamagedError: a record does not match its checksum.
            ReadError: a record cannot be read.
        """
        team = current()
        if team.world_size > 1:
            sent = [(key_of(record), joined(read.values())) for record, read in self._pieces.items()]
            self._pieces = {}
            for key, pieces in chain.from_iterable(team.gather(sent)):
                known = self._pieces.setdefault(self.known[key], {})
                for piece in pieces:
                    if piece.offset not in known or known[piece.offset].nbytes < piece.nbytes:
                        known[piece.offset] = piece
        in_several = sorted(self._pieces.items(), key=lambda read: key_of(read[0]))
        right = in_ranks(self._compare_pieces, in_several, 1, lambda read: 1)
        self.right |= {record for (record, _), _ in zip(in_several, right, strict=True)}
        if team.world_size > 1:
            self.right |= {self.known[key] for keys in team.gather(list(map(key_of, self.right))) for key in keys}

    def _compare_pieces(self, read: tuple[Record, Mapping[int, CopiedBytes]]) -> None:
        """Compare a record with the pieces of it that were read; the bytes between them are read now."""
        record, pieces = read
        job, crc, at = next(iter(pieces.values())).job, 0, record.offset
        with self.files.open(record.path) as file:
            for _, piece in [*sorted(pieces.items()), (record.end, CopiedBytes(job, record.end, 0, 0))]:
                if piece.offset < at:
                    continue  # overlaps bytes already counted; bytes beyond those are read below
                for data in read_pieces(file, at, piece.offset - at):
                    crc = crc32(data, crc)
                crc = crc32_combine(crc, piece.crc, piece.nbytes)
                at = piece.end
        self._compare(record, crc, job)

    def _compare(self, record: Record, crc: int, job: int) -> None:
        if crc != record.crc:
            raise DamagedError(record.path, self.jobs[job].fqn, record.damage(crc))
        self.right.add(record)


def crcs_of(jobs: Sequence[Job], pieces: Iterable[CopiedBytes], checksums: bool) -> list[int]:
    """The CRC-32 of every tensor from the pieces of it that were written; 0 without checksums.

    Raises:
        CkptoolsError: some bytes were not written, or were written twice.
    """
    found: list[list[CopiedBytes]] = [[] for _ in jobs]
    for piece in pieces:
        found[piece.job].append(piece)
    crcs = []
    for number, job in enumerate(jobs):
        written = joined(found[number], checksums) or [CopiedBytes(number, 0, 0, 0)]
        if [piece[1:3] for piece in written] != [(0, job.nbytes)]:
            spans = ", ".join(f"{piece.offset} to {piece.end}" for piece in written[:8])
            raise CkptoolsError(None, f"{job.fqn}: of {job.nbytes} bytes these were written: {spans}; nothing was kept")
        crcs.append(written[0].crc)
    return crcs


# -- take missing or damaged regions from another checkpoint of the same run, and refuse a checkpoint of another run ---
# Files cannot prove that two checkpoints are of one run. ckptools compares the facts that both state, and refuses if
# any differs. A note lists the facts that they do not state: for these ckptools takes the user's word.


RUN_NAMES = ("run_name", "run_id", "experiment_name", "wandb_id")
"""Keys whose values name a run. Source: Composer's state (`run_name`); names of trainers' own states."""

MOST = 3
"""At most this many names are listed in a refusal."""

ToWrite = Callable[[Checkpoint], Iterable[tuple[KeyPath, Tensor]]]


@dataclass
class Donor:
    """Another checkpoint of the run, from which missing regions are taken.

    Attributes:
        tensors: its tensors that may be written, by key path.
        proven: facts that both checkpoints state alike.
        unproven: facts that only one checkpoint states, or neither.
        damage: its records whose checksums do not match, with their actual CRC-32.
    """

    checkpoint: Checkpoint
    tensors: Mapping[KeyPath, Tensor]
    proven: tuple[str, ...]
    unproven: tuple[str, ...]
    damage: Mapping[Record, int] = field(default_factory=dict)

    @property
    def origin(self) -> Origin:
        """Its name, format, step and world size."""
        return origin_of(self.checkpoint)

    def fill(self, tensor: Tensor, source: KeyPath, gaps: Sequence[Box]) -> Tensor | None:
        """Fill the `gaps` of a tensor from the donor's tensor at the same key path; None if a gap remains."""
        other = self.tensors.get(source)
        if other is None:
            return None
        other, _ = without_damaged(other, fqn_of(source), self.damage)
        parts = [part for gap in gaps for part in _parts(gap, other)]
        made = replace(tensor, shards=(*tensor.found, *parts))
        return made if parts and cover_problem(made, fqn_of(source)) is None else None

    def note(self) -> str:
        """The note on facts that both checkpoints state alike, and on facts that could not be compared."""
        unproven = f"; NOT provable: {'; '.join(self.unproven)}" if self.unproven else ""
        proven = f"of the same run as far as files say: {'; '.join(self.proven)}"
        return f"{spelled('fill-from')} {self.origin}: {proven}{unproven}"


def open_donor(checkpoint: Checkpoint, given: str | Path, to_write: ToWrite) -> Donor:
    """Open another checkpoint with the options of the first, and refuse it if it is not of the same run.

    `to_write` yields the tensors of a checkpoint that are to be written, by key path.

    Raises:
        RefusedError: the other checkpoint is of another run or architecture, or is the same checkpoint.
        ReadError: the other checkpoint cannot be opened.
    """
    options = replace(checkpoint.options or Options(), files=(), only_this_file=False, ranks=None, said={})
    other = open_again(location(given), options)
    if _real_files(checkpoint) & _real_files(other):
        raise RefusedError(other.path, f"{spelled('fill-from')}: shares files with the checkpoint that is to be filled")
    try:
        mine, theirs = dict(to_write(checkpoint)), dict(to_write(other))
    except UsageError as error:
        raise RefusedError(other.path, f"{spelled('fill-from')}: is not of the same run: {error.reason}") from error
    differences, proven, unproven = _facts_compared(checkpoint, other)
    differences += _tensors_that_differ(mine, theirs)
    if differences:
        others = and_others(len(differences) - 1)
        raise RefusedError(other.path, f"{spelled('fill-from')}: is not of the same run: {differences[0]}{others}")
    proven = [f"names, shapes, dtypes and layout of {plural(len(mine), 'tensor')}", *proven]
    return Donor(other, theirs, tuple(proven), tuple(unproven))


def _real_files(checkpoint: Checkpoint) -> set[Path]:
    return {real_path(file.path) for file in checkpoint.files if file.is_here}


def _parts(gap: Box, other: Tensor) -> Iterator[Shard]:
    """Yield the parts of the other tensor's shards that lie in a gap; of every replica, so that these are compared."""
    for shard in other.found:
        common = gap.intersect(shard.box)
        if common is not None and shard.encoded is None:
            yield shard.part(common.seen_from(shard.box), common)


# -- is it of the same run? --------------------------------------------------------------------------------------------


def _facts_compared(one: Checkpoint, other: Checkpoint) -> tuple[list[str], list[str], list[str]]:
    """Compare the facts that two checkpoints of one run share: list the differing, the equal and the unknown facts."""
    differ, agree, unknown = list[str](), list[str](), ["that values of two saves fit together"]
    if one.format != other.format:
        differ.append(f"it is saved as {other.format}, the other as {one.format}")
    mine, theirs = one.world_size.exact, other.world_size.exact
    if mine is None or theirs is None:
        unknown.append("world size")
    elif mine != theirs:
        differ.append(f"{plural(theirs, 'rank')} saved it, and {plural(mine, 'rank')} the other")
    else:
        agree.append(f"world size {mine}")
    names, others = _run_names(one), _run_names(other)
    shared = sorted(names.keys() & others.keys())
    for key in shared:
        stated = describe_for_error(names[key])
        if names[key] != others[key]:
            differ.append(f"its {key} is {describe_for_error(others[key])}, the other's {stated}")
        else:
            agree.append(f"{key} {stated}")
    if not shared:
        unknown.append("the run's name, which its files do not state")
    return differ, agree, unknown


def _tensors_that_differ(mine: Mapping[KeyPath, Tensor], theirs: Mapping[KeyPath, Tensor]) -> Iterator[str]:
    for words, missing in (("lacks", mine.keys() - theirs.keys()), ("has besides", theirs.keys() - mine.keys())):
        if missing:
            listed = sorted(map(fqn_of, missing))
            yield f"it {words} {plural(len(listed), 'tensor')}: {few(listed, MOST)}"
    for path, tensor in mine.items():
        if path in theirs:
            yield from _unlike(fqn_of(path), tensor, theirs[path])


def _unlike(fqn: str, mine: Tensor, theirs: Tensor) -> Iterator[str]:
    """Yield the first difference between two tensors of one name: in shape, dtype and so on, or in their shards."""
    for what in ("shape", "dtype", "kind", "placements", "mesh"):
        found = getattr(theirs, what), getattr(mine, what)
        if found[0] != found[1]:
            yield f"{what} of {fqn}: {describe_for_error(found[0])}, the other's {describe_for_error(found[1])}"
            return
    cut = [grouped((s for s in tensor.found if s.box.numel), lambda s: s.rank) for tensor in (mine, theirs)]
    for rank in cut[0].keys() & cut[1].keys() - {None}:
        boxes = [sorted({s.box for s in by_rank[rank]}) for by_rank in cut]
        if boxes[0] != boxes[1]:
            yield f"rank {rank} has {boxes[1][0]} of {fqn}, and {boxes[0][0]} in the other"
            return


def _run_names(checkpoint: Checkpoint) -> dict[str, Any]:
    """The names that a checkpoint gives its run, by their keys in its tree, such as `run_name`."""
    leaves: Iterable[tuple[KeyPath, Any]] = walk(checkpoint.tree)
    return {str(path[-1]): leaf for path, leaf in leaves if path and path[-1] in RUN_NAMES and isinstance(leaf, str)}
