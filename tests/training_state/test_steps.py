from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import contradiction, find_step, step_in


def step(tree, path="run/rank0.pt"):
    return find_step(Path(path), find_sections(tree))


def test_a_counter_in_the_content_decides_and_the_name_confirms():
    fact = step({"state": {"timestamp": {"Timestamp": {"batch": 5, "epoch": 0}}}}, "run/ep0-ba5-rank0.pt")
    assert (fact.value, fact.agree) == (5, True)
    assert set(fact.sources) == {"file name", "state.timestamp.Timestamp.batch"}


def test_a_name_that_says_another_step_is_a_contradiction():
    fact = step({"global_step": 5}, "run/ep0-ba7-rank0.pt")
    assert (fact.value, fact.agree) == (5, False)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ep1-ba11500-rank0.pt", 11500),
        ("global_step_30/actor/model_world_size_4_rank_0.pt", 30),
        ("checkpoint-200/rank0.pt", 200),
        ("step1000/rank0.pt", 1000),
        ("iter_0000100/x/rank0.pt", 100),
        ("rank0.pt", None),
        ("run7/rank3.pt", None),
        ("bar12/rank0.pt", None),
    ],
)
def test_without_counters_the_name_tells(path, value):
    assert step({"x": 1}, f"/runs/folder/{path}").value == value


def test_the_file_s_own_name_comes_before_its_folders():
    assert step({}, "step9/ba5-rank0.pt").value == 5


def test_a_scheduler_tells_only_when_nothing_else_does():
    scheduler = {"last_epoch": 4, "base_lrs": [1]}
    assert (step({"s": scheduler}).value, step({"s": scheduler, "global_step": 9}).value) == (4, 9)
    assert step({"s": scheduler, "global_step": 4}).sources == ("global_step", "s.last_epoch")


def test_a_scheduler_that_counts_epochs_does_not_contradict():
    assert step({"s": {"last_epoch": 1, "base_lrs": [1]}, "global_step": 9}).agree


def test_settings_and_callbacks_are_no_counters():
    tree = {"args": {"steps": 100}, "callbacks": {"x": {"step": 7}}, "hyper_parameters": {"num_steps": 3}}
    assert step(tree).value is None


@pytest.mark.parametrize("odd", ["5", 5.0, True, None, [5]])
def test_only_whole_numbers_count(odd):
    assert step({"global_step": odd}).value is None


def test_the_surest_counter_wins():
    assert step({"step": 1, "batch": 2, "iteration": 3}).value == 2


def test_keys_that_are_not_text_do_not_matter():
    assert step({1: 2, None: 3, ("step",): 4, "x": {0: {"step": 5}}}).value == 5


def test_nothing_at_all_is_said_as_nothing():
    fact = step(None)
    assert (fact.value, fact.sources) == (None, ())


def test_a_counter_deep_inside_something_else_is_none_of_the_training():
    assert step({"a": {"b": {"c": {"d": {"step": 7}}}}}).value == 7
    assert step({"a": {"b": {"c": {"d": {"e": {"step": 7}}}}}}).value is None


@pytest.mark.parametrize("key", ["args", "config", "hparams", "hyper_parameters", "callbacks", "loops"])
def test_a_step_among_settings_is_no_counter(key):
    assert step({"trainer": {key: {"step": 7}}}).value is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ba5", 5), ("step-7", 7), ("iter=8", 8), ("iteration9", 9), ("checkpoint_10", 10), ("step5-step6", 6),
        ("step1234567890123", None), ("step", None), ("3", None),
    ],
)  # fmt: skip
def test_a_name_tells_the_last_step_in_it(name, value):
    assert step_in(name) == value


def test_a_folder_above_tells_where_the_name_does_not_and_says_so():
    assert step({}, "step9/actor/rank0.pt").sources == ("folder",)
    assert step({}, "step8/rank0.pt").sources == ("folder name",)
    assert step({}, "step7.pt").sources == ("file name",)


def test_of_counters_of_one_name_that_nearer_to_the_root_counts():
    assert step({"inner": {"step": 1}, "step": 2}).value == 2
    assert step({"state": {"timestamp": {"batch": 3}}, "iteration": 4}).value == 3


def test_a_contradiction_says_what_the_content_has():
    fact = step({"global_step": 5}, "run/step7/x.pt")
    assert contradiction(fact) == "the name of the file or folder states another step than global_step (5)"


def test_a_scheduler_whose_last_epoch_is_no_whole_number_tells_nothing():
    assert step({"s": {"last_epoch": 4.0, "base_lrs": [1]}}).value is None
