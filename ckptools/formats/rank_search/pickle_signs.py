"""Rank, world size and step in a rank file's pickle, found without interpreting the pickle.

Interpreting takes twenty milliseconds, this one: the search looks for bytes that spell a name, then a small value. Its
results are never shown. They are compared with the results of the same search in a file that was interpreted, and where
the two differ, the file is read in full, which decides.

Source: CPython's Lib/pickletools.py for the opcodes. The names of ranks are those of ProcessGroupState
(torch/distributed/_shard/sharded_tensor/metadata.py and api.py) and of DeviceMesh (torch/distributed/device_mesh.py).
"""

from __future__ import annotations

import re
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

PUT = re.compile(rb"q.|r.{4}", re.DOTALL)
GETS = {b"q": b"h", b"r": b"j"}
"""Opcodes that store a value in the memo, and those that load it, with the same number behind them."""

SMALL = rb"(?:K(.)|M(..)|J(.{4}))"
"""An opcode with a number; only the widest is signed."""

MAX_SIGNS = 1000
"""Most places of one name in one pickle; a name with more counts no steps."""


class Signs(NamedTuple):
    """The rank, world size and step in a rank file's pickle.

    Attributes:
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
    mesh = re.search(re.escape(_spelled(PLACE)) + PLACES, pickle, re.DOTALL)
    place = tuple(b[0] for b in re.findall(rb"K(.)", mesh["place"], re.DOTALL)) if mesh else ()
    return Signs(rank, place, tuple(shared))


def _spelled(name: bytes) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name


def _numbers(pickle: bytes, name: bytes, limit: int) -> list[int]:
    """The first numbers that follow a name, where it is spelled and where the memo gives it again."""
    spelled = _spelled(name)
    at = pickle.find(spelled)
    if at < 0:
        return []
    stored = PUT.match(pickle, at + len(spelled))
    put = stored[0] if stored else b""
    opcodes = [spelled + put, GETS[put[:1]] + put[1:]] if put else [spelled]
    after = (re.compile(re.escape(one) + SMALL, re.DOTALL).finditer(pickle, at) for one in opcodes)
    found = sorted((match for matches in after for match in islice(matches, limit)), key=re.Match.start)
    return [int.from_bytes(m[m.lastindex or 0], "little", signed=m.lastindex == 3) for m in found[:limit]]
