"""The model alone, as Hugging Face's libraries read it: safetensors, an index where there are several, `config.json`.

A tied weight is in the file once, under the name that it is tied to, as `save_pretrained` leaves it. There are three
ways there:

| options | files | written by |
|---|---|---|
| | `model.safetensors`, or `model-0000k-of-0000n.safetensors` and their index | rank 0, which gathers the model first |
| `--save-distributed` | the same, and each rank's shards below `sharded/` | every rank, then rank 0 joins |
| `--save-distributed --no-consolidated` | `shard-0000r-model-0000k-of-0000n.safetensors` | every rank |

Source: transformers' `save_pretrained` and huggingface_hub's `split_state_dict_into_shards_factory` for names, index
and how a model is cut; `HuggingFaceStorageWriter` of torch.distributed.checkpoint for what ranks write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools import api
from ckptools.text import parse_bytes
from ckptools.training.layouts.dcp import CopyingPlanner
from ckptools.training.model import TIED
from ckptools.training.options import FileOptions, ModelSize
from ckptools.training.run import Run, full_state, place_folder

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "sharded"


def save(run: Run, folder: Path) -> None:
    """Write the model; rank 0 adds its configuration."""
    folder = place_folder(run, folder)
    options = run.options.files
    if options.save_distributed:
        _save_shards(get_model_state_dict(run.model), folder, options)
    else:
        state = untied(full_state(run)["model"])
        if dist.get_rank() == 0:
            for name, fqns in whole_files(_sizes_of(state), folder, options).items():
                save_file({fqn: state[fqn].contiguous() for fqn in fqns}, folder / name, {"format": "pt"})
    if dist.get_rank() == 0:
        (folder / "config.json").write_text(json.dumps(_config(run.options.size), indent=2) + "\n")


def untied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the names that are second names of other tensors."""
    return {name: value for name, value in state.items() if TIED.get(name) not in state}


def whole_files(sizes: Mapping[str, int], folder: Path, options: FileOptions) -> dict[str, list[str]]:
    """Say which tensors, given their bytes, each file of a model gets; write the index where there are several."""
    numbers = file_numbers(sizes, options)
    last = max(numbers.values())
    names = {fqn: f"model-{n:05d}-of-{last:05d}.safetensors" if last > 1 else WHOLE for fqn, n in numbers.items()}
    if last > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return {file: [fqn for fqn, name in names.items() if name == file] for file in dict.fromkeys(names.values())}


def _save_shards(state: dict[str, Any], folder: Path, options: FileOptions) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # not in torch 2.6

    # Other ranks may hold tensors that this one does not.
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, _sizes_of(state))
    sizes = untied({fqn: nbytes for sizes in everyone for fqn, nbytes in sizes.items()})
    mine = {fqn: value for fqn, value in state.items() if fqn in sizes}
    shards = folder / SHARDS if options.consolidated else folder
    writer = HuggingFaceStorageWriter(str(shards), file_numbers(sizes, options), save_distributed=True)
    dcp_save(mine, storage_writer=writer, planner=CopyingPlanner())
    if options.consolidated and dist.get_rank() == 0:
        # The writer's own enable_consolidation stops at integers (torch 2.13), which this model has.
        # No file of the shards states a shape, but every rank has just written its own.
        api.open(shards).consolidate(folder / WHOLE, max_shard_size=_limit(options), allow_missing=True)


def _sizes_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each whole tensor, of tensors and of shards that know the shape of the whole."""
    return {fqn: tensor.size().numel() * tensor.dtype.itemsize for fqn, tensor in state.items()}


def file_numbers(sizes: Mapping[str, int], options: FileOptions) -> dict[str, int]:
    """Number the file, from 1, that each tensor goes to: the next one when a tensor would make a file too large.

    A tensor that is larger than a file may be gets a file of its own.
    """
    file, filled, numbers, limit = 1, 0, {}, _limit(options) or math.inf
    for fqn, nbytes in sizes.items():
        if filled and filled + nbytes > limit:
            file, filled = file + 1, 0
        filled += nbytes
        numbers[fqn] = file
    return numbers


def _limit(options: FileOptions) -> int | None:
    return None if options.max_shard_size is None else parse_bytes(options.max_shard_size)


def _config(size: ModelSize) -> dict[str, Any]:
    """Describe the model in the words that transformers has for it; it is none of transformers' own."""
    return {
        "architectures": ["Transformer"],
        "vocab_size": size.vocab,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.context,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
