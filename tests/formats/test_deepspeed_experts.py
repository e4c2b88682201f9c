"""Experts of DeepSpeed: param groups that are cut over fewer ranks, numbers of one rank, files of their own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.deepspeed.weights import ExpertLayout, globally
from ckptools.formats.deepspeed.zero_stages import PartitionRun
from tests.formats.deepspeed_writer import SLOTS, Run, deepspeed_classes, values
from tests.formats.test_deepspeed import of_torch, raw
from tests.formats.test_deepspeed_parallel import edited

DENSE = {"embed.weight": (11, 5), "gate.wg.weight": (4, 5)}


def expert(layer: int, number: int, part: str) -> str:
    return f"moe.{layer}.deepspeed_moe.experts.deepspeed_experts.{number}.{part}"


@dataclass
class Trained:
    """A run with layers of experts, each spread over `spread[layer]` groups of ranks."""

    world: int = 4
    experts: int = 4
    spread: tuple[int, ...] = (2,)
    parts: tuple[tuple[str, tuple[int, ...]], ...] = (("a.weight", (3, 5)), ("a.bias", (3,)))
    data_first: bool = False
    other_order: tuple[int, ...] = ()
    groups_each: int = 1

    def master(self) -> dict[str, torch.Tensor]:
        layers = range(len(self.spread))
        shapes = {expert(k, n, part): shape for k in layers for n in range(self.experts) for part, shape in self.parts}
        return values({**DENSE, **shapes})

    def local(self, layer: int, rank: int) -> list[tuple[str, str]]:
        """Names on a rank, and those of the same parameters in the whole model."""
        size = self.spread[layer]
        each, e = self.experts // size, rank // (self.world // size) if self.data_first else rank % size
        return [
            (expert(layer, i, part), expert(layer, e * each + i, part)) for i in range(each) for part, _ in self.parts
        ]

    def state_of(self, rank: int, sizes: list[int]) -> tuple[list[Run], list[int], list[int]]:
        """One run for each param group: its parameters, number of partitions, and this rank's."""
        full = self.master()
        runs, places, counts = [Run({n: full[n] for n in DENSE}, [list(DENSE)], self.world)], [rank], [self.world]
        for size in sizes:
            layers = [k for k, n in enumerate(self.spread) if n == size]
            own = {here: full[name] for k in layers for here, name in self.local(k, rank)}
            count = self.world // size
            for names in (list(own)[k :: self.groups_each] for k in range(self.groups_each)):
                runs.append(Run({n: own[n] for n in names}, [names], count))
                places.append(rank % count if self.data_first else rank // size)
                counts.append(count)
        return runs, places, counts

    def save(self, folder: Path) -> Path:
        tag = folder / "global_step7"
        tag.mkdir(parents=True)
        full, sizes = self.master(), sorted(set(self.spread))
        with deepspeed_classes():
            for rank in range(self.world):
                order = sizes[::-1] if rank in self.other_order else sizes
                torch.save(self._optim(rank, order), tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            runs, _, _ = self.state_of(0, sizes)
            config = {"use_data_before_expert_parallelism": self.data_first}
            states = Run({n: full[n] for n in DENSE}, [list(DENSE)], self.world, config=config).model_states(0)
            states["param_shapes"] = [{n: t.shape for n, t in run.master.items()} for run in runs]
            states["num_experts"] = [self.experts] * len(self.spread)
            torch.save(states, tag / "mp_rank_00_model_states.pt")
        for layer in range(len(self.spread)):
            for n in range(self.experts):
                own = {expert(layer, n, part): full[expert(layer, n, part)] for part, _ in self.parts}
                torch.save(own, tag / f"layer_{layer}_expert_{n}_mp_rank_00_model_states.pt")
        return tag

    def _optim(self, rank: int, sizes: list[int]) -> dict[str, Any]:
        runs, places, counts = self.state_of(rank, sizes)
        cut = [run.partitions(place) for run, place in zip(runs, places, strict=True)]
        state = dict(cut[0])
        for key in ("single_partition_of_fp32_groups", "group_paddings", "param_slice_mappings"):
            state[key] = [one[key][0] for one in cut]
        state["partition_count"] = counts
        names = ["dense", *(f"ep_size_{size}" for size in sizes for _ in range(self.groups_each))]
        groups = [{"lr": 0.1, "name": name, "moe": k > 0, "params": [k]} for k, name in enumerate(names)]
        states = {k: one["base_optimizer_state"]["state"][0] for k, one in enumerate(cut)}
        state["base_optimizer_state"] = {"state": states, "param_groups": groups}
        return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}

    def check(self, folder: Path) -> None:
        ck, full = ckptools.open(folder, all_ranks=True), self.master()
        assert (ck.whole, [str(p) for p in ck.problems if p.severity == "error"]) == (True, [])
        assert {n: raw(ck.model[n]) for n in ck.model} == {n: of_torch(t) for n, t in full.items()}
        state = ck.optimizers["optimizer"].state
        for n, t in full.items():
            expected = [of_torch(t * (3 if slot == "exp_avg" else 5) + 0.5) for slot in SLOTS]
            assert [raw(state[n][slot]) for slot in SLOTS] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained",
    [
        Trained(),
        Trained(world=6, experts=6, spread=(3, 2)),
        Trained(world=3, experts=3, spread=(3,)),
        Trained(world=4, spread=(2, 1)),
        Trained(world=2, experts=2, spread=(1,)),
        Trained(world=6, experts=3, spread=(3,), data_first=True),
        Trained(spread=(2, 4), groups_each=2),
        Trained(parts=(("w", (1,)), ("b", (2, 1)), ("e", (0, 3)))),
    ],
)
def test_experts_have_the_models_numbers_and_their_own_values(tmp_path, trained):
    trained.save(tmp_path)
    trained.check(tmp_path)


def test_ranks_that_list_the_groups_of_experts_in_another_order_are_joined_by_their_names(tmp_path):
    trained = Trained(spread=(2, 4), other_order=(1, 3))
    trained.save(tmp_path)
    trained.check(tmp_path)


def test_what_is_whole_can_be_written(tmp_path):
    trained = Trained(world=6, experts=6, spread=(3, 2))
    trained.save(tmp_path)
    ckptools.consolidate(tmp_path, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(saved["model"][n], t) for n, t in trained.master().items())


def test_the_experts_own_files_are_the_modules_weights(tmp_path):
    tag = Trained().save(tmp_path)
    name = expert(0, 3, "a.bias")
    edited(tag / "layer_0_expert_3_mp_rank_00_model_states.pt", lambda t: t[name].fill_(9))
    low = ckptools.open(tmp_path, weights="module", all_ranks=True)
    assert low.model[name].load().tolist() == [9.0] * 3
    assert ckptools.open(tmp_path, all_ranks=True).model[name].load().tolist() != [9.0] * 3


def test_frozen_weights_of_experts_come_from_their_own_files(tmp_path):
    trained = Trained()
    tag = trained.save(tmp_path)
    for n in range(4):
        path = tag / f"layer_0_expert_{n}_mp_rank_00_model_states.pt"
        edited(path, lambda t, n=n: t.update({expert(0, n, "still"): torch.full((2,), float(n))}))
    model = ckptools.open(tmp_path, all_ranks=True).model
    assert [model[expert(0, n, "still")].load().tolist() for n in range(4)] == [[float(n)] * 2 for n in range(4)]


@pytest.mark.parametrize(
    "name", ["layer_0_expert_3_mp_rank_00_model_states.pt", "zero_pp_rank_3_mp_rank_00_optim_states.pt"]
)
def test_a_missing_file_of_an_expert_is_named(tmp_path, name):
    tag = Trained().save(tmp_path)
    (tag / name).unlink()
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert not ck.whole and any(p.code == "CK001" and name in str(p) for p in ck.problems)
    with pytest.raises(NotWholeError):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_an_experts_file_under_another_experts_name_is_a_copy(tmp_path):
    tag = Trained(spread=(2, 2)).save(tmp_path)
    one, other = (tag / f"layer_{k}_expert_1_mp_rank_00_model_states.pt" for k in range(2))
    shutil.copy(one, other)
    assert {p.code for p in ckptools.open(tmp_path).problems if p.severity == "error"} == {"CK009"}
    shutil.copy(tag / "layer_1_expert_2_mp_rank_00_model_states.pt", other)
    assert {p.code for p in ckptools.open(tmp_path).problems if p.severity == "error"} == {"CK009"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop("num_experts"), "no file says how many experts"),
        (lambda t: t["param_shapes"].__setitem__(1, {"odd.w": (3, 5), "odd.b": (33,)}), "no expert of DeepSpeed's"),
    ],
)
def test_experts_whose_number_nothing_proves_are_refused_and_no_damage(tmp_path, change, why):
    tag = Trained().save(tmp_path)
    edited(tag / "mp_rank_00_model_states.pt", change)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert {(p.code, p.severity) for p in ck.problems if p.code != "CK301"} == {("CK106", "warning")}
    with pytest.raises(NotWholeError, match=why):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_without_zero_every_expert_ranks_own_optimizer_is_kept(tmp_path):
    tag = Trained().save(tmp_path)
    groups = [{"params": [0], "name": "dense"}, {"params": [1], "name": "ep_size_2", "moe": True}]
    for rank in range(2):
        state = {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.full((3,), float(rank))}}
        tree = {"optimizer": {"state": state, "param_groups": groups}}
        torch.save(tree, tag / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    for path in tag.glob("zero_pp*"):
        path.unlink()
    edited(tag / "mp_rank_00_model_states.pt", lambda t: t.update(param_shapes=None, optimizer=tree["optimizer"]))
    ck = ckptools.open(tmp_path)
    assert ck.whole and list(ck.raw["optimizer"]) == ["expp_rank_0", "expp_rank_1"]
    (tag / "expp_rank_1_mp_rank_00_optim_states.pt").unlink()
    ck = ckptools.open(tmp_path)
    assert (ck.whole, [p.code for p in ck.problems if p.severity == "error"]) == (False, ["CK001"])


def test_fused_experts_of_autoep_are_rows_of_one_tensor(tmp_path):
    """A rank's experts are one tensor there, and `expert_placement` says which they are."""
    full = values({"moe.experts.w1": (4, 3, 2)})["moe.experts.w1"]
    placed = [[0, 2], [1, 3]]
    layer = {"expert_key_prefix": "moe.experts", "num_experts": 4, "num_local_experts": 2, "ep_size": 2}
    layer["expert_placement"] = {"version": 1, "ranks": [{"rank": e, "experts": n} for e, n in enumerate(placed)]}
    dense = values({"w": (5, 3)})
    with deepspeed_classes():
        for rank in range(4):
            runs = [Run(dense, [["w"]], 4), Run({"moe.experts.w1": full[placed[rank % 2]]}, [["moe.experts.w1"]], 2)]
            cut = [runs[0].partitions(rank), runs[1].partitions(rank // 2)]
            keys = ("single_partition_of_fp32_groups", "group_paddings", "param_slice_mappings", "partition_count")
            state = {**cut[0], **{key: [one[key][0] for one in cut] for key in keys}}
            groups = [{"lr": 0.1, "params": [k]} for k in range(2)]
            states = {k: one["base_optimizer_state"]["state"][0] for k, one in enumerate(cut)}
            state["base_optimizer_state"] = {"state": states, "param_groups": groups}
            torch.save({"optimizer_state_dict": state}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        states = Run(dense, [["w"]], 4).model_states(0) | {"ds_autoep_layers": [layer], "num_experts": [4]}
        states["param_shapes"] = [{"w": (5, 3)}, {"moe.experts.w1": (2, 3, 2)}]
        torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
    for n in range(4):
        own = {f"moe.experts.w1.{n}": full[n].clone()}
        torch.save(own, tmp_path / f"layer_0_expert_{n}_mp_rank_00_model_states.pt")
    for weights in ("fp32", "module"):
        ck = ckptools.open(tmp_path, weights=weights, all_ranks=True)
        assert (ck.whole, sorted(ck.model)) == (True, ["moe.experts.w1", "w"])
        assert raw(ck.model["moe.experts.w1"]) == of_torch(full)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_runs_of_fused_experts_keep_every_element(local, each, data):
    numbers = data.draw(st.permutations(range(8)))[:local]
    start = data.draw(st.integers(0, local * each - 1))
    length = data.draw(st.integers(1, local * each - start))
    run = PartitionRun("m.w1", start, length, (0, 0, 0), 5)
    moved = [(r.start + i, r.at + i) for r in globally(run, numbers, (local, each)) for i in range(r.length)]
    expected = [(numbers[i // each] * each + i % each, 5 + i - start) for i in range(start, start + length)]
    assert moved == expected


@pytest.mark.parametrize(("first", "expected"), [(False, [[0, 2], [1, 3]]), (True, [[0, 1], [2, 3]])])
def test_ranks_that_share_experts(first, expected):
    assert ExpertLayout(data_first=first).ranks(4, 2) == expected
