"""Write a checkpoint in the layout of a framework; this file has a part for each framework or kind of files."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import platform
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.run import consolidate
from ckptools.text import parse_bytes
from ckptools.training.model import TIED, capture_random_states, gather_random_states
from ckptools.training.options import FileOptions, ModelSize, run_name
from ckptools.training.run import Run, full_state, place, place_folder

# -- the layout of `accelerator.save_state`: model, optimizer, and the other state that a run needs to resume ----------
# `ckptools.formats.accelerate` lists the files of model and optimizer with FSDP. With DDP they are `model.safetensors`,
# under the names of the model without its wrapper, and `optimizer.bin`, keyed by integers.
#
# `scheduler.bin` and `random_states_{rank}.pkl` are pickles of `torch.save`, the latter with the number of batches in
# this epoch so far. `custom_checkpoint_0.pkl` is the state of the first object that a script gave to
# `register_for_checkpointing`: here the counters that Accelerate itself does not keep. The scheduler has moved once per
# optimizer step, as with `split_batches` or `step_scheduler_with_optimizer=False`.
# Source: accelerate/accelerator.py (`save_state`), checkpointing.py and utils/fsdp_utils.py of 1.15.


def save_accelerate(run: Run, folder: Path) -> None:
    """Write model and optimizer whole from rank 0, or sharded by all; and every rank's random states."""
    folder, rank = place_folder(run, folder), dist.get_rank()
    model = run.strategy.model_state(run.model)
    optimizer = run.strategy.optimizer_state(run.model, run.optimizer)
    if not run.options.one_rank_has_all:
        if run.options.parallel.state_dict_type == "local":
            torch.save(model, folder / f"pytorch_model_fsdp_rank{rank}.bin")
        else:
            dcp_save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp_save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")
    elif rank == 0:
        if run.options.strategy == "ddp":
            save_file(untied(model), folder / "model.safetensors", metadata={"format": "pt"})
        else:
            torch.save(model, folder / "pytorch_model_fsdp.bin")
        torch.save(optimizer, folder / "optimizer.bin")
    if rank == 0:
        torch.save(run.scheduler.state_dict(), folder / "scheduler.bin")
        torch.save(progress(run), folder / "custom_checkpoint_0.pkl")
    own = capture_random_states(run.device)
    states = {
        "step": run.batch_in_epoch,  # begins anew with every epoch
        "random_state": own["python"],
        "numpy_random_seed": own["numpy"],
        "torch_manual_seed": own["torch"],
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    torch.save(states, folder / f"random_states_{rank}.pkl")


def progress(run: Run) -> dict[str, int]:
    """The counters that a script must keep itself, because Accelerate does not."""
    return {"epoch": run.epoch, "batch_in_epoch": run.batch_in_epoch, "global_step": run.step}


# -- Lightning's checkpoints, by its Trainer and by `fabric.save(path, state)`: a file with DDP, a folder with FSDP
# The Trainer writes `epoch={epoch}-step={step}.ckpt`. It trains a LightningModule, and the model is one attribute of
# that: here `model`, so that every name begins with `model.`. With DDP rank 0 writes everything into one file. With
# FSDP the tensors are a DCP folder and the rest is `meta.pt` in it; the strategy for FSDP1 calls the model `model`
# there, the one for FSDP2 `state_dict`.
#
# `loops` says how far each loop is, in this epoch and in total: the position in the data. Lightning leaves random
# states to the hook `on_save_checkpoint`, which may add keys: here `rng`, with the states of every rank.
#
# Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py (`dump_checkpoint`), strategies/fsdp.py and
# strategies/model_parallel.py, loops/ and loops/progress.py of 2.6.
#
# `fabric.save` gets a dict from the script: here model, optimizer and scheduler, which Fabric replaces by their state
# dicts, and counters and random states. With DDP rank 0 writes all of it into one file. With FSDP model and optimizer
# are a DCP folder, and the rest is `meta.pt` in it.
# Source: lightning/fabric/strategies/strategy.py, fsdp.py and model_parallel.py of 2.6.


ATTRIBUTE = "model"
WRITER = "2.6.6"

# The stages of a batch, or of an optimizer step, that Lightning counts.
STAGES = ("ready", "completed", "started", "processed")


def save_trainer(run: Run, folder: Path) -> None:
    """Write the files that Lightning's `trainer.save_checkpoint` writes."""
    content = training_state(run)
    if run.options.strategy == "ddp":
        # A LightningModule has the model as an attribute, whose name begins every name in the state dict.
        module = nn.ModuleDict({ATTRIBUTE: cast("nn.Module", run.model.module)})
        tensors = {"state_dict": module.state_dict(), "optimizer_states": [run.optimizer.state_dict()]}
        _save(run, folder, content | tensors)
    else:
        _save(run, folder, content, _sharded_state(run))


def _save(run: Run, folder: Path, content: dict[str, Any], shards: dict[str, Any] | None = None) -> None:
    """Write one file from rank 0, or the shards of every rank and rank 0's `meta.pt`."""
    if shards is None:
        path = place(run, folder)
    else:
        path = place_folder(run, folder)
        dcp_save(shards, checkpoint_id=path)
        path /= "meta.pt"
    if dist.get_rank() == 0:
        torch.save(content, path)


def _sharded_state(run: Run) -> dict[str, Any]:
    """Return model and optimizer with the attribute in front of every fqn."""
    model = run.strategy.model_state(run.model)
    optimizer = run.strategy.optimizer_state(run.model, run.optimizer)
    groups = [
        {**group, "params": [f"{ATTRIBUTE}.{fqn}" for fqn in group["params"]]} for group in optimizer["param_groups"]
    ]
    return {
        "model" if run.options.strategy == "fsdp1" else "state_dict": _renamed(model),
        "optimizer_0": {"state": _renamed(optimizer["state"]), "param_groups": groups},
    }


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{ATTRIBUTE}.{fqn}": value for fqn, value in state.items()}


def training_state(run: Run) -> dict[str, Any]:
    """Return everything but model and optimizer; a collective."""
    return {
        "epoch": run.epoch,
        "global_step": run.step,
        "pytorch-lightning_version": WRITER,
        "loops": _loops(run),
        "callbacks": {},
        "lr_schedulers": [run.scheduler.state_dict()],
        "rng": gather_random_states(run.device),
    }


def _loops(run: Run) -> dict[str, Any]:
    """The progress of Lightning's four loops; only the fit loop has begun."""
    batches = run.batch_in_epoch
    idle = {"state_dict": {}, "batch_progress": _progress(0, 0, *STAGES) | {"is_last_batch": False}}
    steps = _progress(run.step, batches, "ready", "completed")
    zero_grad = _progress(run.step, batches, "ready", "completed", "started")
    # Lightning saves in a hook in which the current batch does not count as complete yet.
    counts = _progress(run.step, batches, *STAGES)
    if batches:
        counts["total"]["completed"] -= 1
        counts["current"]["completed"] -= 1
    inner = {
        "state_dict": {"_batches_that_stepped": run.step - bool(batches)},
        "batch_progress": counts | {"is_last_batch": False},
        "scheduler_progress": steps,
        "automatic_optimization.state_dict": {},
        "automatic_optimization.optim_progress": {"optimizer": {"step": steps, "zero_grad": zero_grad}},
        "manual_optimization.state_dict": {},
        "manual_optimization.optim_step_progress": _progress(0, 0, "ready", "completed"),
        **{f"val_loop.{key}": value for key, value in idle.items()},
    }
    begun = {stage: run.epoch + (stage in ("ready", "started")) for stage in STAGES}
    fit = {"state_dict": {}, **{f"epoch_loop.{key}": value for key, value in inner.items()}}
    fit["epoch_progress"] = {"total": begun, "current": begun}
    predict = {"state_dict": {}, "batch_progress": _progress(0, 0, *STAGES)}
    return {"fit_loop": fit, "validate_loop": idle, "test_loop": idle, "predict_loop": predict}


def _progress(total: int, current: int, *stages: str) -> dict[str, Any]:
    """Counts since training and since the epoch began; between two steps every stage has the same count."""
    return {"total": dict.fromkeys(stages, total), "current": dict.fromkeys(stages, current)}


def save_fabric(run: Run, folder: Path) -> None:
    """Write the files that Lightning Fabric's `fabric.save` writes."""
    tensors = {
        "model": run.strategy.model_state(run.model),
        "optimizer": run.strategy.optimizer_state(run.model, run.optimizer),
    }
    content = {
        "scheduler": run.scheduler.state_dict(),
        "iteration": run.step,
        "epoch": run.epoch,
        "batch_in_epoch": run.batch_in_epoch,
        "rng": gather_random_states(run.device),
    }
    if run.options.strategy == "ddp":
        _save(run, folder, tensors | content)
    else:
        _save(run, folder, content, tensors)


# -- files of `torch.save`, one per rank or one from rank 0: Composer's, verl's, and the snapshot of torch's tutorials


def save_snapshot(run: Run, folder: Path) -> None:
    """Write `snapshot.pt` from rank 0, as torch's multi-GPU tutorials save a DDP run.

    `MODEL_STATE` has no prefix `module.`, `OPTIMIZER_STATE` is keyed by integers, `EPOCHS_RUN` is the current epoch
    of the training. Source: github.com/pytorch/examples, distributed/ddp-tutorial-series and minGPT-ddp.
    """
    if dist.get_rank() == 0:
        content = {
            "MODEL_STATE": run.strategy.model_state(run.model),
            "OPTIMIZER_STATE": run.strategy.optimizer_state(run.model, run.optimizer),
            "EPOCHS_RUN": run.epoch,
        }
        torch.save(content, place(run, folder))


def save_verl(run: Run, folder: Path) -> None:
    """Write verl's three files of this rank, `{what}_world_size_{W}_rank_{R}.pt`; rank 0 adds `fsdp_config.json`.

    The model is a state dict of DTensors. The optimizer is its own `state_dict()`, keyed by integers: DTensors
    with FSDP2, with FSDP1 the local slices of the flat parameters, 1-D and without their shapes.
    Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py (0.9), and files that it wrote.
    """
    folder = place_folder(run, folder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random = capture_random_states(run.device)
    contents = {
        "model": run.strategy.model_state(run.model),
        "optim": run.optimizer.state_dict(),
        "extra_state": {
            "lr_scheduler": run.scheduler.state_dict(),
            "rng": {"cpu": random["torch"], "numpy": random["numpy"], "random": random["python"]},
        },
    }
    for what, content in contents.items():
        torch.save(content, folder / f"{what}_world_size_{world_size}_rank_{rank}.pt")
    if rank == 0:
        version = 1 if run.options.strategy == "fsdp1" else 2
        config = {"FSDP_version": version, "world_size": world_size}
        (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def save_composer_files(run: Run, folder: Path) -> None:
    """Write this rank's `ep{epoch}-ba{batch}-rank{rank}.pt`, as Composer 0.13 to 0.15 does.

    It holds `{"state": {...}, "rng": [one dict per rank]}`: every file holds the random number state of all ranks. With
    FSDP each rank writes its shards, or flat pieces; with DDP, and with FSDP's full state dict, rank 0 writes one whole
    file, also named `rank0`.
    Source: composer/utils/checkpoint.py and composer/core/state.py of those versions, and files that they wrote.
    """
    content = {"state": composer_state(run), "rng": gather_random_states(run.device)}
    if dist.get_rank() == 0 or not run.options.one_rank_has_all:
        torch.save(content, place(run, folder))


def composer_state(run: Run) -> dict[str, Any]:
    """Composer's dict `state`: optimizers and schedulers under their class names; parts that a run lacks are empty."""
    context, sample = run.options.size.context, run.position.samples
    return {
        "model": run.strategy.model_state(run.model),
        "optimizers": {type(run.optimizer).__name__: run.strategy.optimizer_state(run.model, run.optimizer)},
        "schedulers": {type(run.scheduler).__name__: run.scheduler.state_dict()},
        "algorithms": [],
        "callbacks": {},
        "scaler": {},
        "timestamp": {
            "Timestamp": {
                "epoch": run.epoch,
                "batch": run.step,
                "sample": run.samples,
                "token": run.samples * context,
                "batch_in_epoch": run.batch_in_epoch,
                "sample_in_epoch": sample,
                "token_in_epoch": sample * context,
                "total_wct": run.elapsed,
                "epoch_wct": run.elapsed * (run.batch_in_epoch / run.step),
                "batch_wct": run.elapsed / run.step,
            }
        },
        "rank_zero_seed": run.options.seed,
        "train_metrics": {},
        "eval_metrics": {},
        "run_name": run_name(run.options, dist.get_world_size()),
        "dataset_state": {"train": None, "eval": {}},
        "integrations": {},
        "metadata": {
            "torch_version": str(torch.__version__),
            "device": "cpu" if run.device.type == "cpu" else "gpu",
            "precision": {"fp32": "fp32", "bf16": "amp_bf16"}[run.options.parallel.precision],
            "world_size": dist.get_world_size(),
            "device_train_microbatch_size": run.options.batch,
            "dist_backend": run.hardware.backend,
        },
    }


# -- folders of torch.distributed.checkpoint: DCP's own layout, and the layouts of Composer, torchtitan and OLMo-core
# A folder has `.metadata`, and `__{rank}_{n}.distcp` of every rank that has something to write. DCP writes one copy of
# a value that several ranks hold alike, and joins the trees of all ranks: so a value that differs from rank to rank has
# the rank in its key.


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Every parameter has its hyperparameters under a key of its own: `optim.param_groups.<fqn>.lr`."""


def save_dcp(run: Run, folder: Path) -> None:
    """Save `{model, optim, scheduler, step, sampler, rng}`, the optimizer under fqns: all that a resume needs.

    If ranks have parameters of their own, their param groups differ too, but DCP keeps only one rank's value of a key.
    So the optimizer is flat then.
    """
    model, optim = get_state_dict(run.model, run.optimizer, options=FLAT if run.strategy.in_parts else None)
    content = {
        "model": model,
        "optim": optim,
        "scheduler": run.scheduler.state_dict(),
        "step": run.step,
        "sampler": {"epoch": run.epoch, "sample_in_epoch": run.position.samples},
        "rng": {str(dist.get_rank()): capture_random_states(run.device)},
    }
    planner = DefaultSavePlanner() if run.options.files.items == "torch" else CopyingPlanner()
    _write(content, place_folder(run, folder), run.options.files, planner)


def _write(
    content: dict[str, Any], folder: Path, options: FileOptions, planner: DefaultSavePlanner, files: int = 1
) -> None:
    """Write this rank's tree of tensors and objects into a DCP folder; returns when all ranks have written.

    The planner says which rank writes a value that several ranks hold. A rank's items are dealt out to `files` files,
    each written by a thread of its own.
    """
    item_format: dict[str, Any] = {}
    if options.items == "safetensors":
        from torch.distributed.checkpoint.filesystem import SerializationFormat  # not in torch 2.6

        item_format["serialization_format"] = SerializationFormat.SAFETENSORS
    writer = FileSystemWriter(folder, options.files_per_rank == "one", thread_count=files, **item_format)
    if not options.async_save:
        dcp_save(content, storage_writer=writer, planner=planner)
        return
    # torch copies the state at once, and a thread writes the copy while training could go on. That thread calls
    # collectives too, on the CPU, so it needs a group of its own.
    group = dist.new_group(backend="gloo")
    written: Any = async_save(content, storage_writer=writer, planner=planner, process_group=group)
    written.result()
    dist.destroy_process_group(group)


class CopyingPlanner(DefaultSavePlanner):
    """torch's planner, for safetensors, which refuses two tensors in the same memory, as tied weights are."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the data to write for an item; a tensor is copied."""
        data = super().resolve_data(write_item)
        return data.clone() if isinstance(data, Tensor) else data


def save_composer_dcp(run: Run, folder: Path) -> None:
    """Save `ep{epoch}-ba{batch}/` as Composer does from 0.16 on: the tree of its rank files, one level deeper.

    Keys are `state.model.<fqn>`, `state.optimizers.<class>.state.<fqn>.<name>`, `rng.<rank>.<generator>`; the random
    states of all ranks come from rank 0. Versions 0.16 to 0.30 had `optimizers` beside `state`, for torch 2.0 could
    load an optimizer from the top only; since 0.31 it is back inside, as here.
    Source: composer/utils/checkpoint.py (`_save_checkpoint`) of 0.16.4 and 0.32.1.
    """
    content: dict[str, Any] = {"state": composer_state(run)}
    rng = gather_random_states(run.device)
    if dist.get_rank() == 0:
        content["rng"] = rng
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp_save(content, checkpoint_id=place_folder(run, folder), planner=planner)


def save_torchtitan(run: Run, folder: Path) -> None:
    """Save torchtitan's `step-{batch}/`: the model's fqns at the top, everything else under a name of its own.

    `optimizer` is flat: `optimizer.state.<fqn>.<name>` and, for every parameter, `optimizer.param_groups.<fqn>.lr` and
    so on, so that pipeline stages do not collide in group 0. `lr_scheduler` has `last_epoch` alone, `train_state` has
    step and tokens. `dataloader.dp_rank_{n}` is the state of one share of the data, which torchtitan pickles itself;
    here it is a pickle of the position in ckptools' own data. torchtitan keeps no random states.
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


# -- OLMo-core ---------------------------------------------------------------------------------------------------------


VERSION = "3.0.0"

# OLMo-core writes a file from each of its threads, four more than the machine has cores; ckptools takes only four.
FILES_PER_RANK = 4


def save_olmo(run: Run, folder: Path) -> None:
    """Save OLMo-core's `step{batch}/`: model and optimizer in a DCP, and the trainer's state of every rank.

        model_and_optim/        DCP: `model.<fqn>` and, flat, `optim.state.<fqn>.<name>`; several files per rank
        train/rank{rank}.pt     step, tokens, position in the data, random states with the versions of their libraries
        .metadata.json          version of the layout; written last
        config.json             what was trained

    Of several ranks that hold a value, the lowest writes it. Source: OLMo-core 3.0.0, train/checkpoint.py,
    train/trainer.py (`state_dict`), train/utils.py (`EnvRngStates`), data/data_loader.py, distributed/checkpoint.
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
    """OLMo-core's state but model and optimizer; it needs no scheduler, as the learning rate follows from the step."""
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
        "rng": versioned(capture_random_states(run.device)),
        "callbacks": {},
    }


def versioned(states: dict[str, Any]) -> dict[str, Any]:
    """Add to every random state the version of its library; OLMo-core does not restore a state of another version."""
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


# -- the model alone, as Hugging Face's libraries read it: safetensors, an index where there are several, `config.json`
# A tied weight is in the file once, under the name that it is tied to, as `save_pretrained` leaves it. The options
# choose one of three ways to write:
#
# | options | files | written by |
# |---|---|---|
# | | `model.safetensors`, or `model-0000k-of-0000n.safetensors` and their index | rank 0, which gathers the model |
# | `--save-distributed` | the same, and each rank's shards below `sharded/` | every rank, then rank 0 joins |
# | `--save-distributed --no-consolidated` | `shard-0000r-model-0000k-of-0000n.safetensors` | every rank |
#
# Source: transformers' `save_pretrained` and huggingface_hub's `split_state_dict_into_shards_factory` for names, index
# and the cut into files; `HuggingFaceStorageWriter` of torch.distributed.checkpoint for the files of ranks.


WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "sharded"


def save_hugging_face(run: Run, folder: Path) -> None:
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
    """Leave out second names of tied tensors."""
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
        asked = ConsolidateOptions(max_shard_size=_limit(options), allow_missing=True)
        consolidate(shards, folder / WHOLE, asked)


def _sizes_of(state: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of every tensor as a whole; a value may also be a shard that knows the whole shape."""
    return {fqn: tensor.size().numel() * tensor.dtype.itemsize for fqn, tensor in state.items()}


def file_numbers(sizes: Mapping[str, int], options: FileOptions) -> dict[str, int]:
    """Number the file, from 1, that each tensor goes to: the next one when a tensor would make a file too large.

    A tensor larger than the limit gets a file of its own.
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
    """Describe the model in the words of transformers, although transformers itself does not have this model."""
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


# -- layouts by name ---------------------------------------------------------------------------------------------------


SAVE: dict[str, Callable[[Run, Path], None]] = {
    "composer": save_composer_files,
    "snapshot": save_snapshot,
    "verl": save_verl,
    "dcp": save_dcp,
    "composer-dcp": save_composer_dcp,
    "accelerate": save_accelerate,
    "lightning": save_trainer,
    "fabric": save_fabric,
    "torchtitan": save_torchtitan,
    "olmo": save_olmo,
    "huggingface": save_hugging_face,
}
"""The function that writes this rank's files into a folder, by the name of the layout; a collective."""
