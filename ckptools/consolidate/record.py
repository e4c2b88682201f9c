"""The record of `consolidate`: the files, everything that a user should know about them, and the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.consolidate.writers.layout import FromReplicas, Job, OutputLayout
from ckptools.errors import NoSpaceError
from ckptools.keys.paired import Proof
from ckptools.model.records import Rows, displayed, to_dict
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import read_files
from ckptools.model.verdict import Verdict
from ckptools.tensor_io.stream import Copy, count_parts
from ckptools.text import clip_middle, plural, size

if TYPE_CHECKING:
    from ckptools.consolidate.like import Likeness


@dataclass(frozen=True)
class SourceChecksums:
    """Numbers of the source's records that match their stated CRC-32, and of those without one."""

    right: int
    without: int


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Consecutive bytes of a tensor of the output, at a byte offset in a file, with their source.

    `source` is a file and a byte offset in it; or the region of the tensor, if it is assembled from several shards.
    """

    fqn: str
    source: tuple[Path, int] | Box
    target: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PlannedCopies:
    """Every copy of a plan, created anew in each iteration: there may be millions."""

    jobs: Sequence[Job]
    targets: Sequence[Path]

    def __len__(self) -> int:
        return sum(count_parts(job.tensor, job.dtype) for job in self.jobs)

    def __iter__(self) -> Iterator[PlannedCopy]:
        for job in self.jobs:
            for part in job.parts():
                source = (part.source, part.source_offset) if isinstance(part, Copy) else part.box
                yield PlannedCopy(job.fqn, source, self.targets[job.file], job.offset + part.offset, part.nbytes)


@dataclass(frozen=True)
class PlannedReading:
    """The bytes of tensors to read to write an output, the number of files that they are in, and every copy.

    `no_room` is the error that would prevent writing; None if the output fits on its disk.
    """

    nbytes: int
    files: int
    copies: PlannedCopies = field(repr=False)
    no_room: NoSpaceError | None = None

    def _record(self) -> dict[str, Any]:
        no_room = None if self.no_room is None else str(self.no_room)
        return {"nbytes": self.nbytes, "files": self.files, "copies": len(self.copies), "no_room": no_room}


@displayed
class OutputRow(NamedTuple):
    """A tensor of the checkpoint with its place in the output.

    Attributes:
        name: its name in the output; that in the checkpoint if it was left out.
        dtype: in the output, torch's name.
        shape: its sizes.
        file: of the output; "" if it was left out.
        offset: byte offset of its first element in the file; None if it was left out.
        bytes: in the output.
        missing: regions that are in no file of the checkpoint.
        left_out: why it was not written; "" if it was.
    """

    name: str
    dtype: str
    shape: Ints | None
    file: str
    offset: int | None
    bytes: int
    missing: tuple[str, ...] = ()
    left_out: str = ""


@displayed
@dataclass(frozen=True, repr=False)
class Consolidated:
    """The output that was written, or would be.

    Attributes:
        files: paths of the output, data files first; a folder that is one output stands for its files.
        data_files: number of files with tensors.
        nbytes: bytes of the tensors' files.
        tensors: number of tensors.
        seconds: wall time, opening included; 0 for a dry run.
        left_out: names that were not written, with the reason.
        missing: names of tensors with holes, left out or filled, with the regions that are in no file.
        needs: classes in a `.pt` that plain `torch.load` does not accept; none without `keep_types`.
        tied: names that share the bytes of an earlier name, with that name.
        notes: notes for the user.
        load: the line of Python that loads the output.
        converted: number of tensors whose dtype changes, by old and new dtype.
        planned: the bytes to read, for a dry run; None if the output was written.
        not_asked: sections that were not written because they were not asked for, with their numbers of tensors.
        layout: the plan: every tensor with its place, and every copy.
        checksums: how the source's checksums were compared; None if they were not.
        verdict: on the source.
        filled: `nan` or `zero` where holes are filled with it, `""` where tensors with holes are left out.
        from_replicas: ranks whose files are lost, and those that together hold the same; None where none are.
        borrowed: names of tensors with regions of another checkpoint of the run, and these regions.
        borrowed_from: that checkpoint: its name, step and ranks; empty without `fill_from`, or if nothing was taken.
        odd: names of tensors in which NaN or infinity was seen.
        read_back: how the output was read back and compared; empty if it was not.
        like: how the output was made like a Hugging Face model; None if it was not.
        renamed: number of tensors with another name than in the checkpoint.
    """

    files: tuple[Path, ...]
    data_files: int
    nbytes: int
    tensors: int
    seconds: float
    left_out: dict[str, str]
    missing: dict[str, tuple[str, ...]]
    needs: tuple[str, ...]
    tied: dict[str, str]
    notes: tuple[str, ...]
    load: str
    verdict: Verdict
    layout: OutputLayout
    converted: dict[tuple[str, str], int] = field(default_factory=dict)
    planned: PlannedReading | None = None
    checksums: SourceChecksums | None = None
    odd: tuple[str, ...] = ()
    read_back: str = ""
    not_asked: dict[str, int] = field(default_factory=dict)
    filled: str = ""
    from_replicas: FromReplicas | None = None
    borrowed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    borrowed_from: str = ""
    like: Likeness | None = None
    renamed: int = 0

    @property
    def proof(self) -> Proof:
        """How many elements are the source's once they are read back, and through what they came."""
        return Proof(
            tensors=self.tensors,
            elements=sum(job.tensor.numel for job in self.layout.jobs),
            renamed=self.renamed,
            rearranged=self.like.rearranged if self.like else 0,
            cut=len(self.like.cut) if self.like else 0,
            cast=sum(self.converted.values()),
        )

    @property
    def dry_run(self) -> bool:
        """Whether nothing was written."""
        return self.planned is not None

    @property
    def rows(self) -> Rows[OutputRow]:
        """A row for each tensor that is, or would be, in the output, and for each name that was left out."""
        left_out = (OutputRow(name, "", None, "", None, 0, (), why) for name, why in self.left_out.items())
        return Rows([*map(self._row, self.layout.jobs), *left_out])

    def _row(self, job: Job) -> OutputRow:
        path, shape = self.layout.files[job.file][0], job.tensor.shape
        missing = self.missing.get(job.fqn, ())
        return OutputRow(job.fqn, job.dtype, shape, str(path), job.offset, job.nbytes, missing)

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per tensor, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()

    def to_dict(self) -> dict[str, Any]:
        """The record as a plain dict, without a row for each tensor."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("files", "data_files", "nbytes", "tensors", "seconds", "dry_run", "left_out", "missing", "filled",
                 "from_replicas", "borrowed", "borrowed_from", "tied", "odd", "notes", "checksums", "read_back",
                 "not_asked", "needs", "load", "verdict", "like", "proof")  # fmt: skip
        converted = [{"from": old, "to": new, "tensors": n} for (old, new), n in self.converted.items()]
        return {**{name: getattr(self, name) for name in names}, "converted": converted, "planned": self.planned}

    def _summary(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        left = f", {plural(len(self.left_out), 'name')} LEFT OUT" if self.left_out else ""
        holes = f", {plural(len(self.missing), 'tensor')} WITH HOLES" if self.missing else ""
        holes += f", {plural(len(self.borrowed), 'tensor')} IN PART OF ANOTHER SAVE" if self.borrowed else ""
        facts = f"{plural(self.tensors, 'tensor')}, {size(self.nbytes)}{left}{holes}"
        return f"{verb} {clip_middle(str(self.files[0]), 60) if self.files else 'nothing'}: {facts}"


def planned_reading(jobs: Sequence[Job], targets: Sequence[Path]) -> PlannedReading:
    """The bytes to read to write some tensors into some files."""
    sources = read_files(job.tensor.shards for job in jobs)
    return PlannedReading(sum(job.tensor.nbytes for job in jobs), len(sources), PlannedCopies(jobs, targets))


def converted(jobs: Iterable[Job]) -> dict[tuple[str, str], int]:
    """Count the tensors that change their dtype, by old and new dtype."""
    names: dict[tuple[str, str], set[str]] = {}
    for job in jobs:
        if job.dtype != job.tensor.dtype:
            names.setdefault((job.tensor.dtype, job.dtype), set()).add(job.fqn)
    return {dtypes: len(fqns) for dtypes, fqns in names.items()}
