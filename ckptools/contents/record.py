"""The records of `tree` and `show`: the keys of a checkpoint; in full a value, or a tensor with its shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import short
from ckptools.keys.value_digests import StreamRow
from ckptools.model.problems import Rows, as_text, displayed
from ckptools.model.regions import Ints
from ckptools.text import clip, clip_middle, few, plural, shape, size, spans


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
        return _in_short(self)


class Totals(NamedTuple):
    """Totals over some keys: elements and packed bytes of the global tensors, of tied weights once."""

    tensors: int
    params: int
    bytes: int


@displayed
class KeySection(NamedTuple):
    """A section with listed keys, whose names begin with `prefix`: `optimizers.AdamW`; "" for the only model."""

    name: str
    kind: str
    prefix: str
    tensors: int
    params: int
    bytes: int


@displayed
@dataclass(frozen=True)
class Keys:
    """The keys of a checkpoint, or the selected ones; elements and bytes of tied weights count once.

    Attributes:
        whole: whether all of it is here; None if not every file was compared.
        private: how many values were left out because their names begin with `_`.
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

    def __str__(self) -> str:
        """The text that the command prints."""
        return as_text(self)

    def _summary(self) -> str:
        found = f"{plural(len(self.rows), 'key')}, {plural(self.tensors, 'tensor')}, {size(self.bytes)}"
        return f"{clip_middle(self.name, 60)}: {found}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per key, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()


# -- show --------------------------------------------------------------------------------------------------------------


@displayed
class PartRow(NamedTuple):
    """One of the tensors that a class stores in place of a shard's values.

    Attributes:
        name: what the class calls it, such as `codes`.
        per: how many elements share one of its numbers, in words; "" if each has its own.
        record: the record of the container.
        offset: byte offset of its first element in the file.
        crc: CRC-32 of the whole record; "" if none is stated.
    """

    name: str
    dtype: str
    shape: Ints
    per: str
    record: str
    offset: int
    bytes: int
    crc: str


@displayed
class ShardRow(NamedTuple):
    """One rank's shard of a tensor, and the place of its bytes.

    Attributes:
        rank: its rank; None if unknown.
        offsets: first index per dimension, in elements of the global tensor.
        status: `here`; `missing` if no file here contains it; `unreadable` if its file cannot be read.
        file: the file; "" if it is missing.
        record: the record of the container, such as `data/31`.
        offset: byte offset of its first element in the file; None if unknown.
        crc: CRC-32 of the whole record as the container states it, in hexadecimal; "" if it states none.
        stored_as: dotted name of the class that stores it in another form than its values; "" for none.
        parts: the tensors it is stored as then; `record`, `offset` and `crc` are those of the first.
    """

    rank: int | None
    offsets: Ints
    sizes: Ints
    status: Literal["here", "missing", "unreadable"]
    file: str
    record: str
    offset: int | None
    bytes: int
    crc: str
    note: str
    stored_as: str = ""
    parts: tuple[PartRow, ...] = ()


@displayed
class RankValue(NamedTuple):
    """The value of some ranks at a key whose value differs between ranks.

    Attributes:
        ranks: the ranks that have it.
        value: a plain value in full; None for an object of a foreign class, or if they have none.
        note: for a value that is not short, a description; `nothing there` if these ranks have none.
    """

    ranks: tuple[int, ...]
    value: Any
    note: str

    def _summary(self) -> str:
        value = self.note or str(self.value)
        return f"{plural(len(self.ranks), 'rank')} {spans(self.ranks)}: {clip(value, 60)}"


@displayed
class ShownKey(NamedTuple):
    """One key with its value or shards; the first fields are those of `KeyRow`.

    Attributes:
        value: a plain value in full, or that of a tensor without dimensions; None for other tensors and for objects of
            foreign classes. If ranks have different values, that of the lowest rank.
        shards: the shards of a tensor in rank order; empty for other values.
        holes: regions of a tensor that are in no file here.
        missing: number of elements in them.
        statistics: a few figures of a small tensor; None if none were computed.
        slice: the requested slice; "" for none.
        values: its elements as nested lists; None if none were requested, or they cannot be read.
        problem: why elements or figures, or some of them, cannot be read; "" if they can.
        ranks: a row for each distinct value if the ranks that were read have different ones; empty if none is known
            to differ.
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
    shards: tuple[ShardRow, ...] = ()
    holes: tuple[str, ...] = ()
    missing: int = 0
    statistics: Mapping[str, Any] | None = None
    slice: str = ""
    values: Any = None
    problem: str = ""
    ranks: tuple[RankValue, ...] = ()

    def _summary(self) -> str:
        missing = f", {self.missing} elements MISSING" if self.missing else ""
        differ = f"; ranks hold {len(self.ranks)} different ones" if self.ranks else ""
        return f"{_in_short(self)}{missing}{differ}"


def _in_short(row: KeyRow | ShownKey) -> str:
    value = f"{short(row.dtype)} {shape(row.shape)}" if row.shape is not None else f"{row.type} {row.value}"
    return f"{clip_middle(row.name, 60)}: {value}"


@displayed
@dataclass(frozen=True)
class Shown:
    """Some keys of a checkpoint.

    Attributes:
        private: how many values were left out because their names begin with `_`.
        not_read: number of ranks whose files are here but were not read, so that their values are unknown.
        lost: number of ranks whose values are unknown because their files are missing or damaged.
        streams: the generators of the random states that are shown.
    """

    path: Path
    name: str
    keys: tuple[str, ...]
    private: int
    not_read: int
    lost: int
    streams: Rows[StreamRow]
    rows: Rows[ShownKey]

    @property
    def problems(self) -> bool:
        """Whether a part of the requested keys could not be read."""
        return any(row.problem or row.missing for row in self.rows)

    def __str__(self) -> str:
        """The text that the command prints."""
        return as_text(self)

    def _summary(self) -> str:
        wrong = ", not all of it readable" if self.problems else ""
        return f"{clip_middle(self.name, 60)}: {few([row.name for row in self.rows], 3)}{wrong}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per key, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()
