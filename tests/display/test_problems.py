from __future__ import annotations

from ckptools.display.lines import error_lines, fold
from ckptools.model.problems import Code, Problem
from tests.display.made import missing


def test_many_missing_ranks_are_one_line():
    (folded,) = fold(missing(*range(1, 256)))
    assert (folded.code, folded.where) == ("CK001", "ranks 1..255")
    assert folded.message == "no file ep0-ba12000-rank1.pt (and 254 more)"


def test_one_missing_rank_keeps_its_words():
    (folded,) = fold(missing(201))
    assert (folded.where, folded.message) == ("rank 201", "no file ep0-ba12000-rank201.pt")


def test_the_same_said_of_many_tensors_is_one_line():
    said = [Problem(Code.COPIES_DIFFER, "rank 1 has another value", None, f"optim.state.{n}.step") for n in range(9)]
    (folded,) = fold(said)
    assert folded.where == "optim.state.0.step and 8 other tensors"


def test_a_problem_alone_is_told_as_it_is_and_the_same_of_several_ranks_once():
    cut = Problem(Code.FILE_CUT, "cut", 7, "model.w", "error")
    equal = [Problem(Code.FILE_MISSING, "not here", rank) for rank in (1, 2, 3)]
    assert error_lines([cut, *equal]) == [str(cut), "CK001  ranks 1..3  not here"]


def test_different_things_stay_apart():
    assert (
        len(
            fold(
                [
                    *missing(1),
                    Problem(Code.FILE_CUT, "cut", 2),
                    Problem(Code.TENSOR_NOT_JOINED, "a", severity="warning"),
                ]
            )
        )
        == 3
    )
    assert (
        len(
            fold(
                [
                    Problem(Code.TENSOR_NOT_JOINED, "a1", severity="warning"),
                    Problem(Code.TENSOR_NOT_JOINED, "a2", severity="warning"),
                ]
            )
        )
        == 2
    )


def test_a_forged_message_stays_on_its_line():
    (folded,) = fold([Problem(Code.STRAY_FILE, "x\nwhole: all is well", 1, "w\x1b[2J")])
    assert folded.message == "x\\nwhole: all is well"
    assert folded.where == "rank 1, w\\x1b[2J"
