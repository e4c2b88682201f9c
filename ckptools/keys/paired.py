"""The result of pairing a checkpoint with a model: what each tensor is made of, and the rules that were followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptools.model.records import displayed
from ckptools.model.tensor import Tensor

COMPUTED = "a buffer that the model computes anew"
"""Why a tensor of the checkpoint is not written."""


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


@displayed
class CutRows(NamedTuple):
    """Rows of a vocabulary that are not written.

    Attributes:
        name: of the model's tensor.
        rows: in the checkpoint.
        kept: how many are written.
        why: what proves that the others are padding.
    """

    name: str
    rows: int
    kept: int
    why: str


@dataclass(frozen=True)
class Pairing:
    """The tensors of a model, made of those of a checkpoint.

    Attributes:
        tensors: by name in the model, in its order.
        sources: the names in the checkpoint that each is made of.
        rules: what was followed.
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
