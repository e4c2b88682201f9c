"""What a set of boxes leaves out, proven quickly or not at all."""

from __future__ import annotations

import time
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.regions import MAX_NAMED, Box, TangledLayoutError, cover

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes_of(draw, shape):
    offsets = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(offsets), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


def cells(box):
    return set(product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))))


@settings(max_examples=300)
@given(shape=shapes, data=st.data())
def test_what_is_missing_is_counted_and_named_also_where_boxes_overlap(shape, data):
    boxes = data.draw(st.lists(boxes_of(shape), max_size=6))
    told = cover(shape, boxes)
    held = [c for b in boxes for c in cells(b)]
    assert told.missing == prod(shape) - len(set(held))
    assert bool(told.overlaps) == (len(held) > len(set(held)))
    assert all(cells(a) & cells(b) for a, b in told.overlaps)
    named = [c for g in told.gaps for c in cells(g)]
    assert len(named) == len(set(named)) and not set(named) & set(held)
    assert len(named) == told.missing or len(told.gaps) == MAX_NAMED


def test_boxes_outside_are_named_also_when_they_are_empty_or_of_other_dimensions():
    boxes = [Box((0,), (4,)), Box((3,), (2,)), Box((-1,), (1,)), Box((9,), (0,)), Box((0, 0), (1, 1))]
    assert cover((4,), boxes).outside == tuple(boxes[1:])


def test_one_element_missing_of_2_to_60_is_found():
    huge = 1 << 60
    told = cover((huge,), [Box((0,), (huge - 7,)), Box((huge - 6,), (6,))])
    assert (told.missing, told.gaps) == (1, (Box((huge - 7,), (1,)),))


def test_twenty_thousand_shards_along_any_dimension_are_proven_quickly():
    boxes = [Box((i * 3, 0), (3, 64)) for i in range(20_000)]
    started = time.perf_counter()
    assert cover((60_000, 64), boxes).exact
    assert cover((64, 60_000), [Box(b.offsets[::-1], b.sizes[::-1]) for b in boxes]).exact
    assert time.perf_counter() - started < 2


def test_ten_thousand_holes_are_all_found_quickly():
    started = time.perf_counter()
    told = cover((20_000,), [Box((i,), (1,)) for i in range(0, 20_000, 2)])
    assert (told.missing, len(told.gaps), told.gaps[0]) == (10_000, 10_000, Box((1,), (1,)))
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("copies", [1, 2])
def test_a_layout_too_tangled_to_judge_is_refused(copies):
    crossing = [Box((i, 2500 - i), (2500, 1)) for i in range(2500)]
    with pytest.raises(TangledLayoutError, match="tangled"):
        cover((5000, 2501), crossing * copies)
