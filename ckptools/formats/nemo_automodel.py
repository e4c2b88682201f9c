"""NeMo Automodel: `epoch_0_step_5/` with a folder each for model and optimizer, and the recipe's other files.

    model/                              safetensors shards of DCP with `.hf_metadata/`, a DCP, or a PEFT adapter
    model/consolidated/                 the same model exported, by default of the last step only
    optim/                              a DCP: `optim`, flattened and keyed by name, and `sched`
    rng/rng_global_rank_{R}.pt          of each rank; before 0.5 `rng/rng_dp_rank_{D}.pt`
    dataloader/dataloader_dp_rank_{D}.pt    of each data-parallel rank
    {NAME}/                             a DCP of any other sharded state, such as an average of the weights
    step_scheduler.pt  losses.json  config.yaml     from rank 0
    .incomplete                         present until all files are written

The shards do not state the sizes of their tensors, but the optimizer's moments do, so a lost last rank is noticed, and
`.hf_metadata/fqn_to_file_index_mapping.json` lists every name. The folders open by themselves too.

Source: nemo_automodel/recipes/base_recipe.py (`save_checkpoint`), components/checkpoint/checkpointing.py, lifecycle.py,
addons.py and stateful_wrappers.py of 0.7.0; checked on a checkpoint of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import read_json, reading
from ckptools.formats import dcp, dcp_safetensors, hugging_face, torch_file
from ckptools.formats.dcp.files import looks_like_dcp
from ckptools.formats.flat_parameters import parameters
from ckptools.formats.options import Options
from ckptools.formats.recipe import RANK, Part, PartsBuilder
from ckptools.formats.shared.given_names_and_shapes import Shapes
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND, Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.rules.files import missing
from ckptools.text import few, plural
from ckptools.training_state.optimizers import SORTED, nested
from ckptools.training_state.sections import is_optimizer

NAME = "nemo_automodel"
READS = "NeMo Automodel: a step folder with model/, optim/ (DCP), and the states of RNG and data loader of each rank"
KNOWN_BY = "a folder with model/ or optim/ that is called epoch_0_step_5, or has losses.json or model/.hf_metadata"
TRIED = ("NeMo Automodel 0.7.0",)
JOINS = ("model", "optimizer", "rest")

MODEL, OPTIM, CONSOLIDATED = "model", "optim", "consolidated"
HF_METADATA = ".hf_metadata"
FQNS = "fqn_to_file_index_mapping.json"
LOSSES, CONFIG = "losses.json", "config.yaml"
INCOMPLETE = ".incomplete"
SCHEDULER = "step_scheduler"
STEP = re.compile(r"epoch_\d+_step_\d+")
OF_A_PART = re.compile(r"\.(?:safetensors|distcp|metadata)$")
OF_A_RANK = re.compile(r"(?P<key>.+)_(?P<kind>global|dp)_rank_(?P<rank>\d{1,7})\.pt", re.DOTALL)


def detect(path: Path) -> bool:
    """Whether a path is a step folder of NeMo Automodel, or a file in one."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    if path.is_dir():
        return path if _is_step(path) else None
    above = path.parent
    ranked = OF_A_RANK.fullmatch(path.name)
    of_a_part = above.name in (MODEL, OPTIM) and OF_A_PART.search(path.name)
    if of_a_part or (ranked and ranked["key"] == above.name):
        above = above.parent
    elif path.suffix != ".pt" and path.name not in (LOSSES, CONFIG):
        return None
    return above if path.is_file() and _is_step(above) else None


def _is_step(folder: Path) -> bool:
    model, optim = folder / MODEL, folder / OPTIM
    if not model.is_dir() and not optim.is_dir():
        return False
    named = STEP.fullmatch(folder.absolute().name) is not None
    if not (named or (folder / LOSSES).is_file() or (model / HF_METADATA).is_dir()):
        return False
    return (optim.is_dir() and looks_like_dcp(optim)) or (model.is_dir() and _holds_weights(model))


def _holds_weights(model: Path) -> bool:
    inside = (model, model / CONSOLIDATED)
    return looks_like_dcp(model) or dcp_safetensors.detect(model) or any(p.is_dir() and _is_hf(p) for p in inside)


def _is_hf(folder: Path) -> bool:
    return hugging_face.detect(folder) and not dcp_safetensors.detect(folder)


def read(path: Path, options: Options) -> Checkpoint:
    """Open a step folder, or the step folder around a file.

    Raises:
        ReadError: no part of it can be read.
        UnsafePathError: a part is a link out of the folder.
    """
    folder = _root(path) or path
    if options.only_this_file and not path.is_dir():
        if dcp_safetensors.detect(path):
            return dcp_safetensors.read(path, options)
        if dcp.detect(path):
            return dcp.read(path, options)
        return torch_file.read(path, options) if torch_file.detect(path) else hugging_face.read(path, options)
    return _AutomodelFolder(folder, options).checkpoint()


WRITTEN = ", which every save of the recipe writes"
FOUND = (FILES_FOUND,)
"""The source of the world size, if no rank left files of its own."""


class _AutomodelFolder:
    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = folder, options
        self.parts = PartsBuilder(NAME, folder, options)
        self.problems = self.parts.problems

    def checkpoint(self) -> Checkpoint:
        """Assemble all parts; the optimizer is read first, for the shapes of the model."""
        others = PartsBuilder(NAME, self.folder, self.options)
        others.add(Part((OPTIM,), "", PartsBuilder.add_dcp, "error", WRITTEN))
        states = self._rank_states()
        world = self._world_size(others, states)
        found = [
            parameters.shapes_by_name(nested(value), of_dcp=True)
            for value in others.tree.values()
            if is_optimizer(value)
        ]
        saved_as = self._add_model(
            {name: shape for shapes in found if shapes for name, shape in shapes.shapes.items()}, world
        )
        self.parts.add_parts(others)
        self._add_rest(states, world.value)
        self.parts.check_tree()
        if STEP.fullmatch(self.folder.name) and SCHEDULER not in self.parts.tree:
            more = ", which says where training goes on"
            self.problems.append(missing(f"{SCHEDULER}.pt", more=more, severity="warning"))
        if (self.folder / INCOMPLETE).exists():
            text = f"{INCOMPLETE} is here, which is removed when all of it is written: the save was interrupted"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text, severity="warning"))
        return self.parts.checkpoint(f"NeMo Automodel, {saved_as}", world)

    # -- model and optimizer

    def _add_model(self, shapes: Mapping[str, Ints], world: Fact) -> str:
        """Add the model; return how it was saved."""
        folder = self.folder / MODEL
        exported = folder / CONSOLIDATED
        if not folder.is_dir() or looks_like_dcp(folder):
            self.parts.add(Part((MODEL,), MODEL, PartsBuilder.add_dcp, "error", WRITTEN))
        elif not _holds_weights(folder):
            self.problems.append(missing(f"weights in the folder {MODEL}", None, MODEL, kind=""))
        elif dcp_safetensors.detect(folder):
            self.parts.add(Part((MODEL,), MODEL, partial(self._add_shards, shapes, world), needed=True))
        else:
            at = MODEL if _is_hf(folder) else f"{MODEL}/{CONSOLIDATED}"
            self.parts.add(Part((at,), MODEL, PartsBuilder.add_weights, needed=True))
            return self.parts.forms[MODEL]
        if exported.is_dir() and _is_hf(exported):
            text = f"{MODEL}/{CONSOLIDATED} is not read: an export of the same model; open it by its name"
            self.problems.append(Problem(Code.NOT_READ, text, files=(CONSOLIDATED,)))
        return self.parts.forms.get(MODEL) or (self.parts.form if self.parts.writer else "no model")

    def _add_shards(self, shapes: Mapping[str, Ints], world: Fact, parts: PartsBuilder, folder: Path, key: str) -> None:
        """Add safetensors shards, and use the known shapes to find missing parts of their tensors."""
        made = dcp_safetensors.read(folder, self.options)
        here = {name: t for name, t in made.tree.items() if isinstance(t, Tensor)}
        lost = any(f.status != "read" for f in made.files)
        if shapes.keys() & here.keys() and self.options.shapes is None:
            stated = {
                name: shapes[name] if _goes_on(tensor, shapes[name]) else _reach(tensor)
                for name, tensor in here.items()
                if name in shapes
            }
            given = Shapes("the optimizer state", stated, {}, SORTED)
            made = dcp_safetensors.read(folder, replace(self.options, shapes=given))
        if world.sources != FOUND and world.value == made.world_size.value and not lost:
            # Each rank's own files count the ranks, so that the last one is present.
            made = replace(made, problems=Rows(p for p in made.problems if p.kind is not Code.SIZE_UNSTATED))
        parts.add_checkpoint(made, MODEL)
        self.problems += self._names_lacking(folder, here, set(shapes), lost)

    def _names_lacking(self, folder: Path, here: Mapping[str, Any], trained: set[str], lost: bool) -> Iterator[Problem]:
        """Find names in the list beside the shards that no shard has."""
        path = folder / HF_METADATA / FQNS
        if not path.is_file():
            if lost:
                text = f"shards are missing or damaged, and no file {HF_METADATA}/{FQNS} lists the names in them"
                yield Problem(Code.MODEL_PART_MISSING, text, None, MODEL)
            return
        self.parts.check_link(path)
        try:
            listed = read_json(path)
        except ReadError as error:
            yield Problem(Code.NOT_READ, f"{HF_METADATA}/{FQNS} {error.reason}", files=(FQNS,))
            return
        absent = [name for name in listed if name not in here] if isinstance(listed, dict) else []
        if absent:
            text = f"{plural(len(absent), 'tensor')} that {HF_METADATA}/{FQNS} lists are in no shard: {few(absent)}"
            # A name without moments may belong to a tied weight, or was left out on purpose.
            sure = not trained.isdisjoint(absent)
            yield Problem(Code.MODEL_PART_MISSING, text, None, MODEL, "error" if sure else "warning")

    # -- the rest

    def _rank_states(self) -> dict[str, dict[tuple[str, int], Path]]:
        """The files of ranks by folder, kind of rank and rank; none from a folder with a DCP."""
        found: dict[str, dict[tuple[str, int], Path]] = {}
        with reading(self.folder):
            folders = sorted(p for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        for folder in folders:
            if folder.name in (MODEL, OPTIM):
                continue
            with reading(folder):
                named = [(OF_A_RANK.fullmatch(p.name), p) for p in sorted(folder.iterdir())]
            files = {(m["kind"], int(m["rank"])): p for m, p in named if m and m["key"] == folder.name}
            if files:
                found[folder.name] = files
            elif looks_like_dcp(folder):
                found[folder.name] = {}
        return found

    def _world_size(self, others: PartsBuilder, states: Mapping[str, Mapping[tuple[str, int], Path]]) -> Fact:
        """Count the ranks that left a file, a DCP file or a shard of their own."""
        of_global = {
            key: max(r for k, r in files if k == "global") for key, files in states.items() if ("global", 0) in files
        }
        shards = dcp_safetensors.files_in(self.folder / MODEL) if (self.folder / MODEL).is_dir() else []
        wrote = {*others.writers.ranks, *(file.rank for file in shards)}
        world = 1 + max([*of_global.values(), *wrote], default=0)
        sources = tuple(f"{key} files" for key, last in of_global.items() if last + 1 == world)
        return Fact(world, sources or FOUND)

    def _add_rest(self, states: Mapping[str, Mapping[tuple[str, int], Path]], world: int) -> None:
        for key, files in states.items():
            read = partial(self._add_states, files, world) if files else PartsBuilder.add_dcp
            self.parts.add(Part((key,), key, read))
        with reading(self.folder):
            files_here = sorted(p for p in self.folder.iterdir() if p.is_file())
        for path in files_here:
            if path.suffix == ".pt" or path.name in (LOSSES, CONFIG):
                self.parts.add_file(path, path.stem)

    def _add_states(
        self, files: Mapping[tuple[str, int], Path], world: int, parts: PartsBuilder, folder: Path, key: str
    ) -> None:
        parts.add_states_of(key, files)
        for kind in sorted({kind for kind, _ in files}):
            template = folder / f"{key}_{kind}_rank_{RANK}.pt"
            absent = _absent(kind, {rank for k, rank in files if k == kind}, world)
            parts.miss_files(key, template, sorted(absent))


def _absent(kind: str, ranks: set[int], world: int) -> set[int]:
    """Ranks without a file; the number of data-parallel ranks divides the world size."""
    count = max(ranks) + 1
    expected = (
        world if kind == "global" else next((n for n in range(count, world) if world % n == 0), max(count, world))
    )
    return set(range(min(expected, dcp_safetensors.MAX_RANKS))) - ranks


def _goes_on(tensor: Tensor, shape: Ints) -> bool:
    """Whether a tensor is as large as its moments, except for an early end in one dimension."""
    if len(shape) != len(tensor.shape) or tensor.kind != "chunks":
        return False
    other = [n < whole for n, whole in zip(_reach(tensor), shape, strict=True) if n != whole]
    return other == [True]


def _reach(tensor: Tensor) -> Ints:
    """The end of the pieces of a tensor, which may be smaller than its config states."""
    return tuple(map(max, *(s.box.ends for s in tensor.shards), [0] * len(tensor.shape)))
