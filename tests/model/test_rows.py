"""Rows of an answer."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.model.problems import Code
from ckptools.model.records import Rows, one_line, to_dict


class Row(NamedTuple):
    name: str
    nbytes: int | None


@dataclass(frozen=True)
class Answer:
    path: Path
    rows: Rows[Row]
    codes: tuple[Code, ...] = ()
    _hidden: int = 1


ROWS = Rows([Row("b", 2), Row("a", None), Row("c", 10)])


def test_they_sort_by_a_field_and_those_without_a_value_come_last():
    assert [row.name for row in ROWS.sort("nbytes", reverse=True)] == ["c", "b", "a"]
    assert [row.name for row in ROWS.sort("nbytes")] == ["b", "c", "a"]
    assert [row.name for row in ROWS.sort("name")] == ["a", "b", "c"]


def test_they_are_a_sequence():
    assert (len(ROWS), ROWS[0], ROWS[:1], list(ROWS)[2].nbytes) == (3, Row("b", 2), Rows([Row("b", 2)]), 10)


def test_they_become_plain_dicts():
    assert ROWS[:2].to_dicts() == [{"name": "b", "nbytes": 2}, {"name": "a", "nbytes": None}]


def test_a_record_becomes_a_dict_of_its_public_fields_all_the_way_down():
    answer = Answer(Path("run") / "x.pt", ROWS[:1])
    assert to_dict(answer) == {"path": str(Path("run") / "x.pt"), "rows": [{"name": "b", "nbytes": 2}], "codes": []}


def test_what_is_no_record_is_refused():
    with pytest.raises(TypeError, match="str is no record"):
        to_dict("x")


def test_a_row_says_what_it_is_in_a_line():
    assert (repr(ROWS), repr(Rows())) == ("<3 rows of Row>", "<no rows>")


def test_they_are_a_tuple_and_slices_of_them_are_rows():
    assert (*ROWS, 1)[:2] == ROWS[:2] == (Row("b", 2), Row("a", None)) and isinstance(ROWS[1:], Rows)
    assert pickle.loads(pickle.dumps(ROWS)) == ROWS


@given(st.text(), st.lists(st.text() | st.integers() | st.none() | st.lists(st.integers())))
def test_the_line_of_a_record_is_short_and_printable_whatever_it_holds(name, values):
    line = one_line(Answer(Path(name.replace("\0", "")), Rows(values)))
    assert len(line) <= 120 and line.isprintable() and line[0] + line[-1] == "<>"
