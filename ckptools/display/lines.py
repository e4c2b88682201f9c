"""Checkpoints, problems and values in one line each, of bounded length and safe to print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from ckptools.display.tables import PIPE, Screen, wrapped
from ckptools.dtypes import short
from ckptools.model.causes import Cause, Consequence, causes_of, consequences_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.tensor import Tensor
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, TorchName, scalar
from ckptools.text import MAX_BITS, clip, clip_middle, number, plural, printable, shape, size
from ckptools.training_state.judgement import perhaps_more, verdict_of
from ckptools.training_state.section_size import measure
from ckptools.training_state.sections import sections_of

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


WAYS_OUT = "         "
"""What stands before the way out of a cause and its consequences, below their code."""


def cause_lines(
    causes: Sequence[Cause], consequences: Iterable[Consequence] = (), screen: Screen = PIPE, most: int | None = None
) -> list[str]:
    """Each cause with its way out below it, then what follows from lost files; at most so many causes.

    Everything is made printable before it is painted: a name from a file brings no colour of its own.
    """
    shown, following = causes[:most], list(consequences)
    last = max((n for n, cause in enumerate(shown) if following and cause.code in following[0].causes), default=-1)
    lines: list[str] = []
    for n, cause in enumerate(shown):
        lines += wrapped(f"  {cause.code}  ", printable(cause_words(cause)), screen, label="heading")
        lines += wrapped(WAYS_OUT, printable(cause.remedy), screen, mark="dim") if cause.remedy else []
        lines += wrapped("  -> ", printable(_following(following)), screen) if n == last else []
    left = len(causes) - len(shown)
    return [*lines, *([f"  {plural(left, 'more cause')}; all of them when piped, as in | less"] if left else [])]


def _following(consequences: Sequence[Consequence]) -> str:
    """What follows from lost files, and from which causes where there are several: `9 tensors have gaps`."""
    codes = consequences[0].causes
    return ", ".join(one.text for one in consequences) + (f" ({' and '.join(codes)})" if len(codes) > 1 else "")


def cause_words(cause: Cause) -> str:
    """What is wrong and where, in a line: `ranks 1..63: no file __R_0.distcp`."""
    return ": ".join(filter(None, (cause.where, cause.what)))


def error_lines(problems: Sequence[Problem], said: str, screen: Screen = PIPE) -> list[str]:
    """The causes behind the problems of an error; of one that its own line has `said`, the way out alone."""
    causes = causes_of(problems, ("error", "warning", "note"))
    lines = cause_lines(causes, consequences_of(problems), screen, screen.rows)
    alone = len(causes) == 1 and printable(cause_words(causes[0])) in printable(said)
    if not alone:
        return lines
    return wrapped(WAYS_OUT, printable(causes[0].remedy), screen) if causes[0].remedy else []


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
