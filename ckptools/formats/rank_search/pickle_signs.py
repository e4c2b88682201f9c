"""Rank, world size and step in a rank file's pickle, found without interpreting the pickle.

Interpreting takes twenty milliseconds, this one: the search looks for bytes that spell a name, then a small value. Its
results are never shown. They are compared with the results of the same search in a file that was interpreted, and where
the two differ, the file is read in full, which decides.

Source: CPython's Lib/pickletools.py for the opcodes. The names of ranks are those of ProcessGroupState
(torch/distributed/_shard/sharded_tensor/metadata.py and api.py) and of DeviceMesh (torch/distributed/device_mesh.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptools.files.file_type import content_of, head_of
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container
from ckptools.training_state.steps import COUNTERS

PROTOCOLS = (b"\x80\x02", b"\x80\x03")
"""Protocols with memo opcodes that carry their numbers; torch.save writes protocol 2."""

RANK = (b"global_rank", b"_rank")
PLACE = b"_coordinate_on_dim"
WORLD = b"global_world_size"
SHARED = (b"last_epoch", b"_step_count", b"rank_zero_seed", *(c.encode() for c in COUNTERS))
"""Counters and seeds that all ranks' files have alike."""

PLACES = rb"(?:q.|r.{4})?\](?:q.|r.{4})?(?P<place>K.a|\((?:K.)+e)"

WIDTHS = {b"K": 1, b"M": 2, b"J": 4}
"""Bytes of the number behind an opcode; only the widest is signed."""

MAX_SIGNS = 1000
"""Most places of one name in one pickle; a name with more counts no steps."""


class Signs(NamedTuple):
    """The rank, world size and step in a rank file's pickle.

    Attributes:
        rank: of the process; None where not found.
        place: coordinate in the first device mesh; empty where not found.
        shared: names and numbers that all ranks should have alike, in order.
    """

    rank: int | None
    place: tuple[int, ...]
    shared: tuple[tuple[bytes, int], ...]


def signs_in(path: Path) -> Signs | None:
    """Find the signs in a torch.save file; None where it has to be read in full.

    Raises:
        ReadError: it is cut short or damaged.
    """
    with File(path) as file:
        if content_of(head_of(file)) != "zip":
            return None
        pickle = Container(file).read("data.pkl")
    return find_signs(pickle) if pickle[:2] in PROTOCOLS else None


def find_signs(pickle: bytes) -> Signs:
    """Find the signs in a pickle of protocol 2 or 3."""
    rank = next((value for name in RANK for value in _numbers(pickle, name, 1)), None)
    shared = [(WORLD, value) for value in _numbers(pickle, WORLD, 1)]
    shared += [(name, value) for name in SHARED for value in _numbers(pickle, name, MAX_SIGNS)]
    return Signs(rank, _place(pickle), tuple(shared))


def _place(pickle: bytes) -> tuple[int, ...]:
    """The coordinate in the first device mesh; empty where not found."""
    spelled = _spelled(PLACE)
    if spelled not in pickle:
        return ()
    found = re.search(re.escape(spelled) + PLACES, pickle, re.DOTALL)
    return tuple(b[0] for b in re.findall(rb"K(.)", found["place"], re.DOTALL)) if found else ()


def _spelled(name: bytes) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name


def _numbers(pickle: bytes, name: bytes, limit: int) -> list[int]:
    """The first numbers that follow a name, where it is spelled and where the memo gives it again."""
    spelled = _spelled(name)
    at = pickle.find(spelled)
    if at < 0:
        return []
    put, get = _memo_opcodes(pickle, at + len(spelled))
    found = list(islice(_numbers_behind(pickle, spelled + put, at), limit))
    if get:
        found += islice(_numbers_behind(pickle, get, at), limit)
    return [value for _, value in sorted(found)[:limit]]


def _memo_opcodes(pickle: bytes, at: int) -> tuple[bytes, bytes]:
    """The memo's store and load opcodes for the value at a place; empty where it is not stored."""
    opcode = pickle[at : at + 1]
    if opcode == b"q":
        return pickle[at : at + 2], b"h" + pickle[at + 1 : at + 2]
    if opcode == b"r":
        return pickle[at : at + 5], b"j" + pickle[at + 1 : at + 5]
    return b"", b""


def _numbers_behind(pickle: bytes, opcodes: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Small numbers right behind some opcodes, each with its place; from `at` on."""
    while (at := pickle.find(opcodes, at)) >= 0:
        at += len(opcodes)
        width = WIDTHS.get(pickle[at : at + 1])
        if width:
            yield at, int.from_bytes(pickle[at + 1 : at + 1 + width], "little", signed=width == 4)
