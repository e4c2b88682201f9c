"""Tables that fit a screen and lose nothing that tells rows apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptools.display.tables import NARROWEST, Column, Screen, table

NAME, TEXT, NUMBER = Column("tensor", name=True), Column("what is wrong"), Column("bytes", right=True)
WORDS = st.text("abc .", min_size=1, max_size=200).filter(lambda text: text == text.strip())


def test_names_that_stay_distinct_lose_their_middle():
    rows = [[f"blocks.{n}.attention.projection.weight", str(n)] for n in range(2)]
    shown = [line.split() for line in table([NAME, NUMBER], rows, Screen(40))[2:]]
    assert shown == [[f"blocks.{n}.a...on.projection.weight", str(n)] for n in range(2)]


def test_names_that_would_not_stay_distinct_go_on_below():
    rows = [[f"blocks.{n}.attention.projection.weight", "1"] for n in (100, 101)]
    lines = table([NAME, NUMBER], rows, Screen(26))
    assert not any("..." in line for line in lines)
    assert "".join(line.split()[0] for line in lines[2:4]) == rows[0][0].replace(" ", "")


@given(st.lists(st.tuples(WORDS, st.integers(0, 10**9).map(str)), min_size=1, max_size=6), st.integers(40, 120))
def test_a_text_is_never_cut_and_the_table_fits(rows, width):
    lines = table([TEXT, NUMBER], rows, Screen(width))
    assert max(map(len, lines)) <= width
    words = "".join(text for text, _ in rows) + "".join(number for _, number in rows)
    shown = "".join("".join(line.split()) for line in lines[2:])
    assert sorted(shown) == sorted(words.replace(" ", ""))


@given(st.lists(WORDS, min_size=2, max_size=8, unique=True), st.integers(20, 60))
def test_rows_that_differ_look_different(names, width):
    names = list({" ".join(name.split()): name for name in names}.values())
    lines = table([NAME], [[name] for name in names], Screen(width))[2:]
    cut = [line for line in lines if "..." in line]
    assert len(lines) >= len(names) and len(set(cut)) == len(cut)


def test_numbers_are_never_cut():
    lines = table([NAME, NUMBER], [["x" * 50, "123456789012345678901234567890"]], Screen(30))
    assert "123456789012345678901234567890" in "\n".join(lines)
    assert lines[1].index(" ") == NARROWEST


def test_a_cell_that_a_file_made_endless_has_an_end():
    lines = table([TEXT, NUMBER], [["word " * 5000, "1"]], Screen(40))
    assert len(lines) < 20


def test_a_pipe_gets_every_row_on_a_line_of_its_own():
    rows = [["n" * 300, "t" * 300, "1"]] * 50
    assert len(table([NAME, TEXT, NUMBER], rows)) == 52
