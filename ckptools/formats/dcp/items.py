"""Items in the `.distcp` files of a DCP folder: tensors, located without their values, and pickled objects.

An item is a torch.save archive at `offset`, `length`; files hold them back to back. torch's safetensors form differs:
behind the objects of a file lies one safetensors blob with all its tensors. Their items state the start of the blob and
the length of their own bytes, which is shorter than any torch.save archive. The blob's header has the true offsets
(`DCP_SHARDING_INFO`), and one piece of each name. Source: torch/distributed/checkpoint/filesystem.py.

ByteCheckpoint's and DLRover's items are bare bytes; ByteCheckpoint's metadata has the pickle of each tensor. Source:
bytecheckpoint/utilities/serialization.py (`_serialize_tensor`); for DLRover see `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files import compressed, safetensors_header
from ckptools.files.compressed import CompressedItem
from ckptools.files.opening import File, Window, content_of, head_of
from ckptools.files.safetensors_header import Header
from ckptools.model.regions import Ints, contiguous_strides
from ckptools.model.shards import Encoded, Item, Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error
from ckptools.pickles.archive import read_archive
from ckptools.pickles.machine import Machine, load_checked
from ckptools.pickles.objects import Storage
from ckptools.tensor_io.dcp_items import CachedWindow, ItemLocator

SMALL = 4 << 10
"""Equal objects of at most this many bytes are unpickled once: thousands are the same number."""

MAX_OBJECT = 1 << 30

PICKLE = b"\x80"
"""First byte of an object that is not an archive."""

SHARDING_INFO = "DCP_SHARDING_INFO"


def in_safetensors(shard: Shard) -> bool:
    """Whether a shard lies in a safetensors blob: an archive is longer than its values."""
    item = shard.item
    return item is not None and not item.zstd and item.length == shard.box.numel * ITEMSIZE[item.dtype]


class ItemReader:
    """Reads the items of a DCP folder, with one file open at a time.

    Attributes:
        folder: left out of the paths in messages.
        bare: pickles of tensors whose items are bare bytes, as in `DcpMetadata`.
        locator: locates the values in items that are archives.
        names: dotted names that the objects mention.
    """

    def __init__(self, folder: Path, bare: Mapping[tuple[str, Ints], bytes] | None = None) -> None:
        self.folder, self.bare = folder, bare or {}
        self.names: dict[str, None] = {}
        self.bytes_read = 0
        self.files_read: set[Path] = set()
        self.locator = ItemLocator()
        self._values: dict[bytes, Any] = {}
        self._file: File | None = None
        self._headers: dict[tuple[Path, int], tuple[Header, dict[str, Any]]] = {}

    def locate(self, fqn: str, shard: Shard) -> Shard:
        """Return a tensor's shard with its source, or with the inner tensors that its class stores.

        Raises:
            ReadError: its item is damaged, or holds another object.
        """
        assert shard.item is not None
        file, bare = self.open(shard.item.path), self.bare.get((fqn, shard.box.offsets))
        if bare is not None:
            return shard._replace(source=bare_source(file.path, shard.item, bare))
        if in_safetensors(shard) and content_of(head_of(Window(file, shard.item.offset, shard.item.length))) != "zip":
            return shard._replace(source=self._in_safetensors(file, fqn, shard))
        found = self.locator.locate(file, shard.item)
        return shard._replace(encoded=found) if isinstance(found, Encoded) else shard._replace(source=found)

    def unpacked_value(self, path: Path, part: CompressedItem) -> Any:
        """Return the object in a compressed item.

        Raises:
            ReadError: it is damaged, or larger than its limit.
        """
        try:
            opened, window = compressed.window(self.open(path), part)
        except ReadError as error:
            raise ReadError(path, f"object at byte {part.offset}: {error.reason}", error.kind) from error
        with opened:
            return self._value(window)

    def value(self, path: Path, offset: int, length: int) -> Any:
        """Return the object in an item.

        Raises:
            ReadError: it is damaged, or larger than any object is.
        """
        file = self.open(path)
        if length > MAX_OBJECT:
            raise ReadError(path, f"an object of {length} bytes at {offset}; at most {MAX_OBJECT} are read")
        raw = file.read(offset, length) if length <= SMALL else b""
        if raw in self._values:
            return self._values[raw]
        value = self._value(CachedWindow(file, offset, length, ((0, raw),)))
        if raw and isinstance(value, (str, int, float, type(None))):
            self._values[raw] = value
        return value

    def _value(self, window: Window) -> Any:
        head = head_of(window)
        if content_of(head):
            machine, value = read_archive(window)
        elif head.startswith(PICKLE):
            machine = Machine(window.read(0, window.size))
            value = load_checked(machine, window.path, f"object at byte {window.start}")
        else:
            raise ReadError(
                window.path, f"object at byte {window.start}: begins with {describe_for_error(head[:4])}, so no pickle"
            )
        self.names |= dict.fromkeys(g.dotted for g in machine.globals.values())
        return value

    def why(self, error: ReadError) -> str:
        """Return the text of an error, with the path relative to the folder."""
        path = error.path
        inside = path is not None and path.is_relative_to(self.folder)
        return f"{path.relative_to(self.folder)}: {error.reason}" if path is not None and inside else str(error)

    def open(self, path: Path) -> File:
        """Open a file, and keep it open until another is opened.

        Raises:
            ReadError: it cannot be opened.
        """
        if self._file is None or (self._file.path is not path and self._file.path != path):
            self.close()
            self._file = File(path)
            self.files_read.add(path)
        return self._file

    def close(self) -> None:
        """Close the file that was read last."""
        if self._file is not None:
            self.bytes_read += self._file.bytes_read
            self._file.close()
        self._file = None

    def _in_safetensors(self, file: File, fqn: str, shard: Shard) -> Source:
        assert shard.item is not None
        key = file.path, shard.item.offset
        if key not in self._headers:
            header = safetensors_header.read_header(Window(file, shard.item.offset, file.size - shard.item.offset))
            text = header.metadata.get(SHARDING_INFO, "{}")
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ReadError(file.path, f"{SHARDING_INFO} in its safetensors header is no JSON") from error
            self._headers = {key: (header, found if isinstance(found, dict) else {})}
        header, offsets = self._headers[key]
        entry, dtype, box = header.tensors.get(fqn), shard.item.dtype, shard.box
        where = f"{describe_for_error(fqn)} in the safetensors at byte {shard.item.offset}"
        if entry is None:
            raise ReadError(file.path, f"{where}: is not in its header; damaged or stale")
        if (entry.dtype, entry.shape) != (dtype, box.sizes):
            text = f"expected {dtype} {list(box.sizes)}, found {entry.dtype} {list(entry.shape)}; damaged or stale"
            raise ReadError(file.path, f"{where}: {text}")
        stated = offsets.get(fqn)
        stated = stated.get("saved_offsets") if isinstance(stated, dict) else None
        if stated is not None and stated != list(box.offsets):
            text = f"holds the piece at {describe_for_error(stated)}, expected the one at {list(box.offsets)}"
            raise ReadError(file.path, f"{where}: {text}")
        return safetensors_header.source_of(file, fqn, entry)


def bare_source(path: Path, item: Item, pickle: bytes) -> Source:
    """The source of an item of bare tensor bytes; a pickle describes the tensor, if there is one.

    Raises:
        ReadError: the pickle contradicts the item.
    """
    if not pickle:
        if prod(item.shape) * ITEMSIZE[item.dtype] != item.length:
            text = f"an item of {item.length} bytes at {item.offset}, which is not the size of its chunk"
            raise ReadError(path, text)
        span = item.offset, item.length
        return Source(path, item.offset, item.dtype, item.shape, contiguous_strides(item.shape), "", span)

    def locate(storage: Storage) -> tuple[Path, int, str, int]:
        if storage.numel * ITEMSIZE[storage.dtype] != item.length:
            raise ReadError(path, f"an item of {item.length} bytes at {item.offset}, its metadata says another number")
        return path, item.offset, "", 0

    tensor = load_checked(Machine(pickle, locate), path, f"metadata of the tensor at byte {item.offset}")
    source = tensor.shards[0].source if isinstance(tensor, Tensor) and len(tensor.shards) == 1 else None
    if source is None or (source.dtype, source.shape) != (item.dtype, item.shape):
        raise ReadError(
            path, f"the tensor at byte {item.offset} is not the {item.dtype} {list(item.shape)} of its chunk"
        )
    return source._replace(record_span=(item.offset, item.length))
