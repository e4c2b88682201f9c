from __future__ import annotations

from ckptools.display.lines import cause_lines, error_lines
from ckptools.display.tables import Screen
from ckptools.model.causes import causes_of, consequences_of
from ckptools.model.problems import Code, Problem
from tests.display.made import missing


def lines(*problems, screen=None, most=None):
    return cause_lines(causes_of(problems), consequences_of(problems), screen or Screen(), most)


def test_a_problem_alone_is_told_as_it_is_and_the_same_of_several_ranks_once():
    cut = Problem(Code.FILE_CUT, "cut", 7, "model.w", "error")
    equal = [Problem(Code.FILE_MISSING, "not here", rank) for rank in (1, 2, 3)]
    assert error_lines([cut, *equal]) == [str(cut), "CK001  ranks 1..3  not here"]


def test_a_cause_comes_with_the_way_out_and_what_follows_stands_once_below_the_last_lost_file():
    gaps = [Problem(Code.TENSOR_GAP, f"gap [{n}:9]", rank, f"w{n}") for n, rank in enumerate((2, 3))]
    cut = Problem(Code.FILE_CUT, "cut", 2)
    nan = Problem(Code.NOT_FINITE, "1 NaN", None, "w")
    assert lines(*gaps, cut, *missing(3), nan) == [
        "  CK002  rank 2: cut",
        "         copy the file of rank 2 again from where it was saved; --allow-missing writes what is here",
        "  CK001  rank 3: no file ep0-ba12000-rank3.pt",
        "         put the file of rank 3 beside the others; --allow-missing writes what is here",
        "         -> 2 tensors have gaps",
        "  CK201  w: 1 NaN",
        "         go back to an earlier checkpoint",
    ]


def test_lines_fit_a_narrow_screen_and_causes_that_are_not_shown_are_counted():
    found = [*missing(1), Problem(Code.NOT_FINITE, "1 NaN", None, "w"), Problem(Code.PARAM_GROUPS, "x", None, "w")]
    shown = lines(*found, screen=Screen(50, 20), most=1)
    assert max(map(len, shown)) <= 50 or shown[-1].startswith("  2 more causes")
    assert shown[-1].startswith("  2 more causes; all of them when piped")
