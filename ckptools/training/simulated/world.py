"""`--simulate-world 256 --ranks 0,137`: true rank files of a big world, written by one process.

One process trains for real. Then torch's fake process group, which answers every collective at once, lets it be one
rank after the other of a world that does not exist: what it trained is cut as FSDP cuts it there. So the values are
those of a run of one process, and the files of all ranks together are that run, to the bit; the layout is that of
the big world, with every rank's shard of every tensor listed in every file.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import signal
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptools.training import full_state, layouts, optimizers, random_states, strategies
from ckptools.training.backends import Chosen
from ckptools.training.layouts.place import place
from ckptools.training.layouts.rank_files import composer_state
from ckptools.training.options import CreateOptions, from_json, to_json
from ckptools.training.output import FULL_STATE
from ckptools.training.random_states import RandomState
from ckptools.training.run import Report, Run, prepare, train
from ckptools.training.strategies.strategy import StateDict, Strategy


@dataclass(frozen=True)
class Trained:
    """The result of the training that one process did.

    Attributes:
        options: of the simulated world.
        run: of the one process.
        state: its full state, as `full_state.gather` gives it.
        rng: states for all ranks: freshly seeded for each; with `--tiny` one object for all.
    """

    options: CreateOptions
    run: Run
    state: dict[str, Any]
    rng: list[RandomState]

    @cached_property
    def model(self) -> nn.Module:
        """The model without its wrapper."""
        module: nn.Module = self.run.model.module  # type: ignore[assignment]
        return module


@dataclass
class SimulatedRun(Run):
    """A run as a rank of the simulated world holds it.

    Attributes:
        cut: the states of model and optimizer, where they are not to be asked of the wrapped model.
    """

    cut: tuple[StateDict, StateDict] | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy that spreads the model."""
        known = strategies.BY_NAME[self.options.strategy]
        if self.cut is None:
            return known
        model, optimizer = self.cut
        return dataclasses.replace(known, model_state=lambda _: model, optimizer_state=lambda *_: optimizer)


def train_alone(options: CreateOptions, report: Report) -> Trained:
    """Train in this process alone, which is a world of one."""
    torch.set_num_threads(1)
    alone = dataclasses.replace(options, strategy="ddp", world_size=1, layout="composer")
    with _quiet(), _group_of_one():
        run = prepare(alone, lambda line: None)
        train(run, report, lambda run: None)
        state = copy.deepcopy(full_state.gather(run))
        world_size = options.world_size or 1
        rng = [_seeded(options.seed + rank) for rank in range(1 if options.simulation.tiny else world_size)]
        return Trained(options, run, state, rng * world_size if options.simulation.tiny else rng)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist; there must be no process group yet."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Be a whole world, with real collectives and without a port."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _seeded(seed: int) -> RandomState:
    random_states.seed_all(seed)
    return random_states.capture(torch.device("cpu"))


def write_rank(trained: Trained, rank: int, folder: Path) -> None:
    """Be one rank of the simulated world, and write its files into a folder.

    In a thread of its own: what DTensor remembers of its meshes it remembers per thread, and without regard to the
    rank, which no process of a real world changes.
    """
    with ThreadPoolExecutor(1) as own:
        own.submit(_write_rank, trained, rank, folder).result()


def _write_rank(trained: Trained, rank: int, folder: Path) -> None:
    options = trained.options
    with _quiet(), fake_group(rank, options.world_size or 1):
        run = _fsdp1(trained) if options.strategy == "fsdp1" else _fsdp2(trained)
        random_states.restore(trained.rng[rank], run.device)
        if options.layout == "composer":
            # The fake group gathers nothing, so the random states of all ranks come from here.
            torch.save({"state": composer_state(run), "rng": trained.rng}, place(run, folder))
        else:
            layouts.SAVE[options.layout](run, folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """FSDP1 and ShardedTensor announce their retirement; whoever asks for them here knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _fsdp1(trained: Trained) -> SimulatedRun:
    """Cut as FSDP1 does when it saves, without the gathering that it begins with."""
    names = {name for name, _ in trained.model.named_parameters(remove_duplicate=False)}
    model = {name: _sharded(t) if name in names else t for name, t in trained.state["model"].items()}
    optimizer = trained.state["optimizer"]
    moments = {
        fqn: {name: _sharded(value) if value.ndim else value for name, value in state.items()}
        for fqn, state in optimizer["state"].items()
    }
    return _run(trained, trained.run.model, trained.run.optimizer, (model, optimizer | {"state": moments}))


def _sharded(tensor: Tensor) -> Any:
    """Make this rank's ShardedTensor of a whole tensor, with the function by which FSDP1 does when it saves."""
    world_size = dist.get_world_size()
    return _create_chunk_sharded_tensor(tensor, dist.get_rank(), world_size, world_size, _get_default_group())


def _fsdp2(trained: Trained) -> SimulatedRun:
    """Wrap as a real rank does, where `fully_shard` cuts what it finds, and cut the optimizer's state alike."""
    options, saved = trained.options, trained.state["optimizer"]
    wrapped = strategies.BY_NAME[options.strategy].wrap(copy.deepcopy(trained.model), options)
    decayed = optimizers.decayed_names(trained.model)
    named = dict(strategies.plain_parameters(wrapped))
    optimizer = optimizers.make_optimizer(options.optimizer, named.items(), decayed)
    for fqn, state in saved["state"].items():
        optimizer.state[named[fqn]] = {name: _like(named[fqn], value) for name, value in state.items()}
    for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in kept.items() if key != "params"})
    return _run(trained, wrapped, optimizer, None)


def _like(param: nn.Parameter, value: Tensor) -> Tensor:
    """Cut a moment as its parameter is; a counter stays as it is. Without a source, no rank is asked for values."""
    if not isinstance(param, DTensor) or not value.ndim:
        return value.clone()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def _run(
    trained: Trained, model: nn.Module, optimizer: torch.optim.Optimizer, cut: tuple[StateDict, StateDict] | None
) -> SimulatedRun:
    known = {field.name: getattr(trained.run, field.name) for field in dataclasses.fields(Run)}
    known |= {"options": trained.options, "model": model, "optimizer": optimizer, "hardware": Chosen("fake", "cpu")}
    return SimulatedRun(**known, cut=cut)


def write_ranks(options: CreateOptions, folder: Path, report: Report) -> list[float]:
    """Write the files of the ranks that are asked for; returns the losses of the process that trained.

    Args:
        options: checked already.
        folder: for files in the making.
        report: takes one line at a time.
    """
    trained = train_alone(options, report)
    if options.full:
        torch.save(trained.state, folder / FULL_STATE)
    ranks = options.simulation.ranks_written
    every = max(1, -(-len(ranks) // 10))
    for done, _ in enumerate(_written(trained, ranks, folder), 1):
        if len(ranks) > 10 and (done % every == 0 or done == len(ranks)):
            report(f"{done} of {len(ranks)} ranks written")
    return trained.run.losses


def _written(trained: Trained, ranks: Iterable[int], folder: Path) -> Iterator[None]:
    """Write rank after rank, here or in other processes; yields after each."""
    jobs = trained.options.simulation.jobs
    if jobs == 1:
        for rank in ranks:
            write_rank(trained, rank, folder)
            yield
        return
    begin = (to_json(trained.options), str(folder))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin, initargs=begin) as pool:
        try:
            yield from pool.map(_write_another, ranks)
        finally:
            pool.shutdown(cancel_futures=True)


# What a process of the pool has trained, and the folder that it writes to.
_begun: list[tuple[Trained, Path]] = []


def _begin(text: str, folder: str) -> None:
    """Prepare a process of the pool: it trains the same run for itself, to the bit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    _begun.append((train_alone(from_json(text), lambda line: None), Path(folder)))


def _write_another(rank: int) -> None:
    trained, folder = _begun[0]
    write_rank(trained, rank, folder)
