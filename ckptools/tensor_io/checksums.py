"""CRC-32 checksums: of bytes, of concatenations, and of the zip entries and tensors that files store.

`isal` computes a CRC-32 several times as fast as `zlib` and releases the GIL meanwhile. Where it is not installed,
`zlib` serves, and `joined` replaces the combination that Python's `zlib` lacks.

A `Record` is a stretch of bytes that a file stores in one piece: a zip entry of a torch.save archive, also inside an
item of a DCP; or a tensor of safetensors. Only archives state a CRC-32. torch never checks it, so that a flipped bit
loads silently.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import add, itemgetter, lt
from pathlib import Path
from typing import NamedTuple

from ckptools.files.opening import File, OpenFiles
from ckptools.model.extents import ExtentLayout, Extents, take
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.fetch_ahead import Part, Progress, in_ranks

try:
    from isal.isal_zlib import crc32 as crc32
    from isal.isal_zlib import crc32_combine as crc32_combine
except ImportError:  # no wheel for this platform
    from zlib import crc32 as crc32

    def crc32_combine(crc1: int, crc2: int, crc2_length: int, /) -> int:
        """CRC-32 of A + B, from the CRCs of A and B and the length of B."""
        return joined(crc1, crc2, crc2_length)


POLYNOMIAL = 0xEDB88320
"""The polynomial of zip's CRC; its highest power is in the lowest bit."""

ONE = 1 << 31
"""The polynomial 1, in the same bit order."""


def joined(first: int, second: int, length: int) -> int:
    """CRC-32 of A + B, from A's CRC-32 `first`, B's CRC-32 `second`, and B's `length` in bytes.

    Appending `length` zero bytes to A multiplies its CRC, a polynomial over GF(2), by x to the power of 8 * `length`.
    """
    return _product(first, _zeros(length)) ^ second if length else first


def _product(a: int, b: int) -> int:
    """Product of two polynomials, modulo the polynomial of the CRC."""
    total, bit = 0, ONE
    while bit:
        if a & bit:
            total ^= b
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return total


@lru_cache(maxsize=1024)
def _zeros(length: int) -> int:
    """The polynomial x to the power of 8 * `length`."""
    result, power = ONE, ONE >> 8
    while length:
        if length & 1:
            result = _product(result, power)
        power = _product(power, power)
        length >>= 1
    return result


# -- records: consecutive bytes with one checksum ----------------------------------------------------------------------


CHUNK = 1 << 20
"""Bytes read at a time, a multiple of every element's width; a larger chunk would leave the processor's cache."""


class Record(NamedTuple):
    """Consecutive bytes with one checksum.

    Attributes:
        name: name of the zip entry, or of the tensor in a safetensors file.
        offset: byte offset of its first byte.
        crc: CRC-32 that the file states; 0 when it states none.
    """

    path: Path
    name: str
    offset: int
    nbytes: int
    crc: int = 0

    @classmethod
    def of(cls, source: Source) -> Record:
        """The record that contains a source."""
        return cls(source.path, source.record, *source.record_span, source.crc)

    @property
    def part(self) -> Part:
        """The record's byte range in its file."""
        return self.path, self.offset, self.end

    @property
    def end(self) -> int:
        """The file offset one past the last byte."""
        return self.offset + self.nbytes

    def damage(self, found: int) -> str:
        """Describe the damage, given that the CRC-32 of its bytes is `found`."""
        return f"record {self.name or f'at byte {self.offset}'}: CRC-32 is {found:08x}, expected {self.crc:08x}"


@dataclass
class Stored:
    """A record and the shards in it.

    Attributes:
        owners: fqn and shard of every tensor in it.
    """

    record: Record
    owners: list[tuple[str, Shard]] = field(default_factory=list)


def without_records(tensor: Tensor, records: Collection[Record]) -> Tensor:
    """The tensor without the shards in some records; their boxes stay listed, as for a lost file."""
    if not records:
        return tensor
    gone = [any(Record.of(source) in records for source in shard.sources) for shard in tensor.shards]
    if not any(gone):
        return tensor
    pairs = zip(tensor.shards, gone, strict=True)
    kept = tuple(s._replace(source=None, item=None, encoded=None) if lost else s for s, lost in pairs)
    return replace(tensor, shards=kept)


def stored_records(tensors: Iterable[tuple[str, Tensor]]) -> list[Stored]:
    """Every record that contains a shard of some `(fqn, tensor)` pairs, in file order."""
    found: dict[Record, Stored] = {}
    for fqn, tensor in tensors:
        for shard in () if tensor.kind == "meta" else tensor.found:
            for source in shard.sources:
                record = Record.of(source)
                found.setdefault(record, Stored(record)).owners.append((fqn, shard))
    return [found[key] for key in sorted(found, key=lambda r: (str(r.path), r.offset))]


def read_pieces(file: File, offset: int, nbytes: int, buffer: memoryview | None = None) -> Iterator[memoryview]:
    """Read consecutive bytes piece by piece; reading the next piece overwrites the last.

    Args:
        file: to read.
        offset: byte offset of the first byte.
        nbytes: number of bytes.
        buffer: memory to read into; None allocates a buffer.

    Raises:
        ReadError: the file cannot be read, or became shorter.
    """
    buffer = memoryview(bytearray(min(CHUNK, nbytes))) if buffer is None else buffer
    end = offset + nbytes
    file.expect([(offset, end)])
    while offset < end:
        wanted = buffer[: min(len(buffer), end - offset)]
        file.read_all_into(offset, wanted)
        yield wanted
        offset += len(wanted)


# -- records of many files by column, without an object for each: those that state a CRC-32, compared with it ----------
# A world of 1,024 ranks has a million step counts of four bytes, each a record. Small records are read in batches.


@dataclass(slots=True)
class FileRecords:
    """Records of one file, by column.

    Attributes:
        starts: byte offsets of their first bytes.
        lengths: in bytes.
        crcs: CRC-32s that the file states.
        names: names of the zip entries.
    """

    starts: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    crcs: array[int] = field(default_factory=lambda: array("I"))
    names: list[str] = field(default_factory=list)

    def add(self, starts: Sequence[int], layouts: Sequence[ExtentLayout], crcs: Sequence[int]) -> None:
        """Add the records of some items; duplicates are allowed."""
        spans = [layout.record_span for layout in layouts]
        self.starts.extend(map(add, starts, map(itemgetter(0), spans)))
        self.lengths.extend(map(itemgetter(1), spans))
        self.crcs.extend(crcs)
        self.names += [layout.record for layout in layouts]

    def in_order(self) -> FileRecords:
        """The distinct records, in the order of their offsets."""
        if all(map(lt, self.starts, self.starts[1:])):
            return self
        rows = sorted(set(zip(self.starts, self.lengths, self.crcs, self.names, strict=True)))
        starts, lengths, crcs, names = zip(*rows, strict=True)
        return FileRecords(array("Q", starts), array("Q", lengths), array("I", crcs), list(names))

    def batches(self) -> Iterator[range]:
        """Yield ranges of records to read together: consecutive small records, or a single large one."""
        if sum(self.lengths) <= CHUNK:
            yield range(len(self.lengths))
            return
        first = nbytes = 0
        for place, length in enumerate(self.lengths):
            if place > first and nbytes + length > CHUNK:
                yield range(first, place)
                first, nbytes = place, 0
            nbytes += length
        yield range(first, len(self.lengths))


RecordsByFile = Mapping[Path, FileRecords]


def records_of(tensors: Iterable[Tensor]) -> dict[Path, FileRecords]:
    """The records with a CRC-32 that contain shards of some tensors, by path, in the order of their offsets."""
    found: dict[Path, FileRecords] = defaultdict(FileRecords)
    stating = [tensor.extents for tensor in tensors if tensor.kind != "meta" and tensor.extents.states_any_crc]
    for path, starts, layouts, crcs in _by_file(stating):
        if 0 in crcs:
            stated = [i for i, crc in enumerate(crcs) if crc]
            found[path].add(take(starts, stated), take(layouts, stated), take(crcs, stated))
        else:
            found[path].add(starts, layouts, crcs)
    return {path: found[path].in_order() for path in sorted(found, key=str) if found[path].starts}


def count_without(tensors: Iterable[Tensor]) -> int:
    """Count the records without a CRC-32 that contain shards of some tensors; empty records are ignored."""
    found: dict[Path, set[int]] = defaultdict(set)
    known: Sequence[ExtentLayout] = ()
    for path, starts, layouts, crcs in _by_file([tensor.extents for tensor in tensors]):
        if layouts is not known:  # one list of layouts serves all files of a group
            known, spans = layouts, [layout.record_span for layout in layouts]
            at_starts = all(not at and nbytes for at, nbytes in spans)
        if any(crcs) or not at_starts:
            starts = [start + at for start, (at, n), crc in zip(starts, spans, crcs, strict=True) if n and not crc]
        found[path].update(starts)
    return sum(map(len, found.values()))


def _by_file(
    several: Iterable[Extents],
) -> Iterator[tuple[Path, Sequence[int], Sequence[ExtentLayout], Sequence[int]]]:
    """The extents of some tensors by file: start offsets, layouts, and the CRC-32s of their records."""
    alike: dict[int, list[Extents]] = defaultdict(list)
    for extents in several:
        if extents.one_layout is not None:
            alike[id(extents.files)].append(extents)
            continue
        for source in (source for shard in extents.seen for source in shard.sources):
            start = source.record_span[0]
            yield source.path, [start], [ExtentLayout.of(source, start)], [source.crc]
    for group in alike.values():
        layouts = [layout for extents in group if (layout := extents.one_layout) is not None]
        columns = zip(
            zip(*(s.starts for s in group), strict=True), zip(*(s.crcs for s in group), strict=True), strict=True
        )
        for file, (starts, crcs) in zip(group[0].files, columns, strict=True):
            if file.path is not None:
                yield file.path, starts, layouts, crcs


def damaged_records(records: RecordsByFile, files: OpenFiles, threads: int, progress: Progress) -> dict[Record, int]:
    """Find the records whose bytes do not match the stated CRC-32; return each with its actual CRC-32.

    Raises:
        ReadError: a file cannot be read.
    """

    def check(batch: tuple[Path, range]) -> list[int]:
        path, places = batch
        of = records[path]
        with files.open(path) as file:
            if len(places) > 1 and file.descriptor is not None:
                crcs = _crcs_of(file, of.starts[places.start : places.stop], of.lengths[places.start : places.stop])
            else:
                crcs = [_crc_of(file, of.starts[i], of.lengths[i]) for i in places]
        progress(sum(of.lengths[places.start : places.stop]), of.names[places.start])
        return crcs

    def parts(batch: tuple[Path, range]) -> list[Part]:
        path, of = batch[0], records[batch[0]]
        return [(path, of.starts[i], of.starts[i] + of.lengths[i]) for i in batch[1]]

    batches = [(path, places) for path, of in records.items() for places in of.batches()]
    each = in_ranks(check, batches, threads, lambda one: sum(records[one[0]].lengths[i] for i in one[1]), reads=parts)
    damaged = {}
    for (path, places), crcs in zip(batches, each, strict=True):
        of = records[path]
        if of.crcs[places.start : places.stop] == array("I", crcs):
            continue
        for i, crc in zip(places, crcs, strict=True):
            if crc != of.crcs[i]:
                damaged[Record(path, of.names[i], of.starts[i], of.lengths[i], of.crcs[i])] = crc
    return damaged


def _crcs_of(file: File, starts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """CRC-32s of some small records in a file on the local disk."""
    data, ends = memoryview(file.read_each(starts, lengths)), [*accumulate(lengths)]
    return [crc32(data[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _crc_of(file: File, start: int, nbytes: int) -> int:
    crc = 0
    for piece in read_pieces(file, start, nbytes):
        crc = crc32(piece, crc)
    return crc
