"""Files of one step whose names differ in the word of their part: one checkpoint for each step.

    model_000010.pt                          in a folder with all steps: the model, whole
    optim_000010_rank0.pt, …_rank1.pt        the optimizer, whole or of each rank
    meta_000010.json                         step, configuration, state of the data loader

    step_10/model.pt                         in a folder of one step
    step_10/optimizer.safetensors            moments as `state/0/exp_avg`
    step_10/optimizer.json                   param groups
    step_10/train_state.json

    step_000010/policy/model.safetensors     in two folders of a step: the model, and all else
    step_000010/train_state/optim.safetensors, optim_param_groups.json, rng.safetensors

Many scripts save so. The word may be missing from the name of one file: `ckpt_1000.pt` beside `ckpt_1000_optim.pt`. A
number has to be proven to be a step (`rank_search.step_names`).

Source of the first example: nanochat, nanochat/checkpoint_manager.py (`save_checkpoint`), whose optimizer has on each
rank the state of the parameters that the rank updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import reading
from ckptools.formats import hugging_face, rank_files, torch_file
from ckptools.formats.dcp.files import looks_like_dcp
from ckptools.formats.options import Options
from ckptools.formats.rank_search.step_names import (
    MAX_ENTRIES,
    MODEL,
    RANK,
    StepFile,
    files_of_state,
    files_of_step,
    is_of_step,
    parse,
)
from ckptools.formats.recipe import Part, PartsBuilder, contradictions, flattened_optimizer
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows, grouped
from ckptools.rules.files import missing
from ckptools.training_state.sections import is_optimizer

NAME = "step_files"
READS = "files of one step, such as model_000010.pt, optim_000010.pt (or of each rank) and meta_000010.json or .yaml"
KNOWN_BY = "names that differ in model, optim, meta and the like; the number or the folder is proven to be of a step"
BY_HAND = ("nanochat",)
JOINS = ("model", "optimizer", "rest")


def detect(path: Path) -> bool:
    """Whether a path is a file of a step with several, or the folder of one step with nothing else in it."""
    found = files_of_step(path)
    if not found or found[0].number or path.is_file():
        return found[0].number != "" if found else _in_two_folders(path) is not None
    # Hugging Face's folders have no other part in safetensors beside the model.
    parts = any(one.path.suffix == ".safetensors" for one in found[1:])
    return parts or not hugging_face.detect(path)


def read(path: Path, options: Options) -> Checkpoint:
    """Open all files of a step.

    Raises:
        ReadError: no file can be read.
        UnsafePathError: a file is a link out of the folder.
    """
    if not options.looks_around and not path.is_dir():
        alone: Checkpoint = _format_of(path).read(path, options)
        return alone
    two, parts = _in_two_folders(path), PartsBuilder(NAME, path if path.is_dir() else path.parent, options)
    found = two[1] if two else files_of_step(path)
    if two:
        parts.add(Part((two[0].name,), MODEL, PartsBuilder.add_weights, needed=True))
    by_key = grouped(found, _key_of)
    for key, mine in by_key.items():
        listed = [one.path for one in mine if one.is_text]
        stored = [one.path for one in mine if not one.is_text]
        if stored:
            parts.add(Part((parts.name_in(stored[0]),), key, partial(_read_part, stored=stored)))
        for one in listed:
            _add_text(parts, one, key)
    _miss_others(parts, found)
    parts.check_tree()
    parts.problems += contradictions(parts.tree, {*by_key, *parts.tree})
    model, number = found[0].path, found[0].number
    ck = parts.checkpoint(
        f"files of one step: {', '.join(dict.fromkeys([MODEL, *by_key]))}",
        parts.world,
        named=model.with_name(f"step-{int(number)}") if number else path,
    )
    if not ck.step.agree:  # nothing says which file is of another step
        text = f"the names say step {number or path.name}, {ck.step.sources[0]} says {ck.step.value}"
        problem = Problem(Code.NAME_CONTRADICTS, f"{text}; a file may be of another step")
        ck = replace(ck, step=Fact(None), problems=Rows((*ck.problems, problem)))
    return ck if path.is_dir() else replace(ck, name=model.stem, path=model)


def _in_two_folders(path: Path) -> tuple[Path, list[StepFile]] | None:
    """The folder of the model, and the files in that of the training's state, of a step that has one of each."""
    if not path.is_dir() or not is_of_step(path):
        return None
    with reading(path):
        folders = [entry for entry in islice(sorted(path.iterdir()), MAX_ENTRIES) if entry.is_dir()]
    states = {folder: files for folder in folders if (files := files_of_state(folder))}
    models = [one for one in folders if one not in states and (looks_like_dcp(one) or hugging_face.detect(one))]
    return (models[0], next(iter(states.values()))) if len(models) == len(states) == 1 else None


def _key_of(one: StepFile) -> str:
    """The key of a file in the tree: its part; without a word of one, `meta` for JSON and YAML, else `model`."""
    return one.part or ("meta" if one.is_text else MODEL)


def _read_part(parts: PartsBuilder, path: Path, key: str, stored: Sequence[Path]) -> None:
    """Add a part: a file, or those of all ranks, by the first that can be read.

    A file that has more than the part keeps its own keys.
    """
    by_rank = RANK.search(path.name) is not None
    options = replace(parts.options, only_this_file=not by_rank, all_ranks=parts.options.all_ranks or by_rank)
    errors = []
    for one in stored:
        try:
            made = _format_of(one).read(one, options)
            break
        except UnsafePathError:
            raise
        except ReadError as error:
            errors.append(error)
    else:
        raise errors[0]
    whole = key == MODEL and isinstance(made.tree, dict) and isinstance(made.tree.get(MODEL), dict)
    parts.add_checkpoint(made, "" if whole else key)


def _add_text(parts: PartsBuilder, path: Path, key: str) -> None:
    """Add a JSON or YAML: the param groups of a flattened optimizer, or a part of its own."""
    present = parts.tree.get(key)
    if present is None:
        parts.add(Part((parts.name_in(path),), key, PartsBuilder.add_file))
        return
    content: Any = parts.read_file(path, key)
    groups = content.get("param_groups", content) if isinstance(content, dict) else content
    made = flattened_optimizer(present, groups) if isinstance(present, dict) else {}
    if isinstance(groups, list) and made["state"] and is_optimizer(made):
        parts.tree[key] = made
    elif content is not None:
        parts.tree[f"{key}{path.suffix}"] = content


def _miss_others(parts: PartsBuilder, found: Sequence[StepFile]) -> None:
    """Note files that another step has and this one has not: they may be lost.

    A lost rank is an error, since the others are of no use without it. A whole part may have been deleted on purpose.
    """
    number = found[0].number
    with reading(parts.path):
        known = [one for one in map(parse, islice(parts.path.iterdir(), MAX_ENTRIES)) if one is not None]
    here = grouped(found, _key_of)
    elsewhere = [one for one in known if one.shared == found[0].shared and one.number not in ("", number)]
    for key, alike in grouped(elsewhere if number else (), _key_of).items():
        mine, ranks = here.get(key, ()), {one.rank for one in alike if one.rank is not None}
        if not mine:
            name = RANK.sub("", alike[0].path.name).replace(alike[0].number, number)
            text = f"{name}{' of any rank' if ranks else ''}, which another step here has; lost, or not saved"
            parts.problems.append(missing(text, kind="", severity="warning"))
        first = next((one for one in mine if one.rank is not None), None)
        if first is not None:
            template = RANK.sub(lambda found: found[0].replace(found[1], "{rank}"), first.path.name)
            lost = sorted(ranks - {one.rank for one in mine})
            parts.miss_files(key, first.path.with_name(template), lost, why=", which another step here has")


def _format_of(path: Path) -> Any:
    if RANK.search(path.name):
        return rank_files
    return torch_file if torch_file.detect(path) else hugging_face
