"""What a verdict says of its fields: one line, the worst cause first, and a level that colours it."""

from __future__ import annotations

import json

import pytest

import ckptools.api  # noqa: F401  # without it, records have no HTML
from ckptools.model.incidents import causes_of
from ckptools.model.problems import Code, Problem
from ckptools.model.verdict import MAX_HEADLINE, Verdict
from tests.display.made import missing

EXTENT = "all 4 rank files are here, all read"
WARNING = Problem(Code.STEPS_DISAGREE, "the optimizer counts 7 steps, step says 9")
LOST = "what rank 2 had for itself: rng"


def verdict(*problems, whole=True, recoverable=True, joinable=True, depth="structure", lost=()):
    return Verdict(whole, recoverable, joinable, depth, EXTENT, causes_of(problems), lost)


def texts(*problems):
    return [(cause.code, cause.severity, cause.text, cause.problems) for cause in causes_of(problems)]


@pytest.mark.parametrize(
    ("made", "level", "headline"),
    [
        (verdict(), "good", f"whole: {EXTENT}"),
        (verdict(WARNING), "doubtful", "whole, 1 warning: the optimizer counts 7 steps, step says 9"),
        (verdict(Problem(Code.NOT_FINITE, "1 NaN", None, "w")), "bad", "whole, but 1 error: NaN or infinity: w"),
        (verdict(whole=None, joinable=None, depth="listed"), "doubtful", EXTENT),
        (
            verdict(WARNING, whole=None),
            "doubtful",
            "not proven whole; 1 warning: the optimizer counts 7 steps, step says 9",
        ),
        (
            verdict(Problem(Code.NOT_FINITE, "1 NaN", None, "w"), WARNING, whole=None),
            "bad",
            "not proven whole; 1 error: NaN or infinity: w",
        ),
        (verdict(*missing(2), whole=False, recoverable=False), "bad", "NOT WHOLE: rank 2 missing"),
        (verdict(whole=False, recoverable=None, depth="nothing"), "bad", "NOT WHOLE: nothing of it can be read"),
    ],
)
def test_the_headline_says_in_one_line_what_the_level_colours(made, level, headline):
    assert (made.level, made.headline) == (level, headline)


def test_the_remark_says_that_replicas_have_everything_and_names_what_is_lost():
    words = "recoverable: the whole model and optimizer are here"
    assert verdict(*missing(2), whole=False).headline == "NOT WHOLE: rank 2 missing"
    assert verdict(*missing(2), whole=False).remark == words
    assert verdict(*missing(2), whole=False, lost=(LOST,)).remark == f"{words}, but not {LOST}"
    assert verdict(*missing(2), whole=False).in_one_line == f"NOT WHOLE: rank 2 missing; {words}"


@pytest.mark.parametrize("fields", [{"recoverable": None}, {"recoverable": False}, {"joinable": False}], ids=str)
def test_what_cannot_be_put_together_is_not_said_to_be_recoverable(fields):
    assert verdict(*missing(2), whole=False, **fields).in_one_line == "NOT WHOLE: rank 2 missing"


def test_the_remark_states_the_files_where_nothing_more_is_proven():
    assert (verdict(WARNING, whole=None).remark, verdict(whole=None).remark) == (EXTENT, "")


def test_what_cannot_be_joined_is_whole_and_doubtful_and_named():
    why = Problem(Code.TENSOR_NOT_JOINED, "no shapes here", None, "a.w")
    made = verdict(WARNING, why, joinable=False)
    assert (made.level, made.headline) == ("doubtful", "whole, not joinable: a.w")


def test_nobody_knows_whether_it_joins_is_not_green():
    assert verdict(joinable=None).level == "doubtful"


def test_errors_come_before_warnings_and_notes_are_no_causes():
    note, error = Problem(Code.KEPT_AS_SAVED, "kept"), Problem(Code.PARAM_GROUPS, "is in two param groups", None, "w")
    assert texts(note, WARNING, error) == [
        ("CK207", "error", "parameter in no param group, or in two: w", 1),
        ("CK204", "warning", "the optimizer counts 7 steps, step says 9", 1),
    ]


def test_of_several_hundred_problems_of_a_kind_a_cause_names_one_and_counts_them():
    gaps = [Problem(Code.TENSOR_GAP, f"gap in {n}", None, f"layers.{n}.w") for n in range(300)]
    assert texts(*gaps) == [("CK101", "error", "gap in a tensor: layers.0.w and 299 more", 300)]
    assert texts(*gaps, *gaps) == texts(*gaps)


def test_causes_are_in_one_order_whoever_found_them_first():
    found = [Problem(kind, kind.code, None, "w") for kind in (Code.NEVER_WRITTEN, Code.TENSOR_GAP, Code.NOT_FINITE)]
    assert [code for code, *_ in texts(*reversed(found))] == ["CK017", "CK101", "CK201"]
    files = [Problem(Code.FILE_CUT, "cut", 2), *missing(3)]
    assert [code for code, *_ in texts(*found, *files)] == ["CK002", "CK001", "CK017", "CK201"]


def test_ranks_of_one_fate_are_one_cause():
    cut = [Problem(Code.FILE_CUT, "cut", rank) for rank in (7, 9)]
    assert [text for *_, text, _ in texts(*missing(1, 2, 3, 5), *cut)] == [
        "ranks 1..3, 5 missing",
        "ranks 7, 9 cut short or damaged",
    ]


def test_files_without_rank_and_name_are_counted():
    found = [Problem(Code.FILE_MISSING, f"no file {n}.safetensors") for n in range(3)]
    assert texts(*found)[0][2] == "3 files missing"
    assert [text for *_, text, _ in texts(found[0], *missing(1))] == ["1 file missing", "rank 1 missing"]


def test_one_kind_that_is_an_error_here_and_a_warning_there_is_two_causes():
    copies = [Problem(Code.COPIES_DIFFER, "", 1, "w"), Problem(Code.COPIES_DIFFER, "", 1, "v", severity="warning")]
    assert [(c, s, n) for c, s, _, n in texts(*reversed(copies))] == [("CK105", "error", 1), ("CK105", "warning", 1)]


@pytest.mark.parametrize("kind", [Code.FILE_MISSING, Code.FILE_CUT, Code.FILE_UNREADABLE])
def test_gaps_where_a_lost_rank_was_follow_from_it_and_are_no_cause(kind):
    gap = Problem(Code.TENSOR_GAP, "gap", 2, "w")
    assert [code for code, *_ in texts(gap, Problem(kind, "", 2))] == [kind.code]
    assert [code for code, *_ in texts(gap, Problem(kind, "", 3))] == [kind.code, "CK101"]


def test_a_gap_of_no_rank_is_a_cause_beside_a_lost_file_of_no_rank():
    found = [Problem(Code.FILE_MISSING, "no file"), Problem(Code.TENSOR_GAP, "gap", None, "w")]
    assert [code for code, *_ in texts(*found)] == ["CK001", "CK101"]


def test_a_cause_names_the_ranks_to_blame_or_those_of_its_tensor():
    mixed = [Problem(Code.MIXED_SAVES, "differs between ranks", ranks=ranks) for ranks in ((3, 1), (1,))]
    assert texts(*mixed)[0][2] == "ranks 1, 3 of another save"
    assert texts(Problem(Code.NOT_FINITE, "", 2, "w"))[0][2] == "NaN or infinity: w (rank 2)"


def test_a_message_is_the_cause_where_it_is_short_and_alone():
    kept = [Problem(Code.MIXED_SAVES, f"files were written {hours} hours apart") for hours in (1.5, 30)]
    assert texts(kept[0])[0][2] == "files were written 1.5 hours apart"
    assert texts(*kept)[0][2] == "files of different steps or saves"


def test_names_without_end_and_lines_in_them_stay_in_one_short_line():
    tensor = Problem(Code.TENSOR_GAP, "", None, "w\n" * 5000)
    text = Problem(Code.MIXED_SAVES, "\x1b[31mwhole: all\n" * 5000)
    line = verdict(tensor, text, whole=False, recoverable=False).headline
    assert line.isprintable() and len(line) <= MAX_HEADLINE


def test_a_headline_names_as_many_incidents_as_fit_and_counts_the_others():
    lost = [Problem(Code.FILE_MISSING, "", rank) for rank in (1, 2)]
    cut = [Problem(Code.FILE_CUT, "", rank) for rank in (5,)]
    others = [Problem(Code.STRAY_FILE, "", 7), Problem(Code.BAD_CHECKSUM, "", 8)]
    line = verdict(*lost, *cut, *others, whole=False, recoverable=False).headline
    assert line == "NOT WHOLE: ranks 1, 2 missing; rank 5 cut short or damaged; 2 more"


def test_a_verdict_is_plain_data_with_its_level_and_headline():
    made = verdict(*missing(2), whole=False, lost=(LOST,)).to_dict()
    assert json.loads(json.dumps(made)) == made
    assert list(made) == [
        "whole",
        "recoverable",
        "joinable",
        "resumable",
        "depth",
        "level",
        "headline",
        "remark",
        "incidents",
        "causes",
        "consequences",
        "lost",
    ]
    assert made["causes"] == [cause._asdict() for cause in causes_of(missing(2))]
    assert (made["level"], made["lost"]) == ("bad", [LOST])


def test_a_verdict_shows_itself_by_its_headline():
    assert f"whole: {EXTENT}" in repr(verdict()) and f"whole: {EXTENT}" in verdict()._repr_html_()
