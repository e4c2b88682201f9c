"""Optimizer state and step counters are held against the model and the name."""

from __future__ import annotations

import pytest

from ckptools.model.facts import Fact
from ckptools.rules.optimizers import ELEMENTWISE, optimizer_problems, step_problems
from tests.display.made import checkpoint, group, plain, snapshot


def told(ck):
    return [(p.code, p.tensor, p.message) for p in optimizer_problems(ck)]


def trained(state, params=("a.w", "b.w")):
    """A model of two parameters, and an optimizer that is keyed by name."""
    model = {"a.w": plain(3, 5, record="0"), "b.w": plain(3, record="1")}
    return checkpoint({"model": model, "optim": {"state": state, "param_groups": [group(0.1, 0, list(params))]}})


STATE = {"a.w": {"exp_avg": plain(3, 5, record="2")}, "b.w": {"exp_avg": plain(3, record="3")}}


def test_state_of_every_parameter_in_one_group_and_of_its_shape_is_no_problem():
    assert told(trained(STATE)) == [] and told(snapshot()) == []


def test_a_parameter_in_two_groups_is_told_once():
    assert told(trained(STATE, ["a.w", "b.w", "a.w"])) == [("CK207", "a.w", "is in two param groups")]


def test_state_of_a_parameter_in_no_group_is_told():
    assert told(trained(STATE, ["a.w"])) == [("CK207", "b.w", "has optimizer state and is in no param group")]


def test_a_parameter_without_state_only_warns():
    (problem,) = optimizer_problems(trained({"a.w": STATE["a.w"]}))
    assert (problem.code, problem.tensor, problem.severity) == ("CK203", "b.w", "warning")


def test_lbfgs_keeps_the_state_of_all_parameters_under_the_first():
    assert told(trained({"a.w": {"func_evals": 4, "n_iter": 3, "d": plain(18)}})) == []


def test_an_optimizer_that_never_stepped_has_nothing_to_compare():
    assert told(trained({}, ["a.w", "a.w"])) == []


@pytest.mark.parametrize("slot", ELEMENTWISE)
def test_a_slot_of_every_element_has_the_shape_of_its_parameter(slot):
    found = told(trained({**STATE, "b.w": {slot: plain(4)}}))
    assert found == [("CK209", "b.w", f"{slot} has shape [4], its parameter [3]")]


def test_state_of_what_is_no_parameter_hides_no_wrong_shape_behind_it():
    state = {"gone.w": {"exp_avg": plain(7)}, "a.w": STATE["a.w"], "b.w": {"exp_avg": plain(4)}}
    assert ("CK209", "b.w", "exp_avg has shape [4], its parameter [3]") in told(trained(state))


def test_slots_of_other_shapes_by_nature_are_not_compared():
    assert told(trained({**STATE, "b.w": {"step": plain(), "exp_avg_sq_row": plain(7)}})) == []


@pytest.mark.parametrize(("shape", "told_of"), [((3, 2), 0), ((2, 5), 0), ((2, 2), 0), ((3, 4), 1), ((2,), 1)])
def test_a_moment_may_be_projected_to_the_rank_of_its_param_group(shape, told_of):
    groups = [{**group(0.1, 0, ["a.w"]), "rank": 2}, group(0.1, 0, ["b.w"])]
    state = {**STATE, "a.w": {"exp_avg": plain(*shape, record="2")}}
    model = {"a.w": plain(3, 5, record="0"), "b.w": plain(3, record="1")}
    found = told(checkpoint({"model": model, "optim": {"state": state, "param_groups": groups}}))
    assert [code for code, *_ in found] == ["CK209"] * told_of


def test_state_that_has_no_sure_name_is_one_warning():
    state = {n: {"exp_avg": plain(4)} for n in range(3)}
    ck = checkpoint({"optim": {"state": state, "param_groups": [group(0.1, 0, [0, 1, 2])]}})
    (problem,) = optimizer_problems(ck)
    assert (problem.code, problem.tensor, problem.severity) == ("CK210", "optim", "warning")
    assert "--names" in problem.message and problem.message.endswith("is not compared with its parameter")


def test_a_step_that_the_name_contradicts_is_told_where_it_does():
    (problem,) = step_problems(checkpoint({"step": 5}, step=Fact(5, ("step",), agree=False)))
    assert (problem.code, problem.severity) == ("CK010", "warning") and "than step (5)" in problem.message
    assert list(step_problems(checkpoint({"step": 5}))) == []
