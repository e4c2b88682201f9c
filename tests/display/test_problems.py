from __future__ import annotations

from ckptools.display.screen import SGR, Screen
from ckptools.display.tables import error_lines, incident_lines
from ckptools.model.incidents import causes_of, consequences_of
from ckptools.model.problems import Code, Problem
from tests.display.made import missing


def lines(*problems, screen=None, most=None):
    return incident_lines(causes_of(problems), consequences_of(problems), screen or Screen(), most)


def test_an_error_over_63_missing_ranks_is_one_line_with_its_way_out():
    gaps = [Problem(Code.TENSOR_GAP, f"gap [{n}:9]", n, f"w{n}") for n in range(1, 64)]
    assert error_lines([*missing(*range(1, 64)), *gaps], "NOT WHOLE: ranks 1..63 missing") == [
        "  ranks 1..63  CK001  no file ep0-ba12000-rank1.pt (and 62 more)",
        "                      put the other 63 rank files beside what is here; --allow-missing writes what is whole",
        "  -> 63 tensors have gaps",
    ]


def test_an_error_whose_line_says_the_only_cause_goes_on_with_the_way_out_alone():
    nan = Problem(Code.NOT_FINITE, "1 NaN", None, "w")
    assert error_lines([nan], "m.pt: CK201  w: 1 NaN") == ["         go back to an earlier checkpoint"]
    assert error_lines([nan], "m.pt: not whole") == ["  CK201  w: 1 NaN", "         go back to an earlier checkpoint"]
    assert error_lines([nan, *missing(1)], "m.pt: CK201  w: 1 NaN")[0].startswith("  rank 1  CK001  ")


def test_an_error_on_a_terminal_counts_the_causes_that_it_does_not_show():
    found = [Problem(Code.NOT_FINITE, "1 NaN", None, "w"), Problem(Code.PARAM_GROUPS, "x", None, "w")]
    assert error_lines(found, "", Screen(80, 1))[-1] == "  1 more problem; all of them when piped, as in | less"


def test_a_cause_comes_with_the_way_out_and_what_follows_stands_once_below_the_last_lost_file():
    gaps = [Problem(Code.TENSOR_GAP, f"gap [{n}:9]", rank, f"w{n}") for n, rank in enumerate((2, 3))]
    cut = Problem(Code.FILE_CUT, "cut", 2)
    nan = Problem(Code.NOT_FINITE, "1 NaN", None, "w")
    assert lines(*gaps, cut, *missing(3), nan) == [
        "  rank 2  CK002  cut",
        "                 copy the file again from where it was saved; --allow-missing writes what is whole",
        "  rank 3  CK001  no file ep0-ba12000-rank3.pt",
        "                 put the file beside the others; --allow-missing writes what is whole",
        "  -> 2 tensors have gaps (CK002 and CK001)",
        "  CK201  w: 1 NaN",
        "         go back to an earlier checkpoint",
    ]


def test_lines_fit_a_narrow_screen_and_causes_that_are_not_shown_are_counted():
    found = [*missing(1), Problem(Code.NOT_FINITE, "1 NaN", None, "w"), Problem(Code.PARAM_GROUPS, "x", None, "w")]
    shown = lines(*found, screen=Screen(50, 20), most=1)
    assert max(map(len, shown)) <= 50 or shown[-1].startswith("  2 more problems")
    assert shown[-1].startswith("  2 more problems; all of them when piped")


def test_a_culprit_is_named_once_and_a_wide_one_on_a_line_of_its_own():
    stray = Problem(Code.STRAY_FILE, "was saved as another", files=("model-00001-of-00002.safetensors",))
    mixed = [Problem(kind, "x", 3, "w") for kind in (Code.MIXED_SAVES, Code.LAYOUT_DISAGREES, Code.COPIES_DIFFER)]
    shown = lines(stray, *mixed, Problem(Code.TENSOR_OVERLAP, "y", 3), screen=Screen(80, 20))
    assert shown == [
        "  rank 3  CK006  w: x",
        "          CK102, CK104, CK105 too",
        "                 put the files of one save together: copy the file again from",
        "                 where it was saved",
        "  model-00001-of-00002.safetensors",
        "          CK009  was saved as another",
        "                 move it away if it does not belong here; else copy it again",
        "                 from where it was saved",
    ]


def test_codes_of_errors_and_of_warnings_have_their_colours():
    found = [Problem(Code.NOT_FINITE, "1 NaN", None, "w"), Problem(Code.STEPS_DISAGREE, "x")]
    first, *_, last = lines(*found, screen=Screen(color=True))[::2]
    assert f"\x1b[{SGR['bad']}mCK201\x1b[0m" in first and f"\x1b[{SGR['warn']}mCK204\x1b[0m" in last


def test_evidence_that_is_cut_on_a_terminal_ends_between_words():
    found = Problem(Code.NOT_FINITE, "a word " * 40, None, "w")
    second = lines(found, screen=Screen(80, 40))[1]
    assert second.endswith(("word ...", " a ..."))
