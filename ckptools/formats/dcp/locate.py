"""Location of each tensor in its item, and detection of files whose items are not those of the metadata.

A file may be exchanged with another rank's, or be from another save. An item in it may fit by chance and hold another
rank's values, so the whole file is refused. A zip entry of the right dtype and shape that fails its checksum was
damaged in place, and proves nothing about the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, repeat
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Literal

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.compressed import CompressedItem
from ckptools.files.location import is_remote
from ckptools.formats.dcp.items import ItemReader, in_safetensors
from ckptools.formats.dcp.metadata import TensorMetadata
from ckptools.formats.dcp.other_files import SuspectFile, end_of, is_in_place
from ckptools.model.columns import by_value, take
from ckptools.model.item_shards import HoldingFile, ItemShards
from ckptools.model.regions import Ints
from ckptools.model.shard import Shard
from ckptools.model.source import Item, ItemLayout
from ckptools.pickles.classes.tensor_classes import note_on
from ckptools.tensor_io.dcp_items import ItemKind, compressed_item, ends_of
from ckptools.tensor_io.fetch_ahead import Part, count_requests, fetched_runs

MANY = 1000
"""From this many items on they are located by column, for which numpy is imported."""

MAX_LOCATED = 10_000
"""Up to this many items are all located, even if not all ranks were asked for."""

MAX_LOOKED_AT = 1000
"""Above that, the ends of this many items are sampled over all files."""

MAX_REQUESTS = 64
"""Most requests to a store for either."""

Kind = Literal["packed", "archive", "safetensors"]
Kinds = Mapping[str, Sequence[Kind | None]]
"""How the shards of each tensor are stored: in a compressed archive, in an archive, in a blob of safetensors."""

Located = tuple[HoldingFile, int, str, int, ItemKind | None]
"""An item: a file that is here, a byte offset, fqn and number of its shard; None if it is to be looked at closely."""


@dataclass
class FoundTensor:
    """One tensor while it is located.

    Attributes:
        described: by the first metadata that lists it.
        shards: its chunks.
        bad: its fault, for which it is never put together.
        why_not: why ckptools cannot put it together although nothing is wrong.
        encoded: the same, where its class stores something else than its values.
    """

    described: TensorMetadata
    shards: ItemShards
    bad: str = ""
    why_not: str = ""
    encoded: str = ""


class Locator:
    """Adds sources to shards, file by file.

    Attributes:
        suspects: items that are damaged, or not those that the metadata lists.
        all_seen: whether every item was looked into that need not be unpacked.
    """

    def __init__(self, found: Mapping[str, FoundTensor], items: ItemReader) -> None:
        self.found, self.items = found, items
        self.suspects: list[SuspectFile] = []
        self.all_seen = True
        self._shards = {fqn: tensor.shards for fqn, tensor in found.items() if not tensor.why_not}

    def locate(self, everything: bool) -> None:
        """Locate every tensor, or all in plain archives if they are few, and sample the ends of the others."""
        kinds = {fqn: _kinds(shards) for fqn, shards in self._shards.items()}
        if everything:
            self._locate_alike(kinds)
        listed = _in_order(self._listed(kinds, "packed", "archive", "safetensors") if everything else self._some(kinds))
        packed_in: dict[HoldingFile, list[CompressedItem]] = {}
        for one in [one for one in listed if one[0].zstd]:
            packed_in.setdefault(one[0], []).append(compressed_item(self._item(one)))
        for fqn in dict.fromkeys(map(itemgetter(2), listed)):
            self._shards[fqn].expect_layouts()
        for run in fetched_runs(listed, self._ends_of):
            for of_file in map(list, _grouped(run)):
                for one in self._other_than_alike(of_file):
                    self._locate(one, packed_in.pop(one[0], ()))

    def _locate_alike(self, kinds: Kinds) -> None:
        """Locate items by column where there are many in archives on the local disk."""
        plain = {fqn: _places(of, ["archive"]) for fqn, of in kinds.items() if not self._shards[fqn].located}
        files = {file for fqn, places in plain.items() for file in {*take(self._shards[fqn].files, places)}}
        if not files or sum(map(len, plain.values())) < MANY:
            return
        if self.items.bare or any(is_remote(_path(file)) for file in files):
            return
        from ckptools.formats.dcp.alike_items import AlikeItems

        AlikeItems(self._shards, plain).locate(self.items)

    def _some(self, kinds: Kinds) -> set[Located]:
        """The items to locate where not all are asked for."""
        archives = sum(of_tensor.count("archive") for of_tensor in kinds.values())
        now = self._listed(kinds, "archive") if archives <= MAX_LOCATED else []
        self.all_seen = archives == len(now) and self._requests(now, self._ends_of) <= MAX_REQUESTS
        later: tuple[Kind, ...] = ("packed",) if self.all_seen else ("packed", "archive")
        some = _in_order(self._spread(kinds, later))
        some = some[:: max(self._requests(some, self._end_of) - 1, 0) // MAX_REQUESTS + 1]
        found = {*self._listed(kinds, "safetensors"), *self._out_of_place(some)}
        return found | set(now if self.all_seen else self._short(kinds))

    def _listed(self, kinds: Kinds, *which: Kind) -> list[Located]:
        """The items of some kinds."""
        found: list[Located] = []
        for fqn, of in kinds.items():
            shards, places = self._shards[fqn], _places(of, which)
            if shards.layouts and not (places := [i for i in places if shards.layouts[i] is None]):
                continue
            files, starts = take(shards.files, places), take(shards.starts, places)
            found += zip(files, starts, repeat(fqn), places, self._item_kinds(shards, places))
        return found

    def _short(self, kinds: Kinds) -> Iterator[Located]:
        """The items in archives that have fewer bytes than their chunks."""
        for fqn, shards in self._shards.items():
            short = {pair for pair in _lengths(shards) if pair[0] < _nbytes(shards.dtype, pair[1])}
            for i, pair in enumerate(zip(shards.lengths, shards.sizes, strict=True) if short else ()):
                if pair in short and kinds[fqn][i] == "archive":
                    yield self._located(fqn, i)

    def _spread(self, kinds: Kinds, which: Collection[Kind]) -> Iterator[Located]:
        """A sample of the items of some kinds: as many of each file as its share of them, and at least one."""
        listed: list[tuple[str, Sequence[int]]] = []
        files: list[HoldingFile] = []
        for fqn, of_tensor in kinds.items():
            places = _places(of_tensor, which)
            listed.append((fqn, places))
            files += take(self._shards[fqn].files, places)
        step, behind = (len(files) - 1) // MAX_LOOKED_AT + 1, [*accumulate(len(places) for _, places in listed)]
        for of_file in by_value(files).values():
            for place in of_file[::step]:
                number = bisect_right(behind, place)
                fqn, places = listed[number]
                yield self._located(fqn, places[place - behind[number]])

    @staticmethod
    def _requests(listed: Iterable[Located], reads: Callable[[Located], Sequence[Part]]) -> int:
        """Requests to a store for what some items need."""
        return count_requests(part for one in listed for part in reads(one))

    def _located(self, fqn: str, i: int) -> Located:
        shards = self._shards[fqn]
        return shards.files[i], shards.starts[i], fqn, i, self._item_kinds(shards, [i])[0]

    @staticmethod
    def _item_kinds(shards: ItemShards, places: Sequence[int]) -> Sequence[ItemKind | None]:
        kinds = zip(take(shards.lengths, places), repeat(shards.dtype), take(shards.sizes, places))
        if not shards.located and not any(file.zstd for file in set(shards.files)):
            return list(kinds)
        closely = [i in shards.located or shards.files[i].zstd for i in places]
        return [None if look else kind for look, kind in zip(closely, kinds, strict=False)]

    def _shard(self, one: Located) -> Shard:
        return self.found[one[2]].shards[one[3]]

    def _item(self, one: Located) -> Item:
        item = self._shard(one).item
        assert item is not None
        return item

    def _shortfall(self, one: Located) -> str:
        """Fault of an item with fewer bytes than its chunk; "" for classes that may store less than their values."""
        item = self._item(one)
        nbytes = prod(item.shape) * ITEMSIZE[item.dtype]
        if item.zstd or item.length >= nbytes:
            return ""
        return f"its chunk {self._shard(one).box} has {nbytes} bytes, its item {item.length}"

    def _ends_of(self, one: Located) -> list[Part]:
        """Byte ranges that locating a shard reads; shards in safetensors share a header."""
        return [] if in_safetensors(self._shard(one)) else ends_of(self._item(one))

    def _out_of_place(self, some: Sequence[Located]) -> Iterator[Located]:
        """Those of some items that do not lie where the metadata says."""
        for one in next(fetched_runs(some, self._end_of)):
            try:
                in_place = is_in_place(self.items.open(_path(one[0])), self._item(one))
            except ReadError:
                in_place = False
            if not in_place:
                yield one

    def _end_of(self, one: Located) -> list[Part]:
        return [end_of(self._item(one))]

    def _other_than_alike(self, listed: Sequence[Located]) -> Iterator[Located]:
        """Locate the items of a file that differ from others in their values only; return the others one by one."""
        starts, kinds, done = [one[1] for one in listed], [one[4] for one in listed], 0
        of_tensor = self._shards
        while done < len(listed):
            found: Sequence[tuple[ItemLayout, int]] = ()
            with suppress(ReadError):  # `_locate` meets it again
                found = self.items.alike(_path(listed[done][0]), starts, kinds, done)
            for (_, _, fqn, i, _), known in zip(islice(listed, done, None), found, strict=False):
                shards = of_tensor[fqn]
                shards.layouts[i], shards.crcs[i] = known
            done += len(found) + 1
            yield from listed[done - 1 : done]

    def _locate(self, one: Located, packed: Sequence[CompressedItem]) -> None:
        file, _, fqn, i, _ = one
        tensor, path = self.found[fqn], _path(file)
        try:
            if packed:
                self.items.unpack(path, packed, sum(part.limit for part in packed))
            shard = tensor.shards.located[i] = self.items.locate(fqn, self._shard(one))
            tensor.encoded = tensor.encoded or (note_on(shard.encoded) if shard.encoded else "")
        except ReadError as error:
            tensor.bad = tensor.bad or self._shortfall(one)
            if not tensor.bad and not in_safetensors(self._shard(one)):
                self.suspects.append(SuspectFile(fqn, path, self._item(one), error))
            tensor.bad = tensor.bad or self.items.why(error)


def _places(kinds: Sequence[Kind | None], which: Collection[Kind]) -> Sequence[int]:
    """The numbers of the shards of some kinds."""
    present = {*kinds}
    if present <= {*which}:
        return range(len(kinds))
    return () if present.isdisjoint(which) else [i for i, kind in enumerate(kinds) if kind in which]


def _in_order(found: Iterable[Located]) -> list[Located]:
    """Items by file and offset; a path is compared with the others once, and not with every item."""
    listed = sorted(found, key=itemgetter(1))
    files = {one[0]: _path(one[0]) for one in listed}
    numbers = {path: number for number, path in enumerate(sorted({*files.values()}))}
    of_file = {file: numbers[path] for file, path in files.items()}
    return sorted(listed, key=lambda one: of_file[one[0]])


def _grouped(listed: Iterable[Located]) -> Iterator[Iterable[Located]]:
    """The items of each file."""
    return (of_file for _, of_file in groupby(listed, key=itemgetter(0)))


def _path(file: HoldingFile) -> Path:
    assert file.path is not None
    return file.path


def _lengths(shards: ItemShards) -> set[tuple[int, Ints]]:
    """The lengths of items with the sizes of their shards, equal ones once."""
    return set(zip(shards.lengths, shards.sizes, strict=True))


def _nbytes(dtype: str, sizes: Ints) -> int:
    return prod(sizes) * ITEMSIZE[dtype]


def _kinds(shards: ItemShards) -> list[Kind | None]:
    """How each shard of a tensor is stored; None for what cannot be read. An archive is longer than its values."""
    alike = {pair for pair in _lengths(shards) if pair[0] == _nbytes(shards.dtype, pair[1])}
    if not alike and not any(file.path is None or file.zstd for file in set(shards.files)):
        return ["archive"] * len(shards)
    return [
        None if file.path is None
        else "packed" if file.zstd
        else "safetensors" if pair in alike
        else "archive"
        for file, pair in zip(shards.files, zip(shards.lengths, shards.sizes, strict=True), strict=True)
    ]  # fmt: skip
