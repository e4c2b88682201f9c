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
from contextlib import suppress
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.rank_search.pickle_signs import Signs, signs_in
from ckptools.formats.rank_search.rank_checks import UNNAMED
from ckptools.formats.rank_search.rank_names import LEVELS, PathNumber, RankName, columns, path_parts
from ckptools.model.tree import KeyPath, tensors_in
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved

MAX_FILES = 4096
"""Most files that are looked at; above, the user names them by a pattern."""

MAX_SAMPLED = 32
"""Most files that are read for one number in the path."""


def siblings_by_content(path: Path, saved: Saved, follow_symlinks: bool = False) -> list[RankName]:
    """Find the rank files of the checkpoint that a file belongs to, in rank order; empty where nothing proves them.

    Links are passed over, unless they are to be followed.
    """
    world = max((world for _, world in saved.claims), default=1)
    if world < 2:
        return []
    search = _SiblingSearch(path, world, follow_symlinks)
    numbered = max((search.numbered(column) for column in columns(path)), key=len, default=[])
    found = numbered if len(numbered) >= world else search.one_of_each(numbered)
    counted = (search.numbered(column, every_file=True) for column in columns(path, of_steps=True))
    return _with_items(found or max(counted, key=len, default=[]), saved.tree, world, follow_symlinks)


def are_of_one(files: Sequence[Path]) -> bool:
    """Whether files of any names together are the rank files of one checkpoint, or some of them."""
    if any(path.is_symlink() or not path.is_file() for path in files):
        return False
    try:
        saved = reader.read(files[0])
    except ReadError:
        return False
    return {name.path for name in siblings_by_content(files[0], saved)} >= set(files)


class _SiblingSearch:
    """The search for the `world` rank files of the checkpoint that a file belongs to."""

    def __init__(self, path: Path, world: int, follow_symlinks: bool) -> None:
        self._path, self._absolute, self._world, self._follow = path, path.absolute(), world, follow_symlinks
        self._signs_of = cache(_signs_of)

    def numbered(self, column: PathNumber, every_file: bool = False) -> list[RankName]:
        """The files that differ in one number, where that is the rank, or one more.

        With `every_file` it is accepted only where every file has the rank, and all the same step.
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

    def _matching(self, free: Iterable[PathNumber]) -> list[tuple[Path, list[str]]]:
        """Files whose paths differ in some numbers at most, with their numbers, from the left."""
        wanted = set(free)
        levels = max((column.level for column in wanted), default=0) + 1
        found: list[tuple[Path, list[str]]] = [(self._absolute.parents[levels - 1], [])]
        for level in reversed(range(levels)):
            part = path_parts(self._path)[level]
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
        parts, above = path_parts(self._path), self._absolute.parents[column.level]
        part = parts[column.level]
        parts[column.level] = f"{part[: column.start]}{{rank}}{part[column.end :]}"
        spelled = self._as_given(above.joinpath(*reversed(parts[: column.level + 1])))
        width = column.end - column.start if part[column.start] == "0" else 1
        return RankName(
            file, part[: column.start] or above.name, number - first, "", "", None, str(spelled), width, first
        )


def _signs_of(path: Path) -> Signs | None:
    with suppress(ReadError):
        return signs_in(path)
    return None


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
    nodes, places = others
    steps = zip(pairwise(nodes), pairwise(places), strict=True)
    return all((b, there) in ((a, here + 1), (a + 1, places[0])) for (a, b), (here, there) in steps)


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


# -- other items of the same ranks: `model_3.pt`, `optimizer_3.pt`, `step_3.pt` ---------------------------------------

# Names whose rank is proven by contents show the names of the other items: the same but for the words before the rank.
# They are of the same checkpoint where they hold other keys; two runs beside each other hold the same ones.
#
# Source: torch_checkpointing's `TorchSerialization` writes such files; so does many a script.

MAX_ITEMS = 32


def _with_items(group: Sequence[RankName], tree: Any, world: int, follow_symlinks: bool) -> list[RankName]:
    """The rank files of a checkpoint with those of its other items, each with its `part`; unchanged for one item."""
    own, rank, _ = Path(group[0].spelled).name.partition("{rank}") if group else ("", "", "")
    families = _families(group[0], world, follow_symlinks) if own and rank else {}
    known = {path for path, _ in tensors_in(tree)}
    others = {head: names for head, names in families.items() if head != own and _is_item(names, known, world)}
    if not others:
        return list(group)
    items = {own: list(group), **others}
    named = [name._replace(part=head.rstrip("-_.")) for head, names in items.items() for name in names]
    return sorted(named, key=lambda name: (name.rank, "model" not in name.part, name.part))


def _families(of: RankName, world: int, follow_symlinks: bool) -> dict[str, list[RankName]]:
    """The files beside one whose names differ from it in the rank and in words before it, by what is before it."""
    spelled = of.path.parent / Path(of.spelled).name
    own, _, tail = spelled.name.partition("{rank}")
    # Other words, with the same numbers and separator.
    words = r"\D*?".join(["", *re.findall(r"\d+", own), ""]) + re.escape(own[len(own.rstrip("-_.")) :])
    pattern = re.compile(rf"(?P<head>{words})(?P<rank>\d{{1,7}}){re.escape(tail)}", re.DOTALL)
    found: dict[str, list[RankName]] = {}
    for path in sorted(islice(of.path.parent.iterdir(), MAX_FILES)):
        fits = pattern.fullmatch(path.name)
        rank = int(fits["rank"]) - of.first if fits else -1
        if fits and 0 <= rank < world and (follow_symlinks or not path.is_symlink()) and path.is_file():
            template = str(spelled.with_name(f"{fits['head']}{{rank}}{tail}"))
            name = RankName(path, fits["head"], rank, "", "", None, template, of.width, of.first)
            found.setdefault(fits["head"], []).append(name)
    return {head: sorted(names, key=lambda n: n.rank) for head, names in islice(found.items(), MAX_ITEMS)}


def _is_item(names: Sequence[RankName], known: set[KeyPath], world: int) -> bool:
    """Whether files are of an item of their own, by the first that can be read: no tensor lies where another has one.

    A lone file is an item where its content has the rank of its name and the world size.
    """
    for name in names:
        with suppress(ReadError):
            saved = reader.read(name.path)
            sure = len(names) > 1 or (name.rank, world) in saved.claims
            return sure and known.isdisjoint(path for path, _ in tensors_in(saved.tree))
    return False
