"""A step folder of an unknown trainer, whose parts have common names: one checkpoint of those parts.

    model/  optim/                      each a DCP, safetensors, or a torch.save file of each rank
    rng/  dataloader/                   a torch.save file of each rank, with the rank in its name
    scheduler.pt  train_state.json      a file with everything
    config.yaml  meta.json              settings and counters, in JSON or YAML

Each part is opened by its own format, and stands in the tree under its own name: a key in it is prefixed with the name
of the part. Only a part whose single key is its own name (`optim/` with `optim`) has that name once. No file lists the
parts, so a missing part is not noticed. No framework documents this layout: the names are those of the parts of NeMo
Automodel, ByteCheckpoint and torchtitan, and the content of each part decides its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import CkptoolsError
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
from ckptools.formats.options import Options
from ckptools.formats.rank_search.rank_names import parse
from ckptools.formats.rank_search.step_names import texts_of_parts
from ckptools.formats.recipe import (
    MODEL,
    OPTIMIZERS,
    RANK,
    RNG,
    SCHEDULERS,
    UNCOUNTED,
    Part,
    PartsBuilder,
    contradictions,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem, Severity
from ckptools.rules.files import missing
from ckptools.text import few

NAME = "composite"
READS = "a folder of any trainer with a part each for model, optimizer and the rest, by the usual names"
KNOWN_BY = "model beside optim, optimizer, scheduler, rng, dataloader, extra_state or train_state; folders or files"
TRIED = ("torch 2.13.0",)
JOINS = ("model", "optimizer", "rest")

NAMES = (MODEL, *OPTIMIZERS, *SCHEDULERS, "extra_state", "train_state", *UNCOUNTED)
FILE = re.compile(r"(?P<key>\w+)\.(?:pt|pth|bin|ckpt|pkl|json|safetensors)")
SAVED = (".pt", ".pth", ".ckpt")
READERS: tuple[Any, ...] = (dcp, dcp_safetensors, rank_files, hugging_face, torch_file)
"""Formats that a part may have."""

OWN: tuple[Any, ...] = (
    *(deepspeed, megatron, megatron_dist, nanotron, accelerate, torchsnapshot, torch_checkpointing),
    *(fsdp_shards, meta_llama, model_parts),
)
"""Formats of one framework, with more than a tree and its problems: a part in such a format is opened by itself."""


class NamedPart(NamedTuple):
    """A folder or file with the name of a part, and the format that detects it, if any."""

    key: str
    path: Path
    format: Any

    @property
    def is_by_rank(self) -> bool:
        """Whether each rank has its own state in the part, other than model or optimizer."""
        return self.format is rank_files and self.key not in (MODEL, *OPTIMIZERS)

    @property
    def is_plain(self) -> bool:
        """Whether the part is a single file."""
        return self.path.is_file() and (self.format is None or self.path.suffix in (".json", ".pkl"))

    def form(self, forms: Mapping[str, str]) -> str:
        """The part's format in a list of the parts that were read; empty if it was not read."""
        if self.is_by_rank or self.is_plain:
            return self.key
        return "" if self.key not in forms else self.key if self.path.is_file() else f"{self.key} ({forms[self.key]})"

    def read(self, parts: PartsBuilder, path: Path, key: str) -> None:
        """Add the part to a checkpoint.

        Raises:
            ReadError: it cannot be read.
        """
        if self.is_by_rank:
            self._read_ranks(parts)
        elif self.is_plain:
            parts.add_file(path, self.key)
        elif self.format is None:
            with reading(path):
                empty = not any(path.iterdir())
            more = f" with anything in it{'' if empty else ' of a format that a part may have'}"
            severity: Severity = "error" if self.key in OPTIMIZERS else "warning"
            parts.problems.append(missing(path.name, None, self.key, kind="folder", more=more, severity=severity))
        else:
            # All ranks, so that no tensor has to search this folder for its other shards later.
            of_ranks, alone = self.format is rank_files, path.is_file()
            options = replace(parts.options, all_ranks=parts.options.all_ranks or of_ranks, only_this_file=alone)
            made = self.format.read(path, options)
            parts.add_checkpoint(made, self.key, self.key, "" if alone else path.name)

    def _read_ranks(self, parts: PartsBuilder) -> None:
        """Add each rank's own state, and name the ranks without one.

        Each rank has a random state. Other states may exist once per data-parallel rank, whose number divides that of
        all ranks.
        """
        with reading(self.path):
            here = sorted(p for p in self.path.iterdir() if p.is_file())
        first, *_ = named = [name for name in map(parse, here) if name is not None]
        files = {name.rank: name.path for name in named}
        rest = [p.name for p in here if p not in files.values()]
        if rest:
            text = f"in the folder {self.path.name}, and not read: {few(rest)}"
            parts.problems.append(Problem(Code.NOT_READ, text, files=tuple(rest)))
        parts.add_states_of(self.key, {("", rank): path for rank, path in files.items()})
        count, world = max(files) + 1, parts.world.value or 0
        parts.count(Fact(count, (f"{self.key} files",)))
        fits = self.key != RNG and world % count == 0 and len(files) == count
        template = self.path / re.sub(r"(rank[_-]?)\d+", rf"\g<1>{RANK}", first.path.name)
        absent = set(range(min(max(count, world), rank_files.MAX_WORLD))) - set(files)
        parts.miss_files(self.key, template, sorted(absent), "warning" if fits else "error")


def detect(path: Path) -> bool:
    """Whether a folder has, by their names, a model and another part, each in a format that any trainer may use."""
    if not path.is_dir():
        return False
    try:
        parts = list(_parts(path))
    except CkptoolsError:  # a part contains several checkpoints
        return False
    apart = all(part.format is None or part.format in READERS for part in parts)
    folder = any(part.path.is_dir() for part in parts)  # single files beside each other prove nothing
    model = any(part.key == MODEL and (part.format or part.path.suffix in SAVED) for part in parts)
    others = any(part.key != MODEL and (part.format or part.path.is_file()) for part in parts)
    return len({part.key for part in parts}) == len(parts) and folder and model and others and apart


def _parts(folder: Path) -> Iterator[NamedPart]:
    """Yield the files and folders with the name of a part: the model, the optimizer, then the others."""
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
    parts = PartsBuilder(NAME, path, options)
    found = sorted(_parts(path), key=lambda part: part.is_by_rank)
    for one in found:
        parts.add(Part((one.path.name,), one.key, one.read))
    parts.check_tree()
    with reading(path):
        beside = sorted(set(path.iterdir()) - {part.path for part in found})
    texts = texts_of_parts(beside)
    for key, text_file in texts.items():
        parts.add(Part((text_file.name,), text_file.name if key in parts.tree else key, PartsBuilder.add_file))
    rest = sorted({entry.name for entry in beside} - {text_file.name for text_file in texts.values()})
    if rest:
        text = f"also here, of no part, and not read: {few(rest)}"
        parts.problems.append(Problem(Code.NOT_READ, text, files=tuple(rest)))
    parts.problems += contradictions(parts.tree, {part.key for part in found})
    forms = (one.form(parts.forms) for one in found)
    saved_as = f"a composite of parts by their names: {', '.join(filter(None, forms))}"
    return parts.checkpoint(saved_as, parts.world)
