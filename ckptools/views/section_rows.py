"""Sections in full, as plain data: what `inspect --section` shows. Text and JSON render these rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptools.contents.leaves import fingerprint, leaves_of
from ckptools.contents.private_values import is_private_value
from ckptools.contents.sharding import placement
from ckptools.errors import UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import Section, sections_of

KINDS = ("model", "optimizer", "scheduler", "rng", "other")
MAX_VALUES = 10_000
"""Rows of values of one section. Containers can be shared, so a small file may unfold to millions."""


class TensorRow(NamedTuple):
    """One tensor of a section.

    Attributes:
        fqn: its name in the section.
        shape: global sizes.
        dtype: torch's name.
        nbytes: bytes of the global tensor.
        placement: how it is spread over the ranks.
        note: why it cannot be loaded; empty when it can.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    placement: str
    note: str


class StateRow(NamedTuple):
    """What an optimizer keeps of one parameter.

    Attributes:
        parameter: fqn, or the number where no name is known.
        group: number of its param group; None when no group lists it.
        slots: tensors and values by the name of the slot.
    """

    parameter: str
    group: int | None
    slots: Mapping[str, Any]


class ValueRow(NamedTuple):
    """One value of a section that is no tensor of a model or optimizer.

    Attributes:
        path: key path below the section.
        value: the value; a long sequence of plain values is one.
        fingerprint: CRC-32 of a long sequence or array, to tell ranks apart; None for others.
        differs: name of the value, or of what it is a part of, in which other ranks differ; empty when none does.
    """

    path: KeyPath
    value: Any
    fingerprint: int | None
    differs: str


class Detail(NamedTuple):
    """One section in full.

    Attributes:
        kind: what it is.
        name: for people.
        tensors: its tensors, for a model.
        state: its state per parameter, for an optimizer.
        values: everything else.
        left_out: whether there are more values than are listed.
        private: how many values were left out because their names begin with `_`.
    """

    kind: str
    name: str
    tensors: tuple[TensorRow, ...] = ()
    state: tuple[StateRow, ...] = ()
    values: tuple[ValueRow, ...] = ()
    left_out: bool = False
    private: int = 0


def section_details(ck: Checkpoint, wanted: str, private: bool = True) -> tuple[Detail, ...]:
    """The sections of a kind, or the one of a name, in full.

    Args:
        ck: the checkpoint.
        wanted: a kind of section, or the name of one.
        private: also values whose names begin with `_`.

    Raises:
        UsageError: there is none.
    """
    found = [s for s in sections_of(ck) if wanted in (s.kind, s.name)]
    if not found:
        names = ", ".join([*KINDS, *(s.name for s in sections_of(ck) if s.name not in KINDS)])
        raise UsageError(ck.path, f"has no section {wanted!r}; there are {names}")
    return tuple(_detail(ck, section, private) for section in found)


def _detail(ck: Checkpoint, section: Section, private: bool) -> Detail:
    if section.kind == "optimizer":
        return Detail(section.kind, section.name, state=tuple(_state_rows(ck, section)))
    tensors = tuple(tensor_rows(section.value)) if section.kind == "model" else ()
    values = [row for row in _value_rows(ck, section) if not (tensors and isinstance(row.value, Tensor))]
    shown = [row for row in values if private or not is_private_value(section.kind, fqn_of(row.path), row.value)]
    hidden, left_out = len(values) - len(shown), len(values) > MAX_VALUES
    return Detail(section.kind, section.name, tensors, (), tuple(shown[:MAX_VALUES]), left_out, hidden)


def tensor_rows(value: Any) -> Iterator[TensorRow]:
    """A row for each tensor of a subtree."""
    for path, leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            yield TensorRow(fqn_of(path), leaf.shape, leaf.dtype, leaf.nbytes, placement(leaf), leaf.note)


def _state_rows(ck: Checkpoint, section: Section) -> Iterator[StateRow]:
    optimizer = next(o for o in optimizers_of(ck).values() if o.path == section.path)
    group_of = {name: n for n, group in enumerate(optimizer.param_groups) for name in group.names}
    for key, entry in optimizer.state.items():
        name = key if isinstance(key, str) else f"?{key}"
        slots = dict(entry) if isinstance(entry, Mapping) else {"state": entry}
        yield StateRow(name, group_of.get(name), slots)


def _value_rows(ck: Checkpoint, section: Section) -> Iterator[ValueRow]:
    differing = set(map(fqn_of, ck.differing))
    for n, (path, leaf) in enumerate(leaves_of(section.value)):
        if n > MAX_VALUES:
            return
        full = (*section.path, *path)
        names = (fqn_of(full[:k]) for k in range(1, len(full) + 1)) if differing else ()
        differs = next((name for name in names if name in differing), "")
        yield ValueRow(path, leaf, fingerprint(leaf), differs)
