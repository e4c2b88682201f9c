"""Every choice within DDP, FSDP1, FSDP2 and HSDP: what lies in the files, and that it is the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckptools
from ckptools.training.options import CreateOptions, ParallelOptions
from tests.training.choices import train_all
from tests.training.forked import run_ranks
from tests.training.rank_files import load, load_all, local_tensors
from tools import demo

pytestmark = pytest.mark.slow

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp-bf16": ("ddp", {"precision": "bf16"}),
    "full": ("fsdp1", {"state_dict_type": "full"}),
    "grad-op": ("fsdp1", {"sharding": "grad-op"}),
    "hybrid": ("fsdp1", {"sharding": "hybrid"}),
    "hybrid-dtensor": ("fsdp1", {"sharding": "hybrid", "dtensor": True}),
    "flat": ("fsdp1", {"use_orig_params": False}),
    "local": ("fsdp1", {"state_dict_type": "local"}),
    "local-flat": ("fsdp1", {"state_dict_type": "local", "use_orig_params": False}),
    "bf16": ("fsdp1", {"precision": "bf16"}),
    "bf16-local-flat": ("fsdp1", {"precision": "bf16", "state_dict_type": "local", "use_orig_params": False}),
    "hsdp": ("hsdp", {}),
    "fsdp2-bf16": ("fsdp2", {"precision": "bf16"}),
    "hsdp-bf16": ("hsdp", {"precision": "bf16"}),
}


RANK_0 = "ep0-ba2-rank0.pt"


def asked(out: Path, strategy: str, **parallel: Any) -> CreateOptions:
    return CreateOptions(out, strategy, steps=2, full=True, parallel=ParallelOptions(**parallel))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder per run, of four ranks and two steps each, with full.pt in it."""
    folder = tmp_path_factory.mktemp("choices")
    all_runs = [asked(folder / name, strategy, **more) for name, (strategy, more) in RUNS.items()]
    run_ranks(4, train_all, all_runs)
    return folder


def model_of(run: Path, rank: int = 0) -> dict[str, Any]:
    return load(run / RANK_0.replace("0.pt", f"{rank}.pt"))["state"]["model"]  # type: ignore[no-any-return]


def compared(run: Path, tmp_path: Path, shapes: Path | None = None) -> list[str]:
    """Names of tensors that ckptools' consolidated file lacks, or has with other bits than torch gathered."""
    ckptools.open(run / RANK_0, shapes=shapes).consolidate(tmp_path / "all.pt")
    return demo.compare(tmp_path / "all.pt", run / "full.pt")[1]


def losses(run: Path) -> list[float]:
    return json.loads(run.with_suffix(".json").read_text())  # type: ignore[no-any-return]


def test_flat_pieces_are_placed_by_the_optimizer_and_a_frozen_one_by_its_shape(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ckptools.CkptoolsError, match=r"CK106.*position.*give them with shapes"):
        ckptools.consolidate(runs / "local" / RANK_0, tmp_path / "all.pt")
    assert compared(runs / "local", tmp_path, shapes=runs / "local" / "full.pt") == []


@pytest.mark.parametrize("name", ["local-flat", "bf16-local-flat"])
def test_a_flat_parameter_holds_a_tied_weight_once_and_tells_one_name(name: str, runs: Path, tmp_path: Path) -> None:
    assert compared(runs / name, tmp_path) == ["model / head.weight"]


@pytest.mark.parametrize("name", ["full", "grad-op", "hybrid", "hybrid-dtensor", "flat", "local", "hsdp"])
def test_all_of_them_train_the_model_that_ddp_trains(name: str, runs: Path) -> None:
    torch.testing.assert_close(losses(runs / name), losses(runs / "ddp"), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["ddp-bf16", "bf16", "fsdp2-bf16", "hsdp-bf16"])
def test_bfloat16_rounds_while_it_computes(name: str, runs: Path) -> None:
    assert losses(runs / name) != losses(runs / "ddp")
    torch.testing.assert_close(losses(runs / name), losses(runs / "ddp"), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", [name for name in RUNS if "bf16" in name])
def test_what_is_saved_stays_float32(name: str, runs: Path) -> None:
    state = load(runs / name / RANK_0)["state"]
    dtypes = {tensor.dtype for key in ("model", "optimizers") for _, tensor in local_tensors(state[key])}
    assert dtypes == {torch.float32, torch.int64}
    assert state["metadata"]["precision"] == "amp_bf16"


def test_a_full_state_dict_is_one_file_of_rank_0(runs: Path) -> None:
    assert sorted(path.name for path in (runs / "full").iterdir()) == [RANK_0, "full.pt"]
    state = torch.load(runs / "full" / RANK_0, weights_only=False)["state"]
    assert {type(value) for value in state["model"].values()} == {torch.Tensor}
    assert state["optimizers"]["AdamW"]["state"]["blocks.1.up.weight"]["exp_avg"].shape == (261, 65)


def test_gradients_sharded_alone_leave_the_same_kind_of_file(runs: Path) -> None:
    model = model_of(runs / "grad-op", 3)
    assert sum(isinstance(value, ShardedTensor) for value in model.values()) == 45


def test_replicas_of_fsdp1_hold_equal_shards(runs: Path) -> None:
    ranks = [dict(local_tensors(content["state"])) for content in load_all(runs / "hybrid", "ep0-*.pt")]
    assert all(demo.same(ranks[0][name], ranks[2][name]) for name in ranks[0])
    assert ranks[0].keys() != ranks[1].keys()


def test_a_sharded_tensor_lists_the_ranks_of_its_replica(runs: Path) -> None:
    shards = model_of(runs / "hybrid", 3)["emb.weight"]._metadata.shards_metadata
    assert [shard.placement.rank() for shard in shards] == [2, 3]


@pytest.mark.parametrize("name", ["hsdp", "hybrid-dtensor"])
def test_a_mesh_of_two_dimensions_says_what_is_repeated(name: str, runs: Path) -> None:
    weight = model_of(runs / name, 3)["emb.weight"]
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert torch.equal(weight._local_tensor, model_of(runs / name, 1)["emb.weight"]._local_tensor)


def test_without_original_parameters_the_frozen_one_is_whole_and_one_group_has_all(runs: Path) -> None:
    model = model_of(runs / "flat", 2)
    plain = {name for name, value in model.items() if not isinstance(value, ShardedTensor)}
    assert plain == {"position", "positions", "logit_scale", "seen"}
    (group,) = torch.load(runs / "flat" / "full.pt")["optimizer"]["param_groups"]
    assert (group["weight_decay"] > 0, len(group["params"])) == (True, 43)


def test_a_local_state_dict_has_pieces_under_names_and_no_shapes(runs: Path) -> None:
    model = model_of(runs / "local", 1)
    assert {model[name].ndim for name in model if name.startswith("blocks") and "flat" not in name} == {1}
    assert model["blocks.0.up.weight"].numel() < 261 * 65


def test_without_original_parameters_it_has_the_flat_parameters_alone(runs: Path) -> None:
    model = model_of(runs / "local-flat", 1)
    flat = {name for name, value in model.items() if isinstance(value, ShardedTensor)}
    assert flat == {"_flat_param", *(f"blocks.{block}._flat_param" for block in range(3))}
