"""What the pickles of one checkpoint's ranks repeat, recognised by its bytes: shard records, tuples of ints, arrays.

Every rank file lists the shards of all ranks for every ShardedTensor. Apart from the rank's own shard, which has its
place elsewhere in the pickle, the files of neighbouring ranks spell those lists byte for byte alike, memo numbers
included. So what `shard_runs` has matched once need only be compared afterwards, which costs a hundredth.

The same bytes mean the same only where the words in them have the same memo numbers. Those are what the pattern of a
record is made from, so what was learned with one pattern is for pickles that have the same.

Where ranks gather their random states, every file has those of all: of 256 ranks 65,536 states of 625 ints and as many
arrays of 2.5 kB, of which 256 differ. Only immutable values are shared: tuples of ints, and bytes.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptools.model.regions import Ints
from ckptools.model.shard import Shard
from ckptools.pickles.objects import ShardRecord

NUMBERS = 10
"""Memo entries that a record makes: of them the first is the record itself."""

MAX_KEPT = 128 << 20
"""Bytes of pickle that are remembered per checkpoint; others are read as if they were new."""

MAX_RECORDS = 1 << 20
"""Distinct records that are remembered from one file to the next."""

MAX_OVERLAP = 4
"""Chains that are searched for one memo number: usually two, before and behind a rank's own place in a list."""


class Stretch(NamedTuple):
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
    """The records that the pickles of one checkpoint's ranks repeat; one is handed from file to file.

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

    def find(self, data: bytes, start: int) -> Stretch | None:
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
                return Stretch(number, chain.records[index:found], start + chain.ends[found] - chain.ends[index])
        return None

    def learn(self, part: Stretch, data: bytes, start: int, ends: Sequence[int]) -> None:
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


# -- large values -----------------------------------------------------------------------------------------------------


MAX_VALUES_KEPT = 64 << 20
"""Bytes of pickle whose values are remembered of one checkpoint; what goes beyond is made anew."""

HEAD = 32
"""Bytes by which a tuple is found before it is compared."""

MIN_BYTES = 256
"""Shorter bytes cost more to remember than to hold again."""


class RepeatedValues:
    """The values that are shared; one is handed from file to file.

    Args:
        limit: bytes of pickle that are remembered; 0 for a file that is read alone.
    """

    def __init__(self, limit: int = MAX_VALUES_KEPT) -> None:
        self._left = limit
        self._tuples: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self._by_head: dict[bytes, bytes] = {}
        self._bytes: dict[bytes, bytes] = {}

    def tuple_at(self, data: bytes, at: int) -> bytes | None:
        """The bytes of a known tuple that a pickle spells at `at`, up to its TUPLE; None where there is none."""
        spelled = self._by_head.get(data[at : at + HEAD])
        return spelled if spelled is not None and data.startswith(spelled, at) else None

    def of_tuple(self, spelled: bytes, times: int) -> tuple[int, ...]:
        """The tuple of ints that a run and its TUPLE spell; `times` counts how often this file has spelled it.

        No two places in one file share one: trees are judged by how much of them is shared (`model.tree`), and
        the pickle shares nothing here.
        """
        known = self._tuples.get((spelled, times))
        if known is None:
            known = ints_of_run(spelled[:-1])
            if self._room(spelled):
                self._tuples[spelled, times] = known
                self._by_head[spelled[:HEAD]] = spelled
        return known

    def of_bytes(self, data: bytes) -> bytes:
        """The one object for these bytes."""
        known = self._bytes.get(data, data) if len(data) >= MIN_BYTES else data
        if known is data and len(data) >= MIN_BYTES and self._room(data):
            self._bytes[data] = data
        return known

    def _room(self, spelled: bytes) -> bool:
        self._left -= len(spelled)
        return self._left >= 0


# -- ints that follow each other --------------------------------------------------------------------------------------

# Every rank file of a job that gathers its random states holds those of all ranks, and each has 624 numbers of Python's
# generator: of 256 ranks 160,000 opcodes, half of the pickle. An int means the same wherever it stands, takes no memo
# number and refers to nothing, so one regular expression recognises a run of them and `struct` decodes it. A tuple that
# is nothing but such a run is one object for all ranks' files that spell it alike.
#
# This changes how fast a pickle is read and nothing else. Ints of other widths, runs of a few, and those that begin
# with a small int, as sizes do, are left to the handlers of single opcodes. Source: Lib/pickletools.py (BININT1,
# BININT2, BININT, LONG1, TUPLE).

MIN_RUN = 8
"""Ints that are worth it."""

MAX_RUN = 1000
"""Ints between two looks at the machine's budgets; a pickle of Python's ends its batches here too."""

RUN = re.compile(rb"(?:J.{4}|\x8a\x05.{4}\0|\x8a\x08.{8}|K.|M..){%d,%d}" % (MIN_RUN, MAX_RUN), re.DOTALL)

_INT = re.compile(rb"([JKM]|\x8a[\x05\x08])(?:(?<=J).{4}|(?<=\x05).{5}|(?<=\x08).{8}|(?<=K).|(?<=M)..)", re.DOTALL)
"""One int of a run, as its opcode; LONG1 with its length."""

_FORMS = ((b"\x8a\x05", b"xxLx"), (b"\x8a\x08", b"xxq"), (b"K", b"xB"), (b"M", b"xH"), (b"J", b"xi"))
"""The `struct` form of each. A LONG1 of 5 bytes whose last is zero holds 32 bits without a sign."""


def ints_of_run(spelled: bytes) -> tuple[int, ...]:
    """The ints that a run of opcodes pushes."""
    form = b"".join(_INT.findall(spelled))
    for opcode, of_struct in _FORMS:
        form = form.replace(opcode, of_struct)
    return struct.unpack(b"<" + form, spelled)
