from __future__ import annotations

import pytest

from ckptools import text
from tests.display.made import HOSTILE


@pytest.mark.parametrize("name", HOSTILE)
def test_a_printable_name_cannot_act_on_a_terminal(name):
    shown = text.printable(name)
    assert shown.isprintable()
    assert text.printable(shown) == shown


def test_what_is_harmless_stays_as_it_is():
    assert text.printable("layers[red].w 漢字 é") == "layers[red].w 漢字 é"


@pytest.mark.parametrize(
    ("character", "shown"),
    [("\x1b", "\\x1b"), ("\x9b", "\\x9b"), ("\n", "\\n"), ("\u202e", "\\u202e"), ("\u2028", "\\u2028"),
     ("\ud800", "\\ud800"), ("\U000e0001", "\\U000e0001"), ("\x7f", "\\x7f"), ("\u200b", "\\u200b")],
)  # fmt: skip
def test_an_escape_names_the_character(character, shown):
    assert text.printable(f"a{character}b") == f"a{shown}b"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", None, "no such codec"])
def test_any_stream_can_write_any_name(encoding):
    for name in HOSTILE:
        text.encodable(text.printable(name), encoding).encode("utf-8")
    assert text.encodable("漢", "ascii") == "\\u6f22"
    assert text.encodable("漢", "utf-8") == "漢"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (80438976128, "74.9 GiB"), (1048575, "1.0 MiB")],
)
def test_bytes_are_in_iec_units(nbytes, shown):
    assert text.size(nbytes) == shown


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0"), (9999, "9999"), (266_123, "266 k"), (6_738_415_616, "6.74 B"), (999_600, "1 M"), (16_777_216, "16.8 M")],
)
def test_counts_have_three_digits(n, shown):
    assert text.count(n) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.1, "0.1"), (0.0012000000000000001, "0.0012"), (2.834e-4, "2.834e-04"), (1e-8, "1e-08"),
     (0.9999999, "0.9999999"), (1.0, "1"), (float("nan"), "nan"), (float("-inf"), "-inf"), (1e20, "1e+20")],
)  # fmt: skip
def test_floats_are_written_as_people_write_them(value, shown):
    assert text.number(value) == shown


def test_runs_of_ranks_are_folded():
    assert text.spans([3, 1, 2, 9, 5, 6]) == "1..3, 5, 6, 9"
    assert text.spans(range(1, 256)) == "1..255"
    assert text.spans(range(0, 100, 2)).endswith("22 and 38 more runs")


def test_a_long_name_loses_its_middle():
    shown = text.clip_middle("model.layers.0.self_attn.q_proj.weight", 24)
    assert len(shown) == 24 and shown.startswith("model") and shown.endswith("proj.weight")


def test_two_times_of_one_day_name_it_once():
    assert text.period(1763602927, 1763602965) == "2025-11-20 01:42:07 .. 01:42:45"
    assert text.period(1763602927, 1763602927) == "2025-11-20 01:42:07"
    assert text.duration(200.2) == "3 min 20 s"


def test_a_list_that_is_cut_says_so():
    assert (text.first_few([1, 2, 3], 3), text.first_few([1, 2, 3, 4], 3)) == ("1, 2, 3", "1, 2, 3 …")
    assert (text.few(["a", "b"], 2), text.few(["a", "b", "c"], 2)) == ("a, b", "a, b and 1 more")


def test_a_noun_has_its_own_plural_where_s_would_not_do():
    assert (text.plural(1, "rank"), text.plural(0, "rank"), text.plural(3, "rank")) == ("1 rank", "0 ranks", "3 ranks")
    assert (text.plural(1, "copy", "copies"), text.plural(2, "copy", "copies")) == ("1 copy", "2 copies")


def test_an_error_is_one_line_or_its_class():
    assert text.first_line(RuntimeError("\n what happened\nC++ stack\n")) == "what happened"
    assert text.first_line(RuntimeError()) == "RuntimeError"
