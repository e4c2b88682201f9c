"""A pickle machine to which a global is only ever a name.

It interprets the opcodes itself, so that no name in a pickle is imported or called, and every length is compared with
the remaining bytes before any allocation. Where a pickle would call a function, `classes.tensors` decides: a supported
harmless object is built by code of this package, any other becomes an `Opaque`.

Work and memory are linear in the size of the pickle, and the budgets below bound the rest. Opcodes are those of
protocols 0 to 5; source: Lib/pickletools.py.
"""

from __future__ import annotations

import codecs
import gc
import struct
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path
from sys import intern
from typing import Any

from ckptools.errors import ReadError
from ckptools.model.tree import Cycle, CycleError, Global, Opaque, TreeLimitError, check_tree_limits
from ckptools.pickles.batches import Batch, Batches, Skipped, gathered, holds_skipped, key_of
from ckptools.pickles.classes.sharded import BY_COLUMN
from ckptools.pickles.classes.tensors import REBUILD, build, call
from ckptools.pickles.machine_state import (
    BLOCK,
    MAX_INT_BYTES,
    MAX_INT_DIGITS,
    MAX_STACK,
    RUN,
    CutError,
    Locate,
    MachineState,
    PickleError,
    RepeatedRecords,
    UnusualError,
    ints_of_run,
)

# -- rare opcodes that push one value: the functions that read the value, by opcode ------------------------------------
# Each is called with the offset behind the opcode, and returns the value and the offset of the next opcode. A read past
# the end raises IndexError or struct.error, which the machine turns into a one-line error.


NEWEST_PROTOCOL = 5
"""Since Python 3.8. Source: Lib/pickletools.py."""

MAX_NAME = 256
"""Shorter texts are interned, however many files have them."""

ReadValue = Callable[[MachineState, int], tuple[Any, int]]

VALUES: dict[int, ReadValue] = {}


def _pushes(code: bytes) -> Callable[[ReadValue], ReadValue]:
    """Register the function that reads the value of an opcode."""

    def register(read: ReadValue) -> ReadValue:
        VALUES[code[0]] = read
        return read

    return register


def _sized(code: bytes, width: int, make: Callable[[bytes], Any]) -> None:
    """Register an opcode with a length of `width` bytes, followed by that many bytes."""

    @_pushes(code)
    def read(m: MachineState, at: int) -> tuple[Any, int]:
        length = int.from_bytes(m.take(at, width), "little")
        return make(m.take(at + width, length)), at + width + length


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "surrogatepass")
    return intern(text) if len(text) < MAX_NAME else text  # the files of all ranks contain the same names


def _old_text(data: bytes) -> str:
    # A str of Python 2, which may be bytes; torch reads it as UTF-8.
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin1")


def _long(data: bytes) -> Any:
    if len(data) > MAX_INT_BYTES:
        return Opaque(f"an int of {8 * len(data)} bits", (data,))
    return int.from_bytes(data, "little", signed=True)


_sized(b"\x8d", 8, _text)
_sized(b"\x8b", 4, _long)
_sized(b"\x96", 8, bytearray)
for _code, _width in ((b"B", 4), (b"C", 1), (b"\x8e", 8)):
    _sized(_code, _width, bytes)
for _code, _width in ((b"T", 4), (b"U", 1)):
    _sized(_code, _width, _old_text)


CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
"""The values of opcodes without an argument."""

BINUNICODE = ord("X")
"""The opcode of a text whose length takes 4 bytes, not one."""


@_pushes(b"G")
def _binfloat(m: MachineState, at: int) -> tuple[Any, int]:
    return struct.unpack_from(">d", m.data, at)[0], at + 8


@_pushes(b"I")
def _int(m: MachineState, at: int) -> tuple[Any, int]:
    text, at = m.line(at)
    return text == "01" if text in ("00", "01") else _decimal(text), at


@_pushes(b"L")
def _long_text(m: MachineState, at: int) -> tuple[Any, int]:
    text, at = m.line(at)
    return _decimal(text.removesuffix("L")), at


def _decimal(text: str) -> Any:
    return int(text) if len(text) <= MAX_INT_DIGITS else Opaque(f"an int of {len(text)} digits", (text,))


@_pushes(b"F")
def _float(m: MachineState, at: int) -> tuple[Any, int]:
    text, at = m.line(at)
    return float(text), at


@_pushes(b"V")
def _unicode_line(m: MachineState, at: int) -> tuple[Any, int]:
    end = m.newline(at)
    return m.data[at:end].decode("raw-unicode-escape"), end + 1


@_pushes(b"S")
def _string_line(m: MachineState, at: int) -> tuple[Any, int]:
    end = m.newline(at)
    quoted = m.data[at:end]
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        raise PickleError("a quoted string without quotes")
    return _old_text(codecs.escape_decode(quoted[1:-1])[0]), end + 1


@_pushes(b"c")
def _global(m: MachineState, at: int) -> tuple[Any, int]:
    module, at = m.line(at)
    name, at = m.line(at)
    return m.name(module, name), at


def _extension(code: bytes, width: int) -> None:
    @_pushes(code)
    def read(m: MachineState, at: int) -> tuple[Any, int]:
        number = int.from_bytes(m.take(at, width), "little")
        return m.name("copyreg", f"extension {number}"), at + width


for _code, _width in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4)):
    _extension(_code, _width)


@_pushes(b"P")
def _persid(m: MachineState, at: int) -> tuple[Any, int]:
    text, at = m.line(at)
    return m.persistent(text), at


@_pushes(b"\x8f")
def _empty_set(m: MachineState, at: int) -> tuple[Any, int]:
    m.spend(8)  # one byte of pickle, 216 of memory
    return set(), at


# -- how opcodes change containers and objects -------------------------------------------------------------------------


OLD_FIELDS = 5
"""Fields of `TensorProperties` up to torch 2.14, which unpacks exactly as many; the sixth is `strides`.

Source: torch/distributed/checkpoint/metadata.py of 2.13 and 2.14.1 (`__setstate__`), files of 2.15, pytorch#194251.
"""

STRIDES = "TensorProperties.strides"


def _extend(m: MachineState, target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, set):
        target.update(map(m.key, items))
    elif isinstance(target, Opaque):
        target.items.extend(items)
    else:
        raise PickleError(f"items are added to a {type(target).__name__}")


def _set_items(m: Machine, target: Any, items: list[Any]) -> None:
    if m.batches.batches and Batch in map(type, items):
        items = list(gathered(items, width=2))
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[key if type(key) is str else m.key(key)] = value
    elif isinstance(target, Opaque):
        target.pairs.extend((m.key(key), value) for key, value in pairs)
    else:
        raise PickleError(f"keys are set on a {type(target).__name__}")


def _set_state(m: MachineState, target: Any, state: Any) -> None:
    if type(target) is Opaque:  # most are
        target.state = state
    elif isinstance(target, Skipped):
        raise UnusualError("a skipped record gets another state")
    else:
        build(target, state)
    if type(state) is dict and "_modules" in state:
        m.modules = True
    elif type(state) is tuple and len(state) > OLD_FIELDS and type(target) is Opaque:
        _meet_field(m, target.name)


def _meet_field(m: MachineState, name: str) -> None:
    """Add a field that only a newer torch's class has to the names that the pickle mentions."""
    module, _, last = name.rpartition(".")
    if last == "TensorProperties" and module.startswith("torch."):
        m.globals.setdefault((module, STRIDES), Global(module, STRIDES))


def _new_with_keywords(function: Any, args: Any, keywords: Any) -> Opaque:
    if isinstance(function, Global):
        return Opaque(function.dotted, args, keywords)
    return Opaque("not a class", (function, args), keywords)


# -- the handlers of all opcodes ---------------------------------------------------------------------------------------


class Stop(Exception):  # noqa: N818 - it is no error
    """The STOP opcode."""

    def __init__(self, at: int) -> None:
        self.at = at


Handler = Callable[[int], int]
"""Called with the offset behind its opcode; returns the offset of the next one."""

Stack = Callable[[], list[Any]]
"""Returns the values above the last mark."""

_u16, _i32, _u32 = (struct.Struct(form).unpack_from for form in ("<H", "<i", "<I"))


def handlers(m: Machine) -> tuple[list[Handler], Stack]:
    """Make the handlers of one machine's opcodes, by opcode, as closures over its stack and its memo.

    A pickle has millions of opcodes, and closures save attribute lookups in each. No handler looks a name up or calls
    one. A read past the end raises IndexError or struct.error.
    """
    data, size, memo, batches = m.data, len(m.data), m.memo, m.batches
    stack: list[Any] = []  # the values above the last mark
    marks: list[list[Any]] = []  # the values below each mark, the outermost first

    def unknown(at: int) -> int:
        raise PickleError(f"unknown pickle opcode {data[at - 1]:#04x}")

    # Values.

    def value(at: int) -> int:
        found, at = VALUES[data[at - 1]](m, at)
        stack.append(found)
        return at

    def constant(at: int) -> int:
        stack.append(CONSTANTS[data[at - 1]])
        return at

    def empty_list(at: int) -> int:
        stack.append([])
        return at

    def empty_dict(at: int) -> int:
        stack.append({})
        return at

    def binint1(at: int) -> int:
        stack.append(data[at])
        return at + 1

    def binint2(at: int) -> int:
        stack.append(_u16(data, at)[0])
        return at + 2

    def binint(at: int) -> int:
        stack.append(_i32(data, at)[0])
        return at + 4

    def long1(at: int) -> int:
        end = at + 1 + int.from_bytes(data[at : at + 1], "little")
        if end > size:
            m.check(at, 1)
            m.check(at + 1, end - at - 1)
        stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
        return end

    def text(at: int) -> int:
        width = 4 if data[at - 1] == BINUNICODE else 1
        start = at + width
        end = start + int.from_bytes(data[at:start], "little")
        if end > size:
            m.check(at, width)
            m.check(start, end - start)
        stack.append(_text(data[start:end]))
        return end

    # The stream, the stack and the memo.

    def proto(at: int) -> int:
        if data[at] > NEWEST_PROTOCOL:
            raise PickleError(
                f"an odd pickle: of protocol {data[at]}, and {NEWEST_PROTOCOL} is the newest that there is"
            )
        return at + 1

    def frame(at: int) -> int:
        m.check(at + 8, int.from_bytes(m.take(at, 8), "little"))
        return at + 8

    def stop(at: int) -> int:
        raise Stop(at)

    def mark(at: int) -> int:
        nonlocal stack
        if len(marks) >= MAX_STACK:
            raise PickleError("too many marks")
        marks.append(stack)
        stack = []
        return at

    def pop(at: int) -> int:
        nonlocal stack
        if stack:
            stack.pop()
        else:
            stack = marks.pop()
        return at

    def pop_mark(at: int) -> int:
        nonlocal stack
        stack = marks.pop()
        return at

    def dup(at: int) -> int:
        stack.append(stack[-1])
        return at

    def put(number: int) -> None:
        if number < m.next_number:
            batches.stop()
        else:
            m.next_number = number + 1
        memo[number] = stack[-1]

    def put_line(at: int) -> int:
        text, at = m.line(at)
        put(int(text[:20]))
        return at

    def binput(at: int) -> int:
        put(data[at])
        return at + 1

    def long_binput(at: int) -> int:
        number = _u32(data, at)[0]
        if number < m.next_number:
            batches.stop()
        else:
            m.next_number = number + 1
        memo[number] = stack[-1]
        return at + 4

    def memoize(at: int) -> int:
        put(len(memo) + batches.uncounted)
        return at

    def trigger(value: Any, start: int, at: int) -> int:
        """Push the records that begin with a memo value, or else the value itself; return the next offset."""
        values, end = batches.read(start, len(marks), len(stack)) or ((value,), at)
        stack.extend(values)
        return end

    def get_line(at: int) -> int:
        text, at = m.line(at)
        stack.append(memo[int(text[:20])])
        return at

    def binget(at: int) -> int:
        value = memo[data[at]]
        if value is batches.trigger:
            return trigger(value, at - 1, at + 1)
        stack.append(value)
        return at + 1

    def long_binget(at: int) -> int:
        number = _u32(data, at)[0]
        if number not in memo:
            values, end = batches.fetch(number, at + 4)
            stack.extend(values)
            return end
        value = memo[number]
        if value is batches.trigger:
            return trigger(value, at - 1, at + 4)
        stack.append(value)
        return at + 4

    # Containers.

    def tuple1(at: int) -> int:
        stack[-1] = (stack[-1],)
        return at

    def tuple2(at: int) -> int:
        second = stack.pop()
        stack[-1] = (stack[-1], second)
        return at

    def tuple3(at: int) -> int:
        third, second = stack.pop(), stack.pop()
        stack[-1] = (stack[-1], second, third)
        return at

    def items() -> list[Any]:
        """Pop every value above the last mark."""
        nonlocal stack
        found, stack = stack, marks.pop()
        return found

    def tuple_(at: int) -> int:
        nonlocal stack
        made, stack = tuple(stack), marks.pop()
        stack.append(made)
        return at

    def list_(at: int) -> int:
        found = items()
        stack.append(found)
        return at

    def dict_(at: int) -> int:
        found = items()
        stack.append({})
        _set_items(m, stack[-1], found)
        return at

    def frozenset_(at: int) -> int:
        found = items()
        stack.append(frozenset(map(m.key, found)))
        return at

    def append(at: int) -> int:
        value = stack.pop()
        _extend(m, stack[-1], [value])
        return at

    def extend(at: int) -> int:
        found = items()
        _extend(m, stack[-1], found)
        return at

    def setitem(at: int) -> int:
        value, key = stack.pop(), stack.pop()
        target = stack[-1]
        if type(target) is dict and type(key) is str:
            target[key] = value
        else:
            _set_items(m, target, [key, value])
        return at

    def setitems(at: int) -> int:
        found = items()
        _set_items(m, stack[-1], found)
        return at

    # Names, calls and persistent ids.

    def stack_global(at: int) -> int:
        name, module = stack.pop(), stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickleError("a global whose name is not text")
        stack.append(m.name(module, name))
        return at

    def reduce(at: int) -> int:
        args = stack.pop()
        stack[-1] = call(m, stack[-1], args)
        return at

    def newobj_ex(at: int) -> int:
        keywords, args, function = stack.pop(), stack.pop(), stack.pop()
        stack.append(_new_with_keywords(function, args, keywords))
        return at

    def inst(at: int) -> int:
        module, at = m.line(at)
        name, at = m.line(at)
        args = tuple(items())
        stack.append(call(m, m.name(module, name), args))
        return at

    def obj(at: int) -> int:
        function, *args = items()
        stack.append(call(m, function, tuple(args)))
        return at

    def build_(at: int) -> int:
        state = stack.pop()
        _set_state(m, stack[-1], state)
        return at

    def binpersid(at: int) -> int:
        stack[-1] = m.persistent(stack[-1])
        return at

    # Consecutive ints.

    def with_runs(single: Handler) -> Handler:
        """Wrap the handler of an int's opcode, so that it also reads the ints behind it, if there are many."""

        def handler(at: int) -> int:
            nonlocal stack
            start = at - 1
            behind_mark = not stack and bool(marks)
            spelled = m.repeated.values.tuple_at(data, start) if behind_mark else None
            if spelled is None:
                place = bisect_left(m.breaks, start)
                found = RUN.match(data, start, m.breaks[place] if place < len(m.breaks) else size)
                if found is None:
                    return single(at)
                end = found.end()
                if not behind_mark or data[end : end + 1] != b"t":
                    ints = ints_of_run(found.group())
                    stack += ints
                    m.skipped += len(ints) - 1
                    return end
                spelled = data[start : end + 1]
            stack = marks.pop()
            stack.append(_tuple_of_run(m, spelled))
            return start + len(spelled)

        return handler

    found: dict[bytes, Handler] = {
        b"]": empty_list, b"}": empty_dict, b"K": binint1, b"M": binint2, b"J": binint, b"\x8a": long1,
        b"\x80": proto, b"\x95": frame, b".": stop, b"(": mark, b"0": pop, b"1": pop_mark, b"2": dup,
        b"p": put_line, b"q": binput, b"r": long_binput, b"\x94": memoize, b"g": get_line, b"h": binget,
        b"j": long_binget, b"\x85": tuple1, b"\x86": tuple2, b"\x87": tuple3, b"t": tuple_, b"l": list_,
        b"d": dict_, b"\x91": frozenset_, b"a": append, b"e": extend, b"\x90": extend, b"s": setitem,
        b"u": setitems, b"\x93": stack_global, b"R": reduce, b"\x81": reduce, b"\x92": newobj_ex, b"i": inst,
        b"o": obj, b"b": build_, b"Q": binpersid, b"X": text, b"\x8c": text, b"N": constant, b"\x88": constant,
        b"\x89": constant, b")": constant,
    }  # fmt: skip
    if m.fast:
        found |= {code: with_runs(found[code]) for code in (b"J", b"\x8a")}
    table: list[Handler] = [unknown] * 256
    for code in VALUES:
        table[code] = value
    for spelled, handler in found.items():
        table[spelled[0]] = handler
    return table, lambda: stack


def _tuple_of_run(m: MachineState, spelled: bytes) -> tuple[int, ...]:
    """The tuple that a mark, the ints behind it and TUPLE make."""
    times = m.tuples_met[spelled] = m.tuples_met.get(spelled, 0) + 1
    ints = m.repeated.values.of_tuple(spelled, times)
    m.flat[id(ints)] = ints
    m.skipped += len(ints)
    return ints


# -- the machine -------------------------------------------------------------------------------------------------------


class Machine(MachineState):
    """Interprets one pickle.

    Args:
        data: the pickle.
        locate: see `MachineState`.
        fast: whether consecutive ints, and records, are read together.
        repeated: values that this pickle shares with those of other ranks.
        by_column: names of the classes whose records are read in batches.
        stay: whether the tree may contain batches; otherwise the answered calls must have consumed all of them.
    """

    def __init__(
        self,
        data: bytes,
        locate: Locate | None = None,
        fast: bool = True,
        repeated: RepeatedRecords | None = None,
        by_column: Container[str] = BY_COLUMN,
        stay: bool = False,
    ) -> None:
        self._stay = stay
        super().__init__(data, locate, fast, by_column, repeated or RepeatedRecords(limit=0))

    def _start(self, fast: bool) -> None:
        super()._start(fast)
        self.batches = Batches(self, self.by_column if fast else (), REBUILD, _run)

    def meet(self, name: Global) -> None:
        """Note a name that the pickle mentions for the first time."""
        self.batches.meet(name)

    def handlers(self) -> tuple[list[Handler], Stack]:
        """Make the handlers of the opcodes, and a function that returns the values above the last mark."""
        return handlers(self)

    def load(self, at: int = 0) -> Any:
        """Interpret the pickle that begins at `at` up to its STOP and return its object.

        Raises:
            PickleError: the stream is cut, malformed or beyond the budgets.
        """
        try:
            tree = self._load(at)
            if self._stay or not self.batches.batches or not holds_skipped(tree, set(self.flat)):
                return tree
        except UnusualError:
            pass
        except PickleError:
            if not self.batches.batches:
                raise
        # Reading in batches failed to decide a case: start over, opcode by opcode.
        self._start(fast=False)
        return self._load(at)

    def _load(self, at: int) -> Any:
        data = self.data
        table, stack = self.handlers()
        try:
            for handled in count(BLOCK, BLOCK):
                for _ in repeat(None, BLOCK):
                    at = table[data[at]](at + 1)
                self.check_sizes(len(stack()))
                self.check_opcodes(handled)
        except Stop as stop:
            self.stopped_at = stop.at
        except (IndexError, KeyError, struct.error) as error:
            if at >= len(data):
                raise CutError("the pickle ends without STOP") from error
            if at + 1 == len(data) or isinstance(error, struct.error):
                raise CutError(f"malformed pickle near byte {at}") from error
            raise PickleError(f"malformed pickle near byte {at}") from error
        except (PickleError, UnusualError):
            raise
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise PickleError(f"{_line(error)} (pickle byte {at})") from error
        if not stack():
            raise PickleError("the pickle ends with nothing on its stack")
        return stack().pop()


def _run(record: bytes, memo: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Run a record of a batch in a machine of its own; see `batches.Run`.

    Raises:
        PickleError: it is not a record, or affects the rest of the pickle.
    """
    inner = Machine(b"(" + record + b"t.", fast=False)
    inner.memo.update(enumerate(memo))
    inner.key = key_of  # type: ignore[method-assign]
    values = inner.load()
    if inner.modules or inner.globals:
        raise PickleError("a record that says something of the pickle")
    return values, list(inner.memo.values())[len(memo) :]


def _line(error: Exception) -> str:
    """Python's message about a bad value; replaced when it repeats the file's content at length."""
    text = str(error)
    return text if text.isprintable() and len(text) < 200 else f"malformed: {type(error).__name__}"


# -- check the limits of a tree, or raise a one-line error -------------------------------------------------------------


def load_checked(machine: Machine, path: Path, what: str) -> Any:
    """Run a pickle and check its tree against the limits; `what` names the pickle in errors.

    Raises:
        ReadError: it is damaged, or beyond the limits.
    """
    try:
        with gc_paused():
            tree = machine.load()
        tree = _checked(tree, machine)
    except (PickleError, TreeLimitError) as error:
        raise ReadError(path, f"{what}: {error}") from error
    return tree


def _checked(tree: Any, machine: Machine) -> Any:
    """Check a tree against the budgets; containers inside themselves are cut there."""
    try:
        check_tree_limits(tree, machine.flat)
    except CycleError:
        tree = without_cycles(tree)
        check_tree_limits(tree)
    return tree


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many objects are created and none becomes garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# -- cycles: a `Cycle` stands in for a container inside itself ---------------------------------------------------------


CONTAINERS = (dict, list, tuple)


def without_cycles(tree: Any) -> Any:
    """Replace each container that occurs inside itself by a `Cycle`. Iterative, like all walks."""
    done: dict[int, Any] = {}
    path: dict[int, int] = {}
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            done[id(node)] = _remade(node, done, path)
            del path[id(node)]
        elif id(node) not in done and id(node) not in path and isinstance(node, CONTAINERS):
            path[id(node)] = len(path)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if isinstance(child, CONTAINERS)]
    return done.get(id(tree), tree)


def _children(node: Any) -> list[Any]:
    metadata = [node._metadata] if hasattr(node, "_metadata") else []
    return [*(node.values() if isinstance(node, dict) else node), *metadata]


def _remade(node: Any, done: dict[int, Any], path: dict[int, int]) -> Any:
    """Copy a container with its children's copies; an uncopied child is a container around this one.

    Args:
        node: the container.
        done: the copied containers, by `id` of the original.
        path: the level of each container around this one, and its own.
    """

    def now(child: Any) -> Any:
        if not isinstance(child, CONTAINERS):
            return child
        if id(child) in done:
            return done[id(child)]
        return Cycle(f"the {_kind_of(child)} that it lies in", levels=path[id(node)] - path[id(child)])

    if isinstance(node, tuple):
        children = [now(child) for child in node]
        return node if all(a is b for a, b in zip(children, node, strict=True)) else tuple(children)
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, CONTAINERS):
            node[key] = now(child)
    if hasattr(node, "_metadata") and now(node._metadata) is not node._metadata:
        del node._metadata
    return node


def _kind_of(node: Any) -> str:
    return "dict" if isinstance(node, dict) else "list" if isinstance(node, list) else "tuple"
