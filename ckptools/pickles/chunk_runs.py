"""The entries of DCP metadata, read in batches.

A large DCP has 100,000 chunks and more, and each takes about 45 opcodes to describe and 60 to place: nearly all of
the time that opening one would take. As in `shard_runs` the machine meets the first of them opcode by opcode; the memo
then says which number each word has, and a regular expression made from those numbers matches the others at C speed.
What is matched goes into the columns of a `ChunkBatch` or `PlaceBatch`, which lies in the list or dict of the metadata
in place of its entries.

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
from ckptools.model.values import Global
from ckptools.pickles.machine_state import MachineState, UnusualError
from ckptools.pickles.objects import ChunkBatch, PlaceBatch
from ckptools.pickles.shard_runs import INT, ints_of

CHUNK, INDEX, PLACE, SIZE = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo", "Size"
WORDS = frozenset(("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"))

MAX_ATTEMPTS = 8
"""Searches of the memo for the words; in a real file the first entry has them all."""

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
TEXT = rb"(h.|j.{4}|" + b"\\x%02x" % NEW_TEXT + rb".[ -~]*\x94)"
"""A text from the memo, or a short one of ASCII that is given a number; others are read opcode by opcode."""

ABSENT = b""
"""What `re` has in the place of a group that matched nothing."""

GOES_ON = b"h", b"j", b"\x95"
"""Opcodes behind a batch where another entry begins, or a frame."""

NUMBERS, FEWER = 7, {ABSENT: 4, b")": 6}
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

    def fetch(self, number: int, at: int) -> int:
        """Push the text that an entry gave the memo number `number`.

        Raises:
            UnusualError: it may be something inside of an entry.
            KeyError: nothing has this number.
        """
        if not self.runs:
            raise KeyError(number)
        text = self._text_at(number)
        if text is None:
            raise UnusualError("a reference into an entry")
        self.machine.stack.append(text)
        return at

    def skip(self, start: int, at: int) -> int:
        """Read the entries from `start`, where the class has just been fetched; return where to go on.

        The opcodes would leave one value for a chunk on the stack, two for an index and its place. This leaves a batch
        for all of them, and a batch of places as a key and as its value.

        Raises:
            UnusualError: something else is done with the entries than to collect them.
        """
        machine, trigger = self.machine, self.trigger
        if trigger is None or machine.next_number != len(machine.memo) + self._uncounted:
            return at
        pattern = self._patterns.get(trigger.name) or self._learn(trigger.name)
        if pattern is None:
            return at
        found = (self._chunks if trigger.name == CHUNK else self._places)(pattern, start)
        if found is None:
            return at
        values, end, count = found
        self.runs = True
        one, several = COLLECTS[trigger.name]
        behind = machine.data[end : end + 1]
        if behind not in (*GOES_ON, several) and not (behind == one and count == 1):
            raise UnusualError("entries that are not collected")
        machine.pop()
        machine.stack += values
        self._uncounted = machine.next_number - len(machine.memo)
        machine.check_sizes()
        return end

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
        takes = map(add, map(FEWER.get, offsets, repeat(NUMBERS)), map(add, new_fqns, new_files))
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
            if name in WORDS if type(value) is str else name in (CHUNK, INDEX, PLACE, SIZE):
                numbers.setdefault(name, []).append(_get(number))
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
        gets[INDEX] + NEW + gets["fqn"] + TEXT + gets["index"] + b"(?:N|" + INT + b")(?:" + offset + b")?ub"
        + gets[PLACE] + NEW + gets["relative_path"] + TEXT
        + gets["offset"] + number + gets["length"] + number + b"ub"
    )  # fmt: skip


def _get(number: int) -> bytes:
    """The opcode that fetches a memo entry, as a pattern."""
    return re.escape(b"h" + bytes([number])) if number < 256 else re.escape(b"j" + number.to_bytes(4, "little"))
