"""What a scheduler computed last is compared with the param groups where it is known which ones it drives."""

from __future__ import annotations

import pytest

from ckptools.training_state.steps import LearningRates, group_rates, learning_rates
from tests.display.made import checkpoint, plain


def optimizer(*rates):
    return {"state": {}, "param_groups": [{"lr": lr, "params": [n]} for n, lr in enumerate(rates)]}


def rates(last, *groups, **more):
    tree = {"optimizer": optimizer(*groups), "scheduler": {"last_epoch": 3, "_last_lr": last}, "model": {"w": plain(2)}}
    return learning_rates(checkpoint({**tree, **more}))


@pytest.mark.parametrize(
    ("last", "groups", "agree"), [([0.1], [0.1], True), ((0.1, 2), [0.1, 2.0], True), ([0.1, 0.2], [0.1, 0.3], False)]
)
def test_the_rates_of_one_scheduler_and_one_optimizer_are_compared(last, groups, agree):
    [found] = rates(last, *groups)
    assert found == LearningRates(tuple(map(float, last)), tuple(groups)) and found.agree is agree


@pytest.mark.parametrize("last", [[0.1], [0.1, None], [0.1, "0.2"], [0.1, 1 << 64], None, 0.1, {0: 0.1}], ids=str)
def test_what_is_no_rate_for_each_group_is_not_compared(last):
    assert rates(last, 0.1, 0.2) == [None]
    assert rates([0.1, None], 0.1) == [None]


def test_of_several_none_is_told_to_drive_another():
    assert rates([0.1], 0.1, second=optimizer(0.1)) == [None]
    assert rates([0.1], 0.1, second={"last_epoch": 3, "_last_lr": [0.1]}) == [None, None]


def test_the_rates_of_all_groups_of_all_optimizers_are_listed_or_none():
    tree = {"a": optimizer(0.1, 2), "b": optimizer(0.3), "model": {"w": plain(2)}}
    assert group_rates(checkpoint(tree)) == (0.1, 2.0, 0.3)
    assert group_rates(checkpoint({**tree, "c": optimizer(None)})) == ()
    assert group_rates(checkpoint({**tree, "c": optimizer((1 << 64) - 1)})) == (0.1, 2.0, 0.3, float((1 << 64) - 1))
