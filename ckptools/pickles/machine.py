"""A pickle machine to which a global is only ever a name.

It interprets the opcodes itself, so nothing that a pickle names is imported or called, and every length is
compared with the bytes that remain before anything is allocated. Where a pickle would call something, `rebuild`
decides: a known harmless shape is built by our own code, anything else becomes an `Opaque`.

Work and memory are linear in the size of the pickle, and the budgets below bound the rest. Opcodes are those of
protocols 0 to 5; source: Lib/pickletools.py.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

from ckptools.pickles import tensors  # noqa: F401 - registers what tensors are rebuilt from
from ckptools.pickles.rebuild import Storage, build, call
from ckptools.pickles.shard_runs import Placement, RunReader, ShardRecord, UnusualError, leaks
from ckptools.pickles.told import told
from ckptools.values import Global, NumpyScalar, Opaque

MAX_OPCODES = 50_000_000
MAX_STACK = 4_000_000
MAX_MEMO = 8_000_000
MAX_INT_BYTES = 1024
"""Larger ints are described: Python refuses to print them."""

MAX_INT_DIGITS = 2400
MAX_FLAT_KEY = 64
MAX_TUPLE_KEYS = 10_000
"""Tuples of ints can be chosen to collide; of so many the worst takes a few seconds."""

SAFE_INT = 2**61 - 1
"""Python hashes an int modulo this: larger ones can be chosen to collide, so they do not become dict keys."""

HARMLESS_KEYS = (str, bytes, bool, float, type(None), date)

FREE_WORK = 1_000_000
WORK_PER_BYTE = 2
"""Elements that calls may go through: no more than the pickle can have spelled out for them, with some room."""


class PickleError(ValueError):
    """The stream is no pickle that torch.save writes, or asks for more than the budgets allow."""


Locate = Callable[[Storage], tuple[Path, int, str, int]]


class Machine:
    """Interprets one pickle.

    Attributes:
        data: the pickle.
        stack: values under construction above the last mark.
        memo: what the pickle has given a number.
        globals: every name that the pickle mentions, in order of first use.
        next_number: one more than the highest number given; picklers count upwards.
        storages: every storage that it mentions, by key.
        claims: `(rank, world size)` that sharded tensors in it say they were saved with; the rank may be None.
        layouts: what DTensors of one layout have in common.
        runs: reads the shard lists of ShardedTensors.
        work: how many more elements calls may go through: a call may name a big list again and again.
        tuple_keys: tuples that are keys.
        locate: tells where a storage's bytes are: `(file, byte offset, record name, CRC-32)`. None when it has none.
        stopped_at: offset behind STOP; None while it was not met.
    """

    def __init__(self, data: bytes, locate: Locate | None = None, fast: bool = True) -> None:
        self.data = data
        self.locate = locate
        self._start(fast)

    def _start(self, fast: bool) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.next_number = 0
        self.globals: dict[tuple[str, str], Global] = {}
        self.storages: dict[str, Storage] = {}
        self.claims: set[tuple[int | None, int]] = set()
        self.layouts: dict[Any, Any] = {}
        self.runs = RunReader(self, fast)
        self.work = FREE_WORK + WORK_PER_BYTE * len(self.data)
        self.tuple_keys = 0
        self.stopped_at: int | None = None

    def load(self, at: int = 0) -> Any:
        """Interpret the pickle that begins at `at` up to its STOP and return what it describes.

        Raises:
            PickleError: the stream is cut, malformed or beyond the budgets.
        """
        try:
            tree = self._load(at)
            if not (self.runs.runs and leaks(tree)):
                return tree
        except (PickleError, UnusualError):
            if not self.runs.runs:
                raise
        # Something that only the opcodes themselves tell: once more, skipping nothing.
        self._start(fast=False)
        return self._load(at)

    def _load(self, at: int) -> Any:
        data, dispatch = self.data, DISPATCH
        try:
            for _ in repeat(None, MAX_OPCODES):
                at = dispatch[data[at]](self, at + 1)
            raise PickleError(f"more than {MAX_OPCODES} opcodes")
        except Stop as stop:
            self.stopped_at = stop.at
        except (IndexError, KeyError, struct.error) as error:
            if at >= len(data):
                raise PickleError("the pickle ends without STOP") from error
            raise PickleError(f"malformed pickle near byte {at}") from error
        except (PickleError, UnusualError):
            raise
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise PickleError(f"{_line(error)} (pickle byte {at})") from error
        if not self.stack:
            raise PickleError("the pickle ends with nothing on its stack")
        return self.pop()

    # -- what handlers need -------------------------------------------------------------------------------

    def pop(self) -> Any:
        """Take the top of the stack."""
        return self.stack.pop()

    def push(self, value: Any) -> None:
        """Put `value` on the stack."""
        if len(self.stack) >= MAX_STACK:
            raise PickleError(f"more than {MAX_STACK} values on the pickle's stack")
        self.stack.append(value)

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def take(self, at: int, length: int) -> bytes:
        """Return `length` bytes at `at`."""
        self.check(at, length)
        return self.data[at : at + length]

    def check(self, at: int, length: int) -> None:
        """Refuse a length that runs past the end."""
        if at + length > len(self.data):
            raise PickleError(f"a length of {length} where {max(len(self.data) - at, 0)} bytes remain")

    def spend(self, elements: int) -> None:
        """Account for a call that goes through so many elements.

        Raises:
            PickleError: calls have gone through more than the pickle can mean.
        """
        self.work -= elements
        if self.work < 0:
            raise PickleError("its calls unfold to far more than the pickle holds")

    def line(self, at: int) -> tuple[str, int]:
        """Return the text up to the next newline, and where to go on."""
        end = self.data.find(b"\n", at)
        if end < 0:
            raise PickleError("a text argument without an end")
        return self.data[at:end].decode("utf-8"), end + 1

    def put(self, index: int) -> None:
        """Give the top of the stack a number."""
        if index < self.next_number:
            self.runs.stop()
        if len(self.memo) >= MAX_MEMO:
            raise PickleError(f"more than {MAX_MEMO} memo entries")
        self.memo[index] = self.stack[-1]
        self.next_number = max(self.next_number, index + 1)

    def get(self, index: int) -> Any:
        """Return what has the number `index`."""
        if index not in self.memo and self.runs.runs:
            raise UnusualError("a number that may be of a skipped record")
        return self.memo[index]

    def key(self, key: Any) -> Any:
        """Return `key`, or an object that stands for it, such that hashing it costs little and cannot be made to.

        Containers that share structure take forever to hash, and big ints can be made to collide; such keys do not
        occur in real checkpoints and are kept by identity.
        """
        if _flat(key):
            return key
        if isinstance(key, tuple) and len(key) <= MAX_FLAT_KEY and all(map(_flat, key)):
            self.tuple_keys += 1
            if self.tuple_keys <= MAX_TUPLE_KEYS:
                return key
        if isinstance(key, (Global, Opaque, NumpyScalar, ShardRecord, Placement)):
            return key
        odd = Opaque(f"a {type(key).__name__} used as a key")
        odd.state = key
        return odd

    def name(self, module: str, name: str) -> Global:
        """Return the one `Global` for a name."""
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
            self.runs.meet(found)
        return found

    def rebuild(self, function: Global, args: tuple[Any, ...]) -> Any:
        """Return what the call `function(*args)` stands for."""
        return call(self, function, args)

    def persistent(self, pid: Any) -> Any:
        """Return the storage that a persistent id describes."""
        storage = Storage.from_pid(pid)
        known = self.storages.setdefault(storage.key, storage)
        if (known.dtype, known.numel) != (storage.dtype, storage.numel):
            raise PickleError(f"storage {told(storage.key)} is described in two ways")
        return known


def _line(error: Exception) -> str:
    """What Python says of a value that does not fit; not when it repeats what the file chose at length."""
    text = str(error)
    return text if text.isprintable() and len(text) < 200 else f"malformed: {type(error).__name__}"


class Stop(Exception):  # noqa: N818 - it is no error
    """The STOP opcode."""

    def __init__(self, at: int) -> None:
        self.at = at


Handler = Callable[[Machine, int], int]


def _unknown(m: Machine, at: int) -> int:
    raise PickleError(f"unknown pickle opcode {m.data[at - 1]:#04x}")


DISPATCH: list[Handler] = [_unknown] * 256


def opcode(code: bytes) -> Callable[[Handler], Handler]:
    """Register a handler: called with the offset behind the opcode, it returns the offset of the next one."""

    def register(handler: Handler) -> Handler:
        DISPATCH[code[0]] = handler
        return handler

    return register


def _constant(code: bytes, make: Callable[[], Any]) -> None:
    def handler(m: Machine, at: int) -> int:
        m.push(make())
        return at

    DISPATCH[code[0]] = handler


def _number(code: bytes, size: int, signed: bool) -> None:
    def handler(m: Machine, at: int) -> int:
        m.push(int.from_bytes(m.take(at, size), "little", signed=signed))
        return at + size

    DISPATCH[code[0]] = handler


def _sized(code: bytes, width: int, make: Callable[[bytes], Any]) -> None:
    """An opcode with a length of `width` bytes and that many bytes behind it."""

    def handler(m: Machine, at: int) -> int:
        length = int.from_bytes(m.take(at, width), "little")
        m.push(make(m.take(at + width, length)))
        return at + width + length

    DISPATCH[code[0]] = handler


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _old_text(data: bytes) -> str:
    # A str of Python 2, which may be bytes; torch reads it as UTF-8.
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin1")


def _long(data: bytes) -> Any:
    if len(data) > MAX_INT_BYTES:
        return Opaque(f"an int of {8 * len(data)} bits")
    return int.from_bytes(data, "little", signed=True)


for _code, _make in ((b"N", lambda: None), (b"\x88", lambda: True), (b"\x89", lambda: False)):
    _constant(_code, _make)
for _code, _kind in ((b"]", list), (b"}", dict), (b")", tuple)):
    _constant(_code, _kind)
for _code, _size, _signed in ((b"K", 1, False), (b"M", 2, False), (b"J", 4, True)):
    _number(_code, _size, _signed)
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
def _empty_set(m: Machine, at: int) -> int:
    m.spend(8)  # one byte of pickle, 216 of memory
    m.push(set())
    return at


# -- stream ----------------------------------------------------------------------------------------------


@opcode(b"\x80")
def _proto(m: Machine, at: int) -> int:
    return at + 1


@opcode(b"\x95")
def _frame(m: Machine, at: int) -> int:
    m.check(at + 8, int.from_bytes(m.take(at, 8), "little"))
    return at + 8


@opcode(b".")
def _stop(m: Machine, at: int) -> int:
    raise Stop(at)


# -- stack and memo --------------------------------------------------------------------------------------


@opcode(b"(")
def _mark(m: Machine, at: int) -> int:
    if len(m.marks) >= MAX_STACK:
        raise PickleError("too many marks")
    m.marks.append(m.stack)
    m.stack = []
    return at


@opcode(b"0")
def _pop(m: Machine, at: int) -> int:
    if m.stack:
        m.pop()
    else:
        m.pop_mark()
    return at


@opcode(b"1")
def _pop_mark(m: Machine, at: int) -> int:
    m.pop_mark()
    return at


@opcode(b"2")
def _dup(m: Machine, at: int) -> int:
    m.push(m.stack[-1])
    return at


@opcode(b"q")
def _binput(m: Machine, at: int) -> int:
    m.put(m.data[at])
    return at + 1


@opcode(b"r")
def _long_binput(m: Machine, at: int) -> int:
    m.put(int.from_bytes(m.take(at, 4), "little"))
    return at + 4


@opcode(b"p")
def _put(m: Machine, at: int) -> int:
    text, at = m.line(at)
    m.put(int(text[:20]))
    return at


@opcode(b"\x94")
def _memoize(m: Machine, at: int) -> int:
    if m.runs.runs:
        raise UnusualError("numbers by counting, and skipped records were not counted")
    m.put(len(m.memo))
    return at


@opcode(b"h")
def _binget(m: Machine, at: int) -> int:
    value = m.get(m.data[at])
    m.push(value)
    return m.runs.skip(at - 1, at + 1) if value is m.runs.trigger else at + 1


@opcode(b"j")
def _long_binget(m: Machine, at: int) -> int:
    number = int.from_bytes(m.take(at, 4), "little")
    if number not in m.memo:
        return m.runs.fetch(number, at + 4)
    value = m.memo[number]
    m.push(value)
    return m.runs.skip(at - 1, at + 4) if value is m.runs.trigger else at + 4


@opcode(b"g")
def _get(m: Machine, at: int) -> int:
    text, at = m.line(at)
    m.push(m.get(int(text[:20])))
    return at


# -- numbers and text of protocols 0 and 1 ---------------------------------------------------------------


@opcode(b"I")
def _int(m: Machine, at: int) -> int:
    text, at = m.line(at)
    m.push(text == "01" if text in ("00", "01") else _decimal(text))
    return at


@opcode(b"L")
def _long_text(m: Machine, at: int) -> int:
    text, at = m.line(at)
    m.push(_decimal(text.removesuffix("L")))
    return at


def _decimal(text: str) -> Any:
    return int(text) if len(text) <= MAX_INT_DIGITS else Opaque(f"an int of {len(text)} digits")


@opcode(b"F")
def _float(m: Machine, at: int) -> int:
    text, at = m.line(at)
    m.push(float(text))
    return at


@opcode(b"G")
def _binfloat(m: Machine, at: int) -> int:
    m.push(struct.unpack_from(">d", m.data, at)[0])
    return at + 8


@opcode(b"V")
def _unicode_line(m: Machine, at: int) -> int:
    end = m.data.index(b"\n", at)
    m.push(m.data[at:end].decode("raw-unicode-escape"))
    return end + 1


@opcode(b"S")
def _string_line(m: Machine, at: int) -> int:
    end = m.data.index(b"\n", at)
    quoted = m.data[at:end]
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        raise PickleError("a quoted string without quotes")
    m.push(_old_text(codecs.escape_decode(quoted[1:-1])[0]))
    return end + 1


# -- containers ------------------------------------------------------------------------------------------


@opcode(b"\x85")
def _tuple1(m: Machine, at: int) -> int:
    m.stack[-1] = (m.stack[-1],)
    return at


@opcode(b"\x86")
def _tuple2(m: Machine, at: int) -> int:
    second = m.stack.pop()
    m.stack[-1] = (m.stack[-1], second)
    return at


@opcode(b"\x87")
def _tuple3(m: Machine, at: int) -> int:
    third, second = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], second, third)
    return at


@opcode(b"t")
def _tuple(m: Machine, at: int) -> int:
    items = m.pop_mark()
    m.push(tuple(items))
    return at


@opcode(b"l")
def _list(m: Machine, at: int) -> int:
    m.push(m.pop_mark())
    return at


@opcode(b"d")
def _dict(m: Machine, at: int) -> int:
    items = m.pop_mark()
    m.push({})
    _set_items(m, m.stack[-1], items)
    return at


@opcode(b"\x91")
def _frozenset(m: Machine, at: int) -> int:
    items = m.pop_mark()
    m.push(frozenset(map(m.key, items)))
    return at


@opcode(b"a")
def _append(m: Machine, at: int) -> int:
    value = m.pop()
    _extend(m, m.stack[-1], [value])
    return at


@opcode(b"e")
def _appends(m: Machine, at: int) -> int:
    items = m.pop_mark()
    _extend(m, m.stack[-1], items)
    return at


@opcode(b"\x90")
def _additems(m: Machine, at: int) -> int:
    items = m.pop_mark()
    _extend(m, m.stack[-1], items)
    return at


@opcode(b"s")
def _setitem(m: Machine, at: int) -> int:
    value, key = m.pop(), m.pop()
    _set_items(m, m.stack[-1], [key, value])
    return at


@opcode(b"u")
def _setitems(m: Machine, at: int) -> int:
    items = m.pop_mark()
    _set_items(m, m.stack[-1], items)
    return at


def _extend(m: Machine, target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, set):
        target.update(map(m.key, items))
    elif isinstance(target, Opaque):
        target.items.extend(items)
    else:
        raise PickleError(f"items are added to a {type(target).__name__}")


def _set_items(m: Machine, target: Any, items: list[Any]) -> None:
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[key if type(key) is str else m.key(key)] = value
    elif isinstance(target, Opaque):
        target.items.extend(pairs)
    else:
        raise PickleError(f"keys are set on a {type(target).__name__}")


def _flat(key: Any) -> bool:
    return isinstance(key, HARMLESS_KEYS) or (isinstance(key, int) and abs(key) < SAFE_INT)


# -- names and calls -------------------------------------------------------------------------------------


@opcode(b"c")
def _global(m: Machine, at: int) -> int:
    module, at = m.line(at)
    name, at = m.line(at)
    m.push(m.name(module, name))
    return at


@opcode(b"\x93")
def _stack_global(m: Machine, at: int) -> int:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise PickleError("a global whose name is not text")
    m.push(m.name(module, name))
    return at


def _extension(code: bytes, width: int) -> None:
    def handler(m: Machine, at: int) -> int:
        number = int.from_bytes(m.take(at, width), "little")
        m.push(m.name("copyreg", f"extension {number}"))
        return at + width

    DISPATCH[code[0]] = handler


for _code, _width in ((b"\x82", 1), (b"\x83", 2), (b"\x84", 4)):
    _extension(_code, _width)


@opcode(b"R")
def _reduce(m: Machine, at: int) -> int:
    args, function = m.pop(), m.pop()
    m.push(call(m, function, args))
    return at


@opcode(b"\x81")
def _newobj(m: Machine, at: int) -> int:
    return _reduce(m, at)


@opcode(b"\x92")
def _newobj_ex(m: Machine, at: int) -> int:
    keywords, args, function = m.pop(), m.pop(), m.pop()
    name = function.dotted if isinstance(function, Global) else "not a class"
    m.push(Opaque(name, args, keywords))
    return at


@opcode(b"i")
def _inst(m: Machine, at: int) -> int:
    module, at = m.line(at)
    name, at = m.line(at)
    args = tuple(m.pop_mark())
    m.push(call(m, m.name(module, name), args))
    return at


@opcode(b"o")
def _obj(m: Machine, at: int) -> int:
    function, *args = m.pop_mark()
    m.push(call(m, function, tuple(args)))
    return at


@opcode(b"b")
def _build(m: Machine, at: int) -> int:
    state = m.pop()
    if isinstance(m.stack[-1], (ShardRecord, Placement)):
        raise UnusualError("a skipped record gets another state")
    build(m.stack[-1], state)
    return at


@opcode(b"P")
def _persid(m: Machine, at: int) -> int:
    text, at = m.line(at)
    m.push(m.persistent(text))
    return at


@opcode(b"Q")
def _binpersid(m: Machine, at: int) -> int:
    pid = m.pop()
    m.push(m.persistent(pid))
    return at
