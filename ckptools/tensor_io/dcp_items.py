"""Items: archives of one tensor each, packed into larger files. Opened when their bytes are wanted.

A large run has tens of thousands of them, and those of one dtype, shape and torch version are the same bytes but for
the values and their checksums. So the first of them is read as the archive that it is, and the others are compared
with it: what comes before the values, and the directory without the checksums of records that are not read.

Source: torch/distributed/checkpoint/filesystem.py (`_write_item` calls torch.save on a contiguous tensor of its own).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files import compressed_items
from ckptools.files.compressed_items import ARCHIVE, CompressedItem
from ckptools.files.opening import File, Window
from ckptools.files.zip_archive import Container
from ckptools.files.zip_directory import CENTRAL
from ckptools.model.regions import Ints
from ckptools.model.tensor import Encoded, Item, Shard, Source, Tensor
from ckptools.pickles.archive import read_zip
from ckptools.pickles.tensor_classes import note_on
from ckptools.tensor_io.fetch_ahead import Part

MAX_HEAD = 64 << 10
"""Bytes in front of a tensor's values that are worth remembering; torch writes less than a thousand."""

ENDS = 2 << 10
"""Bytes in front of a tensor's values, and behind them, that are fetched of an item in a store."""

CRC_AT = 16
"""Where an entry of a zip directory has its checksum."""

READ = ("data.pkl", "byteorder")
"""Records that reading an archive reads, so that their checksums count."""


Stored = Source | Encoded
"""Where the values of an item's tensor lie, or what its class stores in their place."""


class OtherItemError(ReadError):
    """A sound item lies where another one should: its file is not the one that its checkpoint describes."""


def ends_of(item: Item) -> list[Part]:
    """What locating the tensor of an item reads: a compressed one, or else what lies around the values."""
    end = item.offset + item.length
    if item.zstd or item.length <= 2 * ENDS:
        return [(item.path, item.offset, end)]
    return [(item.path, item.offset, item.offset + ENDS), (item.path, end - ENDS, end)]


def with_source(shard: Shard) -> Shard:
    """The shard with its source, read from its item where that is not known yet.

    Raises:
        ReadError: the item is damaged, or holds something else than its checkpoint says; or codes instead of values.
    """
    if shard.was_read or shard.item is None:
        return shard
    with File(shard.item.path) as file:
        found = locate(file, shard.item)
    if isinstance(found, Encoded):
        raise ReadError(shard.item.path, f"item at byte {shard.item.offset}: {note_on(found)}")
    return shard._replace(source=found)


def locate(file: File, item: Item) -> Stored:
    """Where the tensor of an item lies, or what it has in the place of its values.

    Args:
        file: the item's file, open.
        item: which part of it, and what it must hold.

    Raises:
        ReadError: the item is damaged, or holds something else than its checkpoint says.
    """
    if not item.zstd:
        return _source(Window(file, item.offset, item.length), item)
    try:
        opened, window = compressed_items.window(file, compressed_item(item))
    except ReadError as error:
        raise ReadError(item.path, f"item at byte {item.offset}: {error.reason}", error.kind) from error
    with opened:
        return _source(window, item)


def compressed_item(item: Item) -> CompressedItem:
    """A compressed item as a part of its file, with the bytes that its tensor and an archive take."""
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
        held = f"{holder.dtype} {list(holder.shape)}" if isinstance(tree, Tensor) else type(tree).__name__
        text = f"item at byte {item.offset}: expected {item.dtype} {list(item.shape)}, found {held}; damaged or stale"
        raise (OtherItemError if found else ReadError)(item.path, text)
    return found


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """What the items of one kind have in common.

    Attributes:
        head: bytes before the values.
        tail: byte offset of the directory in the item.
        fixed: the directory and what follows, in pieces: the checksums between them may differ.
        crc: where the checksum of the values is in those bytes.
        source: of the first such item.
    """

    head: bytes
    tail: int
    fixed: tuple[tuple[int, bytes], ...]
    crc: int
    source: Source


class ItemLocator:
    """Finds the tensors of many items."""

    def __init__(self) -> None:
        self._met: dict[_Kind, tuple[int, int]] = {}
        self._templates: dict[_Kind, ItemTemplate] = {}

    def locate(self, file: File, item: Item) -> Stored:
        """Where the tensor of an item lies, or what it has in the place of its values.

        Raises:
            ReadError: the item is damaged, or holds something else than its checkpoint says.
        """
        if item.zstd:
            return locate(file, item)
        kind = item.length, item.dtype, item.shape
        template = self._templates.get(kind)
        if template is not None:
            return _same_but_values(template, file, item) or locate(file, item)
        values = self._met.get(kind)
        if values is not None:
            # A kind is looked at closely when it is met again: most kinds of a small checkpoint are not.
            return self._learn(_around(file, item, *values), item, kind)
        source = locate(file, item)
        if isinstance(source, Encoded):
            return source
        start, size = source.record_span
        self._met[kind] = start - item.offset, start - item.offset + size
        return source

    def _learn(self, window: CachedWindow, item: Item, kind: _Kind) -> Stored:
        source = _source(window, item)
        template = _template(window, source) if isinstance(source, Source) else None
        if template is not None:
            self._templates[kind] = template
        return source


_Kind = tuple[int, str, Ints]
"""Length of an item, dtype and shape of its tensor."""


class CachedWindow(Window):
    """A part of a file of which some pieces are held in memory.

    Attributes:
        pieces: bytes, each with its offset in the window.
    """

    __slots__ = ("pieces",)

    def __init__(self, file: File, start: int, size: int, pieces: tuple[tuple[int, bytes], ...]) -> None:
        super().__init__(file, start, size)
        self.pieces = pieces

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset` of the window, from memory where it can be."""
        for at, piece in self.pieces:
            if at <= offset and offset + length <= at + len(piece):
                return piece[offset - at : offset - at + length]
        return super().read(offset, length)


def _around(file: File, item: Item, start: int, end: int) -> CachedWindow:
    """An item of which everything is held but its values, from byte `start` to `end` of it."""
    front, behind = file.read(item.offset, start), file.read(item.offset + end, item.length - end)
    return CachedWindow(file, item.offset, item.length, ((0, front), (end, behind)))


def _same_but_values(template: ItemTemplate, file: File, item: Item) -> Source | None:
    """The source, if the item differs from the known one in values and their checksums only."""
    if file.read(item.offset, len(template.head)) != template.head:
        return None
    tail = file.read(item.offset + template.tail, item.length - template.tail)
    if not all(tail.startswith(piece, at) for at, piece in template.fixed):
        return None
    of, start = template.source, item.offset + len(template.head)
    offset = start + of.offset - of.record_span[0]
    crc = int.from_bytes(tail[template.crc : template.crc + 4], "little")
    return Source(file.path, offset, of.dtype, of.shape, of.strides, of.record, (start, of.record_span[1]), crc)


def _template(window: Window, source: Source) -> ItemTemplate | None:
    """What another item of this kind must have; None when the archive is laid out in an odd way."""
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
    fixed, done = [], 0
    for at in loose.values():
        fixed.append((done, directory[done:at]))
        done = at + 4
    fixed.append((done, directory[done:]))
    return ItemTemplate(window.read(0, values), tail, tuple(fixed), loose[source.record], source)


def _checksums(directory: bytes, count: int) -> Iterator[tuple[str, int]]:
    """Name of each record, without its root folder, and where in the directory its checksum is."""
    at = 0
    for _ in range(count):
        n_name, n_extra, n_comment = CENTRAL.unpack_from(directory, at)[10:13]
        name = directory[at + CENTRAL.size : at + CENTRAL.size + n_name]
        yield name.partition(b"/")[2].decode(), at + CRC_AT
        at += CENTRAL.size + n_name + n_extra + n_comment
