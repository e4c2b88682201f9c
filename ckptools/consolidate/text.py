"""The record of `consolidate` as text, JSON and HTML: the files, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptools.consolidate.record import Consolidated, PlannedCopy, PlannedReading, SourceChecksums
from ckptools.display.record_json import to_json
from ckptools.display.tables import PIPE, Column, Screen, table
from ckptools.dtypes import short
from ckptools.model.records import Rows, to_dict
from ckptools.model.regions import Box
from ckptools.text import and_more, clip, duration, few, first_few, plural, printable, size

MAX_NAMED = 5

COPY_COLUMNS = tuple(Column(f"{title}  ") for title in ("tensor", "from file", "at", "to file", "at", "bytes"))
"""Two blanks after each title separate short numbers below it."""


def summary(done: Consolidated) -> Iterator[str]:
    """The lines for stdout: the files, the number of tensors, and how these were checked."""
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
        yield f"source: {done.verdict.headline}"
    yield f"source checksums: {_checksums(done.checksums, done.dry_run)}"
    if done.read_back:
        which = "every element" if not done.filled else "every element that is not filled in"
        whose = f"the source's, or taken from {printable(done.borrowed_from)}" if done.borrowed_from else "the source's"
        yield f"checked: {done.read_back}: {which} is {whose}: {done.proof.counts}"


def _checksums(found: SourceChecksums | None, dry_run: bool) -> str:
    if found is None:
        return "not compared; --check compares them" if dry_run else "not compared (--unchecked)"
    if not found.right:
        return "there are none in the source"
    without = f", {found.without} have none" if found.without else ""
    return f"{plural(found.right, 'record')} right{without}"


def copies(planned: PlannedReading, screen: Screen = PIPE) -> list[str]:
    """The table of all copies: tensor, source file and offset, target file and offset, number of bytes."""
    return table(COPY_COLUMNS, [_copy_cells(copy) for copy in planned.copies], screen._replace(rows=None))


def _copy_cells(copy: PlannedCopy) -> list[str]:
    source = ("several", copy.source) if isinstance(copy.source, Box) else (copy.source[0].name, copy.source[1])
    return [copy.fqn, source[0], str(source[1]), copy.target.name, str(copy.offset), str(copy.nbytes)]


def _listed_in(done: Consolidated) -> Path:
    return next(path for path in done.files if path.name.endswith(".left-out.json"))


def _filled(done: Consolidated) -> Iterator[str]:
    """Lines for tensors that were written although parts of them are in no file."""
    names = [name for name in done.missing if name not in done.left_out]
    for name in names[:MAX_NAMED]:
        yield f"filled: {name}: {few(done.missing[name], 3)}"
    if len(names) > MAX_NAMED:
        yield f"filled: {len(names) - MAX_NAMED} more; all regions are in {_listed_in(done)}"


def _borrowed(done: Consolidated) -> Iterator[str]:
    """Lines for tensors with regions of another checkpoint of the run."""
    if not done.borrowed:
        return
    yield f"NOT WHOLE: {plural(len(done.borrowed), 'tensor')} with values of another save, {done.borrowed_from}"
    for name, boxes in list(done.borrowed.items())[:MAX_NAMED]:
        yield f"from {done.borrowed_from}: {clip(name, 60)}: {few(boxes, 3)}"
    if len(done.borrowed) > MAX_NAMED:
        yield f"from it: {len(done.borrowed) - MAX_NAMED} more; all regions are in {_listed_in(done)}"


def remarks(done: Consolidated) -> Iterator[str]:
    """The lines for stderr: what was left out, filled, converted or noticed, and how to load the output."""
    yield from (f"note: {note}" for note in done.notes)
    if done.like is not None:
        from ckptools.consolidate.like import likeness_lines

        yield from likeness_lines(done.like)
    for name, why in list(done.left_out.items())[:MAX_NAMED]:
        yield f"left out: {name}: {why}"
    yield from _filled(done)
    yield from _borrowed(done)
    if len(done.left_out) > MAX_NAMED:
        yield f"left out: {len(done.left_out) - MAX_NAMED} more; all are in {_listed_in(done)}"
    if done.odd:
        names = first_few([clip(name, 60) for name in done.odd], 3)
        yield f"note: NaN or infinity seen in {plural(len(done.odd), 'tensor')}: {names}"
    if done.tied:
        name, first = next(iter(done.tied.items()))
        more = and_more(len(done.tied) - 1)
        yield f"note: tied weights: {clip(name, 60)} has the bytes of {clip(first, 60)}{more}"
    if done.needs:
        yield (
            f"note: plain torch.load does not make {', '.join(done.needs)}, which --keep-types keeps: it needs "
            "weights_only=False, or these in torch.serialization.safe_globals"
        )
    yield from _not_asked(done)
    if not done.dry_run:
        yield f"load: {done.load}"


def _not_asked(done: Consolidated) -> Iterator[str]:
    if not done.not_asked:
        return
    tensors = [f"{count} in {clip(name, 60)}" for name, count in done.not_asked.items() if count]
    plain = [clip(name, 60) for name, count in done.not_asked.items() if not count]
    parts = [f"{plural(sum(done.not_asked.values()), 'tensor')} ({few(tensors, MAX_NAMED)})"] if tensors else []
    parts += [f"what is no tensor ({few(plain, MAX_NAMED)})"] if plain else []
    yield f"note: the model alone is written, without {' and '.join(parts)}; --only all writes everything"


def consolidation_json(source: Path, done: Consolidated) -> str:
    """Render the record as one JSON object, with a row for each key that is written or left out."""
    facts = {"schema": "ckptools/consolidate/1", "path": str(source), **to_dict(done)}
    return to_json({**facts, "rows": done.rows.to_dicts()}, indent=1)


def consolidation_html(done: Consolidated) -> str:
    """Render the files, how they were checked, and what was left out."""
    from ckptools.display.page import DICTS, Page
    from ckptools.display.record_html import row_table

    page = Page(DICTS)
    for line in (*summary(done), *remarks(done)):
        page.verdict(line)
    wrong = [row for row in done.rows if row.left_out or row.missing]
    if wrong:
        row_table(page, f"{plural(len(wrong), 'tensor')} left out or with holes", Rows(wrong), opened=True)
    row_table(page, plural(done.tensors, "tensor"), done.rows)
    return page.html()
