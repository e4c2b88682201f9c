"""What a notebook shows of a checkpoint: tables that fold, in HTML and CSS alone.

There is no script, because notebooks strip those of files that they do not trust. Every text is made printable and
then escaped here, also our own. No file is read for it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

from ckptools.dtypes import short
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.text import clip, clip_middle, count, plural, printable, shape, size
from ckptools.training_state.sections import sections_of_kind
from ckptools.views.checkpoint_line import checkpoint_line
from ckptools.views.problems import fold
from ckptools.views.report import Report, inspect_report
from ckptools.views.report_text import SECTION_COLUMNS, facts, headline, section_cells
from ckptools.views.section_rows import TensorRow, tensor_rows
from ckptools.views.section_text import TENSOR_COLUMNS, tensor_cells
from ckptools.views.tables import Column
from ckptools.views.value_text import key_name, value_text

MAX_ROWS = 200
"""Rows of all tables of one output together."""

MAX_CELL = 160
MAX_LENGTH = 200_000
"""Characters of an output; a notebook keeps it in its file."""

STYLE = (
    "<style>.ckpt{font-family:monospace;font-size:12px}.ckpt table{border-collapse:collapse;margin:4px 0 8px 16px}"
    ".ckpt th,.ckpt td{text-align:left;padding:1px 10px 1px 0;white-space:pre}.ckpt summary{cursor:pointer}"
    ".ckpt th{border-bottom:1px solid #999;font-weight:normal}.ckpt .bad{font-weight:bold}</style>"
)

Rows = Sequence[Sequence[str]]


class _Page:
    """The HTML of one output, which grows until its rows or characters run out.

    Attributes:
        blocks: pieces of HTML.
        rows: rows that still fit.
        left_out: rows that did not.
        rest: how to see them, by the title of the table that lost some first.
    """

    def __init__(self, rest: Callable[[str], str]) -> None:
        self.blocks = [STYLE]
        self.rows = MAX_ROWS
        self.left_out = 0
        self.rest = rest
        self._cut = ""

    def line(self, text: str, bad: bool = False) -> None:
        """One line of text."""
        self.blocks.append(f"<div{' class=bad' if bad else ''}>{safe(text, 1000)}</div>")

    def table(
        self, title: str, headers: Sequence[str], rows: Rows, total: int | None = None, opened: bool = False
    ) -> None:
        """A table that folds; `total` is the number of its rows where `rows` are only the first of them."""
        kept, length = [], sum(map(len, self.blocks))
        for row in rows[: self.rows]:
            cells = "".join(f"<td>{safe(cell)}</td>" for cell in row)
            length += len(cells)
            if length > MAX_LENGTH:
                break
            kept.append(f"<tr>{cells}</tr>")
        self.rows -= len(kept)
        lost = (len(rows) if total is None else total) - len(kept)
        self._cut = self._cut or (title if lost else "")
        self.left_out += lost
        head = "".join(f"<th>{safe(header)}</th>" for header in headers)
        body = f"<table><tr>{head}</tr>{''.join(kept)}</table>" if kept else ""
        self.blocks.append(f"<details{' open' if opened else ''}><summary>{safe(title)}</summary>{body}</details>")

    def html(self) -> str:
        """The finished HTML, with a line about rows that were left out."""
        if self.left_out:
            self.line(f"{plural(self.left_out, 'row')} left out; all of them: {self.rest(self._cut)}")
        return f'<div class="ckpt">{"".join(self.blocks)}</div>'


def safe(text: str, width: int = MAX_CELL) -> str:
    """A text as HTML: what would be markup is escaped, and so is what nobody would see."""
    return escape(clip(printable(text), width))


def checkpoint_html(ck: Checkpoint) -> str:
    """A checkpoint as HTML: what is wrong, what is known of it, and what is inside."""
    report = inspect_report(ck)
    models = {section.name for section in sections_of_kind(ck, "model")}
    page = _Page(lambda title: _command(report, title if title in models else ""))
    page.line(checkpoint_line(ck))
    for line in headline(report):
        page.line(line, bad=not report.whole)
    _problems(page, report)
    page.table("what it is", ("", "", "from"), list(facts(report)))
    page.table("sections", _titles(SECTION_COLUMNS), section_cells(report.sections), opened=True)
    _groups(page, report)
    for section in sections_of_kind(ck, "model"):
        rows = [_tensor_cells(row) for row in islice(tensor_rows(section.value), MAX_ROWS)]
        total = next(s.size.tensors for s in report.sections if s.path == section.path)
        page.table(section.name, _titles(TENSOR_COLUMNS), rows, total)
    return page.html()


def _titles(columns: Sequence[Column]) -> list[str]:
    return [column.title for column in columns]


def _command(report: Report, section: str) -> str:
    """What shows every row, of a section in full or of the tables that `inspect` prints."""
    more = f" --section {shlex.quote(section)}" if section else ""
    return f"ckptools inspect {report.arguments or 'FILES'}{more}"


def _problems(page: _Page, report: Report) -> None:
    rows = [(f.code, f.severity, f.where, f.message) for f in fold(report.problems)]
    if rows:
        page.table(plural(len(rows), "problem"), ("code", "", "where", "what"), rows, opened=report.errors)


def _groups(page: _Page, report: Report) -> None:
    for optimizer in report.optimizers:
        names = list(dict.fromkeys(key_name(key) for group in optimizer.groups for key in group.values))
        values = [{key_name(k): value_text(v, 40) for k, v in group.values.items()} for group in optimizer.groups]
        rows = [
            (str(n), *(v.get(name, "-") for name in names), _number(group.params), _number(group.tensors))
            for n, (v, group) in enumerate(zip(values, optimizer.groups, strict=True))
        ]
        page.table(f"param groups of {optimizer.section}", ("group", *names, "params", "tensors"), rows)


def _number(n: int | None) -> str:
    return "-" if n is None else count(n)


def _tensor_cells(row: TensorRow) -> list[str]:
    fqn, *others = tensor_cells(row)
    return [clip_middle(printable(fqn), MAX_CELL), *others]


def values_html(values: Mapping[Any, Any]) -> str:
    """A mapping of a checkpoint's tree as HTML: a row for each key, with its value, dtype and size."""
    page = _Page(lambda _: "dict(...) of this")
    rows = [_value_cells(key, value) for key, value in _some(values)]
    page.table(f"{len(values)} entries", ("key", "value", "dtype", "size"), rows, len(values), opened=True)
    return page.html()


def _some(values: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return islice(values.items(), MAX_ROWS)


def _value_cells(key: Any, value: Any) -> tuple[str, ...]:
    name = clip_middle(printable(key_name(key)), MAX_CELL)
    if isinstance(value, Tensor):
        return name, f"tensor {shape(value.shape)}", short(value.dtype), size(value.nbytes)
    return name, value_text(value, MAX_CELL), "", ""
