"""Where in its item each tensor of a DCP folder lies, and which files have other items than the metadata says.

In such a file, exchanged with another rank's or of another save, an item may fit its place by chance and hold another
rank's values: nothing in it counts. A record of the right dtype and shape that fails its checksum was damaged where it
is, and says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.compressed_items import CompressedItem
from ckptools.formats.dcp.items import ItemReader, in_safetensors
from ckptools.formats.dcp.metadata import TensorMetadata
from ckptools.formats.dcp.other_files import Suspect, end_of, is_in_place
from ckptools.model.tensor import Item, Shard
from ckptools.pickles.tensor_classes import note_on
from ckptools.tensor_io.dcp_items import compressed_item, ends_of
from ckptools.tensor_io.fetch_ahead import Part, count_requests, fetched, fetched_runs

MAX_LOCATED = 10_000
"""Items that are all located, though not all ranks were asked for."""

MAX_LOOKED_AT = 1000
"""Of more than that, the items of which the end is looked at, all over the files."""

MAX_REQUESTS = 64
"""Requests to a store that either may take."""

Located = tuple[Path, int, str, int]
"""A file, the byte offset of an item in it, and the fqn and number of the shard that it holds."""


@dataclass
class Found:
    """What is known of one tensor so far.

    Attributes:
        described: by the first metadata that has it.
        shards: its chunks, with their items.
        bad: what is wrong with it; nothing then puts it together.
        why_not: why ckptools does not put it together although nothing is wrong.
        encoded: the same, where its class stores something else than its values.
    """

    described: TensorMetadata
    shards: list[Shard] = field(default_factory=list)
    bad: str = ""
    why_not: str = ""
    encoded: str = ""


class Locator:
    """Gives shards their sources, file by file.

    Attributes:
        suspects: items that are damaged, or not those that the metadata lists.
        all_seen: whether every item was looked into that need not be unpacked.
    """

    def __init__(self, found: Mapping[str, Found], items: ItemReader) -> None:
        self.found, self.items = found, items
        self.suspects: list[Suspect] = []
        self.all_seen = True
        self._listed: list[Located] = [
            (shard.item.path, shard.item.offset, fqn, i)
            for fqn, tensor in found.items()
            for i, shard in enumerate(tensor.shards)
            if shard.item is not None and not tensor.why_not
        ]

    def locate(self, everything: bool) -> None:
        """Locate every tensor, or all that lie in archives which need not be unpacked, where those are few.

        Of the others the ends of some are looked at.
        """
        listed = sorted(self._listed)
        if not everything:
            packed, archives, others = self._sorted_out(listed)
            self.all_seen = _few(archives, self._ends_of)
            now, later = (archives, packed) if self.all_seen else ([], sorted(packed + archives))
            short = filter(self._shortfall, later)
            listed = sorted({*others, *now, *short, *self._out_of_place(_some(later, self._end_of))})
        unpacked: Path | None = None
        for one in fetched(listed, self._ends_of):
            self._locate(one, [] if one[0] == unpacked else self._packed_in(one[0], listed))
            unpacked = one[0]

    def _sorted_out(self, listed: Sequence[Located]) -> tuple[list[Located], list[Located], list[Located]]:
        """Those in compressed archives, in archives, and in safetensors."""
        sorted_out: tuple[list[Located], list[Located], list[Located]] = [], [], []
        for one in listed:
            sorted_out[0 if self._item(one).zstd else 2 if in_safetensors(self._shard(one)) else 1].append(one)
        return sorted_out

    def _shard(self, one: Located) -> Shard:
        return self.found[one[2]].shards[one[3]]

    def _item(self, one: Located) -> Item:
        item = self._shard(one).item
        assert item is not None
        return item

    def _shortfall(self, one: Located) -> str:
        """That an item has fewer bytes than its chunk, as it may where a class stores less than its values; else ""."""
        item = self._item(one)
        nbytes = prod(item.shape) * ITEMSIZE[item.dtype]
        if item.zstd or item.length >= nbytes:
            return ""
        return f"its chunk {self._shard(one).box} has {nbytes} bytes, its item {item.length}"

    def _ends_of(self, one: Located) -> list[Part]:
        """What locating a shard reads; those in safetensors share a header."""
        return [] if in_safetensors(self._shard(one)) else ends_of(self._item(one))

    def _out_of_place(self, some: Sequence[Located]) -> Iterator[Located]:
        """Those of some items that do not lie where the metadata says; locating them says why."""
        for one in next(fetched_runs(some, self._end_of)):
            try:
                in_place = is_in_place(self.items.open(one[0]), self._item(one))
            except ReadError:
                in_place = False
            if not in_place:
                yield one

    def _end_of(self, one: Located) -> list[Part]:
        return [end_of(self._item(one))]

    def _locate(self, one: Located, packed: Sequence[CompressedItem]) -> None:
        path, _, fqn, i = one
        tensor = self.found[fqn]
        try:
            if packed:
                self.items.unpack(path, packed, sum(part.limit for part in packed))
            shard = tensor.shards[i] = self.items.locate(fqn, tensor.shards[i])
            tensor.encoded = tensor.encoded or (note_on(shard.encoded) if shard.encoded else "")
        except ReadError as error:
            tensor.bad = tensor.bad or self._shortfall(one)
            if not tensor.bad and not in_safetensors(tensor.shards[i]):
                self.suspects.append(Suspect(fqn, path, self._item(one), error))
            tensor.bad = tensor.bad or self.items.why(error)

    def _packed_in(self, path: Path, listed: Sequence[Located]) -> list[CompressedItem]:
        """The compressed items of one file."""
        items = (self._item(one) for one in listed if one[0] == path)
        return [compressed_item(item) for item in items if item.zstd]


def _few(listed: Sequence[Located], reads: Callable[[Located], Sequence[Part]]) -> bool:
    """Whether all items are located without being asked for."""
    return len(listed) <= MAX_LOCATED and count_requests(part for one in listed for part in reads(one)) <= MAX_REQUESTS


def _some(listed: Sequence[Located], reads: Callable[[Located], Sequence[Part]]) -> Sequence[Located]:
    """Some items all over the files: of a store as many as it is asked for at once."""
    some = listed[:: (len(listed) - 1) // MAX_LOOKED_AT + 1] if listed else []
    count = count_requests(part for one in some for part in reads(one))
    return some[:: (count - 1) // MAX_REQUESTS + 1] if count else some
