"""The table of opcodes, and those of the stack, the memo, numbers and text; `object_opcodes` has the others.

A handler is called with the offset behind its opcode and returns the offset of the next one. Nothing here looks a
name up or calls one; a read behind the end raises IndexError or struct.error, which the machine turns into a line.
Protocols 0 to 5; source: Lib/pickletools.py.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from sys import intern
from typing import Any

from ckptools.model.values import Opaque
from ckptools.pickles.machine_state import MAX_INT_BYTES, MAX_INT_DIGITS, MAX_STACK, MachineState, PickleError

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


# -- stream ----------------------------------------------------------------------------------------------


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


# -- stack and memo --------------------------------------------------------------------------------------


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


# -- numbers and text of protocols 0 and 1 ---------------------------------------------------------------


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
