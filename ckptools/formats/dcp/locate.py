"""Location of each tensor in its item, and detection of files whose items are not those of the metadata.

A file may be exchanged with another rank's, or be from another save. An item in it may fit by chance and hold another
rank's values, so the whole file is refused. A zip entry of the right dtype and shape that fails its checksum was
damaged in place, and proves nothing about the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import lt
from pathlib import Path
from typing import Literal

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.compressed import CompressedItem
from ckptools.formats.dcp.items import ItemReader, in_safetensors
from ckptools.formats.dcp.metadata import TensorMetadata
from ckptools.formats.dcp.other_files import Suspect, end_of, is_in_place
from ckptools.model.regions import Ints
from ckptools.model.shards import HoldingFile, ItemShards
from ckptools.model.tensor import Item, Shard
from ckptools.pickles.classes.tensor_classes import note_on
from ckptools.tensor_io.dcp_items import compressed_item, ends_of
from ckptools.tensor_io.fetch_ahead import Part, count_requests, fetched, fetched_runs

MAX_LOCATED = 10_000
"""Up to this many items are all located, even if not all ranks were asked for."""

MAX_LOOKED_AT = 1000
"""Above that, the ends of this many items are sampled over all files."""

MAX_REQUESTS = 64
"""Most requests to a store for either."""

Kind = Literal["packed", "archive", "safetensors"]
Kinds = Mapping[str, Sequence[Kind | None]]
"""How the shards of each tensor are stored: in a compressed archive, in an archive, in a blob of safetensors."""

Located = tuple[Path, int, str, int]
"""A file, the byte offset of an item in it, and the fqn and number of the shard that it holds."""


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
        self.suspects: list[Suspect] = []
        self.all_seen = True
        self._shards = {fqn: tensor.shards for fqn, tensor in found.items() if not tensor.why_not}

    def locate(self, everything: bool) -> None:
        """Locate every tensor, or all in plain archives if they are few, and sample the ends of the others."""
        kinds = {fqn: _kinds(shards) for fqn, shards in self._shards.items()}
        listed = _in_order(self._listed(kinds, "packed", "archive", "safetensors") if everything else self._some(kinds))
        packed_in: dict[Path, list[CompressedItem]] = {}
        for one in listed:
            if self._shards[one[2]].files[one[3]].zstd:
                packed_in.setdefault(one[0], []).append(compressed_item(self._item(one)))
        for one in fetched(listed, self._ends_of):
            self._locate(one, packed_in.pop(one[0], ()))

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
        return [self._located(fqn, i) for fqn, of in kinds.items() for i, kind in enumerate(of) if kind in which]

    def _short(self, kinds: Kinds) -> Iterator[Located]:
        """The items in archives that have fewer bytes than their chunks."""
        for fqn, shards in self._shards.items():
            needed = map(_nbytes(shards).__getitem__, shards.sizes)
            for i in [i for i, few in enumerate(map(lt, shards.lengths, needed)) if few and kinds[fqn][i] == "archive"]:
                yield self._located(fqn, i)

    def _spread(self, kinds: Kinds, which: Collection[Kind]) -> Iterator[Located]:
        """A sample of the items of some kinds: as many of each file as its share of them, and at least one."""
        count = sum(of_tensor.count(kind) for of_tensor in kinds.values() for kind in which)
        step, of_file = (count - 1) // MAX_LOOKED_AT + 1, defaultdict[HoldingFile, int](int)
        for fqn, of_tensor in kinds.items():
            for i, (file, kind) in enumerate(zip(self._shards[fqn].files, of_tensor, strict=True)):
                if kind in which:
                    if of_file[file] % step == 0:
                        yield self._located(fqn, i)
                    of_file[file] += 1

    @staticmethod
    def _requests(listed: Iterable[Located], reads: Callable[[Located], Sequence[Part]]) -> int:
        """Requests to a store for what some items need."""
        return count_requests(part for one in listed for part in reads(one))

    def _located(self, fqn: str, i: int) -> Located:
        path = self._shards[fqn].files[i].path
        assert path is not None
        return path, self._shards[fqn].starts[i], fqn, i

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
                in_place = is_in_place(self.items.open(one[0]), self._item(one))
            except ReadError:
                in_place = False
            if not in_place:
                yield one

    def _end_of(self, one: Located) -> list[Part]:
        return [end_of(self._item(one))]

    def _is_alike(self, path: Path, start: int, shards: ItemShards, i: int) -> bool:
        """Locate a shard whose item differs from another one's in its values only."""
        if shards.files[i].zstd or i in shards.located:
            return False
        found = self.items.alike(path, start, (shards.lengths[i], shards.dtype, shards.sizes[i]))
        if found is not None:
            shards.locate(i, *found)
        return found is not None

    def _locate(self, one: Located, packed: Sequence[CompressedItem]) -> None:
        path, start, fqn, i = one
        tensor = self.found[fqn]
        try:
            if self._is_alike(path, start, tensor.shards, i):
                return
            if packed:
                self.items.unpack(path, packed, sum(part.limit for part in packed))
            shard = tensor.shards.located[i] = self.items.locate(fqn, self._shard(one))
            tensor.encoded = tensor.encoded or (note_on(shard.encoded) if shard.encoded else "")
        except ReadError as error:
            tensor.bad = tensor.bad or self._shortfall(one)
            if not tensor.bad and not in_safetensors(self._shard(one)):
                self.suspects.append(Suspect(fqn, path, self._item(one), error))
            tensor.bad = tensor.bad or self.items.why(error)


def _in_order(found: Iterable[Located]) -> list[Located]:
    """Items by file and offset; a path is compared with the others once, and not with every item."""
    listed = [*found]
    numbers = {path: number for number, path in enumerate(sorted({one[0] for one in listed}))}
    return sorted(listed, key=lambda one: (numbers[one[0]], *one[1:]))


def _nbytes(shards: ItemShards) -> dict[Ints, int]:
    """Bytes of the values of a shard, by its sizes."""
    return {sizes: prod(sizes) * ITEMSIZE[shards.dtype] for sizes in set(shards.sizes)}


def _kinds(shards: ItemShards) -> list[Kind | None]:
    """How each shard of a tensor is stored; None for what cannot be read. An archive is longer than its values."""
    nbytes = _nbytes(shards)
    return [
        None if file.path is None
        else "packed" if file.zstd
        else "safetensors" if length == nbytes[sizes]
        else "archive"
        for file, sizes, length in zip(shards.files, shards.sizes, shards.lengths, strict=True)
    ]  # fmt: skip
