"""Hugging Face folders: safetensors or `.bin` files, one or several with an index, and training state beside them.

transformers, diffusers, PEFT and Accelerate write a model as names and tensors, every tensor whole;
`hugging_face.files` parses the names of the files and reads the index, `companions` the rest. A lone model is the bare
state dict; with companions the tree is `{"model": …, "optimizer": …, …}`. Models that lie beside companions in folders
of their own are named after the folders. Of tied weights safetensors files have one name, and the others are absent; in
`.bin` they share a storage of one file. torch's `HuggingFaceStorageWriter` writes the same, from rank 0 or by
`consolidate_safetensors_files`; the files that its ranks write by themselves are read by `dcp_safetensors`.

`config.json` (see `shared.model_config`) states the version of transformers that saved the model; for a model from
another writer (vLLM, a converter), the version that the config came from.

Checked on files of transformers 4.56 (`.bin`) and 5.23 (safetensors), and of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.files.opening import head_at
from ckptools.formats.hugging_face.files import (
    ModelFiles,
    model_files_in,
    model_files_of,
    models_of_folder,
    parse_index,
    read_index,
)
from ckptools.formats.hugging_face.model import (
    WeightModel,
    folders_not_read,
    is_safetensors,
    model_folders,
    read_model_folders,
)
from ckptools.formats.options import Options
from ckptools.formats.rank_search.one_of_several import complements_beside, signs_of_a_slice
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.formats.shared.companions import (
    CompanionFiles,
    lacks_its_model,
    path_that_states_a_step,
    read_companions,
    step_of_accelerate,
    without_optimizer,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.rules.files import missing
from ckptools.text import few
from ckptools.training_state.optimizers import AS_SAVED, SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "hugging_face"
READS = "Hugging Face models: safetensors or .bin, one file or several, with the state of Trainer or Accelerate"
KNOWN_BY = "model.safetensors, model-00001-of-00004.safetensors, pytorch_model.bin in a folder, their index.json"
TRIED = ("transformers 4.46.3 and 5.24.0", "diffusers 0.42.1", "safetensors 0.8.0", "torchao 0.18.0")
JOINS = ("model", "optimizer", "rest")

LOST = "model.safetensors"
"""Name of a missing model file in messages."""


def detect(path: Path) -> bool:
    """Whether a path is a safetensors file, an index, a `.bin` of an existing set, or a folder with any of these."""
    if path.is_dir():
        return bool(model_files_in(path)) or lacks_its_model(path) or bool(model_folders(path))
    if not path.is_file() or parse_index(path) is not None:
        return path.is_file()
    if is_safetensors(head_at(path), path):
        return True
    weights = model_files_of(path)
    return weights.kind == "bin" and (len(weights.files) > 1 or weights.index is not None)


def read(path: Path, options: Options) -> Checkpoint:
    """Open a folder, an index, a file, or the set that contains a file.

    Raises:
        ReadError: nothing of it can be read.
        UsageError: the folder contains several models.
        UnsafePathError: a file is a link out of the folder, or the index names a file outside.
    """
    builder = CheckpointBuilder(NAME, path)
    if not path.is_dir():
        weights, problems = _asked_for(path, options)
        model = WeightModel(weights, path, options).read()
        builder.problems += problems or _parts(model, options)
        return _checkpoint(builder, weights.base, {"model": model}, CompanionFiles(path))
    found = model_files_in(path)
    folders = [] if found else model_folders(path)
    if folders:
        models = dict(read_model_folders(folders, options, builder.problems))
        return _checkpoint(builder, path.absolute().name, models, read_companions(path, options))
    if not found:
        more = ", and no other weights; what training left of it is here"
        builder.problems.append(missing(LOST, more=more))
        companions = read_companions(path, options)
        companions.files.insert(0, RankFile(builder.path / LOST, None, "", "missing", 0, None))
        return _checkpoint(builder, path.absolute().name, {}, companions)
    models = {name: WeightModel(w, path, options).read() for name, w in models_of_folder(path, found).items()}
    builder.problems += [*_others(found, list(models.values())), *folders_not_read(path)]
    builder.problems += (p for model in models.values() for p in _parts(model, options))
    return _checkpoint(builder, path.absolute().name, models, read_companions(path, options))


def _asked_for(path: Path, options: Options) -> tuple[ModelFiles, list[Problem]]:
    """The set of a file or an index; a file that its index does not name is read without it."""
    key = parse_index(path)
    if key is not None:
        return ModelFiles(*key, (), path), []
    weights = model_files_of(path)
    if weights.files[0].number is None:
        return weights, []
    if options.only_this_file:
        alone = replace(weights, files=tuple(f for f in weights.files if f.path == path), index=None)
        text = f"{path.name} is one file of several, and only this one is read"
        return alone, [Problem(Code.ONE_OF_SEVERAL, text)]
    named = weights.index is None or path.name in read_index(weights.index).files
    return weights if named else replace(weights, index=None), []


def _parts(model: WeightModel, options: Options) -> list[Problem]:
    """Find evidence that a lone file is a part of a model whose parts are not joined here."""
    read = model.weight_files
    alone = len(model.files) == len(read) == 1 and model.weights.index is None and not read[0].sharded
    if not alone:
        return []
    path, tree = read[0].path, read[0].tree
    beside = complements_beside(path, tree, options.read_file) if options.looks_around else ()
    return [*signs_of_a_slice(path, tree, options.looks_around), *beside]


def _others(found: Sequence[ModelFiles], models: Sequence[WeightModel]) -> list[Problem]:
    """Note files in the folder that are not read: other spellings of the model, other models, left-overs."""
    read = {file.path for model in models for file in model.files}
    others = {f.path.name: (w.base, w.kind) for w in found for f in w.files if f.path not in read}
    if not others:
        return []
    # A name for one file, and a set of numbered files: one of the two is left over, and it is unknown which.
    doubtful = not {(m.weights.base, m.weights.kind) for m in models}.isdisjoint(others.values())
    names = tuple(sorted(others))
    text = f"not read, since {models[0].weights.shown} is here: {few(names)}; name a file to open it"
    return [Problem(Code.NOT_READ, text, severity="warning" if doubtful else "note", files=names)]


def _checkpoint(
    builder: CheckpointBuilder,
    name: str,
    models: Mapping[str, WeightModel],
    companions: CompanionFiles,
) -> Checkpoint:
    trees = {name: model.tree for name, model in models.items()}
    nested = bool(companions.files) or len(trees) != 1
    tree = {**trees, **companions.tree} if nested else trees["model"]
    files = (*(f for m in models.values() for f in m.files), *companions.files)
    for section, model in models.items():
        for problem in model.problems:
            tensor = f"{section}.{problem.tensor}" if nested and problem.tensor is not None else problem.tensor
            builder.problems.append(replace(problem, tensor=tensor))
    builder.problems += [*companions.problems, *companions.swapped()]
    builder.problems += without_optimizer(builder.path, companions.tree, trees)
    pickled = (n for m in models.values() for h in m.weight_files for n in h.names)
    whole = not any(f.status in ("missing", "cut", "bad") for f in files)
    world_size = companions.world_size
    if world_size.value is None:  # a lone model was written by one rank, however many trained it
        world_size = Fact(1, ("one file" if len(files) == 1 else "every tensor whole",))
    saved_as = "; ".join(dict.fromkeys(m.saved_as for m in models.values()))
    beside = "; Accelerate's training state beside it" if companions.from_accelerate else "; training state beside it"
    nbytes = sum(m.bytes_read for m in models.values()) + companions.bytes_read
    builder.add_read(sum(f.status == "read" for f in files), nbytes, [*pickled, *companions.names])
    return builder.checkpoint(
        name=name or "checkpoint",
        saved_as=(saved_as or "no model") + (beside if companions.tree else ""),
        tree=tree,
        files=files,
        world_size=world_size,
        step=_step(files[0].path, builder.path, tree, companions),
        module_order=SORTED if any(h.safetensors for m in models.values() for h in m.weight_files) else AS_SAVED,
        bytes_expected=sum(f.nbytes for f in files) if whole else None,
    )


def _step(path: Path, folder: Path, tree: Any, companions: CompanionFiles) -> Fact:
    sections = find_sections(tree)
    if not companions.from_accelerate:
        return find_step(path, sections)
    named = path_that_states_a_step(folder)
    step = find_step(named, tuple(s for s in sections if s.kind != "scheduler"))
    return step if step.value is not None else step_of_accelerate(tree, companions.world_size)
