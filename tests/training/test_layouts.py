"""Each layout holds the keys that its framework writes."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from ckptools.training.output import Created
from tests import fake_world
from tests.training.conftest import Command
from tests.training.rank_files import load, load_all


def names(created: Created) -> list[str]:
    return [path.name for path in created.files]


def test_composer_counts_over_all_ranks(fsdp1: Command) -> None:
    stamp, *others = (content["state"]["timestamp"]["Timestamp"] for content in load_all(fsdp1.out, "ep0-*.pt"))
    assert others == [stamp, stamp]
    assert (stamp["epoch"], stamp["batch"], stamp["sample"], stamp["token"]) == (0, 5, 120, 120 * 31)
    assert isinstance(stamp["total_wct"], timedelta)


def test_composer_with_ddp_is_one_whole_file(ddp: Created) -> None:
    assert names(ddp) == ["ep0-ba5-rank0.pt", "full.pt"]
    state = torch.load(ddp.first, weights_only=False)["state"]
    assert state["model"].keys() == torch.load(ddp.out / "full.pt")["model"].keys()
    assert sorted(state["optimizers"]["AdamW"]["state"]) == list(range(43))


def test_snapshot_is_keyed_as_in_the_tutorials(snapshot: Created) -> None:
    assert names(snapshot) == ["snapshot.pt"]
    content = torch.load(snapshot.first)
    assert set(content) == {"MODEL_STATE", "OPTIMIZER_STATE", "EPOCHS_RUN"}
    assert not any(name.startswith("module.") for name in content["MODEL_STATE"])


def test_verl_splits_each_rank_into_three_files(verl: Created) -> None:
    kinds = ("extra_state", "model", "optim")
    ranks = [f"{kind}_world_size_2_rank_{rank}.pt" for kind in kinds for rank in (0, 1)]
    assert names(verl) == sorted([*ranks, "fsdp_config.json"])
    config = json.loads((verl.out / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": 1, "world_size": 2}


def test_verl_with_fsdp1_holds_dtensors_and_flat_moments(verl: Created) -> None:
    model = load(verl.out / "model_world_size_2_rank_0.pt")
    assert isinstance(model["emb.weight"], DTensor)
    state = load(verl.out / "optim_world_size_2_rank_0.pt")["state"]
    assert all(isinstance(key, int) and moments["exp_avg"].ndim == 1 for key, moments in state.items())
    assert set(load(verl.out / "extra_state_world_size_2_rank_1.pt")) == {"lr_scheduler", "rng"}


def test_dcp_names_every_entry(dcp: Created) -> None:
    assert names(dcp) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    entries = FileSystemReader(dcp.out).read_metadata().state_dict_metadata
    assert {"model.emb.weight", "optim.state.emb.weight.exp_avg", "scheduler.last_epoch", "step"} < set(entries)
    assert dcp.first == dcp.out


def test_a_file_from_a_fake_world_lists_all_its_ranks(folder: Path) -> None:
    path = fake_world.create_rank(folder / "fake", world_size=256, rank=3, parameters=4)
    state = load(path)["state"]
    moment = state["optimizers"]["AdamW"]["state"]["columns.2.weight"]["exp_avg"]
    ranks = [shard.placement.rank() for shard in moment._metadata.shards_metadata]
    assert (path.name, ranks) == ("ep0-ba1-rank3.pt", list(range(256)))
    assert moment._local_shards[0].metadata.shard_offsets == [6, 0]
