"""What the ranks of a real run leave in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckptools.training.output import Created
from tests.training.conftest import Command
from tests.training.rank_files import join, load, load_all, local_tensors
from tools import demo


def test_the_same_seed_gives_the_same_bytes(fsdp1: Command, torchrun: Command) -> None:
    for one, other in zip(*(load_all(run.out, "ep0-*.pt") for run in (fsdp1, torchrun)), strict=True):
        first, second = dict(local_tensors(one)), dict(local_tensors(other))
        assert first.keys() == second.keys()
        assert all(demo.same(first[name], second[name]) for name in first)


def test_fsdp1_files_hold_sharded_tensors(fsdp1: Command) -> None:
    model = load(fsdp1.out / "ep0-ba5-rank1.pt")["state"]["model"]
    plain = {name for name, value in model.items() if not isinstance(value, ShardedTensor)}
    assert plain == {"positions", "logit_scale", "seen"}


def test_fsdp2_files_hold_dtensors(fsdp2: Created) -> None:
    model = load(fsdp2.out / "ep0-ba5-rank1.pt")["state"]["model"]
    plain = {name for name, value in model.items() if not isinstance(value, DTensor)}
    assert plain == {"positions", "logit_scale", "seen"}


def test_a_rank_owns_nothing_of_a_parameter_with_fewer_rows_than_ranks(fsdp1: Command, fsdp2: Created) -> None:
    sharded = load(fsdp1.out / "ep0-ba5-rank2.pt")["state"]["model"]["start"]
    assert (sharded._local_shards, sharded._metadata.size) == ([], (1, 65))
    assert load(fsdp2.out / "ep0-ba5-rank1.pt")["state"]["model"]["start"]._local_tensor.shape == (0, 65)


def test_the_embedding_is_the_head(ddp: Created, fsdp1: Command) -> None:
    model = torch.load(ddp.first, weights_only=False)["state"]["model"]
    assert model["emb.weight"].data_ptr() == model["head.weight"].data_ptr()
    model = torch.load(fsdp1.out / "full.pt")["model"]
    assert torch.equal(model["emb.weight"], model["head.weight"])


def test_buffers_stay_whole_and_one_counts_tokens(fsdp1: Command) -> None:
    models = [content["state"]["model"] for content in load_all(fsdp1.out, "ep0-*.pt")]
    assert {(model["seen"].item(), model["positions"].dtype) for model in models} == {(5 * 8 * 31, torch.int64)}
    assert all(torch.equal(model["logit_scale"], torch.tensor(65**-0.5)) for model in models)


def test_a_frozen_parameter_is_saved_but_not_optimized(fsdp1: Command) -> None:
    full = torch.load(fsdp1.out / "full.pt")
    assert "position" in full["model"]
    assert "position" not in full["optimizer"]["state"]
    assert full["model"].keys() - full["optimizer"]["state"].keys() == {
        "position", "head.weight", "positions", "logit_scale", "seen"
    }  # fmt: skip


def test_only_matrices_decay(fsdp1: Command) -> None:
    full = torch.load(fsdp1.out / "full.pt")
    decayed, rest = full["optimizer"]["param_groups"]
    assert (decayed["weight_decay"] > 0, rest["weight_decay"]) == (True, 0.0)
    assert all(full["model"][name].ndim == 2 for name in decayed["params"])
    assert all(full["model"][name].ndim == 1 for name in rest["params"])


def save(joined: dict[str, Any], path: Path) -> None:
    """Save what plain torch.load reads back: model and optimizers."""
    torch.save({"state": {key: joined["state"][key] for key in ("model", "optimizers")}}, path)


def test_a_single_wrong_bit_is_noticed(fsdp1: Command, tmp_path: Path) -> None:
    joined = join(load_all(fsdp1.out, "ep0-*.pt"))
    joined["state"]["model"]["norm.weight"].view(torch.int32)[3] ^= 1
    save(joined, tmp_path / "joined.pt")
    assert demo.compare(tmp_path / "joined.pt", fsdp1.out / "full.pt")[1] == ["model / norm.weight"]
