"""Checkpoints, problems and values in one line each, of bounded length and safe to print."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ckptools.dtypes import short
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.tensor import Tensor
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, TorchName, scalar
from ckptools.text import MAX_BITS, and_others, clip, clip_middle, number, plural, printable, shape, size, spans
from ckptools.training_state.judgement import perhaps_more, verdict_of
from ckptools.training_state.sections import measure, sections_of

MAX_LINE = 500
"""Characters of a message; names from files have any number."""

MAX_ITEMS = 6
"""Items of a list or dict that are shown in a line."""


def checkpoint_line(ck: Checkpoint) -> str:
    """Name, step, ranks, tensors and size of a checkpoint in one line.

    Such as `<Checkpoint ep0-ba11500: step 11500, 256 ranks (whole), 1164 tensors, 75.3 GiB>`.
    """
    tensors = sum(measure(s.value).tensors for s in sections_of(ck))
    step = [] if ck.step.value is None else [f"step {ck.step.value}"]
    found = size(sum(f.nbytes for f in ck.files))
    facts = [*step, ranks_line(ck), plural(tensors, "tensor"), found]
    return f"<Checkpoint {printable(clip_middle(ck.name, 60))}: {', '.join(facts)}>"


def ranks_line(ck: Checkpoint) -> str:
    """Count the ranks, and say whether all are there: `4 ranks (whole)`, `1 of 256 ranks`, `one file`."""
    world, here = ck.world_size.value, len(ck.ranks)
    verdict = verdict_of(ck)
    if len(ck.files) == 1 and verdict.whole:
        return "one file"
    if not isinstance(world, int) or here >= world or not any(f.status == "missing" for f in ck.files):
        parts = plural(here, "rank") if here else plural(len(ck.files), "file")
        unproven = "perhaps not all" if perhaps_more(ck.problems) else "not compared"
        return f"{parts} ({unproven if verdict.whole is None else 'whole' if verdict.whole else 'NOT WHOLE'})"
    return f"{here} of {world} ranks"


class Folded(NamedTuple):
    """One line about one or more problems of one code and severity.

    `where` has their ranks or tensors, such as `ranks 1..255`, and is empty when they are about the whole; `message` is
    the first one's, with how many there are.
    """

    code: str
    severity: Severity
    where: str
    message: str


def fold(problems: Iterable[Problem]) -> list[Folded]:
    """Problems in the order of their first appearance; those that differ in numbers and names alone become one."""
    return [_folded(group) for group in _grouped(problems, _alike)]


def _grouped(problems: Iterable[Problem], key: Callable[[Problem], str]) -> list[list[Problem]]:
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.code, problem.severity, key(problem)), []).append(problem)
    return list(groups.values())


def _alike(problem: Problem) -> str:
    """The key that alike problems share: everything for those about no rank and no tensor, else all but the numbers."""
    about = problem.rank is not None or problem.tensor is not None
    return re.sub(r"\d+", "#", problem.message) if about else problem.message


def _folded(group: Sequence[Problem]) -> Folded:
    first = group[0]
    more = and_others(len(group) - 1) if len({p.message for p in group}) > 1 else ""
    return Folded(first.code, first.severity, _where(group), clip_middle(printable(first.message), MAX_LINE) + more)


def _where(group: Sequence[Problem]) -> str:
    ranks = {p.rank for p in group if p.rank is not None}
    tensors = list(dict.fromkeys(p.tensor for p in group if p.tensor is not None))
    words = [f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"] if ranks else []
    if tensors:
        kind = "other value" if group[0].kind in (Code.VALUE_LOST, Code.MIXED_SAVES, Code.LEFT_OUT) else "other tensor"
        more = f" and {plural(len(tensors) - 1, kind)}" if len(tensors) > 1 else ""
        words.append(clip_middle(printable(tensors[0]), 60) + more)
    return ", ".join(words)


def error_lines(problems: Iterable[Problem]) -> list[str]:
    """A line for each problem; those that say the same word for word, of several tensors or ranks, share one."""
    groups = _grouped(problems, lambda problem: problem.message)
    return [str(g[0]) if len(g) == 1 else "  ".join([g[0].code, _where(g), g[0].message]) for g in groups]


def described(value: Any) -> str | None:
    """A description of a value that has no text of its own: a tensor, an array, bytes, a class; else None."""
    if isinstance(value, Tensor):
        return f"{short(value.dtype)} tensor {shape(value.shape)}"
    if isinstance(value, (NumpyArray, NumpyScalar)):
        dims = shape(value.shape) if isinstance(value, NumpyArray) else ""
        return f"numpy {value.dtype} {dims}".strip()
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, Opaque):
        return f"<{value.name}{_arguments(value)}>"
    if isinstance(value, Global):
        return f"<{value.dotted}>"
    if isinstance(value, (TorchName, Device, NumpyDtype)):
        return str(value)
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    return None


def _arguments(value: Opaque) -> str:
    from ckptools.keys.rank_leaves import is_brief

    return f"({', '.join(value_text(a, 40) for a in value.args)})" if value.args and is_brief(value) else ""


def value_text(value: Any, width: int = 80, depth: int = 2) -> str:
    """A value in one line of at most `width` characters, safe to print."""
    return clip(printable(_shown(scalar(value), width, depth)), width)


def _shown(value: Any, width: int, depth: int) -> str:
    description = described(value)
    if description is not None:
        return description
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return repr(clip(value, width))
    if isinstance(value, Mapping):
        return _mapping(value, width, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _sequence(value, width, depth)
    return str(value)


def _mapping(value: Mapping[Any, Any], width: int, depth: int) -> str:
    if not depth:
        return "{" + plural(len(value), "value") + "}"
    some = islice(value.items(), MAX_ITEMS)
    return "{" + _joined([f"{key_name(k)}: {value_text(v, width, depth - 1)}" for k, v in some], len(value)) + "}"


def _sequence(value: Any, width: int, depth: int) -> str:
    first, last = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
    if not depth:
        return first + plural(len(value), "value") + last
    return first + _joined([value_text(v, width, depth - 1) for v in islice(value, MAX_ITEMS)], len(value)) + last


def _joined(texts: list[str], total: int) -> str:
    return ", ".join(texts + ([f"{total - len(texts)} more"] if total > len(texts) else []))


def key_name(key: Any) -> str:
    """A dict key as text: a string as it is, anything else as a value."""
    return key if isinstance(key, str) else value_text(key)
