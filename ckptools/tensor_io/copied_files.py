"""Files that are copies of each other under two names: by the checksums that containers state, or by their first bytes.

Where containers state checksums, no values are read. A few elements may be equal by chance; zeros are moments before
the first step, ones are weights of a norm, and both are equal everywhere: none of these proves a copy.

Bare bytes state none: the first bytes of some tensors are compared, only of files whose tensors have the same names and
sizes. Elements that are all alike (zeros, ones) prove nothing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.files.opening import OpenFiles
from ckptools.model.columns import by_value, take
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints, is_contiguous
from ckptools.model.tensor import ItemShards, Shard, Shards, Source, Tensor, with_bytes
from ckptools.model.tree import KeyPath

Checksum = tuple[str, int, int]
"""`(dtype, CRC-32, bytes)`: the facts that a container states of a tensor."""

MIN_TELLING = 16
"""Fewer equal elements than this may be chance."""

BLOCK = 1 << 20
"""Bytes per step of computing a checksum."""

ONES = {
    "float64": struct.pack("<d", 1),
    "float32": struct.pack("<f", 1),
    "float16": struct.pack("<e", 1),
    "bfloat16": struct.pack("<f", 1)[2:],
}
"""The bytes of the number one."""


def stated_checksum(value: Any, whole: bool = False) -> Checksum | None:
    """The checksum of the zip entry that a tensor lies in; None where none is stated.

    Args:
        value: a tensor of one shard, or anything else.
        whole: ignore tensors that are a part of their zip entry.
    """
    source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
    if source is None or not source.crc or (whole and value.nbytes != source.record_span[1]):
        return None
    return source.dtype, source.crc, value.nbytes


def check_copies(tensors: Iterable[tuple[KeyPath, Tensor]]) -> Iterator[Problem]:
    """Problems of files with the same bytes for different places of tensors: one was copied over the other.

    Replicas have the same places and prove nothing.
    """
    places: dict[Path, dict[tuple[KeyPath, Box, str], tuple[str, str, int, int]]] = {}
    ranks: dict[Path, int] = {}
    for path, tensor in tensors:
        for shard in tensor.found if tensor.sharded else ():
            for source in shard.sources if shard.box.numel else ():
                if source.crc and shard.rank is not None:
                    ranks[source.path] = shard.rank
                    record = source.record, source.dtype, source.crc, source.record_span[1]
                    places.setdefault(source.path, {})[path, shard.box, source.record] = record
    first: dict[frozenset[tuple[str, str, int, int]], Path] = {}
    for file, stated in places.items():
        other = first.setdefault(frozenset(stated.values()), file)
        elsewhere = (record[1:] for place, record in stated.items() if place not in places[other])
        if other != file and proves_a_copy(elsewhere):
            yield Problem(Code.STRAY_FILE, _text(file, other), ranks[file])


def proves_a_copy(records: Iterable[Checksum]) -> bool:
    """Whether two files with these checksums must be one file under two names."""
    varied = [(nbytes, dtype) for dtype, crc, nbytes in set(records) if not is_constant(dtype, crc, nbytes)]
    return sum(nbytes // ITEMSIZE[dtype] for nbytes, dtype in varied) >= MIN_TELLING


def is_constant(dtype: str, crc: int, nbytes: int) -> bool:
    """Whether bytes of this checksum are all zeros or all ones of a dtype."""
    patterns = (bytes(ITEMSIZE[dtype]), ONES.get(dtype, b"\0"))
    return any(_repeated(pattern, nbytes) == crc for pattern in patterns)


def _repeated(pattern: bytes, nbytes: int) -> int:
    """The CRC-32 of `nbytes` bytes of a repeated pattern."""
    block = pattern * (min(nbytes, BLOCK) // len(pattern) + 1)
    crc, step = 0, BLOCK // len(pattern) * len(pattern)
    for at in range(0, nbytes, step):
        crc = zlib.crc32(block[: min(step, nbytes - at)], crc)
    return crc


# -- by first bytes ---------------------------------------------------------------------------------------------------


SAMPLE = 4096
"""Bytes of each tensor that are compared."""

MAX_COMPARED = 16
"""Tensors that are compared, the largest first."""

MIN_VARIED = 16
"""Elements, in tensors whose elements are not all alike, below which equal files may be chance."""


@dataclass
class _Held:
    """The shards in some files, by column.

    Attributes:
        files: the numbers of their files.
        names: of their tensors.
        offsets: of the shards.
        sizes: of the shards.
        shards: those of the tensor.
        numbers: of the shards among these.
    """

    files: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    offsets: list[Ints] = field(default_factory=list)
    sizes: list[Ints] = field(default_factory=list)
    shards: list[Sequence[Shard]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, name: str, files: Iterable[int], shards: Sequence[Shard], numbers: Sequence[int]) -> None:
        """Add shards of a tensor, by their numbers in its list, and the number of each one's file."""
        self.files += files
        self.names += repeat(name, len(numbers))
        if isinstance(shards, ItemShards):
            self.offsets += take(shards.offsets, numbers)
            self.sizes += take(shards.sizes, numbers)
        else:
            self.offsets += [shards[i].box.offsets for i in numbers]
            self.sizes += [shards[i].box.sizes for i in numbers]
        self.shards += repeat(shards, len(numbers))
        self.numbers += numbers

    def by_file(self) -> Iterator[tuple[int, _Held]]:
        """Those of each file."""
        columns: list[list[Any]] = [self.files, self.names, self.offsets, self.sizes, self.shards, self.numbers]
        for file, rows in by_value(self.files).items():
            yield file, _Held(*([*take(column, rows)] for column in columns))

    def shard(self, name: str) -> Shard:
        """The last shard of a tensor."""
        row = len(self.names) - 1 - self.names[::-1].index(name)
        return self.shards[row][self.numbers[row]]


def copied_files(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles) -> list[Problem]:
    """A problem for each file that is a copy of another one; `tensors` come with their names.

    Raises:
        ReadError: a file cannot be read.
    """
    every, numbers = _Held(), dict[Path, int]()
    for name, tensor in tensors:
        if tensor.sharded:
            _add_without_checksum(every, numbers, name, tensor.shards)
    paths = [*numbers]
    by_file = {paths[file]: held for file, held in every.by_file()}
    alike: dict[frozenset[tuple[str, Ints]], list[Path]] = {}
    for path, held in by_file.items():
        alike.setdefault(frozenset(zip(held.names, held.sizes, strict=True)), []).append(path)
    return [problem for paths in alike.values() for problem in _copies_among(paths, by_file, files)]


def _add_without_checksum(held: _Held, numbers: dict[Path, int], name: str, shards: Shards) -> None:
    """Add the shards with values that follow each other and of which no CRC-32 is stated."""
    if isinstance(shards, ItemShards):
        places = _items_without_checksum(shards)
        number = {file: numbers.setdefault(file.path, len(numbers)) for file in set(shards.files) if file.path}
        held.add(name, map(number.__getitem__, take(shards.files, places)), shards, places)
        shards = tuple(shards.located.values())
    found = with_bytes(shards)
    sources = {i: shard.source for i, shard in enumerate(found) if shard.source is not None and shard.box.numel}
    plain = {i: source.path for i, source in sources.items() if not source.crc and source.contiguous}
    held.add(name, [numbers.setdefault(path, len(numbers)) for path in plain.values()], found, [*plain])


def _items_without_checksum(shards: ItemShards) -> list[int]:
    """The numbers of such shards among items that are like others."""
    if 0 not in shards.crcs:
        return []
    layouts = {id(layout): layout for layout in shards.layouts if layout is not None}
    packed = {number for number, of in layouts.items() if prod(of.shape) and is_contiguous(of.shape, of.strides)}
    found = [i for i, number in enumerate(map(id, shards.layouts)) if number in packed and not shards.crcs[i]]
    return [i for i in found if i not in shards.located and shards.files[i].path is not None]


def _copies_among(paths: Sequence[Path], by_file: Mapping[Path, _Held], files: OpenFiles) -> list[Problem]:
    """Find copies among files whose shards have the same names and sizes."""
    places: dict[frozenset[tuple[str, Ints, Ints]], Path] = {}
    for path in paths:  # one of each set of replicas
        held = by_file[path]
        places.setdefault(frozenset(zip(held.names, held.offsets, held.sizes, strict=True)), path)
    groups, varied = [list(places.values())], dict.fromkeys(paths, 0)
    first = by_file[paths[0]]
    sizes = dict(zip(first.names, first.sizes, strict=True))
    for name in sorted(sizes, key=lambda n: -prod(sizes[n]))[:MAX_COMPARED]:
        groups = [part for group in groups if len(group) > 1 for part in _split(group, name, by_file, files, varied)]
    return [
        Problem(Code.STRAY_FILE, _text(copy, group[0]), by_file[copy].shard(by_file[copy].names[0]).rank)
        for group in groups
        for copy in group[1:]
        if varied[copy] >= MIN_VARIED
    ]


def _split(
    group: Sequence[Path], name: str, by_file: Mapping[Path, _Held], files: OpenFiles, varied: dict[Path, int]
) -> list[list[Path]]:
    """Split a group of files by the first bytes of one tensor; count elements where they are not all alike."""
    found: dict[bytes, list[Path]] = {}
    for path in group:
        source = by_file[path].shard(name).source
        assert source is not None
        data = _beginning(source, files)
        width = ITEMSIZE[source.dtype]
        if data != data[:width] * (len(data) // width):
            varied[path] += len(data) // width
        found.setdefault(data, []).append(path)
    return list(found.values())


def _beginning(source: Source, files: OpenFiles) -> bytes:
    nbytes = ITEMSIZE[source.dtype] * prod(source.shape)
    with files.open(source.path) as file:
        return file.read(source.offset, min(nbytes, SAMPLE))


def _text(copy: Path, other: Path) -> str:
    return f"{copy.name} has the same bytes as {other.name}, which is another part of the tensors; one is a copy"
