"""What all ranks should have the same, and what is each rank's own, told from kind, names and shapes."""

from __future__ import annotations

import pytest

from ckptools.training_state.rank_values import Shared, counts_steps, is_own
from ckptools.training_state.sections import Section, find_sections
from tests.display.made import plain

MODEL = {"w": plain(2, 3), "b": plain(3)}
OPTIMIZER = {"state": {0: {"exp_avg": plain(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
WORDS = {"kind": "a", "count": 1, "name": "b"}
"""Beside these a few tensors are no model of their own."""

TREE = {
    "model": MODEL,
    "optimizer": OPTIMIZER,
    "scheduler": {"last_epoch": 3},
    "rng": {"torch": plain(5056, dtype="uint8")},
    "train_sampler": {"seen": plain(4), **WORDS},
    "average": {"w": plain(2, 3), "decay": plain(), **WORDS},
    "scaled": {"w": plain(6), **WORDS},
    "listed": [plain(2, 3), plain(3)],
    "alone": [plain(2, 3)],
    "nothing": [plain(), plain()],
    "extra": {"ema_weights": [plain(7)], "ema_loader": [plain(7)], "nested": {"Shadow": [plain(7)]}},
    "seen": plain(9),
}


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("model/w", True), ("model", True), ("optimizer/state/0/exp_avg", True), ("scheduler/last_epoch", True),
        ("rng/torch", False), ("train_sampler/seen", False), ("average/w", True), ("average/decay", True),
        ("scaled/w", False), ("listed/0", True), ("listed/1", True), ("alone/0", False), ("nothing/0", False),
        ("extra/ema_weights/0", True), ("extra/ema_loader/0", False), ("extra/nested/Shadow/0", True), ("seen", False),
    ],
)  # fmt: skip
def test_models_optimizers_schedulers_and_copies_of_the_model_are_shared(path, shared):
    keys = tuple(int(key) if key.isdecimal() else key for key in path.split("/"))
    assert Shared(find_sections(TREE)).holds(keys) is shared


def test_of_a_state_dict_at_the_root_only_its_tensors_and_extra_states_are_shared():
    shared = Shared(find_sections({**MODEL, "c": plain(4), "fp8._extra_state": b"", "epoch": 3}))
    assert [shared.holds((key,)) for key in ("w", "fp8._extra_state", "epoch")] == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "path", "own"),
    [
        ("rng", ("rng",), True), ("other", ("train_dataloader",), True), ("other", ("DataSets.0",), True),
        ("other", ("loader", "x"), False), ("other", ("reloaders",), False), ("other", (), False),
    ],
)  # fmt: skip
def test_random_states_and_places_in_the_data_are_each_ranks_own(kind, path, own):
    assert is_own(Section(kind, "", path, {})) is own


@pytest.mark.parametrize(
    ("path", "counts"),
    [(("a", "global_step"), True), (("last_epoch",), True), (("_step_count",), True), (("epoch",), False), ((), False)],
)
def test_counters_of_steps_are_known_by_their_last_key(path, counts):
    assert counts_steps(path) is counts
