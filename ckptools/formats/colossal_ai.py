"""Colossal-AI: a folder with the model as Hugging Face saves it, and the optimizer as files of states with an index.

    modeling/pytorch_model.bin.index.json   or model/; safetensors likewise
    optimizer/pytorch_optim.bin.index.json  weight_map: number of a parameter to file; metadata.param_groups: a file
    optimizer/pytorch_optim-00001.bin       {0: {"step", "exp_avg", …}, …}, whole tensors
    optimizer/pytorch_optim_group.bin       {"param_groups": […]}
    lr_scheduler  running_states.json

Each part by its own format, one checkpoint. Before it saves, Colossal-AI gathers weights and moments over its tensor-
and data-parallel ranks, so every tensor is whole. Source: colossalai/checkpoint_io/hybrid_parallel_checkpoint_io.py
(`save_sharded_optimizer`), index_file.py, and the folders of its examples' `save_checkpoint`; tried on files made by
hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import is_plain_name, read_json
from ckptools.formats import hugging_face
from ckptools.formats.dcp.folder import CompositeBuilder
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import Fault, file_now
from ckptools.model.checkpoint import Checkpoint, Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.text import few, plural
from ckptools.training_state.optimizers import AS_SAVED

NAME = "colossal_ai"
READS = "Colossal-AI: a folder with modeling/, optimizer/ (states in several files), lr_scheduler, running_states.json"
KNOWN_BY = "a folder with optimizer/pytorch_optim.bin.index.json"
TRIED = ()
BY_HAND = ("Colossal-AI",)
JOINS = ("model", "optimizer", "rest")

OPTIMIZER, INDEX = "optimizer", "pytorch_optim.bin.index.json"
MODELS = ("modeling", "model")
OTHERS = ("lr_scheduler", "running_states.json")


def detect(path: Path) -> bool:
    """A folder whose optimizer has Colossal-AI's index."""
    return (path / OPTIMIZER / INDEX).is_file()


def read(path: Path, options: Options) -> Checkpoint:
    """Open a step's folder.

    Raises:
        ReadError: neither its model nor its optimizer can be read.
        UnsafePathError: a part is a link out of the folder.
    """
    parts = CompositeBuilder(NAME, path, options)
    order = _add_model(parts, path)
    _add_optimizer(parts, path / OPTIMIZER)
    if not parts.tree:
        raise ReadError(path, f"no part of it can be read: {parts.problems[0].message}")
    for name in OTHERS:
        if (path / name).is_file():
            parts.add_file(path / name, Path(name).stem)
    return parts.checkpoint("Colossal-AI, every tensor whole", Fact(1, ("every tensor whole",)), order)


def _add_model(parts: CompositeBuilder, path: Path) -> ModuleOrder:
    """Add the model; a problem where there is none, or it cannot be read."""
    folder = next((path / name for name in MODELS if (path / name).is_dir()), None)
    if folder is None or not hugging_face.detect(folder):
        text = f"no folder {MODELS[0]} with weights" if folder is None else f"the folder {folder.name} holds no weights"
        parts.problems.append(Problem(Code.FILE_MISSING, text, None, "model"))
        return AS_SAVED
    parts.check_link(folder)
    try:
        made = hugging_face.read(folder, parts.options)
    except ReadError as error:
        parts.problems.append(Fault.of(error, folder).problem(folder.name, None, "model"))
        return AS_SAVED
    parts.add_checkpoint(made, "model", "model")
    return made.module_order


def _add_optimizer(parts: CompositeBuilder, folder: Path) -> None:
    """Add the optimizer by its index; problems where a file, or a state in one, is missing."""
    parts.check_link(folder / INDEX)
    index = read_json(folder / INDEX)
    parts.files.append(file_now(folder / INDEX, None, OPTIMIZER, "read"))
    listed = index.get("weight_map") if isinstance(index, dict) else None
    metadata = index.get("metadata") if isinstance(index, dict) else None
    group_file = metadata.get("param_groups") if isinstance(metadata, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(f, str) and is_plain_name(f) for f in listed.values()):
        raise ReadError(
            folder / INDEX, "has no weight_map of numbers to names of files; not of Colossal-AI, or damaged"
        )
    state: dict[Any, Any] = {}
    for name in sorted(set(listed.values())):
        here = _file(parts, folder / name)
        state |= here if isinstance(here, dict) else {}
        lost = [number for number, file in listed.items() if file == name and not {number, _number(number)} & {*state}]
        if isinstance(here, dict) and lost:
            text = f"{name} lacks {plural(len(lost), 'state')} that {INDEX} lists in it: {few(lost)}"
            parts.problems.append(Problem(Code.VALUE_LOST, text, None, OPTIMIZER))
    groups = _file(parts, folder / group_file) if isinstance(group_file, str) and is_plain_name(group_file) else {}
    found = groups.get("param_groups") if isinstance(groups, dict) else []
    if found is None:
        text = f"no param_groups in the file that {INDEX} names for them"
        parts.problems.append(Problem(Code.VALUE_LOST, text, None, OPTIMIZER))
    parts.tree[OPTIMIZER] = {"state": dict(sorted(state.items(), key=_order)), "param_groups": found or []}


def _file(parts: CompositeBuilder, path: Path) -> Any:
    """The content of a file of the optimizer; None, and a problem, where it cannot be read."""
    if not path.exists():
        parts.files.append(RankFile(path, None, OPTIMIZER, "missing", 0, None))
        parts.problems.append(Problem(Code.FILE_MISSING, f"no file {OPTIMIZER}/{path.name}", None, OPTIMIZER))
        return None
    parts.check_link(path)
    try:
        saved = parts.options.read_file(path)
    except ReadError as error:
        fault = Fault.of(error, path)
        parts.problems.append(fault.problem(f"{OPTIMIZER}/{path.name}", None, OPTIMIZER))
        parts.files.append(file_now(path, None, OPTIMIZER, fault.status))
        return None
    parts.files.append(file_now(path, None, OPTIMIZER, "read"))
    parts.nbytes += saved.nbytes
    parts.builder.add_saved([saved])
    return saved.tree


def _number(key: str) -> Any:
    return int(key) if key.isdecimal() and len(key) < 10 else key


def _order(item: tuple[Any, Any]) -> tuple[bool, Any]:
    return (not isinstance(item[0], int), item[0] if isinstance(item[0], int) else str(item[0]))
