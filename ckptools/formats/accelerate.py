"""Accelerate under FSDP, and transformers' Trainer with it: `accelerator.save_state`, `checkpoint-500/`.

    pytorch_model_fsdp_0/               SHARDED_STATE_DICT: a DCP with the one top key `model`; `_1` is the second model
    pytorch_model_fsdp_rank{R}.bin      LOCAL_STATE_DICT: FSDP1's flat parameters; `pytorch_model_fsdp_1_rank{R}.bin`
    pytorch_model_fsdp.bin              FULL_STATE_DICT, from rank 0; `pytorch_model_fsdp_1.bin`
    optimizer_0/                        a DCP with the one top key `optimizer`, under SHARDED and LOCAL
    optimizer_0_rank{R}.bin             the same with `use_dcp=False`; the model is in pytorch_model_fsdp_0_rank{R}.bin
    optimizer.bin                       under FULL
    scheduler.bin, random_states_{R}.pkl, sampler.bin, trainer_state.json, …     see `companions`

Under LOCAL the optimizer state is keyed by name and has full shapes, from which the flat parameters get theirs.
`companions` finds the step. A folder called `pytorch_model_0` counts as a model too. The folders of model and optimizer
open as plain DCP too.

Source: accelerate/utils/fsdp_utils.py, utils/constants.py, checkpointing.py; checked on files of Accelerate 1.15
in each of the forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckptools.files.opening import reading
from ckptools.formats import rank_files
from ckptools.formats.dcp.files import lacks_metadata, looks_like_dcp
from ckptools.formats.flat_parameters.parameters import shapes_by_name
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_names import parse
from ckptools.formats.recipe import Part, PartsBuilder, is_dcp
from ckptools.formats.shared.companions import (
    path_that_states_a_step,
    read_companions,
    step_of_accelerate,
    without_optimizer,
)
from ckptools.formats.shared.given_names_and_shapes import Shapes
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.training_state.sections import is_optimizer

NAME = "accelerate"
READS = "Accelerate's save_state and transformers' Trainer under FSDP: a folder with DCP folders or rank files in it"
KNOWN_BY = "a folder with pytorch_model_fsdp_0/, pytorch_model_fsdp_rank0.bin or pytorch_model_fsdp.bin"
TRIED = ("Accelerate 1.1.1 and 1.15.0", "transformers 4.46.3 and 5.24.0")
JOINS = ("model", "optimizer", "rest")

MODEL = re.compile(r"pytorch_model(?:_fsdp)?_(\d{1,4})")
OPTIMIZER = re.compile(r"optimizer_(\d{1,4})")
RANK_FILE = re.compile(r"pytorch_model_fsdp(?:_(\d{1,4}))?_rank(\d{1,7})\.bin")
OPTIMIZER_RANK_FILE = re.compile(r"optimizer_(\d{1,4})_rank(\d{1,7})\.bin")
FULL = re.compile(r"pytorch_model_fsdp(?:_(\d{1,4}))?\.bin")

FILES = (
    (RANK_FILE, "rank files", "model"),
    (OPTIMIZER_RANK_FILE, "rank files", "optimizer"),
    (FULL, "full", "model"),
)
"""Names of files that hold a part, or one rank's piece of a part."""


class _AcceleratePart(NamedTuple):
    """A model or an optimizer in the folder: in a DCP folder (`dcp`), `rank files`, or one file (`full`)."""

    path: Path
    kind: str
    what: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.what}_{self.number}" if self.number else self.what

    def read(self, parts: PartsBuilder, path: Path, key: str, by_name: Shapes | None = None) -> None:
        """Add the part to a checkpoint; `by_name` has the shapes of flat parameters.

        Raises:
            ReadError: a DCP folder or the first rank's file cannot be read.
        """
        if self.kind == "dcp":
            parts.add_dcp(path, self.key, self.what)
        elif self.kind == "full":
            parts.add_file(path, self.key)
        else:
            of_it = (p for p in path.parent.iterdir() if (one := _part(p)) and one._replace(path=path) == self)
            group = sorted(filter(None, map(parse, of_it)), key=lambda name: name.rank)
            # All ranks, so that no tensor has to search this folder for its other shards later.
            options = replace(parts.options, all_ranks=True)
            made = rank_files.read_group(path.parent, group[0].path, group, options, by_name)
            parts.add_checkpoint(made, self.key)


def detect(path: Path) -> bool:
    """Whether a folder has a model that FSDP saved through Accelerate."""
    if not path.is_dir():
        return False
    return any(p.what == "model" for p in _parts(path)) or any(MODEL.fullmatch(p.name) for p in _bare_folders(path))


def _parts(folder: Path) -> Iterator[_AcceleratePart]:
    """Yield the models and optimizers of a folder."""
    with reading(folder):
        entries = sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name))
    seen: set[tuple[str, int]] = set()
    for part in filter(None, map(_part, entries)):
        if (part.what, part.number) not in seen:
            seen.add((part.what, part.number))
            yield part


def _part(path: Path) -> _AcceleratePart | None:
    for pattern, what in ((MODEL, "model"), (OPTIMIZER, "optimizer")):
        if (found := pattern.fullmatch(path.name)) and is_dcp(path):
            return _AcceleratePart(path, "dcp", what, int(found[1]))
    for pattern, kind, what in FILES:
        if (found := pattern.fullmatch(path.name)) and path.is_file():
            return _AcceleratePart(path, kind, what, int(found[1] or 0))
    return None


def read(path: Path, options: Options) -> Checkpoint:
    """Open a folder that Accelerate saved under FSDP.

    Raises:
        ReadError: a DCP folder in it cannot be read.
        UnsafePathError: a part is a link out of the folder.
    """
    found = sorted(_parts(path), key=lambda p: (p.what, p.number))
    parts, optimizers = PartsBuilder(NAME, path, options), PartsBuilder(NAME, path, options)
    for one in found:
        if one.what == "optimizer":
            optimizers.add(Part((one.path.name,), one.key, one.read, needed=True))
    for one in found:
        if one.what == "model":
            optimizer = optimizers.tree.get(one._replace(what="optimizer").key)
            by_name = isinstance(optimizer, Mapping) and is_optimizer(optimizer)
            shapes = shapes_by_name(optimizer, of_dcp=True) if optimizer and by_name else None
            parts.add(Part((one.path.name,), one.key, partial(one.read, by_name=shapes), needed=True))
            if next(tensors_in(parts.tree.get(one.key)), None) is None:
                text = f"{one.path.name} holds no tensors; the model was not saved with its optimizer"
                parts.problems.append(Problem(Code.MODEL_PART_MISSING, text, None, one.key))
    parts.add_parts(optimizers)
    for folder in _bare_folders(path):
        parts.problems.append(lacks_metadata(folder))
    companions = read_companions(path, options, max(parts.writers.ranks, default=-1) + 1)
    parts.add_companions(companions)
    parts.problems += without_optimizer(path, parts.tree)
    counting = [key for key in parts.tree if not key.startswith("scheduler")]
    saved_as, named = f"Accelerate, {_saved_as(found, parts)}", path_that_states_a_step(path)
    made = parts.checkpoint(saved_as, companions.world_size, counting, named)
    return made if made.step.value is not None else replace(made, step=step_of_accelerate(made.tree, made.world_size))


def _bare_folders(folder: Path) -> list[Path]:
    """DCP folders of a model or an optimizer whose metadata is missing."""
    with reading(folder):
        entries = sorted(folder.iterdir())
    named = (p for p in entries if MODEL.fullmatch(p.name) or OPTIMIZER.fullmatch(p.name))
    return [p for p in named if p.is_dir() and not is_dcp(p) and looks_like_dcp(p)]


def _saved_as(found: list[_AcceleratePart], parts: PartsBuilder) -> str:
    kinds = {p.kind for p in found if p.what == "model"}
    words = {"dcp": f"DCP folders, {parts.writer}", "rank files": "rank files", "full": "the model whole"}
    return " and ".join(words[k] for k in words if k in kinds)
