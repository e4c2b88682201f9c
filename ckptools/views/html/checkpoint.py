"""A checkpoint as HTML: what is wrong, what is known of it, and what is inside. No file is read for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.text import plural
from ckptools.training_state.sections import sections_of_kind
from ckptools.views.checkpoint_line import checkpoint_line
from ckptools.views.html.page import MARKS, MAX_ROWS, Page
from ckptools.views.param_groups import GroupRow
from ckptools.views.pictures import rank_map
from ckptools.views.problems import fold
from ckptools.views.report import Report, inspect_report
from ckptools.views.report_text import (
    SECTION_COLUMNS,
    TITLES,
    facts,
    group_cells,
    group_columns,
    in_all_groups,
    scheduler_words,
    section_cells,
)
from ckptools.views.section_rows import tensor_rows
from ckptools.views.section_text import TENSOR_COLUMNS, tensor_cells
from ckptools.views.tables import Column

FACT_COLUMNS = (Column(""), Column(""), Column("from"))
PROBLEM_COLUMNS = (Column("code"), Column("severity", verdict=True), Column("where"), Column("what"))


def checkpoint_html(ck: Checkpoint) -> str:
    """A checkpoint as HTML: what is wrong, what is known of it, and what is inside."""
    report = inspect_report(ck)
    models = {section.name for section in sections_of_kind(ck, "model")}
    page = Page(lambda title: _command(report, title if title in models else ""))
    page.line(checkpoint_line(ck))
    page.line(report.verdict.headline, MARKS[report.verdict.level])
    problem_table(page, report.problems, opened=report.verdict.level == "bad")
    if len(ck.files) > 1:
        page.picture(rank_map(ck), opened=report.verdict.level == "bad")
    page.table("what it is", FACT_COLUMNS, list(facts(report)))
    page.table("sections", SECTION_COLUMNS, section_cells(report.sections), opened=True)
    for optimizer in report.optimizers:
        group_table(page, f"param groups of {optimizer.section}", optimizer.groups)
    for scheduler in report.schedulers:
        page.line(f"{scheduler.section}: {scheduler_words(scheduler)}")
    for section in sections_of_kind(ck, "model"):
        rows = [tensor_cells(row) for row in islice(tensor_rows(section.value), MAX_ROWS)]
        total = next(s.size.tensors for s in report.sections if s.path == section.path)
        page.table(section.name, TENSOR_COLUMNS, rows, total)
    return page.html()


def _command(report: Report, section: str) -> str:
    """What shows every row, of a section in full or of the tables that `inspect` prints."""
    more = f" --section {shlex.quote(section)}" if section else ""
    return f"ckptools inspect {report.arguments or 'FILES'}{more}"


def problem_table(page: Page, problems: Sequence[Problem], opened: bool = True) -> None:
    """A row for each problem; the same problem of many ranks or tensors is one. Nothing where there are none."""
    rows = [(f.code, f.severity, f.where, f.message) for f in fold(problems)]
    if rows:
        page.table(plural(len(rows), "problem"), PROBLEM_COLUMNS, rows, opened=opened)


def group_table(page: Page, title: str, groups: Sequence[GroupRow], opened: bool = False) -> None:
    """Param groups: hyperparameters that differ between them as columns, the others in a line below."""
    names = group_columns(groups)
    columns = [Column("group", right=True), *(Column(TITLES.get(name, name)) for name in names)]
    columns += [Column("params", right=True), Column("tensors", right=True)]
    cells = [group_cells(n, group, names) for n, group in enumerate(groups)]
    if all(group.params is None for group in groups):
        del columns[-2]
        cells = [[*row[:-2], row[-1]] for row in cells]
    page.table(title, columns, cells, opened=opened)
    same = in_all_groups(groups)
    if same:
        page.line(f"all groups: {same}", "dim")
