"""Megatron's distributed checkpoints (`--ckpt-format torch_dist`): a DCP folder, and common values beside it.

    <save>/iter_0000100/.metadata, __0_0.distcp, …   a torch.distributed.checkpoint folder without nested paths
    <save>/iter_0000100/metadata.json                {"sharded_backend": "torch_dist", …}: marks it as Megatron's
    <save>/iter_0000100/integrity.json               SHA-256 of each file, with `verify_integrity` (core 0.20)
    <save>/iter_0000100/common.pt                    args, iteration, param groups, scheduler: equal on every rank
                                                     (newer: an object `common_state` in the DCP itself)

Names are those of the whole model, so no rule is needed: weights are stored whole, gated layers as [all gates; all
ups], a tied output layer not at all. Layers that are alike, and experts, may be stored as one tensor with a dimension
that counts them, and fused weights in parts (`stored`); they are shown one by one and whole here. Open the
`.metadata` file itself for the names as stored. Norms before a linear layer have the names of Transformer Engine's
fused layers (`linear_qkv.layer_norm_weight`) whichever the model used. Objects of single ranks are
`<name>/shard_<offset>_<shape>`, each in a list of its own.

Optimizer: `optimizer.state.<slot>.<weight>` like the weights. The older distributed optimizer
(`fully_sharded_model_space`) cuts each rank's piece of a weight further into flat runs: a tensor of shape [pieces along
each dimension …, elements of a piece], with the true shape in the metadata's `mcore_data`
(`nd_reformulated_orig_global_shape`). The present default (`dp_reshardable`) saves gradient buckets of all parameters
as flat tensors without names, which `buckets` splits if only one layout fits; those of `dp_zero_gather_scatter`
are shown and not joined. Source: megatron/core/dist_checkpointing/{serialization,mapping,core}.py, strategies/torch.py
and strategies/resharding.py (core 0.11), optimizer/distrib_optimizer.py; checked on files of core 0.12.1, 0.16.1 and
0.20. The `zarr` backend is not read. `--ckpt-format fsdp_dtensor` and `torch_dcp` save nested state in a DCP folder
without `metadata.json` (training/checkpointing.py); fsdp_dtensor was tried on files made by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File, read_json
from ckptools.formats.dcp.files import looks_like_dcp
from ckptools.formats.dcp.folder import PLANNED, Folder, read_folder, world_size_of
from ckptools.formats.megatron import folders
from ckptools.formats.megatron.folders import arguments, setting
from ckptools.formats.megatron_dist.stored import COMMON_KEY, StoredState, join_in_tree
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, file_now
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.tree import describe_for_error
from ckptools.option import spelled
from ckptools.rules.files import missing
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "megatron_dist"
READS = "Megatron-LM's torch_dist checkpoints: iter_* with .metadata, metadata.json and common.pt"
KNOWN_BY = "metadata.json with sharded_backend beside .metadata, in iter_* below latest_checkpointed_iteration.txt"
TRIED = ("Megatron core 0.16.1 and 0.20.0",)
BY_HAND = ("fsdp_dtensor",)
JOINS = ("model", "optimizer", "rest")

CONFIG, COMMON, INTEGRITY = "metadata.json", "common.pt", "integrity.json"
DIGEST = re.compile("[0-9a-f]{64}")
WITHOUT = "optimizer"
"""The only part that `--only` cannot write without the common values."""

TORCH_DIST = "torch_dist"
BACKEND = b'"sharded_backend"'
MAX_CONFIG = 4096


def detect(path: Path) -> bool:
    """Whether a path is a run, an iteration, or `metadata.json` or `common.pt` in one."""
    if not path.is_dir():
        return path.name in (CONFIG, COMMON) and _holds_config(path.parent)
    return folders.looks_like_run(path, _holds(path))


def _holds(run: Path) -> folders.Holds:
    """The test for a checkpoint in a run: behind a tracker, `torch_dcp` and `fsdp_dtensor` have no `metadata.json`."""
    return _holds_dcp if (run / folders.TRACKER).is_file() else _holds_config


def _holds_config(folder: Path) -> bool:
    config = folder / CONFIG
    if not config.is_file():
        return False
    with File(config) as file:
        return BACKEND in file.read(0, min(file.size, MAX_CONFIG))


def _holds_dcp(folder: Path) -> bool:
    return _holds_config(folder) or looks_like_dcp(folder)


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of an iteration or a run.

    Raises:
        ReadError: it has no metadata, the metadata is damaged, or another backend wrote it.
        UsageError: the run has several checkpoints and no tracker file.
    """
    builder = CheckpointBuilder(NAME, path)
    inside = path if path.is_dir() else path.parent
    folder = folders.find_iteration(inside, _holds(inside), options.follow_symlinks)
    config = _config(folder, options)
    found = read_folder(folder, options)
    builder.add_read(found.files_read, found.bytes_read, found.names)
    common = _common(builder, found, config, options)
    stored = None
    tree, problems = (found.tree, list[Problem]()) if config else join_in_tree(found.tree)
    if config:
        stored = StoredState(found.flat, found.extra.get("mcore_data"), common)
        tree = stored.tree(options.weights)
        damage = [p for p in found.problems if p.severity == "error" and (p.tensor or "").startswith("optimizer.")]
        if damage and options.weights == "fp32" and not stored.masters_whole:
            way = f"{spelled('weights', 'module')} takes the module's own"
            text = f"the fp32 master copies are lost: {damage[0].message}; {way}"
            problems.append(Problem(Code.VALUE_LOST, text, damage[0].rank, "model"))
        problems += stored.problems
    builder.problems += [*found.problems, *problems]
    builder.differing += found.differing
    of_backend = [file_now(folder / CONFIG, None, "", "read")] if config else []
    digests, beside_them = _stated_digests(folder, options)
    builder.problems += beside_them
    return builder.checkpoint(
        name=folder.resolve().name,
        saved_as=f"Megatron-LM {TORCH_DIST if config else _plain_format(tree)}, {found.writer}",
        tree=tree,
        files=[*found.files, *of_backend, *builder.files],
        world_size=_world(tree, found),
        step=find_step(folder, find_sections(tree)),
        module_order=PLANNED,
        text_keys=True,
        all_ranks=options.all_ranks,
        bytes_expected=found.bytes_expected + sum(file.nbytes for file in builder.files),
        assumed_names=stored.by_order if stored else (),
        rounded=stored.rounded if stored else (),
        stated_digests=digests,
    )


def _config(folder: Path, options: Options) -> Mapping[str, Any]:
    """Read the configuration that names the backend; empty for `torch_dcp` and `fsdp_dtensor`, which have none.

    Raises:
        ReadError: the backend is another one.
    """
    if not (folder / CONFIG).is_file():
        return {}
    options.check_link(folder / CONFIG, folder)
    config = read_json(folder / CONFIG)
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != TORCH_DIST:
        text = f"sharded_backend is {describe_for_error(backend)}, which is not read"
        raise ReadError(folder / CONFIG, f"{text}; save it again with --ckpt-format {TORCH_DIST}")
    return dict(config)


def _plain_format(tree: Mapping[Any, Any]) -> str:
    """The `--ckpt-format` of a folder without a backend, as its arguments state it."""
    stated = arguments(tree).get("ckpt_format")
    return stated if stated in ("torch_dcp", "fsdp_dtensor") else "torch_dcp"


def _common(
    builder: CheckpointBuilder, found: Folder, config: Mapping[str, Any], options: Options
) -> dict[Any, Any] | None:
    """Read the values common to all ranks, if they have a file of their own."""
    path = found.path / COMMON
    if not path.exists():
        if config and COMMON_KEY not in found.flat:
            contents = ", which holds args, iteration, param groups and scheduler, but no weights"
            severity: Severity = "error" if "common_backend" in config else "warning"
            builder.problems.append(missing(COMMON, None, WITHOUT, severity=severity, contents=contents))
        return None
    saved = builder.read_beside(path, options, WITHOUT)
    if saved is None or isinstance(saved.tree, dict):
        return None if saved is None else saved.tree
    text = f"{COMMON} holds a {type(saved.tree).__name__}, expected a dict"
    builder.problems.append(Problem(Code.FILE_CUT, text, None, WITHOUT))
    return None


def _stated_digests(folder: Path, options: Options) -> tuple[dict[Path, str], list[Problem]]:
    """The SHA-256 of every file, which `verify_integrity` saves beside them (`save_integrity_manifest`, core 0.20)."""
    path = folder / INTEGRITY
    if not path.exists():
        return {}, []
    options.check_link(path, folder)
    try:
        found = read_json(path)
    except ReadError as error:
        return {}, [replace(Fault.of(error, path).problem(f"{INTEGRITY}:"), severity="warning")]
    listed = found.get("files") if isinstance(found, dict) and found.get("algorithm") == "sha256" else None
    if not isinstance(listed, dict) or not all(_is_entry(*entry) for entry in listed.items()):
        text = f"{INTEGRITY} is no list of files with their sha256; it is not compared"
        return {}, [Problem(Code.FILE_CUT, text, severity="warning")]
    return {folder / name: digest for name, digest in listed.items()}, []


def _is_entry(name: Any, digest: Any) -> bool:
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)
    return plain and isinstance(digest, str) and DIGEST.fullmatch(digest) is not None


def _world(tree: Mapping[Any, Any], found: Folder) -> Fact:
    """The number of ranks by the run's arguments; without them, the ranks that wrote files."""
    stated = setting(arguments(tree), "world_size")
    if stated and stated > max(found.writers.ranks, default=0):
        return Fact(stated, ("args.world_size",))
    return world_size_of(found.writers, tree)
