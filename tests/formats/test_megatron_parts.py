"""Weights that Megatron stores stacked or in parts: layers, experts, gates and ups, fused projections."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.megatron_dist import stored as stacked
from ckptools.formats.megatron_dist.stored import EXPERTS, count_stacks, join_in_tree, join_parts, split_stacks
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from tests.formats.test_megatron_dist import write

MLP = "decoder.layers.1.mlp"
FC1, FC2 = f"{MLP}.experts.experts.linear_fc1.weight", f"{MLP}.experts.experts.linear_fc2.weight"
GATE, UP = torch.arange(12.0).reshape(3, 4), torch.arange(12.0, 24.0).reshape(3, 4)


def moe(folder: Path, rows: int = 4, **more: torch.Tensor) -> Path:
    """A torch_dist folder of one layer of experts, whose router has so many rows."""
    flat = {f"{MLP}.router.weight": torch.randn(rows, 2), FC1: torch.randn(4, 6, 2), FC2: torch.randn(4, 2, 3), **more}
    return write(folder, flat, {"iteration": 1})


# -- experts -----------------------------------------------------------------------------------------------------------


def test_stacked_experts_come_apart_by_their_number(tmp_path):
    moments = {f"optimizer.state.exp_avg.{FC1}": torch.randn(4, 6, 2)}
    ck = ckptools.open(moe(tmp_path / "run", **moments))
    stored = ckptools.open(tmp_path / "run" / ".metadata").tree
    (optimizer,) = ck.optimizers.values()
    for n in range(4):
        name = FC1.replace("experts.linear", f"experts.{n}.linear")
        assert torch.equal(ck.model[name].load(), stored[FC1].load()[n])
        assert torch.equal(optimizer.state[name]["exp_avg"].load(), stored[f"optimizer.state.exp_avg.{FC1}"].load()[n])
    assert FC1 not in ck.model and list(ck.model)[1:3] == [
        f"{MLP}.experts.experts.0.linear_{layer}.weight" for layer in ("fc1", "fc2")
    ]


def test_experts_that_the_router_does_not_count_stay_as_stored(tmp_path):
    ck = ckptools.open(moe(tmp_path / "run", rows=5))
    assert {FC1, FC2} <= set(ck.model)
    assert any("does not show the number of experts" in p.message for p in ck.problems)


def test_stacked_layers_of_stacked_experts_come_apart_twice(tmp_path):
    stack = torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    folder = write(tmp_path / "run", {"decoder.layers.mlp.experts.experts.linear_fc2.weight": stack}, {"iteration": 1})
    model = ckptools.open(folder).model
    names = [f"decoder.layers.{n}.mlp.experts.experts.{e}.linear_fc2.weight" for n in range(2) for e in range(3)]
    assert list(model) == names
    assert all(torch.equal(t.load(), stack.reshape(6, 4)[n]) for n, t in enumerate(model.values()))


def test_a_forged_number_of_experts_makes_no_tensors(monkeypatch):
    monkeypatch.setattr(stacked, "MAX_MADE", 5)
    named = {FC1: Tensor((4, 6, 2), "float32", ()), FC2: Tensor((4, 2, 3), "float32", ())}
    counts, odd = count_stacks(EXPERTS, named, {})
    assert (counts, odd) == ({}, [f"{MLP}.experts.experts"]) and split_stacks(EXPERTS, named, counts) == named


# -- parts -------------------------------------------------------------------------------------------------------------


def test_gates_and_ups_of_singleton_shards_are_one_weight_in_the_optimizer_too(tmp_path):
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    flat = {f"{name}_w": GATE, f"{name}_v": UP}
    flat |= {f"optimizer.state.exp_avg.{name}_{part}": t + 1 for part, t in (("v", UP), ("w", GATE))}
    ck = ckptools.open(write(tmp_path / "run", flat, {"iteration": 1}))
    (optimizer,) = ck.optimizers.values()
    assert torch.equal(ck.model[name].load(), torch.cat([GATE, UP])) and set(ck.model) == {name}
    assert torch.equal(optimizer.state[name]["exp_avg"].load(), torch.cat([GATE, UP]) + 1)


def test_a_weight_that_lacks_a_part_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "run", {"decoder.layers.0.mlp.linear_fc1.weight_w": GATE}, {"iteration": 1})
    ck = ckptools.open(folder)
    (problem,) = [p for p in ck.problems if p.severity == "error"]
    assert (problem.code, problem.tensor) == ("CK107", "model.decoder.layers.0.mlp.linear_fc1.weight")
    assert "of which v has no key" in problem.message and not ck.whole
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    "other", [Tensor((3, 5), "float32", ()), Tensor((3, 4), "bfloat16", ()), Tensor((), "float32", ()), 7]
)
def test_parts_that_do_not_fit_stay_as_stored(other):
    values = {"a.linear_fc1.weight_w": Tensor((3, 4), "float32", ()), "a.linear_fc1.weight_v": other}
    assert join_parts(values) == (values, {})


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.integers(1, 4))
@settings(deadline=None)
def test_every_shard_of_every_part_keeps_its_place(rows, columns):
    def part(size: int) -> Tensor:
        shards = tuple(Shard(Box((n, 0), (1, columns)), n, None) for n in range(size))
        return Tensor((size, columns), "float32", shards)

    gates, ups = rows
    parts = {"b.linear_fc1.weight_v": part(ups), "b.linear_fc1.weight_w": part(gates)}
    joined, _ = join_parts({"linear_fc1.bias": 1, **parts})
    whole = joined["b.linear_fc1.weight"]
    assert (whole.shape, list(joined)) == ((gates + ups, columns), ["linear_fc1.bias", "b.linear_fc1.weight"])
    ordered = sorted(whole.shards, key=lambda s: s.box.offsets[0])
    assert [s.box.offsets[0] for s in ordered] == list(range(gates + ups))
    assert [s.rank for s in ordered] == [*range(gates), *range(ups)]


# -- fsdp_dtensor: files made by hand ---------------------------------------------------------------------------------


def fsdp_dtensor(run: Path) -> dict[str, Any]:
    """A folder as `--ckpt-format fsdp_dtensor` saves it: nested state in a DCP without Megatron's own metadata."""
    experts = {f"{MLP}.experts.linear_fc1.weight{n}_{part}": torch.randn(3, 4) for n in range(4) for part in "wv"}
    delta = {
        f"decoder.layers.0.self_attention.in_proj.weight.{word}": torch.full((n + 1, 4), float(n))
        for n, word in enumerate(("query", "key", "value", "z", "beta", "alpha"))
    }
    model = {**experts, **delta, "decoder.final_layernorm.weight": torch.ones(4)}
    state = {f"module.{k}": {"exp_avg": t + 1, "step": torch.tensor(5.0)} for k, t in model.items()}
    args = Namespace(ckpt_format="fsdp_dtensor", world_size=2)
    tree = {"args": args, "iteration": 5, "model": model, "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=run / "iter_0000005")
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    return model


def test_fused_weights_of_fsdp_dtensor_are_joined_in_the_order_of_the_module(tmp_path):
    saved = fsdp_dtensor(tmp_path / "run")
    ck = ckptools.open(tmp_path / "run")
    assert ck.saved_as.startswith("Megatron-LM fsdp_dtensor") and ck.whole and len(ck.model) == 6
    for n in range(4):
        name = f"{MLP}.experts.linear_fc1.weight{n}"
        assert torch.equal(ck.model[name].load(), torch.cat([saved[f"{name}_w"], saved[f"{name}_v"]]))
    projection = ck.model["decoder.layers.0.self_attention.in_proj.weight"].load()
    assert projection[:, 0].tolist() == [float(n) for n in range(6) for _ in range(n + 1)]


def test_the_optimizer_of_fsdp_dtensor_is_joined_alike(tmp_path):
    saved = fsdp_dtensor(tmp_path / "run")
    (optimizer,) = ckptools.open(tmp_path / "run").optimizers.values()
    name = f"{MLP}.experts.linear_fc1.weight2"
    state = next(entry for fqn, entry in optimizer.state.items() if fqn.endswith(name))
    assert torch.equal(state["exp_avg"].load(), torch.cat([saved[f"{name}_w"], saved[f"{name}_v"]]) + 1)
    assert len(optimizer.state) == 6 and float(state["step"].load()) == 5


def test_a_step_that_differs_between_parts_is_refused(tmp_path):
    name = "model0.a.linear_fc1.weight"
    steps = {f"{name}_{part}": {"step": torch.tensor(n)} for part, n in (("w", 5.0), ("v", 6.0))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optimizer": {"state": steps, "param_groups": []}}, checkpoint_id=tmp_path / "iter_0000005")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    found = ckptools.verify(tmp_path)
    assert [p.tensor for c in found.checks for p in c.problems if p.code == "CK105"] == [f"optimizer.state.{name}.step"]


def test_trees_without_parts_are_left_alone():
    tree = {"model": {"w": 1}, "optimizer": {"state": {0: {"exp_avg": 1}}}, 3: 4}
    assert join_in_tree(tree) == (tree, [])
