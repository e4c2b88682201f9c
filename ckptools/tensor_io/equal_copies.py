"""Small tensors of which every rank has all, such as step counts: compared file by file, not tensor by tensor.

A world of 1,024 ranks and 5,000 tensors has a million of them. Tensor by tensor each is a file to open; here each file
is opened once. What is not found equal here is left to `replicas`, which finds out more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeVar

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.model.item_shards import HoldingFile, ItemShards
from ckptools.model.shards import states_one_crc
from ckptools.model.tensor import Tensor

K = TypeVar("K", bound=Hashable)

SMALL = 4 << 10
"""Most bytes of a tensor that is compared here."""


TOLD_BY_CRC = 4
"""Most bytes of which no two values have the same CRC-32, which is as long, and an invertible function of them."""


class _Copies(NamedTuple):
    """The copies of a tensor, one in each file: where its bytes begin in each, and how many they are."""

    starts: Sequence[int]
    nbytes: int


def equal_copies(tensors: Iterable[tuple[K, Tensor]], files: OpenFiles, right: bool = False) -> set[K]:
    """The keys of those tensors that are small, whole in each of several local files, and have the same bytes there.

    Nothing is read of copies whose bytes their CRC-32s prove equal. Those are `right` if each that is stated was
    compared with the bytes.
    """
    listed: dict[tuple[HoldingFile, ...], dict[K, _Copies]] = {}
    equal = set[K]()
    for key, tensor in tensors:
        shards = tensor.shards
        copies = _copies(shards) if isinstance(shards, ItemShards) and len(shards) > 1 else None
        if copies is None or not isinstance(shards, ItemShards):
            continue
        if right and copies.nbytes <= TOLD_BY_CRC and shards.crcs[0] and states_one_crc(shards):
            equal.add(key)
        else:
            listed.setdefault(tuple(shards.files), {})[key] = copies
    return equal | {key for held_in, copies in listed.items() for key in _equal(held_in, copies, files)}


def _copies(shards: ItemShards) -> _Copies | None:
    """The copies of a tensor; None where it is not one small array in each of its files."""
    layout = shards.one_layout
    if layout is None or not shards.one_box:
        return None
    nbytes = prod(layout.shape) * ITEMSIZE[layout.dtype]
    if not 0 < nbytes <= SMALL or layout.record_span[1] != nbytes or layout.dtype != shards.dtype:
        return None
    first = layout.offset
    return _Copies([start + first for start in shards.starts] if first else shards.starts, nbytes)


def _equal(held_in: Sequence[HoldingFile], copies: dict[K, _Copies], files: OpenFiles) -> Iterable[K]:
    """The keys of tensors that have the same bytes in all files; none where one of these cannot be read."""
    lengths = [one.nbytes for one in copies.values()]
    of_file = zip(*(one.starts for one in copies.values()), strict=True)
    ends = [0, *accumulate(lengths)]
    equal, expected = [True] * len(copies), b""
    for file, starts in zip(held_in, of_file, strict=True):
        if file.path is None:
            return ()
        try:
            with files.open(file.path) as opened:
                if opened.descriptor is None:
                    return ()
                found = opened.read_each(starts, lengths)
        except ReadError:
            return ()
        expected = expected or found
        if found != expected:
            same = [found[a:b] == expected[a:b] for a, b in pairwise(ends)]
            equal = [before and now for before, now in zip(equal, same, strict=True)]
    return [key for key, same in zip(copies, equal, strict=True) if same]
