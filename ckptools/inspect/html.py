"""A checkpoint as HTML: its problems, facts and contents, without reading a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice

from ckptools.display.lines import checkpoint_line
from ckptools.display.page import MAX_ROWS, Page
from ckptools.display.palette import MARKS
from ckptools.display.record_html import TABLES, problem_table, value_table
from ckptools.display.tables import Column
from ckptools.inspect.picture import rank_map
from ckptools.inspect.record import Report, inspect_report
from ckptools.inspect.section_summary import GroupRow
from ckptools.inspect.sections import TENSOR_COLUMNS, named_tensors, tensor_cells
from ckptools.inspect.text import (
    SECTION_COLUMNS,
    TITLES,
    facts,
    group_cells,
    group_columns,
    in_all_groups,
    scheduler_words,
    section_cells,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.text import plural
from ckptools.training_state.optimizers import Optimizer, ParamGroup
from ckptools.training_state.sections import sections_of_kind

FACT_COLUMNS = (Column(""), Column(""), Column("from"))


def checkpoint_html(ck: Checkpoint) -> str:
    """Render a checkpoint: its problems, facts and contents."""
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
        rows = [tensor_cells(*named) for named in islice(named_tensors(section.value), MAX_ROWS)]
        total = next(s.size.tensors for s in report.sections if s.path == section.path)
        page.table(section.name, TENSOR_COLUMNS, rows, total)
    return page.html()


def _command(report: Report, section: str) -> str:
    """The command that shows every row of a section, or of the tables of `inspect`."""
    more = f" --section {shlex.quote(section)}" if section else ""
    return f"ckptools inspect {report.arguments or 'FILES'}{more}"


def group_rows(groups: Sequence[ParamGroup]) -> list[GroupRow]:
    """Param groups as rows, without the number of elements, which would need the model."""
    return [
        GroupRow({k: v for k, v in group.items() if k != "params"}, len(group.names), None, group.names)
        for group in groups
    ]


def group_table(page: Page, title: str, groups: Sequence[GroupRow], opened: bool = False) -> None:
    """Param groups: hyperparameters that differ between them as columns, the others in a line below."""
    names = group_columns(groups)
    columns = [Column("group", "number"), *(Column(TITLES.get(name, name)) for name in names)]
    columns += [Column("params", "number"), Column("tensors", "number")]
    cells = [group_cells(n, group, names) for n, group in enumerate(groups)]
    if all(group.params is None for group in groups):
        del columns[-2]
        cells = [[*row[:-2], row[-1]] for row in cells]
    page.table(title, columns, cells, opened=opened)
    if same := in_all_groups(groups):
        page.line(f"all groups: {same}", "dim")


def optimizer_html(optimizer: Optimizer) -> str:
    """Render an optimizer: its param groups, and its state for each parameter."""
    page = Page(".state and .param_groups of this")
    page.line(repr(optimizer))
    if optimizer.naming.note:
        page.line(optimizer.naming.note, "warn" if optimizer.naming.unnamed or optimizer.naming.assumed else "")
    group_table(page, plural(len(optimizer.param_groups), "param group"), group_rows(optimizer.param_groups), True)
    value_table(page, f"state of {plural(len(optimizer.state), 'parameter')}", optimizer.state, opened=False)
    return page.html()


TABLES[ParamGroup] = lambda page, title, rows, opened: group_table(
    page, title or plural(len(rows), "param group"), group_rows(rows), opened
)
