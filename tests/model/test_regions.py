"""Boxes, the rules that cut tensors into them, and the proof that they cover one exactly."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.regions import (
    Box,
    chunk,
    chunk_runs,
    contiguous_strides,
    grid_boxes,
    span_boxes,
    strided_chunk_runs,
)

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def painted(shape, boxes) -> np.ndarray:
    """How many boxes hold each element."""
    count = np.zeros(shape, int)
    for box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return count


@st.composite
def boxes_in(draw, shape) -> Box:
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)))


@given(st.integers(0, 200), st.integers(1, 20))
def test_a_chunk_is_what_torch_chunk_cuts(length, parts):
    pieces = torch.arange(length).chunk(parts) if length else ()
    for index in range(parts):
        start, size = chunk(length, parts, index)
        expected = pieces[index].tolist() if index < len(pieces) else []
        assert list(range(start, start + size)) == expected


def listed(runs) -> list[int]:
    return [i for start, n in runs for i in range(start, start + n)]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_strided_chunks_take_their_turn_in_every_piece(length, parts, split):
    whole = [(0, length)]
    pieces = [listed(chunk_runs(whole, split, i)) for i in range(split)]
    for index in range(parts):
        expected = [i for piece in pieces for i in piece[slice(*_bounds(len(piece), parts, index))]]
        assert listed(strided_chunk_runs(whole, parts, index, split)) == expected


def _bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    start, size = chunk(length, parts, index)
    return start, start + size


@given(shapes.filter(prod), st.data())
def test_a_span_is_at_most_two_boxes_per_dimension_and_in_order(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    length = data.draw(st.integers(0, prod(shape) - start))
    flat = np.arange(prod(shape)).reshape(shape)
    found = list(span_boxes(shape, start, length))
    indices = [flat[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))].ravel() for b, _ in found]
    assert [i for part in indices for i in part] == list(range(start, start + length))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.slow
@given(shapes, st.data())
@settings(max_examples=300)
def test_cover_agrees_with_counting_every_element(shape, data):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    told, count = cover(shape, boxes), painted(shape, boxes)
    assert told.missing == int((count == 0).sum())
    assert bool(told.overlaps) == bool((count > 1).any())
    assert told.exact == bool((count == 1).all())


@given(shapes, st.data())
def test_the_gaps_are_exactly_what_is_missing(shape, data):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=3))
    told = cover(shape, boxes)
    if not told.overlaps:
        assert (painted(shape, [*boxes, *told.gaps]) == 1).all()


@given(shapes, st.data())
def test_an_intersection_holds_what_both_hold(shape, data):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = a.intersect(b)
    both = (painted(shape, [a]) * painted(shape, [b])) > 0
    assert both.sum() == (common.numel if common is not None else 0)


def test_a_box_outside_of_the_tensor_is_named():
    assert cover((4, 4), [Box((0, 0), (4, 4)), Box((3, 0), (2, 4))]).outside == (Box((3, 0), (2, 4)),)


def test_the_element_of_a_0_d_tensor_is_covered_once():
    assert cover((), [Box((), ())]).exact
    assert cover((), []).missing == 1
    assert cover((), [Box((), ()), Box((), ())]).overlaps


@pytest.mark.slow
def test_a_layout_built_to_waste_time_is_refused():
    n = 2500
    stairs = [Box((i, i), (n - i, 1)) for i in range(n)]
    with pytest.raises(TangledLayoutError, match="tangled"):
        cover((n, n), stairs)


def test_a_world_of_1024_row_shards_takes_few_comparisons():
    boxes = [Box((0, i * 4), (1000, 4)) for i in range(1024)]
    assert cover((1000, 4096), boxes).exact


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=3), min_size=1, max_size=3))
def test_grid_boxes_pack_the_local_tensor_without_holes(runs):
    sizes = tuple(sum(n for _, n in r) for r in runs)
    assert (painted(sizes, [packed for _, packed in grid_boxes(runs)]) == 1).all()


@given(shapes)
def test_strides_are_those_of_numpy(shape):
    array = np.zeros(shape, "u1")
    pairs = zip(shape, contiguous_strides(shape), array.strides, strict=True)
    assert not array.size or all(n == 1 or ours == theirs for n, ours, theirs in pairs)


def test_the_one_element_of_a_0_d_tensor_has_no_place_in_a_sentence():
    assert (Box((), ()).label, Box((0, 2), (4, 3)).label) == ("", "[0:4, 2:5]: ")
