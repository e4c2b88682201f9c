"""How many bytes each of several output files gets: no more than the user wants, and all nearly the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def files_of(sizes: Sequence[int], limit: int | None) -> list[range]:
    """Cut things, in their order, into as few files of at most `limit` bytes as can be, of nearly equal size.

    What is larger than `limit` has a file of its own. Files that are filled one after the other would leave a small
    last one: whoever loads or writes them in parallel would wait for the full ones.
    """
    if not sizes:
        return [range(0)]
    limit = sum(sizes) if limit is None else limit
    ends = [0, *accumulate(sizes)]
    needed = _files_needed(ends, limit)
    files: list[range] = []
    first = 0
    while first < len(sizes):
        left = needed[0] - len(files)
        target = ends[first] + (ends[-1] - ends[first]) / left
        end = first + 1
        # What comes next belongs to this file if its middle does; or if there would not be room for it later.
        while end < len(sizes) and ends[end + 1] - ends[first] <= limit:
            if needed[end] < left and (ends[end] + ends[end + 1]) / 2 > target:
                break
            end += 1
        files.append(range(first, end))
        first = end
    return files


def _files_needed(ends: Sequence[int], limit: int) -> list[int]:
    """How many files everything from each thing on needs at least: filled one after the other, they are fewest."""
    count = len(ends) - 1
    needed = [0] * (count + 1)
    stop = count
    for first in reversed(range(count)):
        while stop > first + 1 and ends[stop] - ends[first] > limit:
            stop -= 1
        needed[first] = 1 + needed[stop]
    return needed
