"""Records of many files by column, without an object for each: those that state a CRC-32, compared with it.

A world of 1,024 ranks has a million step counts of four bytes, each a record. Small ones are read many at a time.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add, itemgetter, lt
from pathlib import Path

from ckptools.files.opening import File, OpenFiles
from ckptools.model.columns import take
from ckptools.model.item_shards import ItemShards
from ckptools.model.shards import Shards, states_any_crc, with_bytes
from ckptools.model.source import ItemLayout
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.checksums import CHUNK, Record, crc32, read_pieces
from ckptools.tensor_io.fetch_ahead import Part, in_ranks
from ckptools.tensor_io.threads import Progress


@dataclass(slots=True)
class FileRecords:
    """Records of one file, by column.

    Attributes:
        starts: byte offsets of their first bytes.
        lengths: bytes.
        crcs: CRC-32s that the container states.
        names: the container's.
    """

    starts: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    crcs: array[int] = field(default_factory=lambda: array("I"))
    names: list[str] = field(default_factory=list)

    def add(self, starts: Sequence[int], layouts: Sequence[ItemLayout], crcs: Sequence[int]) -> None:
        """Add the records of some items, which may be there already."""
        spans = [layout.record_span for layout in layouts]
        self.starts.extend(map(add, starts, map(itemgetter(0), spans)))
        self.lengths.extend(map(itemgetter(1), spans))
        self.crcs.extend(crcs)
        self.names += [layout.record for layout in layouts]

    def in_order(self) -> FileRecords:
        """The same records in the order of their offsets, each once."""
        if all(map(lt, self.starts, self.starts[1:])):
            return self
        rows = sorted(set(zip(self.starts, self.lengths, self.crcs, self.names, strict=True)))
        starts, lengths, crcs, names = zip(*rows, strict=True)
        return FileRecords(array("Q", starts), array("Q", lengths), array("I", crcs), list(names))

    def batches(self) -> Iterator[range]:
        """Records that are read together: those that follow each other, as far as they are small."""
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
    """The records with a CRC-32 that the shards of some tensors lie in, in the order of their paths and offsets."""
    found: dict[Path, FileRecords] = defaultdict(FileRecords)
    stating = [tensor.shards for tensor in tensors if tensor.kind != "meta" and states_any_crc(tensor.shards)]
    for path, starts, layouts, crcs in _by_file(stating):
        if 0 in crcs:
            stated = [i for i, crc in enumerate(crcs) if crc]
            found[path].add(take(starts, stated), take(layouts, stated), take(crcs, stated))
        else:
            found[path].add(starts, layouts, crcs)
    return {path: found[path].in_order() for path in sorted(found, key=str) if found[path].starts}


def count_without(tensors: Iterable[Tensor]) -> int:
    """The number of records with bytes, but without a CRC-32, that the shards of some tensors lie in."""
    found: dict[Path, set[int]] = defaultdict(set)
    known: Sequence[ItemLayout] = ()
    for path, starts, layouts, crcs in _by_file([tensor.shards for tensor in tensors]):
        if layouts is not known:  # those of all files of a group
            known, spans = layouts, [layout.record_span for layout in layouts]
            at_starts = all(not at and nbytes for at, nbytes in spans)
        if any(crcs) or not at_starts:
            starts = [start + at for start, (at, n), crc in zip(starts, spans, crcs, strict=True) if n and not crc]
        found[path].update(starts)
    return sum(map(len, found.values()))


def _by_file(several: Iterable[Shards]) -> Iterator[tuple[Path, Sequence[int], Sequence[ItemLayout], Sequence[int]]]:
    """The items of some tensors, for each file: where they begin, their layouts, and the CRC-32s of their records."""
    alike: dict[int, list[ItemShards]] = defaultdict(list)
    for shards in several:
        if isinstance(shards, ItemShards) and shards.one_layout is not None:
            alike[id(shards.files)].append(shards)
            continue
        for source in (source for shard in with_bytes(shards) for source in shard.sources):
            start = source.record_span[0]
            yield source.path, [start], [ItemLayout.of(source, start)], [source.crc]
    for group in alike.values():
        layouts = [layout for shards in group if (layout := shards.one_layout) is not None]
        columns = zip(
            zip(*(s.starts for s in group), strict=True), zip(*(s.crcs for s in group), strict=True), strict=True
        )
        for file, (starts, crcs) in zip(group[0].files, columns, strict=True):
            if file.path is not None:
                yield file.path, starts, layouts, crcs


def damaged_records(records: RecordsByFile, files: OpenFiles, threads: int, progress: Progress) -> dict[Record, int]:
    """The records that do not have the CRC-32 that their container states, with the one that they have.

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
    """CRC-32 of each of some small records in a file on the local disk."""
    data, ends = memoryview(file.read_each(starts, lengths)), [*accumulate(lengths)]
    return [crc32(data[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _crc_of(file: File, start: int, nbytes: int) -> int:
    crc = 0
    for piece in read_pieces(file, start, nbytes):
        crc = crc32(piece, crc)
    return crc
