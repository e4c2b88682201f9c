"""torchsnapshot: `.snapshot_metadata`, which lists every value of every rank, and the files of the values.

    .snapshot_metadata              JSON
    batched/{UUID}                  the tensors of a rank, back to back
    {RANK}/{PATH}                   one tensor, or one object by torch.save
    sharded/{PATH}_{OFFSETS}        a piece of a sharded tensor
    replicated/{PATH}               a value of all ranks, written by one of them

A tensor that is neither sharded nor replicated is each rank's own, as torchsnapshot restores it. For the model and the
optimizers the lowest rank's is taken, with a note; elsewhere every rank's is kept.

Source: torchsnapshot/snapshot.py, manifest.py, io_preparer.py, batcher.py of 0.1.0; checked on a snapshot of it.
"""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import File, is_plain_path, parse_json
from ckptools.formats import torch_file
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, StatedFile, file_now
from ckptools.formats.shared.merge import Merge, put
from ckptools.formats.torch_checkpointing import check_cover, with_lost
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, ModuleOrder
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Lost, Opaque, describe_for_error, leaf_at, tensors_in
from ckptools.pickles.classes.tensors import WHY_NOT
from ckptools.pickles.reader import Saved
from ckptools.text import KeyPath, few, fqn_of, plural, spans
from ckptools.training_state.rank_values import Shared
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

# -- read `.snapshot_metadata`: the entries of every rank, by `RANK/PATH`, with the extent of each value ---------------
#     {"version": "0.1.0", "world_size": 2, "manifest": {
#         "0/model": {"type": "OrderedDict", "keys": ["w"]},
#         "0/model/w": {"type": "ShardedTensor", "shards": [{"offsets", "sizes", "tensor": TENSOR}]},
#         "0/optim/lr": {"type": "float", "serialized_value": "/Knx0k1iUD8=", "replicated": false,
#                        "readable": "0.001"}}}
#
# TENSOR is `{"type": "Tensor", "location", "serializer", "dtype", "shape", "replicated", "byte_range"}`. Keys in a path
# are quoted (`/` is `%2F`). Before 0.1.0 the same was written in YAML, which is not read. Source:
# torchsnapshot/manifest.py, flatten.py.

METADATA = ".snapshot_metadata"
MAX_METADATA = 1 << 30
"""Bytes: an entry takes 600, and 873 tensors of 1,024 ranks are as many entries."""

MAX_RANKS = 1 << 20
MAX_DIMS = 64
MAX_SIZE = 1 << 62
MAX_DIGITS = 4000
TO_JSON = "python -c 'import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)'"

PRIMITIVES = ("int", "str", "bool", "bytes", "float")
CONTAINERS = ("dict", "OrderedDict", "list")
SHARDED = {"ShardedTensor": "shards", "DTensor": "shards", "ChunkedTensor": "chunks"}
"""The key that lists the pieces, in entries of tensors in several pieces."""


class EntryError(ValueError):
    """An entry is invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """The extent of a tensor, or of a piece of one.

    Attributes:
        box: its place in the whole tensor.
        location: the file, below the snapshot's folder.
        span: first byte and one past the last; None for the whole file.
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
        """Bytes of the tensor's elements."""
        return self.box.numel * ITEMSIZE[self.dtype]


class SnapshotManifest(NamedTuple):
    """The content of `.snapshot_metadata`.

    Attributes:
        entries: by rank and logical path, with values as in the file; ranks without entries are absent.
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
        ReadError: it is damaged, in YAML, or not as torchsnapshot writes it.
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
        entries: dict[int, dict[str, Mapping[str, Any]]] = {}
        children: dict[int, dict[str, list[str]]] = {}
        for full, entry in found["manifest"].items():
            rank, _, at = full.partition("/")
            if not rank.isdecimal() or len(rank) > 7 or int(rank) >= world or not at:
                raise EntryError(f"the entry {describe_for_error(full)} is of no rank of {world}")
            if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                raise EntryError(f"the entry {describe_for_error(full)} has no type")
            entries.setdefault(int(rank), {})[at] = entry
            above, _, last = at.rpartition("/")
            children.setdefault(int(rank), {}).setdefault(above, []).append(last)
        return SnapshotManifest(str(found["version"]), world, dict(sorted(entries.items())), children, len(data))
    except ValueError as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ReadError(path, f"is no snapshot metadata that can be read: {why}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ReadError(path, "is no snapshot metadata: expected version, world_size and manifest") from error


def encoded(key: Any) -> str:
    """A key, quoted as a part of a path."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def _primitive(entry: Mapping[str, Any]) -> Any:
    """The value in an entry."""
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


def _stored_pieces(entry: Mapping[str, Any]) -> list[StoredBox]:
    """The extents of the pieces of a tensor; empty for other entries."""
    if entry["type"] not in SHARDED:
        return [_stored(entry)] if entry["type"] == "Tensor" else []
    pieces = entry.get(SHARDED[entry["type"]])
    if not isinstance(pieces, list) or not all(
        isinstance(p, dict) and isinstance(p.get("tensor"), dict) for p in pieces
    ):
        raise EntryError("expected a list of pieces")
    boxes = [Box(_sizes_in(piece.get("offsets")), _sizes_in(piece.get("sizes"))) for piece in pieces]
    if any(len(box.offsets) != len(box.sizes) or len(box.sizes) != len(boxes[0].sizes) for box in boxes):
        raise EntryError("pieces of different dimensions")
    return [_stored(piece["tensor"], box) for piece, box in zip(pieces, boxes, strict=True)]


def _stored(entry: Mapping[str, Any], box: Box | None = None) -> StoredBox:
    shape, dtype = _sizes_in(entry.get("shape")), str(entry.get("dtype")).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise EntryError(f"dtype {describe_for_error(dtype)}")
    box = box or Box.whole(shape)
    if box.sizes != shape and not prod(shape) == prod(box.sizes) == 1:
        raise EntryError(f"a piece of {list(box.sizes)} that is stored as {list(shape)}")
    location, span, stated = _location_of(entry), None, entry.get("byte_range")
    if stated is not None:
        start, end = (*_sizes_in(stated), 0, 0)[:2]
        if len(stated) != 2 or start > end:
            raise EntryError(f"the byte range {describe_for_error(stated)}")
        span = start, end
    stored = StoredBox(box, dtype, location, span, str(entry.get("serializer")))
    if stored.raw and stored.span is not None and stored.span[1] - stored.span[0] != stored.nbytes:
        raise EntryError(f"{stored.span[1] - stored.span[0]} bytes for {dtype} {list(shape)}, expected {stored.nbytes}")
    return stored


def _location_of(entry: Mapping[str, Any]) -> str:
    """The file of an entry, a path below the snapshot's folder."""
    location = entry.get("location")
    if not isinstance(location, str) or not is_plain_path(location):
        raise EntryError(f"names the file {describe_for_error(location)}; only files below its own folder are read")
    return location


def _sizes_in(value: Any) -> Ints:
    """The shape or offsets that an entry states."""
    listed = value if isinstance(value, list) else [None]
    if len(listed) > MAX_DIMS or not all(type(n) is int and 0 <= n < MAX_SIZE for n in listed):
        raise EntryError(f"{describe_for_error(value)}, expected sizes")
    return tuple(listed)


# -- one rank's view of a snapshot: its containers, values and objects, with its own pieces of tensors -----------------
# A rank sees its own entries, and rank 0's replicated ones. The manifest does not state the shape of a cut tensor, so
# it is inferred from the ends of all ranks' pieces, which the manifest lists. Source: torchsnapshot/flatten.py
# (`inflate`), manifest_ops.py (`get_manifest_for_rank`).
#
# A batch has the tensors of one rank back to back from its first byte on, another file one tensor or one object. So the
# length of each file of raw elements is known, but nothing else: there are no checksums. Source:
# torchsnapshot/batcher.py, io_preparer.py (`get_storage_path`), storage_plugins/fs.py.

MAX_DEPTH = 150
"""At most this many nested containers are read."""

NOT_RAW = "pieces of it are in torch.save files of their own, which are not put together"

_ABSENT = object()


@dataclass
class StoredFile(StatedFile):
    """A file that the manifest names; its values determine its length, unless torch.save wrote it.

    Attributes:
        ranks: the ranks that use it.
        names: names of its values.
    """

    ranks: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)


class RankTrees:
    """Builds every rank's tree of a snapshot, and notes missing files and entries."""

    def __init__(self, manifest: SnapshotManifest, folder: Path, options: Options) -> None:
        self.manifest, self.folder, self.options = manifest, folder, options
        self.files: dict[str, StoredFile] = {}
        self.own: dict[KeyPath, None] = {}  # whole tensors that are not replicated: each rank may have its own
        self.saved: dict[Path, Saved] = {}
        self.problems: list[Problem] = []
        self.lost: dict[KeyPath, list[Shard]] = {}  # pieces whose files are missing or cut
        self.reach: dict[str, Ints] = {}  # sizes up to the ends of all ranks' pieces, by logical path
        self.needed: dict[str, int] = {}  # expected length of each file of raw elements, by location
        self.seen: set[str] = set()
        for entries in manifest.entries.values():
            for path, entry in entries.items():
                with suppress(EntryError):  # becomes a problem when the entry is read
                    for piece in _stored_pieces(entry):
                        self._expect(path, piece)

    def _expect(self, path: str, piece: StoredBox) -> None:
        if not piece.raw:
            return
        last = piece.span[1] if piece.span else piece.nbytes
        self.needed[piece.location] = max(self.needed.get(piece.location, 0), last)
        end = piece.box.ends
        known = self.reach.setdefault(path, end)
        if len(known) == len(end):
            self.reach[path] = tuple(map(max, known, end))

    def of_rank(self, rank: int) -> dict[str, Any]:
        """A rank's tree.

        Raises:
            UnsafePathError: a file is a link out of the folder, or not a regular file.
        """
        self.seen = set()
        values = [(unquote(top), self._value(rank, top, (unquote(top),))) for top in self._parts(rank, "")]
        orphans = [path for path in self.manifest.entries[rank] if path not in self.seen]
        if orphans:
            text = f"{METADATA}: {plural(len(orphans), 'entry', 'entries')} that no container lists: {few(orphans)}"
            self.problems.append(Problem(Code.METADATA_CONTRADICTS, text, rank))
        return {key: value for key, value in values if value is not _ABSENT}

    def _parts(self, rank: int, path: str) -> list[str]:
        """The last parts of the paths in a container that a rank sees."""
        parts = self.manifest.children[rank].get(path, [])
        shared = self.manifest.children.get(0, {}).get(path, []) if rank else []
        more = [p for p in shared if self._entry(rank, f"{path}/{p}" if path else p)[1] is not None]
        return list(dict.fromkeys([*parts, *more]))

    def _entry(self, rank: int, path: str) -> tuple[int, Mapping[str, Any] | None]:
        """A rank's entry at a path, or rank 0's replicated one, with the rank."""
        entry = self.manifest.entries[rank].get(path)
        if entry is None and rank != 0:
            shared = self.manifest.entries.get(0, {}).get(path)
            return 0, shared if shared is not None and shared.get("replicated") is True else None
        return rank, entry

    def _value(self, rank: int, path: str, at: KeyPath) -> Any:
        """The value at a path; or `_ABSENT`, and a problem."""
        whose, entry = self._entry(rank, path)
        self.seen.add(path)
        try:
            if entry is None or len(at) > MAX_DEPTH:
                raise EntryError("a container lists it, and it has no entry" if entry is None else "nested too deep")
            if entry["type"] in CONTAINERS:
                return self._container(rank, path, entry, at)
            return self._leaf(whose, path, entry, at)
        except EntryError as error:
            self.problems.append(Problem(Code.METADATA_CONTRADICTS, f"{METADATA}: {error}", rank, fqn_of(at)))
            return _ABSENT

    def _container(self, rank: int, path: str, entry: Mapping[str, Any], at: KeyPath) -> Any:
        if entry["type"] == "list":
            parts = [part for part in self._parts(rank, path) if part.isdecimal()]
            items = [self._value(rank, f"{path}/{part}", (*at, int(part))) for part in sorted(parts, key=int)]
            return [Lost("lost") if value is _ABSENT else value for value in items]
        keys = entry.get("keys")
        if not isinstance(keys, list) or not all(isinstance(key, (str, int)) for key in keys):
            raise EntryError(f"a {entry['type']} without a list of keys")
        values = ((key, self._value(rank, f"{path}/{encoded(key)}", (*at, key))) for key in keys)
        made = ((key, value) for key, value in values if value is not _ABSENT)
        return dict(made) if entry["type"] == "dict" else OrderedDict(made)

    def _leaf(self, rank: int, path: str, entry: Mapping[str, Any], at: KeyPath) -> Any:
        kind = entry["type"]
        if kind in PRIMITIVES:
            return _primitive(entry)
        if kind == "object":
            saved = self._read(rank, _location_of(entry), at)
            return _ABSENT if saved is None else saved.tree
        if kind == "Tensor" or kind in SHARDED:
            pieces = _stored_pieces(entry)
            stated = _sizes_in(entry.get("shape")) if kind == "ChunkedTensor" else None
            if kind in ("Tensor", "ChunkedTensor") and entry.get("replicated") is not True:
                self.own[at] = None
            if kind != "Tensor":
                return self._tensor(pieces, rank, path, at, self.reach.get(path, ()) if stated is None else stated)
            whole = pieces[0]
            return self._tensor(pieces, rank, path, at) if whole.raw else self._saved_tensor(rank, whole, at)
        text = f"its entry is of type {describe_for_error(kind)}, which is unknown"
        self.problems.append(Problem(Code.TENSOR_NOT_JOINED, text, rank, fqn_of(at), "warning"))
        return Opaque(f"torchsnapshot.{kind[:40]}")

    def _tensor(self, pieces: list[StoredBox], rank: int, path: str, at: KeyPath, shape: Ints | None = None) -> Any:
        """A tensor of raw elements with a rank's pieces of it."""
        first = pieces[0] if pieces else self._first_of_any_rank(path)
        whole = first.box.sizes if shape is None else shape
        if any(not piece.raw for piece in pieces):
            return Tensor(whole, first.dtype, (), "unreadable", note=NOT_RAW)
        shards = [self._shard(piece, rank, at) for piece in pieces]
        if whole == () and len(pieces) == 1:  # a 0-d tensor is chunked as a row of one
            source = shards[0].source
            shards = [Shard(Box((), ()), rank, source.reshaped(()) if source else None)]
        cut = shape is not None and [shard.box for shard in shards] != [Box.whole(whole)]
        return Tensor(whole, first.dtype, tuple(shards), "chunks" if cut else "plain")

    def _first_of_any_rank(self, path: str) -> StoredBox:
        """Another rank's piece of a tensor, if the rank has none."""
        listed = (entries[path] for entries in self.manifest.entries.values() if path in entries)
        found = [piece for entry in listed if entry["type"] in SHARDED for piece in _stored_pieces(entry)]
        if not found:
            raise EntryError("a tensor without any piece")
        return found[0]

    def _shard(self, piece: StoredBox, rank: int, at: KeyPath) -> Shard:
        file = self._file(piece.location, rank, at)
        if not file.holds(file.needed):
            self.lost.setdefault(at, []).append(Shard(piece.box, rank, None))
            return self.lost[at][-1]
        start, end = piece.span or (0, piece.nbytes)
        sizes = piece.box.sizes
        source = Source(file.path, start, piece.dtype, sizes, contiguous_strides(sizes), "", (start, end - start))
        return Shard(piece.box, rank, source)

    def _saved_tensor(self, rank: int, stored: StoredBox, at: KeyPath) -> Any:
        """A tensor in a torch.save file of its own: of a dtype that numpy does not have."""
        if stored.serializer != "torch_save" or stored.span is not None:
            return Tensor(stored.box.sizes, stored.dtype, (), "quantized", note=WHY_NOT["quantized"])
        saved = self._read(rank, stored.location, at)
        if saved is None:
            return Tensor(stored.box.sizes, stored.dtype, (Shard(stored.box, rank, None),))
        found = saved.tree
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (stored.box.sizes, stored.dtype):
            raise EntryError(f"{stored.location} does not hold {stored.dtype} {list(stored.box.sizes)}")
        return replace(found, shards=tuple(shard._replace(rank=rank) for shard in found.shards))

    def _read(self, rank: int, location: str, at: KeyPath) -> Saved | None:
        """The content of a torch.save file; None, and a problem, if it cannot be read."""
        file = self._file(location, rank, at)
        if not file.holds(0):
            return None
        if file.path not in self.saved:
            try:
                self.saved[file.path] = self.options.read_file(file.path)
            except UnsafePathError:
                raise
            except ReadError as error:
                file.fault = Fault.of(error, file.path)
                return None
        return self.saved[file.path]

    def _file(self, location: str, rank: int, at: KeyPath) -> StoredFile:
        """The file of a rank's entry; its size and time are looked up once."""
        if location not in self.files:
            path, needed = self.folder / location, self.needed.get(location, 0)
            self.files[location] = StoredFile.found(path, self.folder, rank, needed, self.options.follow_symlinks)
        file = self.files[location]
        file.ranks.add(rank)
        file.rank = rank if len(file.ranks) == 1 else None
        file.names.append(fqn_of(at))
        return file

    def check_files(self) -> Iterator[Problem]:
        """Find files that are missing, cut, damaged, or longer than their values."""
        for location, file in self.files.items():
            content, ranks = few(list(dict.fromkeys(file.names)), 2), tuple(sorted(file.ranks))
            raw = location in self.needed
            # Lost raw elements leave a gap, a lost object does not.
            yield from file.problems(location, content, None if raw else file.names[0], ranks)
            if raw and file.size is not None and file.size > file.needed:
                text = f"{location} has {file.size} bytes, and what lies in it takes {file.needed}: it is another file"
                yield Problem(Code.METADATA_CONTRADICTS, text, file.rank, ranks=ranks)


# -- the folder --------------------------------------------------------------------------------------------------------


NAME = "torchsnapshot"
READS = "torchsnapshot: a folder with .snapshot_metadata, and the files of tensors and objects that it names"
KNOWN_BY = ".snapshot_metadata in a folder; any file below it in batched/, sharded/, replicated/ or a rank's folder"
TRIED = ("torchsnapshot 0.1.0",)
JOINS = ("model", "optimizer", "rest")

FOLDERS = ("batched", "sharded", "replicated")
AS_LISTED = ModuleOrder(True, "the manifest keeps the order of a state dict")
MAX_LISTED = 1 << 16


def detect(path: Path) -> bool:
    """Whether a path is a folder with the metadata, that file, or a file below the folder."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    if path.is_dir():
        return path if (path / METADATA).is_file() else None
    if path.name == METADATA:
        return path.parent if path.is_file() else None
    tops = [p for p in path.parents if p.name in FOLDERS or p.name.isdecimal()]
    above = next((top.parent for top in tops if (top.parent / METADATA).is_file()), None)
    return above if path.is_file() else None


def read(path: Path, options: Options) -> Checkpoint:
    """Open the snapshot in a folder, or around a file.

    Raises:
        ReadError: its metadata cannot be read.
        UnsafePathError: a file is a link out of the folder.
    """
    folder = _root(path) or path.parent
    if options.only_this_file and not path.is_dir() and path.name != METADATA:
        if not torch_file.detect(path):  # an object can be read without the metadata, tensors cannot
            text = f"is one file of a snapshot, whose {METADATA} alone says what it holds; open the folder {folder}"
            raise ReadError(path, text)
        made = torch_file.read(path, options)
        problem = Problem(Code.ONE_OF_SEVERAL, f"{path.name} is one file of a snapshot, and only this one is read")
        return replace(made, problems=Rows((problem, *made.problems)))
    builder, metadata = CheckpointBuilder(NAME, folder), folder / METADATA
    options.check_link(metadata, folder)
    manifest = read_manifest(metadata)
    if not manifest.entries:
        raise ReadError(metadata, "lists nothing")
    trees, merge = RankTrees(manifest, folder, options), Merge()
    tree = merge.trees([(rank, trees.of_rank(rank)) for rank in manifest.entries])
    tree, kept = _of_lowest_rank(_with_lost(tree, trees.lost), trees.own)
    found = rank_checks.compare_ranks(merge, tree)
    files = trees.files.items()
    builder.problems += [
        *_ranks_lacking(manifest),
        *trees.check_files(),
        *trees.problems,
    ]
    builder.add_rank_values(found)
    builder.unequal |= {key: values for key in kept if len(values := merge.values(key)) > 1}
    if kept:
        what = f"{plural(len(kept), 'tensor')} of model and optimizer are each rank's own by {METADATA}"
        text = f"{what}; the lowest rank's are taken: {few(list(map(fqn_of, kept)), 3)}"
        builder.problems.append(Problem(Code.KEPT_AS_SAVED, text))
    builder.problems += check_cover(tensors_in(found.tree))
    builder.add_read(1, manifest.nbytes)
    builder.add_saved(trees.saved.values())
    listed = [
        file_now(metadata, None, "metadata", "read"),
        *(file.listed(location.split("/")[0]) for location, file in files),
    ]
    return builder.checkpoint(
        name=folder.absolute().name or "checkpoint",
        saved_as=f"torchsnapshot {manifest.version[:20]}",
        tree=found.tree,
        files=sorted(listed, key=lambda f: -1 if f.rank is None else f.rank),
        world_size=Fact(manifest.world_size, (METADATA,)),
        step=find_step(folder, find_sections(found.tree)),
        module_order=AS_LISTED,
        bytes_expected=sum(file.needed or file.size or 0 for _, file in files) + manifest.nbytes,
    )


def _ranks_lacking(manifest: SnapshotManifest) -> Iterator[Problem]:
    """Find ranks without entries; each rank should list at least its containers."""
    lacking = [rank for rank in range(min(manifest.world_size, MAX_LISTED)) if rank not in manifest.entries]
    if lacking:
        text = f"{METADATA} lists nothing of rank {spans(lacking)} of {manifest.world_size}"
        yield Problem(Code.METADATA_CONTRADICTS, text, lacking[0], ranks=tuple(lacking))


def _with_lost(tree: Any, lost: Mapping[KeyPath, Sequence[Shard]]) -> Any:
    for path, shards in lost.items():
        tensor = leaf_at(tree, path)
        if isinstance(tensor, Tensor):
            tree = put(tree, path, with_lost(tensor, shards))
    return tree


def _of_lowest_rank(tree: Any, own: Mapping[KeyPath, None]) -> tuple[Any, list[KeyPath]]:
    """The merged tree, with one rank's tensor where ranks have their own in model or optimizer; and the key paths."""
    shared, kept = Shared(find_sections(tree)), []
    for path in own:
        tensor = leaf_at(tree, path)
        if not isinstance(tensor, Tensor) or not shared.holds(path):
            continue
        ranks = [shard.rank for shard in tensor.shards if shard.rank is not None]
        if len(set(ranks)) > 1:
            tree = put(tree, path, replace(tensor, shards=tensor.on_rank(min(ranks))))
            kept.append(path)
    return tree, kept
