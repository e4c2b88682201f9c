"""Tensors whose bytes lie in holes of sparse files: they read as zeros, and nothing says that anybody wrote these.

A record that has its CRC-32 with zeros in its holes was written so, whatever the file system keeps of it; one with
another CRC-32 was not. Where no checksum tells, a file of whose tensors half or more lies in holes was never filled:
weights are not zeros. Less may be zeros that a file system or a copy has made holes of (ZFS with compression, `cp
--sparse=always`), and so may be all of a file that was not read: that is a warning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.holes import SLACK, holes
from ckptools.files.location import is_remote
from ckptools.files.opening import File
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, Severity, worst_first
from ckptools.model.provenance import Filled
from ckptools.model.tensor import Item, Source, Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.checksums import combine, crc32
from ckptools.text import and_others, few, size

MAX_READ = 1 << 20
"""Bytes of a record beside its holes that are read for its checksum."""

Spans: TypeAlias = "Sequence[tuple[int, int]]"

WHY = "holes, which read as zeros: never written, or copied as holes"
MAYBE = "holes, which read as zeros: written as zeros, or never written"


@dataclass
class _Hollow:
    """A file with holes.

    Attributes:
        path: the file.
        spans: its holes, in order.
        nbytes: bytes of it.
        held: bytes of tensors that were looked at.
        unproven: bytes of these that lie in holes, and that no checksum speaks of.
        tensors: bytes in holes by name of the tensor, those that were written as zeros left out.
        never: tensors whose checksum says that they were never written.
    """

    path: Path
    spans: Spans
    nbytes: int
    held: int = 0
    unproven: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    never: set[str] = field(default_factory=set)

    @property
    def empty(self) -> int:
        """Bytes in holes."""
        return sum(end - start for start, end in self.spans)

    @property
    def severity(self) -> Severity:
        """How grave it is: an error where it is proven, or where half or more of its tensors lies in holes."""
        mostly = self.unproven > 0 and 2 * self.unproven >= self.held
        return "error" if self.never or mostly else "warning"

    def add(self, fqn: str, place: Source | Item) -> None:
        """Look at the place of a tensor."""
        start, nbytes = _extent(place)
        inside = overlap(self.spans, start, start + nbytes)
        self.held += nbytes
        if not inside:
            return
        right = _is_right(place, self.spans)
        if right:
            return
        self.tensors[fqn] = self.tensors.get(fqn, 0) + inside
        self.unproven += inside
        if right is False:
            self.never.add(fqn)


def with_hollow(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with what of its tensors lies in holes of local files, and the problem that this is."""
    found = {hollow.path: hollow for hollow in _hollow_files(checkpoint)}
    if not found:
        return checkpoint
    tensors = {fqn_of(path): tensor for path, tensor in tensors_in(checkpoint.tree)}
    for fqn, tensor in tensors.items():
        for place in dict.fromkeys(_places(tensor)):
            if place.path in found:
                found[place.path].add(fqn, place)
    told = [one for one in found.values() if one.tensors or not one.held]
    problems = [problem for severity in ("error", "warning") for problem in _problems(told, severity)]
    empty = tuple(_filled(tensors, [one for one in told if one.severity == "error"]))
    return replace(checkpoint, hollow=empty, problems=worst_first([*checkpoint.problems, *problems]))


def _hollow_files(checkpoint: Checkpoint) -> Iterator[_Hollow]:
    for file in checkpoint.files:
        if file.is_here and file.nbytes > SLACK and not is_remote(file.path) and (spans := holes(file.path)):
            yield _Hollow(file.path, spans, file.nbytes)


def _places(tensor: Tensor) -> Iterator[Source | Item]:
    for shard in tensor.shards:
        yield from shard.sources or ([shard.item] if shard.item is not None else [])


def _extent(place: Source | Item) -> tuple[int, int]:
    """First byte and number of bytes; of values that are not consecutive, those of their record."""
    if isinstance(place, Item):
        return place.offset, place.length
    if not place.contiguous:
        return place.record_span
    numel = 1
    for n in place.shape:
        numel *= n
    return place.offset, int(numel * ITEMSIZE[place.dtype])


def overlap(spans: Spans, start: int, end: int) -> int:
    """How many bytes from `start` to `end` lie in spans, which are in order and apart."""
    found = 0
    for first, last in spans[max(bisect_left(spans, (start, 0)) - 1, 0) :]:
        if first >= end:
            break
        found += max(min(last, end) - max(first, start), 0)
    return found


def _is_right(place: Source | Item, spans: Spans) -> bool | None:
    """Whether a record with holes has the CRC-32 that it states; None where it states none, or much is to be read."""
    if isinstance(place, Item) or not place.crc:
        return None
    start, nbytes = place.record_span
    if nbytes - overlap(spans, start, start + nbytes) > MAX_READ:
        return None
    try:
        with File(place.path) as file:
            return _crc_of(file, start, start + nbytes, spans) == place.crc
    except ReadError:  # gone by now; whoever reads it next says so
        return None


def _crc_of(file: File, start: int, end: int, spans: Spans) -> int:
    """The CRC-32 of a part of a file, of which only what lies in no hole is read."""
    crc, at = 0, start
    for first, last in [*spans[max(bisect_left(spans, (start, 0)) - 1, 0) :], (end, end)]:
        first, last = min(max(first, start), end), min(last, end)
        if first > at:
            crc, at = crc32(file.read(at, first - at), crc), first
        if last > at:
            crc, at = combine(crc, crc_of_zeros(last - at), last - at), last
        if at >= end:
            break
    return crc


def crc_of_zeros(nbytes: int) -> int:
    """The CRC-32 of so many zero bytes, by doubling."""
    crc, power, length = 0, crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = combine(crc, power, length)
        power, length, nbytes = combine(power, power, length), 2 * length, nbytes >> 1
    return crc


def _problems(hollow: Iterable[_Hollow], severity: Severity) -> Iterator[Problem]:
    """One for all files of a severity."""
    of_it = [one for one in hollow if one.severity == severity]
    if of_it:
        first, names = of_it[0], list(dict.fromkeys(fqn for one in of_it for fqn in one.tensors))
        text = (
            f"{first.path.name}{and_others(len(of_it) - 1)}: {size(first.empty)} of {size(first.nbytes)} take no space"
        )
        held = f"; they hold {few(names, 3)}" if names else ""
        why = WHY if severity == "error" else MAYBE
        files = tuple(one.path.name for one in of_it)
        yield Problem(Code.NEVER_WRITTEN, f"{text} on the disk ({why}){held}", None, None, severity, files)


def _filled(tensors: dict[str, Tensor], hollow: Iterable[_Hollow]) -> Iterator[Filled]:
    """Tensors with zeros that nobody wrote."""
    nbytes: dict[str, int] = {}
    for one in hollow:
        for fqn, inside in one.tensors.items():
            nbytes[fqn] = nbytes.get(fqn, 0) + inside
    for fqn, inside in nbytes.items():
        tensor = tensors[fqn]
        yield Filled(fqn, "zero", min(tensor.numel, int(-(-inside // ITEMSIZE[tensor.dtype]))), tensor.numel)
