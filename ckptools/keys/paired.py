"""The result of pairing a checkpoint with a model: the sources of each tensor, and the rules that were applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptools.model.records import displayed
from ckptools.model.tensor import Tensor
from ckptools.text import plural, printable

COMPUTED = "a buffer that the model computes anew"
"""A reason for not writing a tensor of the checkpoint."""


@displayed
class Proof(NamedTuple):
    """Counts of the comparison that proves that every element of an output is its source's.

    Attributes:
        tensors: tensors of the output.
        elements: their elements.
        renamed: tensors with another name than in the source.
        rearranged: tensors whose rows were moved, joined, split or transposed.
        cut: tensors without the source's padded rows.
        cast: tensors of another dtype: the source's values converted to nearest even.
    """

    tensors: int
    elements: int
    renamed: int = 0
    rearranged: int = 0
    cut: int = 0
    cast: int = 0

    def __str__(self) -> str:
        return f"{plural(self.tensors, 'tensor')}, {self.counts}"

    @property
    def counts(self) -> str:
        """The number of elements, and the transformations they passed."""
        parts = ("renamed", "rearranged", "cut", "cast")
        through = ", ".join(f"{getattr(self, part)} {part}" for part in parts if getattr(self, part))
        counts = plural(self.elements, "element")
        return f"{counts} ({through})" if through else counts


@displayed
class PairingRule(NamedTuple):
    """A rule that was applied.

    Attributes:
        old: name in the checkpoint; in a layout, `{}` stands for a layer's number.
        new: name in the model.
        words: a transformation, such as `transposed`; "" for a rename alone.
        tensors: number of the model's tensors that it made.
        assumed: whether the caller allowed it without evidence in names.
    """

    old: str
    new: str
    words: str
    tensors: int
    assumed: bool = False

    @property
    def line(self) -> str:
        """The rule in one line."""
        words = f": {self.words}" if self.words else ""
        names = f"{printable(self.old)} -> {printable(self.new)}"
        return f"renamed: {names}{words}: {plural(self.tensors, 'tensor')}{' (assumed)' if self.assumed else ''}"


@displayed
class CutRows(NamedTuple):
    """Rows of a vocabulary that are not written.

    Attributes:
        rows: rows in the checkpoint.
        kept: rows that are written.
        why: the proof that the other rows are padding.
    """

    name: str
    rows: int
    kept: int
    why: str

    @property
    def line(self) -> str:
        """The cut in one line."""
        return f"cut: {printable(self.name)}: {self.kept} of {self.rows} rows are written; {self.why}"


@dataclass(frozen=True)
class Pairing:
    """The tensors of a model, made from the tensors of a checkpoint.

    Attributes:
        tensors: by name in the model, in its order.
        sources: names in the checkpoint from which each tensor is made.
        cut: rows that are not written.
        left: names of the checkpoint that the model does not have, with the reason.
        rearranged: names of tensors that are not a tensor of the checkpoint unchanged.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    sources: Mapping[str, tuple[str, ...]] = field(repr=False)
    rules: tuple[PairingRule, ...] = ()
    cut: tuple[CutRows, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    rearranged: frozenset[str] = frozenset()

    def proof(self, dtypes: Mapping[str, str]) -> Proof:
        """Count the transformations of an output that has these tensors in the given dtypes."""
        return Proof(
            tensors=len(self.tensors),
            elements=sum(tensor.numel for tensor in self.tensors.values()),
            renamed=sum(olds != (new,) for new, olds in self.sources.items()),
            rearranged=len(self.rearranged),
            cut=len(self.cut),
            cast=sum(tensor.dtype != dtypes.get(name, tensor.dtype) for name, tensor in self.tensors.items()),
        )
