"""Rows of matrices that are all zero, or that never got a gradient: untrained tokens of an embedding."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ckptools.dtypes import is_floating
from ckptools.keys.entries import Entry, Selection, tensor_entries
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.stats.moments import SECOND
from ckptools.stats.passes import PassResult, SharedRegion, Values, over_regions, shared_regions
from ckptools.stats.reading import MeasuredPart, by_parameter, located, readable, tensors_chosen, together
from ckptools.stats.record import DeadRows, Statistics, with_totals
from ckptools.tensor_io.threads import Progress

FIRST_FEW = 8
"""At most this many rows are named."""

MAX_ROWS = 100_000_000
"""At most this many rows of a matrix are tracked; each takes more than a byte."""

Flags = npt.NDArray[np.bool_]


def dead_rows(
    ck: Checkpoint, entries: Sequence[Entry], jobs: int | None = None, progress: Progress | None = None
) -> Statistics[DeadRows]:
    """Find the dead rows of some matrices, as found by `matrices`; the row of a matrix says what cannot be read.

    Every rank's structure of the checkpoint is read. `progress` is called with bytes read and the matrix they are of.
    """
    started = time.perf_counter()
    seconds = by_parameter(entry for entry in tensor_entries(ck) if entry.slot == SECOND)
    pairs = [(e.value, seconds[e.parameter].value if e.parameter in seconds else NONE) for e in entries]
    tensors = [tensor for a, b in pairs for tensor in (a, b if b.shape == a.shape else NONE)]
    sides = [_side(tensor) for tensor in tensors]
    names = [entry.name for entry in entries for _ in range(2)]
    found = over_regions([regions for regions, _ in sides], names, _alive, jobs, progress)
    looked = [_looked(t, problem, one) for t, (_, problem), one in zip(tensors, sides, found, strict=True)]
    rows = [_row(*each) for each in zip(entries, looked[::2], looked[1::2], strict=True)]
    elements = sum(region.box.numel for regions, _ in sides for region in regions)
    return with_totals(ck.path, "dead rows", rows, started, sum(one.nbytes for one in found), elements)


NONE = Tensor((0, 0), "float32", ())
"""Stands for a missing second moment."""


def matrices(ck: Checkpoint, selection: Selection) -> list[Entry]:
    """The tensors of two dimensions and floating point among those of `tensors_chosen`; codes are no numbers."""
    chosen = [entry for entry in tensors_chosen(ck, selection) if not entry.value.are_codes]
    return [e for e in chosen if len(e.value.shape) == 2 and e.value.numel and is_floating(e.value.dtype)]


def _side(tensor: Tensor) -> tuple[list[SharedRegion], str]:
    """The regions of a matrix that can be read, and why others cannot."""
    if tensor.shape[0] > MAX_ROWS:
        return [], f"it has {tensor.shape[0]} rows; at most {MAX_ROWS} are looked at"
    found = readable(MeasuredPart("", "", tensor))
    return shared_regions([located(tensor)]) if found.sources else [], found.problem


def _alive(_: int, region: SharedRegion, bands: Iterable[tuple[Box, list[Values]]]) -> tuple[Box, Flags]:
    """A region, and for each of its rows whether it is not all zero."""
    alive = np.zeros(region.box.sizes[0], np.bool_)
    for box, values in bands:
        first = box.offsets[0] - region.box.offsets[0]
        alive[first : first + box.sizes[0]] |= (values[0] != 0).any(axis=1)
    return region.box, alive


Looked = tuple[int | None, Values, str]
"""Number of rows of a matrix that were read in full, None if no region was; the dead ones; why others were not read."""


def _looked(tensor: Tensor, problem: str, found: PassResult[tuple[Box, Flags]]) -> Looked:
    rows = tensor.shape[0] if found.results else 0
    seen, alive = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
    for box, flags in found.results:
        own = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
        seen[own] += box.sizes[1]
        alive[own] |= flags
    whole = seen == tensor.shape[1]
    count = int(whole.sum()) if found.results else None
    return count, np.flatnonzero(whole & ~alive), problem or found.problem


def _row(entry: Entry, weight: Looked, second: Looked) -> DeadRows:
    (rows, zero, problem), (known, idle, unread) = weight, second
    return DeadRows(
        entry.name,
        entry.section,
        entry.value.shape,
        rows or 0,
        len(zero),
        tuple(zero[:FIRST_FEW].tolist()),
        None if known is None else len(idle),
        tuple(idle[:FIRST_FEW].tolist()),
        together([("parameter", problem), (SECOND, unread)]),
    )
