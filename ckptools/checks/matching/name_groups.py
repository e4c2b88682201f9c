"""Names of rows folded: layers that differ in their number are one line, and a wall of keys a few prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ckptools.dtypes import short
from ckptools.model.matching import MatchGroup, MatchRow
from ckptools.text import shape, spans

MOST = 6
"""Lines of one status and one explanation; where there are more, names lose their ends."""

STATUSES = ("shape", "unknown", "missing", "tied", "unexpected")


class Template(NamedTuple):
    """A name as its components, of which those in `numbers` are any of some numbers; `open` where more follows."""

    parts: tuple[str, ...]
    open: bool = False


def groups_of(rows: Iterable[MatchRow]) -> list[MatchGroup]:
    """What differs, folded: by status first, then by what explains it; those whose dtype differs come last."""
    listed = list(rows)
    found = [g for s in STATUSES for g in _groups(s, [r for r in listed if r.status == s], _shapes)]
    return [*found, *_groups("dtype", [r for r in listed if r.dtype_differs], _dtypes)]


Facts = tuple[str, str, str]
"""Of the checkpoint, of the model, and what explains the difference."""


def _shapes(row: MatchRow) -> Facts:
    return _size(row.checkpoint_shape), _size(row.model_shape), row.note


def _size(sizes: tuple[int, ...] | None) -> str:
    return "" if sizes is None else shape(sizes)


def _dtypes(row: MatchRow) -> Facts:
    return short(row.checkpoint_dtype), short(row.model_dtype), "converted when it is loaded"


def _groups(status: str, rows: Sequence[MatchRow], facts: Callable[[MatchRow], Facts]) -> list[MatchGroup]:
    """Rows that tell the same facts, by name; where only one side has a shape it is no reason to tell them apart."""
    alike: dict[Facts, list[MatchRow]] = {}
    for row in rows:
        told = facts(row)
        key = told if status in ("shape", "dtype") else ("", "", told[2])
        alike.setdefault(key, []).append(row)
    return [group for key, some in alike.items() for group in _folded(status, some, key, facts)]


def _folded(
    status: str, rows: Sequence[MatchRow], key: Facts, facts: Callable[[MatchRow], Facts]
) -> Iterable[MatchGroup]:
    for names, members in fold([row.name or row.checkpoint_name or "" for row in rows]):
        told = {facts(rows[n])[:2] for n in members}
        checkpoint, model = told.pop() if len(told) == 1 else key[:2]
        yield MatchGroup(status, names, len(members), checkpoint, model, key[2])


def fold(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Names that are alike under one text, each with the numbers of those that it stands for."""
    found: dict[Template, list[int]] = {}
    for n, name in enumerate(names):
        parts = tuple("{}" if part.isdecimal() else part for part in name.split("."))
        found.setdefault(Template(parts), []).append(n)
    while len(found) > MOST and max(len(template.parts) for template in found) > 1:
        found = _shorter(found)
    return [(_text(template, [names[n] for n in members]), members) for template, members in found.items()]


def _shorter(found: dict[Template, list[int]]) -> dict[Template, list[int]]:
    """The longest templates without their last component, those that become one joined."""
    longest = max(len(template.parts) for template in found)
    joined: dict[Template, list[int]] = {}
    for template, members in found.items():
        cut = Template(template.parts[:-1], True) if len(template.parts) == longest else template
        joined.setdefault(cut, []).extend(members)
    return joined


def _text(template: Template, names: Sequence[str]) -> str:
    """A template with its numbers; a name that stands alone is itself."""
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    parts = [_numbers({parts[n] for parts in split}) if part == "{}" else part for n, part in enumerate(template.parts)]
    return ".".join([*parts, *(["*"] if template.open else [])])


def _numbers(found: set[str]) -> str:
    if len(found) == 1:
        return found.pop()
    return "{" + spans(int(number) for number in found if len(number) < 10) + "}"
