"""The record of `inspect` as one JSON object; bytes are integers, there is no bare NaN, and all text is ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools._version import __version__
from ckptools.display.lines import key_name
from ckptools.display.record_json import JsonValues, to_json
from ckptools.inspect.record import Report, SectionRow
from ckptools.inspect.section_summary import OptimizerRow
from ckptools.keys.sharding import placement
from ckptools.model.checkpoint import Fact, RankFile
from ckptools.model.problems import Problem
from ckptools.model.records import to_dict
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of
from ckptools.text import moment_utc

if TYPE_CHECKING:
    from ckptools.inspect.sections import Detail, ValueRow

SCHEMA = "ckptools/inspect/1"


def report_json(report: Report, details: Sequence[Detail] = ()) -> str:
    """Render the report, and the sections requested in full, as one JSON object."""
    values = JsonValues()
    made = _report(report, values)
    if details:
        made["details"] = [_detail(detail, values) for detail in details]
    made["nonfinite"], made["left_out"] = values.nonfinite, values.left_out
    return to_json(made, indent=1)


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


def _detail(detail: Detail, values: JsonValues) -> dict[str, Any]:
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
