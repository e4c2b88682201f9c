"""How many ranks wrote a DCP, as far as that is known.

A rank that has one file for all that it writes leaves it also where it has nothing to write (0 bytes, which the
metadata does not name), so that such files tell of all ranks. Where each item has a file of its own, a rank without
items leaves none, and the files tell of those ranks at least. Source: torch/distributed/checkpoint/filesystem.py,
`write_data`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ckptools.model.checkpoint import Fact
from ckptools.training_state.sections import find_sections

STATED = (("state", "metadata", "world_size"), ("metadata", "world_size"))
"""Where a state says how many ranks there were."""


class Writers(NamedTuple):
    """The ranks that left files in a DCP.

    Attributes:
        ranks: their numbers.
        all: whether there can be no others.
    """

    ranks: tuple[int, ...] = ()
    all: bool = True

    def __or__(self, other: object) -> Writers:
        """Those of two folders of one checkpoint."""
        assert isinstance(other, Writers)
        return Writers(tuple(sorted({*self.ranks, *other.ranks})), self.all and other.all)


def writers_of(ranks: Collection[int], holds: Mapping[str, list[str]], sure: bool) -> Writers:
    """The ranks that wrote a DCP folder.

    Args:
        ranks: that have files in it.
        holds: the fqns of what each file holds; nothing in those of ranks that had nothing to write.
        sure: whether all files are of one save.
    """
    one_file_each = any(len(fqns) != 1 for fqns in holds.values())
    found = tuple(sorted(ranks))
    return Writers(found, sure and one_file_each and found == tuple(range(len(found))))


def world_size(writers: Writers, tree: Mapping[Any, Any]) -> Fact:
    """How many ranks there were: as the state says, or at least as many as left files or RNG states."""
    files = max(writers.ranks, default=0) + 1
    for path in STATED:
        stated = _at(tree, path)
        if type(stated) is int and stated > 0:
            source = ".".join(path)
            return Fact(stated, (source,)) if stated >= files else Fact(files, ("files found", source), agree=False)
    lists = [s.value for s in find_sections(tree) if s.kind == "rng" and isinstance(s.value, list)]
    if (states := max(map(len, lists), default=0)) > files:
        return Fact(states, ("RNG states",), at_least=True)
    return Fact(files, ("files found",), at_least=not writers.all)


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
