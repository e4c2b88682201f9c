"""What a set of boxes leaves out, proven quickly or not at all."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations_with_replacement, pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.model.cover import MAX_NAMED, TangledLayoutError, cover
from ckptools.model.regions import Box, in_slabs

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes_of(draw, shape):
    offsets = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(offsets), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


def cells(box):
    return set(product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))))


@pytest.mark.slow
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


def every_box(shape, beyond=0):
    """Every box in a tensor of `shape`, and those that reach `beyond` its end."""
    runs = [[(o, m) for o in range(n + 1) for m in range(n + beyond - o + 1)] for n in shape]
    return [Box(tuple(o for o, _ in cell), tuple(m for _, m in cell)) for cell in product(*runs)]


def counted(shape, boxes):
    """Elements that no box holds, whether one is held twice, and the boxes that reach outside, by counting."""
    inside = [b for b in boxes if all(o + n <= most for o, n, most in zip(b.offsets, b.sizes, shape, strict=True))]
    held = Counter(c for b in inside for c in cells(b))
    twice = any(n > 1 for n in held.values())
    return prod(shape) - len(held), twice, tuple(b for b in boxes if b not in inside)


SMALL = [
    ((), 0, 3),
    ((0,), 2, 2),
    ((1,), 1, 4),
    ((4,), 2, 3),
    ((6,), 0, 3),
    ((2, 2), 1, 2),
    ((4, 3), 0, 2),
    ((2, 2, 2), 0, 2),
]
"""Shapes, how far boxes reach beyond them, and how many boxes at most."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "beyond", "most"), SMALL, ids=str)
def test_every_small_set_of_boxes_is_judged_as_counting_judges_it(shape, beyond, most):
    for count in range(most + 1):
        for boxes in combinations_with_replacement(every_box(shape, beyond), count):
            told = cover(shape, boxes)
            assert (told.missing, bool(told.overlaps), told.outside) == counted(shape, boxes), boxes
            assert told.exact == ((told.missing, told.overlaps, told.outside) == (0, (), ())), boxes


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 1))]),
        ((3, 4), [((0, 0), (3, 2)), ((0, 2), (1, 2))]),
        ((2, 4, 3), [((0, 0, 0), (2, 2, 3)), ((0, 2, 0), (1, 2, 3))]),
        ((4, 3), [((0, 0), (2, 3)), ((2, 1), (2, 3))]),
        ((4,), [((0,), (5,))]),
        ((4, 3), [((0, 0), (3, 3)), ((3, 0), (3, 3))]),
        ((4,), [((0,), (2,)), ((3,), (1,))]),
        ((4,), [((0,), (3,)), ((2,), (2,))]),
        ((4, 3), [((0, 1), (4, 3))]),
        ((4,), [((0,), (6,)), ((6,), (-2,))]),
        ((4,), [((0,), (4,)), ((2,), (-1,))]),
        ((4, 3), [((0, 0), (4, 3)), ((1, 1), (-1, -1))]),
        ((2, 2), [((0, 0), (2, 1)), ((0, 1), (1, 1)), ((1, 1), (-1, -1))]),
        ((4, 3), [((0, 0), (4, 3)), ((0, 0), (4, 3))]),
    ],
)
def test_pieces_that_only_nearly_follow_each_other_are_no_exact_cover(shape, boxes):
    assert not cover(shape, [Box(*b) for b in boxes]).exact
    assert not cover(shape, [Box(*b) for b in reversed(boxes)]).exact


def test_boxes_outside_are_named_also_when_they_are_empty_or_of_other_dimensions():
    boxes = [Box((0,), (4,)), Box((3,), (2,)), Box((-1,), (1,)), Box((9,), (0,)), Box((0, 0), (1, 1))]
    assert cover((4,), boxes).outside == tuple(boxes[1:])


def test_one_element_missing_of_2_to_60_is_found():
    huge = 1 << 60
    told = cover((huge,), [Box((0,), (huge - 7,)), Box((huge - 6,), (6,))])
    assert (told.missing, told.gaps) == (1, (Box((huge - 7,), (1,)),))


def test_twenty_thousand_shards_along_any_dimension_are_proven_quickly():
    boxes = [Box((i * 3, 0), (3, 64)) for i in range(20_000)]
    started = time.process_time()
    assert cover((60_000, 64), boxes).exact
    assert cover((64, 60_000), [Box(b.offsets[::-1], b.sizes[::-1]) for b in boxes]).exact
    assert time.process_time() - started < 2


def test_ten_thousand_holes_are_all_found_quickly():
    started = time.process_time()
    told = cover((20_000,), [Box((i,), (1,)) for i in range(0, 20_000, 2)])
    assert (told.missing, len(told.gaps), told.gaps[0]) == (10_000, 10_000, Box((1,), (1,)))
    assert time.process_time() - started < 2


@pytest.mark.slow
def test_a_whole_layout_too_tangled_to_compare_is_refused():
    n = 2500
    columns = [(Box((1, j), (j, 1)), Box((j + 1, j), (n + 2 - j, 1))) for j in range(1, n + 1)]
    # A ring of four around them, of which no cut goes through all; else each column would be proven for itself.
    ring = [Box((0, 0), (1, n + 1)), Box((0, n + 1), (n + 3, 1)), Box((n + 3, 1), (1, n + 1)), Box((1, 0), (n + 3, 1))]
    with pytest.raises(TangledLayoutError, match="find overlaps"):
        cover((n + 4, n + 2), [*ring, *(box for column in columns for box in column)])


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
def test_a_layout_too_tangled_to_judge_is_refused(copies):
    crossing = [Box((i, 2500 - i), (2500, 1)) for i in range(2500)]
    with pytest.raises(TangledLayoutError, match="tangled"):
        cover((5000, 2501), crossing * copies)


@st.composite
def tilings(draw, shape):
    """Boxes that cover a tensor once: slabs of it, each cut in a way of its own."""
    if not shape or draw(st.booleans()):
        return [Box((0,) * len(shape), shape)]
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    boxes = []
    for low, high in pairwise(cuts):
        slab = (*shape[:dim], high - low, *shape[dim + 1 :])
        for box in draw(tilings(slab)):
            moved = (*box.offsets[:dim], box.offsets[dim] + low, *box.offsets[dim + 1 :])
            boxes.append(Box(moved, box.sizes))
    return boxes


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=3).map(tuple), data=st.data())
def test_boxes_in_slabs_cover_each_element_once(shape, data):
    boxes = data.draw(st.permutations(data.draw(tilings(shape))))
    boxes += data.draw(st.lists(boxes_of(shape), max_size=1))
    if data.draw(st.booleans()):
        boxes = boxes[1:]
    proven = in_slabs(shape, [box.offsets for box in boxes], [box.sizes for box in boxes])
    assert not proven or counted(shape, boxes) == (0, False, ())


@pytest.mark.parametrize("layers", [1, 3, 200])
def test_a_grid_is_proven_without_comparing_each_pair(layers):
    boxes = [Box((layer, row, 0), (1, 2, 8)) for layer in range(layers) for row in range(0, 400, 2)]
    assert in_slabs((layers, 400, 8), *zip(*boxes, strict=True)) and cover((layers, 400, 8), boxes).exact
    assert not in_slabs((layers, 400, 8), *zip(*boxes[1:], strict=True))
