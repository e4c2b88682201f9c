"""Damage that was asked for, and damage that was done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """One item of `--break`.

    Attributes:
        kind: a name of `kinds_of_damage.KINDS`.
        rank: whose file is damaged; of two, the first.
        other: the second rank, where the kind takes two.
    """

    kind: str
    rank: int
    other: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it names."""
        return (self.rank,) if self.other is None else (self.rank, self.other)

    def __str__(self) -> str:
        return f"{self.kind}:{'-'.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Broken:
    """What was done, and what shows it.

    Attributes:
        asked: what was asked for.
        files: names of the files.
        what: what was done to them, in words.
        shown: codes of what `verify` finds in them, such as `CK004`.
        refused: the error with which `verify` ends, where it cannot even open what is left; else empty.
    """

    asked: Asked
    files: str
    what: str
    shown: tuple[str, ...] = ()
    refused: str = ""

    @property
    def seen(self) -> str:
        """What `verify` shows of it, in words."""
        if self.refused:
            return "cannot be opened"
        return ", ".join(self.shown) or "nothing: the files do not tell"
