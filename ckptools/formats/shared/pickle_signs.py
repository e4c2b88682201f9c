"""What a rank file's pickle says of its rank, its world and its step, told without interpreting the pickle.

Interpreting takes twenty milliseconds, this one: bytes are looked for that spell a name, then a small value. What is
found so is never shown to anybody. It is held against what the same search finds in a file that was interpreted, and
where the two do not say the same, the file is read in full, which decides.

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
"""Pickles whose memo is numbered by their own opcodes; torch.save writes protocol 2."""

RANK = (b"global_rank", b"_rank")
PLACE = b"_coordinate_on_dim"
WORLD = b"global_world_size"
SHARED = (b"last_epoch", b"_step_count", b"rank_zero_seed", *(c.encode() for c in COUNTERS))
"""What every rank's file has alike, in each of its places."""

STORED = rb"(?:q(?P<short>.)|r(?P<long>.{4}))?"
NUMBER = rb"(?:K(?P<one>.)|M(?P<two>..)|J(?P<four>.{4}))"
PLACES = rb"\](?:q.|r.{4})?(?P<place>K.a|\((?:K.)+e)"

MAX_SIGNS = 1000
"""Places of one name in one pickle; a name that has more counts no steps."""


class Signs(NamedTuple):
    """What was found in one pickle.

    Attributes:
        rank: of the process; None where nothing spells it.
        place: coordinate in the first device mesh; empty where nothing spells one.
        shared: names and numbers that all ranks should have alike, in order.
    """

    rank: int | None
    place: tuple[int, ...]
    shared: tuple[tuple[bytes, int], ...]


def signs_in(path: Path) -> Signs | None:
    """The signs in a torch.save file; None where it has to be read in full to know.

    Raises:
        ReadError: it is cut short or damaged.
    """
    with File(path) as file:
        if content_of(head_of(file)) != "zip":
            return None
        pickle = Container(file).read("data.pkl")
    return find_signs(pickle) if pickle[:2] in PROTOCOLS else None


def find_signs(pickle: bytes) -> Signs:
    """The signs in a pickle of protocol 2 or 3."""
    rank = next((value for name in RANK for value in _numbers(pickle, name)), None)
    place = re.search(_named(PLACE) + PLACES, pickle, re.DOTALL)
    shared = [(WORLD, value) for value in islice(_numbers(pickle, WORLD), 1)]
    shared += [(name, value) for name in SHARED for value in islice(_numbers(pickle, name), MAX_SIGNS)]
    return Signs(
        rank, tuple(b[0] for b in re.findall(rb"K(.)", place["place"], re.DOTALL)) if place else (), tuple(shared)
    )


def _named(name: bytes) -> bytes:
    """Pattern of the first time that a pickle spells a name, and of the place in the memo where it is kept."""
    return re.escape(b"X" + len(name).to_bytes(4, "little") + name) + STORED


def _numbers(pickle: bytes, name: bytes) -> Iterator[int]:
    """The numbers that follow a name, where it is spelled and where the memo gives it again."""
    at = pickle.find(b"X" + len(name).to_bytes(4, "little") + name)
    spelled = re.compile(_named(name), re.DOTALL).match(pickle, max(at, 0))
    if spelled is None:
        return
    again = b"h" + spelled["short"] if spelled["short"] else b"j" + (spelled["long"] or b"")
    names = [spelled[0], *([again] if len(again) > 1 else [])]
    pattern = b"(?:" + b"|".join(map(re.escape, names)) + b")" + NUMBER
    for found in re.compile(pattern, re.DOTALL).finditer(pickle, at):
        yield int.from_bytes(found["one"] or found["two"] or found["four"], "little", signed=bool(found["four"]))
