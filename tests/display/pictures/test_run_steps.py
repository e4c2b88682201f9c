"""A run over its checkpoints: a resume from the wrong place is a break in words and picture."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.pictures.run_steps import Point, axis, breaks_of, points_of, run_steps
from tests.display.made import HOSTILE
from tests.display.pictures.svg import hovers, parsed, shown

STEPS, TIMES = st.none() | st.integers(0, 99), st.none() | st.floats(0, 9)
POINTS = st.lists(st.builds(Point, st.just("c"), STEPS, TIMES, st.just(()), st.none()))


def saved(folder, *checkpoints):
    """Checkpoints of a run, each `(step, lr)`, saved one minute after the other."""
    folder.mkdir()
    for n, (step, *rates) in enumerate(checkpoints):
        groups = [{"lr": lr, "params": [m]} for m, lr in enumerate(rates)]
        optimizer = {"state": {m: {"exp_avg": torch.ones(2)} for m in range(len(rates))}, "param_groups": groups}
        place = folder / f"save{n}"
        place.mkdir()
        torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer, "step": step}, place / "model.pt")
        os.utime(place / "model.pt", (1e9 + 60 * n, 1e9 + 60 * n))
    return ckptools.checkpoints_in(folder)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100), st.floats(200, 300))
def test_every_figure_lies_within_its_axis(values, start, end):
    found = axis(values, start, end)
    assert all(start - 1e-6 <= found.at(value) <= end + 1e-6 for value in values)


@given(POINTS)
def test_a_step_that_only_goes_up_is_never_a_break(points):
    steps = [p.step for p in points if p.saved is not None and p.step is not None]
    times = [p.saved for p in points if p.saved is not None and p.step is not None]
    if all(a < b for a, b in pairwise(steps)):
        assert breaks_of(points) == ()
    elif len(set(times)) == len(times):
        assert breaks_of(points)


def test_a_step_that_is_saved_again_later_is_a_break():
    first, again = (Point("c", 5, saved, (), None) for saved in (1.0, 2.0))
    assert [found.words for found in breaks_of([first, again])] == ["step 5, then 5"]


def test_a_run_that_goes_on_has_no_break(tmp_path):
    picture = saved(tmp_path / "run", (10, 3e-4), (20, 2e-4), (30, 1e-4)).plot.steps()
    assert "BREAK" not in picture.text and "the steps go up" in picture.text
    assert "save1/model.pt: step 20, lr 2e-04" in hovers(picture) or "save1: step 20, lr 2e-04" in hovers(picture)


def test_a_resume_from_an_older_step_is_a_break(tmp_path):
    run = saved(tmp_path / "run", (10, 3e-4), (20, 2e-4), (30, 1e-4), (20, 2e-4))
    picture = run.plot.steps()
    assert "BREAK: step 30, then 20: save2" in picture.text and "B" in shown(picture).split("\n")
    assert "goes up" not in picture.text


def test_a_learning_rate_that_jumps_is_a_break(tmp_path):
    picture = saved(tmp_path / "run", (10, 1e-5), (20, 1e-3), (30, 9e-4)).plot.steps()
    assert "BREAK: lr 1e-05, then 0.001" in picture.text and picture.text.count("BREAK") == 1


def test_a_checkpoint_without_an_optimizer_tells_no_rate(tmp_path):
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "a.pt")
    picture = ckptools.checkpoints_in(tmp_path / "run").plot.steps()
    assert "no checkpoint has a learning rate" in picture.text and "1 checkpoint without a step" in picture.text
    assert "nothing to draw" in shown(picture)


def test_steps_without_a_learning_rate_are_drawn_by_their_time_alone(tmp_path):
    picture = saved(tmp_path / "run", (10,), (20,)).plot.steps()
    assert "no checkpoint has a learning rate" in picture.text and "steps 10 to 20" in picture.text
    assert "learning rate by step" not in shown(picture) and "step by the time" in shown(picture)


def test_one_that_is_not_whole_is_marked(tmp_path):
    saved(tmp_path / "run", (10, 3e-4), (20, 2e-4))
    os.truncate(tmp_path / "run" / "save1" / "model.pt", 300)
    (tmp_path / "run" / "save1").rename(tmp_path / "run" / "step-20")
    run = ckptools.checkpoints_in(tmp_path / "run")
    assert [p.whole for p in points_of(run)] == [True, False] and "not whole: step-20" in run.plot.steps().text


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\\" not in ascii(name) and "/" not in name])
def test_a_hostile_name_of_a_checkpoint_is_text(tmp_path, name):
    run = saved(tmp_path / "run", (10, 3e-4))
    (tmp_path / "run" / "save0").rename(tmp_path / "run" / name)
    assert parsed(run_steps(ckptools.checkpoints_in(tmp_path / "run"))) is not None and run is not None


def test_of_a_long_run_the_words_are_of_its_latest_checkpoints(tmp_path):
    told = run_steps(saved(tmp_path / "run", *((step, 0.1) for step in range(1, 15)))).text
    assert "step 14," in told and "step 3," in told and "step 2," not in told
    assert "2 before these" in told
