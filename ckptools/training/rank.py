"""One rank of a run: join the others, train, save, answer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ckptools.errors import UsageError, WriteError
from ckptools.text import first_line
from ckptools.training import file_names, full_state, layouts, output
from ckptools.training.backends import chosen_here
from ckptools.training.launchers.environment import NEEDED, missing_variables
from ckptools.training.layouts.place import of_any_rank
from ckptools.training.options import Created, CreateOptions
from ckptools.training.run import Report, Run, prepare, train


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
    backend = chosen_here(options.hardware).group
    missing = [name for name in NEEDED if name not in os.environ]
    if backend == "mpi":
        dist.init_process_group(backend)
    elif missing:
        raise UsageError(None, missing_variables(missing))
    elif options.launch.world_size_from == "env":
        dist.init_process_group(backend, init_method="env://")
    else:
        rank, world_size, address, port = (os.environ[name] for name in NEEDED)
        host = f"[{address}]" if ":" in address else address
        dist.init_process_group(backend, init_method=f"tcp://{host}:{port}", rank=int(rank), world_size=int(world_size))


def train_and_save(options: CreateOptions, partial: Path, report: Report) -> Created:
    """Train with the other ranks and save; every rank returns the same answer, but for `rank`.

    Args:
        options: checked already.
        partial: folder for files in the making; rank 0's caller has made it and removes it.
        report: takes one line at a time; called on rank 0 only.

    Raises:
        WriteError: a file could not be written.
    """
    # The order in which threads add up floats would be chance; ranks are parallel enough.
    torch.set_num_threads(1)
    with warnings.catch_warnings(), process_group(options):
        # FSDP1 and ShardedTensor announce their retirement; whoever asks for them here knows.
        warnings.simplefilter("ignore")
        say = report if dist.get_rank() == 0 else say_nothing
        saved: list[Created] = []
        train(prepare(options, say), say, lambda run: saved.append(_save(run, partial)))
        return saved[-1]


def _save(run: Run, partial: Path) -> Created:
    out = run.options.out
    files: list[tuple[Path, ...]] = [()]
    try:
        layouts.BY_NAME[run.options.layout].save(run, _folder(run, partial))
        if run.options.full and run.step == run.options.steps:
            full_state.save(run, partial)
        dist.barrier()
        if dist.get_rank() == 0:
            files = [output.finish(partial, out)]
            output.remove_older(out, files[0], of_any_rank(run))
    except (OSError, RuntimeError, CheckpointException) as error:
        # torch reports a full disk as a RuntimeError.
        raise WriteError(out, f"could not be written: {first_line(error)}") from error
    dist.broadcast_object_list(files)
    # Nobody leaves, and closes its connections, before everybody has the answer.
    dist.barrier()
    nbytes = sum(path.stat().st_size for path in files[0])
    return Created(out, files[0], tuple(run.losses), dist.get_world_size(), nbytes, dist.get_rank())


def _folder(run: Run, partial: Path) -> Path:
    """Make the folder for a checkpoint: one per step where there are several, and their names do not tell the step."""
    options = run.options
    name = options.files.name or file_names.NAMES[options.layout]
    if options.resuming.save_every is None or file_names.tells_step(name):
        return partial
    folder = partial / f"step-{run.step}"
    folder.mkdir(exist_ok=True)
    return folder


def say_nothing(line: str) -> None:
    """Take a line of the report and do nothing with it."""
