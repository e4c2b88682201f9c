"""`--simulate-world` from the options to the files: what is refused, and how they appear."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from math import prod
from pathlib import Path

from ckptools.cluster.process import calm_torch
from ckptools.errors import UsageError, WriteError
from ckptools.text import first_line, plural
from ckptools.training import options as choices
from ckptools.training import output, worker
from ckptools.training.file_options import FileOptions
from ckptools.training.hollow.shapes import Shapes, shapes_from
from ckptools.training.launchers.options import LaunchOptions
from ckptools.training.options import Created, CreateOptions, ModelSize
from ckptools.training.parallel_options import ParallelOptions
from ckptools.training.resume_options import ResumeOptions
from ckptools.training.simulation_options import HOLLOW, SIMULATED


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
    hollow = options.simulation.hollow
    shapes = shapes_from(hollow) if hollow else {}
    calm_torch()
    report = worker.say if verbose else (lambda line: None)
    for line in explanation(options, shapes):
        report(line)
    with output.open_partial_folder(options.out, uuid.uuid4().hex) as partial:
        try:
            losses = _write(options, shapes, partial, report)
            files = output.finish(partial, options.out)
        except (OSError, RuntimeError, BrokenProcessPool) as error:
            # torch reports a full disk as a RuntimeError.
            raise WriteError(options.out, f"could not be written: {first_line(error)}") from error
        output.remove_older(options.out, files)
    nbytes = sum(path.stat().st_size for path in files)
    return Created(options.out, files, tuple(losses), options.world_size or 1, nbytes, rank=0)


def _write(options: CreateOptions, shapes: Shapes, folder: Path, report: Callable[[str], None]) -> list[float]:
    """Write the files; returns the losses of the process that trained, if one did."""
    if shapes:
        from ckptools.training.hollow import writing

        writing.write_ranks(options, shapes, folder, report)
        return []
    from ckptools.training.simulated_world import write_ranks

    return write_ranks(options, folder, report)


def explanation(options: CreateOptions, shapes: Shapes) -> list[str]:
    """What the files are going to be, and which of it is true."""
    world_size, simulation = options.world_size or 1, options.simulation
    ranks = len(simulation.ranks_written)
    if shapes:
        count = sum(prod(shape) for shape in shapes.values())
        whose = "the whole model" if options.layout == "huggingface" else f"{ranks} of {world_size} ranks"
        return [
            f"{whose}, hollow: {plural(len(shapes), 'parameter')} of {count:,} elements, bfloat16; no training",
            "values: none, holes that read as zeros and take no space; names, shapes and layout are true",
        ]
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
    _check_kind(options)
    if (options.damage, options.resuming, options.launch) != ("", ResumeOptions(), LaunchOptions()):
        raise UsageError(None, "--simulate-world starts no ranks, so options to launch, resume or break do not apply")
    if options.parallel != ParallelOptions():
        raise UsageError(None, "--simulate-world cuts over all ranks alike; leave out how a strategy spreads the model")
    choices.check(options)
    simulation.ranks_written  # noqa: B018  # raises where there is no such rank
    output.refuse_existing(options.out, options.force)
    return dataclasses.replace(options, world_size=world_size)


def _check_kind(options: CreateOptions) -> None:
    """Refuse what cannot be simulated, and options that --hollow has no use for."""
    hollow = options.simulation.hollow is not None
    kinds, command = (HOLLOW, "--hollow") if hollow else (SIMULATED, "--simulate-world")
    if options.layout not in kinds.get(options.strategy, ()):
        known = "; ".join(f"--strategy {name} with --layout {' or '.join(of)}" for name, of in kinds.items())
        why = "" if hollow else " (a DCP is planned by all ranks, and a fake group has none; but see --hollow)"
        raise UsageError(None, f"{command} writes no {options.layout} with {options.strategy}, only {known}{why}")
    if hollow and (options.full or options.simulation.tiny or options.size != ModelSize()):
        raise UsageError(None, "--hollow trains no model; leave out --full, --tiny and the size of one")
    plain = FileOptions(options.files.name, options.files.run_name, max_shard_size=options.files.max_shard_size)
    if hollow and options.files != plain:
        raise UsageError(None, "--hollow writes one file per rank, or whole files; leave out how they are cut else")


def _sized(options: CreateOptions) -> CreateOptions:
    """Make the model small with `--tiny`: one block, and an embedding of which each rank has two rows, the last one."""
    if not options.simulation.tiny:
        return options
    size = ModelSize(vocab=2 * (options.world_size or 1) - 1, width=16, layers=1, heads=2, context=15)
    return dataclasses.replace(options, size=size)
