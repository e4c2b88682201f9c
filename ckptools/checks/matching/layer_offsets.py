"""Layers that have other numbers in the model: `layers.{0..2}` of the checkpoint are its `layers.{1..3}`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckptools.model.matching import Rename

MAX_DIGITS = 9
"""Digits of a layer's number; longer ones are no layer's."""


def moved_layers(here: Collection[str], there: Collection[str]) -> Iterator[tuple[Rename, Mapping[str, str]]]:
    """Modules whose numbered children have all moved by as much, each with the new name of every name below them.

    Both sides have as many children, and below each the same names; otherwise it is open which one is which.

    Args:
        here: the names of the checkpoint.
        there: the names of the model.
    """
    mine, theirs = _children(here), _children(there)
    for module, numbered in mine.items():
        numbers, others = sorted(numbered), sorted(theirs.get(module, ()))
        if len(numbers) != len(others) or numbers == others:
            continue
        offset = others[0] - numbers[0]
        if all(numbered[n] == theirs[module].get(n + offset) for n in numbers):
            pairs = {f"{module}{n}.{end}": f"{module}{n + offset}.{end}" for n in numbers for end in numbered[n]}
            yield Rename("offset", module, module, offset=offset), pairs


def _children(names: Collection[str]) -> dict[str, dict[int, set[str]]]:
    """By module, such as `layers.`: the numbers below it, each with the ends of the names below that."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in names:
        at = 0
        for part in name.split(".")[:-1]:
            if part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS and str(int(part)) == part:
                end = name[at + len(part) + 1 :]
                found.setdefault(name[:at], {}).setdefault(int(part), set()).add(end)
            at += len(part) + 1
    return found
