"""How a pickle is spelled: its opcodes one after the other, compared with another pickle that differs in values only.

The files of ranks differ in a few numbers and texts: the rank, its place in a mesh, random states. Everything between
them is the same bytes, so that comparing costs a thousandth of interpreting.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError
from ckptools.pickles.opcodes import DISPATCH

VALUES = b"NKMJGX\x88\x89\x8a"
"""Opcodes that push a number, a text, a bool or None, and do nothing else. Source: Lib/pickletools.py."""

MAX_DIFFERING = 1 << 17
"""Values in which two pickles that are alike may differ."""

STRETCH = 256
"""Bytes that are compared at once where the next differing value is near; of equal ones more and more."""

MAX_STRETCH = 1 << 20

_BARE = b".()]}012NQRabdelostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"
_ARGUMENT = {b"Khq\x80": 1, b"M": 2, b"Jjr": 4, b"G\x95": 8}
_LENGTH = {b"UC\x8a\x8c": 1, b"XB": 4}
_LINES = {b"c": 2}


def _widths() -> list[tuple[int, int, int]]:
    """By opcode: bytes of its argument, bytes of the length before it, lines; of unknown ones nothing that fits."""
    widths = [(-1, 0, 0)] * 256
    for codes, width in ((_BARE, 0), *_ARGUMENT.items()):
        for code in codes:
            widths[code] = width, 0, 0
    for codes, width in _LENGTH.items():
        for code in codes:
            widths[code] = 0, width, 0
    for codes, lines in _LINES.items():
        widths[codes[0]] = 0, 0, lines
    return widths


_WIDTHS = _widths()


class Spelling:
    """The values in a pickle that was interpreted whole.

    Attributes:
        data: the pickle.
        starts: where the opcodes of its values begin, in order.

    Raises:
        ValueError: it has opcodes that torch.save does not write.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.starts = array("Q")
        at, end = 0, data.rindex(b".") + 1
        while at < end:
            if data[at] in VALUES:
                self.starts.append(at)
            at = _next(data, at)
        if at != end or end != len(data):
            raise ValueError("bytes behind the pickle")

    def differing(self, data: bytes) -> list[tuple[int, int]] | None:
        """The values in which another pickle differs: the number of each here, and where its opcode begins there.

        None where it differs in anything else, or in too much.
        """
        mine, found = self.data, list[tuple[int, int]]()
        at = other = 0
        while True:
            same = equal_bytes(mine, at, data, other)
            if at + same == len(mine) and other + same == len(data):
                return found
            number = bisect_right(self.starts, at + same) - 1
            start = self.starts[number] if number >= 0 else -1
            if start < at or len(found) >= MAX_DIFFERING:
                return None
            end, place = _next(mine, start), other + start - at
            if at + same >= end or place >= len(data) or data[place] not in VALUES:
                return None
            found.append((number, place))
            at, other = end, _next(data, place)


def _next(data: bytes, at: int) -> int:
    """Where the opcode behind the one at `at` begins, which may be behind the end.

    Raises:
        ValueError: it is none that torch.save writes.
    """
    argument, length, lines = _WIDTHS[data[at]]
    if argument < 0:
        raise ValueError(f"opcode {data[at]:#04x}")
    at += 1
    for _ in range(lines):
        at = data.index(b"\n", at) + 1
    return at + argument + length + int.from_bytes(data[at : at + length], "little")


def equal_bytes(a: bytes, at: int, b: bytes, other: int) -> int:
    """The number of bytes that are the same in both, from an offset in each."""
    count, stretch = 0, STRETCH
    while True:
        mine, theirs = a[at + count : at + count + stretch], b[other + count : other + count + stretch]
        if mine == theirs:
            if len(mine) < stretch:
                return count + len(mine)
            count, stretch = count + stretch, min(stretch * 4, MAX_STRETCH)
        elif stretch > STRETCH:
            stretch = STRETCH if stretch <= 4 * STRETCH else stretch // 16
        else:
            most = min(len(mine), len(theirs))
            bits = int.from_bytes(mine[:most], "little") ^ int.from_bytes(theirs[:most], "little")
            return count + (((bits & -bits).bit_length() - 1) // 8 if bits else most)


def values_at(data: bytes, places: Mapping[int, int]) -> dict[int, Any] | None:
    """The value that the opcode at each place of a pickle pushes; None where one is malformed."""
    machine = Machine(data, fast=False)
    found: dict[int, Any] = {}
    try:
        for number, place in places.items():
            DISPATCH[data[place]](machine, place + 1)
            found[number] = machine.pop()
    except (PickleError, ValueError, ArithmeticError, LookupError):
        return None
    return found
