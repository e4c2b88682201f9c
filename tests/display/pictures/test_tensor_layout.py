"""The layout of a tensor: to scale, every copy, and nothing drawn as held that no file holds."""

from __future__ import annotations

import re
from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.contents.show import layout_of, shard_rows
from ckptools.display.drawing import WIDTH, Rect, hatch_lines
from ckptools.model.regions import Box, chunk
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.pictures.rank_map import STATES
from ckptools.pictures.tensor_layout import ABSENT, ACROSS, GRID, HERE, STRIP, _line_length, box_rects, tensor_layout
from tests.display.made import plain, sharded, source
from tests.display.pictures.svg import hovers, shown
from tests.truth import FIXTURES


def tensor(shape, boxes, absent=(), **more):
    """A tensor whose rank R has the box R; the files of `absent` ranks were not read."""
    held = source((1,), "float32", "0")
    shards = tuple(Shard(box, rank, None if rank in absent else held) for rank, box in boxes)
    return Tensor(shape, "float32", shards, "dtensor", ("Shard(0)",), (len(shards),), world_size=len(shards), **more)


def strip(rows, ranks):
    return [(r, Box((chunk(rows, ranks, r)[0], 0), (chunk(rows, ranks, r)[1], 3))) for r in range(ranks)]


def grid(copies=1):
    cells = [Box((16 * i, 10 * j), (16, 10)) for i in range(2) for j in range(2)]
    return [(n, box) for n, box in enumerate(cells * copies)]


def area(rects):
    return sum(at.width * at.height for at in rects)


def overlap(a: Rect, b: Rect) -> bool:
    close = 1e-6
    return (
        a.x + close < b.x + b.width
        and b.x + close < a.x + a.width
        and a.y + close < b.y + b.height
        and b.y + close < a.y + a.height
    )


@given(st.integers(1, 10**6), st.integers(1, 70), st.integers(1, 10**6))
def test_the_pieces_of_a_strip_cover_it_and_never_each_other(rows, ranks, each):
    each = max(each, -(-rows // 9))
    boxes = [Box((start,), (n,)) for start, n in (chunk(rows, ranks, r) for r in range(ranks)) if n]
    rects = [at for box in boxes for at in box_rects(box, (rows,), (0,), each)]
    assert isclose(area(rects), rows / each * WIDTH * STRIP, rel_tol=1e-9)
    assert all(at.x >= 0 and at.x + at.width <= WIDTH + 1e-6 and at.y <= rows // each * STRIP for at in rects)
    assert not any(overlap(a, b) for n, a in enumerate(rects) for b in rects[:n])


@given(st.integers(1, 10**9), st.lists(st.integers(1, 10**6), min_size=1, max_size=300))
def test_a_strip_has_no_more_lines_than_its_pieces_need(more, lengths):
    whole = sum(lengths) + more
    assert -(-whole // _line_length(whole, lengths)) <= -(-len(lengths) // ACROSS)


def test_lines_of_equal_pieces_end_where_pieces_end():
    assert len(hovers(tensor_layout(tensor((261, 3), strip(261, 120))))) == 87


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 8), st.integers(1, 8))
def test_the_pieces_of_a_grid_cover_it_and_never_each_other(rows, columns, down, across):
    runs = [(chunk(rows, down, i), chunk(columns, across, j)) for i in range(down) for j in range(across)]
    boxes = [Box((a[0], b[0]), (a[1], b[1])) for a, b in runs if a[1] and b[1]]
    rects = [at for box in boxes for at in box_rects(box, (rows, columns), (0, 1), 1)]
    assert isclose(area(rects), WIDTH * GRID, rel_tol=1e-9)
    assert not any(overlap(a, b) for n, a in enumerate(rects) for b in rects[:n])


@given(st.floats(1, 700), st.floats(1, 300))
def test_the_hatching_stays_inside_of_its_rectangle(width, height):
    for x1, y1, x2, y2 in hatch_lines(Rect(10, 20, width, height)):
        assert all(10 <= x <= 10 + width + 1e-9 for x in (x1, x2))
        assert all(20 - 1e-9 <= y <= 20 + height + 1e-9 for y in (y1, y2))
        assert isclose(x2 - x1, y1 - y2, abs_tol=1e-9)


def test_ranks_without_a_piece_are_named():
    assert "no elements: ranks 6, 7" in tensor_layout(tensor((6, 3), strip(6, 8))).text


def test_a_rank_that_holds_nothing_lacks_nothing():
    assert "not here" not in tensor_layout(tensor((6, 3), strip(6, 8), absent={6, 7})).text


def test_ranks_of_which_no_shard_is_listed_are_named():
    assert "no shard is listed of ranks 4..7" in tensor_layout(replace(sharded(4, 3, ranks=4), world_size=8)).text


def test_a_piece_whose_every_copy_is_away_is_a_hole():
    picture = tensor_layout(tensor((32, 20), grid(copies=2), absent={1, 5}))
    assert "HOLES: 160 of 640 elements are in no file that was read: [0:16, 10:20]" in picture.text


def test_pieces_on_more_ranks_than_others_and_on_none_that_is_known_are_told():
    text = tensor_layout(tensor((32, 20), [*grid(), (4, grid()[0][1])])).text
    assert "4 pieces of [16, 10], on 1 to 2 ranks each" in text and "[0:16, 0:10]  ranks 0, 4" in text
    text = tensor_layout(tensor((4, 3), [(None, Box((0, 0), (4, 3)))])).text
    assert "an unknown rank" in text and text.endswith("it holds every element")


def test_pieces_that_overlap_are_marked():
    boxes = [(0, Box((0, 0), (20, 20))), (1, Box((16, 0), (16, 20)))]
    picture = tensor_layout(tensor((32, 20), boxes))
    assert "OVERLAP: [0:20, 0:20] and [16:32, 0:20] share elements" in picture.text
    assert "[16:20, 0:20]: [0:20, 0:20] and [16:32, 0:20] overlap" in hovers(picture)


def test_a_tensor_of_256_shards_is_drawn_in_runs_of_ranks_that_are_here_or_not():
    picture = tensor_layout(tensor((4096, 3), strip(4096, 256), absent={*range(200)}))
    assert [hover.partition(":")[0] for hover in hovers(picture)][-2:] == ["ranks 0..199", "ranks 200..255"]
    assert "ranks 0..199 missing" in shown(picture) and len(picture.svg) < 10_000 and len(picture.text) < 1000


def test_a_piece_has_the_colour_and_the_words_that_its_rank_has_in_the_map_of_ranks():
    states = {0: "fine", 1: "missing", 2: "step", 3: "cut", 4: "values"}
    picture = tensor_layout(tensor((12, 3), strip(12, 6), absent={1, 3, 5}), states=states)
    kinds = {whose: kind for kind, whose in re.findall(r'class="([\w ]+)"><title>(rank \d):', picture.svg)}
    assert kinds["rank 1"] == kinds["rank 5"] == STATES["missing"].kind and kinds["rank 0"] == kinds["rank 4"] == "sky"
    assert (kinds["rank 2"], kinds["rank 3"]) == (STATES["step"].kind, STATES["cut"].kind)
    legend = shown(picture).split("\n")
    assert [words for words in legend if words in {key.means for key in (*STATES.values(), HERE, ABSENT)}] == [
        "here", "other step or save", "cut, damaged or unreadable", "missing", "in no file that was read"
    ]  # fmt: skip
    assert {"1 M", "2 S", "3 C", "4"} <= set(legend)


def test_pieces_of_a_flattened_parameter_are_all_there():
    ck = ckptools.open(FIXTURES / "composer-0.14.1-torch2.0.1-local-w4/ep0-ba5-rank0.pt", all_ranks=True)
    conv = ck.model["model.conv.weight"]
    picture = tensor_layout(conv, "conv")
    assert len(hovers(picture)) == len(conv.shards) and "more than two dimensions" in shown(picture)
    assert picture.text.endswith("together they hold every element once")


@pytest.mark.parametrize("made", [tensor((0, 3), []), tensor((), []), plain()], ids=str)
def test_a_tensor_of_any_size_has_a_picture(made):
    assert shown(tensor_layout(made))


def test_what_looking_into_the_files_found_is_taken(tmp_path):
    ck = ckptools.open(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt")
    name, found = next((n, t) for n, t in ck.model.items() if len(t.shards) == 3)
    rows = [row._replace(status="unreadable", note="cut") if row.rank == 1 else row for row in shard_rows(found)]
    picture = tensor_layout(found, name, rows)
    assert any(hover.startswith("rank 1:") and hover.endswith(", cut") for hover in hovers(picture))
    assert "HOLES" in picture.text and layout_of(found).cover.exact
