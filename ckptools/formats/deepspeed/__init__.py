"""DeepSpeed checkpoints: ZeRO stages 0 to 3, pipelines, experts, and universal checkpoints.

A tag folder has model states and one optimizer states file per rank. Checked on real files of 0.19.8, and against
the sources of 0.6 to 0.19.8.

One model states and one optimizer states file of each model-parallel rank have every name, shape, and slot, and show
how the others are cut, so inspection reads only these and checks the ends of the other files. With all ranks, every
file is read: their pickles are small.

The tree has `model`, `optimizer` (state and param groups by name), all other values of the model states under their own
names, and `zero_optimizer` for ZeRO's values beside the state (loss scaler, overflow, clip_grad).

Tensor-parallel weights are joined if the model states describe how each was cut. Expert parameters have the model's
numbers.
"""

from __future__ import annotations

from pathlib import Path

from ckptools.formats import torch_file
from ckptools.formats.deepspeed import universal
from ckptools.formats.deepspeed.files import Files, find_tag, is_deepspeed, names_in, with_state_beside
from ckptools.formats.deepspeed.tag_folder import TagFolder
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.model.checkpoint import Checkpoint

NAME = "deepspeed"
READS = "DeepSpeed checkpoints: ZeRO 0 to 3, pipelines, experts, AutoTP, universal"
KNOWN_BY = "latest and global_stepN/, *_model_states.pt, *_optim_states.pt, layer_*-model_states.pt, zero/*/fp32.pt"
TRIED = ("DeepSpeed 0.19.8",)
BY_HAND = ("fp16",)
JOINS = ("model", "optimizer", "rest")


def detect(path: Path) -> bool:
    """Whether a path is a tag folder, a folder whose `latest` names one, or a file in one."""
    return is_deepspeed(path)


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of a folder or a file.

    Raises:
        ReadError: the model states cannot be read, or `latest` names a missing tag.
        UsageError: the folder contains several tags and no `latest`.
    """
    if options.only_this_file and path.is_file():
        return torch_file.read(path, options)
    builder = CheckpointBuilder(NAME, path)
    folder = find_tag(path, options)
    if (folder / "zero").is_dir():
        return with_state_beside(universal.read(builder, folder, options), path, folder, options)
    files = Files(folder, names_in(folder, options), options, path)
    return with_state_beside(TagFolder(builder, files).checkpoint(), path, folder, options)
