"""Nanotron: a safetensors file for each parameter, and for each slice of one; an optimizer file for each rank.

    checkpoint_metadata.json                         version, tp, dp, steps
    model/model/decoder/0/pp_block/attn/qkv_proj/
        model_bias.safetensors                       a parameter that every rank has, or a tied one: written once
        model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors
    optimizer/optimizer_config.json                  type and sizes
    optimizer/optimizer_pp-0-of-2_tp-1-of-2_exp-0-of-1.pt
    optimizer/optimizer_pp-0-of-2_dp-1-of-2_tp-1-of-2_exp-0-of-1.pt      under ZeRO-1
    lr_scheduler/  random/

A file holds one tensor, `data`. The path below `model/`, with the part of the file's name behind `model_`, is the
parameter's name. A slice's header has `unsharded_shape` and `local_global_slices_pairs`, pairs `local#global` joined by
`;`, each one `start,stop,step` per dimension, joined by `|`. The optimizer lists what each rank trains, so that a
parameter's file that is missing is noticed; `optimizer` has its rules. Experts over ranks have slices of another kind
and are refused by name.

Source: nanotron/serialize/{main,weights,optimizer,utils,metadata}.py of 0.4; checked on a checkpoint of it. Files of
ZeRO-1 were made by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.nanotron.files import MAX_RANKS, METADATA, NanotronFiles
from ckptools.formats.nanotron.optimizer import OptimizerFiles
from ckptools.formats.nanotron.weights import Weights
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, file_now
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import leaf_at
from ckptools.pickles.reader import Saved
from ckptools.training_state.parameter_names import SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "nanotron"
READS = "Nanotron: a safetensors file per parameter and slice, optimizer files per rank, also under ZeRO-1"
KNOWN_BY = "checkpoint_metadata.json beside model/; any file below it"
TRIED = ("Nanotron 0.4",)
BY_HAND = ("ZeRO-1",)
JOINS = ("model", "optimizer", "rest")

LEVELS = 12
"""Most folders above a file that are looked at: a module's file lies as deep as its name has parts."""

OTHERS = ("lr_scheduler", "random")
SIZES = re.compile(r"(pp|dp|tp|exp)-(\d{1,5})-of-(\d{1,5})")


def detect(path: Path) -> bool:
    """A folder with Nanotron's metadata beside `model`, or what lies below one; no empty folder."""
    return _root(path) is not None and (path.is_file() or any(path.iterdir()))


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint that a folder or a file belongs to.

    Raises:
        ReadError: its metadata, or the file that was named, cannot be read.
        UnknownFormatError: its metadata states no sizes.
        UnsafePathError: a file is a link out of the folder.
    """
    return _NanotronFolder(NanotronFiles(CheckpointBuilder(NAME, path), _root(path) or path, options)).checkpoint()


def _root(path: Path) -> Path | None:
    """The checkpoint's folder, for a path in it."""
    folders = [path, *path.absolute().parents[:LEVELS]]
    return next((f for f in folders if (f / METADATA).is_file() and (f / "model").is_dir()), None)


def _part(file: RankFile) -> str | None:
    """The part of the checkpoint that a rank's file is of, whose rest no other rank has; None for a file of all."""
    return None if file.rank is None else file.part.partition("/")[0]


class _NanotronFolder:
    """The steps of opening one checkpoint."""

    def __init__(self, files: NanotronFiles) -> None:
        self.found, self.problems = files, files.builder.problems
        self.weights = Weights(files)
        self.optimizer = OptimizerFiles(files)

    def checkpoint(self) -> Checkpoint:
        """Put everything together."""
        tree: dict[Any, Any] = {"model": self.weights.state_dict()}
        if self.optimizer.trees:
            tree["optimizer"] = self.optimizer.state_dict(self.weights)
        tree |= {"checkpoint_metadata": self.found.metadata, **self._others()}
        self._check_files(tree)
        step = leaf_at(self.found.metadata, ("metas", "last_train_step"))
        step = step if type(step) is int and step >= 0 else None
        return self.found.builder.checkpoint(
            name=self.found.folder.name,
            saved_as=f"Nanotron, tensor parallel {self.found.tp} x pipeline {self.found.pp}"
            + (f", ZeRO-1 over {self.found.dp}" if self.optimizer.zero_1 else ""),
            tree=tree,
            files=self.found.files,
            world_size=Fact(self.found.tp * self.found.pp * self.found.dp, (METADATA, "file names")),
            step=Fact(step, (METADATA,)) if step is not None else find_step(self.found.folder, find_sections(tree)),
            module_order=SORTED,
            bytes_expected=rank_checks.expected_bytes(self.found.files),
        )

    def _others(self) -> dict[str, Any]:
        """Schedulers and random states, each rank's file as it is."""
        found: dict[str, Any] = {}
        read: list[Saved] = []
        for part in OTHERS:
            for path in self.found.below(part, ".pt"):
                try:
                    saved = self.found.options.read_file(path)
                except ReadError as error:
                    self.found.add_fault(path, error, None)
                    continue
                read.append(saved)
                self.found.files.append(file_now(path, None, self.found.part(path), "read"))
                found.setdefault(part, {})[path.stem] = saved.tree
        self.found.builder.add_saved(read)
        return {part: next(iter(of.values())) if list(of) == [part] else of for part, of in found.items()}

    def _check_files(self, tree: Mapping[str, Any]) -> None:
        """Problems of files that cannot be read, and of ranks that have no optimizer file."""
        for file in self.found.files:
            if file.path in self.found.faults:
                self.problems.append(self.found.faults[file.path].problem(file.part, file.rank, _part(file)))
        if not self.optimizer.found:
            text = "no optimizer files: a parameter's file that is missing from model/ is not noticed"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text, severity="warning"))
            return
        lost = [*self.optimizer.lost_files(), *(f for part in OTHERS for f in self._lost_of_ranks(part))]
        self.found.files += lost
        self.problems += (Problem(Code.FILE_MISSING, f"no file {file.part}", file.rank, _part(file)) for file in lost)
        if not any(file.part.startswith("lr_scheduler/") for file in self.found.files):
            text = "no file in lr_scheduler/, which every save with an optimizer writes unless it is told not to"
            self.problems.append(Problem(Code.FILE_MISSING, text, severity="warning"))

    def _lost_of_ranks(self, part: str) -> Iterator[RankFile]:
        """Files of a part that are missing, where the names of the others count the ranks."""
        named = [file for file in self.found.files if file.part.startswith(f"{part}/")]
        counts = {file.part: SIZES.findall(file.part) for file in named}
        sizes = {tuple((word, size) for word, _, size in found) for found in counts.values()}
        if len(sizes) != 1 or not (of := next(iter(sizes))) or prod(int(size) for _, size in of) > MAX_RANKS:
            return
        spelled = SIZES.sub(r"\1-{}-of-\3", re.sub(r"[{}]", r"\g<0>\g<0>", next(iter(counts))))
        here = {tuple(int(rank) for _, rank, _ in found) for found in counts.values()}
        for ranks in product(*(range(int(size)) for _, size in of)):
            if ranks not in here:
                name = spelled.format(*ranks)
                yield RankFile(self.found.folder / name, None, name, "missing", 0, None)
