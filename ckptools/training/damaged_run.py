"""A run with `--break`: train, save, damage what was saved.

A stale rank's files are those of a real run that stopped one step earlier, a mixed-in rank's those of a real run with
the next seed. Both are trained first, into a folder that goes again, so that an interrupt leaves no half-broken
checkpoint behind.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from ckptools.training import damage, launch, output
from ckptools.training.options import Created, CreateOptions


def create(options: CreateOptions, verbose: bool) -> Created:
    """Train for real, save a checkpoint, and damage it as `options.damage` says.

    Raises:
        UsageError: the damage does not apply, or as `launch.create`.
    """
    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch:
        # Where something else starts ranks, all of them come here; `launch.create` refuses then what takes another run.
        node = launch.lone_node(options)
        runs = _other_runs(options, node.nproc, Path(scratch)) if node else {}
        created = launch.create(options, verbose)
        if created.rank != 0:
            return created
        broken = damage.apply(created.first, options.damage, options.seed, runs)
        nbytes = sum(path.stat().st_size for path in created.files if path.exists())
        return dataclasses.replace(created, damage=broken, nbytes=nbytes)


def _other_runs(options: CreateOptions, world_size: int, scratch: Path) -> dict[str, Path]:
    """Train the runs that files are taken from; returns what to open of each."""
    damage.check(options, world_size)
    output.refuse_existing(options.out, options.force)
    alike = dataclasses.replace(options, damage="", full=False)
    others = {
        "older run": dataclasses.replace(alike, out=scratch / "older", steps=options.steps - 1),
        "another run": dataclasses.replace(alike, out=scratch / "another", seed=options.seed + 1),
    }
    return {name: launch.create(others[name]).first for name in damage.other_runs(options.damage)}
