"""`--simulate-world 256 --ranks 0,137`: true rank files of a big world, written by one process.

One process trains for real. Then torch's fake process group, which answers every collective at once, lets it be one
rank after the other of a world that does not exist: what it trained is cut as the strategy cuts it there. So the values
are those of a run of one process, and the files of all ranks together are that run, to the bit; the layout is that of
the big world.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptools.cluster.waiting import Say, say_nothing
from ckptools.training import layouts, optimizers, random_states, strategies
from ckptools.training.backends import Chosen
from ckptools.training.layouts.rank_files import composer_state
from ckptools.training.options import CreateOptions, from_json, to_json
from ckptools.training.output import FULL_STATE
from ckptools.training.random_states import RandomState
from ckptools.training.run import Run, full_state, place, prepare, quiet, train
from ckptools.training.strategies.fsdp import FSDP1

T = TypeVar("T")
R = TypeVar("R")

FAKE = Chosen("fake", "cpu")


@dataclass(frozen=True)
class Trained:
    """The result of the training that one process did.

    Attributes:
        options: of the simulated world; those of `run` are of the one process.
        state: the full state of that.
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


def train_alone(options: CreateOptions, report: Say) -> Trained:
    """Train in this process alone, which is a world of one."""
    torch.set_num_threads(1)
    alone = dataclasses.replace(options, strategy="ddp", world_size=1, layout="composer")
    # A whole world, with real collectives and without a port.
    with quiet(), _group("gloo", HashStore(), 0, 1):
        run = prepare(alone, say_nothing)
        train(run, report, lambda run: None)
        state = copy.deepcopy(full_state(run))
        world_size = options.world_size or 1
        rng = []
        for rank in range(1 if options.simulation.tiny else world_size):
            random_states.seed_all(options.seed + rank)
            rng.append(random_states.capture(run.device))
        return Trained(options, run, state, rng * world_size if options.simulation.tiny else rng)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist; there must be no process group yet."""
    with _group("fake", FakeStore(), rank, world_size):
        yield


@contextmanager
def _group(backend: str, store: HashStore | FakeStore, rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_rank(trained: Trained, folder: Path, rank: int) -> None:
    """Be one rank of the simulated world, and write its files into a folder.

    In a thread of its own: what DTensor remembers of its meshes it remembers per thread, and without regard to the
    rank, which no process of a real world changes.
    """
    with ThreadPoolExecutor(1) as own:
        own.submit(_write_rank, trained, rank, folder).result()


def _write_rank(trained: Trained, rank: int, folder: Path) -> None:
    options = trained.options
    with quiet(), fake_group(rank, options.world_size or 1):
        run = _fsdp1(trained) if options.strategy == "fsdp1" else _wrapped(trained)
        random_states.restore(trained.rng[rank], run.device)
        if options.layout == "composer":
            # The fake group gathers nothing, so the random states of all ranks come from here.
            torch.save({"state": composer_state(run), "rng": trained.rng}, place(run, folder))
        else:
            layouts.SAVE[options.layout](run, folder)


def _fsdp1(trained: Trained) -> Run:
    """Cut as FSDP1 does when it saves, without the gathering that it begins with."""
    names = {name for name, _ in trained.model.named_parameters(remove_duplicate=False)}
    model = {name: _sharded(t) if name in names else t for name, t in trained.state["model"].items()}
    moments = {
        fqn: {name: _sharded(value) if value.ndim else value for name, value in state.items()}
        for fqn, state in trained.state["optimizer"]["state"].items()
    }
    optimizer = trained.state["optimizer"] | {"state": moments}
    strategy = dataclasses.replace(FSDP1, model_state=lambda _: model, optimizer_state=lambda *_: optimizer)
    return dataclasses.replace(trained.run, options=trained.options, strategy=strategy, hardware=FAKE)


def _sharded(tensor: Tensor) -> Any:
    """Make this rank's ShardedTensor of a whole tensor, with the function by which FSDP1 does when it saves."""
    world_size = dist.get_world_size()
    return _create_chunk_sharded_tensor(tensor, dist.get_rank(), world_size, world_size, _get_default_group())


def _wrapped(trained: Trained) -> Run:
    """Wrap as a real rank does, which cuts the parameters that it finds, and cut the optimizer's state alike."""
    options, saved = trained.options, trained.state["optimizer"]
    strategy = strategies.BY_NAME[options.strategy]
    wrapped = strategy.wrap(copy.deepcopy(trained.model), options)
    decayed = optimizers.decayed_names(trained.model)
    named = dict(strategies.plain_parameters(wrapped))
    optimizer = optimizers.make_optimizer(options.optimizer, named.items(), decayed)
    for fqn, state in saved["state"].items():
        optimizer.state[named[fqn]] = {name: _like(named[fqn], value) for name, value in state.items()}
    for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in kept.items() if key != "params"})
    run = dataclasses.replace(trained.run, options=options, strategy=strategy, hardware=FAKE)
    run.model, run.optimizer = wrapped, optimizer
    return run


def _like(param: nn.Parameter, value: Tensor) -> Tensor:
    """Cut a moment as its parameter is; a counter stays as it is. Without a source, no rank is asked for values."""
    if not isinstance(param, DTensor) or not value.ndim:
        return value.clone()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def write_ranks(options: CreateOptions, folder: Path, report: Say) -> list[float]:
    """Write the files of the ranks that are asked for; returns the losses of the process that trained."""
    trained = train_alone(options, report)
    if options.full:
        torch.save(trained.state, folder / FULL_STATE)
    ranks, jobs = options.simulation.ranks_written, options.simulation.jobs
    every = max(1, -(-len(ranks) // 10))
    if jobs == 1:
        written: Iterator[None] = map(partial(write_rank, trained, folder), ranks)
    else:
        written = in_processes(jobs, _write_another, ranks, partial(_begin, to_json(options), folder))
    for done, _ in enumerate(written, 1):
        if len(ranks) > 10 and (done % every == 0 or done == len(ranks)):
            report(f"{done} of {len(ranks)} ranks written")
    return trained.run.losses


def in_processes(
    jobs: int, do: Callable[[T], R], things: Iterable[T], begin: Callable[[], None] | None = None
) -> Iterator[R]:
    """Do something for many things in other processes, each of which calls `begin` first; yields results in order."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_begin_process, initargs=(begin,)) as pool:
        try:
            yield from pool.map(do, things)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_process(begin: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    if begin is not None:
        begin()


# What a process of the pool has trained, and the folder that it writes to.
_begun: list[tuple[Trained, Path]] = []


def _begin(text: str, folder: Path) -> None:
    """Prepare a process of the pool: it trains the same run for itself, to the bit."""
    _begun.append((train_alone(from_json(text), say_nothing), folder))


def _write_another(rank: int) -> None:
    write_rank(*_begun[0], rank)
