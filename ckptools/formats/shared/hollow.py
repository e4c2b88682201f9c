"""Find tensors whose bytes lie in holes of sparse files: they read as zeros that may never have been written.

A zip entry whose CRC-32 fits zeros in its holes was written so, however the file system stores it; an entry with
another CRC-32 was not. Without a checksum, a file with half or more of its tensors in holes was never filled: weights
are not zeros. Smaller holes may come from a file system or a copy (ZFS with compression, `cp --sparse=always`), as may
a file of holes that was not read: that is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from math import prod
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.holes import Holes, Numbers, holes
from ckptools.files.opening import File, is_remote
from ckptools.files.storage import SLACK
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.extents import ExtentFile, ExtentLayout, Extents, take
from ckptools.model.problems import Code, Problem, Severity, worst_first
from ckptools.model.provenance import Filled
from ckptools.model.regions import is_contiguous
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.checksums import crc32, crc32_combine
from ckptools.text import and_others, few, fqn_of, size

MAX_READ = 1 << 20
"""At most this many bytes outside of holes are read to check one entry's checksum."""

WHY = "holes, which read as zeros: never written, or copied as holes"
MAYBE = "holes, which read as zeros: written as zeros, or never written"


@dataclass
class _Hollow:
    """A file of `nbytes` with holes.

    Attributes:
        nbytes_seen: bytes of tensors that were checked.
        tensors: the numbers of tensors with bytes in holes, except those written as zeros; once per extent.
        inside: bytes of each extent that lie in holes.
        unproven: the sum of these.
        never: whether a checksum proves that bytes were never written.
    """

    path: Path
    holes: Holes
    nbytes: int
    nbytes_seen: int = 0
    tensors: Numbers = field(default_factory=lambda: np.array([], np.int64))
    inside: Numbers = field(default_factory=lambda: np.array([], np.int64))
    unproven: int = 0
    never: bool = False

    @property
    def empty(self) -> int:
        return self.holes.overlap(0, self.nbytes)

    @property
    def severity(self) -> Severity:
        """Error if the checksum proves it, or if half or more of the tensors' bytes lie in holes."""
        mostly = self.unproven > 0 and 2 * self.unproven >= self.nbytes_seen
        return "error" if self.never or mostly else "warning"

    def look_at(self, extents: _OfFile) -> None:
        tensors, inside = extents.tensors, self.holes.overlaps(extents.starts, extents.ends)
        for i in np.flatnonzero(inside).tolist() if extents.stated else ():
            right = _is_right(self.path, extents.stated.get(i), self.holes)
            self.never |= right is False
            inside[i] *= not right
        self.nbytes_seen, self.unproven = _sum(extents.ends - extents.starts), _sum(inside)
        self.tensors, self.inside = tensors[inside > 0], inside[inside > 0]


class _Record(NamedTuple):
    """A zip entry with a checksum.

    Attributes:
        span: its offset in the file, and its length.
        crc: its CRC-32, never 0.
    """

    span: tuple[int, int]
    crc: int


class _OfFile(NamedTuple):
    """The extents of tensors in one file, by column; as in `_Extents`, sorted by tensor."""

    tensors: Numbers
    starts: Numbers
    ends: Numbers
    stated: Mapping[int, _Record]


@dataclass
class _Extents:
    """The extents of tensors in files, by column.

    Attributes:
        files: the number of the file of each.
        tensors: the number of the tensor of each, ascending.
        starts: first byte of each.
        ends: one past its last.
        stated: the zip entry of each extent that has a checksum, by the number of the extent.
    """

    files: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    stated: dict[int, _Record] = field(default_factory=dict)

    def add(self, file: int, tensor: int, start: int, end: int, record: _Record | None = None) -> None:
        if record is not None:
            self.stated[len(self.files)] = record
        self.files.append(file)
        self.tensors.append(tensor)
        self.starts.append(start)
        self.ends.append(end)

    def by_file(self) -> Iterator[tuple[int, _OfFile]]:
        """Yield the distinct extents of each file: ranks that share a file may list the same ones."""
        files, *columns = (np.array(one, np.int64) for one in (self.files, self.tensors, self.starts, self.ends))
        order = np.argsort(files, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(files[order])) + 1) if len(order) else ():
            listed = enumerate(rows.tolist() if self.stated else ())
            stated = {i: self.stated[row] for i, row in listed if row in self.stated}
            tensors, starts, ends = (column[rows] for column in columns)
            of_file = _OfFile(tensors, starts, ends, stated)
            yield int(files[rows[0]]), of_file if len(np.unique(starts)) == len(starts) else _once(of_file)


def _once(extents: _OfFile) -> _OfFile:
    columns = [column.tolist() for column in extents[:3]]
    rows = dict.fromkeys(zip(*columns, map(extents.stated.get, range(len(columns[0]))), strict=True))
    tensors, starts, ends, records = zip(*rows, strict=True)
    stated = {i: record for i, record in enumerate(records) if record is not None}
    return _OfFile(np.array(tensors), np.array(starts), np.array(ends), stated)


def _sum(numbers: Numbers) -> int:
    """Add numbers as Python ints, which do not overflow."""
    return sum(numbers.tolist())


def with_hollow(checkpoint: Checkpoint) -> Checkpoint:
    """Record the tensors that lie in holes of local files, and the problems that follow."""
    found = {
        file.path: _Hollow(file.path, Holes(edges), file.nbytes)
        for file in checkpoint.files
        if file.is_here and file.nbytes > SLACK and not is_remote(file.path) and (edges := holes(file.path))
    }
    if not found:
        return checkpoint
    tensors = {fqn_of(path): tensor for path, tensor in tensors_in(checkpoint.tree)}
    extents, numbers = _Extents(), {path: number for number, path in enumerate(found)}
    known: dict[ExtentFile, int] = {}
    for number, tensor in enumerate(tensors.values()):
        known |= {file: numbers.get(file.path, -1) if file.path else -1 for file in tensor.extents.distinct_files}
        _add_columns(extents, known, number, tensor.extents)
        _add_others(extents, numbers, number, tensor.extents.located.values())
    hollow = [*found.values()]
    for number, of_file in extents.by_file():
        hollow[number].look_at(of_file)
    hollow = [one for one in hollow if len(one.tensors) or not one.nbytes_seen]
    problems = [problem for severity in ("error", "warning") for problem in _problems([*tensors], hollow, severity)]
    empty = tuple(_filled(tensors, [one for one in hollow if one.severity == "error"]))
    return replace(checkpoint, hollow=empty, problems=worst_first([*checkpoint.problems, *problems]))


def _add_others(extents: _Extents, files: Mapping[Path, int], tensor: int, shards: Iterable[Shard]) -> None:
    """Add the extents of shards that the columns cannot describe."""
    for shard in shards:
        for source in shard.sources:
            if source.path in files:
                start, nbytes = _values_span(source)
                record = _Record(source.record_span, source.crc) if source.crc else None
                extents.add(files[source.path], tensor, start, start + nbytes, record)
        item = shard.item
        if not shard.sources and item is not None and item.path in files:
            extents.add(files[item.path], tensor, item.offset, item.offset + item.length)


def _add_columns(extents: _Extents, files: Mapping[ExtentFile, int], tensor: int, shards: Extents) -> None:
    """Add the extents of shards in some files: their values if they were read, else all of their items."""
    first, numbers = len(extents.files), list(map(files.__getitem__, shards.files))
    places: Sequence[int] = range(len(shards))
    if shards.located or -1 in numbers:
        places = [i for i in places if i not in shards.located and numbers[i] >= 0]
    starts, lengths = take(shards.starts, places), take(shards.lengths, places)
    layouts = take(shards.layouts, places) if shards.layouts else ()
    if layouts:
        numbers_of = list(map(id, layouts))
        kinds = dict(zip(numbers_of, layouts, strict=True))
        spans = {number: (0, 0) if of is None else _values_span(of) for number, of in kinds.items()}
        before, nbytes = zip(*map(spans.__getitem__, numbers_of), strict=True)
        starts = [*map(add, starts, before)]
        lengths = [n if of is None else own for of, n, own in zip(layouts, lengths, nbytes, strict=True)]
    extents.files += take(numbers, places)
    extents.tensors += repeat(tensor, len(places))
    extents.starts += starts
    extents.ends += map(add, starts, lengths)
    crcs = take(shards.crcs, places) if any(shards.crcs) else ()
    for i, crc in enumerate(crcs):
        if crc and (of := layouts[i]) is not None:
            at, length = of.record_span
            extents.stated[first + i] = _Record((shards.starts[places[i]] + at, length), crc)


def _values_span(of: Source | ExtentLayout) -> tuple[int, int]:
    """First byte and number of bytes of values, or, if they are not contiguous, of their zip entry."""
    if not is_contiguous(of.shape, of.strides):
        return of.record_span
    return of.offset, prod(of.shape) * ITEMSIZE[of.dtype]


def _is_right(path: Path, record: _Record | None, holes: Holes) -> bool | None:
    """Whether a zip entry with holes has its stated CRC-32; None without one, or if too much would be read."""
    if record is None:
        return None
    start, nbytes = record.span
    if nbytes - holes.overlap(start, start + nbytes) > MAX_READ:
        return None
    try:
        with File(path) as file:
            return _crc_of(file, start, start + nbytes, holes) == record.crc
    except ReadError:  # deleted meanwhile; its next reader reports it
        return None


def _crc_of(file: File, start: int, end: int, holes: Holes) -> int:
    """The CRC-32 of a part of a file, reading only bytes outside of holes."""
    crc, at = 0, start
    for first, last in [*holes.from_first_at(start), (end, end)]:
        first, last = min(max(first, start), end), min(last, end)
        if first > at:
            crc, at = crc32(file.read(at, first - at), crc), first
        if last > at:
            crc, at = crc32_combine(crc, crc_of_zeros(last - at), last - at), last
        if at >= end:
            break
    return crc


def crc_of_zeros(nbytes: int) -> int:
    """The CRC-32 of `nbytes` zeros, by doubling."""
    crc, power, length = 0, crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = crc32_combine(crc, power, length)
        power, length, nbytes = crc32_combine(power, power, length), 2 * length, nbytes >> 1
    return crc


def _problems(fqns: Sequence[str], hollow: Iterable[_Hollow], severity: Severity) -> Iterator[Problem]:
    of_it = [one for one in hollow if one.severity == severity]
    if of_it:
        first, names = of_it[0], [fqns[i] for i in _tensors_of(of_it)]
        text = (
            f"{first.path.name}{and_others(len(of_it) - 1)}: {size(first.empty)} of {size(first.nbytes)} take no space"
        )
        content = f"; they hold {few(names, 3)}" if names else ""
        why = WHY if severity == "error" else MAYBE
        files = tuple(one.path.name for one in of_it)
        yield Problem(Code.NEVER_WRITTEN, f"{text} on the disk ({why}){content}", None, None, severity, files)


def _filled(tensors: Mapping[str, Tensor], hollow: Sequence[_Hollow]) -> Iterator[Filled]:
    small = sum(one.unproven for one in hollow) < 1 << 63
    nbytes = np.zeros(len(tensors), np.int64 if small else object)
    for one in hollow:
        np.add.at(nbytes, one.tensors, one.inside)
    listed = [*tensors.items()]
    for number in _tensors_of(hollow):
        fqn, tensor = listed[number]
        yield Filled(fqn, "zero", min(tensor.numel, -(-int(nbytes[number]) // ITEMSIZE[tensor.dtype])), tensor.numel)


def _tensors_of(hollow: Iterable[_Hollow]) -> Iterable[int]:
    return dict.fromkeys(chain.from_iterable(one.tensors.tolist() for one in hollow))
