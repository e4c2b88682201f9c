"""Which entries of a checkpoint were asked for: by glob, by section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property

from ckptools.contents.entries import Entry, entries_of
from ckptools.errors import UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.values import describe_for_error
from ckptools.training_state.sections import sections_of

KINDS = ("model", "optimizer", "scheduler", "rng", "other")
ALL = "all"
"""What stands for every section, for commands that look at the model alone unless they are told."""


@dataclass(frozen=True)
class Selection:
    """Which entries are wanted; by default all.

    Attributes:
        include: globs of which a name must match one, such as `blocks.*.weight`; `*` matches dots too. None means all.
        exclude: globs of which a name may match none.
        section: a kind of section, or the name of one; "" and `ALL` for all.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    section: str = ""

    def of(self, ck: Checkpoint) -> list[Entry]:
        """The entries of a checkpoint that are wanted, in its order.

        Raises:
            UsageError: it has no such section.
        """
        self._check_section(ck)
        return [
            entry
            for entry in entries_of(ck)
            if self.section in ("", ALL, entry.kind, entry.section) and self._takes_entry(entry)
        ]

    def _takes_entry(self, entry: Entry) -> bool:
        """Whether an entry is wanted, by what people or problems call it."""
        if not self.include and not self.exclude:
            return True
        names = entry.names
        unwanted = bool(self.exclude) and any(map(self._unwanted.fullmatch, names))
        return not unwanted and any(map(self._wanted.fullmatch, names))

    @property
    def words(self) -> str:
        """The globs, as a user gives them: `--filter 'blocks.*' --exclude '*.bias'`."""
        given = [("--filter", glob) for glob in self.include] + [("--exclude", glob) for glob in self.exclude]
        return " ".join(f"{option} {describe_for_error(glob)}" for option, glob in given)

    def takes(self, name: str) -> bool:
        """Whether a name is one of those that are wanted."""
        return bool(self._wanted.fullmatch(name)) and not (self.exclude and self._unwanted.fullmatch(name))

    @cached_property
    def _wanted(self) -> re.Pattern[str]:
        return pattern(self.include or ("*",))

    @cached_property
    def _unwanted(self) -> re.Pattern[str]:
        return pattern(self.exclude)

    def _check_section(self, ck: Checkpoint) -> None:
        names = [section.name for section in sections_of(ck)]
        if self.section and self.section not in (*names, *KINDS, ALL):
            known = ", ".join(dict.fromkeys([*KINDS, *names]))
            raise UsageError(ck.path, f"has no section {self.section!r}; there are {known}")


EVERYTHING = Selection()


def pattern(globs: Iterable[str]) -> re.Pattern[str]:
    """A pattern that fully matches the names that any of some globs matches; case counts."""
    return re.compile("|".join(map(translate, globs)))


def is_glob(text: str) -> bool:
    """Whether a key is meant as a glob."""
    return any(sign in text for sign in "*?[")


def matching(entries: Sequence[Entry], glob: str) -> list[Entry]:
    """The entries whose name a glob matches."""
    wanted = pattern((glob,))
    return [entry for entry in entries if wanted.fullmatch(entry.name)]
