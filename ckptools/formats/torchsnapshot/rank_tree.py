"""One rank's view of a snapshot: its containers, values and objects, with its own pieces of tensors.

A rank sees its own entries, and rank 0's replicated ones. The shape of a cut tensor is the reach of all ranks' pieces;
the manifest, which lists them, states none. Source: torchsnapshot/flatten.py (`inflate`), manifest_ops.py
(`get_manifest_for_rank`).

A batch has the tensors of one rank back to back from its first byte on, another file one tensor or one object. So the
length of each file of raw elements is known, but nothing else: there are no checksums. Source:
torchsnapshot/batcher.py, io_preparer.py (`get_storage_path`), storage_plugins/fs.py.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.location import check_stays_inside
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import Fault
from ckptools.formats.torchsnapshot.manifest import (
    CONTAINERS,
    METADATA,
    PRIMITIVES,
    SHARDED,
    EntryError,
    SnapshotManifest,
    StoredBox,
    encoded,
    location_of,
    primitive,
    sizes_in,
    stored_pieces,
)
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import Lost, Opaque, describe_for_error
from ckptools.pickles.classes.tensors import WHY_NOT
from ckptools.pickles.reader import Saved
from ckptools.text import few, plural

MAX_DEPTH = 150
"""Most nested containers."""

NOT_RAW = "pieces of it are in torch.save files of their own, which are not put together"

_ABSENT = object()


@dataclass
class StoredFile:
    """A file that the manifest names.

    Attributes:
        size: bytes; None when it is missing.
        needed: bytes that its tensors take; None for a file that torch.save wrote.
        holds: the names of its values.
        bad: the fault of its content, once it was read.
    """

    path: Path
    size: int | None
    modified: float | None
    needed: int | None
    ranks: set[int] = field(default_factory=set)
    holds: list[str] = field(default_factory=list)
    bad: Problem | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it is here and long enough; a file that is not is never read."""
        return self.size is not None and self.bad is None and self.size >= (self.needed or 0)


class RankTrees:
    """Builds every rank's tree of a snapshot, and notes what its files and entries lack."""

    def __init__(self, manifest: SnapshotManifest, folder: Path, options: Options) -> None:
        self.manifest, self.folder, self.options = manifest, folder, options
        self.files: dict[str, StoredFile] = {}
        self.own: dict[KeyPath, None] = {}  # whole tensors that are not replicated: each rank may have its own
        self.saved: dict[Path, Saved] = {}
        self.problems: list[Problem] = []
        self.lost: dict[KeyPath, list[Shard]] = {}  # pieces whose files are missing or cut
        self.reach: dict[str, Ints] = {}  # of all ranks' pieces, by logical path
        self.needed: dict[str, int] = {}  # expected length of each file of raw elements, by location
        self.seen: set[str] = set()
        for entries in manifest.entries.values():
            for path, entry in entries.items():
                with suppress(EntryError):  # which becomes a problem where the entry is read
                    for piece in stored_pieces(entry):
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
            UnsafePathError: a file is a link out of the folder, or no regular file.
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
            return primitive(entry)
        if kind == "object":
            saved = self._read(rank, location_of(entry), at)
            return _ABSENT if saved is None else saved.tree
        if kind == "Tensor" or kind in SHARDED:
            pieces = stored_pieces(entry)
            stated = sizes_in(entry.get("shape")) if kind == "ChunkedTensor" else None
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
        """A tensor of raw elements with the pieces that a rank has of it."""
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
        """Another rank's piece of a tensor, where the rank has none."""
        listed = (entries[path] for entries in self.manifest.entries.values() if path in entries)
        found = [piece for entry in listed if entry["type"] in SHARDED for piece in stored_pieces(entry)]
        if not found:
            raise EntryError("a tensor without any piece")
        return found[0]

    def _shard(self, piece: StoredBox, rank: int, at: KeyPath) -> Shard:
        file = self._file(piece.location, rank, at)
        if not file.is_sound:
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
        """The content of a torch.save file; None, and a problem, where it cannot be read."""
        file = self._file(location, rank, at)
        if file.size is None or file.bad is not None:
            return None
        if file.path not in self.saved:
            try:
                self.saved[file.path] = self.options.read_file(file.path)
            except UnsafePathError:
                raise
            except ReadError as error:
                file.bad = Fault.of(error, file.path).problem(location, rank, fqn_of(at))
                return None
        return self.saved[file.path]

    def _file(self, location: str, rank: int, at: KeyPath) -> StoredFile:
        """The file of a rank's entry; its size and time are looked up once."""
        if location not in self.files:
            self.files[location] = self._looked_at(location)
        file = self.files[location]
        file.ranks.add(rank)
        file.holds.append(fqn_of(at))
        return file

    def _looked_at(self, location: str) -> StoredFile:
        path, needed = self.folder / location, self.needed.get(location)
        if not self.options.follow_symlinks:
            for step in (path, *path.parents):
                if step == self.folder:
                    break
                check_stays_inside(step, self.folder)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return StoredFile(path, None, None, needed)
        except OSError as error:
            raise ReadError(path, (error.strerror or "cannot be looked at").lower()) from error
        if not stat.S_ISREG(found.st_mode):
            raise UnsafePathError(path, "not a regular file")
        return StoredFile(path, found.st_size, found.st_mtime, needed)
