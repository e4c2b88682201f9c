"""Provenance records that `consolidate` writes into its outputs. They are untrusted: they only ever add problems.

A record is in the file itself (`ckptools.json` in a `.pt` or in a DCP folder, `ckptools` in the metadata of a
safetensors file). An output without a record may have a side file, `OUT.left-out.json`, which lists omissions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File, JsonError, check_stays_inside, is_remote, parse_json
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.provenance import (
    FILE_NAME,
    MAX_BYTES,
    MAX_NAMED,
    MAX_SIDE_FILE,
    OTHER,
    SCHEMA,
    Filled,
    LeftOut,
    Origin,
    Provenance,
    Said,
    joined,
    of_side_file,
)
from ckptools.model.tree import describe_for_error, tensors_in
from ckptools.option import spelled
from ckptools.text import few, fqn_of, plural, printable

FILLS = {"zero": "zeros", "nan": "NaN"}
BEFORE = "left out by consolidate"
UNSURE = "the checkpoint that it was made of may have held more"
SIDE_FILE = ".left-out.json"
NUMBERED = re.compile(r"(.*)-\d{5}-of-\d{5}(\.[^.]+)")
MAX_SIDE_FILES = 64
"""Side files are searched beside at most this many files; only outputs with an index have more."""


def of_folder(folder: Path, names: Iterable[str], follow_symlinks: bool) -> Said | None:
    """The record in a DCP folder with files of these names, or None.

    Raises:
        UnsafePathError: it is a link out of the folder.
    """
    if FILE_NAME not in names:
        return None
    path = folder / FILE_NAME
    if not follow_symlinks:
        check_stays_inside(path, folder)
    return _text_of(path, MAX_BYTES)


def _text_of(path: Path, most: int) -> Said:
    try:
        with File(path) as file:
            if file.size > most:
                return Said("", f"{path.name} has {file.size} bytes; at most {most} are read")
            return Said(file.read(0, file.size).decode("utf-8"))
    except ReadError as error:
        return Said("", f"{path.name} {error.reason}")
    except UnicodeDecodeError:
        return Said("", f"{path.name} is not UTF-8")


def with_provenance(checkpoint: Checkpoint, said: Mapping[Path, Said]) -> Checkpoint:
    """Add the provenance that the records of a checkpoint's files state, and the problems that follow."""
    own = {file.path: said[file.path] for file in checkpoint.files if file.path in said}
    records, problems = dict[Path, Provenance](), list[Problem]()
    for path, one in {**own, **_side_files(checkpoint, own)}.items():
        try:
            records[path] = _parsed(one, path.name.endswith(SIDE_FILE))
        except _RecordError as error:
            text = f"{path.name}: what it says of where it comes from cannot be read ({error})"
            problems.append(Problem(Code.ORIGIN_UNREADABLE, f"{text}; whether all its values were saved is not known"))
    found = _as_named(joined(records.values()), checkpoint)
    problems += _problems(found, checkpoint.tree) if found is not None else []
    problems += _of_several(records)
    if not problems and found is None:
        return checkpoint
    return replace(checkpoint, provenance=found, problems=worst_first([*checkpoint.problems, *problems]))


def _side_files(checkpoint: Checkpoint, own: Mapping[Path, Said]) -> dict[Path, Said]:
    """Side files of outputs without a record; in a store only files that the user named are fetched."""
    files = [file.path for file in checkpoint.files if file.is_here and file.path not in own]
    if not files or len(files) > MAX_SIDE_FILES or is_remote(files[0]):
        return {}
    wanted = dict.fromkeys(map(_output_of, files)).keys() - set(map(_output_of, own))
    beside = [out.with_name(out.name + SIDE_FILE) for out in sorted(wanted)]
    return {path: _text_of(path, MAX_SIDE_FILE) for path in beside if path.is_file()}


def _output_of(file: Path) -> Path:
    """The path of the output to which a file belongs."""
    if file.name == ".metadata":
        return file.parent.resolve()
    numbered = NUMBERED.fullmatch(file.name)
    return file.with_name(numbered[1] + numbered[2] if numbered else file.name.removesuffix(".index.json"))


class _RecordError(ValueError):
    """A record is invalid; the message says why."""


def _parsed(said: Said, side: bool) -> Provenance:

    if said.fault:
        raise _RecordError(said.fault)
    try:
        if len(said.text) > (MAX_SIDE_FILE if side else MAX_BYTES):
            raise _RecordError(f"{len(said.text)} characters; at most {MAX_BYTES} are read")
        made = parse_json(said.text)
        return of_side_file(made) if side else _of_json(made)
    except JsonError as error:
        raise _RecordError(f"no JSON: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, _RecordError):
            raise
        raise _RecordError(f"no such record as ckptools writes: {describe_for_error(str(error))}") from error


def _of_json(made: Any) -> Provenance:
    if not isinstance(made, dict) or made.get("schema") != SCHEMA:
        what = made.get("schema") if isinstance(made, dict) else type(made).__name__
        raise _RecordError(f"expected {SCHEMA}, found {describe_for_error(what)}")
    return Provenance(
        _text(made["ckptools"]),
        _text(made["part"]),
        tuple(_origin(one) for one in _list(made["sources"])),
        tuple(_filled(one) for one in _list(made["filled"])),
        tuple(_left_out(one) for one in _list(made["left_out"])),
        _count(made["more_filled"]),
        _count(made["more_lost"]),
        tuple(_text(one["why"]) for one in _list(made.get("unsure", []))),
    )


def _origin(one: Any) -> Origin:
    known = [None if n is None else _count(n) for n in (one["step"], one["world_size"])]
    return Origin(_text(one["name"]), _text(one["format"]), *known)


def _filled(one: Any) -> Filled:
    if one["fill"] not in (*FILLS, OTHER):
        raise _RecordError(f"filled with {describe_for_error(one['fill'])}")
    return Filled(
        _text(one["name"]), one["fill"], _count(one["elements"]), _count(one["numel"]), _text(one.get("origin", ""))
    )


def _left_out(one: Any) -> LeftOut:
    if type(one["lost"]) is not bool:
        raise _RecordError(f"lost is {describe_for_error(one['lost'])}")
    return LeftOut(_text(one["name"]), _text(one["why"]), one["lost"])


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > 4 * MAX_NAMED or not all(isinstance(one, dict) for one in value):
        raise _RecordError(f"expected a list of objects, found {describe_for_error(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _RecordError(f"expected a text, found {describe_for_error(value)}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _RecordError(f"expected a number, found {describe_for_error(value)}")
    return value


def _problems(record: Provenance, tree: Any) -> Iterator[Problem]:
    """Yield values that consolidate filled in, and values that the output's format could not store."""
    tops = {str(key).partition(".")[0] for key in tree} if isinstance(tree, dict) else set()

    def about(kind: Code, text: str, name: str) -> Problem:
        # A name that may be of any section must not match another part than the requested one.
        known = name.partition(".")[0] in tops
        return Problem(kind, text if known or not name else f"{name}: {text}", None, name if known else None)

    for one in record.filled:
        text = f"{one.elements} of {plural(one.numel, 'element')} are"
        if one.fill == OTHER:
            yield about(
                Code.FILLED, f"{text} those of another save, {printable(one.origin)} ({spelled('fill-from')})", one.name
            )
        else:
            yield about(Code.FILLED, f"{text} {FILLS[one.fill]} that consolidate filled in: no file has them", one.name)
    if record.more_filled:
        text = f"{plural(record.more_filled, 'more tensor')} with values that consolidate filled in"
        yield Problem(Code.FILLED, text)
    lost = [one for one in record.left_out if one.lost]
    for gone in lost:
        why = gone.why if gone.why.startswith(BEFORE) else f"{BEFORE}: {gone.why}"
        yield about(Code.LEFT_OUT, why, gone.name)
    if record.more_lost:
        yield Problem(Code.LEFT_OUT, f"{plural(record.more_lost, 'more thing')} {BEFORE}, which its source had lost")
    for why in record.unsure:
        text = why if why.startswith(UNSURE) else f"{UNSURE}: {why}"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    others = [one.name for one in record.left_out if not one.lost]
    if others:
        counted = f"{plural(len(others), 'value')} of its source {BEFORE}"
        text = f"{counted}, as the format holds no such values: {few(others, 3)}"
        yield Problem(Code.LEFT_OUT, text, severity="warning")


def _of_several(records: Mapping[Path, Provenance]) -> Iterator[Problem]:
    """Find files that come from different checkpoints, within one output or beside each other."""
    sources: dict[Path, dict[Origin, Path]] = {}
    for path, record in records.items():
        for origin in record.sources[:1]:
            sources.setdefault(_output_of(path), {}).setdefault(origin, path)
    for origins in sources.values():
        if len(origins) > 1:
            yield Problem(Code.MIXED_SAVES, f"files of one output come from different checkpoints: {_listed(origins)}")
    outputs = {origin: path for origins in sources.values() for origin, path in list(origins.items())[:1]}
    if len(outputs) > 1:
        text = f"they come from different checkpoints: {_listed(outputs)}"
        yield Problem(Code.MIXED_SAVES, text, severity="warning")


def _listed(origins: Mapping[Origin, Path]) -> str:
    return few([f"{path.name} from {origin}" for origin, path in origins.items()], 3)


def _as_named(record: Provenance | None, checkpoint: Checkpoint) -> Provenance | None:
    """Rename entries to the checkpoint's names: a model beside others has its section as a prefix."""
    if record is None or not record.filled:
        return record
    here = {fqn_of(path) for path, _ in tensors_in(checkpoint.tree)}
    sections = list(checkpoint.tree) if isinstance(checkpoint.tree, dict) else []

    def name(given: str) -> str:
        inside = [full for section in sections if (full := f"{section}.{given}") in here]
        return inside[0] if given not in here and len(inside) == 1 else given

    return replace(record, filled=tuple(one._replace(name=name(one.name)) for one in record.filled))
