"""`--simulate-world` from the options to the files: what is refused, and how they appear."""

from __future__ import annotations

import dataclasses
import uuid
from concurrent.futures.process import BrokenProcessPool

from ckptools.cluster.process import calm_torch
from ckptools.errors import UsageError, WriteError
from ckptools.text import first_line
from ckptools.training import options as choices
from ckptools.training import output, worker
from ckptools.training.launchers.options import LaunchOptions
from ckptools.training.options import Created, CreateOptions, ModelSize
from ckptools.training.parallel_options import ParallelOptions
from ckptools.training.resume_options import ResumeOptions
from ckptools.training.simulation_options import SIMULATED


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Write the files of some ranks of a world that is not there.

    Args:
        options: with `simulation.simulate_world`.
        verbose: write a line per step, and on what is what, to stdout.

    Raises:
        UsageError: the options do not fit together.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a file could not be written.
    """
    options = _sized(_check(options).completed())
    calm_torch()
    from ckptools.training.simulated_world import write_ranks

    report = worker.say if verbose else (lambda line: None)
    for line in explanation(options):
        report(line)
    with output.open_partial_folder(options.out, uuid.uuid4().hex) as partial:
        try:
            losses = write_ranks(options, partial, report)
            files = output.finish(partial, options.out)
        except (OSError, RuntimeError, BrokenProcessPool) as error:
            # torch reports a full disk as a RuntimeError.
            raise WriteError(options.out, f"could not be written: {first_line(error)}") from error
        output.remove_older(options.out, files)
    nbytes = sum(path.stat().st_size for path in files)
    return Created(options.out, files, tuple(losses), options.world_size or 1, nbytes, rank=0)


def explanation(options: CreateOptions) -> list[str]:
    """What the files are going to be, and which of it is true."""
    world_size, simulation = options.world_size or 1, options.simulation
    ranks = len(simulation.ranks_written)
    own = "one random state stands for those of all ranks" if simulation.tiny else "random states are freshly seeded"
    return [
        f"one process for {ranks} of {world_size} ranks, by torch's fake process group; {options.strategy}",
        f"values: true, those of a run of one process, cut as {world_size} ranks hold them; {own}",
    ]


def _check(options: CreateOptions) -> CreateOptions:
    """Return the options with the world size in its place.

    Raises:
        UsageError: they do not fit together.
    """
    simulation, world_size = options.simulation, options.simulation.simulate_world or 0
    if world_size < 1:
        raise UsageError(None, f"--simulate-world is {world_size}, must be at least 1")
    if simulation.jobs < 1:
        raise UsageError(None, f"--jobs is {simulation.jobs}, must be at least 1")
    if options.world_size not in (None, world_size):
        raise UsageError(None, f"--world-size is {options.world_size}, --simulate-world {world_size}; leave one out")
    if options.layout not in SIMULATED.get(options.strategy, ()):
        known = "; ".join(f"--strategy {name} with --layout {' or '.join(of)}" for name, of in SIMULATED.items())
        text = f"--simulate-world writes no {options.layout} with {options.strategy}, only {known}"
        raise UsageError(None, f"{text} (a DCP is planned by all ranks, and a fake group has none)")
    if (options.damage, options.resuming, options.launch) != ("", ResumeOptions(), LaunchOptions()):
        raise UsageError(None, "--simulate-world starts no ranks, so options to launch, resume or break do not apply")
    if options.parallel != ParallelOptions():
        raise UsageError(None, "--simulate-world cuts over all ranks alike; leave out how a strategy spreads the model")
    choices.check(options)
    simulation.ranks_written  # noqa: B018  # raises where there is no such rank
    output.refuse_existing(options.out, options.force)
    return dataclasses.replace(options, world_size=world_size)


def _sized(options: CreateOptions) -> CreateOptions:
    """Make the model small with `--tiny`: one block, and an embedding of which each rank has two rows, the last one."""
    if not options.simulation.tiny:
        return options
    size = ModelSize(vocab=2 * (options.world_size or 1) - 1, width=16, layers=1, heads=2, context=15)
    return dataclasses.replace(options, size=size)
