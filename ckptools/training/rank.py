"""One rank of a run: join the other ranks, check that all have the same options, train, save, return the result."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckptools.cluster.environment import NEEDED, restarts
from ckptools.cluster.lost_rank import is_lost, lost_ranks_told
from ckptools.cluster.rank_0 import made_by_rank_0
from ckptools.errors import RendezvousError, UsageError, WriteError
from ckptools.text import first_line
from ckptools.training import backends, layouts, output
from ckptools.training.options import CreateOptions, LaunchOptions, flat, tells_step
from ckptools.training.output import Created
from ckptools.training.resuming import SAVED, remember, resume, to_go_on_from
from ckptools.training.run import Run, Say, of_any_rank, prepare, quiet, save_full_state, train


def say(line: str) -> None:
    """Write a line to stdout at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def say_nothing(_: str) -> None:
    """Print nothing."""


# -- the process group -------------------------------------------------------------------------------------------------


@contextmanager
def in_group(options: CreateOptions) -> Iterator[None]:
    """Inside this context, be in the process group that the environment describes; a collective.

    Raises:
        RendezvousError: other ranks did not join, or the connection to a rank was lost.
    """
    backend = backends.chosen_here(options.hardware).group
    try:
        _join(backend, options)
    except RuntimeError as error:
        text = f"rank {os.environ['RANK']} did not meet the others: {first_line(error)}"
        raise RendezvousError(None, text) from error
    try:
        with lost_ranks_told(None):
            yield
    finally:
        dist.destroy_process_group()


def _join(backend: str, options: CreateOptions) -> None:
    """Initialize the process group at the address and by the numbers of the environment.

    torch reads the numbers there itself, or is given them: `--world-size-from`.
    """
    rank, world_size, address, port = (os.environ[name] for name in NEEDED)
    url, timeout = "env://", timedelta(seconds=options.launch.timeout)
    numbers: tuple[int, ...] = ()
    if options.launch.world_size_from == "argument":
        host = f"[{address}]" if ":" in address else address
        url, numbers = f"tcp://{host}:{port}", (int(rank), int(world_size))
    store, _, _ = next(rendezvous(url, *numbers, timeout=timeout))
    # torch's launcher keeps its store when it starts all ranks again, with the addresses of the ranks that died.
    store = PrefixStore(f"start-{restarts()}", store)
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(world_size))


# -- training and saving together --------------------------------------------------------------------------------------


def train_and_save(options: CreateOptions, partial: Path | None, report: Say) -> Created:
    """Train with the other ranks of the group and save; every rank returns the same result, except for `rank`.

    `partial` is the folder for unfinished files, which rank 0 makes and the launcher removes. It is None if another
    launcher has started the ranks: then rank 0 chooses and removes the folder. Only rank 0 reports.

    Raises:
        UsageError: the options do not go together, on any rank, or differ.
        WriteError: a file could not be written.
    """
    # With several threads the order in which floats are added would be chance; ranks are parallel enough.
    torch.set_num_threads(1)
    with quiet(), ExitStack() as stack:
        _agree(options)
        nproc = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        made_by_rank_0(lambda: backends.check_here(options, dist.get_world_size(), nproc))
        if partial is None:
            # Other nodes may call the same folder OUT by another path.
            named = output.partial_folder(options.out, uuid.uuid4().hex)
            partial = options.out / made_by_rank_0(lambda: stack.enter_context(named).name)
        made_by_rank_0(lambda: _make(options.out, partial))
        _see(options.out, partial)
        return _train_and_save(options, partial, report if dist.get_rank() == 0 else say_nothing)


def _agree(options: CreateOptions) -> None:
    """Refuse options that differ between ranks, apart from the folder's path and the launch options of each node."""
    common = dataclasses.replace(options, out=Path(), launch=LaunchOptions())
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, json.dumps(flat(common), default=str))
    said = [json.loads(text) for text in everyone]
    for rank, other in enumerate(said):
        for name, value in said[0].items():
            if other[name] != value:
                text = f"--{name.replace('_', '-')} is {value} on rank 0, but {other[name]} on rank {rank}"
                raise UsageError(None, f"{text}; give all the same")
    if options.world_size not in (None, len(said)):
        text = f"--world-size is {options.world_size}, but the nodes start {len(said)} ranks; leave one of them out"
        raise UsageError(None, text)


def _make(out: Path, partial: Path) -> None:
    """Make the folder for unfinished files; after a restart it keeps its list of saved checkpoints."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        (partial / SAVED).open("a" if restarts() else "w").close()
    except OSError as error:
        raise WriteError(out, f"cannot be made: {(error.strerror or '').lower()}") from error


# Seconds after which a network file system shows a new file to every node.
_SEEN_WITHIN = 5.0


def _see(out: Path, partial: Path) -> None:
    """Check that all ranks see the folder that rank 0 has made; a collective."""
    deadline = time.monotonic() + _SEEN_WITHIN
    while not (partial / SAVED).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, (partial / SAVED).exists())
    if not all(seen):
        text = f"on rank {seen.index(False)} is not the folder that rank 0 writes to; give one that all nodes share"
        raise WriteError(out, text)


def _train_and_save(options: CreateOptions, partial: Path, say: Say) -> Created:
    """Train and save, and free the model while the process group exists.

    Otherwise DDP's reducer would be freed last. It ends gloo's threads while it holds Python's lock, and such a thread
    may wait for this lock to free a tensor: then neither ends. Seen with torch 2.13.
    """
    saved: list[Created] = []
    run = prepare(options, say)
    saved_before = to_go_on_from(options, partial)
    if saved_before:
        resume(run, saved_before, say)
    train(run, say, lambda run: saved.append(_save(run, partial)))
    return saved[-1]


def _save(run: Run, partial: Path) -> Created:
    growing = partial / "growing"

    def begin() -> None:
        # Files in it are left from a save that was not finished.
        shutil.rmtree(growing, ignore_errors=True)
        growing.mkdir()

    try:
        made_by_rank_0(begin)
        layouts.SAVE[run.options.layout](run, _folder(run, growing))
        if run.options.full and run.step == run.options.steps:
            save_full_state(run, growing)
        dist.barrier()
        files = made_by_rank_0(lambda: _publish(run, growing, partial))
    except (OSError, RuntimeError, CheckpointException) as error:
        if is_lost(error):
            raise
        # torch reports a full disk as a RuntimeError.
        raise WriteError(run.options.out, f"could not be written: {first_line(error)}") from error
    # No rank closes its connections before all ranks have the answer.
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in files)
    return Created(run.options.out, files, tuple(run.losses), dist.get_world_size(), nbytes, dist.get_rank())


def _publish(run: Run, growing: Path, partial: Path) -> tuple[Path, ...]:
    """Give complete files their names, and note the checkpoint in case the ranks are started again."""
    if run.options.resuming.keeps_losses:
        output.write_losses(output.common_folder(growing), run.losses, run.step)
    files = output.finish(growing, run.options.out)
    output.remove_older(run.options.out, files, of_any_rank(run))
    remember(partial, files)
    return files


def _folder(run: Run, growing: Path) -> Path:
    """The folder for a checkpoint: one per step if several steps are saved, and the names do not have the step."""
    if run.options.resuming.save_every is None or tells_step(run.options.template):
        return growing
    folder = growing / f"step-{run.step}"
    folder.mkdir(exist_ok=True)
    return folder
