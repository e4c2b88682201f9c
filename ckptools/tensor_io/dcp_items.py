"""Items of a DCP: archives of one tensor each, packed into larger files. Opened when their bytes are needed.

A large run has tens of thousands of items, and items of one dtype, shape and torch version differ only in values and
checksums. So the first of a kind is read as an archive, and the others are compared with it: the bytes before the
values, and the directory without the checksums of entries that are not read.

Source: torch/distributed/checkpoint/filesystem.py (`_write_item` calls torch.save on a contiguous tensor of its own).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files import compressed
from ckptools.files.compressed import ARCHIVE, CompressedItem
from ckptools.files.opening import File, OpenFiles, Window
from ckptools.files.zip_archive import CENTRAL, Container
from ckptools.model.extents import ExtentLayout, Extents
from ckptools.model.regions import Ints
from ckptools.model.shards import Encoded, Item, Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.pickles.archive import read_zip
from ckptools.pickles.classes.tensors import note_on
from ckptools.tensor_io.fetch_ahead import Part, fetched

MAX_HEAD = 64 << 10
"""Longer heads before a tensor's values are not cached; torch writes less than a thousand bytes."""

ENDS = 2 << 10
"""Bytes before and after a tensor's values that are fetched of an item in a store."""

CRC_AT = 16
"""Offset of the checksum in an entry of a zip directory."""

CRC = struct.Struct("<I")

READ = ("data.pkl", "byteorder")
"""Zip entries that are read to read an archive, so that their checksums matter."""


Stored = Source | Encoded
"""The source of an item's values, or the parts that the class of its tensor stores instead."""


class OtherItemError(ReadError):
    """An undamaged item with another tensor than expected: its file does not belong to the checkpoint's metadata."""


def ends_of(item: Item) -> list[Part]:
    """The byte ranges that are read to locate an item's tensor: all of a compressed item, else both its ends."""
    end = item.offset + item.length
    if item.zstd or item.length <= 2 * ENDS:
        return [(item.path, item.offset, end)]
    return [(item.path, item.offset, item.offset + ENDS), (item.path, end - ENDS, end)]


def with_source(shard: Shard) -> Shard:
    """The shard with its source, which is read from its item if it is not known yet.

    Raises:
        ReadError: the item is damaged, contradicts the checkpoint's metadata, or has codes instead of values.
    """
    if shard.was_read or shard.item is None:
        return shard
    with File(shard.item.path) as file:
        found = locate(file, shard.item)
    if isinstance(found, Encoded):
        raise ReadError(shard.item.path, f"item at byte {shard.item.offset}: {note_on(found)}")
    return shard._replace(source=found)


def with_items_read(tensor: Tensor, locator: ItemLocator, files: OpenFiles) -> Tensor:
    """Locate the values of a tensor's items; shards whose items cannot be read are left unchanged."""
    if not isinstance(tensor.shards, Extents):
        return tensor
    shards = [*tensor.shards]
    items = [(i, shard.item) for i, shard in enumerate(shards) if shard.item is not None and not shard.was_read]
    for i, item in fetched(items, lambda one: ends_of(one[1])):
        with suppress(ReadError), files.open(item.path) as file:
            found = locator.locate(file, item)
            known = {"encoded": found} if isinstance(found, Encoded) else {"source": found}
            shards[i] = shards[i]._replace(**known)
    note = next((note_on(shard.encoded) for shard in shards if shard.encoded is not None), "")
    return replace(tensor, shards=tuple(shards), note=tensor.note or note)


def locate(file: File, item: Item) -> Stored:
    """Locate the values of an item's tensor, or the parts that it stores instead.

    Args:
        file: the item's file, open.
        item: the part of the file, and the dtype and shape that it must have.

    Raises:
        ReadError: the item is damaged, or contradicts the checkpoint's metadata.
    """
    if not item.zstd:
        return _source(Window(file, item.offset, item.length), item)
    try:
        opened, window = compressed.window(file, compressed_item(item))
    except ReadError as error:
        raise ReadError(item.path, f"item at byte {item.offset}: {error.reason}", error.kind) from error
    with opened:
        return _source(window, item)


def compressed_item(item: Item) -> CompressedItem:
    """A compressed item as a part of its file, with the size limit that its tensor and an archive imply."""
    return CompressedItem(item.offset, item.length, prod(item.shape) * ITEMSIZE[item.dtype] + ARCHIVE)


def _source(window: Window, item: Item) -> Stored:
    try:
        _, tree = read_zip(window)
    except ReadError as error:
        raise ReadError(item.path, f"item at byte {item.offset}: {error.reason}", error.kind) from error
    shards = tree.found if isinstance(tree, Tensor) else ()
    found = shards[0].source or shards[0].encoded if len(shards) == 1 else None
    holder = found if isinstance(found, Source) else tree
    if found is None or (holder.dtype, holder.shape) != (item.dtype, item.shape):
        content = f"{holder.dtype} {list(holder.shape)}" if isinstance(tree, Tensor) else type(tree).__name__
        text = (
            f"item at byte {item.offset}: expected {item.dtype} {list(item.shape)}, found {content}; damaged or stale"
        )
        raise (OtherItemError if found else ReadError)(item.path, text)
    return found


ItemKind = tuple[int, str, Ints]
"""Length of an item, dtype and shape of its tensor."""


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """The common layout of items of one kind.

    Attributes:
        head: bytes before the values.
        directory_at: byte offset of the directory in the item.
        nbytes: bytes from there to the end of the item.
        directory: those bytes without the checksums of entries that are not read.
        fixed: extracts those bytes from a directory.
        crc_at: offset in the directory of the checksum of the values.
        layout: where the values lie.
    """

    head: bytes
    directory_at: int
    nbytes: int
    directory: tuple[bytes, ...]
    fixed: struct.Struct
    crc_at: int
    layout: ExtentLayout


class ItemLocator:
    """Locates the tensors of many items."""

    def __init__(self) -> None:
        self._met: dict[ItemKind, tuple[int, int]] = {}
        self._templates: dict[ItemKind | None, ItemTemplate] = {}

    def knows(self, kind: ItemKind) -> bool:
        """Whether the layout of a kind of items is known, after two of them were located."""
        return kind in self._templates

    def alike(
        self, file: File, starts: Sequence[int], kinds: Sequence[ItemKind | None]
    ) -> list[tuple[ExtentLayout, int] | None]:
        """Locate the values of items that differ from others of their kind only in values.

        The bytes before an item's values are read together with the end of the item before it.

        Args:
            file: their file, open.
            starts: byte offsets of the items, ascending.
            kinds: the kind that each item must have; None for an item to skip.

        Returns:
            for each item the layout of its values and the CRC-32 of their zip entry; None if it must be read as an
            archive.

        Raises:
            ReadError: the file cannot be read.
        """
        found: list[tuple[ExtentLayout, int] | None] = [None] * len(kinds)
        templates = map(self._templates.get, kinds)
        known = [(row, start, of) for row, (start, of) in enumerate(zip(starts, templates, strict=True)) if of]
        places, lengths, follows = list[int](), list[int](), list[bool]()
        end = -1
        for _, start, of in known:
            follows.append(start == end)
            if start == end:
                lengths[-1] += len(of.head)
            end = start + of.directory_at + of.nbytes
            places.append(start + of.directory_at)
            lengths.append(of.nbytes)
        behind = file.read_rows(places, lengths)
        alone = [(start, len(of.head)) for (_, start, of), after in zip(known, follows, strict=True) if not after]
        fronts = iter(file.read_rows([start for start, _ in alone], [nbytes for _, nbytes in alone]))
        head = b""
        for (row, _, of), data, after in zip(known, behind, follows, strict=True):
            front, head = head if after else next(fronts), data[of.nbytes :]
            if front == of.head and len(data) >= of.nbytes and of.fixed.unpack_from(data) == of.directory:
                found[row] = of.layout, *CRC.unpack_from(data, of.crc_at)
        return found

    def locate(self, file: File, item: Item) -> Stored:
        """Locate the values of an item's tensor, or the parts that it stores instead.

        Raises:
            ReadError: the item is damaged, or contradicts the checkpoint's metadata.
        """
        if item.zstd:
            return locate(file, item)
        kind = item.length, item.dtype, item.shape
        if kind in self._templates:
            (known,) = self.alike(file, [item.offset], [kind])
            return locate(file, item) if known is None else known[0].source(file.path, item.offset, known[1])
        values = self._met.get(kind)
        if values is not None:
            # A template is made when a kind occurs a second time: most kinds of a small checkpoint occur once.
            window = _around(file, item, *values)
            stored = _source(window, item)
            template = _template(window, stored) if isinstance(stored, Source) else None
            if template is not None:
                self._templates[kind] = template
            return stored
        source = locate(file, item)
        if isinstance(source, Encoded):
            return source
        start, size = source.record_span
        self._met[kind] = start - item.offset, start - item.offset + size
        return source


class CachedWindow(Window):
    """A part of a file, some pieces of which are in memory.

    Attributes:
        pieces: bytes, each with its offset in the window.
    """

    __slots__ = ("pieces",)

    def __init__(self, file: File, start: int, size: int, pieces: tuple[tuple[int, bytes], ...]) -> None:
        super().__init__(file, start, size)
        self.pieces = pieces

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset` of the window, from memory if possible."""
        for at, piece in self.pieces:
            if at <= offset and offset + length <= at + len(piece):
                return piece[offset - at : offset - at + length]
        return super().read(offset, length)


def _around(file: File, item: Item, start: int, end: int) -> CachedWindow:
    """Read an item into memory without its values, which lie between its bytes `start` and `end`."""
    front, behind = file.read(item.offset, start), file.read(item.offset + end, item.length - end)
    return CachedWindow(file, item.offset, item.length, ((0, front), (end, behind)))


def _template(window: Window, source: Source) -> ItemTemplate | None:
    """The common layout of items like this one; None if the archive has an unusual layout."""
    container = Container(window)
    values = source.record_span[0] - window.start
    early = all(record.limit <= values for name, record in container.records.items() if name in READ)
    if not early or values > MAX_HEAD:
        return None
    tail = max(record.limit for record in container.records.values())
    directory = window.read(tail, window.size - tail)
    loose = {name: at for name, at in _checksums(directory, len(container.records)) if name not in READ}
    if source.record not in loose:
        return None
    form, done = "", 0
    for at in loose.values():
        form += f"{at - done}s4x"
        done = at + 4
    fixed = struct.Struct(f"<{form}{len(directory) - done}s")
    head, layout = window.read(0, values), ExtentLayout.of(source, window.start)
    same = fixed.unpack(directory)
    return ItemTemplate(head, tail, len(directory), same, fixed, loose[source.record], layout)


def _checksums(directory: bytes, count: int) -> Iterator[tuple[str, int]]:
    """The name of each zip entry, without its root folder, and the offset of its checksum in the directory."""
    at = 0
    for _ in range(count):
        n_name, n_extra, n_comment = CENTRAL.unpack_from(directory, at)[10:13]
        name = directory[at + CENTRAL.size : at + CENTRAL.size + n_name]
        yield name.partition(b"/")[2].decode(), at + CRC_AT
        at += CENTRAL.size + n_name + n_extra + n_comment
