"""The page that `report` writes: what inspect and verify tell of a checkpoint, the verdict first, and its pictures.

It has no words of its own: each line and cell is made by what makes it for a terminal. No file is read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from ckptools._version import __version__
from ckptools.contents.entries import Entry, entries_of
from ckptools.contents.keys import keys_of
from ckptools.contents.selection import Selection
from ckptools.contents.sharding import placement
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.diagnosis import Diagnosis
from ckptools.model.problems import Problem, worst_first
from ckptools.model.statistics import Statistics, Stats
from ckptools.model.tensor import Tensor
from ckptools.model.verification import Check, Verification
from ckptools.text import few, moment_utc, plural
from ckptools.training_state.sections import sections_of_kind
from ckptools.views import verification
from ckptools.views.answers import answer_json
from ckptools.views.html.answers import diagnosis_html, statistics_table
from ckptools.views.html.checkpoint import FACT_COLUMNS, group_table, problem_table
from ckptools.views.html.document import document
from ckptools.views.html.page import MARKS, Limits, Page, safe
from ckptools.views.next_command import after_verify
from ckptools.views.pictures import (
    Picture,
    bytes_by_section,
    heat_map,
    norm_histogram,
    rank_map,
    rms_cells,
    tensor_layout,
)
from ckptools.views.report import Report
from ckptools.views.report_json import report_json
from ckptools.views.report_text import SECTION_COLUMNS, facts, scheduler_words, section_cells
from ckptools.views.tree import TreeForm, tree_text

LIMITS = Limits(rows=1000, nbytes=250_000)
"""Of what the page shows without its pictures; the JSON in it is never cut."""

MAX_TREE = 200
"""Lines of the tree of the model."""

MAX_LAYOUTS = 4
"""Tensors whose layout is drawn."""


class Findings(NamedTuple):
    """What a page is about.

    Attributes:
        checkpoint: the checkpoint, of which every rank was read.
        report: what `inspect` tells of it.
        verification: what `verify` found.
        deep: whether it compared checksums.
        values: whether it looked for NaN.
        statistics: figures of its tensors; None where nobody asked.
        made: when, in seconds since 1970.
    """

    checkpoint: Checkpoint
    report: Report
    verification: Verification
    deep: bool
    values: bool
    statistics: Statistics[Stats] | None
    made: float


def report_page(found: Findings) -> str:
    """The report on a checkpoint as one document, with the JSON of `inspect` and `verify` in it."""
    report = found.report
    page = Page(f"ckptools inspect {report.arguments or 'FILES'}", LIMITS)
    page.line(report.saved_as)
    _verdict(page, found)
    _problems(page, found)
    _known(page, report)
    _training(page, report)
    _keys(page, found.checkpoint)
    _values(page, found.statistics)
    _drawn(page, found)
    page.line(f"ckptools {__version__}, {moment_utc(found.made)}", "dim")
    answers = {"inspect": report_json(report), "verify": verification.verification_json(found.verification)}
    title = f"{report.name}: {verdict_lines(found)[0]}"
    return document(title, f"{report.name} in {report.folder}", page.html(), answers)


def unreadable_page(found: Diagnosis, why: str, made: float) -> str:
    """The report on what cannot be opened: the error, and what `doctor` says of it and of the run around it.

    Args:
        found: what doctor said.
        why: the error in one line.
        made: when, in seconds since 1970.
    """
    page = Page("")
    page.drawing(f'<p class="verdict bad">cannot be opened: {safe(why)}</p>')
    page.line(f"ckptools {__version__}, {moment_utc(made)}; what doctor says of it:", "dim")
    answers = {"doctor": answer_json("doctor", found)}
    return document(f"cannot be opened: {found.path}", str(found.path), page.html() + diagnosis_html(found), answers)


# -- verdict -----------------------------------------------------------------------------------------------------


def verdict_lines(found: Findings) -> list[str]:
    """Whether it is whole, and whether every check was passed; what is wrong is said first."""
    return [found.verification.verdict.headline, verification.summary(found.verification)]


def _verdict(page: Page, found: Findings) -> None:
    report, verified, (first, *others) = found.report, found.verification, verdict_lines(found)
    mark = MARKS[verified.verdict.level]
    page.drawing(f'<p class="verdict {mark}">{safe(first)}</p>')
    for line in others:
        page.verdict(line)
    skipped = [check.name for check in verified.checks if check.result == "skip"]
    if skipped:
        page.line(f"not looked at: {', '.join(skipped)}", "dim")
    commands = after_verify(report.arguments, report.next, verified.ok, found.deep and found.values)
    if commands:
        page.line("next:")
        page.lines(commands)


def _heading(page: Page, text: str) -> None:
    page.drawing(f"<h2>{safe(text)}</h2>")


def _problems(page: Page, found: Findings) -> None:
    checks = found.verification.checks
    problem_table(page, list(all_problems(found)))
    page.table(plural(len(checks), "check"), verification.COLUMNS, list(map(_check_cells, checks)), opened=True)


def all_problems(found: Findings) -> Iterator[Problem]:
    """What verify found, the worst first; behind it what inspect alone tells: notes, and codes that no check has."""
    known = set(found.verification.problems)
    codes = {problem.code for problem in known}
    yield from worst_first(found.verification.problems)
    for problem in found.report.problems:
        if problem not in known and (problem.severity == "note" or problem.code not in codes):
            yield problem


def _check_cells(check: Check) -> tuple[str, str, str]:
    """What was looked at where nothing is wrong; else the codes of the problems, which have a table of their own."""
    codes = dict.fromkeys(problem.code for problem in check.problems)
    return check.name, check.result, check.detail if check.result in ("ok", "skip") else ", ".join(codes)


# -- what it is --------------------------------------------------------------------------------------------------


def _known(page: Page, report: Report) -> None:
    page.table("what it is", FACT_COLUMNS, list(facts(report)), opened=True)
    page.table("sections", SECTION_COLUMNS, section_cells(report.sections), opened=True)


def _training(page: Page, report: Report) -> None:
    for optimizer in report.optimizers:
        title = f"{optimizer.section}: {plural(len(optimizer.groups), 'param group')}"
        group_table(page, title, optimizer.groups, opened=True)
        if optimizer.note:
            page.line(optimizer.note, "warn" if optimizer.unnamed or optimizer.assumed else "dim")
    for scheduler in report.schedulers:
        page.line(f"{scheduler.section}: {scheduler_words(scheduler)}", "bad" if scheduler.agrees is False else "")
    if report.differing:
        page.line(f"differs between ranks, as it may: {few(report.differing, 20)}", "dim")


def _keys(page: Page, checkpoint: Checkpoint) -> None:
    """The tree of the model; layers that are alike are one line."""
    if not sections_of_kind(checkpoint, "model"):
        return
    _heading(page, "the model's keys")
    page.lines(tree_text(keys_of(checkpoint, Selection(section="model")), TreeForm(limit=MAX_TREE)).splitlines())


def _values(page: Page, figures: Statistics[Stats] | None) -> None:
    if figures is not None:
        statistics_table(page, figures, f"values of {plural(figures.tensors, 'tensor')}")


def _drawn(page: Page, found: Findings) -> None:
    pictures = list(pictures_of(found))
    if pictures:
        _heading(page, "pictures")
    for picture in pictures:
        page.drawing(picture._repr_html_())


def pictures_of(found: Findings) -> Iterator[Picture]:
    """The ranks, where there are several; the bytes; the figures; of each way of sharding the largest tensor."""
    checkpoint, figures = found.checkpoint, found.statistics
    if len(checkpoint.files) > 1:
        yield rank_map(checkpoint, found.verification.problems)
    if any(section.size.tensors for section in found.report.sections):
        yield bytes_by_section(checkpoint)
    if figures is not None and (cells := rms_cells(figures)):
        yield heat_map(f"rms of weights of {checkpoint.name}", cells)
        yield norm_histogram(f"l2 norms of tensors of {checkpoint.name}", figures)
    for entry in islice(_largest(checkpoint), MAX_LAYOUTS):
        yield tensor_layout(entry.value, entry.name)


def _largest(checkpoint: Checkpoint) -> Iterator[Entry]:
    """Of each way in which tensors of the model are sharded the largest; the way of the most tensors first."""
    ways: dict[str, list[Entry]] = {}
    for entry in entries_of(checkpoint):
        if entry.kind == "model" and isinstance(entry.value, Tensor) and entry.value.sharded:
            ways.setdefault(placement(entry.value), []).append(entry)
    for entries in sorted(ways.values(), key=len, reverse=True):
        yield max(entries, key=lambda entry: entry.value.numel)
