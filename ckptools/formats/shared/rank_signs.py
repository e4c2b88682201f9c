"""Do rank files that were not read in full say that they are of one checkpoint?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from ckptools.errors import ReadError
from ckptools.formats.shared.pickle_signs import Signs, signs_in
from ckptools.formats.shared.rank_names import RankName

MAX_RANKS = 32
"""Ranks whose files are looked into without being asked to; more take longer than anybody waits for a first look."""

MAX_SECONDS = 1.0
"""Wall time that looking into the other ranks' files may take."""


def are_one_checkpoint(group: Sequence[RankName]) -> bool:
    """Whether rank files say, each, the rank of its name and, all, the same world and step.

    False wherever that cannot be told at a glance: whoever needs to know then reads every file in full.
    """
    if len({name.rank for name in group}) > MAX_RANKS:
        return False
    started, found = time.perf_counter(), []
    for name in group:
        signs = _signs(name)
        if signs is None or time.perf_counter() - started > MAX_SECONDS:
            return False
        found.append((name, signs))
    parts = {name.part for name in (n for n, _ in found)}
    return all(_one_part([(n.rank, s) for n, s in found if n.part == part]) for part in parts)


def _signs(name: RankName) -> Signs | None:
    try:
        return signs_in(name.path)
    except ReadError:
        return None


def _one_part(ranked: Sequence[tuple[int, Signs]]) -> bool:
    """Whether the files of one part agree, and each is where its name says."""
    if len({signs.shared for _, signs in ranked}) > 1:
        return False
    if all(signs.rank is not None for _, signs in ranked):
        return all(signs.rank == rank for rank, signs in ranked)
    # Ranks lie in a mesh in row-major order nearly always; where not, the files are read in full.
    places = [signs.place for _, signs in sorted(ranked, key=lambda r: r[0])]
    return all(places) and all(a < b for a, b in pairwise(places)) and len({len(p) for p in places}) == 1
