"""Problems are grouped by what is behind them: each cause once, with the way out, and what follows from it apart."""

from __future__ import annotations

import pytest

from ckptools.model.problems import REMEDIES, Code, Problem
from ckptools.model.rank_vote import same_value, vote
from ckptools.model.verdict import causes_of, consequences_of
from tests.display.made import missing


def gaps(*ranks: int | None) -> list[Problem]:
    return [Problem(Code.TENSOR_GAP, f"gap [{n}:9]", rank, f"w{n}") for n, rank in enumerate(ranks)]


def said(*problems: Problem) -> list[tuple[str, str]]:
    return [(cause.where, cause.what) for cause in causes_of(problems)]


def test_63_missing_ranks_are_one_cause_with_the_rank_as_a_letter():
    contents = {n: f", which holds w{n}.step and {n} more" for n in range(1, 64)}
    lost = [
        Problem(Code.FILE_MISSING, f"no file __{n}_0.distcp{contents[n]}", n, contents=contents[n]) for n in contents
    ]
    assert said(*lost) == [("ranks 1..63", "no file __R_0.distcp")]
    assert causes_of(lost)[0].remedy.startswith("put the other 63 rank files beside what is here;")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["ep0-ba1-rank0.pt", "ep0-ba1-rank1.pt", "ep0-ba1-rank12.pt"], "ep0-ba1-rankR.pt"),
        (["mp_rank_00.pt", "mp_rank_01.pt", "mp_rank_12.pt"], "mp_rank_R.pt"),
        (["a0.pt", "b1.pt", "c12.pt"], "a0.pt (and 2 more)"),
        (["r0-0.pt", "r1-1.pt", "r12-12.pt"], "r0-0.pt (and 2 more)"),
    ],
)
def test_a_letter_stands_for_the_rank_only_where_that_gives_every_name(names, shown):
    lost = [Problem(Code.FILE_MISSING, name, rank) for name, rank in zip(names, (0, 1, 12), strict=True)]
    assert said(*lost) == [("ranks 0, 1, 12", shown)]


@pytest.mark.parametrize(
    ("names", "copied"),
    [
        (("a.pt",), "the file again from where it was saved"),
        (("a.pt", "b.pt"), "the files again from where they were saved"),
    ],
)
def test_the_way_out_counts_files_of_no_rank(names, copied):
    (cause,) = causes_of([Problem(Code.NEVER_WRITTEN, "take no space on the disk", files=names)])
    assert cause.remedy.startswith(f"copy {copied};")


def test_the_parts_of_a_rank_that_had_a_file_each_are_named():
    lost = [Problem(Code.FILE_MISSING, "no file", rank, part) for rank, part in ((0, "rng"), (2, "rng"), (1, None))]
    lost += [Problem(Code.FILE_MISSING, "no file", 1, "rng"), Problem(Code.FILE_MISSING, "no file", 0, "optim")]
    (cause,) = causes_of(lost)
    assert cause.text == "rank 1 and rng of ranks 0, 2 and optim of rank 0 missing"


def test_a_gap_follows_only_from_a_lost_file_of_its_part():
    lost, gap = Problem(Code.FILE_MISSING, "no file", 0, "optim"), Code.TENSOR_GAP
    problems = [lost, *(Problem(gap, "gap [0:9]", 0, name) for name in ("optim.state.w", "optimizer.w", "model.w"))]
    assert [one.problems for one in consequences_of(problems)] == [1]


def test_one_missing_rank_keeps_its_words():
    assert said(*missing(201)) == [("rank 201", "no file ep0-ba12000-rank201.pt")]


def test_gaps_where_a_file_is_lost_are_counted_as_its_consequence_and_no_cause():
    cut = Problem(Code.FILE_CUT, "cut", 2)
    (following,) = consequences_of([*gaps(2, 3, None), cut, *missing(3)])
    assert [cause.code for cause in causes_of([*gaps(2, 3, None), cut, *missing(3)])] == ["CK002", "CK001"]
    assert (following.code, following.causes, following.text) == ("CK101", ("CK002", "CK001"), "3 tensors have gaps")
    assert following.first == "CK101  rank 2  w0  gap [0:9]"


def test_gaps_of_another_rank_follow_from_nothing():
    found = [*gaps(2), *missing(3)]
    assert (consequences_of(found), [cause.code for cause in causes_of(found)]) == ((), ["CK001", "CK101"])


def test_problems_of_one_code_with_other_words_are_causes_of_their_own():
    twice, none = (Problem(Code.PARAM_GROUPS, text, None, "w") for text in ("is in two param groups", "is in none"))
    assert [what for _, what in said(twice, none)] == ["is in two param groups", "is in none"]


def test_numbers_positions_and_checksums_make_no_other_cause():
    differ = [
        Problem(Code.COPIES_DIFFER, f"[{n}:9, 0:{n}]: copies differ (2d0{n}384e): {20 - n}.5", 1, f"w{n}", ranks=(1,))
        for n in range(40)
    ]
    assert [where for where, _ in said(*differ)] == ["rank 1, w0 and 39 other tensors"]
    assert causes_of(differ)[0].remedy.startswith("copy the file of rank 1 again from where it was saved")


def test_two_swapped_files_are_one_suspicion():
    named = [
        Problem(Code.NAME_CONTRADICTS, f"rank{a}.pt holds rank {b}", a, found=b, expected=a)
        for a, b in ((1, 2), (2, 1), (2, 3))
    ]
    assert said(*named[:2])[0][1].endswith("the two files seem to have changed places")
    assert said(named[0], named[2])[0][1].endswith("(and 1 more)")


def test_every_error_and_warning_ends_in_what_to_do():
    assert sorted(kind.code for kind in Code if kind.severity != "note") == sorted(kind.code for kind in REMEDIES)
    assert not any("{files}" in causes_of([Problem(kind, "x", 1)])[0].remedy for kind in REMEDIES)


def test_a_forged_message_stays_on_its_line():
    forged = Problem(Code.STRAY_FILE, "x\nwhole: all is well", 1, "w\x1b[2J")
    assert said(forged) == [("rank 1, w\\x1b[2J", "x\\nwhole: all is well")]


def remedy(*problems: Problem) -> str:
    (cause,) = causes_of(problems)
    return cause.remedy


def differs(name: str, ranked: dict[int, object], code: Code = Code.COPIES_DIFFER) -> Problem:
    found = vote(list(ranked.items()), same_value)
    text = f"differs between ranks ({found.by_rank()})"
    return Problem(code, text, None, f"a.{name}", ranks=found.odd, differing=found.differing(name))


def test_the_way_out_says_what_the_odd_rank_has_and_what_the_others_have():
    odd = remedy(differs("lr", {0: 0.00299334294690462, 1: 0.02, 2: 0.00299334294690462}))
    assert odd == "copy the file of rank 1 again from where it was saved: its lr is 0.02, others have 0.00299334"
    two = remedy(differs("lr", {0: 1, 1: 7, 2: 1, 3: 7, 4: 1}, Code.MIXED_SAVES))
    assert two.endswith("the files of ranks 1, 3 again from where they were saved: their lr is 7, others have 1")


def test_without_a_majority_the_way_out_blames_no_rank():
    both = "lr is 0.003 (rank 0) or 0.02 (rank 1)"
    assert remedy(differs("lr", {0: 0.003, 1: 0.02})) == f"find out which is right: {both}"
    step = remedy(differs("batch", {0: 3, 1: 3, 2: 7, 3: 7}, Code.MIXED_SAVES))
    assert step == "put the files of one save together: batch is 3 (ranks 0, 1) or 7 (ranks 2, 3)"


def test_a_rank_is_not_blamed_for_what_another_has():
    lr, decay = differs("lr", {0: 1, 1: 2, 2: 1, 3: 1}), differs("decay", {0: 1, 1: 1, 2: 3, 3: 1})
    assert "decay" not in remedy(lr)
    assert ": lr is 2 (rank 1) or 1 (others); decay is 3 (rank 2) or 1 (others)" in remedy(lr, decay)


def test_values_of_more_ranks_than_fit_are_counted():
    text = remedy(differs("seed", {rank: rank for rank in range(1000)}))
    assert "2 (rank 2) or 3 (rank 3) or other values (996 more ranks)" in text


def test_values_that_are_equal_in_six_digits_are_written_out():
    assert "its lr is 0.10000000000000002, others have 0.1" in remedy(differs("lr", {0: 0.1, 1: 0.1 + 2e-17, 2: 0.1}))


def test_a_long_or_forged_value_stays_on_its_line():
    text = remedy(differs("a\x1b[2J", {0: "{values}\n" * 500, 1: "y", 2: "y"}))
    assert text.isprintable()
    assert len(text) < 250
