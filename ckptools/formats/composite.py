"""A step folder of a trainer that is not known, whose parts have the usual names: one checkpoint of those parts.

    model/  optim/                      each a DCP, safetensors, or a torch.save file of each rank
    rng/  dataloader/                   a torch.save file of each rank, with the rank in its name
    scheduler.pt  train_state.json      a file with everything

Each part is opened by its own format, and stands in the tree under its own name: a key in it keeps its name, behind
that of the part. Only a part that holds nothing but a key of its own name (`optim/` with `optim`) has that name once.
No file says which parts there should be, so a part that is gone with its folder or file is not noticed. No framework
states this layout: the names are those of the parts of NeMo Automodel, ByteCheckpoint and torchtitan, and the content
of each part decides what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import CkptoolsError, ReadError, UnsafePathError
from ckptools.files.opening import reading
from ckptools.formats import (
    accelerate,
    dcp,
    dcp_safetensors,
    deepspeed,
    fsdp_shards,
    hugging_face,
    megatron,
    megatron_dist,
    meta_llama,
    model_parts,
    nanotron,
    rank_files,
    torch_checkpointing,
    torch_file,
    torchsnapshot,
)
from ckptools.formats.dcp.files import looks_like_dcp
from ckptools.formats.dcp.folder import CompositeBuilder
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_names import parse
from ckptools.formats.shared.checkpoint_builder import Fault, file_now
from ckptools.model.checkpoint import Checkpoint, Fact, ModuleOrder
from ckptools.model.problems import Code, Problem, Severity
from ckptools.text import few
from ckptools.training_state.optimizers import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "composite"
READS = "a folder of any trainer with a part each for model, optimizer and the rest, by the usual names"
KNOWN_BY = "model beside optim, optimizer, scheduler, rng, dataloader, extra_state or train_state; folders or files"
TRIED = ("torch 2.13.0",)
JOINS = ("model", "optimizer", "rest")

MODEL, OPTIMIZERS, SCHEDULERS = "model", ("optim", "optimizer"), ("scheduler", "lr_scheduler")
RNG, UNCOUNTED = "rng", ("rng", "dataloader")
"""Parts whose counters are of an epoch or of a rank, and not the training step."""

KINDS = {MODEL: "model", **dict.fromkeys(OPTIMIZERS, "optimizer"), **dict.fromkeys(SCHEDULERS, "scheduler")}
"""The kind of section in parts whose name promises one."""

NAMES = (MODEL, *OPTIMIZERS, *SCHEDULERS, "extra_state", "train_state", *UNCOUNTED)
FILE = re.compile(r"(?P<key>\w+)\.(?:pt|pth|bin|ckpt|pkl|json|safetensors)")
SAVED = (".pt", ".pth", ".ckpt")
READERS: tuple[Any, ...] = (dcp, dcp_safetensors, rank_files, hugging_face, torch_file)
"""Formats of parts."""

OWN: tuple[Any, ...] = (
    *(deepspeed, megatron, megatron_dist, nanotron, accelerate, torchsnapshot, torch_checkpointing),
    *(fsdp_shards, meta_llama, model_parts),
)
"""Formats of one framework, with more than a tree and its problems: a part in one is opened by itself."""


class NamedPart(NamedTuple):
    """A folder or file with the name of a part, and the format that recognises it, if any."""

    key: str
    path: Path
    format: Any

    @property
    def is_by_rank(self) -> bool:
        """Whether each rank has a state of its own there, which is neither model nor optimizer."""
        return self.format is rank_files and self.key not in (MODEL, *OPTIMIZERS)


def detect(path: Path) -> bool:
    """A folder with a model and another part, by their names, each in a format that has no more than its tree."""
    if not path.is_dir():
        return False
    try:
        parts = list(_parts(path))
    except CkptoolsError:  # a part holds several checkpoints
        return False
    apart = all(part.format is None or part.format in READERS for part in parts)
    folder = any(part.path.is_dir() for part in parts)  # single files beside each other may be anything
    model = any(part.key == MODEL and (part.format or part.path.suffix in SAVED) for part in parts)
    others = any(part.key != MODEL and (part.format or part.path.is_file()) for part in parts)
    return len({part.key for part in parts}) == len(parts) and folder and model and others and apart


def _parts(folder: Path) -> Iterator[NamedPart]:
    """What has the name of a part: the model, the optimizer, then the others."""
    with reading(folder):
        named = [(key, entry) for entry in folder.iterdir() if (key := _key(entry)) in NAMES]
    if len({key for key, _ in named}) < 2:
        return
    for key, path in sorted(named, key=lambda part: NAMES.index(part[0])):
        found = next((f for f in ((*OWN, *READERS) if path.is_dir() else READERS) if f.detect(path)), None)
        nested = found is dcp and not looks_like_dcp(path)  # a run with one step
        yield NamedPart(key, path, None if nested else found)


def _key(path: Path) -> str:
    found = FILE.fullmatch(path.name)
    return (found["key"] if found else "") if path.is_file() else path.name


def read(path: Path, options: Options) -> Checkpoint:
    """Open a folder of parts.

    Raises:
        ReadError: no part can be read.
        UnsafePathError: a part is a link out of the folder.
    """
    folder = _PartsFolder(path, options)
    for part in folder.found:
        if not part.is_by_rank:
            folder.add(part)
    for part in folder.found:
        if part.is_by_rank:
            folder.add_by_rank(part)
    return folder.checkpoint()


class _PartsFolder:
    def __init__(self, path: Path, options: Options) -> None:
        self.path, self.options = path, options
        self.parts = CompositeBuilder(NAME, path, options)
        self.problems = self.parts.problems
        self.found = list(_parts(path))
        self.world = Fact(None)
        self.order: ModuleOrder = AS_SAVED
        self.saved_as: list[str] = []

    def add(self, part: NamedPart) -> None:
        """Add a part that all ranks have in common; a problem where it cannot be read."""
        self.parts.check_link(part.path)
        if part.format is None and part.path.is_dir():
            with reading(part.path):
                empty = not any(part.path.iterdir())
            what = "is empty" if empty else "holds nothing of a format that a part may have"
            text = f"the folder {part.path.name} {what}"
            severity: Severity = "error" if part.key in OPTIMIZERS else "warning"
            self.problems.append(Problem(Code.FILE_MISSING, text, None, part.key, severity, (part.path.name,)))
        elif part.format is None or part.path.suffix in (".json", ".pkl"):
            self.parts.add_file(part.path, part.key)
            self.saved_as.append(part.key)
        else:
            self._add_opened(part, part.format)

    def _add_opened(self, part: NamedPart, format: Any) -> None:
        # All ranks, so that no tensor has to search for the rest of it from inside of this folder.
        of_ranks, alone = format is rank_files, part.path.is_file()
        options = replace(self.options, all_ranks=self.options.all_ranks or of_ranks, only_this_file=alone)
        name = part.path.name
        try:
            made = format.read(part.path, options)
        except UnsafePathError:
            raise
        except ReadError as error:
            fault = Fault.of(error, part.path)
            problem = fault.problem(name if alone else f"{name}:", None, part.key)
            self.problems.append(replace(problem, files=(name,)))
            if alone:
                self.parts.files.append(file_now(part.path, None, part.key, fault.status))
            return
        named = [p if alone else replace(p, message=f"{name}: {p.message}") for p in made.problems]
        self.parts.add_checkpoint(replace(made, problems=tuple(named)), part.key, part.key)
        self.saved_as.append(part.key if alone else f"{part.key} ({made.saved_as})")
        self._count(made.world_size)
        self.order = made.module_order if part.key == MODEL else self.order

    def _count(self, world: Fact) -> None:
        if (world.value or 0) > (self.world.value or 0) or (world.value == self.world.value and self.world.at_least):
            self.world = world

    def add_by_rank(self, part: NamedPart) -> None:
        """Add what each rank has for itself, and name the ranks that have nothing.

        Each rank has a random state. Of anything else there may be as many as data-parallel ranks, whose number divides
        that of all.
        """
        self.parts.check_link(part.path)
        with reading(part.path):
            here = sorted(p for p in part.path.iterdir() if p.is_file())
        named = [name for name in map(parse, here) if name is not None]
        files = {name.rank: name.path for name in named}
        rest = [p.name for p in here if p not in files.values()]
        if rest:
            text = f"in the folder {part.path.name}, and not read: {few(rest)}"
            self.problems.append(Problem(Code.NOT_READ, text, files=tuple(rest)))
        self.parts.add_states(part.key, {("", rank): path for rank, path in files.items()})
        self.saved_as.append(part.key)
        count, world = max(files) + 1, self.world.value or 0
        self._count(Fact(count, (f"{part.key} files",)))
        whole = max(count, world)
        fits = part.key != RNG and world % count == 0 and len(files) == count
        for rank in sorted(set(range(min(whole, rank_files.MAX_WORLD))) - set(files)):
            name = re.sub(r"(rank[_-]?)\d+", rf"\g<1>{rank:0{named[0].width}}", named[0].path.name)
            self.parts.miss_state(part.path / name, part.key, rank, "warning" if fits else "error")

    def checkpoint(self) -> Checkpoint:
        if not self.parts.tree:
            raise ReadError(self.path, f"no part of it can be read: {few([p.message for p in self.problems])}")
        # What lies in the folder and is no part.
        mine = {part.path.name for part in self.found}
        with reading(self.path):
            rest = sorted(p.name for p in self.path.iterdir() if p.name not in mine)
        if rest:
            text = f"also here, of no part, and not read: {few(rest)}"
            self.problems.append(Problem(Code.NOT_READ, text, files=tuple(rest)))
        # Warn where the counters of two parts have different values.
        stated = {}
        for key in (key for key in self.parts.tree if key not in UNCOUNTED):
            sections = tuple(s for s in find_sections({key: self.parts.tree[key]}) if s.kind == "other")
            step = find_step(Path("-"), sections)
            if step.value is not None:
                stated[f"{step.sources[0]} {step.value}"] = step.value
        if len(set(stated.values())) > 1:
            text = f"parts state different steps: {', '.join(stated)}; they may be of different saves"
            self.problems.append(Problem(Code.MIXED_SAVES, text, severity="warning"))
        # Parts that do not hold what their names promise.
        for key, kind in KINDS.items():
            if key in self.parts.tree and kind not in {s.kind for s in find_sections({key: self.parts.tree[key]})}:
                text = f"holds nothing that is known to be {'an' if kind == 'optimizer' else 'a'} {kind}"
                self.problems.append(Problem(Code.NAME_CONTRADICTS, text, None, key))
        here = {part.key for part in self.found}
        if not here.isdisjoint(SCHEDULERS) and here.isdisjoint(OPTIMIZERS):
            text = "a scheduler is here, and the optimizer whose learning rates it sets is not"
            self.problems.append(Problem(Code.FILE_MISSING, text, severity="warning"))
        return self.parts.checkpoint(
            f"a composite of parts by their names: {', '.join(self.saved_as)}", self.world, self.order
        )
