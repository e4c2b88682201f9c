"""Locate the values of a DCP folder's tensors in their items: of every item, or of a sample, by column.

Items of one kind differ only in their values, so the first few are read one by one as archives, and the others are
compared with these (`ItemLocator`). An item that differs in other bytes is read as an archive too.

A zip entry of the right dtype and shape that fails its checksum was damaged in place, and proves nothing about the
others; an item of another dtype or shape means that the whole file is another (see `files`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import Literal

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files import compressed
from ckptools.formats.dcp.files import SuspectFile, bounds_of, is_in_place
from ckptools.formats.dcp.items import ItemReader, in_safetensors
from ckptools.formats.dcp.metadata import TensorMetadata
from ckptools.model.extents import ExtentFile, ExtentLayout, Extents, by_value, take
from ckptools.model.shards import Item, Shard
from ckptools.pickles.classes.tensors import note_on
from ckptools.tensor_io.dcp_items import ItemKind, compressed_item, ends_of
from ckptools.tensor_io.fetch_ahead import Part, count_requests, fetched_runs

MAX_LOCATED = 10_000
"""Up to this many items are all located, even if not all ranks were asked for."""

MAX_LOOKED_AT = 1000
"""Of more items, the ends of this many are sampled over all files."""

MAX_REQUESTS = 64
"""At most this many requests to a store for either."""

AT_ONCE = 4000
"""Items whose bytes around the values are in memory together, about 1 KB each."""

Form = Literal["packed", "archive", "safetensors"]
"""How an item is stored: in a compressed archive, in an archive, in a blob of safetensors."""


@dataclass
class FoundTensor:
    """A tensor while it is being located.

    Attributes:
        described: its description in the first metadata that lists it.
        bad: its fault, which keeps it from being put together.
        why_not: why ckptools cannot put it together although nothing is wrong.
        encoded: the same, if its class stores other tensors instead of its values.
    """

    described: TensorMetadata
    shards: Extents
    bad: str = ""
    why_not: str = ""
    encoded: str = ""


class ItemRows:
    """The items of some tensors, by column; the items of one tensor follow each other.

    Attributes:
        shards: of the tensors, by fqn.
        files: the file of each item.
        starts: the byte offset of each.
        forms: how each is stored; None for one that cannot be read.
        kinds: the kind of each archive that may differ from others in its values only; None for other items.
        distinct_kinds: the kinds that occur.
        layouts: the layout of its values, once known.
        crcs: the CRC-32 of their zip entry.
    """

    def __init__(self, shards: Mapping[str, Extents]) -> None:
        self.shards = shards
        self.files: list[ExtentFile] = []
        self.starts: list[int] = []
        self.forms: list[Form | None] = []
        self.kinds: list[ItemKind | None] = []
        self.distinct_kinds = set[ItemKind]()
        for extents in shards.values():
            self.files += extents.files
            self.starts += extents.starts
            self._add_kinds(extents)
        self.layouts: list[ExtentLayout | None] = [None] * len(self.files)
        self.crcs = array("I", bytes(4 * len(self.files)))
        self._fqns, self._ends = [*shards], [*accumulate(map(len, shards.values()))]

    def _add_kinds(self, extents: Extents) -> None:
        """Add the storage form of a tensor's items. An archive is longer than its values."""
        kinds = {
            (length, sizes): (length, extents.dtype, sizes)
            for length, sizes in set(zip(extents.lengths, extents.sizes, strict=True))
        }
        pairs = zip(extents.lengths, extents.sizes, strict=True)
        bare = {pair for pair in kinds if pair[0] == prod(pair[1]) * ITEMSIZE[extents.dtype]}
        self.distinct_kinds.update(kind for pair, kind in kinds.items() if pair not in bare)
        if not bare and not extents.located and all(file.path and not file.zstd for file in extents.distinct_files):
            self.forms += ["archive"] * len(extents)
            self.kinds += [*kinds.values()] * len(extents) if len(kinds) == 1 else map(kinds.__getitem__, pairs)
            return
        for i, (file, pair) in enumerate(zip(extents.files, pairs, strict=True)):
            form: Form = "packed" if file.zstd else "safetensors" if pair in bare else "archive"
            self.forms.append(form if file.path is not None else None)
            self.kinds.append(kinds[pair] if form == "archive" and i not in extents.located else None)

    def place(self, row: int) -> tuple[str, int]:
        """The fqn of an item's tensor, and the number of its shard."""
        number = bisect_right(self._ends, row)
        return self._fqns[number], row - (self._ends[number - 1] if number else 0)

    def shard(self, row: int) -> Shard:
        """The shard of an item."""
        fqn, i = self.place(row)
        return self.shards[fqn][i]

    def item(self, row: int) -> Item:
        """The item that a row describes, which must be readable."""
        fqn, i = self.place(row)
        known = self.shards[fqn].located.get(i)
        item = known.item if known is not None else self.shards[fqn].item(i)
        assert item is not None
        return item

    def path(self, row: int) -> Path:
        """The file of a readable item."""
        path = self.files[row].path
        assert path is not None
        return path

    def stored(self, *forms: Form) -> Sequence[int]:
        """The items that are stored in the given forms."""
        present = {*self.forms}
        if present <= {*forms}:
            return range(len(self.forms))
        return () if present.isdisjoint(forms) else [row for row, form in enumerate(self.forms) if form in forms]

    def in_order(self, rows: Sequence[int]) -> list[int]:
        """Items by file and offset."""
        of_file = by_value(take(self.files, rows))
        files = sorted((file.path, file.zstd, file) for file in of_file if file.path is not None)
        return [row for *_, file in files for row in sorted(take(rows, of_file[file]), key=self.starts.__getitem__)]

    def note(self) -> None:
        """Enter newly located values into the columns of the tensors."""
        end = 0
        for extents in self.shards.values():
            of_tensor = slice(end, end := end + len(extents))
            layouts = self.layouts[of_tensor]
            if layouts.count(None) < len(layouts):
                extents.layouts, extents.crcs = layouts, self.crcs[of_tensor]


class Locator:
    """Locates the values of tensors, file by file.

    Attributes:
        suspects: items that are damaged, or contradict the metadata.
        all_seen: whether every uncompressed item was read.
    """

    def __init__(self, found: Mapping[str, FoundTensor], items: ItemReader) -> None:
        self.found, self.items = found, items
        self.suspects: list[SuspectFile] = []
        self.all_seen = True
        self.rows = ItemRows({fqn: tensor.shards for fqn, tensor in found.items() if not tensor.why_not})

    def locate(self, everything: bool) -> None:
        """Locate every tensor, or all in plain archives if they are few, and sample the ends of the others."""
        rows = self.rows.stored("packed", "archive", "safetensors") if everything else [*self._some()]
        for run in fetched_runs(self.rows.in_order(rows), self._ends_of):
            for file, of_file in groupby(run, key=self.rows.files.__getitem__):
                self._locate_in(file, [*of_file])
        self.rows.note()

    # a sample of the items

    def _some(self) -> set[int]:
        """The items to locate if not all are asked for."""
        archives = self.rows.stored("archive")
        now = archives if len(archives) <= MAX_LOCATED else ()
        self.all_seen = len(archives) == len(now) and self._requests(now, self._ends_of) <= MAX_REQUESTS
        later = self.rows.stored("packed") if self.all_seen else self.rows.stored("packed", "archive")
        some = self.rows.in_order(self._spread(later))
        some = some[:: max(self._requests(some, self._bounds_of) - 1, 0) // MAX_REQUESTS + 1]
        found = {*self.rows.stored("safetensors"), *self._out_of_place(some)}
        return found | {*(now if self.all_seen else self._short(archives))}

    def _short(self, archives: Sequence[int]) -> Iterator[int]:
        """The archives that are shorter than the values of their chunks."""
        short = {kind for kind in self.rows.distinct_kinds if kind[0] < prod(kind[2]) * ITEMSIZE[kind[1]]}
        return (row for row in archives if self.rows.kinds[row] in short) if short else iter(())

    def _spread(self, rows: Sequence[int]) -> list[int]:
        """A sample of some items: each file's number is proportional to its share, and at least one."""
        step = (len(rows) - 1) // MAX_LOOKED_AT + 1
        return [rows[n] for of_file in by_value(take(self.rows.files, rows)).values() for n in of_file[::step]]

    def _out_of_place(self, some: Sequence[int]) -> Iterator[int]:
        """Find items that do not lie where the metadata says."""
        for row in next(fetched_runs(some, self._bounds_of)):
            try:
                in_place = is_in_place(self.items.open(self.rows.path(row)), self.rows.item(row))
            except ReadError:
                in_place = False
            if not in_place:
                yield row

    @staticmethod
    def _requests(rows: Iterable[int], reads: Callable[[int], Sequence[Part]]) -> int:
        return count_requests(part for row in rows for part in reads(row))

    def _ends_of(self, row: int) -> list[Part]:
        """Byte ranges that are read to locate an item; items in a safetensors blob share its header."""
        return [] if in_safetensors(self.rows.shard(row)) else ends_of(self.rows.item(row))

    def _bounds_of(self, row: int) -> list[Part]:
        return bounds_of(self.rows.item(row))

    # the items of one file

    def _locate_in(self, file: ExtentFile, rows: Sequence[int]) -> None:
        """Locate items of a file, by ascending offsets."""
        if file.zstd:
            parts = [compressed_item(self.rows.item(row)) for row in rows]
            with suppress(ReadError):  # `_look_at` raises it again
                compressed.unpack(self.items.open(self.rows.path(rows[0])), parts, sum(part.limit for part in parts))
        taught = self._teach(rows)
        left = [row for row in rows if row not in taught] if taught else rows
        for at in range(0, len(left), AT_ONCE):
            some = left[at : at + AT_ONCE]
            starts, kinds = take(self.rows.starts, some), take(self.rows.kinds, some)
            found: Collection[tuple[ExtentLayout, int] | None] = [None] * len(some)
            with suppress(ReadError):  # `_look_at` raises it again
                found = self.items.locator.alike(self.items.open(self.rows.path(some[0])), starts, kinds)
            for row, known in zip(some, found, strict=True):
                if known is None:
                    self._look_at(row)
                else:
                    self.rows.layouts[row], self.rows.crcs[row] = known

    def _teach(self, rows: Sequence[int]) -> set[int]:
        """Read some items as archives, so that the layout of every kind becomes known; return these items."""
        unknown = {kind for kind in {*take(self.rows.kinds, rows)} if kind and not self.items.locator.knows(kind)}
        looked_at = set[int]()
        for row in rows if unknown else ():
            kind = self.rows.kinds[row]
            if kind is not None and kind in unknown:
                self._look_at(row)
                looked_at.add(row)
                if self.items.locator.knows(kind):
                    unknown.discard(kind)
        return looked_at

    def _look_at(self, row: int) -> None:
        """Read an item as an archive."""
        fqn, i = self.rows.place(row)
        tensor, path, was = self.found[fqn], self.rows.path(row), self.rows.shard(row)
        try:
            shard = self.items.locate(fqn, was)
        except ReadError as error:
            tensor.bad = tensor.bad or self._shortfall(row)
            if not tensor.bad and not in_safetensors(was):
                self.suspects.append(SuspectFile(fqn, path, self.rows.item(row), error))
            tensor.bad = tensor.bad or self.items.why(error)
            return
        source = shard.source
        if source is None or source.path != path or i in tensor.shards.located:
            tensor.shards.located[i] = shard
            tensor.encoded = tensor.encoded or (note_on(shard.encoded) if shard.encoded else "")
        else:
            self.rows.layouts[row], self.rows.crcs[row] = ExtentLayout.of(source, self.rows.starts[row]), source.crc

    def _shortfall(self, row: int) -> str:
        """The fault of an item that is shorter than its chunk; "" for classes that may store less than their values."""
        item = self.rows.item(row)
        nbytes = prod(item.shape) * ITEMSIZE[item.dtype]
        if item.zstd or item.length >= nbytes:
            return ""
        return f"its chunk {self.rows.shard(row).box} has {nbytes} bytes, its item {item.length}"
