"""The items of a checkpoint of which every rank has a file each: `model_3.pt`, `optimizer_3.pt`, `step_3.pt`.

Names whose rank was proven by contents tell what the other items are called: the same but for the words before the
rank. They are of the same checkpoint where they hold other keys; two runs beside each other hold the same ones.

Source: torch_checkpointing's `TorchSerialization` writes such files; so does many a script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.shared.rank_names import RankName
from ckptools.model.tree import KeyPath, tensors_in
from ckptools.pickles import reader

DIGITS = re.compile(r"\d+")

MAX_FILES = 4096
"""Entries of the folder that are looked at."""

MAX_ITEMS = 32


def with_items(group: Sequence[RankName], tree: Any, world: int, follow_symlinks: bool = False) -> list[RankName]:
    """The rank files of a checkpoint with those of its other items, each with its `part`; as they are where it has one.

    Args:
        group: the rank files of one item, in rank order.
        tree: what one of them holds.
        world: ranks there are.
        follow_symlinks: take links for what they lead to; else they are passed over.
    """
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
    pattern = re.compile(rf"(?P<head>{_words(own)})(?P<rank>\d{{1,7}}){re.escape(tail)}", re.DOTALL)
    found: dict[str, list[RankName]] = {}
    for path in sorted(islice(of.path.parent.iterdir(), MAX_FILES)):
        fits = pattern.fullmatch(path.name)
        rank = int(fits["rank"]) - of.first if fits else -1
        if fits and 0 <= rank < world and (follow_symlinks or not path.is_symlink()) and path.is_file():
            template = str(spelled.with_name(f"{fits['head']}{{rank}}{tail}"))
            name = RankName(path, fits["head"], rank, "", "", None, template, of.width, of.first)
            found.setdefault(fits["head"], []).append(name)
    return {head: sorted(names, key=lambda n: n.rank) for head, names in islice(found.items(), MAX_ITEMS)}


def _words(head: str) -> str:
    """A regular expression for other words in place of those before a rank, with their numbers and the separator."""
    numbers = map(re.escape, DIGITS.findall(head))
    return r"\D*?".join(["", *numbers, ""]) + re.escape(head[len(head.rstrip("-_.")) :])


def _is_item(names: Sequence[RankName], known: set[KeyPath], world: int) -> bool:
    """Whether files are of an item of their own, by the first that can be read: no tensor lies where another has one.

    A file alone is one where its content says the rank of its name and the world; else it may be anything.
    """
    for name in names:
        with suppress(ReadError):
            saved = reader.read(name.path)
            sure = len(names) > 1 or (name.rank, world) in saved.claims
            return sure and known.isdisjoint(path for path, _ in tensors_in(saved.tree))
    return False
