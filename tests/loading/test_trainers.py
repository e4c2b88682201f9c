"""The scripts of the pages about trainers put every weight and every moment of a checkpoint where it belongs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.model.tensor import Tensor
from tests.training.rank_files import load
from tests.truth import FIXTURES
from tests.versions import torch_that_trains
from tools.documents import DOCS, files, run, steps

pytestmark = pytest.mark.slow

PAGES = DOCS / "trainers"
FILE = "run/ep0-ba4-rank0.pt"
LOADED = {"plain-fsdp2": FILE, "accelerate": "run/step-4", "lightning": "run", "transformers": "step-1"}
"""By page: the checkpoint that it makes and loads."""

MADE = '''
"""A model and an optimizer with the names, shapes and dtypes of a checkpoint, and values of their own."""
import torch
from torch import nn

import ckptools

CK = ckptools.open({path!r}, all_ranks=True)
ADAM = next(iter(CK.optimizers.values()))
TRAINED = {{str(name) for group in ADAM.param_groups for name in group.names}}


def make_model():
    root = nn.Module()
    for name, value in CK.model.items():
        *above, last = name.split(".")
        module = root
        for part in above:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        made = torch.full(value.shape, 3, dtype=getattr(torch, value.dtype))
        if name in TRAINED:
            module.register_parameter(last, nn.Parameter(made))
        else:
            module.register_buffer(last, made)
    root.forward = lambda: None
    return root


def make_optimizer(model):
    params = dict(model.named_parameters())
    return torch.optim.AdamW([{{"params": [params[str(name)] for name in group.names]}} for group in ADAM.param_groups])
'''

FSDP2_ON_A_CPU = """
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                                        transformer_cls_names_to_wrap=["Block"])
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
"""
"""Accelerate turns FSDP on where there are GPUs only."""

FABRIC = """
import sys

from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import ckptools
from my_run import make_model, make_optimizer

def shard(model, mesh):
    for module in [*model.blocks.values(), model]:
        fully_shard(module, mesh=mesh["data_parallel"])
    return model

strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
model = fabric.setup(make_model())
optimizer = fabric.setup_optimizers(make_optimizer(model))
ckptools.load(model, "run/ep0-ba4-rank0.pt", optimizer)
"""


@pytest.fixture(autouse=True)
def with_fsdp2() -> None:
    torch_that_trains("fsdp2")


def put_files_of(page: str, folder: Path) -> None:
    for name, content in files((PAGES / f"{page}.md").read_text()).items():
        (folder / name).write_text(content)


def kept_of(folder: Path, ranks: int, *arguments: str) -> dict[str, Any]:
    """Run `go_on.py` in a folder under torchrun, and return what its last `load` left in model and optimizer."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, "-m", "tests.loading.watched", "go_on.py", "kept.pt", *arguments]
    paths = {"PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    kept: dict[str, Any] = load(folder / "kept.pt")
    return kept


def assert_is(kept: dict[str, Any], path: Path, around: str = "", with_optimizer: bool = True) -> None:
    """Compare all weights, moments and hyperparameters with those of a checkpoint."""
    ck = ckptools.open(path, all_ranks=True)
    names = [name for name in ck.model if f"{around}{name}" in kept["model"]]
    assert len(names) == len(kept["model"]) > 5
    for name in names:
        assert same(kept["model"][f"{around}{name}"], ck.model[name].load()), name
    assert kept["step"] == (None if ck.step.value is None else int(ck.step.value))
    if not with_optimizer:
        return
    groups = {fqn: group for group in kept["optimizer"]["param_groups"] for fqn in group["params"]}
    [adam] = ck.optimizers.values()
    assert len(groups) == len(adam.state) > 5
    for fqn, state in adam.state.items():
        for slot, value in state.items():
            here, there = kept["optimizer"]["state"][f"{around}{fqn}"][slot], value
            there = there.load() if isinstance(there, Tensor) else torch.tensor(there)
            assert same(here, there.to(here.dtype) if not there.ndim else there), (fqn, slot)
    for saved in adam.param_groups:
        for fqn in saved.names:
            here = groups[f"{around}{fqn}"]
            assert (here["lr"], here["weight_decay"]) == (saved.lr, saved["weight_decay"])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("page", LOADED)
def test_the_script_of_a_page_loads_weights_moments_and_hyperparameters(page: str, tmp_path: Path) -> None:
    put_files_of(page, tmp_path)
    launched = []
    for step in steps((PAGES / f"{page}.md").read_text()):
        launched += re.findall(r"^torchrun --nproc-per-node (\d) go_on.py", step.command)
        if "go_on.py" not in step.command:
            run(step, tmp_path)
    assert_is(kept_of(tmp_path, int(launched[0])), tmp_path / LOADED[page])


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, two FSDP1 rank files."""
    folder = tmp_path_factory.mktemp("rank_files")
    [make] = [step for step in steps((PAGES / "plain-fsdp2.md").read_text()) if "create" in step.command]
    run(make, folder)
    put_files_of("accelerate", folder)
    return folder


def test_fsdp2_on_the_meta_device_gets_memory_and_weights(rank_files: Path) -> None:
    text = files((PAGES / "plain-fsdp2.md").read_text())["go_on.py"]
    changed = re.sub(r"model\.to_empty.*\noptimizer = .*\n", "", text).replace(", optimizer)", ")")
    assert "to_empty" not in changed
    (rank_files / "go_on.py").write_text(changed)
    assert_is(kept_of(rank_files, 3, "--stop"), rank_files / FILE, with_optimizer=False)


def test_accelerate_with_fsdp2_loads_rank_files(rank_files: Path) -> None:
    text = files((PAGES / "accelerate.md").read_text())["go_on.py"]
    text = text.replace("accelerator = Accelerator(cpu=True)\n", FSDP2_ON_A_CPU).replace("run/step-4", FILE)
    (rank_files / "go_on.py").write_text(text)
    assert_is(kept_of(rank_files, 2), rank_files / FILE)


def test_fabric_with_fsdp2_loads_rank_files(rank_files: Path) -> None:
    (rank_files / "go_on.py").write_text(FABRIC)
    assert_is(kept_of(rank_files, 2), rank_files / FILE)


def test_a_lightning_module_that_is_loaded_as_a_whole_gets_weights_and_moments(rank_files: Path) -> None:
    text = files((PAGES / "lightning.md").read_text())["go_on.py"]
    (rank_files / "go_on.py").write_text(text.replace('load(self.net, "run"', f'load(self, "{FILE}"'))
    assert_is(kept_of(rank_files, 2), rank_files / FILE, around="net.")


@pytest.mark.parametrize("source", ["deepspeed-z1-fp32/ckpt", "lightning-fabric-fsdp2/ckpt"])
def test_accelerate_loads_a_checkpoint_of_another_framework(source: str, tmp_path: Path) -> None:
    put_files_of("accelerate", tmp_path)
    path = FIXTURES / source
    (tmp_path / "my_run.py").write_text(MADE.format(path=str(path)))
    (tmp_path / "go_on.py").write_text((tmp_path / "go_on.py").read_text().replace("run/step-4", str(path)))
    assert_is(kept_of(tmp_path, 2, "--stop"), path)


def with_source(folder: Path, path: Path, config: Path, *changes: tuple[str, str]) -> None:
    """Write the script of the page of transformers for another checkpoint."""
    text = files((PAGES / "transformers.md").read_text())["go_on.py"]
    changes = (*changes, ('"step-1"', repr(str(path))), ('"llama"', repr(str(config))))
    for old, new in (*changes, ('("llama")', "")):
        assert old in text or old == '("llama")'
        text = text.replace(old, new)
    (folder / "go_on.py").write_text(text)


IN_BF16, IN_FP32 = (("))\narguments", f"), dtype=torch.{dtype})\narguments") for dtype in ("bfloat16", "float32"))


def test_transformers_trainer_loads_the_rank_files_of_verl(tmp_path: Path) -> None:
    actor = FIXTURES / "verl-fsdp2-bf16" / "ckpt" / "global_step_3" / "actor"
    with_source(tmp_path, actor, actor / "huggingface", IN_BF16)
    assert_is(kept_of(tmp_path, 2, "--stop"), actor)


@pytest.mark.parametrize("cast", [False, True])
def test_transformers_trainer_loads_published_weights(cast: bool, tmp_path: Path) -> None:
    folder = FIXTURES / "hf-llama-safetensors-bf16" / "ckpt"
    change = (", optimizer)    #", ", cast=True)    #") if cast else (", optimizer)    #", ")    #")
    with_source(tmp_path, folder, folder, change, IN_FP32 if cast else IN_BF16)
    kept = kept_of(tmp_path, 2, "--stop")
    if cast:
        assert {value.dtype for value in kept["model"].values()} == {torch.float32}
        kept["model"] = {name: value.bfloat16() for name, value in kept["model"].items()}
    assert_is(kept, folder, with_optimizer=False)
