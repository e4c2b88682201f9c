from __future__ import annotations

import pytest

from ckptools.inspect.record import inspect_report
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import NumpyScalar
from tests.display.made import (
    checkpoint,
    composer_tree,
    group,
    missing,
    plain,
    run7,
    snapshot,
    unread_run7,
)
from tests.state_dicts import state_dict


def test_a_name_that_tells_another_step_is_a_warning():
    report = inspect_report(checkpoint({"step": 5}, step=Fact(5, ("step",), agree=False)))
    assert [(p.code, p.severity) for p in report.problems] == [("CK010", "warning")]


def test_errors_come_before_warnings_and_notes():
    problems = (Problem(Code.TENSOR_NOT_JOINED, "w", severity="warning"), *missing(3))
    report = inspect_report(unread_run7(here={0, 1}, problems=problems, names=("os.system",)))
    assert [p.severity for p in report.problems] == ["error", "warning", "warning"]


def test_the_version_of_torch_comes_with_its_source():
    assert inspect_report(snapshot()).torch == Fact("2.6.0+cu124", ("metadata.torch_version",))
    assert inspect_report(run7()).torch == Fact(None)


def test_a_word_in_the_place_of_torchs_version_is_none():
    assert inspect_report(checkpoint({"metadata": {"torch": "backend"}})).torch == Fact(None)


def test_other_versions_are_told_too():
    tree = {
        "state": {"metadata": {"composer_env_info": {"composer_version": "0.14.1"}}},
        "pytorch-lightning_version": "2.6",
    }
    found = dict(inspect_report(checkpoint(tree)).writers)
    assert list(found.values()) == ["0.14.1", "2.6"]
    assert "pytorch-lightning_version" in found


def test_parameters_named_by_their_shape_are_said_to_be():
    (optimizer,) = inspect_report(snapshot()).optimizers
    assert optimizer.named_by == "shape" and "2 named by a shape" in optimizer.note
    assert optimizer.groups[0].names == ("module.w", "module.b")


def test_parameters_named_by_their_order_are_said_to_be_assumed():
    state = {i: {"exp_avg": plain(4)} for i in (0, 1)}
    model = state_dict({"a.w": plain(4), "b.w": plain(4)})
    tree = {"model": model, "optim": {"state": state, "param_groups": [group(0.1, 0, [0, 1])]}}
    (optimizer,) = inspect_report(checkpoint(tree)).optimizers
    assert (optimizer.named_by, optimizer.assumed) == ("order", 2) and "assumed" in optimizer.note


def test_parameters_without_a_name_are_counted_by_their_moments():
    state = {0: {"exp_avg": plain(4, 4)}, 1: {"exp_avg": plain(4)}}
    tree = {"optim": {"state": state, "param_groups": [group(0.1, 0, [0, 1])]}}
    (optimizer,) = inspect_report(checkpoint(tree)).optimizers
    assert (optimizer.unnamed, optimizer.groups[0].params) == (2, 20)


def test_a_group_that_does_not_list_its_parameters_has_no_count():
    tree = composer_tree(4)
    for one in tree["state"]["optimizers"]["AdamW"]["param_groups"]:
        del one["params"]
    (optimizer,) = inspect_report(checkpoint(tree)).optimizers
    assert [(g.tensors, g.params) for g in optimizer.groups] == [(None, None)] * 2


@pytest.mark.parametrize(("last", "agrees"), [([2.834e-4, 2.834e-4], True), ([1e-3, 1e-3], False), ([1e-3], None)])
def test_the_rate_of_the_scheduler_is_compared_with_the_groups(last, agrees):
    tree = composer_tree(4)
    tree["state"]["schedulers"]["CosineAnnealingLR"]["_last_lr"] = last
    (scheduler,) = inspect_report(checkpoint(tree)).schedulers
    assert scheduler.agrees is agrees


def test_a_rate_may_be_a_numpy_scalar():
    rate = NumpyScalar("<f8", b"\x9a\x99\x99\x99\x99\x99\xb9\x3f")
    tree = {"o": {"state": {}, "param_groups": [group(0.1, 0, [])]}, "s": {"last_epoch": 1, "_last_lr": [rate]}}
    assert inspect_report(checkpoint(tree)).schedulers[0].agrees is True


def held(tree: dict[str, object], **facts: object) -> dict[str, str]:
    return {s.name: s.holds for s in inspect_report(checkpoint(tree, **facts)).sections}


def test_a_tied_weight_is_counted_once():
    tree = {"model": {"emb.weight": plain(8, 4, record="1"), "head.weight": plain(8, 4, record="1")}}
    (section,) = inspect_report(checkpoint(tree)).sections
    assert (section.size.tensors, section.size.params, section.holds) == (2, 32, "1 tied to another")


def test_rng_says_whose_it_is():
    one = {"python": (3, (1, 2), None), "torch": plain(5056, dtype="uint8")}
    assert held({"rng": [one] * 4})["rng"] == "4 ranks: python, torch"
    assert held({"rng": one})["rng"] == "python, torch"
    (told,) = [s.holds for s in inspect_report(unread_run7()).sections if s.kind == "rng"]
    assert told == "rank 0 only, others not read: torch"


def test_groups_that_are_no_dicts_make_no_optimizer():
    assert inspect_report(checkpoint({"o": {"state": {}, "param_groups": [3]}})).optimizers == ()


def test_ids_that_are_no_ids_are_not_counted():
    tree = {"o": {"state": {0: {}}, "param_groups": [group(0.1, 0, [{}, []])]}}
    (optimizer,) = inspect_report(checkpoint(tree)).optimizers
    assert optimizer.groups[0].tensors is None
