"""Going on from a checkpoint, as if the run had never stopped.

Whole tensors go into the run by `set_model_state_dict` and `set_optimizer_state_dict`, which cut them for the
strategy of this run. So it may be another than the one that saved, in another layout, on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptools import api
from ckptools.errors import NotWholeError, UsageError
from ckptools.training import losses, random_states, saved_run, snapshots, strategies
from ckptools.training.data import Position
from ckptools.training.options import OPTIMIZERS
from ckptools.training.run import Report, Run
from ckptools.training.saved_run import SavedRun

# What the state of each schedule has and no other's.
SCHEDULERS = {"cosine": "T_max", "lambda": "lr_lambdas"}


def resume(run: Run, paths: list[Path], report: Report) -> None:
    """Bring a prepared run to where a saved one was; a collective.

    Args:
        run: prepared, at its start.
        paths: the checkpoints to choose from; the newest whole one is taken.
        report: takes one line at a time; called on rank 0 only.

    Raises:
        NotWholeError: none of them is whole.
        UsageError: the checkpoint is of another model, optimizer or scheduler, or has all the steps already.
    """
    saved = _load(run, _newest_whole(paths, report))
    _refuse_another(run, saved)
    _restore(run, saved)
    for line in _summary(run, saved):
        report(line)


def _newest_whole(paths: list[Path], report: Report) -> Path:
    """Let rank 0 choose, so that all ranks go on from the same checkpoint."""
    chosen: list[Path | None] = [None]
    if dist.get_rank() == 0:
        found = snapshots.newest_whole(paths, report)
        if found is None:
            raise NotWholeError(paths[-1], "is not whole, and no other checkpoint is there to go on from")
        chosen = [found.path]
    dist.broadcast_object_list(chosen)
    assert chosen[0] is not None
    return chosen[0]


def _load(run: Run, path: Path) -> SavedRun:
    """Read on every rank, or on rank 0, which sends what it read to the others.

    Sending everything at once is simple, and every rank holds the whole model for a moment. Where that is too much
    torch sends tensor by tensor, and a rank keeps its shards only: `StateDictOptions(broadcast_from_rank0=True)`.
    """
    saved: list[SavedRun | None] = [None]
    if run.options.resuming.load == "each" or dist.get_rank() == 0:
        saved = [saved_run.read(api.open(path, all_ranks=True), optimized_names(run), run.options.batch)]
    if run.options.resuming.load == "broadcast":
        dist.broadcast_object_list(saved)
    assert saved[0] is not None
    return saved[0]


def optimized_names(run: Run) -> list[str]:
    """List the fqns of the optimizer's parameters, in its order: a state dict calls them 0, 1, 2 and so on."""
    names = {param: name for name, param in strategies.plain_parameters(run.model)}
    return [names[param] for group in run.optimizer.param_groups for param in group["params"]]


def _refuse_another(run: Run, saved: SavedRun) -> None:
    """Refuse a checkpoint that this run cannot go on from, before anything of the run has changed."""
    expected: dict[str, Any] = dict(get_model_state_dict(run.model))
    for name, shape in ((name, tuple(value.shape)) for name, value in expected.items()):
        found = tuple(saved.model[name].shape) if name in saved.model else "not there"
        if found != shape:
            raise UsageError(saved.path, f"is of another model: {name} is {found}, expected {shape}")
    if saved.optimizer_name in OPTIMIZERS and saved.optimizer_name != run.options.optimizer:
        raise UsageError(saved.path, f"was trained with --optimizer {saved.optimizer_name}; give it here too")
    for name, key in SCHEDULERS.items():
        if key in saved.scheduler and name != run.options.scheduler:
            raise UsageError(saved.path, f"was trained with --scheduler {name}; give it here too")
    if saved.step >= run.options.steps:
        raise UsageError(saved.path, f"is at step {saved.step} already; give --steps that is more")


def _restore(run: Run, saved: SavedRun) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(run.model, dict(saved.model), options=options)
    if saved.optimizer:
        _restore_optimizer(run, saved.optimizer, options)
    if saved.scheduler:
        known = run.scheduler.state_dict().keys()
        run.scheduler.load_state_dict({key: value for key, value in saved.scheduler.items() if key in known})
    else:
        for group, lr in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
    share, shares = run.strategy.data_share(run.options)
    run.step = saved.step
    run.position = (saved.position or Position()).aligned(shares)
    run.losses = losses.read(saved.folder, saved.step)
    # Last, for building and loading a model draw random numbers too.
    if share < len(saved.random):
        random_states.restore(saved.random[share], run.device)


def _restore_optimizer(run: Run, state: dict[str, Any], options: StateDictOptions) -> None:
    """Load moments and hyperparameters; what torch makes a list on the way, such as `betas`, is a tuple again."""
    groups = run.optimizer.param_groups
    tuples = [[key for key, value in group.items() if isinstance(value, tuple)] for group in groups]
    set_optimizer_state_dict(run.model, run.optimizer, state, options=options)
    for group, keys in zip(run.optimizer.param_groups, tuples, strict=True):
        group.update({key: tuple(group[key]) for key in keys})


def _summary(run: Run, saved: SavedRun) -> Iterator[str]:
    """Say where the run goes on, and what does not go on as it was."""
    yield f"resumed from {saved.path}: step {run.step}, epoch {run.epoch}, sample {run.position.samples}"
    held = {"optimizer": saved.optimizer, "scheduler": saved.scheduler, "random states": saved.random}
    missing = [name for name, value in held.items() if not value]
    if saved.position is None or not saved.position.exact:
        missing.append("position in the data" if saved.position is None else "position in the epoch")
    if missing:
        yield f"not in this layout: {', '.join(missing)}; starts anew"
    _, shares = run.strategy.data_share(run.options)
    if saved.random and len(saved.random) != shares:
        new = f"; shares from {len(saved.random)} on draw new random numbers" if shares > len(saved.random) else ""
        yield f"saved with {len(saved.random)} shares of the data, goes on with {shares}{new}"
