"""Heat maps: every tensor has a cell in its layer and role, and what is no number is a letter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.display.drawing import DIVERGING, VIRIDIS
from ckptools.errors import UsageError
from ckptools.pictures.heat_map import HeatCell, RowScale, Scale, heat_grid, heat_map
from tests.display.made import HOSTILE
from tests.display.pictures.svg import hovers, parsed, shown
from tests.truth import FIXTURES

FILE = FIXTURES / "torch2.13.0-fsdp1-sharded-w4" / "rank0.pt"

NAMES = st.lists(st.text("ab01.*", min_size=1, max_size=8), unique=True, max_size=30)


def cells(*named):
    return [HeatCell(name, value, letter, f"rms {value}") for name, value, letter in named]


@given(NAMES)
def test_every_name_has_a_cell_of_its_own(names):
    grid = heat_grid(cells(*((name, 1.0, "") for name in names)))
    assert sorted(cell.name for cell in grid.cells.values()) == sorted(names)
    assert {role for role, _ in grid.cells} == set(grid.roles) and {at for _, at in grid.cells} == set(grid.layers)


def test_names_that_would_share_a_cell_have_one_each():
    grid = heat_grid(cells(("x.1.*", 1.0, ""), ("x.*.1", 2.0, "")))
    assert {cell.name for cell in grid.cells.values()} == {"x.1.*", "x.*.1"}


@given(st.floats(1e-300, 1e300), st.floats(1, 1e300), st.floats(0, 1))
def test_a_larger_figure_is_never_darker(low, factor, part):
    high = min(low * factor, 1e300)
    scale, middle = Scale(low, high), low ** (1 - part) * high**part
    order = [VIRIDIS.index(scale.color(value)) for value in (low, min(max(middle, low), high), high)]
    assert order == sorted(order)


@given(st.lists(st.floats(1e-200, 1e200), min_size=1, max_size=9))
def test_the_median_of_a_row_is_grey_and_forty_times_it_is_the_last_colour(values):
    scale = RowScale.of(("w", value) for value in values)
    middle = scale.medians["w"]
    colors = [scale.color(middle * factor, "w") for factor in (1 / 40, 0.5, 1, 2, 40)]
    assert colors == [DIVERGING[n] for n in (0, 3, 4, 5, 8)]


def test_layers_stand_in_the_order_of_their_numbers():
    grid = heat_grid(cells(*((f"h.{n}.w", 1.0, "") for n in (10, 9, 2)), ("head", 1.0, "")))
    assert grid.layers == (None, "2", "9", "10") and grid.roles == ("h.*.w", "head")


def test_letters_and_words_tell_what_is_no_number():
    found = cells(("h.0.w", 0.5, ""), ("h.1.w", 0.25, "N"), ("h.2.w", 0.0, "0"), ("h.3.w", None, "?"))
    picture = heat_map("rms", found, absolute=True)
    assert "colours from 0.25 to 0.5" in picture.text and "smallest: h.2.w rms 0.0; h.1.w" in picture.text
    assert "N NaN or infinities in it: 1 tensor: h.1.w rms 0.25" in picture.text
    assert {"N", "0", "?"} <= set(shown(picture).split("\n")) and len(hovers(picture)) == 4


def test_many_layers_go_on_below_and_what_is_not_drawn_is_counted():
    found = cells(*((f"h.{n}.{role}", 1.0 + n, "") for n in range(400) for role in "abcdefghijkl"))
    picture = heat_map("rms", found)
    assert len(hovers(picture)) == 5 * 32 * 12 and f"{4800 - 5 * 32 * 12} tensors not drawn" in shown(picture)
    assert len(picture.svg) < 240_000 and "4800 tensors, 400 layers, 12 roles" in picture.text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name):
    parsed(heat_map(name, cells((name, 1.0, ""), (f"{name}.1.{name}", 2.0, "N"))))


@pytest.mark.parametrize("figure", ["rms", "update", "ratio"])
def test_a_real_checkpoint_has_its_figures(figure):
    ck = ckptools.open(FILE)
    picture = ck.plot.heat(figure)
    rows = {r.name: r for r in (ck.stats() if figure == "rms" else ck.moments()).rows}
    name, told = next(hover for hover in hovers(picture) if hover.startswith("blocks.1.up.weight")).split(": ")
    assert float(told.split()[-1]) == pytest.approx(getattr(rows[name], figure), rel=1e-3)


def test_integers_are_in_no_heat_map_of_weights():
    assert not any(hover.startswith("seen") for hover in hovers(ckptools.open(FILE).plot.heat()))


def test_a_figure_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="'loss' is no figure of a heat map; there are rms, update, ratio"):
        ckptools.open(FILE).plot.heat("loss")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        model = {f"h.{n}.w": torch.full((4,), 1.0 + step * (n == 1)) for n in range(3)}
        model["h.2.w"][0] = float("nan") if step == 2 else 1.0
        torch.save({"model": model, "step": step}, folder / f"{step}.pt")
    return folder / "1.pt", folder / "2.pt"


def test_what_moved_between_two_checkpoints_is_coloured_and_what_is_equal_a_letter(two):
    picture = ckptools.diff(*two, values=True, every_byte=True).plot.heat()
    told = dict(hover.split(": ", 1) for hover in hovers(picture))
    assert told["h.0.w"].startswith("same") and told["h.1.w"].startswith("change 0.5")
    assert "= equal: 1 tensor" in picture.text and "h.2.w" in told


def test_of_values_that_were_not_compared_there_is_no_heat_map(two):
    with pytest.raises(UsageError, match="values were not compared"):
        ckptools.diff(*two).plot.heat()
