"""The same file as it would be of another step: other values, other counters, and checksums that are right."""

from __future__ import annotations

import pickletools
import struct
import zlib
from collections.abc import Iterator

from ckptools.training_state.steps import COUNTERS

LOCAL = b"PK\x03\x04"
CENTRAL = struct.Struct("<4s6H3I5H2I")
CENTRAL_MAGIC = b"PK\x01\x02"
COUNTED = (*COUNTERS, "last_epoch", "_step_count")


def of_another_step(data: bytes) -> bytes | None:
    """The torch.save archives that `data` is, one behind the other, with other values and steps; None for others."""
    changed = bytearray(data)
    found = 0
    for entry in _entries(data):
        found += 1
        _change(changed, *entry)
    return bytes(changed) if found and bytes(changed) != data else None


def _entries(data: bytes) -> Iterator[tuple[int, int, str, int, int]]:
    """Directory entry, archive start, name, offset of the bytes and their number, of every stored record."""
    for end in _all(data, b"PK\x05\x06"):
        size, offset = struct.unpack_from("<2I", data, end + 12)
        at = end - size
        # A 64-bit end record and its locator lie between the directory and the end record.
        if data[at : at + 4] != CENTRAL_MAGIC:
            at = end - size - 76
        if data[at : at + 4] != CENTRAL_MAGIC:
            continue
        start = at - offset
        while data[at : at + 4] == CENTRAL_MAGIC:
            fields = CENTRAL.unpack_from(data, at)
            method, nbytes, n_name, n_extra, n_comment, local = (*(fields[i] for i in (4, 9, 10, 11, 12)), fields[16])
            name = data[at + CENTRAL.size : at + CENTRAL.size + n_name].decode()
            head = start + local
            if data[head : head + 4] == LOCAL and method == 0:
                skip = struct.unpack_from("<2H", data, head + 26)
                yield at, head, name.partition("/")[2], head + 30 + sum(skip), nbytes
            at += CENTRAL.size + n_name + n_extra + n_comment


def _all(data: bytes, word: bytes) -> Iterator[int]:
    at = data.find(word)
    while at >= 0:
        yield at
        at = data.find(word, at + 1)


def _change(data: bytearray, central: int, local: int, name: str, at: int, nbytes: int) -> None:
    old = bytes(data[at : at + nbytes])
    if name == "data.pkl":
        new = _counted_on(old)
    elif name.startswith("data/"):
        new = _other_values(old)
    else:
        return
    data[at : at + nbytes] = new
    was, now = struct.pack("<I", zlib.crc32(old)), struct.pack("<I", zlib.crc32(new))
    for place in (central + 16, local + 14, at + nbytes + 4):
        if data[place : place + 4] == was:
            data[place : place + 4] = now


def _other_values(data: bytes) -> bytes:
    """Other numbers, none of them absurd: a count of steps goes on by one, of all else a low bit changes."""
    if len(data) == 4 and data[:2] == bytes(2) and any(data):
        return struct.pack("<f", struct.unpack("<f", data)[0] + 1)
    return bytes(b ^ 1 if n % 4 == 0 and b else b for n, b in enumerate(data))


def _counted_on(pickle: bytes) -> bytes:
    """The pickle with one added to every counter of steps that is a small int."""
    changed, key = bytearray(pickle), None
    remembered: dict[int, str] = {}  # a key that was there before is only referred to
    for op, arg, at in pickletools.genops(pickle):
        if "UNICODE" in op.name:
            key = arg
        elif "PUT" in op.name and key is not None:
            remembered[arg] = key
        elif "GET" in op.name:
            key = remembered.get(arg)
        elif "PUT" not in op.name and op.name != "MEMOIZE":
            if key in COUNTED and op.name == "BININT1" and at is not None:
                changed[at + 1] = (changed[at + 1] + 1) % 256
            key = None
    return bytes(changed)
