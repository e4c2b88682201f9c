"""The entries of DCP metadata, read in runs.

A large DCP has 100,000 chunks and more, and each takes about 45 opcodes to describe and 60 to place: four fifths of
the time that opening one would take. As in `shard_runs` the machine meets the first of them opcode by opcode; the memo
then says which number each word has, and a regular expression made from those numbers matches the others at C speed.
A matched entry becomes a `ChunkRecord`, an `IndexRecord` or a `PlaceRecord`.

This changes how fast a pickle is read and nothing else. The expressions admit exactly the opcodes that mean such an
entry. What an entry gives a memo number is counted and, names of tensors and files aside, not kept; a pickle that
fetches any of it again (Megatron's plans do) is `UnusualError`, and the machine starts over, opcode by opcode.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import proxy

from ckptools.model.regions import Box, Ints
from ckptools.model.values import Global
from ckptools.pickles.limits import UnusualError
from ckptools.pickles.machine_state import MachineState
from ckptools.pickles.run_records import ChunkRecord, IndexRecord, PlaceRecord
from ckptools.pickles.shard_runs import INT, ints_of

CHUNK, INDEX, PLACE, SIZE = "ChunkStorageMetadata", "MetadataIndex", "_StorageInfo", "Size"
WORDS = frozenset(("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"))

MAX_ATTEMPTS = 8
"""How often the words are looked for in the memo; in a real file the first entry has them all."""

MAX_RUN = 1000
"""Entries between two looks at the machine's budgets; a pickle of Python's ends its batches here too."""

MAX_SAME = 4
"""Memo numbers of one word that are tried: a tensor may be called `offset` too."""

NEW = rb"\)\x81\x94\}\x94\("
TUPLE = (
    rb"(\)|" + INT + rb"\x85\x94|(?:" + INT + rb"){2}\x86\x94|(?:" + INT + rb"){3}\x87\x94"
    rb"|\((?:" + INT + rb"){4,64}t\x94)"
)
SIZE_OF = TUPLE + rb"\x85\x94R\x94"
TEXT = rb"(?:h(.)|j(.{4})|\x8c(.))"


class ChunkReader:
    """Reads runs of entries for one machine.

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
        self._patterns: dict[str, list[re.Pattern[bytes]]] = {}
        self._sizes: dict[bytes, Ints] = {}
        self._chunks: dict[tuple[bytes, bytes], ChunkRecord] = {}
        self._texts: dict[bytes, str] = {}

    def meet(self, name: Global) -> None:
        """Take note of a class that the pickle names for the first time."""
        if name.name in (CHUNK, INDEX) and self._attempts:
            self.trigger = name

    def stop(self) -> None:
        """Read nothing in runs from here on: the pickle gives memo numbers again, so that no number is sure.

        Raises:
            UnusualError: something has been read so already.
        """
        if self.runs:
            raise UnusualError("a memo number given again")
        self.trigger, self._attempts = None, 0

    def uncounted(self) -> int:
        """How many memo numbers were given to what is not kept."""
        return self._uncounted

    def has_unresolved_records(self, tree: Any) -> bool:
        """Whether a record stands where nobody knows what it is; the metadata's reader knows them."""
        return False

    def fetch(self, number: int, at: int) -> int:
        """Refuse a fetch of what the memo does not have.

        Raises:
            UnusualError: it may be something inside of an entry.
            KeyError: nothing has this number.
        """
        if self.runs:
            raise UnusualError("a reference into an entry")
        raise KeyError(number)

    def skip(self, start: int, at: int) -> int:
        """Read the entries from `start`, where the class has just been fetched; return where to go on.

        The opcodes would leave one value for a chunk on the stack, two for an index and its place; so does this.
        """
        machine, trigger = self.machine, self.trigger
        if trigger is None or machine.next_number != len(machine.memo) + self._uncounted:
            return at
        patterns = self._patterns.get(trigger.name) or self._learn(trigger.name)
        if patterns is None:
            return at
        read = self._read_chunks if trigger.name == CHUNK else self._read_places
        of_class = machine.pop()
        number, end = read(start, patterns, machine.next_number)
        if end == start:
            machine.stack.append(of_class)
            return at
        self.runs = True
        self._uncounted = number - len(machine.memo)
        machine.next_number = number
        machine.check_sizes()
        return end

    def _read_chunks(self, end: int, patterns: list[re.Pattern[bytes]], number: int) -> tuple[int, int]:
        """Put chunks on the stack; return the next memo number, and where to go on."""
        data, stack, known, match = self.machine.data, self.machine.stack, self._chunks, patterns[0].match
        for _ in range(MAX_RUN):
            found = match(data, end)
            if found is None:
                break
            offsets, sizes = key = found[1], found[2]
            record = known.get(key)
            if record is None:
                record = known[key] = ChunkRecord(Box(self._ints(offsets), self._ints(sizes)))
            stack.append(record)
            number += 8 - (offsets == b")") - (sizes == b")")
            end = found.end()
        return number, end

    def _read_places(self, end: int, patterns: list[re.Pattern[bytes]], number: int) -> tuple[int, int]:
        """Put pairs of an index and its place on the stack; return the next memo number, and where to go on."""
        data, stack = self.machine.data, self.machine.stack
        first, second, third = (p.match for p in patterns)
        for _ in range(MAX_RUN):
            new: list[tuple[int, str]] = []
            a = first(data, end)
            fqn, at, n = self._text(a, number + 2, new)
            b = second(data, at) if fqn is not None else None
            if b is None or fqn is None:
                break
            index, offset = IndexRecord(fqn, None if b[1] is None else self._ints(b[1])), b[1]
            n += 2 if offset is None else 4 if offset == b")" else 5
            file, at, n = self._text(b, n, new, 1)
            c = third(data, at) if file is not None else None
            if c is None or file is None:
                break
            stack += (index, PlaceRecord(file, *ints_of(c[1]), *ints_of(c[2])))
            self.machine.memo.update(new)
            number, end = n, c.end()
        return number, end

    def _text(
        self, found: re.Match[bytes] | None, number: int, new: list[tuple[int, str]], skip: int = 0
    ) -> tuple[str | None, int, int]:
        """The text that a match ends with, where to go on, and the next memo number; None for what is no text."""
        if found is None:
            return None, 0, 0
        short, wide, length = found.groups()[skip:]
        if length is None:
            value = self.machine.memo.get(int.from_bytes(short or wide, "little"))
            return value if type(value) is str else None, found.end(), number
        at, end = found.end(), found.end() + length[0]
        raw, data = self.machine.data[at:end], self.machine.data
        if data[end : end + 1] != b"\x94" or len(raw) < length[0]:
            return None, 0, 0
        text = self._texts.get(raw)
        if text is None:
            text = self._texts[raw] = raw.decode("utf-8", "surrogatepass")
        new.append((number, text))
        return text, end + 1, number + 1

    def _ints(self, data: bytes) -> Ints:
        known = self._sizes.get(data)
        if known is None:
            known = self._sizes[data] = ints_of(data)
        return known

    def _learn(self, which: str) -> list[re.Pattern[bytes]] | None:
        """Make the patterns of an entry from the memo numbers of its words; None before one has been met."""
        numbers: dict[str, list[bytes]] = {}
        for number, value in self.machine.memo.items():
            name = value.name if isinstance(value, Global) else value if type(value) is str else ""
            if name in WORDS if type(value) is str else name in (CHUNK, INDEX, PLACE, SIZE):
                numbers.setdefault(name, []).append(_get(number))
        gets = {name: b"(?:" + b"|".join(same[:MAX_SAME]) + b")" for name, same in numbers.items()}
        try:
            made = _chunk(gets) if which == CHUNK else _place(gets)
        except KeyError:
            self._attempts -= 1
            if not self._attempts:
                self.trigger = None
            return None
        self._patterns[which] = [re.compile(p, re.DOTALL) for p in made]
        return self._patterns[which]


def _chunk(gets: dict[str, bytes]) -> list[bytes]:
    """The opcodes of a chunk whose words and classes are fetched by `gets`."""
    return [gets[CHUNK] + NEW + gets["offsets"] + gets[SIZE] + SIZE_OF + gets["sizes"] + gets[SIZE] + SIZE_OF + b"ub"]


def _place(gets: dict[str, bytes]) -> list[bytes]:
    """The opcodes of an index and its place, in three parts that the two names divide."""
    offset = gets["offset"] + b"(?:N|" + gets[SIZE] + SIZE_OF + b")"
    index = gets["index"] + b"(?:N|" + INT + b")(?:" + offset + b")?ub"
    number = b"(" + INT + b")"
    return [
        gets[INDEX] + NEW + gets["fqn"] + TEXT,
        index + gets[PLACE] + NEW + gets["relative_path"] + TEXT,
        gets["offset"] + number + gets["length"] + number + b"ub",
    ]


def _get(number: int) -> bytes:
    """The opcode that fetches a memo entry, as a pattern."""
    return re.escape(b"h" + bytes([number])) if number < 256 else re.escape(b"j" + number.to_bytes(4, "little"))
