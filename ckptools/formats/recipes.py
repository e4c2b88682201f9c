"""Formats that are folders of parts and need little more than a recipe: layout, source and recipe of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import head_at, is_plain_name, read_json
from ckptools.formats import dcp_safetensors
from ckptools.formats.dcp.files import METADATA, looks_like_dcp
from ckptools.formats.flat_parameters import parameters as flat_parameters
from ckptools.formats.recipe import Part, PartsBuilder, Recipe, flattened_optimizer, stated
from ckptools.formats.shared.checkpoint_builder import file_now
from ckptools.formats.shared.given_names_and_shapes import Shapes
from ckptools.model.facts import FILES_FOUND, Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import leaf_at
from ckptools.text import few, plural
from ckptools.training_state.optimizers import SORTED, nested
from ckptools.training_state.sections import is_optimizer

# -- ByteCheckpoint: a step's folder with a DCP folder each for model and optimizer, and a file per rank for the rest --
#
#     global_step_3/model/.metadata           of ByteCheckpoint's own class, read by `dcp.metadata`
#     global_step_3/model/__0_0.distcp        the bare bytes of tensors
#     global_step_3/optimizer/…
#     global_step_3/extra_state/extra_state_rank_0.pt      torch.save of each rank's own
#
# Source: bytecheckpoint/checkpointer/fsdp2_checkpointer.py, meta_type.py of 0.0.3; `model/` is checked on a checkpoint
# of it, the other parts on folders of this layout made by hand.

HEAD = 256
"""Bytes of a metadata file that contain the name of its class."""

BYTE_CHECKPOINT = Recipe(
    NAME="byte_checkpoint",
    READS="ByteCheckpoint: a step folder with model/ and optimizer/ (bare .distcp) and extra_state/ of each rank",
    KNOWN_BY="a folder with model/.metadata or optimizer/.metadata of ByteCheckpoint's class",
    TRIED=("ByteCheckpoint 0.0.3",),
    BY_HAND=("optimizer and extra_state",),
    signs=(("model/.metadata", "optimizer/.metadata"),),
    confirmed=lambda path: any(
        b"bytecheckpoint" in head_at(path / name / METADATA, HEAD)
        for name in ("model", "optimizer")
        if (path / name / METADATA).is_file()
    ),
    parts=(
        Part(("model",), "model", PartsBuilder.add_dcp, "error"),
        Part(("optimizer",), "optimizer", PartsBuilder.add_dcp, "warning"),
        Part(("extra_state/extra_state_rank_{rank}.pt",), "extra_state", PartsBuilder.add_states),
    ),
    saved_as="ByteCheckpoint, DCP folders",
    world_size=lambda parts: Fact(1 + max(parts.writers.ranks, default=0), (FILES_FOUND,)),
)

# -- Composer's `save_checkpoint_to_disk` (2024): `ep0-ba5/` with a folder each for model and optimizer ----------------
#
#     model/                      DCP whose keys are the fqns, or `model/model.pt`
#     optim/                      DCP with `state` and `param_groups`, or `optim/optim.pt`
#     resumption.pkl              a plain pickle: timestamp, schedulers, dataset_state, callbacks, rank_zero_seed, …
#     composer_metadata.json      versions, number of GPUs, precision
#
# Tensors in the plain pickle are kept as foreign objects. The Trainer itself writes rank files or one DCP
# (`rank_files`, `dcp`). The folders open as plain DCP too. Source: mosaicml/composer composer/checkpoint/save.py and
# state_dict.py; checked on a folder of this layout that torch wrote, not on one of Composer.

COMPOSER_FOLDER = Recipe(
    NAME="composer_folder",
    READS="Composer's composer.checkpoint: a folder with model/, optim/, resumption.pkl and composer_metadata.json",
    KNOWN_BY="a folder with composer_metadata.json or resumption.pkl beside model/ or optim/",
    BY_HAND=("composer.checkpoint",),
    signs=(
        ("composer_metadata.json", "resumption.pkl"),
        ("model/.metadata", "optim/.metadata", "model/model.pt", "optim/optim.pt"),
    ),
    parts=(
        Part(("model/model.pt", "model"), "model", PartsBuilder.add_dcp, "note", ": it was not saved", needed=True),
        Part(("optim/optim.pt", "optim"), "optim", PartsBuilder.add_dcp, "note", ": it was not saved", needed=True),
        Part(("resumption.pkl",), "resumption", PartsBuilder.add_file),
        Part(("composer_metadata.json",), "metadata", PartsBuilder.add_file),
    ),
    saved_as="Composer, {parts.form}",
    world_size=stated("metadata", "num_gpus"),
)

# -- OLMo-core: `step1000/` with a DCP for model and optimizer, and a file per rank for the trainer --------------------
#
#     model_and_optim/            DCP; tops `model` and `optim`, the optimizer state flattened unless asked otherwise
#     train/rank{R}.pt            trainer state: global_step, epoch, world_size, data_loader, rng, callbacks
#     .metadata.json              version of OLMo-core
#
# The DCP is written by OLMo-core's own writer, whose classes have torch's names. `model_and_optim/` opens as plain DCP
# too. Source: allenai/OLMo-core src/olmo_core/train/checkpoint.py, train/trainer.py,
# distributed/checkpoint/filesystem.py, train/train_module/transformer/train_module.py; checked on a folder of this
# layout that torch wrote, not on one of OLMo-core.

OLMO_CORE = Recipe(
    NAME="olmo_core",
    READS="OLMo-core: a step folder with model_and_optim/ (DCP) and the trainer's state of each rank",
    KNOWN_BY="a folder with model_and_optim/.metadata",
    BY_HAND=("OLMo-core",),
    signs=(("model_and_optim/.metadata",),),
    parts=(
        Part(("model_and_optim",), "", PartsBuilder.add_dcp, "error", needed=True),
        Part(
            ("train/rank{rank}.pt",),
            "train",
            PartsBuilder.add_ranks,
            "warning",
            ", the trainer's state; a rank without one resumes from rank 0's",
            needed=True,
        ),
        Part((".metadata.json",), "metadata", PartsBuilder.add_file),
    ),
    saved_as="OLMo-core, DCP folder, {parts.writer}",
    world_size=stated("train", "world_size"),
)

# -- Colossal-AI: a folder with the model as Hugging Face saves it, and the optimizer as files of states with an index
#
#     modeling/pytorch_model.bin.index.json   or model/; safetensors likewise
#     optimizer/pytorch_optim.bin.index.json  weight_map: number of a parameter to file; metadata.param_groups: a file
#     optimizer/pytorch_optim-00001.bin       {0: {"step", "exp_avg", …}, …}, whole tensors
#     optimizer/pytorch_optim_group.bin       {"param_groups": […]}
#     lr_scheduler  running_states.json
#
# Before it saves, Colossal-AI gathers weights and moments over its tensor- and data-parallel ranks, so every tensor is
# whole. Source: colossalai/checkpoint_io/hybrid_parallel_checkpoint_io.py (`save_sharded_optimizer`), index_file.py,
# and the folders of its examples' `save_checkpoint`; tried on files made by hand.

INDEX = "pytorch_optim.bin.index.json"


def indexed_optimizer(parts: PartsBuilder, folder: Path, key: str) -> None:
    """Add an optimizer by its index; a missing file, or a missing state in one, becomes a problem.

    Raises:
        ReadError: the index is damaged.
    """
    parts.check_link(folder / INDEX)
    index = read_json(folder / INDEX)
    parts.files.append(file_now(folder / INDEX, None, key, "read"))
    listed = leaf_at(index, ("weight_map",))
    if not isinstance(listed, dict) or not all(isinstance(f, str) and is_plain_name(f) for f in listed.values()):
        text = "has no weight_map of numbers to names of files; not of Colossal-AI, or damaged"
        raise ReadError(folder / INDEX, text)
    state: dict[Any, Any] = {}
    for name in sorted(set(listed.values())):
        here = parts.read_file(folder / name, key)
        if isinstance(here, dict):
            state |= here
            numbers = {str(number) for number in state}
            lost = [number for number, file in listed.items() if file == name and number not in numbers]
            if lost:
                text = f"{name} lacks {plural(len(lost), 'state')} that {INDEX} lists in it: {few(lost)}"
                parts.problems.append(Problem(Code.VALUE_LOST, text, None, key))
    name = leaf_at(index, ("metadata", "param_groups"))
    groups = parts.read_file(folder / name, key) if isinstance(name, str) and is_plain_name(name) else {}
    found = groups.get("param_groups") if isinstance(groups, dict) else []
    if found is None:
        text = f"no param_groups in the file that {INDEX} names for them"
        parts.problems.append(Problem(Code.VALUE_LOST, text, None, key))
    ordered = sorted(state, key=lambda one: (0, one, "") if isinstance(one, int) else (1, 0, str(one)))
    parts.tree[key] = {"state": {number: state[number] for number in ordered}, "param_groups": found or []}


COLOSSAL_AI = Recipe(
    NAME="colossal_ai",
    READS=(
        "Colossal-AI: a folder with modeling/, optimizer/ (states in several files), lr_scheduler, running_states.json"
    ),
    KNOWN_BY="a folder with optimizer/pytorch_optim.bin.index.json",
    BY_HAND=("Colossal-AI",),
    signs=((f"optimizer/{INDEX}",),),
    parts=(
        Part(("modeling", "model"), "model", PartsBuilder.add_weights, "error", " with weights"),
        Part(("optimizer",), "optimizer", indexed_optimizer, needed=True),
        Part(("lr_scheduler",), "lr_scheduler", PartsBuilder.add_file),
        Part(("running_states.json",), "running_states", PartsBuilder.add_file),
    ),
    saved_as="Colossal-AI, every tensor whole",
    world_size=lambda parts: Fact(1, ("every tensor whole",)),
)

# -- LeRobot: `checkpoints/005000/` with a folder each for the policy and the state of its training --------------------
#
#     pretrained_model/    in Hugging Face's form; under FSDP2 with a DCP in it, from which LeRobot resumes
#     training_state/      optimizer_state.safetensors ({"state/0/exp_avg": …}) and optimizer_param_groups.json, in a
#                          folder each if there are several; under FSDP2 optimizer_0/, a DCP; files of `lerobot_state`
#     training_state.pth   until February 2025, instead of that folder
#     algorithm/           other modules of reinforcement learning
#
# Source: huggingface/lerobot src/lerobot/common/train_utils.py (`save_checkpoint`), distributed/checkpoint.py,
# optim/optimizers.py, utils/random_utils.py, rl/learner.py and scripts/lerobot_train.py at 7427f318 (0.6.2);
# lerobot/common/logger.py before 90e099b3. Tried on folders of this layout made by hand.


def lerobot_optimizer(parts: PartsBuilder, path: Path, key: str) -> None:
    """Add the optimizer of `training_state/`, or several by the names of their folders."""
    if (path / "optimizer_0").is_dir():
        parts.add(Part((f"{path.name}/optimizer_0",), key, PartsBuilder.add_weights))
        return
    moments, groups = "optimizer_state.safetensors", "optimizer_param_groups.json"
    own = [one for one in (path, *sorted(path.iterdir())) if (one / moments).exists() or (one / groups).exists()]
    made = {}
    for folder in own or [path]:
        at = path.name if folder == path else f"{path.name}/{folder.name}"
        parts.add(Part((f"{at}/{moments}",), key, PartsBuilder.add_weights, "error"))
        flat = parts.tree.pop(key, {})
        made[folder] = flattened_optimizer(flat, parts.read_file(folder / groups, key) or [])
    parts.tree[key] = made.get(path) or {folder.name: one for folder, one in made.items()}


def lerobot_state(parts: PartsBuilder, path: Path, key: str) -> None:
    """Add the files of `training_state/`: LeRobot always writes all but the scheduler and averaged weights."""
    parts.add(Part((key,), "optimizer", lerobot_optimizer))
    parts.add(Part((f"{key}/scheduler_state.json",), "scheduler", PartsBuilder.add_file))
    parts.add(Part((f"{key}/rng_state.safetensors",), "rng", PartsBuilder.add_weights, "error"))
    parts.add(Part((f"{key}/training_step.json",), "training_step", PartsBuilder.add_file, "error"))
    parts.add(Part((f"{key}/ema_state.pt",), "ema", PartsBuilder.add_file))


LEROBOT = Recipe(
    NAME="lerobot",
    READS="LeRobot: a step folder with pretrained_model/ and training_state/, where FSDP2 saves DCP folders",
    KNOWN_BY="a folder with training_state/training_step.json or rng_state.safetensors, or training_state.pth",
    BY_HAND=("LeRobot",),
    signs=(("training_state/training_step.json", "training_state/rng_state.safetensors", "training_state.pth"),),
    parts=(
        Part(("pretrained_model/pytorch_model_fsdp_0", "pretrained_model"), "model", PartsBuilder.add_weights, "error"),
        Part(("training_state",), "training_state", lerobot_state),
        Part(("training_state.pth",), "training_state", PartsBuilder.add_file),
        Part(("algorithm",), "algorithm", PartsBuilder.add_weights),
    ),
    saved_as="LeRobot, {parts.form}",
    world_size=lambda parts: stated("training_step", "dp_world_size")(parts)._replace(at_least=True),
)

# -- transformers: `save_pretrained(..., distributed_checkpoint=True)`, and the optimizer in a DCP beside it -----------
#
#     shard-00001-model-00001-of-00001.safetensors    of each rank, as `dcp_safetensors` reads them
#     optimizer/                                      DCP with `optimizer`, flattened and keyed by name
#     config.json  generation_config.json
#
# The shards do not state the sizes of their tensors, the moments do: a lost last rank is noticed. No file but the
# user's own script names the folder `optimizer`. Source: transformers/distributed/checkpoint.py
# (`_save_model_checkpoint_distributed`, `save_optimizer_distributed`) and mixin.py of 5.23; checked on its files.


def transformers_shards(parts: PartsBuilder, folder: Path, key: str) -> None:
    """Add the model's shards of a folder, with the shapes of the moments in the optimizer, which was read before."""
    moments: Any = parts.tree.get("optimizer")
    shapes = flat_parameters.shapes_by_name(nested(moments), of_dcp=True) if is_optimizer(moments) else None
    options = parts.options
    if shapes is not None and options.shapes is None:
        options = replace(options, shapes=Shapes("the optimizer state", shapes.shapes, {}, SORTED))
    parts.add_checkpoint(dcp_safetensors.read(folder, options), key)
    parts.tree = {key: parts.tree.pop(key), **parts.tree}


TRANSFORMERS_SHARDS = Recipe(
    NAME="transformers_shards",
    READS="transformers' save_pretrained(distributed_checkpoint=True): safetensors shards, with optimizer/ (DCP)",
    KNOWN_BY="shard-00001-model-00001-of-00001.safetensors beside the DCP folder optimizer/",
    TRIED=("transformers 5.23.0",),
    JOINS=("model", "optimizer"),
    signs=(),
    confirmed=lambda path: (
        (path / "optimizer").is_dir() and dcp_safetensors.detect(path) and looks_like_dcp(path / "optimizer")
    ),
    parts=(
        Part(("optimizer",), "", PartsBuilder.add_dcp),
        Part((".",), "model", transformers_shards, needed=True),
    ),
    saved_as="transformers, {parts.forms[model]}, optimizer in a DCP folder",
)
