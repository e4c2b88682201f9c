"""The line for each subject of a comparison, word for word, from rows made by hand."""

from __future__ import annotations

import pytest

from ckptools.diff.record import Side, TensorDifference, ValueDifference
from ckptools.diff.sides import Contents, SideValue
from ckptools.diff.text import subject_rows
from ckptools.keys.value_digests import Content


def side(states=None, damage=(), subject="rng"):
    made = Contents(Side("a.pt", "a", "one .pt", None, None, ()), damage=damage)
    for stream, of in (states or {}).items():
        contents = {rank: Content(digest, digest, "", None) for rank, digest in of.items()}
        identity = ("rng", "", stream)
        made.values[identity] = SideValue(identity, f"rng {stream}", subject, contents)
    return made


def value(name, subject, verdict, rank=None, a="1", b="2", detail=""):
    return ValueDifference(name, subject, verdict, detail, rank, a, b)


def tensor(name, verdict, change=None):
    row = TensorDifference(name, "weights", verdict, "", None, (2,), (2,), "float32", "float32", "", "")
    return row._replace(change=change)


def lines(values=(), tensors=(), a=None, b=None, complete=False):
    found = subject_rows(tensors, values, a or side(), b or side(), complete)
    return [tuple(row) for row in found]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([(None, "same")], ("same", 1, 0, 0, "torch the same")),
        ([(None, "differs")], ("differs", 0, 1, 0, "torch differs")),
        ([(0, "same"), (1, "same")], ("same", 2, 0, 0, "torch the same on every rank")),
        ([(0, "differs"), (1, "differs")], ("differs", 0, 2, 0, "torch other states on every rank")),
        (
            [(0, "same"), (1, "differs"), (2, "differs"), (None, "differs")],
            ("differs", 1, 3, 0, "torch the same on ranks 0, other states on ranks -1, 1, 2"),
        ),
        (
            [(0, "only in A"), (1, "same")],
            ("differs", 1, 1, 0, "torch only in A on ranks 0, the same on ranks 1"),
        ),
    ],
)
def test_states_of_generators_are_counted_by_rank(verdicts, expected):
    (found,) = lines([value("rng torch", "rng", verdict, rank) for rank, verdict in verdicts])
    assert found == ("rng", *expected)


def test_generators_that_answer_alike_share_a_line():
    rows = [value(f"rng {name}", "rng", "same", rank) for name in ("torch", "cuda") for rank in (0, 1)]
    rows += [value("rng numpy", "rng", "differs")]
    assert lines(rows)[0][-1] == "torch, cuda the same on every rank; numpy differs"


BOTH = "torch: B's rank 0 has that of A's rank 1, B's rank 1 has that of A's rank 0"


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({0: "x", 1: "y"}, {0: "y", 1: "x"}, BOTH),
        ({0: "x", 1: "y"}, {0: "x", 1: "x"}, "torch: B's rank 1 has that of A's rank 0"),
        ({0: "x", 1: "y"}, {0: "x", 1: "y"}, ""),
        ({0: "x", 1: "y"}, {0: "z", 1: "z"}, ""),
        ({0: "x", 1: "x", 2: "y"}, {0: "y", 1: "x", 2: "x"}, ""),  # ranks of A share states
        ({0: "x"}, {0: "y", 1: "x"}, ""),
    ],
)  # fmt: skip
def test_a_state_of_another_rank_is_named_where_states_are_distinct(a, b, said):
    found = lines([value("rng torch", "rng", "differs")], a=side({"torch": a}), b=side({"torch": b}))
    assert found[0][-1] == "; ".join(filter(None, ["torch differs", said]))
    assert "rank" not in lines([value("rng torch", "rng", "differs")], a=side({"torch": a}))[0][-1]


def test_values_that_differ_alike_are_counted_once_and_few_are_shown():
    rows = [value(f"o.{n}.lr", "lr", "differs", a="0.1", b="0.2") for n in range(3)]
    assert lines(rows) == [("lr", "differs", 0, 3, 0, "lr 0.1 → 0.2 (3 times)")]
    rows += [value(f"o.x{n}", "lr", "differs") for n in range(4)] + [value("o.gone", "lr", "only in B")]
    (found,) = lines(rows)
    assert found[-1] == "1 only in B; lr 0.1 → 0.2 (3 times), x0 1 → 2, x1 1 → 2 and 2 more"


def test_values_that_are_the_same_are_shown_where_they_are_two():
    rows = [value(f"o.{n}.lr", "lr", "same", a=text) for n, text in enumerate(("0.1", "0.2", "0.1"))]
    assert lines(rows)[0][-1] == "lr 0.1, lr 0.2"
    assert lines([*rows, value("o.3.lr", "lr", "same", a="0.3")])[0][-1] == "4 values"


def test_long_numbers_are_rounded_unless_that_makes_them_alike():
    rows = [value("o.lr", "lr", "differs", a="0.123456789", b="0.987654321")]
    assert lines(rows)[0][-1] == "lr 0.123457 → 0.987654"
    close = [value("o.lr", "lr", "differs", a="0.1234567891", b="0.1234567892")]
    assert lines(close)[0][-1] == "lr 0.1234567891 → 0.1234567892"
    text = [value("o.words", "lr", "differs", a="5 values", b="5 values", detail="first at [3]: 1 → 2")]
    assert lines(text)[0][-1] == "words first at [3]: 1 → 2"


def test_tensors_are_counted_by_verdict_and_the_largest_change_is_named():
    rows = [
        tensor("a", "differs", 0.5),
        tensor("b", "differs", 0.25),
        tensor("c", "same", 0.75),
        tensor("d", "only in A"),
    ]
    text = "4 tensors: 2 differ, 1 the same, 1 only in A; |dW|/|W| up to 5.0e-01 (a)"
    assert lines(tensors=rows) == [("weights", "differs", 1, 3, 0, text)]
    assert lines(tensors=rows[2:3])[0] == ("weights", "same", 1, 0, 0, "1 tensor the same")
    mixed = [tensor("a", "same checksum"), tensor("b", "within tolerance"), tensor("c", "cannot be compared")]
    assert lines(tensors=mixed)[0][1] == "cannot be compared"
    assert lines(tensors=mixed[:2])[0][1] == "same checksum"


def test_what_a_training_needs_and_neither_side_has_is_said_where_all_keys_are_compared():
    assert lines() == []
    needed = ["weights", "moments", "optimizer steps", "lr", "scheduler", "rng", "data position"]
    assert lines(complete=True) == [(subject, "in neither", 0, 0, 0, "") for subject in needed]


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (("x",), (), "A: x (verify)"),
        ((), ("y",), "B: y (verify)"),
        (("x",), ("y",), "A: x and 1 more (verify)"),
        (("x", "z"), ("y",), "A: x and 2 more (verify)"),
    ],
)
def test_damage_of_either_side_is_a_line_of_its_own(a, b, said):
    assert lines(a=side(damage=a), b=side(damage=b)) == [("files", "cannot be compared", 0, len(a) + len(b), 0, said)]
