"""Start the ranks through torch's elastic launcher, or be one of them where a launcher did that already."""

from __future__ import annotations

import dataclasses
import os
import uuid

from ckptools.errors import UsageError
from ckptools.training import backends, output, worker, world_sizes
from ckptools.training import options as choices
from ckptools.training.launchers import elastic
from ckptools.training.options import Created, CreateOptions

DEFAULT_WORLD_SIZE = 4
OVER_FSDP2 = ("fsdp2", "fsdp2-tp", "hsdp-tp")


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Train for real and save a checkpoint.

    Args:
        options: what to train and how to save it.
        verbose: rank 0 writes a line per step to stdout.

    Returns:
        The files, the losses and the world size.

    Raises:
        UsageError: the options do not fit together, or not with the outer torchrun.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a rank died, or a file could not be written.
    """
    options = options.completed()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _be_a_rank(options, verbose)
    if options.world_size is None:
        options = dataclasses.replace(options, world_size=DEFAULT_WORLD_SIZE)
    _check(options, options.world_size or DEFAULT_WORLD_SIZE)
    run_id = uuid.uuid4().hex
    with output.open_partial_folder(options.out, run_id) as partial:
        return elastic.launch(options, partial, run_id, verbose)


def _check(options: CreateOptions, world_size: int) -> None:
    choices.check(options)
    world_sizes.check(options, world_size)
    _check_torch(options)
    backends.chosen_here(options.hardware, options.world_size)
    output.refuse_existing(options.out, options.force)


def _check_torch(options: CreateOptions) -> None:
    """Refuse FSDP2 where torch can do it on GPUs only: up to 2.6 it asks for streams, which a CPU does not have."""
    import torch

    if options.strategy in OVER_FSDP2 and not hasattr(torch.cpu.Stream, "record_event"):
        text = (
            f"--strategy {options.strategy} on a CPU needs a later torch than {torch.__version__}; fsdp1 and ddp do not"
        )
        raise UsageError(None, text)


def _be_a_rank(options: CreateOptions, verbose: bool) -> Created:
    """Train as the rank that an outer torchrun started.

    Only rank 0 looks for mistakes. The others would find the same ones and say them again; they wait in the
    rendezvous instead, until torchrun sees that rank 0 is gone and ends them.
    """
    worker.prepare_process()
    from ckptools.training.rank import say_nothing, train_and_save

    say = worker.say if verbose else say_nothing
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    if os.environ["RANK"] != "0":
        return train_and_save(options, output.partial_folder(options.out, run_id), say)
    _check_world(options)
    _check(options, int(os.environ["WORLD_SIZE"]))
    with output.open_partial_folder(options.out, run_id) as partial:
        return train_and_save(options, partial, say)


def _check_world(options: CreateOptions) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if options.world_size not in (None, started):
        raise UsageError(
            None, f"--world-size is {options.world_size}, but torchrun started {started} ranks; leave it out"
        )
