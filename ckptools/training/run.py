"""The training itself: every rank calls `train`, in a process group that is already there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler

from ckptools.training import backends, optimizers, strategies
from ckptools.training.backends import Chosen
from ckptools.training.data import batches, make_loader, with_noise
from ckptools.training.model import Transformer
from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy

Report = Callable[[str], None]


@dataclass
class Run:
    """A model in training, and what was counted on the way.

    Attributes:
        options: what was asked for.
        model: the wrapped model.
        optimizer: over the wrapped parameters.
        scheduler: moved once per step.
        batches_per_epoch: on each rank.
        hardware: the backend and the kind of device.
        device: of this rank.
        losses: mean loss over all ranks, before each step.
        elapsed: wall-clock time of the steps, the mean over all ranks.
    """

    options: CreateOptions
    model: nn.Module
    optimizer: optim.Optimizer
    scheduler: LRScheduler
    batches_per_epoch: int
    hardware: Chosen
    device: torch.device
    losses: list[float] = field(default_factory=list)
    elapsed: timedelta = timedelta(0)

    @property
    def strategy(self) -> Strategy:
        """How the model is spread."""
        return strategies.BY_NAME[self.options.strategy]

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return len(self.losses)

    @property
    def epoch(self) -> int:
        """Whole passes over the training set."""
        return self.step // self.batches_per_epoch


def train(options: CreateOptions, report: Report) -> Run:
    """Build the model, spread it and train it for `options.steps` steps.

    Args:
        options: checked already.
        report: takes one line at a time; called on every rank alike.
    """
    run, loader = _prepare(options, report)
    begin = time.monotonic()
    every = max(1, options.steps // 10)
    for tokens in batches(loader, options.steps):
        run.losses.append(_train_step(run, tokens))
        if run.step % every == 0 or run.step == options.steps:
            lr = run.scheduler.get_last_lr()[0]
            report(f"step {run.step}  loss {run.losses[-1]:.2f}  lr {lr:.2e}")
    run.elapsed = timedelta(seconds=mean_over_ranks(torch.tensor(time.monotonic() - begin, dtype=torch.float64)))
    return run


def _prepare(options: CreateOptions, report: Report) -> tuple[Run, torch.utils.data.DataLoader[tuple[Tensor, ...]]]:
    world_size = dist.get_world_size()
    torch.manual_seed(options.seed)
    hardware = backends.chosen_here(options.hardware)
    device = backends.own_device(hardware)
    # Made on the CPU, so that it begins with the same weights everywhere.
    model = Transformer(options.size).to(device)
    count = sum(param.numel() for param in model.parameters())
    report(
        f"{world_size} processes, {hardware.backend}, {hardware.device_in_words}; "
        f"{options.size.layers}-block transformer, {millions(count)} parameters, "
        f"{options.strategy}, {options.optimizer} + {options.scheduler}"
    )
    if hardware.remark:
        report(hardware.remark)
    decayed = optimizers.decayed_names(model)
    strategy = strategies.BY_NAME[options.strategy]
    wrapped = strategy.wrap(model, options)
    optimizer = optimizers.make_optimizer(options.optimizer, strategies.plain_parameters(wrapped), decayed)
    scheduler = optimizers.make_scheduler(options.scheduler, optimizer, options.steps)
    share, shares = strategy.data_share(options)
    # From here on shares draw different numbers: dropout and the noise in the data.
    seed_rank(options.seed + share)
    loader = make_loader(options, share, shares)
    run = Run(options, wrapped, optimizer, scheduler, len(loader), hardware, device)
    return run, loader


def _train_step(run: Run, tokens: Tensor) -> float:
    """Take one optimizer step; returns the loss before it, averaged over the ranks."""
    run.optimizer.zero_grad()
    noisy = with_noise(tokens, run.options.size.vocab).to(run.device)
    loss = run.strategy.backward(run.model, noisy)
    run.optimizer.step()
    run.scheduler.step()
    return mean_over_ranks(loss)


def mean_over_ranks(value: Tensor) -> float:
    """Average a 0-d tensor over the ranks, so that all of them count with the same number; a collective."""
    mean = value / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def seed_rank(seed: int) -> None:
    """Seed every random number generator that a checkpoint keeps."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def millions(count: int) -> str:
    """Say a number of parameters: `171 k`, `1.1 M`."""
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
