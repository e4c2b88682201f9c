"""Tensors whose bytes lie in holes of sparse files: they read as zeros that may never have been written.

A record whose CRC-32 fits zeros in its holes was written so, however the file system stores it; one with another
CRC-32 was not. Without a checksum, a file with half or more of its tensors in holes was never filled: weights are not
zeros. Smaller holes may come from a file system or a copy (ZFS with compression, `cp --sparse=always`), as may a file
of holes that was not read: that is a warning.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, cycle, islice, repeat
from math import prod
from operator import add, sub
from pathlib import Path
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.location import is_remote
from ckptools.files.opening import File
from ckptools.files.storage import SLACK, takes_less
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.columns import by_value, take
from ckptools.model.problems import Code, Problem, Severity, worst_first
from ckptools.model.provenance import Filled
from ckptools.model.regions import is_contiguous
from ckptools.model.source import ItemLayout
from ckptools.model.tensor import ItemShards, Shards, Source, Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.checksums import combine, crc32
from ckptools.text import and_others, few, size

MANY = 1000
"""Above this many extents of a file numpy compares them with its holes."""

MAX_READ = 1 << 20
"""Most bytes outside of holes that are read to check one record's checksum."""

WHY = "holes, which read as zeros: never written, or copied as holes"
MAYBE = "holes, which read as zeros: written as zeros, or never written"


class Holes:
    """The holes of a file, in order and apart.

    Args:
        edges: of each its first byte, and one past its last, one after the other.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.starts, self.ends = edges[::2], edges[1::2]
        self.before: list[int] = [0, *accumulate(map(sub, self.ends, self.starts))]

    def overlap(self, start: int, end: int) -> int:
        """How many bytes from `start` to before `end` lie in them."""
        return self._bytes_before(end) - self._bytes_before(start)

    def overlaps(self, starts: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
        """The same for many extents, by column; offsets are below 2^63."""
        if len(starts) < MANY:
            return list(map(self.overlap, starts, ends))
        import numpy as np

        before, first, last = (np.array(column) for column in (self.before, self.starts, [0, *self.ends]))
        columns = [np.array(column) for column in (starts, ends)]
        begun = [np.searchsorted(first, at) for at in columns]
        counts = [before[i] - np.maximum(last[i] - at, 0) for i, at in zip(begun, columns, strict=True)]
        return (counts[1] - counts[0]).tolist()  # type: ignore[no-any-return]

    def _bytes_before(self, at: int) -> int:
        begun = bisect_left(self.starts, at)
        return self.before[begun] - (max(self.ends[begun - 1] - at, 0) if begun else 0)

    def from_first_at(self, start: int) -> Sequence[tuple[int, int]]:
        """The holes from the last one that begins before `start`."""
        first = max(bisect_left(self.starts, start) - 1, 0)
        return list(zip(self.starts[first:], self.ends[first:], strict=True))


@dataclass
class _Hollow:
    """A file of `nbytes` with holes.

    Attributes:
        nbytes_seen: bytes of tensors that were looked at.
        unproven: bytes of these in holes without a checksum.
        tensors: bytes in holes by the number of the tensor, without those that were written as zeros.
        never: whether the checksum of one says that it was never written.
    """

    path: Path
    holes: Holes
    nbytes: int
    nbytes_seen: int = 0
    unproven: int = 0
    tensors: dict[int, int] = field(default_factory=dict)
    never: bool = False

    @property
    def empty(self) -> int:
        return self.holes.overlap(0, self.nbytes)

    @property
    def severity(self) -> Severity:
        """Error where the checksum proves it, or where half or more of the tensors' bytes lie in holes."""
        mostly = self.unproven > 0 and 2 * self.unproven >= self.nbytes_seen
        return "error" if self.never or mostly else "warning"

    def look_at(self, extents: _Extents) -> None:
        self.nbytes_seen += sum(extents.ends) - sum(extents.starts)
        found = extents.inside(self.holes)
        if extents.stated:
            right = {number: _is_right(self.path, extents.stated.get(number), self.holes) for number in found}
            self.never = False in right.values()
            found = {number: inside for number, inside in found.items() if not right[number]}
        self.unproven = sum(found.values())
        for tensor, inside in zip(take(extents.tensors, [*found]), found.values(), strict=True):
            self.tensors[tensor] = self.tensors.get(tensor, 0) + inside


class _Record(NamedTuple):
    """A record with a checksum.

    Attributes:
        span: its offset in the file, and its length.
        crc: its CRC-32, never 0.
    """

    span: tuple[int, int]
    crc: int


@dataclass
class _Extents:
    """Where tensors lie in files, by column.

    Attributes:
        files: the number of the file of each; -1 for one without holes.
        tensors: their numbers.
        starts: first byte of each.
        ends: one past its last.
        stated: the records that they lie in, by the number of the extent, of those that have a checksum.
    """

    files: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    stated: dict[int, _Record] = field(default_factory=dict)

    def add(self, file: int, tensor: int, start: int, end: int, record: _Record | None = None) -> None:
        """Add one extent."""
        if record is not None:
            self.stated[len(self.files)] = record
        self.files.append(file)
        self.tensors.append(tensor)
        self.starts.append(start)
        self.ends.append(end)

    def by_file(self) -> Iterator[tuple[int, _Extents]]:
        """Those of each file with holes, equal ones once: ranks that share a file may list what lies in it again."""
        columns = self.tensors, self.starts, self.ends
        for file, rows in by_value(self.files).items():
            if file < 0:
                continue
            tensors, starts, ends = ([*take(column, rows)] for column in columns)
            stated = {i: self.stated[row] for i, row in enumerate(rows) if row in self.stated} if self.stated else {}
            found = _Extents([file] * len(rows), tensors, starts, ends, stated)
            yield file, found if len({*starts}) == len(starts) else found.once()

    def once(self) -> _Extents:
        """The same without repetitions."""
        found, listed = _Extents(), zip(self.files, self.tensors, self.starts, self.ends, strict=True)
        for extent in dict.fromkeys((*extent, self.stated.get(i)) for i, extent in enumerate(listed)):
            found.add(*extent)
        return found

    def inside(self, holes: Holes) -> dict[int, int]:
        """How many bytes of each extent lie in holes, by its number; without those of which none do."""
        overlaps = holes.overlaps(self.starts, self.ends)
        return {number: nbytes for number, nbytes in enumerate(overlaps) if nbytes}


def with_hollow(checkpoint: Checkpoint) -> Checkpoint:
    """Add the tensors that lie in holes of local files, and the problems that follow."""
    found = {
        file.path: _Hollow(file.path, Holes(edges), file.nbytes)
        for file in checkpoint.files
        if file.is_here and file.nbytes > SLACK and not is_remote(file.path) and (edges := holes(file.path))
    }
    if not found:
        return checkpoint
    tensors = {fqn_of(path): tensor for path, tensor in tensors_in(checkpoint.tree)}
    extents, numbers = _Extents(), {path: number for number, path in enumerate(found)}
    for number, tensor in enumerate(tensors.values()):
        _add_extents(extents, numbers, number, tensor.shards)
    hollow = [*found.values()]
    for number, of_file in extents.by_file():
        hollow[number].look_at(of_file)
    hollow = [one for one in hollow if one.tensors or not one.nbytes_seen]
    problems = [problem for severity in ("error", "warning") for problem in _problems([*tensors], hollow, severity)]
    empty = tuple(_filled(tensors, [one for one in hollow if one.severity == "error"]))
    return replace(checkpoint, hollow=empty, problems=worst_first([*checkpoint.problems, *problems]))


def _add_extents(extents: _Extents, files: Mapping[Path, int], tensor: int, shards: Shards) -> None:
    """Add where shards lie in some files."""
    if isinstance(shards, ItemShards):
        _add_items(extents, files, tensor, shards)
        shards = tuple(shards.located.values())
    for shard in shards:
        for source in shard.sources:
            if source.path in files:
                start, nbytes = _values_span(source)
                record = _Record(source.record_span, source.crc) if source.crc else None
                extents.add(files[source.path], tensor, start, start + nbytes, record)
        item = shard.item
        if not shard.sources and item is not None and item.path in files:
            extents.add(files[item.path], tensor, item.offset, item.offset + item.length)


def _add_items(extents: _Extents, files: Mapping[Path, int], tensor: int, shards: ItemShards) -> None:
    """Add where items lie: their values where they were read and are like others, else all of them."""
    numbers = {file: -1 if file.path is None else files.get(file.path, -1) for file in set(shards.files)}
    first, starts, lengths = len(extents.files), shards.starts, shards.lengths
    if layouts := shards.layouts:
        spans = {layout: _values_span(layout) for layout in set(layouts) if layout is not None}
        lengths = [n if of is None else spans[of][1] for of, n in zip(layouts, lengths, strict=True)]
        starts = [at if of is None else at + spans[of][0] for of, at in zip(layouts, starts, strict=True)]
    extents.files += map(numbers.__getitem__, shards.files)
    extents.tensors += repeat(tensor, len(shards))
    extents.starts += starts
    extents.ends += map(add, starts, lengths)
    for i in shards.located:
        extents.files[first + i] = -1
    for i, crc in enumerate(shards.crcs if any(shards.crcs) else ()):
        if crc and (of := layouts[i]) is not None:
            at, nbytes = of.record_span
            extents.stated[first + i] = _Record((shards.starts[i] + at, nbytes), crc)


def _values_span(of: Source | ItemLayout) -> tuple[int, int]:
    """First byte and number of bytes of values; for values that are not consecutive, those of their record."""
    if not is_contiguous(of.shape, of.strides):
        return of.record_span
    return of.offset, prod(of.shape) * ITEMSIZE[of.dtype]


def _is_right(path: Path, record: _Record | None, holes: Holes) -> bool | None:
    """Whether a record with holes has its stated CRC-32; None without one, or where too much would be read."""
    if record is None:
        return None
    start, nbytes = record.span
    if nbytes - holes.overlap(start, start + nbytes) > MAX_READ:
        return None
    try:
        with File(path) as file:
            return _crc_of(file, start, start + nbytes, holes) == record.crc
    except ReadError:  # gone by now; whoever reads it next says so
        return None


def _crc_of(file: File, start: int, end: int, holes: Holes) -> int:
    """Return the CRC-32 of a part of a file, reading only what lies outside of holes."""
    crc, at = 0, start
    for first, last in [*holes.from_first_at(start), (end, end)]:
        first, last = min(max(first, start), end), min(last, end)
        if first > at:
            crc, at = crc32(file.read(at, first - at), crc), first
        if last > at:
            crc, at = combine(crc, crc_of_zeros(last - at), last - at), last
        if at >= end:
            break
    return crc


def crc_of_zeros(nbytes: int) -> int:
    """Return the CRC-32 of `nbytes` zeros, by doubling."""
    crc, power, length = 0, crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = combine(crc, power, length)
        power, length, nbytes = combine(power, power, length), 2 * length, nbytes >> 1
    return crc


def _problems(fqns: Sequence[str], hollow: Iterable[_Hollow], severity: Severity) -> Iterator[Problem]:
    of_it = [one for one in hollow if one.severity == severity]
    if of_it:
        first, names = of_it[0], [fqns[i] for i in dict.fromkeys(chain.from_iterable(one.tensors for one in of_it))]
        text = (
            f"{first.path.name}{and_others(len(of_it) - 1)}: {size(first.empty)} of {size(first.nbytes)} take no space"
        )
        content = f"; they hold {few(names, 3)}" if names else ""
        why = WHY if severity == "error" else MAYBE
        files = tuple(one.path.name for one in of_it)
        yield Problem(Code.NEVER_WRITTEN, f"{text} on the disk ({why}){content}", None, None, severity, files)


def _filled(tensors: Mapping[str, Tensor], hollow: Iterable[_Hollow]) -> Iterator[Filled]:
    nbytes: dict[int, int] = {}
    for one in hollow:
        for number, inside in one.tensors.items():
            nbytes[number] = nbytes.get(number, 0) + inside
    listed = [*tensors.items()]
    for number, inside in nbytes.items():
        fqn, tensor = listed[number]
        yield Filled(fqn, "zero", min(tensor.numel, int(-(-inside // ITEMSIZE[tensor.dtype]))), tensor.numel)


# -- holes: bytes without a block on the disk, which are read as zeros -------------------------------------------------

# A file has them where its size was set and nothing was written: by a copy that was interrupted after it had reserved
# the space, by a file system that came back after a crash, on purpose. The file itself cannot distinguish them from
# true zeros.

MAX_HOLES = 1 << 16
"""Holes of a file that are looked for: one for each of its tensors, and more."""


def holes(path: Path) -> list[int]:
    """The edges of the holes of a file, as `Holes` has them; none where none can be seen."""
    with suppress(OSError, AttributeError):  # gone, or a system that knows no holes
        if takes_less(path):
            return _asked_for(path, path.stat().st_size)
    return []


def _asked_for(path: Path, size: int) -> list[int]:
    """List the edges of holes that the file system knows; the one behind the end of every file does not count."""
    edges: list[int] = []
    at, seek, note = 0, os.lseek, edges.append
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for edge in islice(cycle((os.SEEK_HOLE, os.SEEK_DATA)), 2 * MAX_HOLES):
            at = seek(descriptor, at, edge)
            note(at)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        if len(edges) % 2:  # no data behind it: this hole is the last
            note(size)
    finally:
        os.close(descriptor)
    if edges[-2:] == [size, size]:
        del edges[-2:]
    return edges
