"""One rank of a run: join the others, train, save, answer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckptools.cluster.environment import NEEDED, missing_variables, restarts
from ckptools.cluster.waiting import Say, say_nothing
from ckptools.errors import UsageError, WriteError
from ckptools.text import first_line
from ckptools.training import layouts, output
from ckptools.training.option_checks import backend_chosen_here
from ckptools.training.options import CreateOptions, tells_step
from ckptools.training.output import Created
from ckptools.training.resuming import remember, resume, to_go_on_from
from ckptools.training.run import Run, of_any_rank, prepare, quiet, save_full_state, train


@contextmanager
def process_group(options: CreateOptions) -> Iterator[None]:
    """Join the group that the environment describes; one that is there already is used and left alone."""
    if dist.is_initialized():
        yield
        return
    join(options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def join(options: CreateOptions) -> None:
    """Initialize the process group, at the address and by the numbers that the environment says.

    torch reads them there itself, or is given them: `--world-size-from`. MPI knows them without either.

    Raises:
        UsageError: a variable is missing.
    """
    backend = backend_chosen_here(options.hardware).group
    missing = [name for name in NEEDED if name not in os.environ]
    if backend == "mpi":
        dist.init_process_group(backend)
    elif missing:
        raise UsageError(None, missing_variables(missing))
    elif options.launch.world_size_from == "env":
        _join_at(backend, "env://")
    else:
        rank, world_size, address, port = (os.environ[name] for name in NEEDED)
        host = f"[{address}]" if ":" in address else address
        _join_at(backend, f"tcp://{host}:{port}", int(rank), int(world_size))


def _join_at(backend: str, url: str, *numbers: int) -> None:
    """Initialize the process group with a store of this start's own.

    torch's launcher keeps its store when it starts all ranks again, and with it the addresses of those that died.
    """
    store, rank, world_size = next(rendezvous(url, *numbers))
    store = PrefixStore(f"start-{restarts()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def train_and_save(options: CreateOptions, partial: Path, report: Say) -> Created:
    """Train with the other ranks and save; every rank returns the same answer, but for `rank`.

    Rank 0's caller has made the folder `partial` for files in the making, and removes it. Rank 0 alone reports.

    Raises:
        WriteError: a file could not be written.
    """
    # The order in which threads add up floats would be chance; ranks are parallel enough.
    torch.set_num_threads(1)
    with quiet(), process_group(options):
        return _in_the_group(options, partial, report if dist.get_rank() == 0 else say_nothing)


def _in_the_group(options: CreateOptions, partial: Path, say: Say) -> Created:
    """Train and save, and let the model go while the group is there.

    The last to go would otherwise be DDP's reducer, which ends gloo's threads without letting go of Python's lock, for
    which such a thread may wait that still lets go of a tensor: neither ends. Seen with torch 2.13.
    """
    saved: list[Created] = []
    run = prepare(options, say)
    saved_before = to_go_on_from(options, partial)
    if saved_before:
        resume(run, saved_before, say)
    train(run, say, lambda run: saved.append(_save(run, partial)))
    return saved[-1]


def _save(run: Run, partial: Path) -> Created:
    out, growing = run.options.out, partial / "growing"
    files: list[tuple[Path, ...]] = [()]
    try:
        if dist.get_rank() == 0:
            # What lies in it is of a save that was not finished.
            shutil.rmtree(growing, ignore_errors=True)
            growing.mkdir()
        dist.barrier()
        layouts.SAVE[run.options.layout](run, _folder(run, growing))
        if run.options.full and run.step == run.options.steps:
            save_full_state(run, growing)
        dist.barrier()
        if dist.get_rank() == 0:
            files = [_publish(run, growing, partial)]
    except (OSError, RuntimeError, CheckpointException) as error:
        # torch reports a full disk as a RuntimeError.
        raise WriteError(out, f"could not be written: {first_line(error)}") from error
    dist.broadcast_object_list(files)
    # No rank closes its connections before all ranks have the answer.
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in files[0])
    return Created(out, files[0], tuple(run.losses), dist.get_world_size(), nbytes, dist.get_rank())


def _publish(run: Run, growing: Path, partial: Path) -> tuple[Path, ...]:
    """Give complete files their names, and remember the checkpoint for the case that the ranks are started again."""
    if run.options.resuming.keeps_losses:
        output.write_losses(output.common_folder(growing), run.losses, run.step)
    files = output.finish(growing, run.options.out)
    output.remove_older(run.options.out, files, of_any_rank(run))
    remember(partial, files)
    return files


def _folder(run: Run, growing: Path) -> Path:
    """Make the folder for a checkpoint: one per step where there are several, and their names do not have the step."""
    if run.options.resuming.save_every is None or tells_step(run.options.template):
        return growing
    folder = growing / f"step-{run.step}"
    folder.mkdir(exist_ok=True)
    return folder
