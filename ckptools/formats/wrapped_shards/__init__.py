"""Rank files of FSDP before torch had it: fairscale's and torch_xla's, placed by the `shard_metadata` beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.formats.wrapped_shards.layout import has_shard_metadata

if TYPE_CHECKING:
    from ckptools.formats.wrapped_shards.ranks import WrappedRanks
    from ckptools.pickles.reader import Saved


def wrapped_ranks(saved: Mapping[Path, Saved], ranks: Mapping[Path, int], first: Path) -> WrappedRanks | None:
    """The ranks whose files were read, placed by their metadata; None where the first file has none.

    Raises:
        ReadError: the metadata of a file is not what its writers write.
    """
    if not has_shard_metadata(saved[first].content):
        return None
    from ckptools.formats.wrapped_shards.ranks import WrappedRanks

    ranked = [(ranks[path], path, one.tree) for path, one in saved.items()]
    return WrappedRanks(ranked, 1 + max(ranks.values()))
