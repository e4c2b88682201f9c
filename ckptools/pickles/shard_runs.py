"""Read the shard list of a ShardedTensor in batches.

Every ShardedTensor in every rank file lists the shards of all ranks: about 115 bytes and 40 opcodes a shard, so
that one file of a 256-rank job holds tens of thousands of records that look alike. Once the machine has met one
record, the memo says which number each of its words has, and a regular expression made from those numbers matches
the others at C speed. A matched record becomes a `ShardRecord`, shared by all that say the same.

This changes how fast a pickle is read and nothing else. The expression admits exactly the opcodes that mean such a
record, every memo number in it must follow the one before, and later references to a record or its placement
(sharding specs list them again) are answered from the run. Whatever else a pickle does with a skipped record is
`UnusualError`, and the machine starts over, opcode by opcode.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from typing import Any
from weakref import proxy

from ckptools.model.regions import Ints
from ckptools.model.tree import of_kinds
from ckptools.model.values import Global, Opaque
from ckptools.pickles.machine_state import MachineState, UnusualError
from ckptools.pickles.objects import PlacementRecord, ShardRecord
from ckptools.pickles.repeated import NUMBERS, Stretch

RECORD_CLASS = "ShardMetadata"
PLACEMENT_CLASS = "_remote_device"
WORDS = ("shard_offsets", "shard_sizes", "placement", "_worker_name", "_rank", "_device")

MAX_ATTEMPTS = 8
"""Searches of the memo for the words; in a real file the first record has them all."""

PUT = rb"r(.{4})"
LONG = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in (5, 4, 6, 7, 8, 1, 2, 3))
INT = rb"(?:K.|M..|J.{4}|\x8a(?:" + LONG + rb"))"
INTS = rb"((?:" + INT + rb"a|\((?:" + INT + rb"){1,64}e|))"
TEXT = rb"X(?:" + b"|".join(b"\\x%02x\\0\\0\\0[\\w:/.-]{%d}" % (n, n) for n in range(1, 17)) + rb")" + PUT

PLACEMENT = 4
"""Index of the placement in a record's memo entries."""


class ShardBatch:
    """Records that followed each other.

    Attributes:
        first: memo number of the first record.
        records: the records.
        listed: 0 when the records were looked for in a row, `PLACEMENT` when their placements were.
    """

    __slots__ = ("first", "listed", "records")

    def __init__(self, first: int, records: list[ShardRecord]) -> None:
        self.first = first
        self.records = records
        self.listed: set[int] = set()


class RunReader:
    """Skips runs of shard records for one machine.

    Attributes:
        trigger: the class whose fetch from the memo begins a record; None while no record can begin.
        runs: what was skipped.
        repeated: what the pickles of other ranks have spelled.
    """

    def __init__(self, machine: MachineState, fast: bool) -> None:
        self.machine: MachineState = proxy(machine)  # no cycle: a machine goes when its file has been read
        self.trigger: Global | None = None
        self.runs: list[ShardBatch] = []
        self._attempts = MAX_ATTEMPTS if fast else 0
        self._pattern: re.Pattern[bytes] | None = None
        self.repeated = machine.repeated

    def meet(self, name: Global) -> None:
        """Take note of a class that the pickle names for the first time."""
        if name.name == RECORD_CLASS and self._attempts:
            self.trigger = name

    def stop(self) -> None:
        """Skip nothing from here on: the pickle gives memo numbers again, so that no number is sure.

        Raises:
            UnusualError: something has been skipped already.
        """
        if self.runs:
            raise UnusualError("a memo number given again")
        self.trigger, self._attempts = None, 0

    def skip(self, start: int, at: int) -> int:
        """Read the records from `start`, where the class has just been fetched; return where to go on.

        The opcodes would leave one value per record on the stack; so does this.
        """
        pattern = self._pattern or self._learn()
        if pattern is None:
            return at
        read: list[Stretch] = []
        end, several = start, 1
        while part := self._known(end) or self._matched(pattern, end, several):
            if read and part.first != read[-1].past:
                break
            read.append(part)
            end, several = part.end, several * 2
        if not read:
            return at
        records = [record for part in read for record in part.records]
        self.machine.next_number = read[-1].past
        self.runs.append(ShardBatch(read[0].first, records))
        self.machine.pop()
        self.machine.stack.extend(records)
        return end

    def _known(self, start: int) -> Stretch | None:
        """Records that another rank's pickle spells in the same bytes."""
        part = self.repeated.find(self.machine.data, start)
        return part if part is not None and part.first >= self.machine.next_number else None

    def _matched(self, pattern: re.Pattern[bytes], start: int, several: int) -> Stretch | None:
        """The next records that the pattern matches, at most `several`; None where their numbers are not in a row."""
        data, end, known = self.machine.data, start, self.repeated.records
        records: list[ShardRecord] = []
        numbers: list[bytes] = []
        ends: list[int] = []
        while len(records) < several and (found := pattern.match(data, end)):
            n0, n1, n2, offsets, n3, sizes, n4, n5, rank, n6, n7, n8, n9 = found.groups()
            numbers.append(b"".join((n0, n1, n2, n3, n4, n5, n6, n7, n8, n9)))
            record = known.get((offsets, sizes, rank))
            if record is None:
                record = self.repeated.record(ints_of(offsets), ints_of(sizes), ints_of(rank)[0])
                known[offsets, sizes, rank] = record
            records.append(record)
            end = found.end()
            ends.append(end)
        first = self._first_number(numbers) if records else None
        if first is None:
            return None
        part = Stretch(first, records, end)
        self.repeated.learn(part, data, start, ends)
        return part

    def _first_number(self, numbers: list[bytes]) -> int | None:
        """The first memo number of records; None when they do not all follow each other and those before."""
        first = int.from_bytes(numbers[0][:4], "little")
        past = first + NUMBERS * len(numbers)
        if first < self.machine.next_number or past > 1 << 32:
            return None
        if b"".join(numbers) != struct.pack(f"<{past - first}I", *range(first, past)):
            return None
        return first

    def uncounted(self) -> int:
        """The number of memo entries that are not kept: 0 if nothing was skipped.

        Raises:
            UnusualError: something was skipped, so that it is unknown.
        """
        if self.runs:
            raise UnusualError("numbers by counting, and skipped records were not counted")
        return 0

    def has_unresolved_records(self, tree: Any) -> bool:
        """Whether a skipped record stands anywhere but in a ShardedTensor."""
        return bool(self.runs) and _leaks(tree, set(self.machine.flat))

    def fetch(self, number: int, at: int) -> int:
        """Push what a skipped record gave the memo number `number`, fetched by the opcode that ends at `at`.

        A sharding spec fetches the same of every record, one after the other; those are pushed at once.

        Returns:
            Where to go on.

        Raises:
            KeyError: nothing has this number.
            UnusualError: it is something inside a record.
        """
        place = bisect_right(self.runs, number, key=lambda run: run.first) - 1
        if place < 0:
            raise KeyError(number)
        run = self.runs[place]
        index, which = divmod(number - run.first, NUMBERS)
        if index >= len(run.records):
            raise KeyError(number)
        if which not in (0, PLACEMENT):
            raise UnusualError("a reference into a skipped record")
        if index == 0 and which not in run.listed:
            run.listed.add(which)
            stop = number + NUMBERS * len(run.records)
            if _fetches(self.machine.data, at - 5, range(number, stop, NUMBERS)):
                self.machine.stack.extend(run.records if which == 0 else [r.placement for r in run.records])
                return at + 5 * (len(run.records) - 1)
        record = run.records[index]
        self.machine.stack.append(record if which == 0 else record.placement)
        return at

    def _learn(self) -> re.Pattern[bytes] | None:
        """Make the pattern of a record from the memo numbers of its words; None before a record has been met."""
        gets: dict[str, bytes] = {}
        for number, value in self.machine.memo.items():
            if isinstance(value, str) and value in WORDS:
                gets.setdefault(value, _get(number))
            elif isinstance(value, Global) and value.name in (RECORD_CLASS, PLACEMENT_CLASS, "device"):
                gets.setdefault(value.name, _get(number))
        if len(gets) < len(WORDS) + 3:
            self._attempts -= 1
            if not self._attempts:
                self.trigger = None
            return None
        spelled = _record(gets)
        self.repeated.begin(spelled)
        self._pattern = re.compile(spelled, re.DOTALL)
        return self._pattern


def _fetches(data: bytes, start: int, numbers: range) -> bool:
    """Whether a pickle fetches these memo numbers from `start` on, each by LONG_BINGET and nothing between them."""
    found = data[start : start + 5 * len(numbers)]
    expected = struct.pack(f"<{len(numbers)}I", *numbers)
    opcodes, *columns = (found[i::5] for i in range(5))
    return opcodes == b"j" * len(numbers) and all(columns[i] == expected[i::4] for i in range(4))


def _record(gets: dict[str, bytes]) -> bytes:
    """The opcodes of a record whose words and classes are fetched by `gets`."""
    new = rb"\)\x81" + PUT
    placement = (
        gets[PLACEMENT_CLASS] + new + rb"\}" + PUT + rb"\("
        + gets["_worker_name"] + rb"N" + gets["_rank"] + rb"(" + INT + rb")"
        + gets["_device"] + gets["device"] + TEXT + rb"(?:\x85|" + INT + rb"\x86)" + PUT + rb"R" + PUT + rb"ub"
    )  # fmt: skip
    return (
        gets[RECORD_CLASS] + new + rb"N\}" + PUT + rb"\("
        + gets["shard_offsets"] + rb"\]" + PUT + INTS
        + gets["shard_sizes"] + rb"\]" + PUT + INTS
        + gets["placement"] + placement + rb"u\x86" + PUT + rb"b"
    )  # fmt: skip


def _get(number: int) -> bytes:
    """The opcode that fetches a memo entry, as a pattern."""
    wide = b"j" + number.to_bytes(4, "little")
    return re.escape(b"h" + bytes([number])) if number < 256 else re.escape(wide)


def ints_of(data: bytes) -> Ints:
    """The ints of a list body or a single int opcode."""
    values: list[int] = []
    at, end = 0, len(data)
    while at < end:
        code = data[at]
        if code == 0x4B:  # K: one byte
            values.append(data[at + 1])
            at += 2
        elif code in _WIDTHS:
            width = _WIDTHS[code]
            values.append(int.from_bytes(data[at + 1 : at + 1 + width], "little", signed=code == 0x4A))
            at += 1 + width
        elif code == 0x8A:  # LONG1: its own length
            width = data[at + 1]
            values.append(int.from_bytes(data[at + 2 : at + 2 + width], "little", signed=True))
            at += 2 + width
        else:  # a mark, an append
            at += 1
    return tuple(values)


_WIDTHS = {0x4D: 2, 0x4A: 4}


def _leaks(tree: Any, seen: set[int]) -> bool:
    stack = of_kinds([tree], _ENTERED)
    while stack:
        node = stack.pop()
        if isinstance(node, _RECORDS):
            return True
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            stack += of_kinds(node.keys(), _ENTERED) + of_kinds(node.values(), _ENTERED)
        else:
            stack += of_kinds([*node.parts()] if isinstance(node, Opaque) else node, _ENTERED)
    return False


_RECORDS = (ShardRecord, PlacementRecord)
_ENTERED = (*_RECORDS, dict, list, tuple, set, frozenset, Opaque)
