"""A checkpoint is judged by its files, its problems and its gaps; of what nobody looked at nothing is promised."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import ckptools
from ckptools.model.problems import Code, Problem
from ckptools.rules.verdict import (
    is_alone,
    is_of_one_rank,
    lost_with_files,
    perhaps_more,
    stands_in_the_way,
    verdict_of,
)
from tests.display.made import alone, broken_run7, checkpoint, files, missing, plain, run7, snapshot, unread_run7
from tests.truth import FIXTURES

FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
HSDP = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"
LOCAL = FIXTURES / "torch2.6.0-fsdp1-local-w4"
VERL = FIXTURES / "verl-fsdp1/ckpt/global_step_3/actor"
TREE = {"model": {"w": plain(4)}, "rng": {"torch": plain(8)}, "train_sampler": {"seen": 3}, "rng_seed": 1}


def answers(verdict):
    return verdict.whole, verdict.recoverable, verdict.joinable, verdict.depth


def without(folder, tmp_path, *lost):
    """A copy of a folder that lacks some files, opened."""
    copied = shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("truth*", "HOW*"))
    for name in lost:
        (copied / name).unlink()
    return ckptools.open(copied)


def test_what_is_here_read_and_without_a_gap_is_whole():
    found = verdict_of(ckptools.open(FSDP / "rank0.pt"))
    assert answers(found) == (True, True, True, "structure")
    assert (found.level, found.headline) == ("good", "whole: all 4 rank files are here, all read")


def test_files_that_were_not_read_prove_nothing(large_world):
    found = verdict_of(ckptools.open(FSDP / "rank0.pt"))
    assert answers(found) == (None, None, None, "listed")
    assert (found.level, found.headline) == ("doubtful", "all 4 rank files are here; contents not compared (verify)")
    assert answers(verdict_of(ckptools.open(FSDP / "rank0.pt", all_ranks=True))) == (True, True, True, "structure")


def test_a_rank_that_is_not_here_is_told_of_a_world_that_was_not_read(large_world, tmp_path):
    found = verdict_of(without(FSDP, tmp_path, "rank2.pt"))
    assert answers(found) == (False, None, None, "listed") and found.headline == "NOT WHOLE: rank 2 missing"


def test_a_lost_rank_of_which_another_is_a_replica_can_be_recovered_but_for_its_random_states(tmp_path):
    found = verdict_of(without(HSDP, tmp_path, "rank2.pt"))
    assert answers(found) == (False, True, True, "structure")
    assert found.lost == ("what rank 2 had for itself: rng",)
    assert found.remark == "recoverable: the whole model and optimizer are here, but not " + found.lost[0]


def test_a_cut_rank_of_which_another_is_a_replica_can_be_recovered_too(tmp_path):
    copied = shutil.copytree(HSDP, tmp_path / "run", ignore=shutil.ignore_patterns("truth*"))
    os.truncate(copied / "rank1.pt", 5000)
    found = verdict_of(ckptools.open(copied))
    assert answers(found) == (False, True, True, "structure")
    assert found.in_one_line.startswith("NOT WHOLE: rank 1 cut short or damaged; recoverable: ")


@pytest.mark.parametrize("lost", [("rank0.pt", "rank2.pt"), ("rank1.pt", "rank3.pt")], ids=str)
def test_both_replicas_of_a_shard_cannot_be_recovered(lost, tmp_path):
    found = verdict_of(without(HSDP, tmp_path, *lost))
    assert answers(found) == (False, False, True, "structure") and found.lost == ()
    assert "recoverable" not in found.headline and [cause.code for cause in found.causes] == ["CK001"]


def test_a_lost_rank_that_has_no_replica_cannot_be_recovered_and_its_gaps_are_no_further_cause(tmp_path):
    ck = without(FSDP, tmp_path, "rank2.pt")
    found = verdict_of(ck)
    assert answers(found) == (False, False, True, "structure") and found.headline == "NOT WHOLE: rank 2 missing"
    assert [cause.code for cause in found.causes] == ["CK001"]


def test_a_lost_file_that_held_random_states_alone_can_be_recovered(tmp_path):
    found = verdict_of(without(VERL, tmp_path, "extra_state_world_size_4_rank_2.pt"))
    assert answers(found) == (False, True, True, "structure")
    assert found.lost[0].startswith("what rank 2 had for itself: extra_state.rng")


def test_pieces_of_which_no_shape_is_known_are_whole_and_not_joinable():
    found = verdict_of(ckptools.open(LOCAL / "rank0.pt"))
    assert answers(found) == (True, True, False, "structure") and found.level == "doubtful"
    assert found.headline.startswith("whole, not joinable: model.gate and 20 more: FSDP1 local state")


def test_a_lone_rank_is_not_whole_wherever_it_was_opened(tmp_path):
    shutil.copy(FSDP / "rank1.pt", tmp_path)
    by_name, by_folder = (verdict_of(ckptools.open(path)) for path in (tmp_path / "rank1.pt", tmp_path))
    assert by_name == by_folder and answers(by_name) == (False, False, True, "structure")
    assert (by_name.level, by_name.headline) == ("bad", "NOT WHOLE: ranks 0, 2, 3 missing")


def test_files_of_another_save_stand_in_the_way_of_everything(tmp_path):
    for rank in range(3):
        torch.save({"model": {"w": torch.ones(4)}, "step": 5 + rank // 2}, tmp_path / f"rank{rank}.pt")
    found = verdict_of(ckptools.open(tmp_path))
    assert answers(found) == (False, False, True, "structure")
    assert found.causes[0].code == "CK006" and "recoverable" not in found.headline


def test_what_hints_at_more_files_makes_it_unproven():
    more = Problem(Code.ONE_OF_SEVERAL, "stage 1 of perhaps 2", severity="warning")
    found = verdict_of(checkpoint(TREE, problems=(more,)))
    assert answers(found) == (None, None, True, "structure") and perhaps_more([more])
    assert found.headline == "not proven whole; 1 warning: stage 1 of perhaps 2"
    assert found.remark == "1 file, whole in itself; files that are not here may hold more"


def test_a_part_that_is_known_to_be_one_is_not_whole():
    part = Problem(Code.ONE_OF_SEVERAL, "its name says 1 of 2")
    assert verdict_of(checkpoint(TREE, problems=(part,))).whole is False and not perhaps_more([part])


def test_more_problems_than_opening_found_make_another_verdict_and_the_first_one_stays():
    ck = snapshot()
    lost = Problem(Code.BAD_CHECKSUM, "CRC-32 of a record", None, "MODEL_STATE.module.w")
    assert answers(verdict_of(ck, [lost], "bytes")) == (False, False, True, "bytes")
    assert verdict_of(ck) is verdict_of(ck) and answers(verdict_of(ck)) == (True, True, True, "structure")


def test_what_a_replica_has_unharmed_is_recovered():
    harmed = Problem(Code.BAD_CHECKSUM, "CRC-32 of a record", 1, "model.w", replicated=True)
    assert answers(verdict_of(checkpoint(TREE, problems=(harmed,)))) == (False, True, True, "structure")


def test_a_damaged_random_state_is_not_in_the_way_of_the_model_and_is_named():
    ck = checkpoint(TREE, problems=(Problem(Code.VALUE_LOST, "cannot be read", 1, "rng.torch"),))
    found = verdict_of(ck)
    assert answers(found) == (False, True, True, "structure")
    assert found.lost == ("rng.torch",)


@pytest.mark.parametrize(
    ("problem", "stands"),
    [
        (Problem(Code.FILE_MISSING, "", 1), False),
        (Problem(Code.FILE_MISSING, ""), True),
        (Problem(Code.FILE_CONTRADICTS, "", 1, "model.w"), True),
        (Problem(Code.FILE_CONTRADICTS, "", 1, "rng.torch"), False),
        (Problem(Code.MIXED_SAVES, "", 1), True),
        (Problem(Code.MIXED_SAVES, "", 1, severity="warning"), False),
        (Problem(Code.MIXED_SAVES, "", 1, replicated=True), False),
        (Problem(Code.VALUE_LOST, "", 1, "train_sampler.seen"), False),
        (Problem(Code.VALUE_LOST, "", 1, "model.w"), True),
        (Problem(Code.VALUE_LOST, "", 1), True),
        (Problem(Code.MODEL_PART_MISSING, ""), True),
        (Problem(Code.NOT_FINITE, "", 1, "model.w"), False),
    ],
    ids=str,
)
def test_a_problem_stands_in_the_way_where_neither_a_replica_nor_leaving_out_what_is_a_rank_s_own_helps(
    problem, stands
):
    assert stands_in_the_way(checkpoint(TREE), problem) is stands


@pytest.mark.parametrize(
    ("name", "own"),
    [("rng", True), ("rng.torch", True), ("rng_seed", False), ("train_sampler.seen", True), ("model.w", False)],
)
def test_a_name_is_a_rank_s_own_below_random_states_and_positions_in_the_data(name, own):
    assert is_of_one_rank(checkpoint(TREE), name) is own


def test_what_was_lost_with_files_names_ranks_and_what_they_had_apart():
    ck = checkpoint(TREE, differing=(("loss",),))
    assert lost_with_files(ck, missing(2)) == ("what rank 2 had for itself: rng, train_sampler, loss",)
    assert "1, 2" in lost_with_files(ck, missing(1, 2))[0]
    assert lost_with_files(ck, [Problem(Code.MIXED_SAVES, "", 1)]) == ()
    assert lost_with_files(checkpoint({"model": {"w": plain(4)}}), missing(1)) == ()


@pytest.mark.slow
def test_one_rank_is_alone_where_it_was_named_and_no_other_is_beside_it_or_damaged():
    assert is_alone(alone())
    assert not any(map(is_alone, (run7(), unread_run7(), broken_run7(), snapshot())))
    cut = [f._replace(status="cut") if f.rank == 8 else f for f in alone().files]
    assert not is_alone(unread_run7(path=alone().path, files=tuple(cut)))
    assert not is_alone(unread_run7(path=alone().path.parent, files=alone().files))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "one file holds everything"),
        ({"files": files(3, read=True)}, "all 3 rank files are here, all read"),
        ({"files": (*files(2, read=True), *files(2, read=True))}, "all 4 files of 2 ranks are here, all read"),
        ({"files": tuple(f._replace(rank=None) for f in files(2, read=True))}, "all 2 files are here, all read"),
        ({"files": files(3), "all_ranks": False}, "all 3 rank files are here; contents not compared (verify)"),
    ],
)
def test_the_extent_counts_ranks_and_files(more, words):
    assert verdict_of(checkpoint({"model": {"w": plain(4)}}, **more)).extent == words
