"""Find shards in other ranks' files when the values of a lazy tensor are read. Each file is read once.

A file's layout names the rank of each region, so only the files of the needed ranks are read. If it does not (HSDP
names group-local ranks, flat parameters get their names from all ranks together), every rank's file is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ckptools.formats.open import open_again
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_groups import rank_group
from ckptools.formats.rank_search.rank_names import RankName
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import RankFile
from ckptools.model.regions import Box
from ckptools.model.tensor import UNLISTED, Tensor, TensorOrigin
from ckptools.model.tree import Opaque, leaf_at
from ckptools.pickles.reader import Saved
from ckptools.text import KeyPath

JOINED = ("flat_pieces", "tensor_parallel")
"""Kinds of tensors that one file alone does not place: the format joins them when it reads every rank."""

MAX_FILES = 8
"""Up to this many rank files are kept separately; beyond that, all are read and merged into one."""


class Resolver:
    """Finds the shards in other ranks' files, for every tensor of a checkpoint.

    `path`, `options` and `files` are those with which it was opened; the other files are read in the same way.
    """

    def __init__(self, path: Path, options: Options, files: Sequence[RankFile] = ()) -> None:
        self.path, self.options, self.files = path, options, files
        self._saved: dict[Path, tuple[int, Saved]] = {}
        self._whole: Checkpoint | None = None

    def all_ranks(self) -> Checkpoint:
        """The checkpoint with every rank's structure, read once, and again if a file has changed since.

        Raises:
            CkptoolsError: it can no longer be opened.
        """
        if self._whole is None or not all(map(_unchanged, self._whole.files)):
            self._whole = open_again(self.path, self.options)
            self._saved.clear()
        return self._whole

    def with_sources(self, tensor: Tensor, key: KeyPath, box: Box) -> Tensor:
        """Add the sources of the shards that intersect `box` to a tensor of one rank's file."""
        wanted = {s.rank for s in tensor.shards if not s.was_read and (not box.sizes or s.box.intersect(box))}
        unlisted = not tensor.shards or tensor.kind in UNLISTED or None in wanted
        if unlisted or len(wanted) > MAX_FILES or (wanted and not self._files_of(tensor)):
            return self._from_all_ranks(tensor, key)
        for rank in sorted(r for r in wanted if r is not None):
            tensor = self.with_rank(tensor, key, rank)
        return tensor

    def with_rank(self, tensor: Tensor, key: KeyPath, rank: int) -> Tensor:
        """Add the shards of one rank, from its file if it exists."""
        members = self._files_of(tensor)
        if not members or self._whole is not None:
            return self._from_all_ranks(tensor, key)
        for member in members:
            if member.rank == rank and member.part == (key[0] if member.part else ""):
                if member.path not in self._saved and len(self._saved) == MAX_FILES:
                    return self._from_all_ranks(tensor, key)
                other = leaf_at(self._read(member.path).tree, key[1:] if member.part else key)
                own = [s._replace(rank=rank) for s in (other.found if isinstance(other, Tensor) else ())]
                boxes = {s.box for s in own}
                kept = [s for s in tensor.shards if s.rank != rank and (s.was_read or s.box not in boxes)]
                return replace(tensor, shards=(*kept, *own))
        return tensor

    def lost(self, key: KeyPath) -> dict[int, str]:
        """Ranks whose file of a tensor was `missing`, `cut` or `bad` when it was opened.

        If a rank has several files, the first key of the key path names the file's part.
        """
        of = ("", key[0] if key else "")
        return {
            file.rank: file.status
            for file in self.files
            if file.rank is not None and file.part in of and not file.is_here
        }

    def close(self) -> None:
        """Drop the structures of other files."""
        self._saved.clear()
        self._whole = None

    def _read(self, path: Path) -> Saved:
        """The structure of one rank file; read again only if the file has changed."""
        modified = path.stat().st_mtime_ns
        if self._saved.get(path, (None,))[0] != modified:
            self._saved[path] = modified, self.options.read_file(path)
        return self._saved[path][1]

    def _files_of(self, tensor: Tensor) -> list[RankName]:
        """The rank files with shards of a tensor; empty if only the format can place them."""
        return [] if tensor.kind in JOINED else self._rank_files

    @cached_property
    def _rank_files(self) -> list[RankName]:
        found = rank_group(self.path, replace(self.options, only_this_file=False))
        members = found[1] if found else []
        if not members:
            return []
        # If only the contents state the ranks, each file has to be read to find its rank.
        named = all(n.rank_in_name for n in members) and (any(not n.rank for n in members) or not members[0].spelled)
        return members if named else []

    def _from_all_ranks(self, tensor: Tensor, key: KeyPath) -> Tensor:
        found = leaf_at(self.all_ranks().tree, key)
        if not isinstance(found, Tensor):
            return tensor
        same = {name: getattr(found, name) for name in ("shape", "dtype", "shards", "kind", "note")}
        return replace(tensor, **same)


def _unchanged(file: RankFile) -> bool:
    """Whether a file's size and time, or its absence, are as they were when the checkpoint was opened."""
    try:
        status = file.path.stat()
    except OSError:
        return file.status == "missing"
    return (status.st_size, status.st_mtime) == (file.nbytes, file.modified)


def with_other_ranks(checkpoint: Checkpoint) -> Checkpoint:
    """Let the tensors of a checkpoint find their shards in files that were not read when it was opened.

    Each tensor of its trees is given its origin, in place: a state dict keeps its class and its attributes.
    """
    resolver = Resolver(checkpoint.path, checkpoint.options, checkpoint.files)
    lost = tuple(file for file in checkpoint.files if not file.is_here)
    _set_origins(checkpoint.tree, None if checkpoint.all_ranks else resolver, lost)
    for of_ranks in (checkpoint.per_rank, checkpoint.unequal):
        for by_rank in of_ranks.values():
            for value in by_rank.values():
                _set_origins(value, None, lost)
    return replace(checkpoint, other_ranks=resolver)


_Trail: TypeAlias = "tuple[_Trail, Any] | None"
"""A place in a tree: the trail of its container, and its key there. Key paths of a deep tree would fill the memory."""


def _set_origins(tree: Any, resolver: Resolver | None, lost: tuple[RankFile, ...]) -> None:
    """Give every tensor in a tree its key and the files that may have more of it. Iterative, as objects nest deeply."""
    stack: list[tuple[Any, _Trail]] = [(tree, None)]
    met: set[int] = set()
    while stack:
        value, trail = stack.pop()
        if id(value) in met or not isinstance(value, _HOLDERS):
            continue
        met.add(id(value))
        if isinstance(value, Tensor):
            complete = value.shards and value.kind not in UNLISTED and value.every_shard.is_here
            others, gone = (None, ()) if complete else (resolver, lost)
            value.found_at(TensorOrigin(_key_path(trail), "", others, gone))
        else:
            stack += reversed(list(_children(value, trail)))


_HOLDERS = (dict, list, tuple, Opaque, Tensor)


def _children(value: Any, trail: _Trail) -> Iterator[tuple[Any, _Trail]]:
    """The nested containers and tensors in a value, with their places; an object's parts have the object's place."""
    if isinstance(value, Opaque):
        yield from ((part, trail) for part in (value.args, value.state, value.items, value.keywords))
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((child, (trail, key)) for key, child in items if isinstance(child, _HOLDERS))


def _key_path(trail: _Trail) -> KeyPath:
    keys: list[Any] = []
    while trail is not None:
        trail, key = trail
        keys.append(key)
    return tuple(reversed(keys))
