"""Files that are copies of each other under two names, told by the checksums that their containers state.

Nothing is read for it. A few elements may be equal by chance; zeros are moments before the first step, ones the weights
of a norm, and both are equal wherever they are: none of these proves a copy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath

Checksum = tuple[str, int, int]
"""`(dtype, CRC-32, bytes)`: what is stated of a tensor."""

MIN_TELLING = 16
"""Elements below which equal files may be chance."""

BLOCK = 1 << 20
"""Bytes whose checksum is computed at a time."""

ONES = {
    "float64": struct.pack("<d", 1),
    "float32": struct.pack("<f", 1),
    "float16": struct.pack("<e", 1),
    "bfloat16": struct.pack("<f", 1)[2:],
}
"""The bytes of the number one."""


def stated_checksum(value: Any, whole: bool = False) -> Checksum | None:
    """The checksum of the record that a tensor lies in; None for anything of which none is stated.

    Args:
        value: a tensor of one shard, or anything else.
        whole: state none of a tensor that is a part of its record.
    """
    source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
    if source is None or not source.crc or (whole and value.nbytes != source.record_span[1]):
        return None
    return source.dtype, source.crc, value.nbytes


def check_copies(tensors: Iterable[tuple[KeyPath, Tensor]]) -> Iterator[Problem]:
    """Problems of files with the same bytes for different places of tensors: one was copied over the other.

    Replicas have the same places, and are none.
    """
    places: dict[Path, set[tuple[KeyPath, Box]]] = {}
    records: dict[Path, set[tuple[str, str, int, int]]] = {}
    ranks: dict[Path, int] = {}
    for path, tensor in tensors:
        for shard in tensor.found if tensor.sharded else ():
            for source in shard.sources if shard.box.numel else ():
                if source.crc and shard.rank is not None:
                    ranks[source.path] = shard.rank
                    places.setdefault(source.path, set()).add((path, shard.box))
                    record = source.record, source.dtype, source.crc, source.record_span[1]
                    records.setdefault(source.path, set()).add(record)
    first: dict[frozenset[tuple[str, str, int, int]], Path] = {}
    for file, held in records.items():
        other = first.setdefault(frozenset(held), file)
        if other != file and places[file].isdisjoint(places[other]) and proves_a_copy(r[1:] for r in held):
            text = (
                f"{file.name} has the same bytes as {other.name}, which is another part of the tensors; one is a copy"
            )
            yield Problem(Code.STRAY_FILE, text, ranks[file])


def proves_a_copy(records: Iterable[Checksum]) -> bool:
    """Whether two files that both have these records must be one file under two names."""
    telling = [(nbytes, dtype) for dtype, crc, nbytes in set(records) if not is_constant(dtype, crc, nbytes)]
    return sum(nbytes // ITEMSIZE[dtype] for nbytes, dtype in telling) >= MIN_TELLING


def is_constant(dtype: str, crc: int, nbytes: int) -> bool:
    """Whether bytes of this checksum are all zeros or all ones of a dtype."""
    patterns = (bytes(ITEMSIZE[dtype]), ONES.get(dtype, b"\0"))
    return any(_repeated(pattern, nbytes) == crc for pattern in patterns)


def _repeated(pattern: bytes, nbytes: int) -> int:
    """The CRC-32 of so many bytes of a repeated pattern."""
    block = pattern * (min(nbytes, BLOCK) // len(pattern) + 1)
    crc, step = 0, BLOCK // len(pattern) * len(pattern)
    for at in range(0, nbytes, step):
        crc = zlib.crc32(block[: min(step, nbytes - at)], crc)
    return crc
