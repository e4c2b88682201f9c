"""Which of several checkpoints of a run is newer: by their steps, numbers in their names, and last by file times.

Names count before times. A download or a copy sets the times of all files, and saves of one second share theirs:
Accelerate's `checkpoint_0` and `checkpoint_1`, nanochat's `model_000005.pt` and `model_000010.pt`.
Source: accelerate/accelerator.py (`save_state`, automatic naming), nanochat/checkpoint_manager.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Literal

from ckptools.formats.rank_search.rank_names import parse

By = Literal["step", "name", "optimizer steps", "file time", "nothing"]
"""The facts that order checkpoints; `nothing` where none does."""

NUMBER = re.compile(r"\d+(?:\.\d+)+|\d+")
COUNTED = re.compile(
    r"(?<![A-Za-z])(?:ep|epoch|ba|batch|global_step|step|it|iter|iteration|checkpoint|ckpt)[-_=.]?\Z", re.IGNORECASE
)
DATES = re.compile(r"(?:19|20)\d{2}(?:\d{4})?")


@dataclass(frozen=True)
class Save:
    """One checkpoint, as far as its age goes.

    Attributes:
        path: what opens it, below the folder of the run.
        step: its training step; None if unknown.
        time: when its last file was written; None if unknown.
    """

    path: PurePath
    step: int | None = None
    time: float | None = None

    @cached_property
    def _spelled(self) -> str:
        """Its path, without the number of a rank: each rank's file has another."""
        ranked = parse(Path(self.path))
        return str(self.path if ranked is None else self.path.with_name(f"{ranked.head}rank{ranked.tail}"))

    @cached_property
    def pattern(self) -> str:
        """Its path with `#` for each number; checkpoints of one pattern differ in numbers alone."""
        return NUMBER.sub("#", self._spelled)

    @cached_property
    def numbers(self) -> tuple[int | None, ...]:
        """The numbers in its path; None for a decimal one, such as a loss."""
        return tuple(None if "." in found else int(found) for found in NUMBER.findall(self._spelled))

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """Positions of the numbers behind a word that counts steps or epochs."""
        found = enumerate(NUMBER.finditer(self._spelled))
        return tuple(n for n, one in found if COUNTED.search(self._spelled[: one.start()]))


Key = tuple[int, ...]


def by_name(saves: Sequence[Save]) -> list[dict[int, Key]]:
    """For each pattern of names whose numbers order it: the numbers that do, by the index of the checkpoint.

    Numbers behind a word such as `step` count; else a single number that differs, or several that rise together, or
    dates. An order that contradicts known steps is none.
    """
    groups: dict[str, list[int]] = {}
    for index, save in enumerate(saves):
        groups.setdefault(save.pattern, []).append(index)
    keys = [_keys({index: saves[index] for index in group}) for group in groups.values() if len(group) > 1]
    return [found for found in keys if found and not _contradicts(found, saves)]


def _keys(group: Mapping[int, Save]) -> dict[int, Key]:
    first = next(iter(group.values()))
    rows = [save.numbers for save in group.values()]
    varying = [n for n, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1 and None not in column]
    counted = [n for n in varying if n in first.counted]
    chosen = counted or varying
    found = {index: tuple(save.numbers[n] or 0 for n in chosen) for index, save in group.items()}
    sure = len(chosen) == 1 or bool(counted) or _rise_together(list(found.values())) or _are_dates(first, chosen)
    return found if chosen and sure else {}


def _rise_together(keys: Sequence[Key]) -> bool:
    columns = zip(*sorted(keys), strict=True)
    return all(a <= b for column in columns for a, b in pairwise(column))


def _are_dates(first: Save, chosen: Sequence[int]) -> bool:
    return bool(chosen) and DATES.fullmatch(str(first.numbers[chosen[0]])) is not None


def _contradicts(keys: Mapping[int, Key], saves: Sequence[Save]) -> bool:
    steps = [saves[index].step for index in sorted(keys, key=keys.__getitem__)]
    known = [step for step in steps if step is not None]
    return any(a > b for a, b in pairwise(known))


def steps_by_name(saves: Sequence[Save]) -> dict[int, int]:
    """Steps of checkpoints that do not state theirs, from their names, by index.

    The number in a name is the step where it is that of every checkpoint whose name differs in this number alone: a
    `ckpt-3000.pt` that is cut is of step 3000 where `ckpt-1000.pt` and `ckpt-2000.pt` hold steps 1000 and 2000.
    """
    found: dict[int, int] = {}
    for keys in by_name(saves):
        stated = [(key[-1], step) for index, key in keys.items() if (step := saves[index].step) is not None]
        if stated and all(number == step for number, step in stated):
            found |= {index: key[-1] for index, key in keys.items() if saves[index].step is None}
    return found


def newest_first(saves: Sequence[Save], counted: Callable[[int], int | None] = lambda _: None) -> tuple[list[int], By]:
    """The indices of checkpoints from the newest to the oldest, and the facts that say so.

    Without a step it comes last beside others that have one, unless its name gives its place. `counted` returns the
    steps that the optimizer of a checkpoint counts; it is asked only where no step and no number in names decides.
    """
    steps: dict[int, int | None] = {n: save.step for n, save in enumerate(saves)}
    named = by_name(saves)
    by: By = "step"
    if all(step is None for step in steps.values()):
        by = "name" if _cover(named, len(saves)) else "nothing"
    if by == "nothing":
        steps = {n: counted(n) for n in steps}
        by = "nothing" if None in steps.values() or len(set(steps.values())) < len(saves) else "optimizer steps"
    times = {n: save.time for n, save in enumerate(saves)}
    order = sorted(steps, key=lambda n: (-(times[n] or 0.0), str(saves[n].path)))
    timed = len(saves) < 2 or times_count(saves, named)
    by = "file time" if by == "nothing" and timed else by
    if by == "name":
        numbers = {index: key for keys in named for index, key in keys.items()}
        order.sort(key=numbers.__getitem__, reverse=True)
    else:
        order.sort(key=lambda n: (steps[n] is None, -(steps[n] or 0)))
        for keys in named if by != "optimizer steps" else ():
            _rearrange(order, keys)
    return order, by


def _cover(named: Sequence[Mapping[int, Key]], count: int) -> bool:
    """Whether names order all checkpoints: those of one pattern, or of several with the same numbers."""
    return sum(map(len, named)) == count and len({frozenset(keys.values()) for keys in named}) == 1


def _rearrange(order: list[int], keys: Mapping[int, Key]) -> None:
    """Put checkpoints in the order of their numbers into the places that they have together."""
    places = [place for place, index in enumerate(order) if index in keys]
    newest = sorted((order[place] for place in places), key=lambda index: keys[index], reverse=True)
    for place, index in zip(places, newest, strict=True):
        order[place] = index


def times_count(saves: Sequence[Save], named: Sequence[Mapping[int, Key]]) -> bool:
    """Whether file times prove an order: they differ, and contradict neither steps nor numbers in names."""
    known = (_stepped(saves), *named)
    return len({save.time for save in saves}) > 1 and not any(_against(saves, keys) for keys in known)


def written_in_another_order(saves: Sequence[Save]) -> tuple[int, int] | None:
    """Two checkpoints, the older one first, of which the newer one was written first; the newest such, or None.

    The newer one is so by its step or by the number in its name.
    """
    pairs = (_against(saves, keys) for keys in (_stepped(saves), *by_name(saves)))
    return next((pair for pair in pairs if pair is not None), None)


def _stepped(saves: Sequence[Save]) -> dict[int, Key]:
    return {n: (save.step,) for n, save in enumerate(saves) if save.step is not None}


def _against(saves: Sequence[Save], keys: Mapping[int, Key]) -> tuple[int, int] | None:
    """The newest checkpoint that was written a second or more before an older one, behind the newest of these."""
    timed = sorted((key, index, time) for index, key in keys.items() if (time := saves[index].time) is not None)
    latest, last_write = list[float](), float("-inf")
    for *_, time in timed:
        latest.append(last_write)
        last_write = max(last_write, time)
    for place in reversed(range(len(timed))):
        key, index, time = timed[place]
        if latest[place] >= time + 1:
            older = (one for older_key, one, written in reversed(timed[:place]) if older_key < key and written > time)
            pair = next((one for one in older if (saves[one].time or 0) >= time + 1), None)
            if pair is not None:
                return pair, index
    return None


def older_than(saves: Sequence[Save], newest: int) -> set[int]:
    """The checkpoints that are proven to be older than one of them: by step, else by name, else by a file time."""
    one, named = saves[newest], by_name(saves)
    keys = next((keys for keys in named if newest in keys), {})
    timed = times_count(saves, named)

    def is_older(index: int, save: Save) -> bool:
        if save.step is not None and one.step is not None:
            return save.step <= one.step
        if index in keys:
            return keys[index] <= keys[newest]
        return timed and save.time is not None and one.time is not None and save.time < one.time

    return {index for index, save in enumerate(saves) if is_older(index, save)}
