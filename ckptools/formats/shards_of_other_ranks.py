"""Shards in other ranks' files, found when the values of a lazy tensor are read. Each file is read once.

A file's layout names the rank of each region, so only the files of the needed ranks are read. Where it does not (HSDP
names group-local ranks, flat parameters get their names from all ranks together) every rank's file is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ckptools.formats.open import open_again
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_groups import rank_group
from ckptools.formats.rank_search.rank_names import RankName
from ckptools.model.checkpoint import Checkpoint, RankFile
from ckptools.model.regions import Box
from ckptools.model.tensor import UNLISTED, Tensor
from ckptools.model.tree import KeyPath, leaf_at
from ckptools.pickles.reader import Saved

JOINED = ("flat_pieces", "tensor_parallel")
"""Kinds of tensors that one file alone does not place: the format joins them when it reads every rank."""

MAX_FILES = 8
"""Up to this many rank files are kept separately; above, all are read and merged into one."""

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class Resolver:
    """Finds the shards that lie in other ranks' files, for every tensor of a checkpoint.

    `path`, `options` and `files` are those with which it was opened; the other files are read in the same way.
    """

    def __init__(self, path: Path, options: Options, files: Sequence[RankFile] = ()) -> None:
        self.path, self.options, self.files = path, options, files
        self._saved: dict[Path, tuple[int, Saved]] = {}
        self._whole: Checkpoint | None = None

    def all_ranks(self) -> Checkpoint:
        """The checkpoint with every rank's structure, read once, and again if a file has changed since.

        Raises:
            CkptoolsError: it cannot be opened any more.
        """
        if self._whole is None or not all(map(_unchanged, self._whole.files)):
            self._whole = open_again(self.path, self.options)
            self._saved.clear()
        return self._whole

    def with_sources(self, tensor: AnyTensor, key: KeyPath, box: Box) -> AnyTensor:
        """Add the sources of the shards that meet `box` to a tensor as one rank's file has it."""
        wanted = {s.rank for s in tensor.shards if not s.was_read and (not box.sizes or s.box.intersect(box))}
        unlisted = not tensor.shards or tensor.kind in UNLISTED or None in wanted
        if unlisted or len(wanted) > MAX_FILES or (wanted and not self._files_of(tensor)):
            return self._from_all_ranks(tensor, key)
        for rank in sorted(r for r in wanted if r is not None):
            tensor = self.with_rank(tensor, key, rank)
        return tensor

    def with_rank(self, tensor: AnyTensor, key: KeyPath, rank: int) -> AnyTensor:
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

        Where a rank has several files, the first key of the key path names the file's part.
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
        """The rank files with its shards; none where only the format can place them."""
        return [] if tensor.kind in JOINED else self._rank_files

    @cached_property
    def _rank_files(self) -> list[RankName]:
        found = rank_group(self.path, replace(self.options, only_this_file=False))
        members = found[1] if found else []
        if not members:
            return []
        # Where only the contents have the ranks, each file has to be read to find its rank.
        named = all(n.rank_in_name for n in members) and (any(not n.rank for n in members) or not members[0].spelled)
        return members if named else []

    def _from_all_ranks(self, tensor: AnyTensor, key: KeyPath) -> AnyTensor:
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
