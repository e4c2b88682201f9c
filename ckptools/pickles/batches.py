"""Read repeated records in a pickle in batches, by column: the one accelerator, independent of the classes.

The pickle of a large checkpoint repeats itself a million times: a shard of a list, a chunk of a tensor, an item with
its offset. If a class that is read by column is fetched from the memo twice at one depth, a record lies between the two
fetches. It is run once with slots in place of its numbers and texts, which yields the objects of any such record; its
opcodes become a regular expression, which matches the following records at C speed. The matched slots are the columns
of a `Batch`. A batch stands on the stack once for each value that its records leave there, so that any use of a single
value is noticed: `gathered` joins them again.

All rank files list the same records, and layers are cut alike: repeated records are recognised by their bytes, which
may differ only in memo numbers.

This changes only the speed of reading. The expression admits exactly the opcodes of such a record, and memo numbers
must be consecutive. Memo entries of a record are counted and not kept; if a pickle accesses a record again, or does
anything with records other than collecting them, `UnusualError` is raised, and the machine starts over, opcode by
opcode.

Source of the opcodes: Lib/pickletools.py.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, repeat
from operator import attrgetter, itemgetter
from typing import Any
from weakref import proxy

from ckptools.model.regions import Ints
from ckptools.model.tree import Global, Opaque, of_kinds
from ckptools.pickles.machine_state import MachineState, UnusualError
from ckptools.pickles.objects import attributes

# -- batches in a tree -------------------------------------------------------------------------------------------------


class Skipped(Opaque):
    """An object of a record that was read in a batch; accessing its attributes raises `UnusualError`."""

    __slots__ = ()

    def __init__(self) -> None:
        """Set none of an object's attributes."""

    def __getattr__(self, name: str) -> Any:
        raise UnusualError("a look into a record that was read with others")


PART = Skipped()
"""Stands in for an object inside a batch that a pickle fetches again, as sharding specs do."""


class Batch(Skipped):
    """Consecutive records.

    Attributes:
        first: memo number of the first object that they make.
        rows: their contents, maybe with further records.
        start: the first row of this batch.
        stop: one past the last.
    """

    __slots__ = ("first", "rows", "start", "stop")

    def __init__(self, first: int, rows: RecordRows, start: int, stop: int) -> None:
        self.first, self.rows, self.start, self.stop = first, rows, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def width(self) -> int:
        """The number of values that each record has left on the stack."""
        return len(self.rows.template.values)

    def column(self, *path: str, kind: str, value: int = 0) -> Sequence[Any]:
        """The value of an attribute in each record, None if absent. A `torch.Size` becomes a tuple of its ints.

        Args:
            path: names of attributes, from the record inwards.
            kind: its required type: `int`, `text`, `tuple` or `list` of ints, or `texts` for a list of texts.
            value: index of the record's value, if records have several.

        Raises:
            UnusualError: it has another type.
        """
        node = self.rows.template.values[value] if value < self.width else None
        for name in path:
            node = attributes(node).get(name)
        if type(node) is Opaque and node.name == "torch.Size" and len(node.args) == 1:
            node = node.args[0]
        if node is None:
            return [None] * len(self)
        if kind == "texts" and type(node) is list:
            return list(zip(*(self._column(inside, "text") for inside in node), strict=True)) or [()] * len(self)
        return self._column(_alone(node, kind) or node, kind)

    def _column(self, slot: Any, kind: str) -> Sequence[Any]:
        if not isinstance(slot, RecordSlot) or slot.kind != kind or slot.column is None:
            raise UnusualError("records of another form")
        column = self.rows.columns[slot.column]
        return column if len(column) == len(self) else column[self.start : self.stop]


def gathered(values: Sequence[Any], width: int = 1) -> Iterator[Any]:
    """Yield collected values; a batch, which was collected once for each value of its records, is yielded only once.

    Args:
        values: the collected values.
        width: required number of values per record.

    Raises:
        UnusualError: a record has another number of values, or some of a batch's records were collected elsewhere.
    """
    at = 0
    while at < len(values):
        value = values[at]
        count = len(value) * value.width if type(value) is Batch else 1
        if count > 1 and (value.width != width or values[at : at + count].count(value) < count):
            raise UnusualError("records that are not collected together")
        yield from (value,) * (width if count > 1 else 1)
        at += count


def holds_skipped(tree: Any, seen: set[int]) -> bool:
    """Whether a batch, or a part of one, can be reached from a tree; `seen` has the `id`s of values without any."""
    stack = of_kinds([tree], _ENTERED)
    while stack:
        node = stack.pop()
        if isinstance(node, Skipped):
            return True
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            stack += of_kinds(node.keys(), _ENTERED) + of_kinds(node.values(), _ENTERED)
        else:
            stack += of_kinds([*node.parts()] if isinstance(node, Opaque) else node, _ENTERED)
    return False


_ENTERED = (dict, list, tuple, set, frozenset, Opaque)

# -- the opcodes of records --------------------------------------------------------------------------------------------


_BARE = b".()]}012NQRabdelostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"
_ARGUMENT = {b"Khq\x80": 1, b"M": 2, b"Jjr": 4, b"G\x95": 8}
_LENGTH = {b"UC\x8a\x8c": 1, b"XB": 4}
_WIDTHS = {
    **dict.fromkeys(_BARE, (0, 0)),
    **{code: (width, 0) for codes, width in _ARGUMENT.items() for code in codes},
    **{code: (0, width) for codes, width in _LENGTH.items() for code in codes},
}
"""By opcode: bytes of its argument, and of the length before the argument."""


def next_opcode(data: bytes, at: int) -> int:
    """The offset of the opcode behind the one at `at`, which may be past the end.

    Raises:
        ValueError: torch.save does not write this opcode.
    """
    if data[at : at + 1] == b"c":
        return data.index(b"\n", data.index(b"\n", at) + 1) + 1
    if data[at] not in _WIDTHS:
        raise ValueError(f"opcode {data[at]:#04x}")
    argument, length = _WIDTHS[data[at]]
    return at + 1 + argument + length + int.from_bytes(data[at + 1 : at + 1 + length], "little")


INT = rb"(?:K.|M..|J.{4}|\x8a(?:" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in (5, 4, 6, 7, 8, 1, 2, 3)) + rb"))"
ONE_INT = re.compile(INT, re.DOTALL)
SIZES = rb"(?:" + INT + rb"(?:\x85|" + INT + rb"(?:\x86|" + INT + rb"\x87))|\((?:" + INT + rb"){1,64}t)"
SLOTS = {
    "int": rb"(" + INT + rb")",
    "list": rb"(" + INT + rb"a|\((?:" + INT + rb"){1,64}e|)",
    "tuple": rb"(\)|" + SIZES + rb"\x94)",
    "text": rb"(h.|j.{4}|\x8c.[ -~]*\x94)",
}
"""The regular expression of each kind of slot when memo numbers are counted; tuples and texts get one.

A text may be fetched from the memo, or be a short ASCII text.
"""

IS_NEW = bytes(code not in b"hj)" for code in range(256))
"""By the first opcode of a text or tuple, whether it gets a memo number."""

ITEM = re.compile(
    rb"(?P<tuple>(?:\([KMJ\x8a]{1,64}t|[KMJ\x8a]\x85|[KMJ\x8a]{2}\x86|[KMJ\x8a]{3}\x87|\)(?![\x81R]))[r\x94]?)"
    rb"|(?P<list>\][r\x94](?:\([KMJ\x8a]{1,64}e|[KMJ\x8a]a))|(?P<int>[KMJ\x8a])|(?P<text>[X\x8c][r\x94]?)|(?P<fetch>[hj])"
    rb"|(?P<put>[r\x94])|(?P<same>[()\]}Naestu\x85-\x89Rb\x81])"
)
"""Matches one step of a record, by its opcodes; `same` are opcodes that combine values, and constants."""

FETCHES, PUTS = b"hj", b"r\x94"
BININT, LONG1, MEMOIZE = b"J\x8a\x94"

HARMLESS_CALLS = ("torch.Size", "torch.device")
"""Calls that cannot fail and have no cost, whatever their arguments, so that they may be skipped."""


def _decoded(spelled: Iterable[bytes]) -> list[int]:
    """The ints that some opcodes push."""
    read = int.from_bytes
    return [
        read(one[2:], "little", signed=True) if one[0] == LONG1
        else read(one[1:], "little", signed=one[0] == BININT)
        for one in spelled
    ]  # fmt: skip


def _numbers(column: Sequence[bytes]) -> list[int]:
    """The numbers of a column."""
    if len({*column[:64]}) < 32:  # few offsets of items in a file are equal, but many of other numbers
        different = [*{*column}]
        known = dict(zip(different, _decoded(different), strict=True))
        return list(map(known.__getitem__, column))
    joined = b"".join(column)
    if joined[::5] == b"J" * len(column) and len(joined) == 5 * len(column):
        return list(struct.unpack("<" + "xi" * len(column), joined))
    return _decoded(column)


# -- the template of a kind of records ---------------------------------------------------------------------------------


class RecordSlot:
    """Stands in for a value that differs between records.

    Attributes:
        kind: `int`, `tuple` or `list` of ints, if it stands alone in a tuple or list, or `text`.
        text: the text that was fetched from the memo, if any.
        column: index of its column, -1 until it has one; None for values that are equal in every record, such as keys.
    """

    __slots__ = ("column", "kind", "text")

    def __init__(self, kind: str, text: str | None = None) -> None:
        self.kind, self.text = kind, text
        self.column: int | None = -1


Run = Callable[[bytes, list[Any]], tuple[tuple[Any, ...], list[Any]]]
"""Runs a record in which slots are fetched from the list; returns the values that it leaves on the stack, and its
memo entries. It has no side effects.
"""


class Template:
    """The common structure of a kind of records.

    Attributes:
        head: the fetch of the class with which a record begins.
        counted: whether memo numbers are counted, not written out.
        values: the values that a record leaves on the stack, with slots.
        slots: the slots that have columns.
        groups: the group of each slot in the regular expression.
        given: the value of each memo number, and the column of a text or tuple without one in some records, or None.
        numbers: groups of memo numbers that are written out.
        pattern: the regular expression; anything else matches up to the end, with empty groups.
        key: extracts the contents of the slots from a match.
        known: known rows, and an index into them, by the slot contents of a record.

    Raises:
        ValueError, LookupError: the bytes are not a record.
    """

    def __init__(self, machine: MachineState, start: int, end: int, answered: Container[str], run: Run) -> None:
        """Learn from the record between two offsets, which the machine has interpreted; see `Batches`."""
        data, ops = machine.data, [start]
        while ops[-1] < end:
            ops.append(next_opcode(data, ops[-1]))
        codes = bytes([data[at] for at in ops[:-1]])
        items = list(ITEM.finditer(codes))
        if sum(len(item[0]) for item in items) < len(codes) or len(items) > MAX_ITEMS:
            raise ValueError("no opcodes of a record")
        self.head = data[start : ops[1]]
        self.counted = MEMOIZE in codes
        # The record is rewritten with fetches of slots, and run in that form.
        memo: list[Any] = []
        again: list[bytes] = []
        parts: list[tuple[RecordSlot | None, bytes]] = []
        put = rb"\x94" if self.counted else rb"r(.{4})"
        for item in items:
            kind, (first, behind) = str(item.lastgroup), item.span()
            spelled = data[ops[first] : ops[behind]]
            fetch, numbered = b"h%c" % len(memo), codes[behind - 1] in PUTS
            if kind == "same":
                again.append(spelled)
                parts.append((None, re.escape(spelled)))
            elif kind == "put":
                again.append(b"\x94")
                parts.append((None, put))
            elif kind == "fetch":
                value = machine.memo[int.from_bytes(spelled[1:], "little")]
                if isinstance(value, Global) and (value.dotted in HARMLESS_CALLS or value.dotted not in answered):
                    again.append(fetch)
                    parts.append((None, re.escape(spelled)))
                elif type(value) is str:
                    value = RecordSlot("text", value)
                    value.column = -1 if self.counted else None
                    again.append(fetch + b"\x94" * self.counted)
                    parts.append((value, re.escape(spelled)))
                else:
                    raise ValueError("a record that fetches an object, or a function")
                memo.append(value)
            elif kind == "text" and not self.counted:
                text = spelled[:-5] if numbered else spelled
                again.append(text + b"\x94" * numbered)
                parts += [(None, re.escape(text)), *[(None, put)] * numbered]
            elif kind == "list":
                memo.append(slot := RecordSlot(kind))
                again.append(b"]\x94" + fetch + b"a")
                parts += [(None, rb"\]"), (None, put), (slot, b"")]
            elif kind == "tuple" and codes[behind : behind + 1] == b"b":
                raise ValueError("a state that differs")
            else:
                memo.append(slot := RecordSlot(kind))
                numbered = numbered or (self.counted and kind != "int")
                again.append(fetch + b"\x85" * (kind == "tuple") + b"\x94" * numbered)
                parts += [(slot, b""), *[(None, put)] * (numbered and not self.counted)]
        self.values, given = run(b"".join(again), memo)
        self.slots, self.groups, self.numbers = list[RecordSlot](), list[int](), list[int]()
        pattern, group = list[bytes](), 0
        for part, same in parts:
            if part is None or part.column is None:
                pattern.append(same)
                if same == put and not self.counted:
                    self.numbers.append(group)
                    group += 1
            else:
                pattern.append(SLOTS[part.kind] if self.counted or part.kind != "tuple" else b"(" + SIZES + b")")
                part.column = len(self.slots)
                self.slots.append(part)
                self.groups.append(group)
                group += 1
        self.given: list[tuple[Any, int | None]] = []
        for value in given:
            maybe = _alone(value, "tuple") or value
            if not isinstance(maybe, RecordSlot):
                self.given.append((value, None))
            elif maybe.column is not None:
                self.given.append((value, maybe.column if self.counted else None))
        if not self.slots or not self.given or self.given[0][1] is not None:
            raise ValueError("a record that says nothing, or whose first value takes no memo number")
        spelled = b"".join(pattern)
        self.pattern = re.compile(b"(" + spelled + b")|.+", re.DOTALL)
        self.key = itemgetter(*(group + 2 for group in self.groups))
        words = [
            (value.dotted,) if isinstance(value, Global) else value.text for value in memo if value not in self.slots
        ]
        self.known: dict[Any, tuple[RecordRows, int]] = machine.repeated.rows.setdefault((spelled, *words), {})


def _alone(value: Any, kind: str) -> RecordSlot | None:
    """The only item of a tuple or list if it is a slot of this kind; else None."""
    slot = value[0] if type(value) in (tuple, list) and len(value) == 1 else None
    return slot if isinstance(slot, RecordSlot) and slot.kind == kind else None


def key_of(key: Any) -> Any:
    """The dict key that a slot stands for: a text from the memo that is the same in every record.

    Raises:
        ValueError: the key differs between records.
    """
    if not isinstance(key, RecordSlot) or key.text is None:
        raise ValueError("a key that differs")
    key.column = None
    return key.text


# -- the contents of records -------------------------------------------------------------------------------------------


class RecordRows:
    """The contents of consecutive records.

    Attributes:
        template: their template.
        ends: bytes before each row, and in all.
        flags: for each text and tuple without a memo number in some records, by row, whether it has one.
        fetches: whether some texts are fetched from the memo.
        starts: number of memo numbers used before each row, and in all.
        columns: the column of each slot.
        kept: objects that the reader of the columns has made from them.
        spelled: their bytes, by which they are recognised when repeated.
        first: the first memo number in these bytes.
        ones: as many bytes, with a one at each memo number; empty if memo numbers are counted.
        moved: their bytes with other memo numbers, by the first number.
    """

    def __init__(self, template: Template, groups: Sequence[Sequence[bytes]], ends: Sequence[int]) -> None:
        self.template, self.ends = template, ends
        columns = [column for _, column in template.given if column is not None]
        self.flags = [bytes(map(itemgetter(0), groups[template.groups[i]])).translate(IS_NEW) for i in columns]
        named = zip(self.flags, columns, strict=True)
        self.fetches = any(0 in flags and template.slots[i].kind == "text" for flags, i in named)
        different = [flags for flags in self.flags if 0 in flags and 1 in flags]
        always = len(template.given) - len(different) - sum(1 not in flags for flags in self.flags)
        self.starts: Sequence[int] = range(0, always * (len(ends) - 1) + 1, always)
        if different:
            takes = map(sum, zip(repeat(always, len(ends) - 1), *different, strict=True))
            self.starts = array("I", accumulate(takes, initial=0))
        self.columns: list[Sequence[Any]] = []
        self.kept: dict[Any, Any] = {}
        self.spelled, self.first, self.ones = b"", 0, b""
        self.moved: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.ends) - 1

    def learn(self, data: bytes, start: int, number: int) -> None:
        """Keep the bytes of these records in a pickle, from `start` on and with memo numbers from `number` on."""
        end = start + self.ends[-1]
        self.spelled, self.first, ones = data[start:end], number, bytearray(end - start)
        for found in self.template.pattern.finditer(data, start, end) if self.template.numbers else ():
            for group in self.template.numbers:
                ones[found.start(group + 2) - start] = 1
        self.ones = bytes(ones) if self.template.numbers else b""

    def place(self, number: int) -> tuple[int, Any]:
        """The row that uses the memo number `number`, counted from 0, and the value with this number."""
        row = bisect_right(self.starts, number) - 1
        flags = iter(self.flags)
        given = [value for value, maybe in self.template.given if maybe is None or next(flags)[row]]
        return row, given[number - self.starts[row]]

    def same(self, data: bytes, start: int, row: int, number: int) -> int:
        """Find the rows from `row` on that a pickle repeats from byte `start`; return the number behind the last.

        One row alone counts only if no other record's class is fetched behind it.
        """
        begin, behind = self.ends[row : row + 2]
        stop = len(self) if data.startswith(self.template.head, start + behind - begin) else row + 1
        spelled = self._spelled(row, stop, number)
        if data.startswith(spelled, start):
            return stop

        def differs(stop: int) -> bool:
            end = self.ends[stop] - begin
            return data[start : start + end] != spelled[:end]

        return row + bisect_left(range(row + 1, stop + 1), True, key=differs)

    def _spelled(self, row: int, stop: int, number: int) -> bytes:
        """The bytes of rows with memo numbers from `number` on; impossible beyond 32 bits."""
        begin, end = self.ends[row], self.ends[stop]
        spelled = self.spelled[begin:end]
        difference = number - self.first - self.starts[row]
        if not self.ones or not difference:
            return spelled
        if stop - row == len(self) and number in self.moved:
            return self.moved[number]
        if number + self.starts[stop] - self.starts[row] > 1 << 32:
            return b"\0" * len(spelled)
        moved = int.from_bytes(spelled, "little") + difference * int.from_bytes(self.ones[begin:end], "little")
        return moved.to_bytes(len(spelled), "little")


# -- read batches ------------------------------------------------------------------------------------------------------


MAX_ATTEMPTS = 40
"""At most this many records are tried as templates. A real file has a few kinds, all among its first records; memo
numbers in its first lists are below 256, and take one byte.
"""

MAX_ITEMS = 255
"""At most this many opcodes in a record."""

MAX_SPAN, MAX_VALUES = 2000, 2
"""Bytes of a record, and values that it leaves on the stack."""

MAX_BYTES = 1 << 17
"""Bytes that are matched at once: about 1,000 records, at which Python ends its batches too."""

MIN_KNOWN = 4
"""Fewer known rows, if others follow, are not worth a batch of their own."""

MAX_VALUES_KNOWN = 100_000
"""At most this many encodings of tuples and texts are cached."""


class Batches:
    """Reads batches for one machine.

    Args:
        machine: the machine.
        by_column: names of the classes that are read by column; empty for none.
        answered: dotted names of the functions whose calls are answered.
        run: runs a record.

    Attributes:
        trigger: the class whose fetch from the memo may begin a record; None while there is none.
        batches: the batches read, in the order of memo numbers.
        uncounted: number of memo entries that are not kept.
    """

    def __init__(self, machine: MachineState, by_column: Container[str], answered: Container[str], run: Run) -> None:
        self._machine: MachineState = proxy(machine)  # no cycle, so that a machine is freed once its file has been read
        self._by_column, self._answered, self._run = by_column, answered, run
        self.trigger: Global | None = None
        self.batches: list[Batch] = []
        self.uncounted = 0
        self._templates: list[Template] = []
        self._attempts = MAX_ATTEMPTS
        self._last: tuple[int, int, int] | None = None
        """The last fetch of the class: its offset, the number of marks, and the height of the stack."""
        self._tuples = _Tuples()
        self._texts: dict[bytes, str] = {}

    def meet(self, name: Global) -> None:
        """Note a class that the pickle names for the first time."""
        if name.name in self._by_column:
            self.trigger, self._last = name, None

    def stop(self) -> None:
        """Read no further batches: the pickle reuses memo numbers, so that none is certain.

        Raises:
            UnusualError: a batch has already been read.
        """
        if self.batches:
            raise UnusualError("a memo number given again")
        self.trigger, self._by_column = None, ()

    def read(self, start: int, depth: int, height: int) -> tuple[Sequence[Any], int] | None:
        """Read the records from `start`, where their class is fetched; return the values to push and the next offset.

        Args:
            start: offset of the fetch.
            depth: marks on the stack.
            height: values above the last mark.
        """
        for template in (*self._templates,):
            if found := self._read(template, start):
                self._last = None
                return found
        before, self._last = self._last, (start, depth, height)
        if before is None or self._attempts == 0 or before[1] != depth or start - before[0] > MAX_SPAN:
            return None
        if not 0 < height - before[2] <= MAX_VALUES:
            return None
        self._attempts -= 1
        try:
            template = Template(self._machine, before[0], start, self._answered, self._run)
        except (ValueError, LookupError):
            return None
        if len(template.values) != height - before[2]:
            return None
        self._templates.insert(0, template)
        return self._read(template, start)

    def _read(self, template: Template, start: int) -> tuple[Sequence[Any], int] | None:
        machine, data = self._machine, self._machine.data
        found = template.pattern.match(data, start)
        if found is None or not found[1]:
            return None
        number = machine.next_number
        if not template.counted:
            number = int.from_bytes(found[template.numbers[0] + 2], "little")
        if number < machine.next_number or (template.counted and number != len(machine.memo) + self.uncounted):
            return None
        rows, first = template.known.get(template.key(found), (None, 0))
        stop = rows.same(data, start, first, number) if rows is not None else 0
        if stop < first + MIN_KNOWN and (
            rows is None or stop == first or data.startswith(template.head, start + rows.ends[stop] - rows.ends[first])
        ):
            rows, first = self._match(template, start, number), 0
            stop = len(rows) if rows is not None else 0
        if rows is None or stop == 0:
            return None
        batch = Batch(number, rows, first, stop)
        self.batches.append(batch)
        given, length = rows.starts[stop] - rows.starts[first], rows.ends[stop] - rows.ends[first]
        if rows.ones and length == len(rows.spelled) and number not in rows.moved and machine.repeated.has_room(length):
            rows.moved[number] = data[start : start + length]
        machine.next_number = number + given
        self.uncounted += given
        return [batch] * (len(batch) * batch.width), start + length

    def _match(self, template: Template, start: int, number: int) -> RecordRows | None:
        """The rows from `start` on; None if their memo numbers are not consecutive from `number` on."""
        data, known = self._machine.data, template.known
        found = template.pattern.findall(data, start, start + MAX_BYTES)
        if found and not found[-1][0]:
            found.pop()
        if not found:
            return None
        whole, *groups = zip(*found, strict=True)
        rows = RecordRows(template, groups, array("I", accumulate(map(len, whole), initial=0)))
        if not template.counted:
            spelled = b"".join(chain.from_iterable(zip(*map(groups.__getitem__, template.numbers), strict=True)))
            past = number + rows.starts[-1]
            if past > 1 << 32 or spelled != struct.pack(f"<{past - number}I", *range(number, past)):
                self._templates.remove(template)  # else it would be matched at every following record
                return None
        for slot, group in zip(template.slots, template.groups, strict=True):
            column = groups[group]
            if slot.kind == "int":
                rows.columns.append(_numbers(column))
            elif slot.kind == "tuple":
                rows.columns.append(list(map(self._tuples.__getitem__, column)))
            elif slot.kind == "list":
                rows.columns.append([[*self._tuples[ints]] for ints in column])
            else:
                if len(self._texts) > MAX_VALUES_KNOWN:
                    self._texts.clear()
                if None in (texts := list(map(self._texts.get, column))):
                    for text in {*column} - self._texts.keys():
                        self._texts[text] = self._text(text, column, rows, groups, number)
                    texts = list(map(self._texts.get, column))
                rows.columns.append(texts)
        if not rows.fetches and self._machine.repeated.has_room(rows.ends[-1]):
            rows.learn(data, start, number)
            keys = zip(*map(groups.__getitem__, template.groups), strict=True)
            for row, key in enumerate(keys if len(template.groups) > 1 else groups[template.groups[0]]):
                before = known.get(key)
                if before is None or len(before[0]) - before[1] < len(rows) - row:
                    known[key] = rows, row
        return rows

    def _text(
        self, spelled: bytes, column: Sequence[bytes], rows: RecordRows, groups: Sequence[Sequence[bytes]], number: int
    ) -> str:
        """Decode a text of a column, or fetch it from the memo; the rows use numbers from `number` on.

        Raises:
            UnusualError: the memo has no text there, or the text has another length than stated.
        """
        if spelled[0] not in FETCHES:
            if spelled[1] != len(spelled) - 3:
                raise UnusualError("a text of another length than stated")
            return spelled[2:-1].decode("ascii")
        fetched = int.from_bytes(spelled[1:], "little")
        value: Any = None
        if number <= fetched < number + rows.starts[-1]:
            row, slot = rows.place(fetched - number)
            known = isinstance(slot, RecordSlot) and slot.column is not None and row < column.index(spelled)
            new = groups[rows.template.groups[slot.column]][row] if known else spelled
            if new[0] not in FETCHES:
                return self._text(new, column, rows, groups, number)
        elif fetched in self._machine.memo:
            value = self._machine.memo[fetched]
        else:
            with suppress(KeyError):
                (value,), _ = self.fetch(fetched, 0)
        if type(value) is not str:
            raise UnusualError("a text that is none")
        return value

    def fetch(self, number: int, at: int) -> tuple[Sequence[Any], int]:
        """The value with memo number `number` in a record, fetched by the opcode that ends at `at`.

        A sharding spec fetches the same part of every record, one after the other; these fetches are read together.

        Returns:
            The values, and the next offset.

        Raises:
            KeyError: no value has this number.
            UnusualError: it is a value inside a record that may be changed or accessed.
        """
        place = bisect_right(self.batches, number, key=attrgetter("first")) - 1
        batch = self.batches[place] if place >= 0 else None
        if batch is None or number - batch.first >= (starts := batch.rows.starts)[batch.stop] - starts[batch.start]:
            raise KeyError(number)
        row, value = batch.rows.place(number - batch.first + starts[batch.start])
        if isinstance(value, RecordSlot) and value.column is not None:
            return (batch.rows.columns[value.column][row],), at
        if type(value) is not Opaque or value.name in HARMLESS_CALLS:
            raise UnusualError("a reference into a record")
        if len(batch) == 1 and batch.rows.template.values == (value,):
            return (batch,), at
        if row == batch.start and isinstance(starts, range):
            numbers = range(number, number + starts.step * len(batch), starts.step)
            all_of_them = b"".join([b"j" + one.to_bytes(4, "little") for one in numbers])
            if self._machine.data.startswith(all_of_them, at - 5):
                return [PART] * len(batch), at + 5 * (len(batch) - 1)
        return (PART,), at


class _Tuples(dict[bytes, Ints]):
    """A cache of tuples of ints, by their pickled bytes."""

    def __missing__(self, spelled: bytes) -> Ints:
        if len(self) >= MAX_VALUES_KNOWN:
            self.clear()
        value = self[spelled] = tuple(_decoded(ONE_INT.findall(spelled)))
        return value
