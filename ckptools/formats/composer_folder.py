"""Composer's `save_checkpoint_to_disk` (2024): `ep0-ba5/` with a folder each for model and optimizer.

    model/                      DCP whose keys are the fqns, or `model/model.pt`
    optim/                      DCP with `state` and `param_groups`, or `optim/optim.pt`
    resumption.pkl              a plain pickle: timestamp, schedulers, dataset_state, callbacks, rank_zero_seed, …
    composer_metadata.json      versions, number of GPUs, precision

Tensors in the plain pickle are kept as foreign objects. The Trainer itself writes rank files or one DCP
(`rank_files`, `dcp`). The folders open as plain DCP too. Source: mosaicml/composer composer/checkpoint/save.py and
state_dict.py; checked on a folder of this layout that torch wrote, not on one of Composer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptools.formats.dcp.folder import PLANNED, CompositeBuilder, is_dcp
from ckptools.formats.options import Options
from ckptools.model.checkpoint import Checkpoint, Fact
from ckptools.model.problems import Code, Problem
from ckptools.training_state.optimizers import AS_SAVED

NAME = "composer_folder"
READS = "Composer's composer.checkpoint: a folder with model/, optim/, resumption.pkl and composer_metadata.json"
KNOWN_BY = "a folder with composer_metadata.json or resumption.pkl beside model/ or optim/"
TRIED = ()
BY_HAND = ("composer.checkpoint",)
JOINS = ("model", "optimizer", "rest")

METADATA = "composer_metadata.json"
RESUMPTION = "resumption.pkl"
FOLDERS = ("model", "optim")


def detect(path: Path) -> bool:
    """A folder with one of Composer's two files, and a model or an optimizer beside it."""
    if not path.is_dir() or not any((path / name).is_file() for name in (METADATA, RESUMPTION)):
        return False
    return any(is_dcp(path / name) or (path / name / f"{name}.pt").is_file() for name in FOLDERS)


def read(path: Path, options: Options) -> Checkpoint:
    """Open a checkpoint of `composer.checkpoint`.

    Raises:
        ReadError: a DCP folder in it cannot be read.
        UnsafePathError: a part is a link out of the folder.
    """
    parts = CompositeBuilder(NAME, path, options)
    for name in FOLDERS:
        if is_dcp(path / name):
            parts.add_dcp(path / name, name)
        elif (path / name / f"{name}.pt").is_file():
            parts.check_link(path / name)
            parts.add_file(path / name / f"{name}.pt", name)
        else:
            parts.problems.append(Problem(Code.FILE_MISSING, f"no folder {name}: it was not saved", severity="note"))
    if (path / RESUMPTION).is_file():
        parts.add_file(path / RESUMPTION, "resumption")
    if (path / METADATA).is_file():
        parts.add_file(path / METADATA, "metadata")
    saved_as = f"DCP folders, {parts.writer}" if parts.writer else "the model whole"
    order = PLANNED if is_dcp(path / "model") else AS_SAVED
    metadata = parts.tree.get("metadata")
    stated = metadata.get("num_gpus") if isinstance(metadata, Mapping) else None
    world = Fact(stated, ("metadata.num_gpus",)) if type(stated) is int and stated > 0 else Fact(None)
    return parts.checkpoint(f"Composer, {saved_as}", world, order)
