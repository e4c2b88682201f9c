"""Every key of a checkpoint by the name that people use: fqns of the model, optimizer state by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from ckptools.contents.leaves import leaves_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.training_state.optimizers import Optimizer, nested, optimizers_of
from ckptools.training_state.sections import Section, SectionKind, is_flat_optimizer, sections_of, sections_of_kind

MAX_ENTRIES = 1_000_000
"""Containers can be shared, so a small file may unfold to more than anybody can hold."""


class Entry(NamedTuple):
    """One key of a checkpoint and what is there.

    Attributes:
        name: what people call it: `blocks.0.up.weight` of the only model, `optimizers.AdamW.state.emb.weight.exp_avg`,
            `timestamp.batch`. No two entries of a checkpoint have the same.
        section: name of its section.
        kind: kind of its section.
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
        """What it is called, and its whole key path, which problems name it by."""
        whole = fqn_of(self.path)
        return (self.name, whole) if whole not in ("", self.name) else (self.name,)


def entries_of(ck: Checkpoint) -> tuple[Entry, ...]:
    """Every key of a checkpoint in the order of its sections; empty containers too, at most `MAX_ENTRIES`.

    Raises:
        RefusedError: the names that were given when it was opened do not fit.
    """
    if "entries" not in ck.worked_out:
        ck.worked_out["entries"] = tuple(_with_own_names(islice(_entries(ck), MAX_ENTRIES)))
    found: tuple[Entry, ...] = ck.worked_out["entries"]
    return found


def tensor_entries(ck: Checkpoint) -> tuple[Entry, ...]:
    """The entries that are tensors."""
    return tuple(entry for entry in entries_of(ck) if isinstance(entry.value, Tensor))


def _entries(ck: Checkpoint) -> Iterator[Entry]:
    only_model = len(sections_of_kind(ck, "model")) == 1
    optimizers = {o.path: o for o in optimizers_of(ck).values()} if sections_of_kind(ck, "optimizer") else {}
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
    for entry in entries:
        name, number = entry.name, 1
        while name in used:
            name = f"{entry.section}.{entry.name}" if number == 1 else f"{entry.section}.{entry.name} {number}"
            number += 1
        used.add(name)
        yield entry if name == entry.name else entry._replace(name=name)
