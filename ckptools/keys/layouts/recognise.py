"""Recognise the layout of some names, and give each tensor the parts that are in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckptools.keys.layouts.forms import Sizes
from ckptools.keys.layouts.tables import LAYOUTS, NamedLayout, StoredTensor
from ckptools.training_state.parameter_names import without_ddp

MAX_NUMBER = 6
"""Digits of a layer's or an expert's number."""


class Placed(NamedTuple):
    """A tensor of a layout: its row in the table, and its parts by name, with their numbers."""

    stored: StoredTensor
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Recognised:
    """The names of a state dict in a layout.

    Attributes:
        prefix: text in front of every name, wrappers apart.
        placed: tensors that the layout has, by their name in the state dict.
        recomputed: buffers that a model computes anew.
        unknown: names that the layout does not have.
    """

    layout: NamedLayout
    prefix: str
    placed: Mapping[str, Placed] = field(repr=False)
    recomputed: Sequence[str] = ()
    unknown: Sequence[str] = ()


def recognise(names: Collection[str], sizes: Sizes, layouts: Iterable[NamedLayout] = LAYOUTS) -> Recognised:
    """The layout that has most of some names, for a model of some sizes; the first of several that have as many."""
    bare = {name: without_ddp(name) for name in names}
    tries = [_in_layout(layout, prefix, bare, sizes) for layout in layouts for prefix in _prefixes(layout, bare)]
    return max(tries, key=lambda found: (len(found.placed), len(found.recomputed)))


def _prefixes(layout: NamedLayout, bare: Mapping[str, str]) -> list[str]:
    """Texts before the names of a layout that have no number, the empty one first."""
    ends = [stored.name for stored in layout.stored if "{" not in stored.name]
    found = {name[: -len(end)] for name in bare.values() for end in ends if name.endswith(f".{end}")}
    return ["", *sorted(found)]


def _in_layout(layout: NamedLayout, prefix: str, bare: Mapping[str, str], sizes: Sizes) -> Recognised:
    placed, recomputed, unknown = dict[str, Placed](), list[str](), list[str]()
    table = _table(layout)
    for name, short in bare.items():
        rest = short.removeprefix(prefix) if short.startswith(prefix) else short
        found = _place(table, rest, sizes)
        if found is not None and short.startswith(prefix):
            placed[name] = found
        elif rest.endswith(layout.recomputed):
            recomputed.append(name)
        else:
            unknown.append(name)
    return Recognised(layout, prefix, placed, recomputed, unknown)


_NUMBERS = re.compile(r"\d+")


@lru_cache(maxsize=len(LAYOUTS))
def _table(layout: NamedLayout) -> Mapping[str, tuple[tuple[re.Pattern[str], StoredTensor], ...]]:
    """The rows of a layout with their patterns, by their names without numbers."""
    found: dict[str, list[tuple[re.Pattern[str], StoredTensor]]] = {}
    for stored in layout.stored:
        key = _NUMBERS.sub("", stored.name.replace("{}", "").replace("{e}", ""))
        pattern = re.escape(stored.name).replace(r"\{\}", "(?P<layer>N)").replace(r"\{e\}", "(?P<expert>N)")
        number = rf"(?:0|[1-9]\\d{{0,{MAX_NUMBER - 1}}})"
        found.setdefault(key, []).append((re.compile(re.sub(r"(?<=>)N(?=\))", number, pattern)), stored))
    return {key: tuple(rows) for key, rows in found.items()}


def _place(
    table: Mapping[str, tuple[tuple[re.Pattern[str], StoredTensor], ...]], name: str, sizes: Sizes
) -> Placed | None:
    for pattern, stored in table.get(_NUMBERS.sub("", name), ()):
        if found := pattern.fullmatch(name):
            return Placed(stored, parts_of(stored, found.groupdict(), sizes))
    return None


def parts_of(stored: StoredTensor, numbers: Mapping[str, str], sizes: Sizes) -> tuple[str, ...]:
    """The names of the parts in a stored tensor: those of one expert, or of all in order."""
    layer, expert = numbers.get("layer", ""), numbers.get("expert")
    experts = range(sizes.experts) if stored.form.experts else [expert]
    parts = (part.replace("{}", layer).replace("{e}", f"{e}") for e in experts for part in stored.parts)
    return tuple(parts)
