"""Whose file a file is, by hand-made claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptools
from ckptools.model.problems import Problem
from ckptools.rules.files import FileClaims, beyond, misplaced, missing, twice


def of_rank(named: int, held: int | None = None, part: str = "") -> FileClaims:
    """The file `rankN.pt`, which holds another rank if `held` is given."""
    stated = {} if held is None else {"rank": held}
    return FileClaims(Path(f"{part}rank{named}.pt"), named, {"rank": named, "part": part}, stated)


def saved_as(name: str, other: str = "") -> FileClaims:
    stated = {"file": other} if other else {}
    return FileClaims(Path(name), None, {"file": name}, stated, verb="was saved as")


def told(*problems: Problem) -> list[tuple[str, int | None, str]]:
    return [(p.code, p.rank, p.message) for p in problems]


def test_a_missing_file_is_told_with_what_says_so_and_what_it_holds():
    problem = missing("a.pt", 3, more=", which `latest` names", contents="; it holds w")
    assert told(problem) == [("CK001", 3, "no file a.pt, which `latest` names; it holds w")]
    assert (problem.fact, problem.files, problem.severity) == ("no file a.pt, which `latest` names", ("a.pt",), "error")


def test_several_files_are_told_at_once_and_what_has_no_name_is_no_file():
    assert (p := missing(["a", "b"], kind="folder")).message == "no folder a, b" and p.files == ("a", "b")
    assert (p := missing("optimizer", kind="")).message == "no optimizer" and p.files == ()


def test_a_file_beyond_the_size_of_an_axis_is_told_once():
    rows = [FileClaims(Path(f"{tp}-{pp}"), tp, {"stage": pp, "slice": tp}) for tp, pp in ((0, 0), (2, 2), (0, 1))]
    found = list(beyond(rows, {"slice": 2, "stage": 2}, " (args)"))
    assert told(*found) == [("CK009", 2, "2-2 is slice 2, and the save has 2 (args)")]
    assert [p.files for p in found] == [("2-2",)]


def test_two_files_of_one_place_are_told_and_those_of_two_parts_are_not():
    rows = [of_rank(0), of_rank(1), of_rank(1, part="optim"), of_rank(1)]
    assert [p[:2] for p in told(*twice(rows))] == [("CK009", 1)]


def test_a_copy_is_the_problem_of_the_rank_whose_file_was_overwritten():
    (found,) = twice([of_rank(0, 0), of_rank(1, 1), of_rank(2, 0)])
    assert (found.rank, found.files) == (2, ("rank0.pt", "rank2.pt"))


@pytest.mark.parametrize(
    ("by_content", "code", "more"),
    [(False, "CK009", ", and rank{}.pt is here too: swapped with it"), (True, "CK022", "; the content is believed")],
)
def test_swapped_files_state_what_the_other_should(by_content, code, more):
    found = list(misplaced([of_rank(0, 1), of_rank(1, 0), of_rank(2, 2)], by_content=by_content))
    assert told(*found) == [
        (code, 0, f"rank0.pt holds rank 1{more.format(1)}"),
        (code, 1, f"rank1.pt holds rank 0{more.format(0)}"),
    ]
    assert [(p.found, p.expected) for p in found] == [(1, 0), (0, 1)]


@pytest.mark.parametrize(("by_content", "code"), [(False, "CK009"), (True, "CK010")])
def test_a_copy_of_a_file_that_states_its_own_place_is_told_to_be_one(by_content, code):
    (found,) = misplaced([of_rank(0, 0), of_rank(1, 0)], by_content=by_content)
    assert (found.code, found.rank) == (code, 1)
    assert found.message.endswith("believed" if by_content else "rank0.pt is here too: a copy of it")


@pytest.mark.parametrize(("by_content", "code"), [(False, "CK009"), (True, "CK022")])
def test_a_file_of_a_place_that_has_no_other_is_told_alone(by_content, code):
    (found,) = misplaced([of_rank(0, 0), of_rank(1, 3)], by_content=by_content)
    assert (found.code, found.rank, found.message.partition(";")[0]) == (code, 1, "rank1.pt holds rank 3")


def test_what_the_content_does_not_state_is_as_in_the_name():
    rows = [FileClaims(Path(f"{s}{t}"), None, {"stage": s, "slice": t}) for s in (0, 1) for t in (0, 1)]
    rows[3] = rows[3]._replace(inside={"slice": 0}, by="args.rank 2")
    assert [p.message for p in misplaced(rows)] == [
        "11 holds slice 0 (args.rank 2), and 10 is here too: swapped with it, or a copy of it"
    ]


def test_a_claim_that_a_renamed_file_makes_is_an_error_only_if_the_file_of_that_name_is_here():
    names = [saved_as("a0", "a1"), saved_as("a1"), saved_as("a2", "a7")]
    assert [(p.code, p.files) for p in misplaced(names, sure=False)] == [("CK009", ("a0",)), ("CK010", ("a2",))]
    assert [p.code for p in misplaced(names, by_content=True, sure=False)] == ["CK010", "CK010"]
    assert list(misplaced(names[:1], sure=False)) == []


def test_names_that_changed_in_a_circle_are_those_of_other_ranks_where_the_content_places_tensors():
    names = [saved_as("a0", "a1"), saved_as("a1", "a2"), saved_as("a2", "a0")]
    assert {p.code for p in misplaced(names, by_content=True, sure=False)} == {"CK022"}


def test_no_format_decides_it_by_itself():
    folder = Path(ckptools.__file__).parent
    decided = re.compile(r"Problem\(\s*Code\.(FILE_MISSING|STRAY_FILE|NAMED_AS_ANOTHER_RANK)\b")
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if decided.search(path.read_text())}
    # Files that hold equal bytes are found among tensors.
    assert here - {"tensor_io/copies.py"} == {"rules/files.py"}
