"""A tensor as HTML: what is known of it, which rank holds which part of it, and where each shard lies. No file is
read for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from ckptools.contents.sharding import placement
from ckptools.contents.shards import stated_row
from ckptools.model.shown import ShardRow
from ckptools.model.tensor import Shard, Tensor
from ckptools.text import plural, spans
from ckptools.views.html.page import MAX_ROWS, Page
from ckptools.views.pictures import tensor_layout
from ckptools.views.shard_map import shard_map
from ckptools.views.shown import SHARD_COLUMNS, shard_cells

FEW = 16
"""Shards that are shown unfolded."""

LOST = {
    "missing": "MISSING: no file of {ranks} is here",
    "cut": "CUT: a file ends too early, that of {ranks}",
    "bad": "BAD: a file cannot be read, that of {ranks}",
}
"""What is said of ranks whose files are known to be as `RankFile.status` says."""


def tensor_html(tensor: Tensor) -> str:
    """A tensor with a picture of its layout, and a row for each of its shards.

    Where only some ranks' files were read, a strip says whose each part is: a picture would show holes, and the bytes
    may well be in the files that were not read.
    """
    page = Page("to_dicts() of .shards")
    page.line(repr(tensor))
    if tensor.note:
        page.line(tensor.note, "bad")
    page.line(placement(tensor))
    if tensor.unread and not all(shard.is_here for shard in tensor.shards):
        page.lines(shard_map(tensor.shape, _as_told(tensor)))
    elif tensor.shards:
        page.picture(tensor_layout(tensor))
    _remarks(page, tensor)
    shard_table(page, tensor.shards, tensor)
    return page.html()


def _as_told(tensor: Tensor) -> Iterator[ShardRow]:
    """Its shards as if all files were here that are not known to be missing or unreadable."""
    for shard in tensor.shards:
        gone = shard.rank is not None and tensor.lost.get(shard.rank) in ("missing", "bad")
        yield stated_row(shard, tensor.dtype)._replace(status="missing" if gone else "here")


def _remarks(page: Page, tensor: Tensor) -> None:
    """What the map does not say: whose bytes are not known here, and why."""
    ranks = {shard.rank for shard in tensor.shards if shard.rank is not None and not shard.is_here}
    if not tensor.unread:
        _remark(page, "MISSING: no file here holds the shards of {ranks}", ranks)
        return
    for status, words in LOST.items():
        _remark(page, words, {rank for rank in ranks if tensor.lost.get(rank) == status})
    _remark(page, "{ranks}: not read yet; the place of each shard is as other files tell it", ranks - set(tensor.lost))


def _remark(page: Page, words: str, ranks: AbstractSet[int]) -> None:
    if ranks:
        page.verdict(words.format(ranks=f"rank{'s' if len(ranks) > 1 else ''} {spans(sorted(ranks))}"))


def shard_table(page: Page, shards: Sequence[Shard], tensor: Tensor | None = None) -> None:
    """A row for each shard, of which the first are made."""
    dtype = tensor.dtype if tensor is not None else ""
    rows = [shard_cells(stated_row(shard, dtype), _absent(shard, tensor)) for shard in shards[:MAX_ROWS]]
    page.table(plural(len(shards), "shard"), SHARD_COLUMNS, rows, len(shards), opened=len(shards) <= FEW)


def _absent(shard: Shard, tensor: Tensor | None) -> str:
    """What stands for the file of a shard that none is known of."""
    if tensor is None:
        return "in no file that was read"
    lost = "" if shard.rank is None else tensor.lost.get(shard.rank, "")
    return lost.upper() or ("not read yet" if tensor.unread else "MISSING")
