"""What `diff` found, as text."""

from __future__ import annotations

from typing import Any

import pytest

from ckptools.diff.compare import Wanted, compare
from ckptools.diff.record import NOT_FINITE, TensorDifference, most_changed
from ckptools.diff.text import _of_tensors, change_words, fill_difference
from ckptools.display.page import MOST_LINES, ScreenPage, page_text
from ckptools.display.record_json import answer_json, json_lines
from ckptools.display.screen import PIPE, Screen
from ckptools.text import encodable
from tests.display.made import ESCAPE, alone, broken_run7, checkpoint, hostile, plain, run7, snapshot

PAIRS = [(run7, broken_run7), (alone, run7), (snapshot, run7), (hostile, hostile), (hostile, snapshot)]


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(one.__name__ for one in pair))
def found(request):
    a, b = (make() for make in request.param)
    return compare(a, b, Wanted())


def shown(found, screen=PIPE):
    return page_text(found, screen)


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_screen_and_nothing_is_lost_in_a_pipe(found, width):
    assert max(map(len, shown(found, Screen(width, 40)).splitlines())) <= width
    piped = shown(found)
    assert "..." not in piped.replace(" ... ", "") and " more; all of them" not in piped


def test_the_tables_below_the_subjects_are_short_on_a_terminal(found):
    lines = shown(found, Screen(200, 40)).splitlines()
    assert len(lines) <= 2 * MOST_LINES + len(found.subjects) + len(found.notes) + 14
    assert len(shown(found).splitlines()) >= len(lines) - 14


def test_of_rows_with_many_lines_each_a_few_are_shown_and_the_others_are_counted():
    long = [f"{'layer' * 20}-{n}-{'weight' * 20}" for n in range(6)]
    a, b = ({name: plain(2, n, record=name) for name in long} for n in (2, 3))
    found = compare(checkpoint(a), checkpoint(b), Wanted())
    assert "3 more; all of them when piped, as in | less" in shown(found, Screen(40, 40)).splitlines()


def test_a_limit_is_one_of_rows_each_of_which_counts_all_its_keys():
    a, b = ({"steps": {f"{n}.step": step for n in range(5)}, "rate": 1 / step} for step in (2, 4))
    found = compare(checkpoint(a), checkpoint(b), Wanted())
    page = ScreenPage()
    fill_difference(page, found, found.tensors, limit=1)
    shown = page.text()
    assert "6 values differ; 5 shown" in shown and "steps.0.step     5  2 → 4" in shown and "\nrate" not in shown


def test_names_from_files_are_printable(found):
    for text in (shown(found), shown(found, Screen(80, 40))):
        assert all(line.isprintable() for line in text.splitlines())
    assert ESCAPE not in answer_json("diff", found) and all("\n" not in line for line in json_lines(found.rows))


def test_a_forged_line_is_no_line_of_its_own():
    text = shown(compare(hostile(), snapshot(), Wanted()))
    assert not any(line.startswith("whole: all") for line in text.splitlines())


def changed(name: str, by: float, dtype: str = "float32", **facts: Any) -> TensorDifference:
    row = TensorDifference(name, "weights", "differs", change=by, dtype_a=dtype, shape_a=(2,), shape_b=(2,))
    return row._replace(**facts)


def test_what_changed_most_comes_first_and_counters_last():
    rows = [
        changed("seen", 9.0, "int64"), changed("a", 0.1), changed("b", 0.5), changed("nan", 0.0, detail=NOT_FINITE),
        changed("shape", 0.0, shape_b=(3,)), changed("gone", 0.0, verdict="only in A"),
    ]  # fmt: skip
    assert [row.name for row in most_changed(rows)] == ["shape", "gone", "nan", "b", "a", "seen"]


def test_the_line_of_a_subject_names_no_counter_where_a_weight_changed():
    rows = [changed("seen", 9.0, "int64"), changed("b", 0.1), changed("a", 0.2), changed("nan", 0.0, detail=NOT_FINITE)]
    assert list(_of_tensors(rows)) == ["4 tensors differ", "|dW|/|W| up to 2.0e-01 (a), without integers"]
    assert list(_of_tensors(rows[:1])) == ["1 tensor differ", "|dW|/|W| up to 9.0e+00 (seen)"]


def test_a_change_is_an_arrow_with_six_digits_as_long_as_they_differ():
    assert change_words("0.0029970400926424075", "0.002988172051971717") == "0.00299704 → 0.00298817"
    assert change_words("0.12345678", "0.12345679") == "0.12345678 → 0.12345679"
    assert change_words(None, "5") == "- → 5"
    assert encodable("10 → 20", "ascii") == "10 -> 20" and encodable("10 → 20", "utf-8") == "10 → 20"
