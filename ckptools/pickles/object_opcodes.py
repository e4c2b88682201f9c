"""The opcodes that build objects: containers, names, calls and persistent ids; the others are in `opcodes`."""

from __future__ import annotations

from typing import Any

from ckptools.model.values import Global, Opaque
from ckptools.pickles.classes.rebuild import build, call
from ckptools.pickles.machine_state import MachineState, PickleError, UnusualError
from ckptools.pickles.objects import ChunkBatch, PlaceBatch, PlacementRecord, ShardRecord
from ckptools.pickles.opcodes import DISPATCH, opcode
from ckptools.pickles.repeated import RUN, ints_of_run

OLD_FIELDS = 5
"""Fields of `TensorProperties` up to torch 2.14, which unpacks as many; the sixth is `strides`.

Source: torch/distributed/checkpoint/metadata.py of 2.13 and 2.14.1 (`__setstate__`), files of 2.15, pytorch#194251.
"""

_SKIPPED = (ShardRecord, PlacementRecord, ChunkBatch, PlaceBatch)


# -- containers ------------------------------------------------------------------------------------------


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


# -- ints that follow each other -------------------------------------------------------------------------


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


# -- names and calls -------------------------------------------------------------------------------------


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
