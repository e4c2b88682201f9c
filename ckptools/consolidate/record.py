"""The record that `consolidate` returns: the output's files, everything that a user should know of them, the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.consolidate.writers.layout import FromReplicas, Job, OutputLayout
from ckptools.display.page import PagedRecord, ScreenPage
from ckptools.display.record_json import to_json
from ckptools.display.screen import PIPE, Screen, mark_of
from ckptools.display.tables import Column, table
from ckptools.dtypes import short
from ckptools.errors import NoSpaceError
from ckptools.keys.pairing import Proof
from ckptools.model.extents import read_paths
from ckptools.model.records import Rows, displayed, to_dict
from ckptools.model.regions import Box, Ints
from ckptools.model.verdict import Verdict
from ckptools.option import spelled
from ckptools.tensor_io.stream import Copy, count_parts, has_adapter
from ckptools.text import and_more, clip, clip_middle, duration, few, first_few, plural, printable, size

if TYPE_CHECKING:
    from ckptools.consolidate.output_place import Likeness


@dataclass(frozen=True)
class SourceChecksums:
    """The number of source records that match their stated CRC-32, and the number of records that state no CRC-32."""

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
    """All copies of a plan; each iteration makes them anew, because there may be millions."""

    layout: OutputLayout

    def __len__(self) -> int:
        return sum(count_parts(job.tensor, job.dtype) for job in self.layout.jobs)

    def __iter__(self) -> Iterator[PlannedCopy]:
        for job in self.layout.jobs:
            target = self.layout.files[job.file][0]
            for part in job.parts():
                source = (part.source, part.source_offset) if isinstance(part, Copy) else part.box
                yield PlannedCopy(job.fqn, source, target, job.offset + part.offset, part.nbytes)


@dataclass(frozen=True)
class PlannedReading:
    """The reading that an output needs: the bytes of tensors, the number of files with them, and every copy.

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
        name: its name in the output; its name in the checkpoint if it was left out.
        dtype: torch's name of its dtype in the output; "" if it was left out.
        file: path of its file in the output; "" if it was left out.
        offset: byte offset of its first element in the file; None if it was left out.
        bytes: its bytes in the output.
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
class Consolidated(PagedRecord):
    """The output that was written, or that a dry run would have written.

    Attributes:
        files: paths of the output, data files first; a folder that is one output stands for its files.
        data_files: number of files with tensors.
        nbytes: bytes of the tensors' files.
        seconds: wall time, opening included; 0 for a dry run.
        left_out: names that were not written, with the reason.
        missing: names of tensors with holes, left out or filled, with the regions that are in no file.
        needs: classes in a `.pt` that plain `torch.load` does not accept; empty without `keep_types`.
        tied: names that share the bytes of an earlier name, with that name.
        load: the line of Python that loads the output.
        converted: number of tensors whose dtype changes, by old and new dtype.
        planned: the bytes to read, for a dry run; None if the output was written.
        not_asked: sections that were not written because they were not asked for, with their numbers of tensors.
        layout: the plan: every tensor with its place, and every copy.
        checksums: how the source's checksums were compared; None if they were not.
        verdict: the verdict on the source.
        filled: `nan` or `zero` where holes are filled with it, `""` where tensors with holes are left out.
        from_replicas: ranks whose files are lost, and ranks that together hold the same; None if no file is lost.
        borrowed: names of tensors with regions of another checkpoint of the run, and these regions.
        borrowed_from: name, step and ranks of that checkpoint; empty without `fill_from`, or if nothing was taken.
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
        """Counts for the claim that every element of the output is the source's, once the output was read back."""
        return Proof(
            tensors=self.tensors,
            elements=sum(job.tensor.numel for job in self.layout.jobs),
            renamed=self.renamed,
            rearranged=self.like.rearranged if self.like else 0,
            cut=len(self.like.cut) if self.like else 0,
            cast=sum(self.converted.values()),
            merged=len({job.fqn for job in self.layout.jobs if has_adapter(job.tensor)}),
        )

    @property
    def dry_run(self) -> bool:
        """Whether nothing was written."""
        return self.planned is not None

    @property
    def rows(self) -> Rows[OutputRow]:  # type: ignore[override]
        """A row for each tensor that is, or would be, in the output, and for each name that was left out."""
        left_out = (OutputRow(name, "", None, "", None, 0, (), why) for name, why in self.left_out.items())
        return Rows([*map(self._row, self.layout.jobs), *left_out])

    def _row(self, job: Job) -> OutputRow:
        path, shape = self.layout.files[job.file][0], job.tensor.shape
        missing = self.missing.get(job.fqn, ())
        return OutputRow(job.fqn, job.dtype, shape, str(path), job.offset, job.nbytes, missing)

    def to_dict(self) -> dict[str, Any]:
        """The record as a plain dict, without a row for each tensor."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("files", "data_files", "nbytes", "tensors", "seconds", "dry_run", "left_out", "missing", "filled",
                 "from_replicas", "borrowed", "borrowed_from", "tied", "odd", "notes", "checksums", "read_back",
                 "not_asked", "needs", "load", "verdict", "like", "proof")  # fmt: skip
        converted = [{"from": old, "to": new, "tensors": n} for (old, new), n in self.converted.items()]
        return {**{name: getattr(self, name) for name in names}, "converted": converted, "planned": self.planned}

    def _fill(self, page: ScreenPage) -> None:
        for line in summary(self):
            page.line(line, mark_of(line))

    def _summary(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        left = f", {plural(len(self.left_out), 'name')} LEFT OUT" if self.left_out else ""
        holes = f", {plural(len(self.missing), 'tensor')} WITH HOLES" if self.missing else ""
        holes += f", {plural(len(self.borrowed), 'tensor')} IN PART OF ANOTHER SAVE" if self.borrowed else ""
        facts = f"{plural(self.tensors, 'tensor')}, {size(self.nbytes)}{left}{holes}"
        return f"{verb} {clip_middle(str(self.files[0]), 60) if self.files else 'nothing'}: {facts}"


def planned_reading(layout: OutputLayout, no_room: NoSpaceError | None) -> PlannedReading:
    """Count the bytes and files to read for a planned output."""
    nbytes = sum(job.tensor.nbytes for job in layout.jobs)
    sources = read_paths(job.tensor.extents for job in layout.jobs)
    return PlannedReading(nbytes, len(sources), PlannedCopies(layout), no_room)


def converted(jobs: Iterable[Job]) -> dict[tuple[str, str], int]:
    """Count the tensors that change their dtype, by old and new dtype."""
    names: dict[tuple[str, str], set[str]] = {}
    for job in jobs:
        if job.dtype != job.tensor.dtype:
            names.setdefault((job.tensor.dtype, job.dtype), set()).add(job.fqn)
    return {dtypes: len(fqns) for dtypes, fqns in names.items()}


# -- the record of `consolidate` as text, JSON and HTML: the files, and what was left out ------------------------------


MAX_NAMED = 5

COPY_COLUMNS = tuple(Column(f"{title}  ") for title in ("tensor", "from file", "at", "to file", "at", "bytes"))
"""Two blanks after each title separate short numbers below it."""


def summary(done: Consolidated) -> Iterator[str]:
    """Yield the lines for stdout: the files, the number of tensors, and how these were checked."""
    verb = "would write" if done.dry_run else "wrote"
    for path in done.files:
        yield printable(f"{verb} {path}")
    took = "" if done.dry_run else f" in {duration(done.seconds)}"
    files = f" in {done.data_files} files" if done.data_files > 1 else ""
    yield f"{plural(done.tensors, 'tensor')}, {size(done.nbytes)}{files}{took}"
    for (old, new), tensors in done.converted.items():
        yield f"dtype {short(old)} -> {short(new)}, to nearest even: {plural(tensors, 'tensor')}"
    if done.planned is not None:
        copies = plural(len(done.planned.copies), "copy", "copies")
        yield f"reads {size(done.planned.nbytes)} of {plural(done.planned.files, 'file')}, {copies}"
        yield f"source: {done.verdict.in_one_line}"
    yield f"source checksums: {_checksums(done.checksums, done.dry_run)}"
    if done.read_back:
        which = "every element" if not done.filled else "every element that is not filled in"
        whose = f"the source's, or taken from {printable(done.borrowed_from)}" if done.borrowed_from else "the source's"
        whose += ", or the sum of the source's weight and adapter" if done.proof.merged else ""
        yield f"checked: {done.read_back}: {which} is {whose}: {done.proof.counts}"


def _checksums(found: SourceChecksums | None, dry_run: bool) -> str:
    if found is None:
        return "not compared" + (
            f"; {spelled('check', True)} compares them" if dry_run else f" ({spelled('unchecked', True)})"
        )
    if not found.right:
        return "there are none in the source"
    without = f", {found.without} have none" if found.without else ""
    return f"{plural(found.right, 'record')} right{without}"


def copies(planned: PlannedReading, screen: Screen = PIPE) -> list[str]:
    """The table of all copies: tensor, source file and offset, target file and offset, number of bytes."""
    rows = []
    for copy in planned.copies:
        file, at = ("several", copy.source) if isinstance(copy.source, Box) else (copy.source[0].name, copy.source[1])
        rows.append([copy.fqn, file, str(at), copy.target.name, str(copy.offset), str(copy.nbytes)])
    return table(COPY_COLUMNS, rows, screen._replace(rows=None))


def remarks(done: Consolidated) -> Iterator[str]:
    """Yield the lines for stderr: tensors left out, filled or converted, other notes, and how to load the output."""
    yield from (f"note: {note}" for note in done.notes)
    if done.like is not None:
        from ckptools.consolidate.output_place import likeness_lines

        yield from likeness_lines(done.like)
    listed_in = next((path for path in done.files if path.name.endswith(".left-out.json")), None)
    for name, why in list(done.left_out.items())[:MAX_NAMED]:
        yield f"left out: {name}: {why}"
    filled = [name for name in done.missing if name not in done.left_out]
    for name in filled[:MAX_NAMED]:
        yield f"filled: {name}: {few(done.missing[name], 3)}"
    if len(filled) > MAX_NAMED:
        yield f"filled: {len(filled) - MAX_NAMED} more; all regions are in {listed_in}"
    if done.borrowed:
        yield f"NOT WHOLE: {plural(len(done.borrowed), 'tensor')} with values of another save, {done.borrowed_from}"
    for name, boxes in list(done.borrowed.items())[:MAX_NAMED]:
        yield f"from {done.borrowed_from}: {clip(name, 60)}: {few(boxes, 3)}"
    if len(done.borrowed) > MAX_NAMED:
        yield f"from it: {len(done.borrowed) - MAX_NAMED} more; all regions are in {listed_in}"
    if len(done.left_out) > MAX_NAMED:
        yield f"left out: {len(done.left_out) - MAX_NAMED} more; all are in {listed_in}"
    if done.odd:
        names = first_few([clip(name, 60) for name in done.odd], 3)
        yield f"note: NaN or infinity seen in {plural(len(done.odd), 'tensor')}: {names}"
    if done.tied:
        name, first = next(iter(done.tied.items()))
        more = and_more(len(done.tied) - 1)
        yield f"note: tied weights: {clip(name, 60)} has the bytes of {clip(first, 60)}{more}"
    if done.needs:
        keeps = f"which {spelled('keep-types', True)} keeps"
        yield (
            f"note: plain torch.load does not make {', '.join(done.needs)}, {keeps}: it "
            "needs weights_only=False, or these in torch.serialization.safe_globals"
        )
    if done.not_asked:
        tensors = [f"{count} in {clip(name, 60)}" for name, count in done.not_asked.items() if count]
        plain = [clip(name, 60) for name, count in done.not_asked.items() if not count]
        parts = [f"{plural(sum(done.not_asked.values()), 'tensor')} ({few(tensors, MAX_NAMED)})"] if tensors else []
        parts += [f"what is no tensor ({few(plain, MAX_NAMED)})"] if plain else []
        way = f"{spelled('only', 'all')} writes everything"
        yield f"note: the model alone is written, without {' and '.join(parts)}; {way}"
    if not done.dry_run:
        yield f"load: {done.load}"


def consolidation_json(source: Path, done: Consolidated) -> str:
    """Render the record as one JSON object, with a row for each key that is written or left out."""
    facts = {"schema": "ckptools/consolidate/1", "path": str(source), **to_dict(done)}
    return to_json({**facts, "rows": done.rows.to_dicts()}, indent=1)


def consolidation_html(done: Consolidated) -> str:
    """Render the files, how they were checked, and what was left out."""
    from ckptools.display.html import DICTS, Page, row_table

    page = Page(DICTS)
    done._fill(page)
    for line in remarks(done):
        page.line(line, mark_of(line))
    wrong = [row for row in done.rows if row.left_out or row.missing]
    if wrong:
        row_table(page, f"{plural(len(wrong), 'tensor')} left out or with holes", Rows(wrong), opened=True)
    row_table(page, plural(done.tensors, "tensor"), done.rows)
    return page.html()
