"""torchtitan's state dict is filled from any format: model keys at the top, the optimizer flattened below its key.

Its own `CheckpointManager` runs where torchtitan is installed, which would bring datasets, wandb and tensorboard. For
these tests `pip install --no-deps torchtitan torchdata tyro typeguard docstring_parser shtab einops spmd_types==0.2.3
torch_checkpointing` is enough.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptools
from ckptools.errors import RefusedError
from ckptools.training.model import Transformer, decayed_names, make_optimizer
from ckptools.training.options import CreateOptions, ModelSize
from tests.training.forked import create_forked, run_ranks
from tests.training.rank_files import load
from tests.versions import torch_that_trains
from tools.documents import DOCS, files

pytestmark = pytest.mark.slow

PAGE = DOCS / "trainers" / "torchtitan.md"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two FSDP1 rank files."""
    folder = tmp_path_factory.mktemp("old") / "run"
    create_forked(CreateOptions(folder, "fsdp1", world_size=2, steps=2))
    return folder


@pytest.fixture(autouse=True)
def with_fsdp2() -> None:
    torch_that_trains("fsdp2")


def whole(value: Any) -> Any:
    """The whole tensor of a DTensor; a collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_model() -> Transformer:
    dist.init_process_group("gloo")
    model = Transformer(ModelSize())
    for module in [*model.blocks.values(), model]:
        fully_shard(module)
    return model


def keep(model: nn.Module, optimizer: dict[str, Any], file: Path) -> None:
    """Write all values of a model and of a flattened optimizer, gathered from all ranks."""
    values = {"model": model.state_dict(), "optimizer": optimizer}
    kept = {section: {name: whole(value) for name, value in state.items()} for section, state in values.items()}
    if dist.get_rank() == 0:
        torch.save(kept, file)
    dist.barrier()
    dist.destroy_process_group()


def assert_is(kept: dict[str, Any], path: Path) -> None:
    """Compare all values with those of a checkpoint."""
    ck = ckptools.open(path, all_ranks=True)
    [adam] = ck.optimizers.values()
    assert len(kept["model"]) == len(ck.model) > 40 and len(adam.state) > 40
    assert all(torch.equal(kept["model"][name], value.load()) for name, value in ck.model.items())
    flat = kept["optimizer"]
    for fqn, state in adam.state.items():
        assert all(torch.equal(flat[f"state.{fqn}.{slot}"], value.load()) for slot, value in state.items())
    for group in adam.param_groups:
        assert {flat[f"param_groups.{fqn}.weight_decay"] for fqn in group.names} == {group["weight_decay"]}


def fill_its_state_dict(path: Path, file: Path) -> None:
    """Load as `CheckpointManager.dcp_load` of torchtitan 0.3.0 does, with a reader for any format."""
    model = sharded_model()
    optimizer = make_optimizer("AdamW", model.named_parameters(), decayed_names(model))
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    state = {**model.state_dict(), "optimizer": flat}
    dcp.load(state, storage_reader=ckptools.StorageReader(path))
    model.load_state_dict({name: value for name, value in state.items() if isinstance(value, Tensor)}, strict=False)
    keep(model, flat, file)


def test_its_state_dict_is_filled_from_rank_files(run: Path, tmp_path: Path) -> None:
    run_ranks(2, fill_its_state_dict, run, tmp_path / "kept.pt")
    assert_is(load(tmp_path / "kept.pt"), run)


class Position:
    """A data loader's place, which each rank has for itself."""

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": b"here", "world_size": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


def load_by_its_manager(page_file: Path, path: Path, file: Path) -> None:
    """Let torchtitan's own manager load with the method of the page, save, and load its own checkpoint."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    spec = importlib.util.spec_from_file_location("any_checkpoint", page_file)
    assert spec and spec.loader
    module = sys.modules["any_checkpoint"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = sharded_model()
    decayed = "|".join(rf"^{name}$" for name in sorted(decayed_names(model)))
    kinds = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
        for pattern in (decayed, ".*")
    ]
    optimizers = OptimizersContainer.Config(implementation="for-loop", param_groups=kinds).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=9)

    def manager(excluded: list[str]) -> Any:
        config = module.AnyCheckpoint.Config(
            enable=True, initial_load_path=str(path), initial_load_model_only=False, exclude_from_loading=excluded,
            last_save_model_only=False,
        )  # fmt: skip
        return config.build(
            dataloader=Position(), model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={},
            sd_adapter=None, base_folder=str(file.parent),
        )  # fmt: skip

    first = manager(["lr_scheduler", "dataloader"])
    assert first.load()
    first.save(3, last_step=True)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    assert manager([]).load()
    keep(model, optimizers.state_dict(), file)


def test_its_manager_loads_rank_files(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    page_file = tmp_path / "any_checkpoint.py"
    page_file.write_text(files(PAGE.read_text())["any_checkpoint.py"])
    run_ranks(2, load_by_its_manager, page_file, run, tmp_path / "kept.pt")
    assert_is(load(tmp_path / "kept.pt"), run)


def test_a_scheduler_that_the_checkpoint_lacks_is_refused_as_the_page_says(run: Path) -> None:
    state = {"lr_scheduler": {"last_epoch": 0}, "dataloader": None, "emb.weight": torch.empty(257, 65)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state, storage_reader=ckptools.StorageReader(run), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, RefusedError) and error.reason.startswith(
        "lacks 2 keys: dataloader, lr_scheduler.last_epoch"
    )
