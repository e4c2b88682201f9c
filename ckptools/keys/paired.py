"""The result of pairing a checkpoint with a model: what each tensor is made of, and the rules that were followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptools.model.problems import displayed
from ckptools.model.tensor import Tensor
from ckptools.text import plural, printable

COMPUTED = "a buffer that the model computes anew"
"""Why a tensor of the checkpoint is not written."""


@displayed
class Proof(NamedTuple):
    """What was compared to say that every element of an output is its source's.

    Attributes:
        tensors: of the output.
        elements: of these.
        renamed: tensors with another name than in the source.
        rearranged: tensors whose rows were moved, joined, split or transposed.
        cut: tensors without the padded rows of the source.
        cast: tensors of another dtype, which are the source's values converted to nearest even.
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
        """The elements, and through what they came."""
        parts = ("renamed", "rearranged", "cut", "cast")
        through = ", ".join(f"{getattr(self, part)} {part}" for part in parts if getattr(self, part))
        counts = plural(self.elements, "element")
        return f"{counts} ({through})" if through else counts


@displayed
class PairingRule(NamedTuple):
    """One rule that was followed.

    Attributes:
        old: what tensors of the checkpoint are called; for a layout with `{}` for a layer's number.
        new: what they become.
        words: what is done besides, such as `transposed`; "" for a rename alone.
        tensors: how many of the model's.
        assumed: whether the caller allowed it without evidence in names.
    """

    old: str
    new: str
    words: str
    tensors: int
    assumed: bool = False

    @property
    def line(self) -> str:
        """The rule in a line."""
        words = f": {self.words}" if self.words else ""
        names = f"{printable(self.old)} -> {printable(self.new)}"
        return f"renamed: {names}{words}: {plural(self.tensors, 'tensor')}{' (assumed)' if self.assumed else ''}"


@displayed
class CutRows(NamedTuple):
    """Rows of a vocabulary that are not written.

    Attributes:
        rows: in the checkpoint.
        kept: how many are written.
        why: what proves that the others are padding.
    """

    name: str
    rows: int
    kept: int
    why: str

    @property
    def line(self) -> str:
        """The cut in a line."""
        return f"cut: {printable(self.name)}: {self.kept} of {self.rows} rows are written; {self.why}"


@dataclass(frozen=True)
class Pairing:
    """The tensors of a model, made of those of a checkpoint.

    Attributes:
        tensors: by name in the model, in its order.
        sources: the names in the checkpoint that each is made of.
        cut: rows that are not written.
        left: names of the checkpoint that the model does not have, with the reason.
        rearranged: names of the model whose bytes are not one tensor of the checkpoint as it is.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    sources: Mapping[str, tuple[str, ...]] = field(repr=False)
    rules: tuple[PairingRule, ...] = ()
    cut: tuple[CutRows, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    rearranged: frozenset[str] = frozenset()

    def proof(self, dtypes: Mapping[str, str]) -> Proof:
        """The counts of an output that has these tensors in some dtypes."""
        return Proof(
            tensors=len(self.tensors),
            elements=sum(tensor.numel for tensor in self.tensors.values()),
            renamed=sum(olds != (new,) for new, olds in self.sources.items()),
            rearranged=len(self.rearranged),
            cut=len(self.cut),
            cast=sum(tensor.dtype != dtypes.get(name, tensor.dtype) for name, tensor in self.tensors.items()),
        )
