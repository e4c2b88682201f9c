"""OLMo-core: `step1000/` with a DCP for model and optimizer, and a file per rank for the trainer.

    model_and_optim/            DCP; tops `model` and `optim`, the optimizer state flattened unless asked otherwise
    train/rank{R}.pt            trainer state: global_step, epoch, world_size, data_loader, rng, callbacks
    .metadata.json              version of OLMo-core

The DCP is written by OLMo-core's own writer, whose classes have torch's names. A rank whose trainer state is missing
resumes from that of rank 0. `model_and_optim/` opens as plain DCP too. Source: allenai/OLMo-core
src/olmo_core/train/checkpoint.py, train/trainer.py, distributed/checkpoint/filesystem.py,
train/train_module/transformer/train_module.py; checked on a folder of this layout that torch wrote, not on one of
OLMo-core.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptools.formats import rank_files
from ckptools.formats.dcp.folder import PLANNED, CompositeBuilder, is_dcp
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_names import parse
from ckptools.model.checkpoint import Checkpoint, Fact
from ckptools.model.problems import Code, Problem

NAME = "olmo_core"
READS = "OLMo-core: a step folder with model_and_optim/ (DCP) and the trainer's state of each rank"
KNOWN_BY = "a folder with model_and_optim/.metadata"
TRIED = ()
BY_HAND = ("OLMo-core",)
JOINS = ("model", "optimizer", "rest")

MODEL_AND_OPTIM = "model_and_optim"
TRAIN = "train"
VERSION = ".metadata.json"


def detect(path: Path) -> bool:
    """A folder with model and optimizer in a DCP folder of OLMo-core's name."""
    return path.is_dir() and is_dcp(path / MODEL_AND_OPTIM)


def read(path: Path, options: Options) -> Checkpoint:
    """Open a checkpoint of OLMo-core.

    Raises:
        ReadError: its DCP folder or rank 0's trainer state cannot be read.
        UnsafePathError: a part is a link out of the folder.
    """
    parts = CompositeBuilder(NAME, path, options)
    parts.add_dcp(path / MODEL_AND_OPTIM, None)
    world = _add_trainer(parts)
    if (path / VERSION).is_file():
        parts.add_file(path / VERSION, "metadata")
    return parts.checkpoint(f"OLMo-core, DCP folder, {parts.writer}", world, PLANNED)


def _add_trainer(parts: CompositeBuilder) -> Fact:
    """Add the ranks' trainer states; return the world size that they state."""
    folder = parts.path / TRAIN
    if not folder.is_dir():
        text = f"no folder {TRAIN}, which holds the trainer's state"
        parts.problems.append(Problem(Code.FILE_MISSING, text, severity="warning"))
        return Fact(None)
    parts.check_link(folder)
    ranks = sorted(n.rank for n in map(parse, folder.iterdir()) if n is not None)
    if not ranks:
        parts.problems.append(Problem(Code.FILE_MISSING, f"no file rank0.pt in {TRAIN}", severity="warning"))
        return Fact(None)
    parts.add_checkpoint(rank_files.read(folder / f"rank{ranks[0]}.pt", parts.options), TRAIN)
    trainer = parts.tree[TRAIN]
    world = trainer.get("world_size") if isinstance(trainer, Mapping) else None
    if type(world) is not int or world < 1:
        return Fact(None)
    for rank in sorted(set(range(min(world, rank_files.MAX_WORLD))) - set(ranks)):
        text = f"no file {TRAIN}/rank{rank}.pt; it would resume from rank 0's"
        parts.problems.append(Problem(Code.FILE_MISSING, text, rank))
    return Fact(world, (f"{TRAIN}.world_size",))
