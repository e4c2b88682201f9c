"""The training itself: every rank calls `prepare` and `train`, in a process group that is already there.

Collectives are called by every rank of a group together: all_reduce (each gets the sum), all_gather (each gets
all pieces), reduce_scatter (each gets a piece of the sum), broadcast, all_to_all, barrier. Point to point
are send and recv: one rank to one other. Threads of autograd start some of them, which the profiler sees too.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import ProfilerActivity, profile

from ckptools.cluster.environment import restarts
from ckptools.text import plural
from ckptools.training import backends, strategies
from ckptools.training.backends import Chosen
from ckptools.training.model import (
    Loader,
    Position,
    ShareSampler,
    Transformer,
    batches,
    decayed_names,
    make_loader,
    make_optimizer,
    make_scheduler,
    seed_all,
    with_noise,
)
from ckptools.training.options import FULL_STATE, CreateOptions, name_of_any_rank, run_name
from ckptools.training.strategies import Strategy

T = TypeVar("T")

Say = Callable[[str], None]
"""Takes a line for the user."""


@dataclass
class Run:
    """A model in training, and what was counted on the way.

    Attributes:
        scheduler: moved once per step.
        loader: this rank's share of the data.
        step: optimizer steps taken, since the very start.
        losses: mean loss over all ranks, before each step; after a resume the losses of the earlier run come first,
            if they are known.
        elapsed: wall-clock time of the steps taken here, the mean over all ranks.
    """

    options: CreateOptions
    strategy: Strategy
    model: nn.Module
    optimizer: optim.Optimizer
    scheduler: LRScheduler
    loader: Loader
    hardware: Chosen
    device: torch.device
    position: Position = field(default_factory=Position)
    step: int = 0
    losses: list[float] = field(default_factory=list)
    elapsed: timedelta = timedelta(0)

    @property
    def epoch(self) -> int:
        """Whole passes over the training set."""
        return self.position.epoch

    @property
    def batch_in_epoch(self) -> int:
        """Batches of this pass that each rank has seen."""
        return self.position.samples // (self.options.batch * self.sampler.num_replicas)

    @property
    def sampler(self) -> ShareSampler:
        """The sampler of this rank's share of the data."""
        return cast("ShareSampler", self.loader.sampler)

    @property
    def samples(self) -> int:
        """Sequences that all ranks together have seen, those of another pass counted again."""
        return self.epoch * self.sampler.total_size + self.position.samples


def train(run: Run, report: Say, save: Callable[[Run], None]) -> None:
    """Train up to step `options.steps`; call `save`, a collective, at the end and as often as `options` says.

    Every rank reports alike.
    """
    options, begin = run.options, time.monotonic()
    every = max(1, options.steps // 10)
    for tokens, position in islice(batches(run.loader, run.position), options.steps - run.step):
        last = run.step + 1 == options.steps
        step = partial(train_step, run, tokens)
        run.losses.append(_recorded(step, report) if last and options.communication else step())
        run.step, run.position = run.step + 1, position
        if run.step % every == 0 or last:
            lr = run.scheduler.get_last_lr()[0]
            report(f"step {run.step}  loss {run.losses[-1]:.2f}  lr {lr:.2e}")
        _die_if_asked(run, report)
        if last or run.step % (options.resuming.save_every or options.steps) == 0:
            seconds = torch.tensor(time.monotonic() - begin, dtype=torch.float64)
            run.elapsed = timedelta(seconds=_mean_over_ranks(seconds))
            save(run)


def prepare(options: CreateOptions, report: Say) -> Run:
    """Build the model, spread it over the ranks, and return the run before its first step."""
    torch.manual_seed(options.seed)
    hardware = backends.chosen_here(options.hardware)
    device = backends.own_device(hardware)
    # Made on the CPU, so that it begins with the same weights everywhere.
    model = Transformer(options.size).to(device)
    count = sum(param.numel() for param in model.parameters())
    parameters = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
    report(
        f"{plural(dist.get_world_size(), 'process', 'processes')}, {hardware.backend}, {hardware.device_in_words}; "
        f"{options.size.layers}-block transformer, {parameters} parameters, "
        f"{options.strategy}, {options.optimizer} + {options.scheduler}"
    )
    if hardware.remark:
        report(hardware.remark)
    decayed = decayed_names(model)
    strategy = strategies.BY_NAME[options.strategy]
    wrapped = strategy.wrap(model, options)
    optimizer = make_optimizer(options.optimizer, strategies.plain_parameters(wrapped), decayed)
    scheduler = make_scheduler(options.scheduler, optimizer, options.steps)
    share, shares = strategy.data_share(options)
    # From here on shares draw different numbers: dropout and the noise in the data.
    seed_all(options.seed + share)
    loader = make_loader(options, share, shares)
    return Run(options, strategy, wrapped, optimizer, scheduler, loader, hardware, device)


def train_step(run: Run, tokens: Tensor) -> float:
    """Take one optimizer step; returns the loss before it, averaged over the ranks."""
    run.optimizer.zero_grad()
    noisy = with_noise(tokens, run.options.size.vocab).to(run.device)
    loss = run.strategy.backward(run.model, noisy)
    run.optimizer.step()
    run.scheduler.step()
    return _mean_over_ranks(loss)


def _die_if_asked(run: Run, report: Say) -> None:
    """Kill this rank, as a failing machine would, if the options name it and this step; not again after a restart."""
    rank, step = run.options.resuming.killed or (0, 0)
    if run.step != step or restarts() > 0:
        return
    report(f"rank {rank} is killed")
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _mean_over_ranks(value: Tensor) -> float:
    """Average a 0-d tensor over the ranks, so that all ranks have the same number; a collective."""
    mean = value / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings that FSDP1 and ShardedTensor are deprecated: the user has asked for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- names of files ----------------------------------------------------------------------------------------------------


def place(run: Run, folder: Path) -> Path:
    """The path in `folder` of this rank's file; makes the folders that lead to it."""
    path = folder / run.options.template.format(**_values(run))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def place_folder(run: Run, folder: Path) -> Path:
    """The folder in `folder` for the files of all ranks, which this makes; `folder` itself if the name is empty."""
    path = folder / run.options.template.format(**_values(run))
    path.mkdir(parents=True, exist_ok=True)
    return path


def of_any_rank(run: Run) -> str | None:
    """Make a regular expression for the file of any rank; None if the layout's own names are used."""
    template = run.options.files.name
    return None if template is None else name_of_any_rank(template, _values(run))


def _values(run: Run) -> dict[str, int | str]:
    """The values of the template's fields; a launcher that sets no local rank or node rank has one node."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        "run_name": run_name(run.options, world_size),
        "epoch": run.epoch,
        "batch": run.step,
        "rank": rank,
        "local_rank": int(os.environ.get("LOCAL_RANK", rank)),
        "node_rank": int(os.environ.get("GROUP_RANK", 0)),
        "world_size": world_size,
    }


# -- full state --------------------------------------------------------------------------------------------------------


def full_state(run: Run) -> dict[str, Any]:
    """Gather `{"model": {fqn: tensor}, "optimizer": {"state": {fqn: {name: value}}, ...}}` on every rank; a collective.

    A consolidated checkpoint must be equal to this state. No `cpu_offload` on the CPU: there it copies nothing, and
    FSDP1's tensors are then views of a freed buffer.
    """
    # Silence torch's remark that a matrix that both tensor parallel and FSDP2 cut takes two all-gathers.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    options = StateDictOptions(full_state_dict=True, cpu_offload=run.device.type != "cpu")
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    state = {"model": dict(model), "optimizer": dict(optimizer)}
    return _union(state) if run.strategy.in_parts else state


def _union(mine: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of the state that single ranks have; a collective.

    Param groups are the same on all ranks, except that each rank lists only its own parameters.
    """
    parts: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = parts[0]
    for part in parts[1:]:
        whole["model"] |= part["model"]
        whole["optimizer"]["state"] |= part["optimizer"]["state"]
        for group, more in zip(whole["optimizer"]["param_groups"], part["optimizer"]["param_groups"], strict=True):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return whole


def save_full_state(run: Run, folder: Path) -> None:
    """Write `full.pt` from rank 0; a collective."""
    state = full_state(run)
    if dist.get_rank() == 0:
        torch.save(state, folder / FULL_STATE)


# -- communication -----------------------------------------------------------------------------------------------------


BACKENDS = ("gloo:", "nccl:")


def _recorded(step: Callable[[], float], report: Say) -> float:
    """Take a step, report what each rank sent and received in it, and return the step's loss; a collective."""
    # Kineto announces itself on stderr otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as events:
        loss = step()
    everyone: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size()
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in events.events():
        if event.name.startswith(BACKENDS):
            name = event.name.partition(":")[2]
            calls[name] += 1
            elements[name] += sum(prod(shape) for shape in event.input_shapes if shape)
    dist.all_gather_object(everyone, {name: (count, elements[name]) for name, count in calls.items()})
    for line in table(everyone):
        report(line)
    return loss


def table(everyone: list[dict[str, tuple[int, int]]]) -> Iterator[str]:
    """Yield the lines of a table of each rank's collectives; ranks with the same counts share a line."""
    yield "one step            calls   elements   ranks"
    rows: dict[tuple[str, int, int], list[int]] = {}
    for rank, operations in enumerate(everyone):
        for name, (calls, elements) in sorted(operations.items()):
            rows.setdefault((name, calls, elements), []).append(rank)
    for (name, calls, elements), ranks in sorted(rows.items()):
        yield f"  {name:<16} {calls:>6} {elements:>10}   {', '.join(map(str, ranks))}"
