"""Bands: pieces of a region that are consecutive in row-major order, of a bounded number of elements. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from ckptools.model.regions import Box


def bands_of(box: Box, most: int) -> Iterator[Box]:
    """Cut a region into pieces of at most `most` elements, in row-major order.

    Args:
        box: the region.
        most: elements of a piece, at least one.
    """
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if box.numel <= most or dim is None:
        yield box
        return
    rows = max(1, most // (box.numel // box.sizes[dim]))
    for low in range(0, box.sizes[dim], rows):
        n = min(rows, box.sizes[dim] - low)
        offsets = tuple(o + low if d == dim else o for d, o in enumerate(box.offsets))
        sizes = tuple(n if d == dim else s for d, s in enumerate(box.sizes))
        yield from bands_of(Box(offsets, sizes), most)
