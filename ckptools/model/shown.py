"""What is at a key: a value in full, or a tensor with its shards. The answer of `show`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import short
from ckptools.model.records import displayed
from ckptools.model.regions import Ints
from ckptools.model.rows import Rows
from ckptools.text import clip, clip_middle, few, plural, shape, spans


@displayed
class PartRow(NamedTuple):
    """What is stored of a piece in the place of its values, and where.

    Attributes:
        name: what the class calls it, such as `codes`.
        dtype: torch's name.
        shape: its sizes.
        per: how many elements share one of its numbers, in words; "" where each has its own.
        record: the record of the container.
        offset: byte offset of its first element in the file.
        bytes: bytes of its elements.
        crc: CRC-32 of the whole record; "" where none is stated.
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
    """One rank's piece of a tensor, and where its bytes lie.

    Attributes:
        rank: the rank that holds it; None where the file does not tell.
        offsets: first index per dimension, in elements of the global tensor.
        sizes: extent per dimension.
        status: `here`; `missing` where no file that is here holds it; `unreadable` where its file cannot be read.
        file: the file; "" where it is missing.
        record: the record of the container, such as `data/31`.
        offset: byte offset of its first element in the file; None where that is not known.
        bytes: bytes of its elements.
        crc: CRC-32 of the whole record as the container states it, in hexadecimal; "" where it states none.
        note: why it cannot be read.
        stored_as: dotted name of the class that stores it in another form than its values; "" for none.
        parts: what it is stored as then; `record`, `offset` and `crc` are those of the first.
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
    """What some ranks hold at a key, where others hold something else.

    Attributes:
        ranks: which.
        value: a plain value in full; None for an object of a foreign class, and where they have nothing.
        note: of a value that is not short, what it is; `nothing there` where these ranks have none.
    """

    ranks: tuple[int, ...]
    value: Any
    note: str

    def _told(self) -> str:
        held = self.note or str(self.value)
        return f"{plural(len(self.ranks), 'rank')} {spans(self.ranks)}: {clip(held, 60)}"


@displayed
class ShownKey(NamedTuple):
    """One key, and what is there.

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
        value: a plain value in full; None for a tensor, and for an object of a foreign class. Where ranks hold
            different values that of the lowest.
        tied: name of the first key of its section that has the same bytes; "" where none has.
        note: why a tensor cannot be loaded; of a value that is not short, what it is.
        shards: the pieces of a tensor in rank order; empty for other values.
        holes: regions of a tensor that no file here holds.
        missing: how many elements those are.
        statistics: a few figures of a small tensor; None where none were taken.
        slice: the slice that was asked for; "" where none was.
        values: its elements as nested lists; None where none were asked for, or they cannot be read.
        problem: why elements or figures cannot be had, or not of all; "" where they can.
        ranks: what ranks hold of a plain value, where those that were read hold different ones: a row for each; empty
            where none is known to differ.
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

    def _told(self) -> str:
        held = f"{short(self.dtype)} {shape(self.shape)}" if self.shape is not None else f"{self.type} {self.value}"
        missing = f", {self.missing} elements MISSING" if self.missing else ""
        differ = f"; ranks hold {len(self.ranks)} different ones" if self.ranks else ""
        return f"{clip_middle(self.name, 60)}: {held}{missing}{differ}"


@displayed
class StreamRow(NamedTuple):
    """The states of one random number generator on all ranks.

    Attributes:
        stream: which generator: `torch`, `cuda`, `numpy`, `python`.
        ranks: of how many ranks there is a state, or of how many places of Megatron's grid of ranks.
        distinct: how many of these differ, of those that can be read.
        fingerprints: of each rank's state, all that decides what is drawn next, by rank: 8 hexadecimal digits, the
            same in every command and wherever the state lies. Without those that cannot be read. `shard 0.1` stands
            for the ranks of one pipeline and tensor-parallel place (Megatron), `unknown` where nothing tells whose.
        problem: why the state of a rank cannot be read; "" where all can.
    """

    stream: str
    ranks: int
    distinct: int
    fingerprints: Mapping[str, str]
    problem: str


@displayed
@dataclass(frozen=True)
class Shown:
    """What is at some keys of a checkpoint.

    Attributes:
        path: what was opened.
        name: what the checkpoint is called.
        keys: what was asked for.
        private: how many values were left out because their names begin with `_`.
        not_read: how many ranks' files are here and were not read, so that what they hold at these keys is not known.
        lost: of how many ranks that is not known because their files are missing or damaged.
        streams: the generators of the random states that are shown.
        rows: a row for each key that was found, in the order of the file.
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
        """Whether something that was asked for could not be read."""
        return any(row.problem or row.missing for row in self.rows)

    def _told(self) -> str:
        wrong = ", not all of it readable" if self.problems else ""
        return f"{clip_middle(self.name, 60)}: {few([row.name for row in self.rows], 3)}{wrong}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per key, for `pandas.DataFrame` and the like."""
        return self.rows.to_dicts()
