"""Rank files under the names, and with the neighbours, that frameworks give them.

The fake process group makes one rank of a world that is not there, so that each rank's real ShardedTensors and DTensors
are saved here, cut as FSDP cuts them.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

import ckptools
from tests.fake_world import fake_group
from tests.pickles.test_tensors import same_bits
from tests.truth import FIXTURES, load_truth

WORLD = 3
VERL = FIXTURES / "verl-fsdp2-bf16" / "ckpt" / "global_step_3" / "actor"


def net() -> dict[str, torch.Tensor]:
    return {
        "0.weight": torch.arange(35.0).reshape(7, 5),
        "1.weight": torch.arange(8.0).reshape(2, 4),
        "n": torch.tensor(3),
    }


def cut(full: torch.Tensor, rank: int) -> torch.Tensor | ShardedTensor:
    """What FSDP1 saves of a parameter on a rank: its chunk along dim 0, and where those of all ranks lie."""
    if not full.ndim:
        return full
    shards, pieces, start = [], full.chunk(WORLD), 0
    for owner, piece in enumerate(pieces):
        shards.append(ShardMetadata([start, 0], list(piece.shape), f"rank:{owner}/cpu"))
        start += len(piece)
    mine = [Shard(pieces[rank].clone(), shards[rank])] if rank < len(pieces) else []
    metadata = ShardedTensorMetadata(shards, full.shape, TensorProperties(full.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


Files = Callable[[int, dict[str, Any], dict[str, Any]], dict[str, Any]]
"""From a rank, its model's and its optimizer's state dict: what it saves, by file name."""


def save(folder: Path, files: Files) -> Path:
    """Let every rank write its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(WORLD):
        with warnings.catch_warnings(), fake_group(rank, WORLD):
            warnings.simplefilter("ignore")
            model = {fqn: cut(tensor, rank) for fqn, tensor in net().items()}
            moments = {fqn: {"exp_avg": tensor, "step": torch.tensor(5.0)} for fqn, tensor in list(model.items())[:2]}
            optim = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]}
            for name, tree in files(rank, model, optim).items():
                torch.save(tree, folder / name)
    return folder


def whole_model(ck: ckptools.Checkpoint) -> None:
    assert (ck.whole, ck.world_size.value, ck.ranks) == (True, WORLD, (0, 1, 2))
    wanted = net()
    assert list(ck.model) == list(wanted)
    for fqn, tensor in wanted.items():
        same_bits(ck.model[fqn].load(), tensor)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_rank{}.bin", "pytorch_model_fsdp_1_rank{}.bin"])
def test_accelerates_rank_files_are_a_bare_model(name, tmp_path):
    save(tmp_path, lambda rank, model, _: {name.format(rank): model, f"random_states_{rank}.pkl": {}})
    whole_model(ckptools.open(tmp_path / name.format(1)))
    whole_model(ckptools.open(tmp_path, all_ranks=True))


def test_two_models_of_accelerate_are_told_apart(tmp_path):
    names = ("pytorch_model_fsdp_rank{}.bin", "pytorch_model_fsdp_1_rank{}.bin")
    save(tmp_path, lambda rank, model, _: {name.format(rank): model for name in names})
    whole_model(ckptools.open(tmp_path / "pytorch_model_fsdp_1_rank2.bin"))
    assert len(ckptools.open(tmp_path).of_kind("model")) == 2


def test_a_model_and_an_optimizer_of_the_same_ranks_are_told_apart(tmp_path):
    save(
        tmp_path,
        lambda r, model, optim: {f"pytorch_model_fsdp_0_rank{r}.bin": model, f"optimizer_0_rank{r}.bin": optim},
    )
    whole_model(ckptools.open(tmp_path / "pytorch_model_fsdp_0_rank0.bin"))
    ck = ckptools.open(tmp_path / "optimizer_0_rank0.bin")
    assert [s.kind for s in ck.sections] == ["optimizer"] and ck.whole


def test_olmos_rank_files_have_model_optimizer_and_counters(tmp_path):
    trainer = {"epoch": 0, "global_step": 1000, "world_size": WORLD, "rng": {"torch": torch.get_rng_state()}}
    folder = save(
        tmp_path / "step1000", lambda r, model, optim: {f"rank{r}.pt": {"model": model, "optim": optim, **trainer}}
    )
    (folder / "config.yaml").write_text("run_name: x\n")
    ck = ckptools.open(folder)
    whole_model(ck)
    assert {s.kind for s in ck.sections} >= {"model", "optimizer", "rng"}
    assert ck.optimizers["optim"].state["0.weight"]["exp_avg"].shape == (7, 5)
    assert (ck.step.value, ck.step.agree, ck.name) == (1000, True, "step1000")


def test_the_train_folder_of_olmo_is_opened_by_itself(tmp_path):
    folder = tmp_path / "step1000" / "train"
    folder.mkdir(parents=True)
    for rank in range(2):
        torch.save({"global_step": 1000, "rng": {"torch": torch.full((4,), rank)}}, folder / f"rank{rank}.pt")
    ck = ckptools.open(folder)
    assert (ck.whole, ck.step.value, ck.ranks) == (True, 1000, (0, 1))


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "pt.gz", "pth.xz"])
def test_siblings_of_every_suffix_are_found(suffix, tmp_path):
    save(tmp_path, lambda rank, model, _: {f"state.rank_{rank}.{suffix}": {"model": model}})
    pack = {"gz": gzip.compress, "xz": lzma.compress}.get(suffix.rpartition(".")[2], bytes)
    for path in tmp_path.iterdir():
        path.write_bytes(pack(path.read_bytes()))
    whole_model(ckptools.open(tmp_path / f"state.rank_2.{suffix}"))
    (tmp_path / f"state.rank_1.{suffix}").unlink()
    assert [(p.code, p.rank) for p in ckptools.open(tmp_path).problems] == [("CK001", 1)]


# -- verl --------------------------------------------------------------------------------------------------------


@pytest.fixture
def actor(tmp_path) -> Path:
    return shutil.copytree(VERL, tmp_path / "global_step_3" / "actor")


def test_what_verl_puts_beside_its_rank_files_is_in_nobodys_way(actor):
    before = ckptools.open(VERL)
    adapter = actor / "lora_adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "peft_type": "LORA"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}))
    (actor / "huggingface").mkdir(exist_ok=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    ck = ckptools.open(actor)
    assert (ck.whole, ck.world_size, list(ck.model)) == (True, before.world_size, list(before.model))


def test_the_step_folder_of_verl_names_actor_and_critic(actor):
    shutil.copytree(actor, actor.parent / "critic")
    torch.save({}, actor.parent / "data.pt")
    with pytest.raises(ckptools.CkptoolsError, match="name the one you mean: actor, critic"):
        ckptools.open(actor.parent)


def test_hsdp_of_verl_is_read_with_every_replica(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Sharded

    full = torch.arange(30.0).reshape(5, 6)
    for rank in range(4):
        with fake_group(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
            local = full.chunk(2)[rank % 2].clone()
            tensor = DTensor.from_local(local, mesh, [Replicate(), Sharded(0)], shape=full.shape, stride=full.stride())
            torch.save({"w": tensor}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 4}))
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.whole, ck.model["w"].mesh) == (True, (2, 2))
    same_bits(ck.model["w"].load(), full)
    assert ckptools.consolidate(tmp_path, tmp_path / "w.safetensors").tensors == 1


@pytest.mark.parametrize("world_too", [False, True])
def test_meshes_over_some_of_the_ranks_do_not_contradict_each_other(world_too, tmp_path):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Sharded

    full = torch.arange(28.0).reshape(7, 4)
    for rank in range(4):
        with fake_group(rank, 4):
            model, meshes = {}, {f"stage{rank // 2}": DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])}
            for name, mesh in (meshes | ({"all": init_device_mesh("cpu", (4,))} if world_too else {})).items():
                local = full.chunk(mesh.size())[mesh.get_local_rank()].clone()
                model[name] = DTensor.from_local(local, mesh, [Sharded(0)], shape=full.shape, stride=full.stride())
            torch.save({"model": model}, tmp_path / f"rank{rank}.pt")
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.whole, ck.world_size.value, len(ck.model)) == (True, 4, 2 + world_too)
    same_bits(ck.model["stage1"].load(), full)
    (tmp_path / "rank3.pt").unlink()
    assert [p.code for p in ckptools.open(tmp_path, all_ranks=True).problems][:1] == ["CK001"]


def test_state_of_torchrec_s_fused_optimizer_equals_the_truth():
    held = ckptools.open(FIXTURES / "torchrec-w3/ckpt", all_ranks=True).raw["optimizer"]["state"]
    truth = {key: value for key, value in load_truth("torchrec-w3").items() if key.startswith("optim/")}
    assert {key.split("/")[1] for key in truth} == held.keys() and len(truth) == 4
    for key, (dtype, data, shape) in truth.items():
        _, table, slot = key.split("/")
        value = held[table][slot].load()
        assert (str(value.dtype), tuple(value.shape), value.numpy().tobytes()) == (f"torch.{dtype}", shape, data)
