"""Tables that fit a screen and lose nothing that tells rows apart."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ckptools.display.screen import SGR, Screen
from ckptools.display.tables import Column, broken, table

NAME, TEXT, NUMBER = Column("tensor", "name"), Column("what is wrong"), Column("bytes", "number")
WORDS = st.text("abc .", min_size=1, max_size=200).filter(lambda text: text == text.strip())


def test_a_name_that_is_longer_than_its_column_goes_on_below_behind_a_dot():
    rows = [[f"blocks.{n}.attention.projection.weight", str(n)] for n in range(2)]
    shown = [line.split() for line in table([NAME, NUMBER], rows, Screen(40))[2:]]
    begins = [[f"blocks.{n}.attention.projection.", str(n)] for n in range(2)]
    assert shown == [begins[0], ["weight"], begins[1], ["weight"]]


WORD = st.text("abcdefgh", min_size=1, max_size=12)
NAMES = st.lists(WORD, min_size=1, max_size=8).map(".".join)
SENTENCES = st.lists(WORD, min_size=1, max_size=12).map(" ".join)


@given(st.lists(st.tuples(NAMES, SENTENCES), min_size=2, max_size=2), st.integers(44, 90))
def test_no_word_is_broken_and_each_name_can_be_put_together_again(rows, width):
    lines = table([NAME, Column("text"), NUMBER], [[*row, "1"] for row in rows], Screen(width))
    assert max(map(len, lines)) <= width
    second = lines[1].index(" -") + 1
    names, texts = list[str](), list[list[str]]()
    for line in lines[2:]:
        *words, number = line[second:].split() or [""]
        if number == "1":  # a row begins
            names.append("")
            texts.append([])
        names[-1] += line[:second].strip()
        texts[-1] += words if number == "1" else filter(None, [*words, number])
    assert names == [name for name, _ in rows]
    assert texts == [text.split() for _, text in rows]


def test_a_word_of_a_name_is_broken_only_if_it_is_wider_than_the_line():
    pieces = ["model.a_very_long_", "word_between_two_", "dots.weight"]
    assert broken("".join(pieces), 20) == pieces
    assert broken("x" * 30, 20) == ["x" * 20, "x" * 10]


def test_a_file_that_all_rows_share_is_said_above_a_table_that_does_not_fit():
    columns, rows = (NUMBER, Column("file", "place")), [["1", "model.safetensors"]] * 2
    assert table(columns, rows, Screen(30))[0].split() == ["bytes", "file"]
    assert table(columns, rows, Screen(20))[:2] == ["in every row: file", "model.safetensors"]


def test_what_is_not_finite_is_red_and_so_are_faults_that_are_counted():
    columns = (NAME, NUMBER, Column("A -> B", "value"), Column("non-finite", "faults"))
    rows = [["inf", "-inf", "0.5 -> nan", "3 NaN"], ["nan", "1", "'nan' -> 'inf'", "0"]]
    red = re.compile(rf"\x1b\[{re.escape(SGR['bad'])}m(.*?)\x1b\[0m")
    first, second = table(columns, rows, Screen(color=True))[2:]
    assert red.findall(first) == ["-inf", "nan", "3 NaN"] and red.findall(second) == []


@given(st.lists(st.tuples(WORDS, st.integers(0, 10**9).map(str)), min_size=1, max_size=2), st.integers(40, 120))
def test_a_text_is_never_cut_and_the_table_fits(rows, width):
    lines = table([TEXT, NUMBER], rows, Screen(width))
    assert max(map(len, lines)) <= width
    words = "".join(text for text, _ in rows) + "".join(number for _, number in rows)
    shown = "".join("".join(line.split()) for line in lines[2:])
    assert sorted(shown) == sorted(words.replace(" ", ""))


@given(st.lists(WORDS, min_size=2, max_size=8, unique=True), st.integers(20, 60))
def test_no_name_is_cut(names, width):
    lines = table([NAME], [[name] for name in names[:2]], Screen(width))[2:]
    shown = "".join("".join(line.split()) for line in lines)
    assert shown == "".join("".join(name.split()) for name in names[:2])


ROWS = [[f"model.layers.{n}.weight", "fp32", str(n)] for n in range(4)]
COLUMNS = (NAME, Column("dtype"), NUMBER)


def test_what_all_rows_of_a_screen_have_in_common_is_said_once():
    first, titles, _, *rows = table(COLUMNS, ROWS, Screen(70))
    assert first == "each tensor begins with model.layers.; in every row: dtype fp32"
    assert titles.split() == ["tensor", "bytes"]
    assert [row.split()[0] for row in rows] == [f"{n}.weight" for n in range(4)]
    assert table(COLUMNS, ROWS)[2].split() == ["model.layers.0.weight", "fp32", "0"]


def test_a_verdict_stands_in_each_row_and_two_rows_have_nothing_in_common():
    columns = (NAME, Column("result", "verdict"))
    assert table(columns, [[name, "ok"] for name, _, _ in ROWS], Screen(60))[1].split() == ["tensor", "result"]
    assert table(COLUMNS, ROWS[:2], Screen(60))[0].split() == ["tensor", "dtype", "bytes"]


def test_rows_that_are_all_the_same_stay_rows():
    lines = table([Column("kind"), Column("files", "number")], [["cut", "1"]] * 3, Screen(80, 40))
    assert lines == ["in every row: files 1", "kind", "----", "cut", "cut", "cut"]


def test_a_prefix_leaves_something_of_each_name():
    rows = [["model.layers."], ["model.layers.a"], ["model.layers.b"]]
    assert table([NAME], rows, Screen(60))[0] == "each tensor begins with model."


def test_a_name_that_is_longer_than_its_column_goes_on_behind_a_dot():
    assert broken("the name is metadata.composer_env_info.composer_version", 34) == [
        "the name is metadata.", "composer_env_info.composer_version",
    ]  # fmt: skip


def test_only_verdicts_have_the_colours_of_good_and_bad_and_only_where_there_is_colour():
    columns = (NAME, Column("result", "verdict"), Column("what"), Column("time", "provenance"))
    rows = [["FAIL", "FAIL", "FAIL", "now"], ["ok", "ok", "ok", "now"]]
    plain, colored = table(columns, rows), table(columns, rows, Screen(color=True))
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in colored] == plain
    assert colored[2].count("\x1b[1;31m") == 1 and colored[3].count("\x1b[32m") == 1
    assert "\x1b[2mnow\x1b[0m" in colored[2] and "\x1b[1mresult\x1b[0m" in colored[0]
