"""The rank files of a checkpoint, by whatever names: `2.pt`, `model-2-of-4.pt`, `node1/gpu0.pt`.

An unknown name is believed where the contents prove it. Candidates are the files whose paths differ from the opened one
in numbers only, in its name or in those of the two folders above; numbers of a step or an epoch must be equal. They are
the rank files of one checkpoint

- where one number is the rank, or one more: the name of a missing rank is then known;
- or where there is just one of every rank, all have the same step and world size, and the numbers count as ranks do on
  nodes: one is the rank, or two are the node and the place on it;
- or where a number behind a word that counts steps (`checkpoint_3.pt`) is the rank in every file's content.

A rank may have several files beside each other, one for each item that was saved: `model_3.pt`, `optimizer_3.pt`.

Other files are ignored: the user can name them, or their pattern.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.formats.rank_search.pickle_signs import Signs, signs_in
from ckptools.formats.rank_search.rank_checks import UNNAMED
from ckptools.formats.rank_search.rank_names import RankName, with_items
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved

LEVELS = 3
"""Parts of a path whose numbers may differ: the names of the file and of the two folders above."""

MAX_FILES = 4096
"""Most files that are looked at; above, the user names them by a pattern."""

NUMBER = re.compile(r"\d{1,7}")
TELLS_STEP = re.compile(r"(?:ep|epoch|ba|batch|step|iter|iteration|checkpoint)[-_=]?\d+", re.IGNORECASE)


MAX_SAMPLED = 32
"""Most files that are read for one number in the path."""


class PathNumber(NamedTuple):
    """A number in a path that may be the rank.

    Attributes:
        level: the part of the path, 0 for the file's name, 1 for its folder's.
        start: where it begins in the part.
        end: where it ends.
    """

    level: int
    start: int
    end: int


def siblings_by_content(path: Path, saved: Saved, follow_symlinks: bool = False) -> list[RankName]:
    """Find the rank files of the checkpoint that a file belongs to, in rank order; empty where nothing proves them.

    Args:
        path: the file.
        saved: its content.
        follow_symlinks: take links for what they lead to; else they are passed over.
    """
    world = max((world for _, world in saved.claims), default=1)
    if world < 2:
        return []
    search = _SiblingSearch(path, world, follow_symlinks)
    numbered = max((search.numbered(column) for column in columns(path)), key=len, default=[])
    found = numbered if len(numbered) >= world else search.one_of_each(numbered)
    counted = (search.numbered(column, every_file=True) for column in step_columns(path))
    return with_items(found or max(counted, key=len, default=[]), saved.tree, world, follow_symlinks)


def are_of_one(files: Sequence[Path]) -> bool:
    """Whether files of any names together are the rank files of one checkpoint, or some of them."""
    if any(path.is_symlink() or not path.is_file() for path in files):
        return False
    try:
        saved = reader.read(files[0])
    except ReadError:
        return False
    return {name.path for name in siblings_by_content(files[0], saved)} >= set(files)


def columns(path: Path) -> Iterator[PathNumber]:
    """Yield the numbers of a path that may be a rank."""
    return (column for column, counts_steps in _numbers(path) if not counts_steps)


def step_columns(path: Path) -> Iterator[PathNumber]:
    """Yield the numbers of a file's name that stand behind a word such as `checkpoint`, which counts steps."""
    return (column for column, counts_steps in _numbers(path) if counts_steps and column.level == 0)


def _numbers(path: Path) -> Iterator[tuple[PathNumber, bool]]:
    """Each number of a path, with whether the word before it counts steps."""
    for level, part in enumerate(_parts(path)):
        steps = [found.span() for found in TELLS_STEP.finditer(part)]
        for found in NUMBER.finditer(part):
            yield PathNumber(level, *found.span()), any(start <= found.start() < end for start, end in steps)


def _parts(path: Path) -> list[str]:
    """The file's name and those of the folders above it, as far as numbers in them may differ."""
    return list(reversed(path.absolute().parts[1:]))[:LEVELS]


class _SiblingSearch:
    """The search for the rank files of one checkpoint.

    Args:
        path: the file that was opened.
        world: how many there should be.
        follow_symlinks: take links for what they lead to; else they are passed over.
    """

    def __init__(self, path: Path, world: int, follow_symlinks: bool) -> None:
        self._path, self._absolute, self._world, self._follow = path, path.absolute(), world, follow_symlinks
        self._signs: dict[Path, Signs | None] = {}

    def numbered(self, column: PathNumber, every_file: bool = False) -> list[RankName]:
        """The files that differ in one number, where that is the rank, or one more.

        Args:
            column: where the number stands.
            every_file: accept it only where every file has the rank, and all the same step.
        """
        files = sorted((int(seen[0]), file) for file, seen in self._matching([column]))
        numbers = [number for number, _ in files]
        some = files[:: max(1, len(files) // MAX_SAMPLED)]
        for first in (0, 1):
            distinct = len(set(numbers)) == len(numbers) > 1
            if distinct and first <= numbers[0] and numbers[-1] < self._world + first:
                read = [(number - first, self._signs_of(file)) for number, file in some]
                signs = [(rank, sign) for rank, sign in read if sign is not None]
                if _are_ranks(signs, self._world) and (not every_file or _all_say_so(signs)):
                    return [self._spelled(column, number, file, first) for number, file in files]
        return []

    def one_of_each(self, numbered: list[RankName]) -> list[RankName]:
        """The files that differ in any numbers, where there is just one of every rank; else `numbered`.

        Where other files may be of the same checkpoint, `numbered` may lack them, so nothing is proven.
        """
        own, known = self._signs_of(self._path), {name.path for name in numbered}
        for level in range(LEVELS):
            free = sorted(c for c in columns(self._path) if c.level <= level)
            found = [(file, seen, self._signs_of(file)) for file, seen in self._matching(free)]
            ranked = sorted((_place(s), f, seen) for f, seen, s in found if own and s and s.shared == own.shared)
            places, files = {place for place, _, _ in ranked}, [file for _, file, _ in ranked]
            complete = len(ranked) == len(places) == self._world and () not in places
            if complete and count_as_ranks([list(map(int, seen)) for _, _, seen in ranked]):
                unnamed = str(self._path.with_name(UNNAMED))
                return [RankName(f, self._path.stem, rank, "", "", None, unnamed) for rank, f in enumerate(files)]
            others = {place for place, file, _ in ranked if file not in known}
            if others and known.isdisjoint(file for place, file, _ in ranked if place in others):
                numbered = []  # of ranks that it lacks; another copy of the same ranks is another checkpoint
        return numbered

    def _signs_of(self, path: Path) -> Signs | None:
        if path not in self._signs:
            try:
                self._signs[path] = signs_in(path)
            except ReadError:
                self._signs[path] = None
        return self._signs[path]

    def _matching(self, free: Iterable[PathNumber]) -> list[tuple[Path, list[str]]]:
        """Files whose paths differ in some numbers at most, with their numbers, from the left."""
        wanted = set(free)
        levels = max((column.level for column in wanted), default=0) + 1
        found: list[tuple[Path, list[str]]] = [(self._absolute.parents[levels - 1], [])]
        for level in reversed(range(levels)):
            part = _parts(self._path)[level]
            expression = re.compile(_expression(part, sorted((c.start, c.end) for c in wanted if c.level == level)))
            found = [entry for folder, seen in found for entry in self._entries(folder, expression, seen)]
        return [(self._as_given(one), seen) for one, seen in found if one.is_file()]

    def _entries(self, folder: Path, expression: re.Pattern[str], seen: list[str]) -> Iterator[tuple[Path, list[str]]]:
        if not folder.is_dir():
            return
        for entry in islice(folder.iterdir(), MAX_FILES):
            fits = expression.fullmatch(entry.name)
            own = entry == self._absolute or entry in self._absolute.parents
            if fits and (own or self._follow or not entry.is_symlink()):
                yield entry, [*seen, *fits.groups()]

    def _as_given(self, found: Path) -> Path:
        """Spell a file's path as the opened file's path is spelled, absolute or not."""
        for level in range(min(LEVELS, len(self._path.parts))):
            above = self._absolute.parents[level]
            if found.is_relative_to(above):
                return self._path.parents[level] / found.relative_to(above)
        return found if self._path.is_absolute() else Path(os.path.relpath(found))

    def _spelled(self, column: PathNumber, number: int, file: Path, first: int) -> RankName:
        parts, above = _parts(self._path), self._absolute.parents[column.level]
        part = parts[column.level]
        parts[column.level] = f"{part[: column.start]}{{rank}}{part[column.end :]}"
        spelled = self._as_given(above.joinpath(*reversed(parts[: column.level + 1])))
        width = column.end - column.start if part[column.start] == "0" else 1
        return RankName(
            file, part[: column.start] or above.name, number - first, "", "", None, str(spelled), width, first
        )


def count_as_ranks(numbers: list[list[int]]) -> bool:
    """Whether the numbers in the names of all ranks, in rank order, count ranks, or nodes and the places on them.

    They do not for two runs that each lost some ranks and together have one file of every rank.
    """
    differing = [list(column) for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    ranks = [column for column in differing if column in (list(range(len(column))), list(range(1, len(column) + 1)))]
    others = [column for column in differing if column not in ranks]
    if len(ranks) > 1 or len(others) > 2 or not all(column[0] in (0, 1) for column in others):
        return False
    if len(others) < 2:
        return bool(ranks) and all(after - before in (0, 1) for column in others for before, after in pairwise(column))
    (first, *nodes), (start, *places) = others
    before = (first, start)
    for node, place in zip(nodes, places, strict=True):
        if (node, place) not in ((before[0], before[1] + 1), (before[0] + 1, start)):
            return False
        before = (node, place)
    return True


def _expression(part: str, spans: list[tuple[int, int]]) -> str:
    """A regular expression for parts of a path that differ only in the numbers at some places."""
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(part)]
    return r"(\d{1,7})".join(re.escape(part[end:start]) for end, start in zip(ends, starts, strict=True))


def _are_ranks(found: list[tuple[int, Signs]], world: int) -> bool:
    """Whether files have the expected ranks: half of them, or all ranks in another order, as swapped files do.

    Places in a mesh must ascend with the rank.
    """
    said = [(rank, sign.rank) for rank, sign in found if sign.rank is not None]
    if said:
        swapped = sorted(own for _, own in said) == list(range(world))
        right = sum(rank == own for rank, own in said)
        return swapped or (right > 1 and 2 * right >= len(found))
    places = [sign.place for _, sign in found]
    return len(places) > 1 and all(places) and all(one < following for one, following in pairwise(places))


def _all_say_so(found: Sequence[tuple[int, Signs]]) -> bool:
    """Whether every file has the expected rank, or a place of its own, and all have the same step."""
    one_step = len({sign.shared for _, sign in found}) == 1
    return one_step and all(sign.rank in (None, rank) and (sign.place or sign.rank == rank) for rank, sign in found)


def _place(sign: Signs) -> tuple[int, ...]:
    """The rank, or the place in the mesh, which is ordered as the ranks are; empty where neither is known."""
    return sign.place if sign.rank is None else (sign.rank,)
