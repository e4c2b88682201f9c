"""Which keys of two sides were asked for: a key that has a name on each is chosen or left out by either."""

from __future__ import annotations

from ckptools.checks.difference.pairs import Renames
from ckptools.checks.difference.sides import Contents, HeldTensor, HeldValue
from ckptools.contents.selection import ALL, KINDS, Selection
from ckptools.errors import UsageError


class Chosen:
    """Tells which keys were asked for.

    Args:
        selection: what was asked for.
        a: one side, with its sections under their own names.
        b: the other.
        renamed: name in A of a section of B that is called otherwise, by its kind and its name in B.

    Raises:
        UsageError: neither side has the section that was asked for.
    """

    def __init__(self, selection: Selection, a: Contents, b: Contents, renamed: Renames) -> None:
        self.selection, self._renamed = selection, renamed
        self._included, self._not_excluded = Selection(selection.include), Selection((), selection.exclude)
        self._rng = {name for side in (a, b) for name in side.sections.get("rng", ())}
        known = [*KINDS, ALL, *(name for side in (a, b) for kind in KINDS for name in side.sections.get(kind, ()))]
        if selection.section and selection.section not in known:
            there = ", ".join(dict.fromkeys(known))
            raise UsageError(None, f"neither has a section {selection.section!r}; there are {there}")

    def section(self, kind: str, name: str) -> bool:
        """Whether a section was asked for, by its kind or by the name that it has in A (which is given), or in B."""
        wanted = self.selection.section
        if kind == "rng":
            return wanted in ("", ALL, kind, *self._rng)
        return wanted in ("", ALL, kind, name) or self._renamed.get((kind, wanted)) == name

    def name(self, *names: str) -> bool:
        """Whether a key of these names was asked for."""
        return all(map(self._not_excluded.takes, names)) and any(map(self._included.takes, names))

    def holds(self, a: HeldTensor | HeldValue | None, b: HeldTensor | HeldValue | None) -> bool:
        """Whether what one or both sides hold was asked for."""
        found = [held for held in (a, b) if held is not None]
        kind, section = found[0].identity[:2]
        return self.section(kind, section) and self.name(*(held.name for held in found))
