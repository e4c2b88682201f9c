"""Sections in full, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptools.dtypes import short
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of
from ckptools.text import plural, printable, shape, size
from ckptools.views.report import Report
from ckptools.views.report_text import optimizer_lines
from ckptools.views.section_rows import Detail, StateRow, TensorRow, ValueRow
from ckptools.views.tables import PIPE, Column, Screen, table
from ckptools.views.value_text import value_text

TENSOR_COLUMNS = (
    Column("tensor", name=True),
    Column("shape", right=True),
    Column("dtype"),
    Column("size", right=True),
    Column("placement"),
)
STATE_COLUMNS = (
    Column("parameter", name=True),
    Column("group", right=True),
    Column("shape", right=True),
    Column("state"),
)
COMPARED = "which ranks have states of their own: ckptools show PATH rng"
VALUE_COLUMNS = (Column("key", name=True), Column("value"))


def section_text(report: Report, details: Sequence[Detail], screen: Screen = PIPE) -> str:
    """The sections in full, as `inspect --section` prints them on stdout."""
    blocks = [_lines(report, detail, screen) for detail in details if detail.kind != "other"]
    others = [detail for detail in details if detail.kind == "other"]
    blocks += [_other_lines(report, others, screen)] if others else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _lines(report: Report, detail: Detail, screen: Screen) -> list[str]:
    lines = [f"{printable(detail.name)} in {printable(report.name)}"]
    values = table(VALUE_COLUMNS, [_value_cells(row) for row in detail.values], screen)
    blocks = [_groups(report, detail, screen), _tensors(detail, screen), _state(detail, screen), values]
    blocks += [[COMPARED] if detail.kind == "rng" else [], _left_out([detail]), _agreement(report, detail)]
    return lines + [line for block in blocks if block for line in ("", *block)]


def _other_lines(report: Report, details: Sequence[Detail], screen: Screen) -> list[str]:
    """Sections that hold nothing but values, in one table."""
    rows = [_value_cells(row, detail.name) for detail in details for row in detail.values]
    title = details[0].name if len(details) == 1 else "other values"
    return [
        f"{printable(title)} in {printable(report.name)}",
        "",
        *table(VALUE_COLUMNS, rows, screen),
        *_left_out(details),
    ]


def _left_out(details: Sequence[Detail]) -> list[str]:
    return [f"{printable(d.name)}: only the first {len(d.values)} values" for d in details if d.left_out]


def _agreement(report: Report, detail: Detail) -> list[str]:
    agrees = [s.agrees for s in report.schedulers if s.section == detail.name and detail.kind == "scheduler"]
    sentences = {True: "_last_lr is the lr of the param groups", False: "_last_lr IS NOT the lr of the param groups"}
    return [sentences[agree] for agree in agrees if agree is not None]


def _groups(report: Report, detail: Detail, screen: Screen) -> list[str]:
    mine = [o for o in report.optimizers if o.section == detail.name and detail.kind == "optimizer"]
    return [line for optimizer in mine for line in optimizer_lines(optimizer, screen)]


def _tensors(detail: Detail, screen: Screen) -> list[str]:
    total = sum(t.nbytes for t in detail.tensors)
    lines = table(TENSOR_COLUMNS, [tensor_cells(row) for row in detail.tensors], screen)
    return [*lines, f"{plural(len(detail.tensors), 'tensor')}, {size(total)}"] if lines else []


def tensor_cells(row: TensorRow) -> list[str]:
    """The cells of a tensor under `TENSOR_COLUMNS`."""
    return [row.fqn, shape(row.shape), short(row.dtype), size(row.nbytes), row.placement]


def _state(detail: Detail, screen: Screen) -> list[str]:
    return table(STATE_COLUMNS, [_state_cells(row) for row in detail.state], screen)


def _state_cells(row: StateRow) -> list[str]:
    moments = [v for k, v in row.slots.items() if isinstance(v, Tensor) and k != "step"]
    dims = shape(moments[0].shape) if moments else "-"
    slots = ", ".join(f"{slot} {_slot(value)}" for slot, value in row.slots.items())
    return [row.parameter, "-" if row.group is None else str(row.group), dims, slots]


def _slot(value: Any) -> str:
    return short(value.dtype) if isinstance(value, Tensor) else value_text(value, 40)


def _value_cells(row: ValueRow, section: str = "") -> list[str]:
    text = value_text(row.value, 120)
    if row.fingerprint is not None:
        text = f"{_length(row.value)}, crc {row.fingerprint:08x}"
    name = ".".join(part for part in (section, fqn_of(row.path)) if part)
    return [name or "value", text + (f" (ranks differ in {row.differs})" if row.differs else "")]


def _length(value: Any) -> str:
    return plural(len(value), "integer") if isinstance(value, (list, tuple)) else value_text(value)
