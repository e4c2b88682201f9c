"""`python -m tests.training.frameworks OUT RUN...`: runs that are saved by ckptools and by frameworks themselves.

A RUN is STRATEGY or STRATEGY-TYPE. OUT gets a folder for each, with `ours/` and `theirs/`, each with a folder for every
layout. Accelerate and Fabric are given the objects of our run. Lightning's Trainer has a training loop of its own,
which begins with the same seed. With a type of FSDP1's state dict that is not sharded there is Accelerate alone.

The ranks are forks of this process: to import the frameworks takes each of them longer than to train.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import lightning_fabric
import pytorch_lightning
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import FSDPStrategy
from lightning_fabric.strategies import ModelParallelStrategy as FabricModelParallel
from pytorch_lightning.strategies import FSDPStrategy as TrainersFSDP
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional

from ckptools.training import layouts, strategies
from ckptools.training import layouts as lightning
from ckptools.training import model as optimizers
from ckptools.training import model as random_states
from ckptools.training.layouts import progress
from ckptools.training.model import Transformer, make_loader, with_noise
from ckptools.training.options import CreateOptions, ParallelOptions
from ckptools.training.run import Run, prepare, train
from tests.training.started import free_port

STEPS = 2
WORLD_SIZE = 2


class Progress:
    """What a script registers, so that Accelerate saves it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, int]:
        return progress(self.run)

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


def save_with_accelerate(run: Run, out: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    if run.options.strategy == "ddp":
        accelerator.prepare(run.model.module, run.optimizer, run.scheduler)
    else:
        # Accelerate turns FSDP on where there are GPUs only, and offloads from there. On a CPU torch's offloading
        # returns views of a buffer that it frees.
        for config in (FullStateDictConfig, FullOptimStateDictConfig):
            config.offload_to_cpu = property(lambda self: False, lambda self, value: None)
        version = {"fsdp1": 1, "fsdp2": 2}[run.options.strategy]
        kind = f"{run.options.parallel.state_dict_type.upper()}_STATE_DICT"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        accelerator._models, accelerator._optimizers = [run.model], [run.optimizer]
        accelerator._schedulers = [run.scheduler]
    accelerator.step = run.batch_in_epoch
    accelerator.register_for_checkpointing(Progress(run))
    accelerator.save_state(str(out))


def save_with_fabric(run: Run, out: Path) -> None:
    state = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, "iteration": run.step}
    state |= {
        "epoch": run.epoch,
        "batch_in_epoch": run.batch_in_epoch,
        "rng": random_states.gather_random_states(run.device),
    }
    path = out / f"step-{run.step}.ckpt"
    if run.options.strategy == "fsdp1":
        # Fabric refuses this strategy on a CPU, which its saving does not mind.
        refused = FSDPStrategy(state_dict_type="sharded", cluster_environment=TorchElasticEnvironment())
        refused.save_checkpoint(path, state)
        return
    strategy: Any = "ddp"
    if run.options.strategy == "fsdp2":
        strategy = FabricModelParallel(lambda model, mesh: model, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = run.model.module if strategy == "ddp" else run.model
    state["model"], state["optimizer"] = fabric.setup(model, run.optimizer)
    fabric.save(path, state)


class Module(pytorch_lightning.LightningModule):
    """Our model and our training step, for the Trainer to train."""

    def __init__(self, options: CreateOptions) -> None:
        super().__init__()
        self.options = options
        self.model = Transformer(options.size)
        self.decayed = optimizers.decayed_names(self.model)

    def configure_model(self) -> None:
        if self.options.strategy == "fsdp2":
            strategies.BY_NAME["fsdp2"].wrap(self.model, self.options)

    def configure_optimizers(self) -> Any:
        optimizer = optimizers.make_optimizer("AdamW", self.model.named_parameters(), self.decayed)
        scheduler = optimizers.make_scheduler("cosine", optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        random_states.seed_all(self.options.seed + dist.get_rank())

    def training_step(self, batch: tuple[torch.Tensor], _: int) -> torch.Tensor:
        tokens = with_noise(batch[0], self.options.size.vocab)
        logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = random_states.gather_random_states(torch.device("cpu"))


class SaveAtTheEnd(pytorch_lightning.Callback):
    """Save where ModelCheckpoint does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pytorch_lightning.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS:
            trainer.save_checkpoint(self.path)


def train_with_lightning(options: CreateOptions, out: Path) -> None:
    torch.manual_seed(options.seed)
    strategy: Any = "ddp"
    if options.strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[SaveAtTheEnd(out / f"epoch=0-step={STEPS}.ckpt")],
    )  # fmt: skip
    trainer.fit(Module(options), make_loader(options, dist.get_rank(), dist.get_world_size()))


class Holder(nn.Module):
    """Our model as the attribute of another, without what makes that a LightningModule."""

    def __init__(self, options: CreateOptions) -> None:
        super().__init__()
        self.model = Transformer(options.size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits


def save_with_the_trainers_fsdp(options: CreateOptions, out: Path) -> None:
    """Train with our loop, and save by the strategy's own methods: the Trainer refuses FSDP1 on a CPU."""
    torch.manual_seed(options.seed)
    holder, strategy = Holder(options), TrainersFSDP(state_dict_type="sharded")
    strategy.cluster_environment = TorchElasticEnvironment()
    decayed = optimizers.decayed_names(holder)
    strategy.model = wrapped = strategies.BY_NAME["fsdp1"].wrap(holder, options)
    optimizer = optimizers.make_optimizer("AdamW", strategies.plain_parameters(wrapped), decayed)
    scheduler = optimizers.make_scheduler("cosine", optimizer, STEPS)
    run = dataclasses.replace(
        prepare(options, lambda line: None), model=wrapped, optimizer=optimizer, scheduler=scheduler
    )
    random_states.seed_all(options.seed + dist.get_rank())
    train(run, lambda line: None, lambda run: None)
    checkpoint = lightning.training_state(run) | {"state_dict": strategy.lightning_module_state_dict()}
    checkpoint["optimizer_states"] = [strategy.optimizer_state(optimizer)]
    strategy.save_checkpoint(checkpoint, out / f"epoch=0-step={STEPS}.ckpt")


def be_a_rank(rank: int, port: int, out: Path, strategy: str, kind: str = "sharded") -> None:
    """Be one rank of one run."""
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD_SIZE, "GROUP_RANK": 0}
    where = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (where | local).items()})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = CreateOptions(out, strategy, steps=STEPS, parallel=ParallelOptions(state_dict_type=kind))
    run = prepare(asked, lambda line: None)
    train(run, lambda line: None, lambda run: None)
    theirs = {"accelerate": save_with_accelerate, "fabric": save_with_fabric}
    for name in ("accelerate", "fabric", "lightning") if kind == "sharded" else ("accelerate",):
        run.options = dataclasses.replace(asked, layout=name)
        for folder in (out / "ours" / name, out / "theirs" / name):
            folder.mkdir(parents=True, exist_ok=True)
        layouts.SAVE[name](run, out / "ours" / name)
        if name in theirs:
            theirs[name](run, out / "theirs" / name)
    train_theirs = save_with_the_trainers_fsdp if strategy == "fsdp1" else train_with_lightning
    if kind == "sharded":
        train_theirs(asked, out / "theirs/lightning")
    dist.barrier()
    # As every rank does: see `ckptools.training.rank`.
    del run
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        arguments = (free_port(), Path(sys.argv[1], name), *name.split("-"))
        start_processes(be_a_rank, arguments, WORLD_SIZE, start_method="fork")
