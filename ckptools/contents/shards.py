"""The shards of a tensor: a row for each with its place in a file, and the layout that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptools.contents.record import PartRow, ShardRow
from ckptools.dtypes import ITEMSIZE, short
from ckptools.errors import ReadError, original_of
from ckptools.keys.sharding import placement
from ckptools.model.cover import Cover, TangledLayoutError, cover
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.dcp_items import with_source
from ckptools.text import first_few, named_ranks, plural, printable, shape, size

MAX_LISTED = 8

MAX_UNLISTED = 1 << 16
"""At most this many ranks are checked; a file may state any world size."""


def shard_rows(tensor: Tensor) -> tuple[ShardRow, ...]:
    """A row for each shard of a tensor, in rank order; reads the headers of DCP items, no values."""
    return tuple(_row(shard, tensor.dtype) for shard in in_rank_order(tensor.shards))


def _row(shard: Shard, dtype: str) -> ShardRow:
    try:
        return stated_row(with_source(shard), dtype)
    except ReadError as error:
        file, nbytes = str(shard.item.path) if shard.item else "", shard.box.numel * ITEMSIZE[dtype]
        return ShardRow(shard.rank, *shard.box, "unreadable", file, "", None, nbytes, "", error.reason)


def stated_row(shard: Shard, dtype: str = "") -> ShardRow:
    """The row of a shard as its tensor states it, without reading a file.

    Without a dtype of the tensor, bytes are counted by that of the file; 0 if that is unknown.
    """
    file, source, parts = shard.file, next(iter(shard.sources), None), tuple(_parts(shard))
    dtype = dtype or (file.dtype if file else "")
    nbytes = sum(part.bytes for part in parts) if parts else shard.box.numel * ITEMSIZE[dtype] if dtype else 0
    if file is None:
        return ShardRow(shard.rank, *shard.box, "missing", "", "", None, nbytes, "", "no file here holds it")
    crc, record = (_crc(source), source.record) if source else ("", "")
    stored_as = shard.encoded.name if shard.encoded is not None else ""
    original = original_of(file.path)
    offset = file.offset if original is file.path else None  # what is unpacked of an item has no place in its file
    row = ShardRow(shard.rank, *shard.box, "here", str(original), record, offset, nbytes, crc, "")
    return row._replace(stored_as=stored_as, parts=parts)


def _parts(shard: Shard) -> Iterator[PartRow]:
    for name, source in shard.encoded.parts if shard.encoded else ():
        per, nbytes = shard.encoded.per(name) if shard.encoded else "", prod(source.shape) * ITEMSIZE[source.dtype]
        yield PartRow(name, source.dtype, source.shape, per, source.record, source.offset, nbytes, _crc(source))


def _crc(source: Source) -> str:
    return f"{source.crc:08x}" if source.crc else ""


def holes(tensor: Tensor, rows: Iterable[ShardRow]) -> tuple[tuple[str, ...], int]:
    """The regions of a tensor that are in no shard here, and their number of elements; none if that is unknown."""
    here = dict.fromkeys(Box(row.offsets, row.sizes) for row in rows if row.status == "here")
    found = _cover(tensor, here) if tensor.numel else None
    return (tuple(map(str, found.gaps)), found.missing) if found else ((), 0)


def _cover(tensor: Tensor, here: Iterable[Box]) -> Cover | None:
    """Gaps and overlaps of the regions that are here.

    None for a tensor whose shards have no known place (its note says why), or that was saved without values.
    """
    if tensor.note or tensor.kind in ("meta", "sparse", "quantized", "unreadable"):
        return None
    try:
        return cover(tensor.shape, here)
    except TangledLayoutError:
        return None


# -- layout -------------------------------------------------------------------------------------------------------


class DrawnShard(NamedTuple):
    """A shard of a tensor, whether a file that was read contains it, and why if it does not."""

    box: Box
    rank: int | None
    here: bool
    note: str


class DrawnPiece(NamedTuple):
    """A region of a tensor with its copies in rank order."""

    box: Box
    copies: Sequence[DrawnShard]


def _pieces(shards: Iterable[DrawnShard]) -> tuple[DrawnPiece, ...]:
    found: dict[Box, list[DrawnShard]] = {}
    for one in shards:
        if one.box.numel:
            found.setdefault(one.box, []).append(one)
    for copies in found.values():
        copies.sort(key=lambda one: -1 if one.rank is None else one.rank)
    return tuple(DrawnPiece(box, found[box]) for box in sorted(found))


class TensorLayout(NamedTuple):
    """The layout of a tensor to draw: all its shards, each region with elements once, and the cover if it is known."""

    tensor: Tensor
    shards: tuple[DrawnShard, ...]
    pieces: tuple[DrawnPiece, ...]
    cover: Cover | None

    @property
    def cut(self) -> Ints:
        """The dimensions in which a piece is smaller than the tensor."""
        return tuple(d for d, n in enumerate(self.tensor.shape) if any(p.box.sizes[d] != n for p in self.pieces))

    @property
    def in_fragments(self) -> bool:
        """Whether a rank has several pieces, as of a flattened parameter."""
        ranks = [one.rank for one in self.shards if one.box.numel and one.rank is not None]
        return len(set(ranks)) < len(ranks)

    @property
    def copies(self) -> int:
        """The largest number of copies of a piece."""
        return max((len(piece.copies) for piece in self.pieces), default=0)


def layout_of(tensor: Tensor, rows: Iterable[ShardRow] | None = None) -> TensorLayout:
    """Find the ranks that have each piece of a tensor, by its shards as found in the files or else as it states."""
    if rows is None:
        shards = tuple(DrawnShard(s.box, s.rank, s.is_here, "in no file that was read") for s in tensor.shards)
    else:
        shards = tuple(DrawnShard(Box(r.offsets, r.sizes), r.rank, r.status == "here", r.note) for r in rows)
    within = [one for one in shards if one.box.inside(tensor.shape)]
    here = {one.box for one in shards if one.here and one.box.numel}
    return TensorLayout(tensor, shards, _pieces(within), _cover(tensor, here))


def layout_words(layout: TensorLayout) -> Iterator[str]:
    """Describe shape and layout, number and sizes of pieces, copies, ranks without elements, and gaps."""
    tensor, pieces = layout.tensor, layout.pieces
    yield f"{short(tensor.dtype)} {shape(tensor.shape)}, {size(tensor.nbytes)}, {placement(tensor)}"
    if tensor.note:
        yield f"cannot be put together: {printable(tensor.note)}"
    if pieces:
        sizes = dict.fromkeys(shape(piece.box.sizes) for piece in pieces)
        yield f"{plural(len(pieces), 'piece')} of {first_few(list(sizes), 4)}{_copied(pieces)}"
    yield from _piece_words(pieces)
    empty = [one.rank for one in layout.shards if not one.box.numel and one.rank is not None]
    if empty and tensor.numel:
        yield f"no elements: {_ranks(empty)}"
    unlisted = set(range(min(tensor.world_size or 0, MAX_UNLISTED + 1))) - {one.rank for one in layout.shards}
    if unlisted and len(unlisted) <= MAX_UNLISTED and all(one.rank is not None for one in layout.shards):
        yield f"no shard is listed of {_ranks(sorted(unlisted))}"
    absent = [one for one in layout.shards if one.box.numel and not one.here]
    if absent:
        yield f"not here: {plural(len(absent), 'piece')} of {_ranks([one.rank for one in absent])}"
    yield from _cover_words(layout)


def _copied(pieces: Sequence[DrawnPiece]) -> str:
    counts = {len(piece.copies) for piece in pieces}
    if counts == {1}:
        return ""
    return f", each on {counts.pop()} ranks" if len(counts) == 1 else f", on {min(counts)} to {max(counts)} ranks each"


def _piece_words(pieces: Sequence[DrawnPiece]) -> Iterator[str]:
    for piece in pieces[:MAX_LISTED]:
        yield f"  {piece.box or 'the whole'}  {_ranks([one.rank for one in piece.copies])}"
    if len(pieces) > MAX_LISTED:
        yield f"  {len(pieces) - MAX_LISTED} more"


def _cover_words(layout: TensorLayout) -> Iterator[str]:
    found = layout.cover
    if found is None or not layout.tensor.numel:
        return
    if found.missing:
        where = "all of it" if found.missing == layout.tensor.numel else first_few(found.gaps, 4)
        yield f"HOLES: {found.missing} of {layout.tensor.numel} elements are in no file that was read: {where}"
    if found.overlaps:
        a, b = found.overlaps[0]
        yield f"OVERLAP: {a} and {b} share elements"
    if found.outside:
        yield f"OUTSIDE: {found.outside[0]} does not lie in the tensor"
    if found.exact:
        yield "together they hold every element once" if len(layout.pieces) > 1 else "it holds every element"


def _ranks(ranks: Sequence[int | None]) -> str:
    known = {rank for rank in ranks if rank is not None}
    return named_ranks(known) if known else "an unknown rank"
