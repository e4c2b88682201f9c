"""The pieces of a tensor, who holds each and what nobody holds: what a picture of its layout shows, also in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptools.contents.sharding import placement
from ckptools.dtypes import short
from ckptools.model.cover import Cover, TangledLayoutError, cover
from ckptools.model.regions import Box, Ints
from ckptools.model.shown import ShardRow
from ckptools.model.tensor import Tensor
from ckptools.text import first_few, plural, printable, shape, size, spans


class Held(NamedTuple):
    """A piece of a tensor, and who holds it.

    Attributes:
        box: its place in the global tensor.
        rank: whose it is; None where the file does not tell.
        here: whether a file that was read holds it.
        note: why it is not here.
    """

    box: Box
    rank: int | None
    here: bool
    note: str = ""


class Piece(NamedTuple):
    """A region that one or several ranks hold.

    Attributes:
        box: its place in the global tensor.
        copies: who holds it, in rank order.
    """

    box: Box
    copies: tuple[Held, ...]


def held_pieces(tensor: Tensor, rows: Iterable[ShardRow] | None = None) -> tuple[Held, ...]:
    """The pieces of a tensor as its files list them, or as `rows` have found them."""
    if rows is None:
        listed = ((s.box, s.rank, s.is_here) for s in tensor.shards)
        return tuple(Held(box, rank, here, "" if here else "in no file that was read") for box, rank, here in listed)
    return tuple(Held(Box(r.offsets, r.sizes), r.rank, r.status == "here", r.note) for r in rows)


def pieces_of(held: Iterable[Held]) -> tuple[Piece, ...]:
    """The regions that are not empty, in the order of their places, each with everybody who holds it."""
    found: dict[Box, list[Held]] = {}
    for one in held:
        if one.box.numel:
            found.setdefault(one.box, []).append(one)
    return tuple(Piece(box, tuple(sorted(found[box], key=_rank))) for box in sorted(found))


def _rank(held: Held) -> int:
    return -1 if held.rank is None else held.rank


class Layout(NamedTuple):
    """What is drawn of a tensor.

    Attributes:
        tensor: the tensor.
        held: its pieces, rank by rank, empty ones too.
        pieces: the regions, each once.
        cover: what the pieces that are here leave out, and where they meet; None where that cannot be told.
    """

    tensor: Tensor
    held: tuple[Held, ...]
    pieces: tuple[Piece, ...]
    cover: Cover | None

    @property
    def cut(self) -> Ints:
        """The dimensions in which some piece is smaller than the tensor."""
        return tuple(d for d, n in enumerate(self.tensor.shape) if any(p.box.sizes[d] != n for p in self.pieces))

    @property
    def in_fragments(self) -> bool:
        """Whether some rank holds several pieces, as of a flattened parameter."""
        ranks = [one.rank for one in self.held if one.box.numel and one.rank is not None]
        return len(set(ranks)) < len(ranks)

    @property
    def copies(self) -> int:
        """How many ranks hold a piece, at most."""
        return max((len(piece.copies) for piece in self.pieces), default=0)


def layout_of(tensor: Tensor, rows: Iterable[ShardRow] | None = None) -> Layout:
    """Who holds what of a tensor.

    Args:
        tensor: the tensor.
        rows: its shards as looking into the files has found them; None to go by what the tensor itself tells.
    """
    held = held_pieces(tensor, rows)
    within = [one for one in held if one.box.inside(tensor.shape)]
    return Layout(tensor, held, pieces_of(within), _cover(tensor, held))


def _cover(tensor: Tensor, held: Iterable[Held]) -> Cover | None:
    if tensor.note or tensor.kind in ("meta", "sparse", "quantized", "unreadable"):
        return None
    try:
        return cover(tensor.shape, {one.box for one in held if one.here and one.box.numel})
    except TangledLayoutError:
        return None


# -- in words ----------------------------------------------------------------------------------------------------


def layout_words(layout: Layout) -> Iterator[str]:
    """Shape and layout, how many pieces of which sizes, who holds copies or nothing, and what is in no file."""
    tensor, pieces = layout.tensor, layout.pieces
    yield f"{short(tensor.dtype)} {shape(tensor.shape)}, {size(tensor.nbytes)}, {placement(tensor)}"
    if tensor.note:
        yield f"cannot be put together: {printable(tensor.note)}"
    if pieces:
        sizes = dict.fromkeys(shape(piece.box.sizes) for piece in pieces)
        yield f"{plural(len(pieces), 'piece')} of {first_few(list(sizes), 4)}{_copied(pieces)}"
    yield from _piece_words(pieces)
    empty = [one.rank for one in layout.held if not one.box.numel and one.rank is not None]
    if empty and tensor.numel:
        yield f"no elements: {_ranks(empty)}"
    unlisted = set(range(min(tensor.world_size or 0, MAX_UNLISTED + 1))) - {one.rank for one in layout.held}
    if unlisted and len(unlisted) <= MAX_UNLISTED and all(one.rank is not None for one in layout.held):
        yield f"no shard is listed of {_ranks(sorted(unlisted))}"
    absent = [one for one in layout.held if one.box.numel and not one.here]
    if absent:
        yield f"not here: {plural(len(absent), 'piece')} of {_ranks([one.rank for one in absent])}"
    yield from _cover_words(layout)


def _copied(pieces: Sequence[Piece]) -> str:
    counts = {len(piece.copies) for piece in pieces}
    if counts == {1}:
        return ""
    return f", each on {counts.pop()} ranks" if len(counts) == 1 else f", on {min(counts)} to {max(counts)} ranks each"


MAX_LISTED = 8
MAX_UNLISTED = 1 << 16
"""Ranks; a file may state any world size."""


def _piece_words(pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces[:MAX_LISTED]:
        yield f"  {piece.box or 'the whole'}  {_ranks([one.rank for one in piece.copies])}"
    if len(pieces) > MAX_LISTED:
        yield f"  {len(pieces) - MAX_LISTED} more"


def _cover_words(layout: Layout) -> Iterator[str]:
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
    """Whose they are: `rank 3`, `ranks 0..3`, `a rank that is not told`."""
    known = {rank for rank in ranks if rank is not None}
    if not known:
        return "a rank that is not told"
    return f"rank{'s' if len(known) > 1 else ''} {spans(known)}"
