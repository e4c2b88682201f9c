"""The contents of one side of a comparison: keys of a checkpoint or of a file of digests, in one form for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptools.diff.record import Side, Subject
from ckptools.keys.value_digests import Content
from ckptools.model.tensor import Tensor

Identity = tuple[str, ...]
"""Finds a key on the other side: the kind of its section, the section, and its name there."""


class SideTensor(NamedTuple):
    """A tensor of the model, of an optimizer's state, or a large one elsewhere.

    Attributes:
        identity: what it is found by; the fqn in it has no wrappers.
        name: as every command calls it.
        subject: what it is about.
        dtype: torch's name.
        shape: global sizes.
        layout: how it is sharded, in words.
        number: whether its parameter has a number and no name.
        assumed: whether its parameter's name was given by order.
        problem: why its values cannot be had; "" where they can.
        tensor: where its bytes lie; None in a file of digests.
        sha256: of its values in row-major order; "" where it was not taken.
    """

    identity: Identity
    name: str
    subject: Subject
    dtype: str
    shape: tuple[int, ...]
    layout: str
    number: bool = False
    assumed: bool = False
    problem: str = ""
    tensor: Tensor | None = None
    sha256: str = ""


class SideValue(NamedTuple):
    """A plain value, or what each rank has in its place.

    Attributes:
        identity: what it is found by.
        name: as every command calls it.
        subject: what it is about.
        contents: its digest and text by rank; under None if all ranks share it.
        number: whether its parameter has a number and no name.
    """

    identity: Identity
    name: str
    subject: Subject
    contents: Mapping[int | None, Content]
    number: bool = False


class SideGroup(NamedTuple):
    """A param group.

    Attributes:
        section: name of its optimizer's section.
        number: its place among the groups.
        params: fqns of its parameters without wrappers; `?` and a number where one has no name.
        settings: every hyperparameter but `params`.
        ordered: whether its parameters are listed in the order of the optimizer, which numbers them so.
    """

    section: str
    number: int
    params: tuple[str, ...]
    settings: Mapping[str, Content]
    ordered: bool = False

    @property
    def numbered(self) -> bool:
        """Whether it lists numbers whose names are unknown."""
        return any(name.startswith("?") for name in self.params)


@dataclass
class Contents:
    """All keys of one side.

    Attributes:
        facts: what it is.
        sections: names of its sections by kind.
        tensors: tensors by identity.
        values: plain values by identity.
        groups: the param groups of its optimizers.
        lost_ranks: ranks whose files are missing or cannot be read.
        damage: what is wrong with it, each in a line.
        notes: what should be known of its names.
        by_rank: identities, cut short, below which each rank has something of its own.
        text_keys: whether keys that are numbers look the same as texts.
    """

    facts: Side
    sections: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[Identity, SideTensor] = field(default_factory=dict)
    values: dict[Identity, SideValue] = field(default_factory=dict)
    groups: list[SideGroup] = field(default_factory=list)
    lost_ranks: tuple[int, ...] = ()
    damage: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    by_rank: set[Identity] = field(default_factory=set)
    text_keys: bool = False


def key_text(key: Any) -> str:
    """A key in an identity: a text that looks like a number stands in quotes."""
    return f"'{key}'" if isinstance(key, str) and key.isdecimal() else str(key)


def without_quotes(identity: Identity) -> Identity:
    """An identity in which a number and the text of it are the same."""
    return tuple(part[1:-1] if part[:1] == part[-1:] == "'" and part[1:-1].isdecimal() else part for part in identity)
