"""A pickle machine to which a global is only ever a name.

It interprets the opcodes itself, so nothing that a pickle names is imported or called, and every length is
compared with the bytes that remain before anything is allocated. Where a pickle would call something, `rebuild`
decides: a known harmless shape is built by our own code, anything else becomes an `Opaque`.

Work and memory are linear in the size of the pickle, and the budgets below bound the rest. Opcodes are those of
protocols 0 to 5; source: Lib/pickletools.py.
"""

from __future__ import annotations

import codecs
import gc
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path
from sys import intern
from typing import Any

from ckptools.errors import ReadError
from ckptools.model.tree import Cycle, CycleError, Global, Opaque, TreeLimitError, check_tree_limits
from ckptools.pickles.classes.tensors import build, call
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
    Reader,
    RepeatedRecords,
    UnusualError,
    ints_of_run,
)
from ckptools.pickles.objects import ChunkBatch, PlaceBatch, PlacementRecord, ShardRecord
from ckptools.pickles.repeated_records import RunReader

# -- the table of opcodes, and those of the stack, the memo, numbers and text; `object_opcodes` has the others ---------
# A handler is called with the offset behind its opcode and returns the offset of the next one. Nothing here looks a
# name up or calls one; a read behind the end raises IndexError or struct.error, which the machine turns into a line.
# Protocols 0 to 5; source: Lib/pickletools.py.


NEWEST_PROTOCOL = 5

MAX_NAME = 256
"""Characters of a text that is kept once, however many files have it."""
"""Since Python 3.8. Source: Lib/pickletools.py."""


class Stop(Exception):  # noqa: N818 - it is no error
    """The STOP opcode."""

    def __init__(self, at: int) -> None:
        self.at = at


Handler = Callable[[MachineState, int], int]


def _unknown(m: MachineState, at: int) -> int:
    raise PickleError(f"unknown pickle opcode {m.data[at - 1]:#04x}")


_u32 = struct.Struct("<I").unpack_from

DISPATCH: list[Handler] = [_unknown] * 256


def opcode(code: bytes) -> Callable[[Handler], Handler]:
    """Register a handler: called with the offset behind the opcode, it returns the offset of the next one."""

    def register(handler: Handler) -> Handler:
        DISPATCH[code[0]] = handler
        return handler

    return register


def _constant(code: bytes, value: Any) -> None:
    def handler(m: MachineState, at: int) -> int:
        m.stack.append(value)
        return at

    DISPATCH[code[0]] = handler


def _empty(code: bytes, make: Callable[[], Any]) -> None:
    def handler(m: MachineState, at: int) -> int:
        m.stack.append(make())
        return at

    DISPATCH[code[0]] = handler


def _number(code: bytes, form: str) -> None:
    read, size = struct.Struct(form).unpack_from, struct.calcsize(form)

    def handler(m: MachineState, at: int) -> int:
        m.stack.append(read(m.data, at)[0])
        return at + size

    DISPATCH[code[0]] = handler


def _sized(code: bytes, width: int, make: Callable[[bytes], Any]) -> None:
    """An opcode with a length of `width` bytes and that many bytes behind it."""

    def handler(m: MachineState, at: int) -> int:
        length = int.from_bytes(m.take(at, width), "little")
        m.stack.append(make(m.take(at + width, length)))
        return at + width + length

    DISPATCH[code[0]] = handler


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "surrogatepass")
    return intern(text) if len(text) < MAX_NAME else text  # the files of all ranks have the same names in them


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


for _code, _value in ((b"N", None), (b"\x88", True), (b"\x89", False), (b")", ())):
    _constant(_code, _value)
for _code, _kind in ((b"]", list), (b"}", dict)):
    _empty(_code, _kind)
for _code, _form in ((b"K", "<B"), (b"M", "<H"), (b"J", "<i")):
    _number(_code, _form)
for _code, _width in ((b"X", 4), (b"\x8c", 1), (b"\x8d", 8)):
    _sized(_code, _width, _text)
for _code, _width in ((b"B", 4), (b"C", 1), (b"\x8e", 8)):
    _sized(_code, _width, bytes)
for _code, _width in ((b"T", 4), (b"U", 1)):
    _sized(_code, _width, _old_text)
for _code, _width in ((b"\x8a", 1), (b"\x8b", 4)):
    _sized(_code, _width, _long)
_sized(b"\x96", 8, bytearray)


@opcode(b"\x8f")
def _empty_set(m: MachineState, at: int) -> int:
    m.spend(8)  # one byte of pickle, 216 of memory
    m.stack.append(set())
    return at


# -- stream ------------------------------------------------------------------------------------------------------------


@opcode(b"\x80")
def _proto(m: MachineState, at: int) -> int:
    if m.data[at] > NEWEST_PROTOCOL:
        raise PickleError(f"an odd pickle: of protocol {m.data[at]}, and {NEWEST_PROTOCOL} is the newest that there is")
    return at + 1


@opcode(b"\x95")
def _frame(m: MachineState, at: int) -> int:
    m.check(at + 8, int.from_bytes(m.take(at, 8), "little"))
    return at + 8


@opcode(b".")
def _stop(m: MachineState, at: int) -> int:
    raise Stop(at)


# -- stack and memo ----------------------------------------------------------------------------------------------------


@opcode(b"(")
def _mark(m: MachineState, at: int) -> int:
    if len(m.marks) >= MAX_STACK:
        raise PickleError("too many marks")
    m.marks.append(m.stack)
    m.stack = []
    return at


@opcode(b"0")
def _pop(m: MachineState, at: int) -> int:
    if m.stack:
        m.pop()
    else:
        m.pop_mark()
    return at


@opcode(b"1")
def _pop_mark(m: MachineState, at: int) -> int:
    m.pop_mark()
    return at


@opcode(b"2")
def _dup(m: MachineState, at: int) -> int:
    m.stack.append(m.stack[-1])
    return at


@opcode(b"q")
def _binput(m: MachineState, at: int) -> int:
    m.put(m.data[at])
    return at + 1


@opcode(b"r")
def _long_binput(m: MachineState, at: int) -> int:
    m.put(_u32(m.data, at)[0])
    return at + 4


@opcode(b"p")
def _put(m: MachineState, at: int) -> int:
    text, at = m.line(at)
    m.put(int(text[:20]))
    return at


@opcode(b"\x94")
def _memoize(m: MachineState, at: int) -> int:
    m.put(len(m.memo) + m.runs.uncounted())
    return at


@opcode(b"h")
def _binget(m: MachineState, at: int) -> int:
    value = m.get(m.data[at])
    m.stack.append(value)
    return m.runs.skip(at - 1, at + 1) if value is m.runs.trigger else at + 1


@opcode(b"j")
def _long_binget(m: MachineState, at: int) -> int:
    number = _u32(m.data, at)[0]
    if number not in m.memo:
        return m.runs.fetch(number, at + 4)
    value = m.memo[number]
    m.stack.append(value)
    return m.runs.skip(at - 1, at + 4) if value is m.runs.trigger else at + 4


@opcode(b"g")
def _get(m: MachineState, at: int) -> int:
    text, at = m.line(at)
    m.stack.append(m.get(int(text[:20])))
    return at


# -- numbers and text of protocols 0 and 1 -----------------------------------------------------------------------------


@opcode(b"I")
def _int(m: MachineState, at: int) -> int:
    text, at = m.line(at)
    m.stack.append(text == "01" if text in ("00", "01") else _decimal(text))
    return at


@opcode(b"L")
def _long_text(m: MachineState, at: int) -> int:
    text, at = m.line(at)
    m.stack.append(_decimal(text.removesuffix("L")))
    return at


def _decimal(text: str) -> Any:
    return int(text) if len(text) <= MAX_INT_DIGITS else Opaque(f"an int of {len(text)} digits", (text,))


@opcode(b"F")
def _float(m: MachineState, at: int) -> int:
    text, at = m.line(at)
    m.stack.append(float(text))
    return at


@opcode(b"G")
def _binfloat(m: MachineState, at: int) -> int:
    m.stack.append(struct.unpack_from(">d", m.data, at)[0])
    return at + 8


@opcode(b"V")
def _unicode_line(m: MachineState, at: int) -> int:
    end = m.newline(at)
    m.stack.append(m.data[at:end].decode("raw-unicode-escape"))
    return end + 1


@opcode(b"S")
def _string_line(m: MachineState, at: int) -> int:
    end = m.newline(at)
    quoted = m.data[at:end]
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        raise PickleError("a quoted string without quotes")
    m.stack.append(_old_text(codecs.escape_decode(quoted[1:-1])[0]))
    return end + 1


# -- the opcodes that build objects: containers, names, calls and persistent ids; the others are in `opcodes` ----------


OLD_FIELDS = 5
"""Fields of `TensorProperties` up to torch 2.14, which unpacks as many; the sixth is `strides`.

Source: torch/distributed/checkpoint/metadata.py of 2.13 and 2.14.1 (`__setstate__`), files of 2.15, pytorch#194251.
"""

_SKIPPED = (ShardRecord, PlacementRecord, ChunkBatch, PlaceBatch)


# -- containers --------------------------------------------------------------------------------------------------------


@opcode(b"\x85")
def _tuple1(m: MachineState, at: int) -> int:
    m.stack[-1] = (m.stack[-1],)
    return at


@opcode(b"\x86")
def _tuple2(m: MachineState, at: int) -> int:
    second = m.stack.pop()
    m.stack[-1] = (m.stack[-1], second)
    return at


@opcode(b"\x87")
def _tuple3(m: MachineState, at: int) -> int:
    third, second = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], second, third)
    return at


@opcode(b"t")
def _tuple(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    m.stack.append(tuple(items))
    return at


@opcode(b"l")
def _list(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    m.stack.append(items)
    return at


@opcode(b"d")
def _dict(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    m.stack.append({})
    _set_items(m, m.stack[-1], items)
    return at


@opcode(b"\x91")
def _frozenset(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    m.stack.append(frozenset(map(m.key, items)))
    return at


@opcode(b"a")
def _append(m: MachineState, at: int) -> int:
    value = m.pop()
    _extend(m, m.stack[-1], [value])
    return at


@opcode(b"e")
def _appends(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    _extend(m, m.stack[-1], items)
    return at


@opcode(b"\x90")
def _additems(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    _extend(m, m.stack[-1], items)
    return at


@opcode(b"s")
def _setitem(m: MachineState, at: int) -> int:
    value, key = m.pop(), m.pop()
    _set_items(m, m.stack[-1], [key, value])
    return at


@opcode(b"u")
def _setitems(m: MachineState, at: int) -> int:
    items = m.pop_mark()
    _set_items(m, m.stack[-1], items)
    return at


def _extend(m: MachineState, target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, set):
        target.update(map(m.key, items))
    elif isinstance(target, Opaque):
        target.items.extend(items)
    else:
        raise PickleError(f"items are added to a {type(target).__name__}")


def _set_items(m: MachineState, target: Any, items: list[Any]) -> None:
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[key if type(key) is str else m.key(key)] = value
    elif isinstance(target, Opaque):
        target.pairs.extend((m.key(key), value) for key, value in pairs)
    else:
        raise PickleError(f"keys are set on a {type(target).__name__}")


# -- ints that follow each other ---------------------------------------------------------------------------------------


def _with_runs(code: bytes) -> None:
    """Let the handler of an opcode of an int read those behind its own too, where they are many."""
    single = DISPATCH[code[0]]

    def handler(m: MachineState, at: int) -> int:
        start = at - 1
        behind_mark = m.fast and not m.stack and bool(m.marks)
        if behind_mark and (spelled := m.repeated.values.tuple_at(m.data, start)):
            return _push_tuple(m, spelled, start)
        found = RUN.match(m.data, start) if m.fast else None
        if found is None:
            return single(m, at)
        end = found.end()
        if behind_mark and m.data[end : end + 1] == b"t":
            return _push_tuple(m, m.data[start : end + 1], start)
        ints = ints_of_run(found.group())
        m.stack += ints
        m.skipped += len(ints) - 1
        return end

    DISPATCH[code[0]] = handler


def _push_tuple(m: MachineState, spelled: bytes, start: int) -> int:
    """Push the tuple that a mark, the ints behind it and TUPLE make; return where to go on."""
    times = m.tuples_met[spelled] = m.tuples_met.get(spelled, 0) + 1
    ints = m.repeated.values.of_tuple(spelled, times)
    m.flat[id(ints)] = ints
    m.stack = m.marks.pop()
    m.stack.append(ints)
    m.skipped += len(ints)
    return start + len(spelled)


for _code in (b"J", b"\x8a"):
    _with_runs(_code)


# -- names and calls ---------------------------------------------------------------------------------------------------


@opcode(b"c")
def _global(m: MachineState, at: int) -> int:
    module, at = m.line(at)
    name, at = m.line(at)
    m.stack.append(m.name(module, name))
    return at


@opcode(b"\x93")
def _stack_global(m: MachineState, at: int) -> int:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise PickleError("a global whose name is not text")
    m.stack.append(m.name(module, name))
    return at


def _extension(code: bytes, width: int) -> None:
    def handler(m: MachineState, at: int) -> int:
        number = int.from_bytes(m.take(at, width), "little")
        m.stack.append(m.name("copyreg", f"extension {number}"))
        return at + width

    DISPATCH[code[0]] = handler


for _extended, _width in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4)):
    _extension(_extended, _width)


@opcode(b"R")
def _reduce(m: MachineState, at: int) -> int:
    args, function = m.pop(), m.pop()
    m.stack.append(call(m, function, args))
    return at


@opcode(b"\x81")
def _newobj(m: MachineState, at: int) -> int:
    return _reduce(m, at)


@opcode(b"\x92")
def _newobj_ex(m: MachineState, at: int) -> int:
    keywords, args, function = m.pop(), m.pop(), m.pop()
    if isinstance(function, Global):
        m.stack.append(Opaque(function.dotted, args, keywords))
    else:
        m.stack.append(Opaque("not a class", (function, args), keywords))
    return at


@opcode(b"i")
def _inst(m: MachineState, at: int) -> int:
    module, at = m.line(at)
    name, at = m.line(at)
    args = tuple(m.pop_mark())
    m.stack.append(call(m, m.name(module, name), args))
    return at


@opcode(b"o")
def _obj(m: MachineState, at: int) -> int:
    function, *args = m.pop_mark()
    m.stack.append(call(m, function, tuple(args)))
    return at


@opcode(b"b")
def _build(m: MachineState, at: int) -> int:
    state = m.pop()
    if isinstance(m.stack[-1], _SKIPPED):
        raise UnusualError("a skipped record gets another state")
    build(m.stack[-1], state)
    if type(state) is dict and "_modules" in state:
        m.modules = True
    elif type(state) is tuple and len(state) > OLD_FIELDS and type(m.stack[-1]) is Opaque:
        _meet_field(m, m.stack[-1].name)
    return at


@opcode(b"P")
def _persid(m: MachineState, at: int) -> int:
    text, at = m.line(at)
    m.stack.append(m.persistent(text))
    return at


@opcode(b"Q")
def _binpersid(m: MachineState, at: int) -> int:
    pid = m.pop()
    m.stack.append(m.persistent(pid))
    return at


def _meet_field(m: MachineState, name: str) -> None:
    """Count a field that only a newer torch's class has among the names that the pickle mentions."""
    module, _, last = name.rpartition(".")
    if last == "TensorProperties" and module.startswith("torch."):
        m.globals.setdefault((module, STRIDES), Global(module, STRIDES))


STRIDES = "TensorProperties.strides"


class Machine(MachineState):
    """Interprets one pickle.

    Attributes:
        dispatch: the handler of each opcode.
    """

    dispatch: Sequence[Handler] = DISPATCH

    def __init__(
        self,
        data: bytes,
        locate: Locate | None = None,
        fast: bool = True,
        reader: Reader = RunReader,
        repeated: RepeatedRecords | None = None,
    ) -> None:
        super().__init__(data, locate, fast, reader, repeated or RepeatedRecords(limit=0))

    def load(self, at: int = 0) -> Any:
        """Interpret the pickle that begins at `at` up to its STOP and return what it describes.

        Raises:
            PickleError: the stream is cut, malformed or beyond the budgets.
        """
        try:
            tree = self._load(at)
            if not self.runs.has_unresolved_records(tree):
                return tree
        except (PickleError, UnusualError):
            if not self.runs.runs:
                raise
        # Something that skipping cannot decide: once more, opcode by opcode.
        self._start(fast=False)
        return self._load(at)

    def _load(self, at: int) -> Any:
        data, dispatch = self.data, self.dispatch
        try:
            for handled in count(BLOCK, BLOCK):
                for _ in repeat(None, BLOCK):
                    at = dispatch[data[at]](self, at + 1)
                self.check_sizes()
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
        if not self.stack:
            raise PickleError("the pickle ends with nothing on its stack")
        return self.pop()


def _line(error: Exception) -> str:
    """Python's message about a value that does not fit; replaced when it repeats the file's content at length."""
    text = str(error)
    return text if text.isprintable() and len(text) < 200 else f"malformed: {type(error).__name__}"


# -- within limits: the tree, or one line that says why there is none --------------------------------------------------


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
    """The tree, within the budgets; where containers lie inside of themselves, cut there."""
    try:
        check_tree_limits(tree, machine.flat)
    except CycleError:
        tree = without_cycles(tree)
        check_tree_limits(tree)
    return tree


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many objects are made and none of them becomes garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# -- circles: where a container lies in itself, a `Cycle` says so ------------------------------------------------------


CONTAINERS = (dict, list, tuple)


def without_cycles(tree: Any) -> Any:
    """The tree with a `Cycle` in place of each container that is met again inside itself. Iterative, like all walks."""
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
    """The container with its children as they are now; one that is not done yet lies around this one.

    Args:
        node: the container.
        done: the containers that were remade, by `id`.
        path: the level of each container that this one lies in, and its own.
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
