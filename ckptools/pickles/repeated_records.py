"""Shard records that one rank's pickle spells, recognised by their bytes in the pickles of the other ranks.

Every rank file lists the shards of all ranks for every ShardedTensor. Apart from the rank's own shard, which has its
place elsewhere in the pickle, the files of neighbouring ranks spell those lists byte for byte alike, memo numbers
included. So what `shard_runs` has matched once need only be compared afterwards, which costs a hundredth.

The same bytes mean the same only where the words in them have the same memo numbers. Those are what the pattern of a
record is made from, so what was learned with one pattern is for pickles that have the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptools.model.regions import Ints
from ckptools.model.tensor import Shard
from ckptools.pickles.repeated_values import RepeatedValues
from ckptools.pickles.run_records import ShardRecord

NUMBERS = 10
"""Memo entries that a record makes: of them the first is the record itself."""

MAX_KEPT = 128 << 20
"""Bytes of pickle that are remembered of one checkpoint; what goes beyond is read as if it were new."""

MAX_RECORDS = 1 << 20
"""Different records that are remembered from one file to the next."""

MAX_OVERLAP = 4
"""Chains that are looked at for one memo number: two are usual, before a rank's own place in a list and behind it."""


class Part(NamedTuple):
    """Records that follow each other in a pickle, whose memo numbers follow each other too.

    Attributes:
        first: memo number of the first record.
        records: the records.
        end: where the last of them ends in the pickle.
    """

    first: int
    records: Sequence[ShardRecord]
    end: int

    @property
    def past(self) -> int:
        """One more than the last memo number."""
        return self.first + NUMBERS * len(self.records)


class _Chain:
    """Records of one list with memo numbers in a row, and how they are spelled."""

    __slots__ = ("ends", "first", "records", "spelled")

    def __init__(self, first: int) -> None:
        self.first = first
        self.records: list[ShardRecord] = []
        self.spelled = bytearray()
        self.ends = [0]

    @property
    def past(self) -> int:
        return self.first + NUMBERS * len(self.records)


class RepeatedRecords:
    """What the pickles of one checkpoint's ranks repeat; one is handed from file to file.

    Args:
        limit: bytes of pickle that are remembered; 0 for a file that is read alone.

    Attributes:
        records: records that were matched, by the bytes of offsets, sizes and rank.
        layouts: what DTensors of one layout have in common.
        values: what else they repeat, byte for byte.
        learned: bytes of pickle that are remembered, and that were too many to be.
    """

    def __init__(self, limit: int = MAX_KEPT) -> None:
        self.limit = limit
        self.records: dict[tuple[bytes, bytes, bytes], ShardRecord] = {}
        self._by_value: dict[tuple[Ints, Ints, int | None], ShardRecord] = {}
        self.layouts: dict[Any, Any] = {}
        self._lists: dict[tuple[int, ...], tuple[Shard, ...]] = {}
        self.values = RepeatedValues(limit)
        self.learned = 0
        self._by_pattern: dict[bytes, list[_Chain]] = {}
        self._chains: list[_Chain] = []

    def begin(self, pattern: bytes) -> None:
        """Begin a pickle in which a record has this pattern: only what was learned with the same one is recognised."""
        self._chains = self._by_pattern.setdefault(pattern, [])
        if len(self._by_value) > MAX_RECORDS:
            self.records, self._by_value, self._lists = {}, {}, {}

    def record(self, offsets: Ints, sizes: Ints, rank: int | None) -> ShardRecord:
        """The one record of these offsets, sizes and rank."""
        found = self._by_value.get((offsets, sizes, rank))
        if found is None:
            found = self._by_value[offsets, sizes, rank] = ShardRecord(offsets, sizes, rank)
        return found

    def shard_list(self, shards: list[Shard]) -> tuple[Shard, ...]:
        """The one tuple of these shards, each of which is that of a record."""
        return self._lists.setdefault(tuple(map(id, shards)), tuple(shards))

    def find(self, data: bytes, start: int) -> Part | None:
        """The longest known part that a pickle spells from `start`; None where nothing is known."""
        if not self._chains:
            return None
        number = _number_at(data, start)
        for chain in self._near(number):
            index, rest = divmod(number - chain.first, NUMBERS)
            if rest or index >= len(chain.records):
                continue
            found = _same(chain, index, data, start)
            if found > index:
                return Part(number, chain.records[index:found], start + chain.ends[found] - chain.ends[index])
        return None

    def learn(self, part: Part, data: bytes, start: int, ends: Sequence[int]) -> None:
        """Remember a part that a pickle spells from `start`, and whose records end at `ends`."""
        self.learned += part.end - start
        if self.learned > self.limit:
            return
        chain = next((c for c in self._near(part.first) if c.past == part.first), None)
        if chain is None:
            chain = _Chain(part.first)
            self._chains.insert(bisect_right(self._chains, part.first, key=_first), chain)
        shift = chain.ends[-1] - start
        chain.records += part.records
        chain.spelled += data[start : part.end]
        chain.ends += [end + shift for end in ends]

    def _near(self, number: int) -> list[_Chain]:
        """The chains that may hold a memo number, or end before it."""
        place = bisect_right(self._chains, number, key=_first)
        return self._chains[max(0, place - MAX_OVERLAP) : place]


def _first(chain: _Chain) -> int:
    return chain.first


def _number_at(data: bytes, start: int) -> int:
    """The memo number of the record that begins at `start`: behind the fetch of its class, `)`, NEWOBJ and LONG_BINPUT.

    Source: the opcodes of protocol 2, which torch.save writes.
    """
    at = start + (5 if data[start : start + 1] == b"h" else 8)
    return int.from_bytes(data[at : at + 4], "little")


def _same(chain: _Chain, index: int, data: bytes, start: int) -> int:
    """One more than the last record of a chain, from `index` on, up to which a pickle spells the same from `start`."""

    def differs(count: int) -> bool:
        end = chain.ends[count]
        return data[start : start + end - begin] != chain.spelled[begin:end]

    begin, last = chain.ends[index], len(chain.records)
    if not differs(last):
        return last
    if differs(index + 1):
        return index
    return bisect_left(range(index + 1, last), True, key=differs) + index
