"""The path of this rank's file, or of the folder of all ranks: the template of file names, filled in."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from ckptools.training import file_names
from ckptools.training.options import run_name
from ckptools.training.run import Run


def place(run: Run, folder: Path) -> Path:
    """Say where in `folder` this rank's file goes, and make the folders on the way there."""
    path = _named(run, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def place_folder(run: Run, folder: Path) -> Path:
    """Say which folder in `folder` the files of all ranks go to, and make it; without a name `folder` itself."""
    path = _named(run, folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def of_any_rank(run: Run) -> str | None:
    """Make a regular expression for the file of any rank; None where the layout's own names are used."""
    template = run.options.files.name
    return None if template is None else file_names.of_any_rank(template, _values(run))


def _named(run: Run, folder: Path) -> Path:
    return folder / run.options.template.format(**_values(run))


def _values(run: Run) -> dict[str, int | str]:
    """Values of the fields; launchers set the local rank and the node's, except those with one node."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        "run_name": run_name(run.options, world_size),
        "epoch": run.epoch,
        "batch": run.step,
        "rank": rank,
        "local_rank": int(os.environ.get("LOCAL_RANK", rank)),
        "node_rank": int(os.environ.get("GROUP_RANK", 0)),
        "world_size": world_size,
    }
