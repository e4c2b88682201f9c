"""The records of `tree` and `show`: the keys of a checkpoint, with values, shards and copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import short
from ckptools.keys.random_states import StreamRow
from ckptools.model.records import Rows, displayed
from ckptools.model.regions import Ints
from ckptools.option import in_python
from ckptools.text import clip, clip_middle, few, plural, shape, size, spans


@displayed
class KeyRow(NamedTuple):
    """One key of a checkpoint.

    Attributes:
        name: dotted name, the same in every command.
        section: name of the section that holds the key.
        kind: of the section: `model`, `optimizer`, `scheduler`, `rng` or `other`.
        type: `tensor`, or the type of a plain value: `int`, `float`, `str`, `list`, `object` and so on.
        shape: global sizes of a tensor or array; None for other values.
        dtype: torch's name for a tensor, numpy's for an array; "" for other values.
        params: elements of a tensor; 0 for other values.
        bytes: of the global tensor, packed; 0 for other values.
        layout: how a tensor is sharded; "" for other values.
        value: a number, text or flag, or a short list of them; None for a tensor or a longer value.
        tied: name of the first key of the section with the same storage; "" if the tensor is not tied.
        note: why a tensor cannot be loaded; or a description of a long value.
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
    """Numbers of tensors, elements and packed bytes; tied tensors count once."""

    tensors: int
    params: int
    bytes: int


@displayed
class KeySection(NamedTuple):
    """A section and the prefix of its keys' names: `optimizers.AdamW`; "" for the only model."""

    name: str
    kind: str
    prefix: str
    tensors: int
    params: int
    bytes: int


@displayed
@dataclass(frozen=True)
class Keys:
    """The selected keys of a checkpoint; elements and bytes of tied weights count once.

    Attributes:
        whole: whether the checkpoint is whole; None if not every file was compared.
        private: number of values left out because their names begin with `_`.
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

    @in_python
    def __str__(self) -> str:
        """The text that `ckptools tree` prints, with options in Python's words."""
        from ckptools.contents.text import tree_text

        return tree_text(self)

    def _summary(self) -> str:
        found = f"{plural(len(self.rows), 'key')}, {plural(self.tensors, 'tensor')}, {size(self.bytes)}"
        return f"{clip_middle(self.name, 60)}: {found}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a plain dict per key, for `pandas.DataFrame`."""
        return self.rows.to_dicts()


# -- show --------------------------------------------------------------------------------------------------------------


@displayed
class PartRow(NamedTuple):
    """A tensor that encodes part of a shard, such as `codes` or `scale` of a quantized weight.

    Attributes:
        name: given by the class, such as `codes`.
        per: number of elements that share one scale or zero point, in words; "" if each has its own.
        record: zip entry.
        offset: byte offset of its first element in the file.
        crc: CRC-32 of the whole zip entry; "" if none is stated.
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
    """One rank's shard of a tensor, and where its bytes lie.

    Attributes:
        rank: None if unknown.
        offsets: first index per dimension, in elements of the global tensor.
        status: `here`; `missing` if no file contains the shard; `unreadable` if its file cannot be read.
        file: path; "" if missing.
        record: zip entry, such as `data/31`.
        offset: byte offset of its first element in the file; None if unknown.
        crc: CRC-32 that the archive states for the whole zip entry, in hexadecimal; "" if it states none.
        stored_as: dotted name of the tensor subclass that encodes the shard; "" if its values are stored as they are.
        parts: the tensors in which the subclass stores it; `record`, `offset` and `crc` are those of the first part.
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
    """The value that some ranks have at a key where ranks differ.

    Attributes:
        ranks: the ranks with this value.
        value: a plain value in full; None for an object of a foreign class, or if these ranks lack the key.
        note: a description of a long value; `nothing there` if these ranks lack the key.
    """

    ranks: tuple[int, ...]
    value: Any
    note: str

    def _summary(self) -> str:
        value = self.note or str(self.value)
        return f"{plural(len(self.ranks), 'rank')} {spans(self.ranks)}: {clip(value, 60)}"


@displayed
class ShownKey(NamedTuple):
    """One key with its value, its shards, or its values by rank.

    Attributes:
        value: a plain value in full, or the number in a 0-d tensor; None for other tensors and for objects of foreign
            classes. If ranks differ, the value of the lowest rank.
        shards: the shards of a tensor in rank order; empty for other values.
        holes: regions of a tensor that no file contains.
        missing: number of elements in the holes.
        statistics: mean, minimum and so on of a small tensor; None if not computed.
        slice: the requested slice; "" if none was requested.
        values: elements of the slice as nested lists; None if none was requested, or they cannot be read.
        problem: why some elements or statistics cannot be read; "" if they can.
        ranks: a row for each distinct value if the ranks that were read differ; empty if they are not known to differ.
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
    """The record of `show`: some keys of a checkpoint.

    Attributes:
        private: number of values left out because their names begin with `_`.
        not_read: number of ranks with files that were not read, so that their values are unknown.
        lost: number of ranks with missing or damaged files, so that their values are unknown.
        streams: random generators with a state among the keys.
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
        """Whether some of the requested keys could not be read."""
        return any(row.problem or row.missing for row in self.rows)

    @in_python
    def __str__(self) -> str:
        """The text that `ckptools show` prints, with options in Python's words."""
        from ckptools.contents.text import shown_text

        return shown_text(self)

    def _summary(self) -> str:
        wrong = ", not all of it readable" if self.problems else ""
        return f"{clip_middle(self.name, 60)}: {few([row.name for row in self.rows], 3)}{wrong}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a plain dict per key, for `pandas.DataFrame`."""
        return self.rows.to_dicts()
