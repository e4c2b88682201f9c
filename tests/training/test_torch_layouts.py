"""Layouts that torch's own checkpoint writers make: DCP in its forms, torchtitan's and OLMo-core's folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptools
from ckptools.training.layouts import versioned
from tests.training.test_matrix import nested
from tools.demo import same, tensors

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
DCP = ("dcp", "several", "async", "safetensors", "torchtitan", "async-titan", "olmo")


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def truth(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "full.pt")
    return dict(tensors({"model": state["model"], "optimizer": state["optimizer"]["state"]}))


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of two trees has, or both with other bits."""
    return [n for n in found.keys() | expected.keys() if n not in found or not same(found[n], expected.get(n))]


@pytest.mark.parametrize("layout", DCP)
def test_every_form_of_dcp_is_the_trained_state(layout: str, torch_layouts: Path, tmp_path: Path) -> None:
    ckptools.consolidate(torch_layouts / layout, tmp_path / "all.dcp")
    dcp_to_torch_save(tmp_path / "all.dcp", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=False)
    found = dict(tensors({"model": state["model"], "optimizer": nested(state["optimizer"])}))
    assert different(found, truth(torch_layouts)) == []


@pytest.mark.parametrize("layout", ["dcp", "several", "async"])
def test_torch_reads_them_back(layout: str, torch_layouts: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(torch_layouts / layout, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=False)
    found = dict(tensors({"model": state["model"], "optimizer": state["optim"]["state"]}))
    assert different(found, truth(torch_layouts)) == []


def test_tensors_are_archives_or_safetensors(torch_layouts: Path) -> None:
    for layout, as_safetensors in (("dcp", False), ("safetensors", True)):
        assert (b"DCP_SHARDING_INFO" in (torch_layouts / layout / "__0_0.distcp").read_bytes()) is as_safetensors


def test_dcp_keeps_what_a_resume_needs(torch_layouts: Path) -> None:
    raw = ckptools.open(torch_layouts / "dcp").raw
    assert raw.keys() == {"model", "optim", "scheduler", "step", "sampler", "rng"}
    assert (raw["step"], raw["sampler"]) == (2, {"epoch": 0, "sample_in_epoch": 32})
    assert raw["scheduler"]["last_epoch"] == 2


def test_dcp_keeps_the_random_states_of_every_rank_under_its_number(torch_layouts: Path) -> None:
    rng = ckptools.open(torch_layouts / "dcp").raw["rng"]
    assert set(rng) == {"0", "1"}
    assert all(set(states) == {"python", "numpy", "torch"} for states in rng.values())
    assert not torch.equal(rng["0"]["torch"].load(), rng["1"]["torch"].load())


def keys_without_fqns(folder: Path) -> set[str]:
    """The keys of a torchtitan folder, the model's left out and the optimizer's without their parameters."""
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    optimizer = {key for key in keys if key.startswith("optimizer.")}
    without_fqns = {re.sub(r"^(optimizer\.\w+)\..*\.(\w+)$", r"\1.\2", key) for key in optimizer}
    return without_fqns | {key for key in keys if re.match(r"(lr_scheduler|train_state|dataloader)\.", key)}


def test_torchtitan_has_the_keys_of_a_real_one(torch_layouts: Path) -> None:
    real = keys_without_fqns(FIXTURES / "torchtitan-fsdp-tp/ckpt/step-5")
    assert keys_without_fqns(torch_layouts / "torchtitan/step-2") == real


def test_torchtitan_has_the_model_at_the_top(torch_layouts: Path) -> None:
    top = ckptools.open(torch_layouts / "torchtitan").raw
    rest = {"optimizer", "lr_scheduler", "train_state", "dataloader"}
    assert top.keys() - rest == torch.load(torch_layouts / "full.pt")["model"].keys()
    assert top["train_state"] == {"step": 2, "ntokens_seen": 2 * 2 * 8 * 31}
    assert top["dataloader"].keys() == {"dp_rank_0", "dp_rank_1", "world_size"}


def test_olmos_folder_has_a_dcp_and_a_file_per_rank(torch_layouts: Path) -> None:
    names = names_in(torch_layouts / "olmo")
    data = [f"step2/model_and_optim/__{rank}_{n}.distcp" for rank in (0, 1) for n in range(4)]
    assert names == [
        "step2/.metadata.json", "step2/config.json", "step2/model_and_optim/.metadata", *data,
        "step2/train/rank0.pt", "step2/train/rank1.pt",
    ]  # fmt: skip
    assert json.loads((torch_layouts / "olmo/step2/.metadata.json").read_text())["ephemeral"] is False


def test_olmos_trainer_state_is_each_ranks_own(torch_layouts: Path) -> None:
    one, other = (load_trainer(torch_layouts, rank) for rank in (0, 1))
    assert one.keys() == other.keys()
    assert (one["global_step"], one["global_train_tokens_seen"], one["world_size"]) == (2, 2 * 2 * 8 * 31, 2)
    assert not torch.equal(one["rng"]["torch"]["state"], other["rng"]["torch"]["state"])
    assert one["rng"]["torch"]["version"] == tuple(map(int, torch.__version__.split(".")[:2]))


def load_trainer(folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"olmo/step2/train/rank{rank}.pt", weights_only=False)


def test_a_random_state_without_a_gpu_says_so() -> None:
    assert versioned({})["cuda"] is None
