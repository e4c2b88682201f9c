"""What a look at a run says: each checkpoint is judged once it is complete, and once only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckptools.watch import run as looking
from tests.watch.runs import aged, flip, save, told, watcher


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4):
        save(tmp_path / "run", step)
    return tmp_path / "run"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def test_each_checkpoint_is_proven_once_the_oldest_first(run, state):
    watch = watcher(run, state, deep=True)
    first = watch.look()
    assert (told(first), first.ok) == ([("proven", 2), ("proven", 4)], True)
    assert first.newest_proven == str(run / "step-4.pt")
    assert {event.row.looked_into for event in first.rows} == {"verify --deep"}
    assert told(watch.look()) == []


def test_what_was_verified_is_remembered_by_another_process(run, state, monkeypatch):
    watch = watcher(run, state, deep=True)
    watch.look()
    assert watch.memory.save() == ""
    monkeypatch.setattr(looking, "verified", lambda *_: pytest.fail("verified again"))
    again = watcher(run, state, deep=True).look()
    assert (told(again), again.newest_proven) == ([], str(run / "step-4.pt"))


def test_what_was_not_read_with_values_is_read_again_when_they_are_asked_for(run, state):
    watch = watcher(run, state, deep=True)
    watch.look()
    watch.memory.save()
    again = watcher(run, state, deep=True, values=True).look()
    assert told(again) == [("proven", 2), ("proven", 4)] and all(event.norm for event in again.rows)


def test_a_flipped_bit_is_a_problem_with_deep_and_the_one_before_is_the_newest_proven(run, state):
    flip(run / "step-4.pt")
    found = watcher(run, state, deep=True).look()
    assert (told(found), found.ok) == ([("proven", 2), ("problem", 4)], False)
    assert found.newest_proven == str(run / "step-2.pt") and found.problems == ("step-4.pt",)
    assert found.rows[1].row.codes == ("CK004",)


def test_what_is_written_again_with_size_and_time_of_before_is_judged_again(run, state):
    watch = watcher(run, state, deep=True)
    watch.look()
    path, status = run / "step-4.pt", (run / "step-4.pt").stat()
    save(run, 4, scale=3.0)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert told(watcher_after(watch, run, state).look()) == [("proven", 4)]


def watcher_after(watch: looking.Watcher, run: Path, state: Path) -> looking.Watcher:
    watch.memory.save()
    return watcher(run, state, deep=True)


def test_what_was_written_just_now_waits_and_is_then_judged(run, state):
    path = save(run, 6, old=False)
    path.write_bytes(path.read_bytes()[:300])
    watch = watcher(run, state, settle=20.0)
    first = watch.look()
    assert told(first) == [("proven", 2), ("proven", 4), ("being written", 6)]
    assert (first.ok, first.waiting) == (True, ("step-6.pt",)) and 0 < watch.waiting["step-6.pt"] <= 20
    assert told(watch.look()) == []
    save(run, 6)
    assert told(watch.look()) == [("proven", 6)]


def test_a_clock_that_is_behind_the_file_system_delays_a_judgement_and_does_not_prevent_it(run, state):
    ahead = save(run, 6)
    os.utime(ahead, (4e9, 4e9))
    watch = watcher(run, state, settle=0.0)
    watch.look()
    assert told(watch.look()) in ([], [("proven", 6)])
    assert watch.look().waiting == ()


def test_a_checkpoint_that_changes_while_it_is_verified_is_judged_later(run, state, monkeypatch):
    real = looking.verified

    def meanwhile(row, *more):
        made = real(row, *more)
        if row.step == 4:
            save(run, 4, scale=5.0)
        return made

    monkeypatch.setattr(looking, "verified", meanwhile)
    watch = watcher(run, state)
    assert told(watch.look()) == [("proven", 2), ("being written", 4)]
    monkeypatch.undo()
    assert told(watch.look()) == [("proven", 4)]


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_no_problem(run, state, monkeypatch):
    real = looking.verified

    def meanwhile(row, *more):
        if row.step == 4:
            (run / "step-4.pt").unlink()
        return real(row, *more)

    monkeypatch.setattr(looking, "verified", meanwhile)
    found = watcher(run, state).look()
    assert told(found) == [("proven", 2), ("being written", 4)] and found.ok


def test_a_checkpoint_that_is_gone_is_told(run, state):
    watch = watcher(run, state)
    watch.look()
    (run / "step-2.pt").unlink()
    found = watch.look()
    assert [(event.event, event.row.name) for event in found.rows] == [("gone", "step-2.pt")]


def test_a_norm_that_grows_by_more_than_the_factor_is_reported_with_its_tensor(run, state):
    save(run, 6, scale=10.0)
    found = watcher(run, state, values=True, drift=3.0).look()
    assert told(found)[2:] == [("proven", 6), ("drift", 6)] and not found.ok
    drift = found.rows[-1]
    assert 9 < drift.drift < 10 and drift.drifted[0] == "w: 8 -> 80" and "step-4.pt" in drift.detail


def test_the_checkpoint_after_a_drift_is_compared_with_the_one_before_it(run, state):
    save(run, 6, scale=10.0)
    save(run, 8)
    found = watcher(run, state, values=True).look()
    assert told(found)[2:] == [("proven", 6), ("drift", 6), ("proven", 8)] and found.rows[-1].drift == 1.0


def test_a_nan_is_a_problem_and_no_norm_to_compare_with(run, state):
    save(run, 6, scale=float("nan"))
    found = watcher(run, state, values=True).look()
    assert told(found)[2:] == [("problem", 6)] and "CK201" in found.rows[-1].row.codes


def test_a_rank_that_is_still_missing_waits_and_then_is_a_problem(tmp_path, state):
    (tmp_path / "run").mkdir()
    for rank in (0, 2):
        path = tmp_path / "run" / f"ep0-ba7-rank{rank}.pt"
        torch.save({"state": {"model": {"w": torch.ones(4)}, "timestamp": {"batch": 7}}}, path)
    watch = watcher(tmp_path / "run", state, settle=20.0)
    assert told(watch.look()) == [("being written", 7)]
    for path in (tmp_path / "run").iterdir():
        aged(path)
    assert told(watch.look()) == [("problem", 7)]


@pytest.mark.parametrize("text", ["", "{", '{"schema": "x"}', "[1]", '{"schema": "ckptools/watch-state/1"}'])
def test_a_state_file_that_is_damaged_is_not_believed(text, run, state):
    state.write_text(text)
    watch = watcher(run, state)
    assert "verified anew" in watch.memory.note
    assert told(watch.look()) == [("proven", 2), ("proven", 4)]


def test_the_state_of_another_folder_is_not_believed(run, state, tmp_path):
    watch = watcher(run, state)
    watch.look()
    watch.memory.save()
    save(tmp_path / "other", 2)
    assert "another folder" in watcher(tmp_path / "other", state).memory.note


def with_average(run: Path, step: int, scale: float, average: float | None) -> Path:
    """Save `step-STEP.pt` with a model and, if given, an average of its weights."""
    content = {"model": {"w": torch.full((64,), scale)}, "step": step}
    content |= {} if average is None else {"ema": {"w": torch.full((64,), average)}}
    torch.save(content, run / f"step-{step}.pt")
    return aged(run / f"step-{step}.pt")


@pytest.mark.parametrize(("model", "norms", "events"), [
    (None, [8, 8], ["proven", "proven"]),
    ("ema", [16, 80], ["proven", "proven", "drift"]),
])  # fmt: skip
def test_norms_are_those_of_the_model_that_the_user_named(tmp_path, state, model, norms, events):
    (run := tmp_path / "run").mkdir()
    with_average(run, 2, 1.0, 2.0)
    with_average(run, 4, 1.0, 10.0)
    found = watcher(run, state, model, values=True).look()
    assert [event.event for event in found.rows] == events
    assert [event.norm for event in found.rows if event.event == "proven"] == pytest.approx(norms)


def test_norms_of_one_model_are_not_compared_with_those_of_another(tmp_path, state):
    (run := tmp_path / "run").mkdir()
    with_average(run, 2, 1.0, 10.0)
    first = watcher(run, state, values=True)
    first.look()
    first.memory.save()
    with_average(run, 4, 1.0, 10.0)
    found = watcher(run, state, "ema", values=True).look()
    assert told(found) == [("proven", 2), ("proven", 4)] and [event.norm for event in found.rows] == [80, 80]


def test_a_checkpoint_without_the_named_model_says_why_it_has_no_norm(tmp_path, state):
    (run := tmp_path / "run").mkdir()
    with_average(run, 2, 1.0, None)
    (event,) = watcher(run, state, "ema", values=True).look().rows
    assert (event.event, event.norm) == ("proven", None)
    assert event.detail == "no norm: --model ema: no such model; it holds model"


def test_norms_of_models_without_a_common_name_are_not_compared(tmp_path, state):
    (run := tmp_path / "run").mkdir()
    for step, name, scale in ((2, "generator.w", 1.0), (4, "w", 100.0)):
        torch.save({"state_dict": {name: torch.full((64,), scale)}, "step": step}, run / f"step-{step}.pt")
        aged(run / f"step-{step}.pt")
    found = watcher(run, state, values=True).look()
    assert told(found) == [("proven", 2), ("proven", 4)] and [event.drift for event in found.rows] == [None, None]
