"""Decide for every format which rank a file belongs to: missing, stray, duplicate, or swapped with another file.

A format states for each of its files the place that its name gives and the place that its content states
(`FileClaims`); where a file states such a claim is the format's business. The conclusions are drawn here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.records import grouped
from ckptools.text import few

Place = Mapping[str, int | str]
"""The place of a file, by axis: `{"rank": 3}`, `{"layer": 2, "expert": 7}`."""

NOWHERE: Place = MappingProxyType({})

ANOTHER: Place = MappingProxyType({"rank": "another rank"})
"""The place by content of a file whose content only shows that its name is wrong."""

Key = frozenset[tuple[str, int | str]]


class FileClaims(NamedTuple):
    """The place of a file by its name and by its content.

    Attributes:
        path: the file.
        rank: the rank under which the file is counted.
        named: its place by its name.
        inside: its place by its content, as far as stated; the other axes are as in the name.
        by: the part of its content that states the place.
        verb: the verb for that statement in messages.
        name: the file's name in messages, if not its own name.
        tensor: the part of the tree in the file.
    """

    path: Path
    rank: int | None
    named: Place
    inside: Place = NOWHERE
    by: str = ""
    verb: str = "holds"
    name: str = ""
    tensor: str | None = None

    def __str__(self) -> str:
        return self.name or self.path.name

    @property
    def own(self) -> Key:
        """The file's place by its name."""
        return frozenset(self.named.items())

    @property
    def stated(self) -> Key:
        """The file's place by its content, completed by its name."""
        return frozenset({**self.named, **self.inside}.items())

    @property
    def astray(self) -> bool:
        """Whether the file's content states another place than its name."""
        return self.stated != self.own


def missing(
    name: str | Sequence[str],
    rank: int | None = None,
    tensor: str | None = None,
    *,
    kind: str = "file",
    more: str = "",
    severity: Severity = "error",
    ranks: tuple[int, ...] = (),
    contents: str = "",
) -> Problem:
    """Make the problem of a missing file or value.

    Args:
        name: of a file or folder, or the names of several; without a `kind`, a description of the missing thing.
        rank: the rank of the file.
        tensor: the part of the tree that only this file has.
        kind: `file` or `folder`, or empty for a thing without a name.
        more: the rest of the message: the reason why it should be here.
        severity: of the problem.
        ranks: the ranks whose values it has, if there are several.
        contents: the last part of the message, if it states the file's content.
    """
    names = (name,) if isinstance(name, str) else tuple(name)
    text = f"no {f'{kind} ' if kind else ''}{few(names)}{more}{contents}"
    files = names if kind else ()
    return Problem(Code.FILE_MISSING, text, rank, tensor, severity, files, ranks, contents=contents)


def strays(
    names: Sequence[str], why: str, rank: int | None = None, tensor: str | None = None, severity: Severity = "error"
) -> Iterator[Problem]:
    """Yield the problem of files that are not of this save, or duplicate others; none for an empty list."""
    if names:
        yield Problem(Code.STRAY_FILE, f"{few(names, 3)}: {why}", rank, tensor, severity, tuple(names))


def beyond(rows: Iterable[FileClaims], sizes: Place, by: str = "", severity: Severity = "error") -> Iterator[Problem]:
    """Yield files whose names place them outside of this save; `by` says what states the size of each axis."""
    for row in rows:
        for axis, size in sizes.items():
            if int(row.named.get(axis, 0)) >= int(size):
                text = f"{row} is {axis} {row.named[axis]}, and the save has {size}{by}"
                yield Problem(Code.STRAY_FILE, text, row.rank, row.tensor, severity, (str(row),))
                break


def twice(rows: Iterable[FileClaims]) -> Iterator[Problem]:
    """Yield files whose content states the same place; the problem is about the file that was overwritten."""
    for alike in grouped(rows, lambda row: row.stated).values():
        if len(alike) > 1:
            astray = [row for row in alike if row.astray]
            rank = astray[0].named["rank"] if len(astray) == 1 and "rank" in astray[0].named else alike[0].rank
            names, place = tuple(map(str, alike)), {**alike[0].named, **alike[0].inside}
            text = f"{len(alike)} files say they are {_words(place)}: {few(names)}"
            yield Problem(Code.STRAY_FILE, text, None if rank is None else int(rank), files=names)


def misplaced(rows: Iterable[FileClaims], *, by_content: bool = False, sure: bool = True) -> Iterator[Problem]:
    """Yield files whose content states another place than their name: swapped with the file of that place, or copies.

    Args:
        rows: all files that were read.
        by_content: whether tensors are placed by the file's content; a copy is then found by `twice`.
        sure: whether the claim is more than a name inside the file, which a rename leaves stale.
    """
    rows = list(rows)
    if len(rows) < 2 and not sure:
        return
    here, claimed = {row.own: row for row in reversed(rows)}, {row.stated for row in rows if row.astray}
    for row in (row for row in rows if row.astray):
        other = here.get(row.stated)
        swapped = other is not None and other.stated == row.own
        copied = other is not None and not other.astray and (by_content or bool(other.inside))
        if by_content:
            exchanged = other is not None and row.own in claimed
            kind = Code.NAMED_AS_ANOTHER_RANK if exchanged or (sure and not copied) else Code.NAME_CONTRADICTS
        else:
            kind = Code.STRAY_FILE if sure or other is not None else Code.NAME_CONTRADICTS
        odd = [axis for axis, at in row.inside.items() if row.named[axis] != at]
        inside, named = ({axis: place[axis] for axis in odd} for place in (row.inside, row.named))
        text = f"{row} {row.verb} {_words(inside)}" + (f" ({row.by})" if row.by else "")
        if by_content and sure:
            text += "; the content is believed"
        elif other is not None:
            fate = "swapped with it" if swapped else "a copy of it" if copied else "swapped with it, or a copy of it"
            text += f", {'which' if _words(inside) == str(other) else f'and {other}'} is here too: {fate}"
        found, expected = _fact(inside), _fact(named)
        yield Problem(kind, text, row.rank, row.tensor, files=(str(row),), found=found, expected=expected)


def _words(place: Place) -> str:
    return ", ".join(at if isinstance(at, str) else f"{axis} {at}" for axis, at in place.items())


def _fact(place: Place) -> int | str:
    return next(iter(place.values())) if len(place) == 1 else _words(place)
