"""The rows of plain values and param groups, from sides made by hand: whole rows, rank by rank."""

from __future__ import annotations

import pytest

from ckptools.diff.plain_values import KEYS, compared, first_unlike, group_rows, numbered, texts_of, value_rows
from ckptools.diff.record import Side
from ckptools.diff.sides import Contents, SideGroup, SideValue
from ckptools.keys.entries import LONG
from ckptools.keys.value_digests import Content
from ckptools.model.tree import NumpyArray


def content(text, problem=""):
    return Content(text and f"digest of {text}", text, problem)


def side(lost=(), groups=()):
    return Contents(Side("a.pt", "a", "one .pt", None, None, ()), lost_ranks=tuple(lost), groups=list(groups))


def value(of, number=False, identity=("other", "x", "k")):
    return SideValue(identity, "x.k", "other values", {rank: content(text) for rank, text in of.items()}, number)


def rows(left, right, a=None, b=None):
    found = value_rows(left, right, a or side(), b or side())
    return [(r.verdict, r.detail, r.rank, r.value_a, r.value_b) for r in found]


def test_a_value_of_one_side_is_one_row_where_its_ranks_share_it():
    assert rows(value({None: "5"}), None) == [("only in A", "", None, "5", None)]
    assert rows(None, value({0: "5", 1: "5"})) == [("only in B", "", None, None, "5")]
    assert rows(value({3: "5"}), None) == [("only in A", "", 3, "5", None)]
    assert rows(value({0: "5", 1: "6"}), None) == [("only in A", "", 0, "5", None), ("only in A", "", 1, "6", None)]


def test_values_are_compared_once_or_rank_by_rank():
    assert rows(value({0: "5", 1: "5"}), value({None: "5"})) == [("same", "", None, "5", "5")]
    assert rows(value({None: "5"}), value({None: "6"})) == [("differs", "", None, "5", "6")]
    assert rows(value({0: "5", 1: "6"}), value({0: "5", 1: "7", 2: "8"})) == [
        ("same", "", 0, "5", "5"),
        ("differs", "", 1, "6", "7"),
        ("only in B", "", 2, None, "8"),
    ]
    why = "A has one for all ranks, B has one for each of 2 ranks"
    texts = "one for all ranks", "one for each of 2 ranks"
    assert rows(value({None: "5"}), value({0: "5", 1: "6"})) == [("cannot be compared", why, None, *texts)]


def test_a_rank_whose_file_is_lost_leaves_open_whether_it_had_the_value():
    both = value({0: "5", 1: "5"}), value({0: "5"})
    why = "B: the file of rank 1 is not here, or damaged"
    assert rows(*both) == [("same", "", None, "5", "5")]
    assert rows(*both, b=side(lost=[1])) == [("same", "", 0, "5", "5"), ("cannot be compared", why, 1, "5", None)]
    assert rows(*both[::-1], a=side(lost=[1]))[1] == ("cannot be compared", why.replace("B:", "A:"), 1, None, "5")
    assert rows(*both, b=side(lost=[0, 2])) == [("same", "", None, "5", "5")]
    assert rows(value({1: "5"}), None, b=side(lost=[1])) == [("cannot be compared", why, 1, "5", None)]


def test_a_value_that_has_only_a_number_is_never_called_the_same():
    for numbers in ((True, False), (False, True)):
        left, right = (value({None: "5"}, number) for number in numbers)
        assert rows(left, right) == [("cannot be compared", numbered(), None, "5", "5")]
    assert rows(value({None: "5"}), value({None: "5"}, identity=("other", "x", "'k'")))[0][:2] == ("differs", KEYS)


def test_contents_are_unknown_where_one_cannot_be_read():
    bad = content("unknown", "is cut")
    assert compared(bad, content("5")) == ("cannot be compared", "A: is cut")
    assert compared(content("5"), bad) == ("cannot be compared", "B: is cut")
    assert compared(bad, bad) == ("cannot be compared", "A: is cut; B: is cut")
    assert compared(Content("1", "x"), Content("2", "x")) == ("differs", "")
    assert texts_of(Content("1", "x"), Content("2", "x")) == ("x (1)", "x (2)")


# -- param groups -----------------------------------------------------------------------------------------------------


def group(number, params, section="o", **settings):
    return SideGroup(section, number, tuple(params), {key: content(str(v)) for key, v in settings.items()})


def of_groups(left, right, sections=("o",)):
    found = group_rows(side(groups=left), side(groups=right), sections)
    return [(r.name, r.subject, r.verdict, r.detail, r.value_a, r.value_b) for r in found]


def test_groups_of_one_side_are_listed_with_their_settings():
    one = [group(0, "ab", lr=1, eps=2)]
    here = [("o.param_groups.0.lr", "lr", "only in A", "", "1", None)]
    here += [("o.param_groups.0.eps", "hyperparameters", "only in A", "", "2", None)]
    assert of_groups(one, []) == here
    assert of_groups([], one) == [(n, s, "only in B", "", None, a) for n, s, _, _, a, _ in here]
    assert of_groups(one, one, sections=("p",)) == of_groups([], []) == []


def test_groups_are_matched_by_their_parameters():
    left, right = [group(0, "ab", lr=1), group(1, "c", lr=2)], [group(0, "c", lr=2), group(1, "abd", lr=3)]
    assert of_groups(left, right) == [
        ("o.param_groups.0.lr", "lr", "differs", "", "1", "3"),
        ("o.param_groups.1.lr", "lr", "same", "", "2", "2"),
        ("o.param_groups.1.params", "hyperparameters", "only in B", "d", None, "1 parameter"),
    ]
    assert of_groups([group(0, "abcde", lr=1)], [group(0, "a", lr=1)]) == [
        ("o.param_groups.0.lr", "lr", "same", "", "1", "1"),
        ("o.param_groups.0.params", "hyperparameters", "only in A", "b, c, d and 1 more", "4 parameters", None),
    ]


def test_one_group_against_several_names_all_their_values():
    several = [group(0, "a", lr=1), group(1, "bc", lr=2), group(2, "d")]
    text = "1 (1 parameter), 2 (2 parameters), none (1 parameter)"
    assert of_groups([group(0, "abcd", lr=1)], several) == [
        ("o.param_groups.0.lr", "lr", "differs", "one value in A, several in B", "1", text)
    ]


@pytest.mark.parametrize("numbered", ["A", "B"])
def test_groups_whose_names_are_not_known_are_matched_by_place(numbered):
    left, right = [group(0, "ab", lr=1)], [group(0, ["?0", "?1"], lr=1, eps=3), group(1, ["?2"], lr=4)]
    left, right = (right, left) if numbered == "A" else (left, right)
    found = of_groups(left, right)
    only = f"only in {numbered}"
    assert [(name.removeprefix("o.param_groups."), verdict) for name, _, verdict, *_ in found] == [
        ("0.lr", "same"),
        ("0.eps", only),
        ("0.params", "cannot be compared"),
        ("1.lr", only),
    ]
    lengths = of_groups([group(0, "ab")], [group(0, ["?0"])])
    assert lengths[0][2:] == ("differs", "another number of parameters", "2 parameters", "1 parameter")


# -- where first ------------------------------------------------------------------------------------------------------


def array(dtype, shape, data, fortran=False):
    return NumpyArray(dtype, shape, fortran, bytes(data))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([0] * LONG, [1] * LONG, ""),  # short enough to be shown
        ([0] * (LONG + 1), [0] * LONG + [7], f"first at [{LONG}]: 0 → 7"),
        ([0] * (LONG + 1), [0] * LONG, f"the first {LONG} are the same; A has {LONG + 1}, B {LONG}"),
        ([0] * (LONG + 2), [5] + [0] * LONG, "first at [0]: 0 → 5"),
        ([[1, 2]] * (LONG + 1), [[1, 2]] * LONG + [[1, 3]], f"first at [{LONG}, 1]: 2 → 3"),
        ([0] * (LONG + 1), [0] * (LONG + 1), ""),
        (array("<i2", (2, 1), [1, 0, 3, 0]), array("<i2", (2, 1), [1, 0, 9, 0]), "first at [1, 0]: 3 → 9"),
        (array(">i2", (3,), [0, 1, 0, 2, 0, 3]), array(">i2", (3,), [0, 1, 0, 2, 0, 4]), "first at [2]: 3 → 4"),
        (array("|u1", (2,), [1, 2]), array("|u1", (2,), [1, 2]), ""),
        (array("|u1", (2,), [1, 2]), array("|u1", (2, 1), [1, 3]), ""),
        (array("|u1", (2,), [1, 2]), array("|i1", (2,), [1, 3]), ""),
        (array("|u1", (2, 1), [1, 2], True), array("|u1", (2, 1), [1, 3], True), "first at [1, 0]: 2 → 3"),
        (array("|u1", (3,), [1, 2]), array("|u1", (3,), [1, 3]), ""),
        (array("|V1", (2,), [1, 2]), array("|V1", (2,), [1, 3]), r"first at [1]: b'\x02' → b'\x03'"),
    ],
)  # fmt: skip
def test_the_first_place_that_differs_is_named(a, b, said):
    found = first_unlike(a, b)
    assert found.endswith(said) and bool(found) is bool(said)
