"""Folders of torch.distributed.checkpoint: its own, and those that Composer, torchtitan and OLMo-core make of it.

A folder has `.metadata`, and `__{rank}_{n}.distcp` of every rank that has something to write. DCP writes one copy of
what several ranks hold alike, and joins the trees of all ranks: what each rank has for itself therefore has its rank in
its key.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import platform
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_and_wait

from ckptools.training import random_states
from ckptools.training.layouts.rank_files import composer_state
from ckptools.training.options import FileOptions
from ckptools.training.run import Run, place_folder

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Every parameter has its hyperparameters under a key of its own: `optim.param_groups.<fqn>.lr`."""


def save(run: Run, folder: Path) -> None:
    """Save `{model, optim, scheduler, step, sampler, rng}`, the optimizer under fqns: all that a resume needs.

    Where ranks have parameters of their own, each has other param groups too, and of one key DCP keeps one rank's
    value: there the optimizer is flat.
    """
    model, optim = get_state_dict(run.model, run.optimizer, options=FLAT if run.strategy.in_parts else None)
    content = {
        "model": model,
        "optim": optim,
        "scheduler": run.scheduler.state_dict(),
        "step": run.step,
        "sampler": {"epoch": run.epoch, "sample_in_epoch": run.position.samples},
        "rng": {str(dist.get_rank()): random_states.capture(run.device)},
    }
    planner = DefaultSavePlanner() if run.options.files.items == "torch" else CopyingPlanner()
    _write(content, place_folder(run, folder), run.options.files, planner)


def _write(
    content: dict[str, Any], folder: Path, options: FileOptions, planner: DefaultSavePlanner, files: int = 1
) -> None:
    """Write this rank's tree of tensors and objects into a DCP folder; returns when all ranks have written.

    The planner says which rank writes what several hold. A rank's items are dealt out to `files` files, each written by
    a thread of its own.
    """
    writer = FileSystemWriter(folder, options.files_per_rank == "one", thread_count=files, **_item_format(options))
    if not options.async_save:
        save_and_wait(content, storage_writer=writer, planner=planner)
        return
    # A copy is taken at once, and written by a thread while training could go on. That thread calls collectives too,
    # on the CPU, so they need a group of their own.
    group = dist.new_group(backend="gloo")
    written: Any = async_save(content, storage_writer=writer, planner=planner, process_group=group)
    written.result()
    dist.destroy_process_group(group)


def _item_format(options: FileOptions) -> dict[str, Any]:
    """How a tensor is written, in torch's words: an archive of its own, or all of a file as safetensors."""
    if options.items == "torch":
        return {}
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return {"serialization_format": SerializationFormat.SAFETENSORS}


class CopyingPlanner(DefaultSavePlanner):
    """torch's planner, for safetensors, which refuses two tensors in the same memory, as tied weights are."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return what is written for an item: of a tensor a copy."""
        data = super().resolve_data(write_item)
        return data.clone() if isinstance(data, Tensor) else data


def save_composer(run: Run, folder: Path) -> None:
    """Save `ep{epoch}-ba{batch}/` as Composer does from 0.16 on: the tree of its rank files, one level deeper.

    Keys are `state.model.<fqn>`, `state.optimizers.<class>.state.<fqn>.<name>`, `rng.<rank>.<generator>`; the random
    states of all ranks come from rank 0. Versions 0.16 to 0.30 had `optimizers` beside `state`, for torch 2.0 could
    load an optimizer from the top only; since 0.31 it is back inside, as here.
    Source: composer/utils/checkpoint.py (`_save_checkpoint`) of 0.16.4 and 0.32.1.
    """
    content: dict[str, Any] = {"state": composer_state(run)}
    rng = random_states.gather(run.device)
    if dist.get_rank() == 0:
        content["rng"] = rng
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save_and_wait(content, checkpoint_id=place_folder(run, folder), planner=planner)


def save_torchtitan(run: Run, folder: Path) -> None:
    """Save torchtitan's `step-{batch}/`: the model's fqns at the top, everything else under a name of its own.

    `optimizer` is flat: `optimizer.state.<fqn>.<name>` and, for every parameter, `optimizer.param_groups.<fqn>.lr` and
    so on, so that pipeline stages do not collide in group 0. `lr_scheduler` has `last_epoch` alone, `train_state` has
    step and tokens, `dataloader.dp_rank_{n}` is of a share of the data and pickled by torchtitan itself; its bytes are
    ours, the place in our own data. torchtitan keeps no random states.
    Source: torchtitan 0.3.0, components/checkpointer/dcp.py, components/optimizer, components/dataloader.py and
    trainer.py.
    """
    share, shares = run.strategy.data_share(run.options)
    position = {"epoch": run.epoch, "sample_idx": run.batch_in_epoch * run.options.batch}
    model, optimizer = get_state_dict(run.model, run.optimizer, options=FLAT)
    content: dict[str, Any] = {
        **model,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": run.scheduler.last_epoch},
        "train_state": {"step": run.step, "ntokens_seen": run.samples * run.options.size.context},
        "dataloader": {f"dp_rank_{share}": pickle.dumps(position), "world_size": shares},
    }
    _write(content, place_folder(run, folder), run.options.files, DefaultSavePlanner())


# -- OLMo-core --------------------------------------------------------------------------------------------------------


VERSION = "3.0.0"

# OLMo-core takes as many threads as the machine has cores and four more, each with a file.
FILES_PER_RANK = 4


def save_olmo(run: Run, folder: Path) -> None:
    """Save OLMo-core's `step{batch}/`: model and optimizer in a DCP, and the trainer's state of every rank.

        model_and_optim/        DCP: `model.<fqn>` and, flat, `optim.state.<fqn>.<name>`; several files per rank
        train/rank{rank}.pt     step, tokens, place in the data, random states with the versions of what drew them
        .metadata.json          version of the layout; written last
        config.json             what was trained

    Of what several ranks hold the lowest writes. Source: OLMo-core 3.0.0, train/checkpoint.py, train/trainer.py
    (`state_dict`), train/utils.py (`EnvRngStates`), data/data_loader.py, distributed/checkpoint.
    """
    folder = place_folder(run, folder)
    rank = dist.get_rank()
    (folder / "train").mkdir(exist_ok=True)
    torch.save(_trainer_state(run), folder / "train" / f"rank{rank}.pt")
    model, optim = get_state_dict(run.model, run.optimizer, options=FLAT)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    content = {"model": model, "optim": optim}
    _write(content, folder / "model_and_optim", run.options.files, planner, FILES_PER_RANK)
    if rank == 0:
        (folder / "config.json").write_text(json.dumps({"model": dataclasses.asdict(run.options.size)}))
        (folder / ".metadata.json").write_text(json.dumps({"ephemeral": False, "version": VERSION}))


def _trainer_state(run: Run) -> dict[str, Any]:
    """Everything that is not model or optimizer; OLMo-core computes the learning rate from the step."""
    context = run.options.size.context
    return {
        "global_step": run.step,
        "global_train_tokens_seen": run.samples * context,
        "global_train_petaflops": 0.0,
        "max_steps": run.options.steps,
        "data_loader": {
            "dataset_type": "fsl",
            "batches_processed": run.batch_in_epoch,
            "tokens_processed": run.position.samples * context,
            "sequence_length": context,
            "seed": run.options.seed,
            "epoch": run.epoch,
        },
        "epoch": run.epoch,
        "world_size": dist.get_world_size(),
        "rng": versioned(random_states.capture(run.device)),
        "callbacks": {},
    }


def versioned(states: dict[str, Any]) -> dict[str, Any]:
    """Put beside every random state the version of what draws from it; one of another version is not restored."""
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }
    known = {
        name: {"version": tuple(map(int, versions[name].split(".")[:2])), "state": state}
        for name, state in states.items()
    }
    return {"cuda": None, **known}
