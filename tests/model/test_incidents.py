"""Problems are grouped by who is to blame: each culprit once, with evidence and the next step; what follows, apart."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.model.incidents import causes_of, consequences_of, incidents_of, problems_by_cause, without_consequences
from ckptools.model.problems import REMEDIES, Code, Problem
from ckptools.model.rank_vote import same_value, vote
from ckptools.model.verdict import Verdict
from tests.display.made import missing


def gaps(*ranks: int | None) -> list[Problem]:
    return [Problem(Code.TENSOR_GAP, f"gap [{n}:9]", rank, f"w{n}") for n, rank in enumerate(ranks)]


def said(*problems: Problem) -> list[tuple[str, str]]:
    return [(cause.where, cause.what) for cause in causes_of(problems)]


def blamed(*problems: Problem) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.culprit, tuple(cause.code for cause in one.causes)) for one in incidents_of(causes_of(problems))]


def test_63_missing_ranks_are_one_incident():
    contents = {n: f", which holds w{n}.step and {n} more" for n in range(1, 64)}
    lost = [
        Problem(Code.FILE_MISSING, f"no file __{n}_0.distcp{contents[n]}", n, contents=contents[n]) for n in contents
    ]
    assert said(*lost) == [("ranks 1..63", "no file __1_0.distcp (and 62 more)")]
    assert blamed(*lost) == [("ranks 1..63", ("CK001",))]
    assert causes_of(lost)[0].remedy.startswith("put the other 63 rank files beside what is here;")


def test_all_that_one_rank_is_to_blame_for_is_one_incident_with_the_next_step_of_the_worst():
    other = [
        Problem(Code.COPIES_DIFFER, "copies differ", 3, "w"),
        Problem(Code.MIXED_SAVES, "lists other RNG states", 3, "rng"),
        Problem(Code.LAYOUT_DISAGREES, "another layout", ranks=(3,)),
    ]
    found = [*other, *missing(2)]
    assert blamed(*found) == [("rank 2", ("CK001",)), ("rank 3", ("CK006", "CK104", "CK105"))]
    (first, second) = incidents_of(causes_of(found))
    assert (first.text, second.text) == ("rank 2 missing", "rank 3 of another save")
    assert second.remedy == "put the files of one save together: copy the file again from where it was saved"


def test_ranks_are_one_culprit_only_with_the_same_kinds_of_problems():
    kinds = {1: [Code.FILE_CUT], 2: [Code.MIXED_SAVES, Code.COPIES_DIFFER], 3: [Code.MIXED_SAVES], 4: [Code.FILE_CUT]}
    found = [Problem(kind, "x", rank, "w") for rank, several in kinds.items() for kind in several]
    assert blamed(*found) == [("ranks 1, 4", ("CK002",)), ("rank 2", ("CK006", "CK105")), ("rank 3", ("CK006",))]


def test_the_causes_of_several_lost_ranks_are_the_worst_first():
    doubt = Problem(Code.NAME_CONTRADICTS, "holds another", 1)
    found = [*missing(1, 2), doubt, Problem(Code.STRAY_FILE, "is a copy", 2)]
    assert blamed(*found) == [("ranks 1, 2", ("CK001", "CK009", "CK010"))]


def test_files_of_no_rank_are_culprits_by_name():
    found = [Problem(Code.FILE_CUT, f"{name} is cut", files=(name,)) for name in ("a.pt", "b.pt")]
    found += [Problem(Code.STRAY_FILE, "holds another", files=("a.pt",))]
    assert blamed(*found) == [("a.pt", ("CK002", "CK009")), ("b.pt", ("CK002",))]
    assert [one.text for one in incidents_of(causes_of(found[:2]))] == ["a.pt and 1 more cut short or damaged"]


def test_values_blame_no_rank_and_are_incidents_by_code():
    found = [Problem(Code.NOT_FINITE, "1 NaN", rank, f"w{rank}") for rank in (0, 1)]
    found += [Problem(Code.STEPS_DISAGREE, "counts 3 steps", 1, "w"), *missing(1)]
    assert blamed(*found) == [("rank 1", ("CK001",)), ("", ("CK201",)), ("", ("CK204",))]


def test_evidence_names_the_ranks_that_the_culprit_does_not():
    (nan,) = causes_of([Problem(Code.NOT_FINITE, "1 NaN", 1, "w")])
    assert (nan.culprit, nan.evidence) == ("", "rank 1, w: 1 NaN")
    lost = [*missing(1, 2), Problem(Code.MODEL_PART_MISSING, "no stage", 2)]
    assert [cause.evidence for cause in causes_of(lost)][1] == "rank 2: no stage"
    assert [cause.evidence for cause in causes_of(missing(1))] == ["no file ep0-ba12000-rank1.pt"]


def test_of_two_copies_that_differ_the_rank_of_another_save_is_to_blame():
    copies = differs("w", {1: 0.5, 2: 0.25})
    assert blamed(copies) == [("", ("CK105",))]
    assert blamed(copies, Problem(Code.MIXED_SAVES, "x", 2)) == [("rank 2", ("CK006", "CK105"))]
    both = [Problem(Code.MIXED_SAVES, "x", rank) for rank in (1, 2)]
    assert blamed(copies, *both) == [("ranks 1, 2", ("CK006",)), ("", ("CK105",))]


def test_a_rank_of_another_save_is_named_with_a_counter_of_steps_where_one_differs():
    found = [differs(name, {0: 6, 1: 6, 2: 3}, Code.MIXED_SAVES) for name in ("last_epoch", "batch")]
    assert causes_of(found)[0].text == "rank 2 of another save (batch 3, others 6)"
    assert causes_of(found[:1])[0].text == "rank 2 of another save (last_epoch 3, others 6)"
    long = differs("x" * 40, {0: 6, 1: 6, 2: 3}, Code.MIXED_SAVES)
    assert causes_of([long])[0].text == "rank 2 of another save"


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


def test_problems_of_one_code_are_one_cause_whatever_their_words():
    twice, none = (Problem(Code.PARAM_GROUPS, text, None, name) for text, name in (("in two", "v"), ("in none", "w")))
    assert said(twice, none) == [("v and 1 other tensor", "in two")]


def test_each_note_has_its_own_words():
    notes = [Problem(Code.NOT_READ, text) for text in ("a is not read", "b is not read", "a is not read")]
    assert [cause.what for cause in causes_of(notes, ("note",))] == ["a is not read", "b is not read"]


def test_numbers_positions_and_checksums_make_no_other_cause():
    differ = [
        Problem(Code.COPIES_DIFFER, f"[{n}:9, 0:{n}]: copies differ (2d0{n}384e): {20 - n}.5", 1, f"w{n}", ranks=(1,))
        for n in range(40)
    ]
    assert [where for where, _ in said(*differ)] == ["rank 1, w0 and 39 other tensors"]
    assert causes_of(differ)[0].remedy.startswith("copy the file again from where it was saved")


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


def what(*problems: Problem) -> str:
    (cause,) = causes_of(problems)
    return cause.what


def test_the_evidence_says_what_the_odd_rank_has_and_what_the_others_have():
    odd = differs("lr", {0: 0.003, 1: 0.02, 2: 0.003})
    assert what(odd) == "differs between ranks (rank 1: 0.02, others: 0.003)"
    assert remedy(odd) == "copy the file again from where it was saved"
    two = differs("lr", {0: 1, 1: 7, 2: 1, 3: 7, 4: 1}, Code.MIXED_SAVES)
    assert (what(two), said(two)[0][0]) == (
        "differs between ranks (ranks 1, 3: 7, others: 1)",
        "ranks 1, 3, a.lr",
    )


def test_without_a_majority_no_rank_is_blamed():
    assert remedy(differs("lr", {0: 0.003, 1: 0.02})) == "find out which is right"
    step = differs("batch", {0: 3, 1: 3, 2: 7, 3: 7}, Code.MIXED_SAVES)
    assert (blamed(step), remedy(step)) == ([("", ("CK006",))], "put the files of one save together")
    assert causes_of([step])[0].text == "files of different steps or saves (batch 3 or 7)"


def test_a_rank_is_not_blamed_for_what_another_has():
    lr, decay = differs("lr", {0: 1, 1: 2, 2: 1, 3: 1}), differs("decay", {0: 1, 1: 1, 2: 3, 3: 1})
    evidence = "differs between ranks (rank 1: 2, others: 1)"
    assert said(lr, decay) == [("ranks 1, 2, a.lr and 1 other value", evidence)]


def test_values_that_are_equal_in_six_digits_are_written_out():
    found = differs("batch", {0: 0.1, 1: 0.1 + 2e-17, 2: 0.1}).differing
    assert found is not None and found.few_words == "batch 0.10000000000000002, others 0.1"


names = st.text(st.characters(), max_size=200)
problems = st.builds(
    Problem,
    st.sampled_from(Code),
    names,
    st.none() | st.integers(0, 9),
    st.none() | names,
    st.sampled_from(["error", "warning", "note"]),
    st.lists(names, max_size=4).map(tuple),
    st.lists(st.integers(0, 2000), max_size=4).map(tuple),
)


@given(st.lists(problems, max_size=12))
def test_every_problem_is_in_one_cause_or_follows_from_a_lost_file(found):
    severities = ("error", "warning", "note")
    grouped = [problem for _, own in problems_by_cause(found, severities) for problem in own]
    assert len(grouped) == len(set(grouped)) and set(grouped) == set(without_consequences(found))
    causes = causes_of(found, severities)
    assert Counter(cause for one in incidents_of(causes) for cause in one.causes) == Counter(causes)
    for whole in (True, False, None):
        headline = Verdict(whole, False, False, "structure", "all files", causes_of(found)).headline
        assert len(headline) <= 80 and headline.isprintable()
