"""Records that are spelled alike, read in batches: shards of a ShardedTensor, and the entries of DCP metadata.

A large DCP has 100,000 chunks and more, and each takes about 45 opcodes to describe and 60 to place: nearly all of the
time that opening one would take. The machine meets the first of them opcode by opcode, as the first shard of a list;
the memo then says which number each word has, and a regular expression made from those numbers matches the others at C
speed. What is matched goes into the columns of a `ChunkBatch` or `PlaceBatch`, which lies in the list or dict of the
metadata in place of its entries.

This changes how fast a pickle is read and nothing else. The expressions admit exactly the opcodes that mean such an
entry. What an entry gives a memo number is counted and, names of tensors and files aside, not kept; a pickle that
fetches any of it again (Megatron's plans do), or does something else with entries than collect them, is
`UnusualError`, and the machine starts over, opcode by opcode.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, compress, islice, repeat
from operator import add, sub
from typing import Any, TypeVar
from weakref import proxy

from ckptools.model.regions import Ints
from ckptools.model.tree import Global, Opaque, of_kinds
from ckptools.pickles.machine_state import NUMBERS, MachineState, Stretch, UnusualError
from ckptools.pickles.objects import ChunkBatch, PlaceBatch, PlacementRecord, ShardRecord

# -- read the shard list of a ShardedTensor in batches -----------------------------------------------------------------
# Every ShardedTensor in every rank file lists the shards of all ranks: about 115 bytes and 40 opcodes a shard, so
# that one file of a 256-rank job holds tens of thousands of records that look alike. Once the machine has met one
# record, the memo says which number each of its words has, and a regular expression made from those numbers matches
# the others at C speed. A matched record becomes a `ShardRecord`, shared by all that say the same.
#
# This changes how fast a pickle is read and nothing else. The expression admits exactly the opcodes that mean such a
# record, every memo number in it must follow the one before, and later references to a record or its placement
# (sharding specs list them again) are answered from the run. Whatever else a pickle does with a skipped record is
# `UnusualError`, and the machine starts over, opcode by opcode.


RECORD_CLASS = "ShardMetadata"
PLACEMENT_CLASS = "_remote_device"
SHARD_WORDS = ("shard_offsets", "shard_sizes", "placement", "_worker_name", "_rank", "_device")

MAX_ATTEMPTS = 8
"""Searches of the memo for the words; in a real file the first record, or entry, has them all."""

PUT = rb"r(.{4})"
LONG = b"|".join(b"\\x%02x.{%d}" % (n, n) for n in (5, 4, 6, 7, 8, 1, 2, 3))
INT = rb"(?:K.|M..|J.{4}|\x8a(?:" + LONG + rb"))"
INTS = rb"((?:" + INT + rb"a|\((?:" + INT + rb"){1,64}e|))"
SHARD_TEXT = rb"X(?:" + b"|".join(b"\\x%02x\\0\\0\\0[\\w:/.-]{%d}" % (n, n) for n in range(1, 17)) + rb")" + PUT

MAX_MATCHED = 1 << 16
"""Records that are matched at once."""

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
        self._at_once = MAX_MATCHED
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

    def skip(self, start: int) -> tuple[Sequence[Any], int] | None:
        """Read the records from `start`, where their class is fetched; return them and where to go on.

        The opcodes would leave one value per record on the stack too.
        """
        pattern = self._pattern or self._learn()
        if pattern is None:
            return None
        read: list[Stretch] = []
        # One by one at first, for what another rank's pickle spells alike may go on behind a record of this rank.
        end, several = start, 1 if self.repeated.knows_some else self._at_once
        while part := self._known(end) or self._matched(pattern, end, several):
            if read and part.first != read[-1].past:
                break
            read.append(part)
            end, several = part.end, several * 2
        if not read:
            return None
        records = [record for part in read for record in part.records]
        self.machine.next_number = read[-1].past
        self.runs.append(ShardBatch(read[0].first, records))
        return records, end

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
            self._at_once = 1  # or each of them would be matched again with all that follow it
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

    def fetch(self, number: int, at: int) -> tuple[Sequence[Any], int]:
        """What a skipped record gave the memo number `number`, fetched by the opcode that ends at `at`.

        A sharding spec fetches the same of every record, one after the other; those are read at once.

        Returns:
            The values, and where to go on.

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
                values = run.records if which == 0 else [record.placement for record in run.records]
                return values, at + 5 * (len(run.records) - 1)
        record = run.records[index]
        return (record if which == 0 else record.placement,), at

    def _learn(self) -> re.Pattern[bytes] | None:
        """Make the pattern of a record from the memo numbers of its words; None before a record has been met."""
        gets: dict[str, bytes] = {}
        for number, value in self.machine.memo.items():
            if isinstance(value, str) and value in SHARD_WORDS:
                gets.setdefault(value, _get(number))
            elif isinstance(value, Global) and value.name in (RECORD_CLASS, PLACEMENT_CLASS, "device"):
                gets.setdefault(value.name, _get(number))
        if len(gets) < len(SHARD_WORDS) + 3:
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
        + gets["_device"] + gets["device"] + SHARD_TEXT + rb"(?:\x85|" + INT + rb"\x86)" + PUT + rb"R" + PUT + rb"ub"
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


# -- entries of DCP metadata, read in batches --------------------------------------------------------------------------


CHUNK, INDEX, PLACE, SIZE = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo", "Size"
CHUNK_WORDS = frozenset(("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"))

MAX_BATCH = 1 << 17
"""Bytes of entries between two looks at the machine's budgets, about 1,000 of them; Python ends its batches there."""

MAX_KNOWN = 100_000
"""Spellings of sizes, numbers and texts that are kept."""

BEGINNING, MAX_LISTS = 128, 1000
"""Bytes by which a list of chunks is recognised that was met before, and how many such lists are kept."""

MAX_SAME = 4
"""Memo numbers of one word that are tried: a tensor may be called `offset` too."""

BININT, LONG1 = b"J", b"\x8a"
"""Opcodes of numbers with a sign; the others have none."""

NEW = rb"\)\x81\x94\}\x94\("
TUPLE = rb"(\)|" + INT + rb"(?:\x85|" + INT + rb"(?:\x86|" + INT + rb"\x87))\x94|\((?:" + INT + rb"){4,64}t\x94)"
SIZE_OF = TUPLE + rb"\x85\x94R\x94"
NEW_TEXT = 0x8C
CHUNK_TEXT = rb"(h.|j.{4}|" + b"\\x%02x" % NEW_TEXT + rb".[ -~]*\x94)"
"""A text from the memo, or a short one of ASCII that is given a number; others are read opcode by opcode."""

ABSENT = b""
"""What `re` has in the place of a group that matched nothing."""

GOES_ON = b"h", b"j", b"\x95"
"""Opcodes behind a batch where another entry begins, or a frame."""

CHUNK_NUMBERS, FEWER = 7, {ABSENT: 4, b")": 6}
"""Memo numbers that an index and its place take, by how the offset is spelled; each new text takes one more."""

FQN = 2
"""Index of the fqn in the memo entries of an index."""

Kept = tuple["array[int]", list[str]]
"""New texts of a batch, with their memo numbers, which ascend."""

Entries = tuple[tuple[ChunkBatch | PlaceBatch, ...], int, int]
"""What entries leave on the stack, where the next opcode is, and how many they are."""

COLLECTS = {CHUNK: (b"a", b"e"), INDEX: (b"s", b"u")}
"""Opcodes that collect one entry, and several."""


class ChunkReader:
    """Reads batches of entries for one machine.

    Attributes:
        trigger: the class whose fetch from the memo begins an entry; None while no entry can begin.
        runs: whether any entry was read so.
    """

    def __init__(self, machine: MachineState, fast: bool) -> None:
        self.machine: MachineState = proxy(machine)  # no cycle: a machine goes when its file has been read
        self.trigger: Global | None = None
        self.runs = False
        self._uncounted = 0
        self._attempts = MAX_ATTEMPTS if fast else 0
        self._patterns: dict[str, re.Pattern[bytes]] = {}
        self._sizes = _Known[bytes, Ints](ints_of)
        self._lengths = _Known[bytes, int](lambda data: ints_of(data)[0])
        self._texts = _Known[bytes, str](partial(ChunkReader._text, proxy(self)))
        self._lists: dict[bytes, tuple[bytes, ChunkBatch, int]] = {}
        """By their beginnings, lists of chunks as they are spelled, and how many memo numbers they take."""
        self._kept: tuple[list[Kept], list[Kept]] = [], []

    def meet(self, name: Global) -> None:
        """Take note of a class that the pickle names for the first time."""
        if name.name in (CHUNK, INDEX) and self._attempts:
            self.trigger = name

    def stop(self) -> None:
        """Read nothing in batches from here on: the pickle gives memo numbers again, so that no number is sure.

        Raises:
            UnusualError: something has been read so already.
        """
        if self.runs:
            raise UnusualError("a memo number given again")
        self.trigger, self._attempts = None, 0

    def uncounted(self) -> int:
        """The number of memo entries that are not kept."""
        return self._uncounted

    def has_unresolved_records(self, tree: Any) -> bool:
        """Whether a batch stands in an unexpected place; the metadata's reader knows them all."""
        return False

    def fetch(self, number: int, at: int) -> tuple[Sequence[Any], int]:
        """The text that an entry gave the memo number `number`, and where to go on.

        Raises:
            UnusualError: it may be something inside of an entry.
            KeyError: nothing has this number.
        """
        if not self.runs:
            raise KeyError(number)
        text = self._text_at(number)
        if text is None:
            raise UnusualError("a reference into an entry")
        return (text,), at

    def skip(self, start: int) -> tuple[Sequence[Any], int] | None:
        """Read the entries from `start`, where their class is fetched; return what to push and where to go on.

        The opcodes would leave one value for a chunk on the stack, two for an index and its place. This leaves a batch
        for all of them, and a batch of places as a key and as its value.

        Raises:
            UnusualError: something else is done with the entries than to collect them.
        """
        machine, trigger = self.machine, self.trigger
        if trigger is None or machine.next_number != len(machine.memo) + self._uncounted:
            return None
        pattern = self._patterns.get(trigger.name) or self._learn(trigger.name)
        if pattern is None:
            return None
        found = (self._chunks if trigger.name == CHUNK else self._places)(pattern, start)
        if found is None:
            return None
        values, end, count = found
        self.runs = True
        one, several = COLLECTS[trigger.name]
        behind = machine.data[end : end + 1]
        if behind not in (*GOES_ON, several) and not (behind == one and count == 1):
            raise UnusualError("entries that are not collected")
        self._uncounted = machine.next_number - len(machine.memo)
        return values, end

    def _chunks(self, pattern: re.Pattern[bytes], start: int) -> Entries | None:
        """The chunks from `start` on: tensors that are cut alike have equal lists, each of which is read once."""
        data = self.machine.data
        beginning = data[start : start + BEGINNING]
        spelled, batch, numbers = self._lists.get(beginning, (b"", None, 0))
        if batch is None or not data.startswith(spelled, start):
            wholes, *columns = _adjacent(pattern, data, start)
            if not wholes:
                return None
            offsets, sizes = columns
            known = self._sizes.__getitem__
            batch = ChunkBatch(list(map(known, offsets)), list(map(known, sizes)))
            spelled, numbers = b"".join(wholes), 8 * len(offsets) - offsets.count(b")") - sizes.count(b")")
            if len(self._lists) >= MAX_LISTS:
                self._lists.clear()
            self._lists[beginning] = spelled, batch, numbers
        self.machine.next_number += numbers
        return (batch,), start + len(spelled), len(batch.offsets)

    def _places(self, pattern: re.Pattern[bytes], start: int) -> Entries | None:
        """The indices with their places from `start` on; keeps the texts that they give memo numbers."""
        wholes, *columns = _adjacent(pattern, self.machine.data, start)
        if not wholes:
            return None
        fqns, offsets, files, starts, lengths = columns
        self._keep_texts(fqns, offsets, files)
        text, size, length = self._texts.__getitem__, self._sizes.__getitem__, self._lengths.__getitem__
        at: list[Ints | None] = list(map(size, offsets))
        if ABSENT in offsets:
            at = [None if offset == ABSENT else known for offset, known in zip(offsets, at, strict=True)]
        names, paths = list(map(text, fqns)), list(map(text, files))
        batch = PlaceBatch(names, at, paths, _numbers(starts), list(map(length, lengths)))
        return (batch, batch), start + sum(map(len, wholes)), len(wholes)

    def _keep_texts(self, fqns: Sequence[bytes], offsets: Sequence[bytes], files: Sequence[bytes]) -> None:
        """Count what indices and their places give memo numbers, and keep those that are new texts."""
        new_fqns = [spelled[0] == NEW_TEXT for spelled in fqns]
        new_files = [spelled[0] == NEW_TEXT for spelled in files]
        takes = map(add, map(FEWER.get, offsets, repeat(CHUNK_NUMBERS)), map(add, new_fqns, new_files))
        numbers = list(accumulate(takes, initial=self.machine.next_number))
        of_files = map(sub, islice(numbers, 1, None), repeat(1))  # the last that a place has
        for kept, at, new, texts in (
            (self._kept[0], map(add, numbers, repeat(FQN)), new_fqns, fqns),
            (self._kept[1], of_files, new_files, files),
        ):
            if any(new):
                kept.append((array("Q", compress(at, new)), list(map(self._texts.__getitem__, compress(texts, new)))))
        self.machine.next_number = numbers[-1]

    def _text_at(self, number: int) -> Any:
        """What the memo has at a number; None where that is nothing, or no text of an entry."""
        for kept in self._kept:
            at = bisect_right(kept, number, key=lambda batch: batch[0][0]) - 1
            numbers, texts = kept[at] if at >= 0 else ((), ())
            place = bisect_left(numbers, number)
            if place < len(numbers) and numbers[place] == number:
                return texts[place]
        return self.machine.memo.get(number)

    def _text(self, spelled: bytes) -> str:
        """A text as it is spelled, or as the memo has it.

        Raises:
            UnusualError: the memo has no text there, or it says another length.
        """
        if spelled[0] == NEW_TEXT:
            if spelled[1] != len(spelled) - 3:
                raise UnusualError("a text of another length than stated")
            return spelled[2:-1].decode("ascii")
        value = self._text_at(int.from_bytes(spelled[1:], "little"))
        if type(value) is not str:
            raise UnusualError("a name that is no text")
        return value

    def _learn(self, which: str) -> re.Pattern[bytes] | None:
        """Make the pattern of an entry from the memo numbers of its words; None before one has been met."""
        numbers: dict[str, list[bytes]] = {}
        for number, value in self.machine.memo.items():
            name = value.name if isinstance(value, Global) else value if type(value) is str else ""
            if name in CHUNK_WORDS if type(value) is str else name in (CHUNK, INDEX, PLACE, SIZE):
                numbers.setdefault(name, []).append(_short_get(number))
        gets = {name: b"(?:" + b"|".join(same[:MAX_SAME]) + b")" for name, same in numbers.items()}
        try:
            spelled = _chunk(gets) if which == CHUNK else _place(gets)
        except KeyError:
            self._attempts -= 1
            if not self._attempts:
                self.trigger = None
            return None
        self._patterns[which] = re.compile(b"(" + spelled + b")|.+", re.DOTALL)
        return self._patterns[which]


K = TypeVar("K")
V = TypeVar("V")


class _Known(dict[K, V]):
    """Values by how they are spelled, each made once."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make

    def __missing__(self, spelled: K) -> V:
        if len(self) >= MAX_KNOWN:
            self.clear()
        value = self[spelled] = self._make(spelled)
        return value


def _adjacent(pattern: re.Pattern[bytes], data: bytes, start: int) -> Sequence[Sequence[bytes]]:
    """The columns of entries that follow each other from `start` on: each entry, and its groups.

    What is no entry matches up to the end, with empty groups.
    """
    entries = pattern.findall(data, start, start + MAX_BATCH)
    if entries and not entries[-1][0]:
        entries.pop()
    return list(zip(*entries, strict=True)) or [()]


def _numbers(column: Sequence[bytes]) -> list[int]:
    """The numbers of a column in which few are equal: the places of items in a file."""
    joined, read = b"".join(column), int.from_bytes
    if joined[::5] == BININT * len(column) and len(joined) == 5 * len(column):
        return list(struct.unpack("<" + "xi" * len(column), joined))
    return [
        read(data[2:], "little", signed=True) if data[:1] == LONG1
        else read(data[1:], "little", signed=data[:1] == BININT)
        for data in column
    ]  # fmt: skip


def _chunk(gets: dict[str, bytes]) -> bytes:
    """The opcodes of a chunk whose words and classes are fetched by `gets`."""
    return gets[CHUNK] + NEW + gets["offsets"] + gets[SIZE] + SIZE_OF + gets["sizes"] + gets[SIZE] + SIZE_OF + b"ub"


def _place(gets: dict[str, bytes]) -> bytes:
    """The opcodes of an index and its place."""
    offset = gets["offset"] + b"(?:N|" + gets[SIZE] + SIZE_OF + b")"
    number = b"(" + INT + b")"
    return (
        gets[INDEX] + NEW + gets["fqn"] + CHUNK_TEXT + gets["index"] + b"(?:N|" + INT + b")(?:" + offset + b")?ub"
        + gets[PLACE] + NEW + gets["relative_path"] + CHUNK_TEXT
        + gets["offset"] + number + gets["length"] + number + b"ub"
    )  # fmt: skip


def _short_get(number: int) -> bytes:
    """The opcode that fetches a memo entry, as a pattern."""
    return re.escape(b"h" + bytes([number])) if number < 256 else re.escape(b"j" + number.to_bytes(4, "little"))
