"""Answers as HTML, in the words that the commands print: what was found first, and what says so in tables."""

from __future__ import annotations

from typing import Any

from ckptools.model.consolidation import ConsolidationReport
from ckptools.model.diagnosis import Diagnosis
from ckptools.model.difference import DIFFERENT, Difference
from ckptools.model.keys import Keys
from ckptools.model.matching import Match
from ckptools.model.rows import Rows
from ckptools.model.run_folder import RunFolder
from ckptools.model.shown import Shown, ShownKey
from ckptools.model.statistics import Statistics
from ckptools.model.verification import Verification
from ckptools.text import plural
from ckptools.training_state.optimizers import Optimizer
from ckptools.views import consolidation, diagnosis, difference, matching, run_folder, shown, statistics, verification
from ckptools.views.html.checkpoint import group_table
from ckptools.views.html.page import MAX_ROWS, Page
from ckptools.views.html.records import group_rows, row_table
from ckptools.views.html.values import value_table
from ckptools.views.shard_map import shard_map
from ckptools.views.tables import Column

DICTS = "to_dicts() of this"
FINDING_COLUMNS = (Column("question"), Column("", verdict=True), Column("answer"), Column("evidence"))
SUBJECT_COLUMNS = (Column("subject"), Column("verdict", verdict=True), Column("detail"))
VALUE_COLUMNS = (*difference.VALUE_COLUMNS, Column("detail"))
WRONG_COLUMNS = (Column("name", name=True), Column("why"))
ELEMENT_ROWS = 40
"""Lines of a tensor's elements."""


def optimizer_html(optimizer: Optimizer) -> str:
    """An optimizer: its param groups, and what it keeps of each parameter."""
    page = Page(".state and .param_groups of this")
    page.line(repr(optimizer))
    if optimizer.naming.note:
        page.line(optimizer.naming.note, "warn" if optimizer.naming.unnamed or optimizer.naming.assumed else "")
    group_table(page, plural(len(optimizer.param_groups), "param group"), group_rows(optimizer.param_groups), True)
    value_table(page, f"state of {plural(len(optimizer.state), 'parameter')}", optimizer.state, opened=False)
    return page.html()


def verification_html(found: Verification) -> str:
    """What `verify` found: its verdict, and a row for each check and each kind of problem."""
    page = Page(DICTS)
    page.line(str(found.path))
    page.line(verification.summary(found), "good" if found.ok else "bad")
    row_table(page, "", found.checks, opened=True)
    return page.html()


def diagnosis_html(found: Diagnosis) -> str:
    """What `doctor` found: each question with its answer, and what to type next."""
    page = Page(DICTS)
    page.line(str(found.path))
    rows = [(row.question, diagnosis.WORDS[row.ok], row.answer, row.evidence) for row in found.rows]
    page.table(plural(len(rows), "question"), FINDING_COLUMNS, rows, opened=True)
    if found.next:
        page.line("next:")
        page.lines(found.next)
    return page.html()


def run_folder_html(run: RunFolder) -> str:
    """The checkpoints of a run, the newest first, and what is wrong with them."""
    page = Page(DICTS)
    page.line(run_folder.headline(run), "bad" if run.newest_whole is None and run.checkpoints else "")
    page.table(plural(len(run.rows), "checkpoint"), run_folder.COLUMNS, run_folder.all_cells(run), opened=True)
    wrong = [(row.name, text) for row in run.rows for text in (row.why, *row.notes) if text]
    if wrong:
        page.table("what is wrong with them", WRONG_COLUMNS, wrong, opened=True)
    for tracker in run.trackers:
        if tracker.problem:
            page.line(f"tracker {tracker.name}: {tracker.problem}", "bad" if tracker.severity == "error" else "warn")
    if run.left_over:
        row_table(page, f"{len(run.left_over)} left over from a write, or still being written", run.left_over)
    for note in run.notes:
        page.line(f"note: {note}", "dim")
    return page.html()


def keys_html(found: Keys) -> str:
    """The keys of a checkpoint, a table for each section."""
    page = Page(DICTS)
    page.line(repr(found))
    sections: dict[str, list[Any]] = {}
    for row in found.rows:
        sections.setdefault(row.section, []).append(row)
    for name, rows in sections.items():
        row_table(page, f"{name}: {plural(len(rows), 'key')}", Rows(rows), opened=len(sections) == 1)
    return page.html()


def shown_html(found: Shown) -> str:
    """What is at some keys: random states as fingerprints, tensors with their shards, values."""
    page = Page(DICTS)
    page.line(repr(found))
    for line in shown.stream_lines(found.streams):
        page.line(line)
    tensors = [row for row in found.rows if row.type == "tensor" and (row.kind != "rng" or len(found.rows) == 1)]
    for row in tensors[:MAX_ROWS]:
        _shown_tensor(page, row, opened=len(tensors) == 1)
    others = {row.name: row.note or row.value for row in found.rows if row.type != "tensor"}
    if others:
        value_table(page, plural(len(others), "value"), others)
    return page.html()


def _shown_tensor(page: Page, row: ShownKey, opened: bool) -> None:
    page.line(f"{row.name}  {shown.tensor_facts(row)}")
    for text in filter(None, (row.note, shown.holes_line(row), row.problem)):
        page.line(text, "bad")
    if row.statistics is not None:
        page.line(shown.figures_line(row.statistics))
    if row.values is not None:
        lines = list(shown.element_lines(row.values, row.dtype))
        left = len(lines) - ELEMENT_ROWS
        page.lines([f"[{row.slice}]", *lines[:ELEMENT_ROWS], *([f"{left} more lines"] if left > 0 else [])])
    else:
        page.lines(shard_map(row.shape or (), row.shards))
    cells = [shown.shard_cells(shard) for shard in row.shards[:MAX_ROWS]]
    page.table(plural(len(row.shards), "shard"), shown.SHARD_COLUMNS, cells, len(row.shards), opened)


def statistics_html(found: Statistics[Any]) -> str:
    """Figures of tensors: a row for each, and what all of them together are."""
    page = Page(DICTS)
    page.line(repr(found))
    statistics_table(page, found)
    return page.html()


def statistics_table(page: Page, found: Statistics[Any], title: str = "") -> None:
    """A row for each tensor, which of them were not read in full, and a line about all."""
    fields, rows = statistics.fields_and_rows(found)
    cells = [[field.cell(row) for field in fields] for row in rows[:MAX_ROWS]]
    page.table(title or plural(len(rows), "row"), [field.column for field in fields], cells, len(rows), opened=True)
    for row in [row for row in found.rows if row.problem][: statistics.MAX_PROBLEMS]:
        page.line(f"{statistics.whose(row)}: {row.problem}", "bad")
    for line in statistics.summary(found):
        page.line(line)


def difference_html(found: Difference) -> str:
    """What differs between two checkpoints: each subject in a line, that which explains a loss first."""
    page = Page(DICTS)
    for letter, side in (("A", found.a), ("B", found.b)):
        page.line(f"{letter}  {difference.side_line(side)}")
    mark = {True: "good", False: "bad", None: "warn"}[found.same]
    page.line(difference.verdict_line(found), mark)
    subjects = [(row.subject, row.verdict, row.detail) for row in found.subjects]
    page.table(plural(len(subjects), "subject"), SUBJECT_COLUMNS, subjects, opened=True)
    columns, cells = difference.tensor_columns_and_cells(found.tensors)
    if cells:
        page.table(f"{plural(len(cells), 'tensor')} not the same", columns, cells)
    values = [row for row in found.values if row.verdict in DIFFERENT]
    rows = [(row.name, row.verdict, row.value_a or "", row.value_b or "", row.detail) for row in values]
    if rows:
        page.table(f"{plural(len(rows), 'value')} not the same", VALUE_COLUMNS, rows)
    for note in found.notes:
        page.line(f"note  {note}", "dim")
    return page.html()


def match_html(found: Match) -> str:
    """Whether a checkpoint's model loads into another, the rename that fixes most, and what differs then."""
    page = Page(DICTS)
    for label, text in matching.match_facts(found):
        page.verdict(f"{label}: {text}")
    rows = [matching.group_cells(group) for group in found.groups]
    if rows:
        title = "what is left then" if found.renames else plural(len(rows), "group of names", "groups of names")
        page.table(title, matching.COLUMNS, rows, opened=True)
    if found.fix:
        value_table(page, f"{plural(len(found.fix), 'name')} that the renames change", found.fix, opened=False)
    return page.html()


def consolidation_html(done: ConsolidationReport) -> str:
    """What was written, or would be: the files, how they were checked, and what is not in them."""
    page = Page(DICTS)
    for line in (*consolidation.summary(done), *consolidation.remarks(done)):
        page.verdict(line)
    wrong = [row for row in done.rows if row.left_out or row.missing]
    if wrong:
        row_table(page, f"{plural(len(wrong), 'tensor')} left out or with holes", Rows(wrong), opened=True)
    row_table(page, plural(done.tensors, "tensor"), done.rows)
    return page.html()
