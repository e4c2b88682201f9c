"""The record of `tree`: the keys of a checkpoint with the facts of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import short
from ckptools.model.records import Rows, displayed
from ckptools.text import clip_middle, plural, shape, size


@displayed
class KeyRow(NamedTuple):
    """One key of a checkpoint.

    Attributes:
        name: its name, the same in every command.
        section: name of the section that it is in.
        kind: what the section is: `model`, `optimizer`, `scheduler`, `rng` or `other`.
        type: `tensor`, or what a plain value is: `int`, `float`, `str`, `list`, `object` and so on.
        shape: global sizes of a tensor or array; None for other values.
        dtype: of a tensor, torch's name; of an array, numpy's; "" for other values.
        params: elements of a tensor; 0 for other values.
        bytes: of the global tensor, packed; 0 for other values.
        layout: how a tensor is spread over the ranks; "" for other values.
        value: a number, text or flag, or a short list of these; None for a tensor or a longer value.
        tied: name of the first key of its section that has the same bytes; "" if none has.
        note: why a tensor cannot be loaded; for a value that is not short, a description.
    """

    name: str
    section: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    dtype: str
    params: int
    bytes: int
    layout: str
    value: Any
    tied: str
    note: str

    @property
    def storage(self) -> tuple[str, str]:
        """Identity of the storage, equal for tied tensors only."""
        return self.section, self.tied or self.name

    def _summary(self) -> str:
        value = f"{short(self.dtype)} {shape(self.shape)}" if self.shape is not None else f"{self.type} {self.value}"
        return f"{clip_middle(self.name, 60)}: {value}"


class Totals(NamedTuple):
    """Totals over some keys.

    Attributes:
        tensors: how many tensors there are.
        params: elements of them; a tied weight counts once.
        bytes: of the global tensors, packed; a tied weight counts once.
    """

    tensors: int
    params: int
    bytes: int


@displayed
class KeySection(NamedTuple):
    """A section with listed keys.

    Attributes:
        name: its name.
        kind: what it is.
        prefix: what the names of its keys begin with, such as `optimizers.AdamW`; "" for the only model.
        tensors: how many tensors of it are listed.
        params: elements of them; a tied weight counts once.
        bytes: of the global tensors, packed; a tied weight counts once.
    """

    name: str
    kind: str
    prefix: str
    tensors: int
    params: int
    bytes: int


@displayed
@dataclass(frozen=True)
class Keys:
    """The keys of a checkpoint, or the selected ones.

    Attributes:
        path: what was opened.
        name: what the checkpoint is called.
        whole: whether all of it is here; None if not every file was compared.
        tensors: how many tensors are listed.
        params: elements of them; a tied weight counts once.
        bytes: of the global tensors, packed; a tied weight counts once.
        private: how many values were left out because their names begin with `_`.
        sections: the sections that have keys listed.
        rows: a row for each key, in the order of the file.
    """

    path: Path
    name: str
    whole: bool | None
    tensors: int
    params: int
    bytes: int
    private: int
    sections: Rows[KeySection]
    rows: Rows[KeyRow]

    def _summary(self) -> str:
        found = f"{plural(len(self.rows), 'key')}, {plural(self.tensors, 'tensor')}, {size(self.bytes)}"
        return f"{clip_middle(self.name, 60)}: {found}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per key, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()
