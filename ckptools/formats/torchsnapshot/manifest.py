"""Reader of `.snapshot_metadata`: the entries of every rank, by `RANK/PATH`, with the extent of each value.

    {"version": "0.1.0", "world_size": 2, "manifest": {
        "0/model": {"type": "OrderedDict", "keys": ["w"]},
        "0/model/w": {"type": "ShardedTensor", "shards": [{"offsets", "sizes", "tensor": TENSOR}]},
        "0/optim/lr": {"type": "float", "serialized_value": "/Knx0k1iUD8=", "replicated": false, "readable": "0.001"}}}

TENSOR is `{"type": "Tensor", "location", "serializer", "dtype", "shape", "replicated", "byte_range"}`. Keys in a path
are quoted (`/` is `%2F`). Before 0.1.0 the same was written in YAML, which is not read. Source:
torchsnapshot/manifest.py, flatten.py.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.json_file import parse_json
from ckptools.files.location import is_plain_path
from ckptools.files.opening import File
from ckptools.model.regions import Box, Ints
from ckptools.model.values import describe_for_error

METADATA = ".snapshot_metadata"
MAX_METADATA = 1 << 30
"""Most bytes: an entry takes 600, and 873 tensors of 1,024 ranks are as many entries."""

MAX_RANKS = 1 << 20
MAX_DIMS = 64
MAX_SIZE = 1 << 62
MAX_DIGITS = 4000
TO_JSON = "python -c 'import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)'"

PRIMITIVES = ("int", "str", "bool", "bytes", "float")
CONTAINERS = ("dict", "OrderedDict", "list")
SHARDED = {"ShardedTensor": "shards", "DTensor": "shards", "ChunkedTensor": "chunks"}
"""Key of the pieces in entries of tensors in several pieces."""


class EntryError(ValueError):
    """An entry is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """The extent of a tensor, or of a piece of one.

    Attributes:
        box: its place in the whole tensor.
        location: the file, below the snapshot's folder.
        span: first byte and one past the last; None for all of the file.
    """

    box: Box
    dtype: str
    location: str
    span: tuple[int, int] | None
    serializer: str

    @property
    def raw(self) -> bool:
        """Whether the bytes are the elements; otherwise torch.save wrote the file, or it is quantized."""
        return self.serializer == "buffer_protocol"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.box.numel * ITEMSIZE[self.dtype]


class SnapshotManifest(NamedTuple):
    """The content of `.snapshot_metadata`.

    Attributes:
        entries: by rank and logical path; values are as the file has them. Ranks without any are not in it.
        children: by rank and logical path of a container, the last parts of the paths in it.
    """

    version: str
    world_size: int
    entries: dict[int, dict[str, Mapping[str, Any]]]
    children: dict[int, dict[str, list[str]]]
    nbytes: int


def read_manifest(path: Path) -> SnapshotManifest:
    """Read `.snapshot_metadata`.

    Raises:
        ReadError: it is damaged, in YAML, or not what torchsnapshot writes.
    """
    with File(path) as file:
        if file.size > MAX_METADATA:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_METADATA} are read")
        data = file.read(0, file.size)
    if data.lstrip()[:1] not in (b"{", b""):
        why = "torchsnapshot metadata in YAML, as it was written before 0.1.0; JSON is read"
        raise ReadError(path, f"is {why}: {TO_JSON} <{METADATA} >new, and put new in its place")
    try:
        found = parse_json(data.decode("utf-8"))
        world = found["world_size"]
        if type(world) is not int or not 0 < world <= MAX_RANKS:
            raise EntryError(f"world_size {describe_for_error(world)}")
        return _manifest(str(found["version"]), world, found["manifest"], len(data))
    except ValueError as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ReadError(path, f"is no snapshot metadata that can be read: {why}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ReadError(path, "is no snapshot metadata: expected version, world_size and manifest") from error


def _manifest(version: str, world: int, listed: Mapping[str, Any], nbytes: int) -> SnapshotManifest:
    entries: dict[int, dict[str, Mapping[str, Any]]] = {}
    children: dict[int, dict[str, list[str]]] = {}
    for full, entry in listed.items():
        rank, _, path = full.partition("/")
        if not rank.isdecimal() or len(rank) > 7 or int(rank) >= world or not path:
            raise EntryError(f"the entry {describe_for_error(full)} is of no rank of {world}")
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise EntryError(f"the entry {describe_for_error(full)} has no type")
        entries.setdefault(int(rank), {})[path] = entry
        above, _, last = path.rpartition("/")
        children.setdefault(int(rank), {}).setdefault(above, []).append(last)
    return SnapshotManifest(version, world, dict(sorted(entries.items())), children, nbytes)


def encoded(key: Any) -> str:
    """A key as a part of a path."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def primitive(entry: Mapping[str, Any]) -> Any:
    """The value in an entry.

    Raises:
        EntryError: it holds none.
    """
    kind, text = entry["type"], entry.get("serialized_value")
    if not isinstance(text, str):
        raise EntryError(f"a {kind} of {describe_for_error(text)}")
    with suppress(ValueError):
        if kind == "int" and len(text) < MAX_DIGITS:
            return int(text)
        if kind == "bool" and text in ("True", "False"):
            return text == "True"
        if kind == "str":
            return text
        data = base64.b64decode(text, validate=True)
        if kind == "bytes":
            return data
        if kind == "float" and len(data) == 8:
            return struct.unpack("<d", data)[0]
    raise EntryError(f"a {kind} of {describe_for_error(text)}")


def stored_pieces(entry: Mapping[str, Any]) -> list[StoredBox]:
    """The extents of the pieces of a tensor; none for other entries.

    Raises:
        EntryError: the entry contradicts itself, or leads out of the folder.
    """
    if entry["type"] not in SHARDED:
        return [_stored(entry)] if entry["type"] == "Tensor" else []
    pieces = entry.get(SHARDED[entry["type"]])
    if not isinstance(pieces, list) or not all(
        isinstance(p, dict) and isinstance(p.get("tensor"), dict) for p in pieces
    ):
        raise EntryError("expected a list of pieces")
    boxes = [Box(sizes_in(piece.get("offsets")), sizes_in(piece.get("sizes"))) for piece in pieces]
    if any(len(box.offsets) != len(box.sizes) or len(box.sizes) != len(boxes[0].sizes) for box in boxes):
        raise EntryError("pieces of different dimensions")
    return [_stored(piece["tensor"], box) for piece, box in zip(pieces, boxes, strict=True)]


def _stored(entry: Mapping[str, Any], box: Box | None = None) -> StoredBox:
    shape, dtype = sizes_in(entry.get("shape")), str(entry.get("dtype")).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise EntryError(f"dtype {describe_for_error(dtype)}")
    box = box or Box.whole(shape)
    if box.sizes != shape and not prod(shape) == prod(box.sizes) == 1:
        raise EntryError(f"a piece of {list(box.sizes)} that is stored as {list(shape)}")
    location, span, stated = location_of(entry), None, entry.get("byte_range")
    if stated is not None:
        start, end = (*sizes_in(stated), 0, 0)[:2]
        if len(stated) != 2 or start > end:
            raise EntryError(f"the byte range {describe_for_error(stated)}")
        span = start, end
    stored = StoredBox(box, dtype, location, span, str(entry.get("serializer")))
    if stored.raw and stored.span is not None and stored.span[1] - stored.span[0] != stored.nbytes:
        raise EntryError(f"{stored.span[1] - stored.span[0]} bytes for {dtype} {list(shape)}, expected {stored.nbytes}")
    return stored


def location_of(entry: Mapping[str, Any]) -> str:
    """The file of an entry, a path below the snapshot's folder.

    Raises:
        EntryError: it leads elsewhere.
    """
    location = entry.get("location")
    if not isinstance(location, str) or not is_plain_path(location):
        raise EntryError(f"names the file {describe_for_error(location)}; only files below its own folder are read")
    return location


def sizes_in(value: Any) -> Ints:
    """The shape or offsets that an entry states.

    Raises:
        EntryError: it states none.
    """
    listed = value if isinstance(value, list) else [None]
    if len(listed) > MAX_DIMS or not all(type(n) is int and 0 <= n < MAX_SIZE for n in listed):
        raise EntryError(f"{describe_for_error(value)}, expected sizes")
    return tuple(listed)
