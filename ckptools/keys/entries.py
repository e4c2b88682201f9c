"""The keys of a checkpoint by the names that people use, and the selection of some by glob or section."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from ckptools.errors import UsageError
from ckptools.keys.rank_leaves import leaves_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import describe_for_error
from ckptools.training_state.optimizers import Optimizer, nested, optimizers_of
from ckptools.training_state.sections import (
    Section,
    SectionKind,
    is_flat_optimizer,
    is_private_name,
    sections_of,
    sections_of_kind,
)

MAX_ENTRIES = 1_000_000
"""Containers can be shared, so a small file may unfold to more than fits into memory."""

KINDS = ("model", "optimizer", "scheduler", "rng", "other")

ALL = "all"
"""The name that selects every section, for commands that look at the model by default."""


class Entry(NamedTuple):
    """One key of a checkpoint and what is there.

    Attributes:
        name: what people call it: `blocks.0.up.weight` of the only model, `optimizers.AdamW.state.emb.weight.exp_avg`,
            `timestamp.batch`. No two entries of a checkpoint have the same.
        parameter: fqn of the model's tensor that it is, or is the optimizer state of; "" for everything else.
        slot: which state of the parameter it is, such as `exp_avg`; "" outside an optimizer's state.
        path: key path in the tree; empty where an optimizer's flattened settings were put together into groups.
        value: a tensor, or a plain value; a long run of numbers is one.
    """

    name: str
    section: str
    kind: SectionKind
    parameter: str
    slot: str
    path: KeyPath
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and its whole key path, by which problems name it."""
        whole = fqn_of(self.path)
        return (self.name, whole) if whole not in ("", self.name) else (self.name,)

    @property
    def inside(self) -> str:
        """Its name below its section."""
        return self.name.removeprefix(f"{self.section}.")


def entries_of(ck: Checkpoint) -> tuple[Entry, ...]:
    """Every key of a checkpoint in the order of its sections; empty containers too, at most `MAX_ENTRIES`.

    Raises:
        RefusedError: the names that were given when it was opened do not fit.
    """
    if "entries" not in ck.worked_out:
        ck.worked_out["entries"] = tuple(_with_own_names(islice(_entries(ck), MAX_ENTRIES)))
    found: tuple[Entry, ...] = ck.worked_out["entries"]
    return found


def entries_left_out(ck: Checkpoint) -> Counter[str]:
    """How many keys of each section `entries_of` leaves out; as many as it has are counted, for there may be no end."""
    if len(entries_of(ck)) < MAX_ENTRIES:
        return Counter()
    return Counter(entry.section for entry in islice(_entries(ck), MAX_ENTRIES, 2 * MAX_ENTRIES))


def tensor_entries(ck: Checkpoint) -> tuple[Entry, ...]:
    """The entries that are tensors."""
    return tuple(entry for entry in entries_of(ck) if isinstance(entry.value, Tensor))


def _entries(ck: Checkpoint) -> Iterator[Entry]:
    only_model = len(sections_of_kind(ck, "model")) == 1
    optimizers = {o.path: o for o in optimizers_of(ck).values()}
    for section in sections_of(ck):
        if section.kind == "optimizer":
            yield from _of_optimizer(section, optimizers[section.path])
        else:
            yield from _of_section(section, "" if section.kind == "model" and only_model else section.name)


def _of_section(section: Section, prefix: str) -> Iterator[Entry]:
    for path, value in leaves_of(section.value):
        own = fqn_of(path)
        name = ".".join(part for part in (prefix, own) if part) or section.name
        parameter = own if section.kind == "model" and isinstance(value, Tensor) else ""
        yield Entry(name, section.name, section.kind, parameter, "", (*section.path, *path), value)


def _of_optimizer(section: Section, optimizer: Optimizer) -> Iterator[Entry]:
    flat = is_flat_optimizer(section.value)
    numbers = {name: number for number, name in optimizer.naming.names.items()}

    def entry(words: KeyPath, value: Any, path: KeyPath, parameter: str = "", slot: str = "") -> Entry:
        return Entry(fqn_of((section.name, *words)), section.name, "optimizer", parameter, slot, path, value)

    for key, state in optimizer.state.items():
        parameter = key if isinstance(key, str) else f"?{key}"
        for slot, values in state.items() if isinstance(state, Mapping) else (("state", state),):
            for path, value in leaves_of(values):
                at = (f"state.{key}.{slot}",) if flat else ("state", numbers.get(key, key), slot)
                words = ("state", parameter, slot, *path)
                yield entry(words, value, (*section.path, *at, *path), parameter, fqn_of((slot, *path)))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            known = list(group.names) if key == "params" else value
            for path, leaf in leaves_of(known):
                words = ("param_groups", number, key, *path)
                yield entry(words, leaf, () if flat else (*section.path, *words))
    for key, value in nested(section.value).items():
        if key not in ("state", "param_groups"):
            yield from (entry((key, *path), leaf, (*section.path, key, *path)) for path, leaf in leaves_of(value))


def _with_own_names(entries: Iterator[Entry]) -> Iterator[Entry]:
    """The entries, those whose name another has already under the name of their section too, or with a number."""
    used: set[str] = set()
    numbers: dict[tuple[str, str], int] = {}
    for entry in entries:
        name, same = entry.name, (entry.section, entry.name)
        while name in used:
            number = numbers[same] = numbers.get(same, 0) + 1
            name = f"{entry.section}.{entry.name}" if number == 1 else f"{entry.section}.{entry.name} {number}"
        used.add(name)
        yield entry if name == entry.name else entry._replace(name=name)


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

    @classmethod
    def given(
        cls, filter: str | Iterable[str] | None, exclude: str | Iterable[str] | None, section: str | None = None
    ) -> Selection:
        """The selection of globs as a user gives them: one, several, or none."""
        include, without = ((globs,) if isinstance(globs, str) else tuple(globs or ()) for globs in (filter, exclude))
        return cls(include, without, section or "")

    def of(self, ck: Checkpoint) -> list[Entry]:
        """The entries of a checkpoint that are wanted, in its order.

        Raises:
            UsageError: it has no such section.
        """
        names = [section.name for section in sections_of(ck)]
        if self.section and self.section not in (*names, *KINDS, ALL):
            known = ", ".join(dict.fromkeys([*KINDS, *names]))
            raise UsageError(ck.path, f"has no section {self.section!r}; there are {known}")
        inside = [entry for entry in entries_of(ck) if self.section in ("", ALL, entry.kind, entry.section)]
        return [entry for entry in inside if self.takes(*entry.names)] if self.include or self.exclude else inside

    @property
    def words(self) -> str:
        """The globs, as a user gives them: `--filter 'blocks.*' --exclude '*.bias'`."""
        given = [("--filter", glob) for glob in self.include] + [("--exclude", glob) for glob in self.exclude]
        return " ".join(f"{option} {describe_for_error(glob)}" for option, glob in given)

    def takes(self, *names: str) -> bool:
        """Whether something of these names is wanted: a glob includes one of them, and none excludes any."""
        unwanted = bool(self.exclude) and any(map(self._unwanted.fullmatch, names))
        return not unwanted and any(map(self._wanted.fullmatch, names))

    @cached_property
    def _wanted(self) -> re.Pattern[str]:
        return pattern(self.include or ("*",))

    @cached_property
    def _unwanted(self) -> re.Pattern[str]:
        return pattern(self.exclude)


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


# -- private values ---------------------------------------------------------------------------------------------------


def is_private(entry: Entry) -> bool:
    """Whether it is a value whose name, or that of what it is in, begins with `_`; what is a parameter's never is."""
    return not entry.parameter and is_private_value(entry.kind, entry.inside, entry.value)


def is_private_value(kind: str, name: str, value: Any) -> bool:
    """Whether a value with a name below its section is private; no tensor and nothing of a model is."""
    return kind != "model" and not isinstance(value, Tensor) and any(map(is_private_name, name.split(".")))


def asks_for_private(keys: Iterable[str]) -> bool:
    """Whether keys or globs spell a private name, such as `_is_initial` or `*._is*`."""
    return any(word.lstrip("*?").startswith("_") for key in keys for word in key.split("."))
