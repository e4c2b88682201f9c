"""Sections in full for `inspect --section`: their rows, as records, text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckptools._version import __version__
from ckptools.display.record_json import JsonValues, to_json
from ckptools.display.screen import PIPE, Screen
from ckptools.display.tables import Column, key_name, table, value_text, wrapped
from ckptools.dtypes import short
from ckptools.errors import UsageError
from ckptools.inspect.record import OptimizerRow, Report, SectionRow, optimizer_lines
from ckptools.keys.entries import fingerprint, is_private_value, leaves_of
from ckptools.keys.sharding import placement
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, RankFile
from ckptools.model.problems import Problem
from ckptools.model.records import to_dict
from ckptools.model.tensor import Tensor
from ckptools.text import KeyPath, fqn_of, moment_utc, plural, printable, shape, size
from ckptools.training_state.adapters import adapters_of
from ckptools.training_state.models import listed_sections
from ckptools.training_state.optimizers import moments_of, optimizers_of
from ckptools.training_state.sections import Section, sections_of

MAX_VALUES = 10_000
"""At most this many rows of values per section: a container may occur many times, so small files can be huge trees."""


class StateRow(NamedTuple):
    """The optimizer state of one parameter; `group` is None if no param group lists the parameter."""

    parameter: str
    group: int | None
    slots: Mapping[str, Any]


class ValueRow(NamedTuple):
    """One value of a section, other than tensors of a model or optimizer; a long list of plain values is one row.

    Attributes:
        fingerprint: CRC-32 of a long sequence or array, to compare ranks; None for other values.
        differs: name of the value, or of a container around it, that differs between ranks; empty if none differs.
    """

    path: KeyPath
    value: Any
    fingerprint: int | None
    differs: str


class Detail(NamedTuple):
    """One section in full; `private` counts the values left out because their names begin with `_`."""

    kind: str
    name: str
    tensors: tuple[tuple[str, Tensor], ...] = ()
    state: tuple[StateRow, ...] = ()
    values: tuple[ValueRow, ...] = ()
    left_out: bool = False
    private: int = 0


def section_details(ck: Checkpoint, wanted: str, private: bool = True) -> tuple[Detail, ...]:
    """Show the sections of a kind, or the section of a name, in full; values named `_...` only if `private`.

    Raises:
        UsageError: no section has that kind or name.
    """
    found = [s for s in listed_sections(ck) if wanted in (s.kind, s.name)]
    if not found:
        here = dict.fromkeys(word for section in sections_of(ck) for word in (section.kind, section.name))
        raise UsageError(ck.path, f"has no section {wanted!r}; it has {', '.join(here) or 'none'}")
    return tuple(_detail(ck, section, private) for section in found)


def _detail(ck: Checkpoint, section: Section, private: bool) -> Detail:
    if section.kind == "optimizer":
        return Detail(section.kind, section.name, state=tuple(_state_rows(ck, section)))
    tensors = tuple(named_tensors(section.value)) if section.kind == "model" else ()
    values = [row for row in _value_rows(ck, section) if not (tensors and isinstance(row.value, Tensor))]
    shown = [row for row in values if private or not is_private_value(section.kind, fqn_of(row.path), row.value)]
    hidden, left_out = len(values) - len(shown), len(values) > MAX_VALUES
    return Detail(section.kind, section.name, tensors, (), tuple(shown[:MAX_VALUES]), left_out, hidden)


def named_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a subtree, each with its name relative to the subtree."""
    return ((fqn_of(path), leaf) for path, leaf in leaves_of(value) if isinstance(leaf, Tensor))


def _state_rows(ck: Checkpoint, section: Section) -> Iterator[StateRow]:
    optimizer = next(o for o in optimizers_of(ck).values() if o.path == section.path)
    group_of = {name: n for n, group in enumerate(optimizer.param_groups) for name in group.names}
    for key, entry in optimizer.state.items():
        name = key if isinstance(key, str) else f"?{key}"
        slots = dict(entry) if isinstance(entry, Mapping) else {"state": entry}
        yield StateRow(name, group_of.get(name), slots)


def _value_rows(ck: Checkpoint, section: Section) -> Iterator[ValueRow]:
    differing = set(map(fqn_of, ck.differing))
    for n, (path, leaf) in enumerate(leaves_of(section.value)):
        if n > MAX_VALUES:
            return
        full = section.place_of(path)
        names = (fqn_of(full[:k]) for k in range(1, len(full) + 1)) if differing else ()
        differs = next((name for name in names if name in differing), "")
        yield ValueRow(path, leaf, fingerprint(leaf), differs)


# -- the rows as text --------------------------------------------------------------------------------------------------

TENSOR_COLUMNS = (
    Column("tensor", "name"),
    Column("shape", "number"),
    Column("dtype"),
    Column("size", "number"),
    Column("placement"),
)
STATE_COLUMNS = (
    Column("parameter", "name"),
    Column("group", "number"),
    Column("shape", "number"),
    Column("state"),
)
COMPARED = "which ranks have states of their own: ckptools show PATH rng"
VALUE_COLUMNS = (Column("key", "name"), Column("value", "value"))


def section_text(report: Report, details: Sequence[Detail], screen: Screen = PIPE) -> str:
    """Render sections in full, for `inspect --section`."""
    blocks = [_lines(report, detail, screen) for detail in details if detail.kind != "other"]
    others = [detail for detail in details if detail.kind == "other"]
    blocks += [_other_lines(report, others, screen)] if others else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _lines(report: Report, detail: Detail, screen: Screen) -> list[str]:
    lines = wrapped("", f"{printable(detail.name)} in {printable(report.name)}", screen, mark="heading")
    values = table(VALUE_COLUMNS, [_value_cells(row) for row in detail.values], screen)
    state = table(STATE_COLUMNS, [_state_cells(row) for row in detail.state], screen)
    blocks = [_groups(report, detail, screen), _tensors(detail, screen), state, values]
    blocks += [[COMPARED] if detail.kind == "rng" else [], _left_out([detail]), _agreement(report, detail)]
    return lines + [line for block in blocks if block for line in ("", *block)]


def _other_lines(report: Report, details: Sequence[Detail], screen: Screen) -> list[str]:
    rows = [_value_cells(row, detail.name) for detail in details for row in detail.values]
    title = details[0].name if len(details) == 1 else "other values"
    return [
        *wrapped("", f"{printable(title)} in {printable(report.name)}", screen, mark="heading"),
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
    total = sum(tensor.nbytes for _, tensor in detail.tensors)
    lines = table(TENSOR_COLUMNS, [tensor_cells(*named) for named in detail.tensors], screen)
    return [*lines, f"{plural(len(detail.tensors), 'tensor')}, {size(total)}"] if lines else []


def tensor_cells(fqn: str, tensor: Tensor) -> list[str]:
    """The cells of a tensor under `TENSOR_COLUMNS`."""
    return [fqn, shape(tensor.shape), short(tensor.dtype), size(tensor.nbytes), placement(tensor)]


def _state_cells(row: StateRow) -> list[str]:
    moments = moments_of(row.slots)
    dims = shape(moments[0].shape) if moments else "-"
    slots = {k: short(v.dtype) if isinstance(v, Tensor) else value_text(v, 40) for k, v in row.slots.items()}
    state = ", ".join(f"{slot} {text}" for slot, text in slots.items())
    return [row.parameter, "-" if row.group is None else str(row.group), dims, state]


def _value_cells(row: ValueRow, section: str = "") -> list[str]:
    text = value_text(row.value, 120)
    if row.fingerprint is not None:
        listed = isinstance(row.value, (list, tuple))
        length = plural(len(row.value), "integer") if listed else value_text(row.value)
        text = f"{length}, crc {row.fingerprint:08x}"
    name = ".".join(part for part in (section, fqn_of(row.path)) if part)
    return [name or "value", text + (f" (ranks differ in {row.differs})" if row.differs else "")]


# -- the record of `inspect` as one JSON object; bytes are integers, NaN is null, all text is ASCII ------------------


SCHEMA = "ckptools/inspect/1"


def report_json(report: Report, details: Sequence[Detail] = (), indent: int | None = 1) -> str:
    """Render the report, and the sections requested in full, as one JSON object, on one line without `indent`."""
    values = JsonValues()
    made = _report(report, values)
    if details:
        made["details"] = [_detail_json(detail, values) for detail in details]
    made["nonfinite"], made["left_out"] = values.nonfinite, values.left_out
    return to_json(made, indent)


def _report(report: Report, values: JsonValues) -> dict[str, Any]:
    ck = report.checkpoint
    return {
        "schema": SCHEMA,
        "tool": f"ckptools {__version__}",
        "path": str(ck.path),
        "name": report.name,
        "folder": str(report.folder),
        "format": ck.format,
        "saved_as": report.saved_as,
        "sharding": report.sharding,
        "verdict": to_dict(report.verdict),
        "whole": report.verdict.whole,
        "step": _fact(ck.step),
        "world_size": {
            **_fact(report.world_size),
            "at_least": report.world_size.at_least,
            "ranks_found": report.ranks.here,
            "files_found": report.ranks.files,
        },
        "layout": [layout._asdict() for layout in report.layout],
        "quantized": [to_dict(scheme) for scheme in ck.quantized],
        "adapters": [to_dict(adapter) for adapter in adapters_of(ck)],
        "bytes": {"found": report.bytes_found, "expected": report.bytes_expected},
        "saved": {"first": moment_utc(report.saved[0]), "last": moment_utc(report.saved[1])} if report.saved else None,
        "torch": _fact(report.torch),
        "versions": dict(report.writers),
        "ranks": [_file(report.folder, f) for f in ck.files if ck.all_ranks or not f.is_here],
        "sections": [_section(section) for section in report.sections],
        "optimizers": [_optimizer(optimizer, values) for optimizer in report.optimizers],
        "schedulers": [
            {"name": s.name, "section": s.section, "agrees": s.agrees, "state": values.of(s.state)}
            for s in report.schedulers
        ],
        "problems": [_problem(problem) for problem in report.problems],
        "foreign": list(report.foreign),
        "suspicious": list(report.suspicious),
        "differing": list(report.differing),
        "provenance": report.provenance.to_dict() if report.provenance else None,
        "read": {
            "ranks": report.ranks.read,
            "files": ck.cost.files,
            "all_ranks": ck.all_ranks,
            "seconds": round(ck.cost.seconds, 6),
            "bytes": ck.cost.nbytes,
        },
    }


def _fact(fact: Fact) -> dict[str, Any]:
    return {"value": fact.value, "from": list(fact.sources), "agree": fact.agree}


def _file(folder: Path, file: RankFile) -> dict[str, Any]:
    status = "truncated" if file.status == "cut" else file.status
    part = {"part": file.part} if file.part else {}
    name = file.path.relative_to(folder).as_posix()
    return {"rank": file.rank, **part, "file": name, "status": status, "bytes": file.nbytes}


def _section(row: SectionRow) -> dict[str, Any]:
    size = row.size
    return {
        "name": row.name,
        "kind": row.kind,
        **({"role": row.role} if row.role else {}),
        "path": [key_name(key) for key in row.path],
        "tensors": size.tensors,
        "params": size.params,
        "dtypes": size.dtypes,
        "quantized": size.quantized,
        "bytes": size.nbytes,
        "holds": row.holds,
    }


def _optimizer(row: OptimizerRow, values: JsonValues) -> dict[str, Any]:
    facts = row._asdict()
    groups = facts.pop("groups")
    return {
        **facts,
        "param_groups": [{**values.of(g.values), "params": g.params, "tensors": g.tensors} for g in groups],
    }


def _problem(problem: Problem) -> dict[str, Any]:
    facts = {"code": problem.code, "severity": problem.severity, "message": problem.message}
    where = {"rank": problem.rank, "tensor": problem.tensor}
    return {**facts, **{key: value for key, value in where.items() if value is not None}}


def _detail_json(detail: Detail, values: JsonValues) -> dict[str, Any]:
    return {
        "name": detail.name,
        "kind": detail.kind,
        "tensors": [_tensor(fqn, tensor) for fqn, tensor in detail.tensors],
        "state": [{**row._asdict(), "slots": values.of(row.slots)} for row in detail.state],
        "values": [_value(row, values) for row in detail.values],
        "left_out": detail.left_out,
        "private": detail.private,
    }


def _tensor(fqn: str, tensor: Tensor) -> dict[str, Any]:
    known = {"name": fqn, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.nbytes}
    return {**known, "placement": placement(tensor), "note": tensor.note}


def _value(row: ValueRow, values: JsonValues) -> dict[str, Any]:
    print_ = {} if row.fingerprint is None else {"crc32": f"{row.fingerprint:08x}"}
    return {"key": fqn_of(row.path), "value": values.of(row.value), **print_, "differs": bool(row.differs)}
