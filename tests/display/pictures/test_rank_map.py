"""The rank map: every rank has one cell, which shows the gravest thing that is wrong with it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.display.drawing import WIDTH
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.pictures.rank_map import LOWEST, Grouping, grouping, places, rank_cells, rank_map, shaped
from tests.display.made import alone, broken_run7, checkpoint, dtensor, files, run7, snapshot
from tests.display.pictures.svg import hovers, shown
from tests.truth import FIXTURES


def states(ck, problems=None):
    return {cell.rank: cell.state for cell in rank_cells(ck, problems)}


TINY = 1e-6
"""Units by which rounding may move an edge."""


@given(st.integers(0, 300), st.sampled_from([Grouping(32, 8, 1 << 30), Grouping(24, 8, 96), Grouping(5, 5, 10)]))
def test_cells_lie_beside_each_other_and_none_over_another(count, how):
    found = places(count, how)
    assert all(b.x > a.x + a.width - TINY or b.y > a.y + a.height - TINY for a, b in itertools.pairwise(found))
    assert max((at.x + at.width for at in found), default=0) < WIDTH + TINY
    assert max((at.y for at in found), default=0) > -TINY + LOWEST * (max(count - 1, 0) // how.across)
    assert all(at.height >= LOWEST for at in found)


@pytest.mark.parametrize(("ranks", "rows", "width"), [(4, 1, 90), (64, 8, 50), (256, 16, 24), (1024, 32, 12)])
def test_a_map_is_about_square_and_the_fewer_ranks_the_larger_is_a_cell(ranks, rows, width):
    how = shaped(ranks, Grouping(32, 8, 1 << 30))
    found = places(ranks, how)
    assert len({at.y for at in found}) == rows and width <= found[0].width <= width * 1.2


def test_groups_and_blocks_of_a_mesh_stay_whole_in_a_shorter_row():
    assert shaped(128, Grouping(32, 8, 64)) == Grouping(16, 8, 64)
    assert shaped(96, Grouping(32, 32, 1 << 30)).across == 32


def test_cells_with_room_for_it_have_the_number_of_their_rank():
    few, many = (rank_map(checkpoint({}, files=files(n, here=set(range(n)) - {3}))) for n in (8, 256))
    assert "3 M" in shown(few) and "3 M" not in shown(many) and "M" in shown(many).split("\n")


def meshed(mesh, *placements):
    """A checkpoint whose tensors state a mesh, each with its placements."""
    ranks = math.prod(mesh)
    boxes = [Box((0, 0), (64, 64))] * ranks
    tensors = {f"w{n}": dtensor((64, 64), placed, mesh, boxes) for n, placed in enumerate(placements)}
    return checkpoint({"model": tensors}, files=files(ranks, read=True), world_size=Fact(ranks, ("layout",)))


@pytest.mark.parametrize(
    ("mesh", "placements", "words", "across", "group"),
    [
        ((8, 16, 8), ("Replicate()", "Shard(dim=0)", "Shard(dim=1)"), "mesh replicate 8 x shard 16 x tp 8", 32, 8),
        ((2, 4), ("Shard(dim=0)", "Shard(dim=1)"), "mesh shard 2 x tp 4", 4, 4),
        ((3, 64), ("Replicate()", "Shard(0)"), "mesh replicate 3 x shard 64", 32, 32),
        ((2, 50), ("Replicate()", "Shard(0)"), "mesh replicate 2 x shard 50", 32, 32),
    ],
)
def test_ranks_are_arranged_as_their_mesh_is(mesh, placements, words, across, group):
    found = grouping(meshed(mesh, placements), math.prod(mesh))
    assert (found.words, found.across, found.group) == (words, across, group)
    assert len(mesh) == 2 or found.block == mesh[1] * mesh[2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, "mesh pp 2 x dp 4 x tp 4"),
        ({"tensor_model_parallel_size": 4, "use_tp_pp_dp_mapping": True}, "mesh dp 8 x tp 4"),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, "mesh dp 8 x cp 2 x tp 2"),
        ({"tensor_model_parallel_size": 5}, ""),
        ({"lr": 0.1}, ""),
    ],
)
def test_ranks_are_arranged_as_megatrons_settings_say(args, words):
    ck = checkpoint({"args": args}, files=files(32, read=True), world_size=Fact(32, ("args.world_size",)))
    assert grouping(ck, 32).words == words


def test_a_real_checkpoint_of_megatron_has_its_axes():
    ck = ckptools.open(FIXTURES / "megatron-tp2pp2-fp32" / "legacy")
    assert grouping(ck, 4).words == "mesh pp 2 x tp 2"


def test_without_a_mesh_ranks_stand_in_groups_of_eight_and_no_axis_is_named():
    assert grouping(run7(), 256)._replace(block=0) == Grouping(32, 8, 0, "")


def test_1024_ranks_of_a_mesh_have_a_label_for_each_row_and_none_touches_another():
    picture = rank_map(meshed((8, 16, 8), ("Replicate()", "Shard(dim=0)", "Shard(dim=1)")))
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="faint" text-anchor="end">(\d+)<', picture.svg)
    assert [int(rank) for *_, rank in labels] == list(range(0, 1024, 32))
    heights = [float(y) for _, y, _ in labels]
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 12 and "mesh replicate 8" in shown(picture)


def test_the_gravest_problem_of_a_rank_is_shown_and_all_are_named():
    cell = rank_cells(alone(), [Problem(Code.NOT_FINITE, "", 7), Problem(Code.FILE_CUT, "", 7)])[7]
    assert cell.state == "cut" and cell.words.endswith("CK201, CK002")


def test_a_problem_that_most_ranks_share_marks_none_of_them_and_is_in_the_words():
    shared, of_some = (Problem(Code.RNG_STATES_EQUAL, "", ranks=tuple(range(n))) for n in (129, 128))
    assert set(states(run7(), [shared]).values()) == {"fine"}
    assert "1 problem not of single ranks or files: CK206" in rank_map(run7(), [shared]).text
    assert states(run7(), [of_some])[127] == "other"


def test_copies_that_may_differ_make_no_rank_the_odd_one():
    found = states(run7(), [Problem(Code.COPIES_DIFFER, "", 7, severity="warning")])
    assert found[7] == "other" and found[8] == "fine"


def test_a_file_that_is_to_blame_colours_its_rank():
    stray = Problem(Code.STRAY_FILE, "was saved as another", files=("ep0-ba12000-rank9.pt",))
    assert {rank for rank, state in states(run7(), [stray]).items() if state != "fine"} == {9}
    odd = Problem(Code.STRAY_FILE, "", files=("another[9].pt", "x/ep0-ba12000-rank9.pt"))
    assert set(states(run7(), [odd]).values()) == {"fine"}


def test_a_file_of_no_rank_that_is_to_blame_has_a_cell_beside_the_ranks():
    ck = run7()
    shared = ck.files[0]._replace(path=ck.path.parent / "common.pt", rank=None)
    cut = Problem(Code.FILE_CUT, "is cut", files=("common.pt",))
    (cell,) = (cell for cell in rank_cells(replace(ck, files=(*ck.files, shared)), [cut]) if cell.rank is None)
    assert (cell.state, cell.words.partition(":")[0]) == ("cut", "common.pt")


def test_a_note_is_no_mark():
    assert states(run7(), [Problem(Code.KEPT_AS_SAVED, "", 3)])[3] == "fine"


def test_the_words_name_the_ranks_that_the_cells_mark():
    picture = rank_map(broken_run7(), [*broken_run7().problems, Problem(Code.LEFT_OVER, "")])
    assert "missing: 3 ranks: 201..203" in picture.text and "cut, damaged or unreadable: 1 rank: 137" in picture.text
    assert "1 problem not of single ranks or files: CK008" in picture.text
    assert "rank 202: missing; no file; CK001" in hovers(picture)


def test_a_file_of_no_rank_has_a_cell_where_there_are_no_ranks():
    picture = rank_map(snapshot())
    assert picture.title == "1 file of snapshot" and len(hovers(picture)) == 1


def of_many_ranks(count, **changes):
    file = run7().files[0]
    return run7(files=tuple(file._replace(rank=rank, **changes) for rank in range(count)))


def test_more_cells_than_are_drawn_are_told_in_words():
    picture = rank_map(of_many_ranks(5000))
    assert len(hovers(picture)) == 4096 and "904 more are not drawn" in shown(picture)
    assert "5000 ranks: 0..4999" in picture.text


@pytest.mark.parametrize(
    ("odd", "state"),
    [({"step": 6}, "step"), ({"model": {"w": torch.ones(4, dtype=torch.float64)}}, "odd")],
    ids=["step", "dtype"],
)
def test_of_real_ranks_those_that_differ_from_most_are_all_marked(tmp_path, odd, state):
    for rank in range(7):
        tree = {"model": {"w": torch.ones(4)}, "step": 5} | (odd if rank in (2, 4) else {})
        torch.save(tree, tmp_path / f"rank{rank}.pt")
    found = states(ckptools.open(tmp_path, all_ranks=True))
    assert [rank for rank, own in found.items() if own == state] == [2, 4]
    assert [rank for rank, own in found.items() if own == "fine"] == [0, 1, 3, 5, 6]
