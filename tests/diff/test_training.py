"""The first line of a comparison: two steps of a training with torch, and what may be wrong with the second."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.diff.text import training_line

LR = 0.001


class Model(torch.nn.Module):
    """Layers of 40 by 40, an embedding that is frozen, and a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 40).requires_grad_(False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(4))
        self.register_buffer("mask", torch.full((40,), float("-inf")))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Training:
    """A training that saves its state after each of some steps."""

    def __init__(self, seed: int = 0, freeze_at: int | None = None) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=LR)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, 10)
        self.states = [self.state(0)]
        for step in range(1, 7):
            self.step(frozen=freeze_at is not None and step > freeze_at)
            self.states.append(self.state(step))

    def step(self, frozen: bool) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(50, (16,))).square().mean().backward()
        if frozen:
            for parameter in self.model.layers[0].parameters():
                parameter.grad = None
        self.optimizer.step()
        self.scheduler.step()

    def state(self, step: int) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}
        made = deepcopy({name: part.state_dict() for name, part in parts.items()})
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        made["optimizer"]["param_groups"][0]["param_names"] = names  # as torch 2.6 does for named parameters
        return {**made, "global_step": step}


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    return Training().states


@pytest.fixture
def compared(tmp_path: Path):
    """Save two states, and compare them as the command does."""

    def between(a: dict[str, Any], b: dict[str, Any], values: bool = True, **how: Any):
        for name, state in (("a.pt", a), ("b.pt", b)):
            torch.save(state, tmp_path / name)
        return ckptools.diff(tmp_path / "a.pt", tmp_path / "b.pt", values=values, **how)

    return between


def changes(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """Relative changes of the layers, by torch."""
    return sorted(float((b[n] - a[n]).norm() / a[n].norm()) for n in a if n.startswith("layers."))


def test_steps_of_a_training_look_like_training_and_the_change_is_torch_s(states, compared):
    found = compared(states[3], states[6])
    judged, expected = found.training, changes(states[3]["model"], states[6]["model"])
    assert (judged.looks_normal, judged.steps, judged.weights, judged.moved) == (True, 3, 10, 8)
    assert judged.median == pytest.approx((expected[3] + expected[4]) / 2, rel=1e-4)
    assert judged.largest == pytest.approx(expected[-1], rel=1e-4) and judged.largest_name.startswith("layers.")
    assert judged.odd == judged.unsure == () and [tuple(map(float, one)) for one in judged.lr] == [
        (0.0007, pytest.approx(0.0004))
    ]
    median, most = (f"{100 * one:.2g}%" for one in (judged.median, judged.largest))
    assert training_line(found) == (
        f"looks like 3 steps of training: 8 of 10 tensors moved, by {median} "
        f"(median; most: {judged.largest_name} {most}); lr 0.0007 → 4e-04"
    )
    assert str(found).splitlines()[0] == training_line(found)


def test_the_same_steps_in_the_other_order_are_training_backwards(states, compared):
    found = compared(states[6], states[3])
    assert (found.training.looks_normal, found.training.steps) == (True, -3)
    assert training_line(found).startswith("looks like 3 steps of training backwards, B is the earlier: 8 of 10 ")


def test_without_values_nothing_is_said_of_weights(states, compared):
    found = compared(states[3], states[6], values=False)
    assert (found.training.looks_normal, found.training.weights, found.training.moved) == (None, 0, 0)
    assert training_line(found) == "step 3 → 6: 8 of 8 optimizer steps moved; lr 0.0007 → 4e-04"


def test_only_what_was_selected_is_counted(states, compared):
    found = compared(states[3], states[6], filter="layers.0.*")
    assert training_line(found).startswith("looks like 3 steps of training: 2 of 2 tensors moved, by ")


def test_a_checkpoint_and_itself_have_no_such_line(states, compared):
    found = compared(states[3], states[3])
    assert found.training is None and str(found).startswith("nothing that was compared differs")


def test_a_step_that_only_a_file_name_states_is_no_difference_of_equal_checkpoints(states, tmp_path):
    for step in (3, 6):
        torch.save({"model": states[3]["model"]}, tmp_path / f"step-{step}.pt")
    found = ckptools.diff(tmp_path / "step-3.pt", tmp_path / "step-6.pt", every_byte=True)
    assert (found.a.step, found.b.step, found.same, found.training) == (3, 6, True, None)


def test_digests_tell_which_weights_moved_and_not_how_far(states, compared, tmp_path):
    compared(states[3], states[6])
    ckptools.open(tmp_path / "a.pt").write_digests(tmp_path / "a.json")
    found = ckptools.diff(tmp_path / "a.json", tmp_path / "b.pt")
    assert training_line(found) == "looks like 3 steps of training: 8 of 10 tensors moved; lr 0.0007 → 4e-04"


# -- what is odd in the second state -----------------------------------------------------------------------------------


def of_layer(b, a, n, key="model"):
    for name in b[key]:
        if name.startswith(f"layers.{n}."):
            b[key][name] = a[key][name]


def layers_left_behind(a, b):
    of_layer(b, a, 0)
    of_layer(b, a, 1)


def a_name_more(_, b):
    b["model"]["more"] = torch.ones(3)


def another_shape(_, b):
    b["model"]["embed.weight"] = torch.ones(51, 40)


def exchanged(_, b):
    model = b["model"]
    model["layers.0.weight"], model["layers.2.weight"] = model["layers.2.weight"], model["layers.0.weight"]


def not_a_number(_, b):
    b["model"]["layers.1.weight"][3, 3] = float("nan")


def moment_not_a_number(_, b):
    b["optimizer"]["state"][0]["exp_avg"][0] = float("nan")


def optimizer_left_behind(a, b):
    b["optimizer"] = a["optimizer"]


def model_left_behind(a, b):
    b["model"] = a["model"]


def step_left_behind(a, b):
    b["global_step"] = a["global_step"]


def counters_go_back(_, b):
    for state in b["optimizer"]["state"].values():
        state["step"] = torch.tensor(1.0)


def one_counter_stands_still(a, b):
    b["optimizer"]["state"][4]["step"] = a["optimizer"]["state"][4]["step"]


ODD = {
    layers_left_behind: "4 of 8 trained tensors did not move (by their stated CRC-32): layers.{0, 1}",
    a_name_more: "another model: 1 name is in one only",
    another_shape: "another model: 1 tensor of another shape",
    exchanged: "2 tensors unrelated to A's: layers.0.weight, layers.2.weight (exchanged, or made anew?)",
    not_a_number: "NaN or infinity in B: 1 tensor: layers.1.weight",
    moment_not_a_number: "NaN or infinity in B: 1 tensor: optimizer.state.layers.0.weight.exp_avg",
    optimizer_left_behind: "none of 16 optimizer states moved; optimizer steps stand still at 3",
    model_left_behind: "8 of 8 trained tensors did not move (by their stated CRC-32): layers.{0..3}",
    counters_go_back: "8 of 8 optimizer steps went the other way: 3 → 1",
    one_counter_stands_still: "1 tensor moved, but not their optimizer step: layers.2.weight",
}


@pytest.mark.parametrize("harm", ODD, ids=lambda harm: harm.__name__)
def test_what_does_not_look_like_training_is_said_first(harm, states, compared):
    a, b = deepcopy(states[3]), deepcopy(states[6])
    harm(a, b)
    found = compared(a, b)
    assert found.training.looks_normal is False and "; ".join(found.training.odd) == ODD[harm]
    assert training_line(found).startswith(f"step 3 → 6, but {ODD[harm]}")


def test_weights_that_moved_within_a_step_are_odd(states, compared):
    b = deepcopy(states[6])
    step_left_behind(states[3], b)
    found = compared(states[3], b)
    assert found.training.odd == ("weights moved, and the step did not",) and found.training.looks_normal is False
    assert training_line(found).startswith("step 3 in both, but 8 of 10 tensors moved, by ")


@pytest.mark.parametrize(("step", "start"), [(6, "step 3 → 6, but "), (3, "step 3 in both, but 9 of 10 tensors moved")])
def test_another_seed_is_not_taken_for_training(states, compared, step, start):
    found = compared(states[3], Training(seed=7).states[step])
    assert found.training.looks_normal is False and training_line(found).startswith(start)
    assert "values are unrelated (median cosine 0.0" in training_line(found)


def test_two_models_have_no_name_in_common(states, compared):
    b = deepcopy(states[6])
    b["model"] = {f"other.{name}": value for name, value in b["model"].items()}
    assert "another model: no name is in both" in compared(states[3], b).training.odd


# -- what may be training or not ---------------------------------------------------------------------------------------


def test_layers_that_are_frozen_on_the_way_are_told_by_their_optimizer_steps(compared):
    states = Training(freeze_at=3).states
    found = compared(states[3], states[6])
    words = (
        "2 of 8 trained tensors did not move (by their stated CRC-32): layers.0, and neither did their optimizer steps"
    )
    assert found.training.looks_normal is None and found.training.unsure == (f"{words} (frozen?)",)
    assert training_line(found).startswith("step 3 → 6: 6 of 10 tensors moved, by ")


def test_steps_that_a_coarse_dtype_rounds_off_are_not_called_odd(states, compared):
    a, b = deepcopy(states[3]), deepcopy(states[6])
    for state in (a, b):
        state["model"] = {name: value.to(torch.bfloat16) for name, value in state["model"].items()}
    of_layer(b, a, 2)
    found = compared(a, b)
    (words,) = found.training.unsure
    assert words.endswith("layers.2 (bf16 rounds small changes off?)") and found.training.looks_normal is None


def test_without_optimizer_state_nobody_knows_which_weights_are_trained(states, compared):
    a, b = ({name: state[name] for name in ("model", "global_step")} for state in (states[3], states[6]))
    found = compared(a, b)
    assert found.training.looks_normal is None
    assert training_line(found).endswith(
        "2 tensors did not move (by their stated CRC-32): mask, embed.weight "
        "(no optimizer state tells which are trained)"
    )


def test_weights_alone_are_counted_without_a_step(states, compared):
    found = compared({"model": states[3]["model"]}, {"model": states[6]["model"]})
    assert found.training.steps is None and found.training.looks_normal is None
    assert training_line(found).startswith("8 of 10 tensors moved, by ")
    assert training_line(found).endswith("; neither states its step")


def test_another_dtype_is_no_step_of_training(states, compared):
    b = deepcopy(states[6])
    b["model"] = {name: value.to(torch.bfloat16) for name, value in b["model"].items()}
    found = compared(states[3], b)
    assert found.training.unsure == ("10 tensors in another dtype: fp32 → bf16",)
    assert (found.training.looks_normal, found.training.weights) == (None, 0)


def test_a_step_that_counts_something_else_than_the_optimizer_is_said(states, compared):
    a, b = deepcopy(states[3]), deepcopy(states[6])
    a["global_step"], b["global_step"] = 30, 60  # ten batches for each step of the optimizer
    assert compared(a, b).training.looks_normal is True
    b["global_step"] = 50
    assert compared(a, b).training.unsure == ("optimizer steps 3 → 6",)
