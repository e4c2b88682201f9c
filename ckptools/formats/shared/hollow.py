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
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.location import is_remote
from ckptools.files.opening import File
from ckptools.files.storage import SLACK, takes_less
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, Severity, worst_first
from ckptools.model.provenance import Filled
from ckptools.model.regions import is_contiguous
from ckptools.model.source import ItemLayout
from ckptools.model.tensor import ItemShards, Shards, Source, Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.checksums import combine, crc32
from ckptools.text import and_others, few, size

MAX_READ = 1 << 20
"""Most bytes outside of holes that are read to check one record's checksum."""

WHY = "holes, which read as zeros: never written, or copied as holes"
MAYBE = "holes, which read as zeros: written as zeros, or never written"


class Holes:
    """The holes of a file, each from its first byte to one past its last, in order and apart."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = spans
        self._before = [0, *accumulate(last - first for first, last in spans)]

    def overlap(self, start: int, end: int) -> int:
        """How many bytes from `start` to before `end` lie in them."""
        return self._bytes_before(end) - self._bytes_before(start)

    def _bytes_before(self, at: int) -> int:
        begun = bisect_left(self.spans, (at, 0))
        return self._before[begun] - (max(self.spans[begun - 1][1] - at, 0) if begun else 0)

    def from_first_at(self, start: int) -> Sequence[tuple[int, int]]:
        """The holes from the last one that begins before `start`."""
        return self.spans[max(bisect_left(self.spans, (start, 0)) - 1, 0) :]


@dataclass
class _Hollow:
    """A file of `nbytes` with holes.

    Attributes:
        nbytes_seen: bytes of tensors that were looked at.
        unproven: bytes of these in holes without a checksum.
        tensors: bytes in holes by tensor name, without those that were written as zeros.
        never: tensors whose checksum says that they were never written.
    """

    path: Path
    holes: Holes
    nbytes: int
    nbytes_seen: int = 0
    unproven: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    never: set[str] = field(default_factory=set)

    @property
    def empty(self) -> int:
        return self.holes.overlap(0, self.nbytes)

    @property
    def severity(self) -> Severity:
        """Error where the checksum proves it, or where half or more of the tensors' bytes lie in holes."""
        mostly = self.unproven > 0 and 2 * self.unproven >= self.nbytes_seen
        return "error" if self.never or mostly else "warning"

    def look_at(self, extents: Sequence[_Extent]) -> None:
        self.nbytes_seen += sum(extent.end - extent.start for extent in extents)
        for extent in extents:
            inside = self.holes.overlap(extent.start, extent.end)
            right = _is_right(self.path, extent, self.holes) if inside else True
            if not right:
                self.tensors[extent.fqn] = self.tensors.get(extent.fqn, 0) + inside
                self.unproven += inside
            if right is False:
                self.never.add(extent.fqn)


class _Extent(NamedTuple):
    """Where a tensor lies in a file, from its first byte to one past its last.

    Attributes:
        record_span: `(offset, length)` of the record with these bytes.
        crc: CRC-32 of that record; 0 where none is stated or the values were not located.
    """

    fqn: str
    start: int
    end: int
    record_span: tuple[int, int] = (0, 0)
    crc: int = 0


def with_hollow(checkpoint: Checkpoint) -> Checkpoint:
    """Add the tensors that lie in holes of local files, and the problems that follow."""
    found = {
        file.path: _Hollow(file.path, Holes(spans), file.nbytes)
        for file in checkpoint.files
        if file.is_here and file.nbytes > SLACK and not is_remote(file.path) and (spans := holes(file.path))
    }
    if not found:
        return checkpoint
    tensors = {fqn_of(path): tensor for path, tensor in tensors_in(checkpoint.tree)}
    extents: dict[Path, dict[_Extent, None]] = {path: {} for path in found}
    for fqn, tensor in tensors.items():
        _add_extents(extents, fqn, tensor.shards)
    for path, of_file in extents.items():
        found[path].look_at([*of_file])
    hollow = [one for one in found.values() if one.tensors or not one.nbytes_seen]
    problems = [problem for severity in ("error", "warning") for problem in _problems(hollow, severity)]
    empty = tuple(_filled(tensors, [one for one in hollow if one.severity == "error"]))
    return replace(checkpoint, hollow=empty, problems=worst_first([*checkpoint.problems, *problems]))


def _add_extents(extents: Mapping[Path, dict[_Extent, None]], fqn: str, shards: Shards) -> None:
    """Add where shards lie to the extents of their files, equal ones once."""
    if isinstance(shards, ItemShards):
        _add_items(extents, fqn, shards)
        shards = tuple(shards.located.values())
    for shard in shards:
        for source in shard.sources:
            if source.path in extents:
                start, nbytes = _values_span(source)
                extents[source.path][_Extent(fqn, start, start + nbytes, source.record_span, source.crc)] = None
        item = shard.item
        if not shard.sources and item is not None and item.path in extents:
            extents[item.path][_Extent(fqn, item.offset, item.offset + item.length)] = None


def _add_items(extents: Mapping[Path, dict[_Extent, None]], fqn: str, shards: ItemShards) -> None:
    """Add where items lie: their values where they were read and are like others, else all of them."""
    of_file = {file: extents.get(file.path) for file in set(shards.files) if file.path is not None}
    spans = {layout: _values_span(layout) for layout in set(shards.layouts) if layout is not None}
    for i, (file, start, length) in enumerate(zip(shards.files, shards.starts, shards.lengths, strict=True)):
        known, layout = of_file.get(file), shards.layouts[i] if shards.layouts else None
        if known is None or i in shards.located:
            continue
        if layout is None:
            known[_Extent(fqn, start, start + length)] = None
            continue
        at, nbytes = spans[layout]
        record = start + layout.record_span[0], layout.record_span[1]
        known[_Extent(fqn, start + at, start + at + nbytes, record, shards.crcs[i])] = None


def _values_span(of: Source | ItemLayout) -> tuple[int, int]:
    """First byte and number of bytes of values; for values that are not consecutive, those of their record."""
    if not is_contiguous(of.shape, of.strides):
        return of.record_span
    return of.offset, prod(of.shape) * ITEMSIZE[of.dtype]


def _is_right(path: Path, extent: _Extent, holes: Holes) -> bool | None:
    """Whether a record with holes has its stated CRC-32; None without one, or where too much would be read."""
    if not extent.crc:
        return None
    start, nbytes = extent.record_span
    if nbytes - holes.overlap(start, start + nbytes) > MAX_READ:
        return None
    try:
        with File(path) as file:
            return _crc_of(file, start, start + nbytes, holes) == extent.crc
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


def _problems(hollow: Iterable[_Hollow], severity: Severity) -> Iterator[Problem]:
    of_it = [one for one in hollow if one.severity == severity]
    if of_it:
        first, names = of_it[0], list(dict.fromkeys(fqn for one in of_it for fqn in one.tensors))
        text = (
            f"{first.path.name}{and_others(len(of_it) - 1)}: {size(first.empty)} of {size(first.nbytes)} take no space"
        )
        content = f"; they hold {few(names, 3)}" if names else ""
        why = WHY if severity == "error" else MAYBE
        files = tuple(one.path.name for one in of_it)
        yield Problem(Code.NEVER_WRITTEN, f"{text} on the disk ({why}){content}", None, None, severity, files)


def _filled(tensors: dict[str, Tensor], hollow: Iterable[_Hollow]) -> Iterator[Filled]:
    nbytes: dict[str, int] = {}
    for one in hollow:
        for fqn, inside in one.tensors.items():
            nbytes[fqn] = nbytes.get(fqn, 0) + inside
    for fqn, inside in nbytes.items():
        tensor = tensors[fqn]
        yield Filled(fqn, "zero", min(tensor.numel, int(-(-inside // ITEMSIZE[tensor.dtype]))), tensor.numel)


# -- holes: bytes without a block on the disk, which are read as zeros -------------------------------------------------

# A file has them where its size was set and nothing was written: by a copy that was interrupted after it had reserved
# the space, by a file system that came back after a crash, on purpose. The file itself cannot distinguish them from
# true zeros.

MAX_HOLES = 1 << 16
"""Holes of a file that are looked for: one for each of its tensors, and more."""


def holes(path: Path) -> list[tuple[int, int]]:
    """The holes of a file, each from its first byte to one past its last; none where none can be seen."""
    with suppress(OSError, AttributeError):  # gone, or a system that knows no holes
        if takes_less(path):
            return _asked_for(path, path.stat().st_size)
    return []


def _asked_for(path: Path, size: int) -> list[tuple[int, int]]:
    """List the holes that the file system knows; the one behind the end of every file does not count."""
    found: list[tuple[int, int]] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        at = os.lseek(descriptor, 0, os.SEEK_HOLE)
        while at < size and len(found) < MAX_HOLES:
            end = _data_behind(descriptor, at, size)
            found.append((at, end))
            at = os.lseek(descriptor, end, os.SEEK_HOLE) if end < size else size
    finally:
        os.close(descriptor)
    return found


def _data_behind(descriptor: int, at: int, size: int) -> int:
    try:
        return min(os.lseek(descriptor, at, os.SEEK_DATA), size)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size  # nothing but the hole
