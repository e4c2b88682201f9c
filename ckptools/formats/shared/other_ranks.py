"""Shards in other ranks' files, looked up when a lazy tensor's values are asked for.

A file's layout says which rank holds which region, so only the files of the ranks that are needed are read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ckptools.formats import open_again
from ckptools.formats.shared.rank_groups import rank_group
from ckptools.formats.shared.rank_names import RankName
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.tree import leaf_at
from ckptools.pickles.reader import Saved
from ckptools.training_state import modules

JOINED = ("flat_pieces", "tensor_parallel")
"""Kinds whose pieces one file alone does not place: the format joins them when it reads every rank."""


@lru_cache(maxsize=8)
def _saved(path: Path, modified: float) -> Saved:
    """The structure of one rank file; a few are kept, for a tensor's neighbours are usually asked for next."""
    return modules.read_file(path)


def with_sources(tensor: Tensor, box: Box) -> Tensor:
    """Add the sources of the shards that meet `box`, reading only the rank files that hold them."""
    wanted = {s.rank for s in tensor.shards if s.source is None and (not box.sizes or s.box.intersect(box))}
    if not tensor.shards or None in wanted or (wanted and not _rank_files(tensor)):
        return _from_all_ranks(tensor)
    for rank in sorted(r for r in wanted if r is not None):
        tensor = with_rank(tensor, rank)
    return tensor


def with_rank(tensor: Tensor, rank: int) -> Tensor:
    """Add the shards of one rank, from its file if that is here."""
    if tensor.home is None:
        return tensor
    members, key = _rank_files(tensor), tensor.home.key
    if not members:
        return _from_all_ranks(tensor)
    for member in members:
        if member.rank == rank and member.part == (key[0] if member.part else ""):
            saved = _saved(member.path, member.path.stat().st_mtime)
            other = leaf_at(saved.tree, key[1:] if member.part else key)
            found = [Shard(s.box, rank, s.source) for s in other.found] if isinstance(other, Tensor) else []
            boxes = {s.box for s in found}
            kept = [s for s in tensor.shards if s.rank != rank and (s.source or s.box not in boxes)]
            return replace(tensor, shards=(*kept, *found))
    return tensor


def _rank_files(tensor: Tensor) -> list[RankName]:
    """The rank files of its checkpoint; none where one file alone does not place its pieces, but the format does."""
    if tensor.home is None or tensor.kind in JOINED:
        return []
    found = rank_group(tensor.home.path, replace(tensor.home.options, only_this_file=False))
    members = found[1] if found else []
    if not members:
        return []
    # Where only the content tells the ranks, each file has to be read to know whose it is.
    told = all(n.told_by_name for n in members) and (any(not n.rank for n in members) or not members[0].spelled)
    return members if told else []


def _from_all_ranks(tensor: Tensor) -> Tensor:
    """Where one file does not tell which rank holds what (HSDP), or under which name (flat parameters): read all."""
    if tensor.home is None:
        return tensor
    whole = open_again(tensor.home.path, tensor.home.options)
    found = leaf_at(whole.tree, tensor.home.key)
    return found if isinstance(found, Tensor) else tensor
