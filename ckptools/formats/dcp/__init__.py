"""DCP: a folder that `torch.distributed.checkpoint.save` wrote, torch 1.13 to 2.13.

`.metadata` describes everything; `__{rank}_{n}.distcp` hold the values. Composer (`ep0-ba5/`, since 0.16), torchtitan
(`step-5/`), Lightning (with `meta.pt` beside it, whose keys belong to the same state), and every caller of `dcp.save`
write such folders. `.metadata` states every shape and the extent of each item; the offset of the values in an item is
read when it is needed.

DCP has no checksums of its own, and records neither world size nor step. A file of the same size from another save is
noticed only if an item in it has another extent, dtype or shape; the CRC-32 of an item proves that its bytes are
intact, not which save they are from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.dcp.files import MAX_NAMED, dcp_folder_of, names_in
from ckptools.formats.dcp.folder import PLANNED, Folder, read_folder, world_size_of
from ckptools.formats.options import Options
from ckptools.formats.rank_search.step_names import texts_of_parts
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.formats.shared.companions import Companion, CompanionFiles
from ckptools.formats.shared.model_config import CONFIG
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import describe_for_error
from ckptools.rules.files import missing
from ckptools.text import few
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

__all__ = ["KNOWN_BY", "NAME", "READS", "Folder", "detect", "read", "read_folder"]

NAME = "dcp"
READS = "a torch.distributed.checkpoint folder (DCP): Composer, torchtitan, Lightning, dcp.save"
KNOWN_BY = "a folder with .metadata, or __0.metadata of each rank"
TRIED = (
    "torch 1.13.1 to 2.15.0",
    "Composer 0.16.4",
    "torchtitan 0.3.0",
    "Lightning 2.6.6",
    "DLRover 0.6.1",
    "torchao 0.18.0",
)
JOINS = ("model", "optimizer", "rest")

COMPANION = "meta.pt"
"""Lightning's file for all values that are not sharded."""

LACKING = ": Lightning, which calls its parts model and optimizer_0, keeps steps and schedulers there"
"""Source: lightning/pytorch/strategies/fsdp.py and model_parallel.py, `save_checkpoint`: it always writes both."""


SAVED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Suffixes of files that a trainer saves beside its DCP, such as the data loader's state of each rank."""


def detect(path: Path) -> bool:
    """Whether a path is a DCP folder, a file in one, or a run folder with one step."""
    return dcp_folder_of(path) is not None


def read(path: Path, options: Options) -> Checkpoint:
    """Open a DCP folder, given by its path, by a file in it, or by the run folder around it.

    Raises:
        ReadError: it has no metadata, or the metadata is damaged.
        UsageError: a run folder contains several.
    """
    builder = CheckpointBuilder(NAME, path)
    folder = dcp_folder_of(path)
    if folder is None:
        raise ReadError(path, "neither .metadata nor .distcp files in this folder")
    found = read_folder(folder, options)
    builder.add_read(found.files_read, found.bytes_read, found.names)
    builder.problems += found.problems
    tree = {**_texts_beside(builder, found, options), **_with_companion(builder, found, options)}
    builder.problems += _not_read(found)
    builder.differing += found.differing
    builder.per_rank |= found.per_rank
    builder.unequal |= found.unequal
    return builder.checkpoint(
        name=folder.resolve().name,
        saved_as=f"DCP folder, {found.writer}",
        tree=tree,
        files=[*found.files, *builder.files],
        world_size=world_size_of(found.writers, tree),
        step=found.step or find_step(folder, find_sections(tree)),
        module_order=PLANNED,
        text_keys=True,
        all_ranks=options.all_ranks,
        bytes_expected=found.bytes_expected + sum(file.nbytes for file in builder.files),
    )


def _with_companion(builder: CheckpointBuilder, found: Folder, options: Options) -> dict[str, Any]:
    """Add the keys of `meta.pt` to the tree; DCP's own keys take precedence."""
    path = found.path / COMPANION
    if not path.exists():
        if {"model", "optimizer_0"} <= found.tree.keys() <= {"model", *(f"optimizer_{n}" for n in range(64))}:
            builder.problems.append(missing(COMPANION, more=LACKING, severity="warning"))
        return found.tree
    saved = builder.read_beside(path, options)
    values = saved.tree if saved is not None else {}
    if not isinstance(values, dict):
        text = f"{COMPANION} holds a {type(values).__name__}"
        builder.problems.append(Problem(Code.METADATA_CONTRADICTS, text, severity="warning"))
        return found.tree
    both = [key for key in values if key in found.tree]
    if both:
        text = f"{describe_for_error(both[:8])} are in {COMPANION} and in the DCP itself; the DCP's are taken"
        builder.problems.append(Problem(Code.METADATA_CONTRADICTS, text, severity="warning"))
    return found.tree | {key: value for key, value in values.items() if key not in both}


def _texts_beside(builder: CheckpointBuilder, found: Folder, options: Options) -> dict[str, Any]:
    """The JSON and YAML files beside `.metadata` that have the name of a part, such as `train_state.json`.

    The config of a Hugging Face model is no part of the tree.
    """
    beside = CompanionFiles(found.path)
    texts = texts_of_parts(found.path / name for name in names_in(found.path) - {CONFIG})
    for key, path in texts.items():
        options.check_link(path, found.path)
        beside.tree[key] = beside.read(Companion(path, key, None), options)
    builder.files += beside.files
    builder.problems += beside.problems
    builder.add_read(sum(file.status == "read" for file in beside.files), beside.bytes_read, [])
    return {key: value for key, value in beside.tree.items() if value is not None}


def _not_read(found: Folder) -> list[Problem]:
    """Note files beside the DCP that belong to no part of it."""
    names = names_in(found.path) - {file.path.name for file in found.files} - {COMPANION}
    others = sorted(name for name in names if name.endswith(SAVED))
    text = f"{few(others, MAX_NAMED)}: beside .metadata, which does not name it; open it by itself"
    return [Problem(Code.NOT_READ, text, files=tuple(others))] if others else []
