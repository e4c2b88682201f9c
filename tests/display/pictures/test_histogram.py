"""Histograms: a bar for each bin, none lost, and the same numbers in words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.display.drawing import WIDTH
from ckptools.errors import UsageError
from ckptools.model.records import Rows
from ckptools.pictures.value_bars import ENDS, HIGH, LEFT, Bin, bar_rects, norm_bars, norm_rows, round_ticks, value_bins
from ckptools.stats.record import Statistics, Stats
from tests.display.pictures.svg import hovers, parsed, shown
from tests.truth import FIXTURES


def stats(*norms):
    rows = [Stats(f"w{n}", "model", None, "float32", (2,), 2, 2, l2=norm) for n, norm in enumerate(norms)]
    return Statistics(FIXTURES, "values", len(rows), 0, None, 0, 0, 0, 0.0, Rows(rows))


@given(st.lists(st.floats(5e-324, 1.7e308), max_size=50))
def test_the_largest_and_the_smallest_norms_are_at_the_ends_and_none_is_twice(norms):
    largest, smallest = norm_rows(stats(*norms))
    known = [row.l2 for row in (*largest, *smallest)]
    ordered = sorted(norms, reverse=True)
    assert known == (ordered if len(norms) <= 2 * ENDS else ordered[:ENDS] + ordered[-ENDS:])


@given(st.floats(-1e30, 1e30), st.floats(1e-20, 1e30))
def test_ticks_are_few_round_numbers_within_the_limits_and_zero_is_one_of_them(low, span):
    ticks = round_ticks(low, low + span)
    assert len(ticks) <= 9 and all(low - span / 1e6 <= tick <= low + span * (1 + 1e-6) for tick in ticks)
    assert 0 in ticks or not low <= 0 <= low + span


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=64))
def test_bars_stand_side_by_side_and_none_that_holds_something_is_invisible(counts):
    rects = list(bar_rects([Bin(n, n + 1, count) for n, count in enumerate(counts)]))
    assert math.isclose(sum(at.width for at in rects), WIDTH - LEFT) and all(at.y + at.height == HIGH for at in rects)
    assert all((at.height >= 1) == bool(count) and at.height <= HIGH for at, count in zip(rects, counts, strict=True))


def drawn(folder, values):
    torch.save({"w": torch.tensor(values, dtype=torch.float64)}, folder / "a.pt")
    return ckptools.open(folder / "a.pt").plot.histogram("w")


def test_values_that_are_all_the_same_are_a_sentence(tmp_path):
    picture = drawn(tmp_path, [0.5] * 5)
    assert hovers(picture) == [] and "every value is 0.5" in shown(picture) and "every value is 0.5" in picture.text


def test_three_deviations_and_zero_are_marked(tmp_path):
    torch.manual_seed(0)
    words = shown(drawn(tmp_path, torch.randn(5000).tolist())).split("\n")
    assert {"-3\u03c3", "mean", "+3\u03c3", "0", "1", "100"} <= set(words)


def test_the_largest_numbers_there_are_have_bars(tmp_path):
    assert len(hovers(drawn(tmp_path, [1.7e308, -1.7e308]))) == 2


def test_where_nothing_is_finite_there_is_nothing_to_draw(tmp_path):
    picture = drawn(tmp_path, [float("nan")])
    assert "nothing to draw" in shown(picture) and "1 NaN" in picture.text and parsed(picture) is not None


def test_the_edges_of_a_range_wider_than_float64_are_finite():
    found = Stats("w", "", None, "float64", (2,), 2, 2, min=-1.7e308, max=1.7e308, histogram=(1, 0, 0, 1))
    assert [one.low for one in value_bins(found)][:3] == pytest.approx([-1.7e308, -0.85e308, 0])


def test_a_norm_of_a_part_is_told_to_be_one():
    found = stats(3.0, 4.0)
    half = replace(found.rows[0], elements=1)
    told = norm_bars("norms", replace(found, rows=Rows([half, found.rows[1]]))).text
    assert "1 tensor read in part, whose norm is of that part" in told
    assert "in part" not in norm_bars("norms", found).text


@pytest.mark.parametrize(
    ("key", "why"),
    [("blocks", "means 10 tensors"), ("nothing", "no 'nothing' here"), ("optim.param_groups.0.lr", "is no tensor")],
)
def test_a_key_that_names_no_tensor_is_refused(key, why):
    ck = ckptools.open(FIXTURES / "torch2.13.0-fsdp1-sharded-w4" / "rank0.pt")
    with pytest.raises(UsageError, match=why):
        ck.plot.layout(key)


def test_of_many_tensors_the_ends_are_drawn_by_name():
    picture = norm_bars("w", stats(*(float(n) for n in range(1, 200))))
    assert "199 tensors with an l2 norm, of which the 20 at both ends are drawn" in picture.text
    assert [hover.split(":")[0] for hover in hovers(picture)] == [
        f"w{n}" for n in (*range(198, 188, -1), *range(9, -1, -1))
    ]
