"""Megatron-LM's own checkpoints (`--ckpt-format torch`): one file per tensor-, pipeline- and expert-parallel rank.

    <save>/latest_checkpointed_iteration.txt
    <save>/iter_0000100/mp_rank_00_001/model_optim_rng.pt     (release/ for converted models; model_rng.pt in core 0.2)
    <save>/iter_0000100/mp_rank_00_001/distrib_optim.pt       (distributed optimizer)

In each: `args` (argparse.Namespace), `checkpoint_version`, `iteration`, `model` (`model0`, `model1`, … of an
interleaved pipeline), `optimizer`, `opt_param_scheduler` (`lr_scheduler` up to v2.5), `rng_state` (flat RNG keys up to
v2.5). The files hold plain tensors and do not state how they belong together: that is in Megatron's code, and here in
`model` (joining, layer numbers), `folders` (ranks) and `optimizer`. Weights without a rule are shown, and
refused.

Kept as saved: the padding of the vocabulary to a multiple of `make_vocab_size_divisible_by` times the
tensor-parallel size; the order of fused QKV rows (before checkpoint_version 2.0 another one). Extra states of
Transformer Engine belong to one rank each. Source: megatron/training/checkpointing.py (`generate_state_dict`),
megatron/checkpointing.py of v1.0 to core 0.5; checked on files of core 0.12.1 and 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.megatron import folders
from ckptools.formats.megatron.folders import FOLDER, MODEL_FILES, Coordinates, RankFolder, holds_rank_folders
from ckptools.formats.megatron.model import Model, check_values, choose_weights, is_chunk, masters_of
from ckptools.formats.megatron.optimizer import Optimizers
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, looked_at
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.tensor_parallel import read_rules
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import ModuleOrder
from ckptools.model.problems import Code, Problem
from ckptools.option import spelled
from ckptools.pickles.reader import Saved
from ckptools.rules.files import beyond, misplaced, strays, twice
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "megatron"
READS = "Megatron-LM, one file per model-parallel rank: iter_*/mp_rank_00_000/model_optim_rng.pt"
KNOWN_BY = "mp_rank_* folders with model_optim_rng.pt, in iter_* or release, below latest_checkpointed_iteration.txt"
TRIED = ("Megatron core 0.16.1",)
JOINS = ("model", "optimizer", "rest")

JOINED = ModuleOrder(False, "the model is joined from the files of its ranks, layer by layer")
"""Before joining, each file's own order names its optimizer state (`megatron.optimizer`)."""


def detect(path: Path) -> bool:
    """Whether a path is a run, an iteration, a folder of one model-parallel rank, or the file in it at any place."""
    if path.is_dir() and not FOLDER.fullmatch(path.name):
        return folders.looks_like_run(path, holds_rank_folders)
    return _iteration_above(path) is not None or _lone(path)


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of a file, a rank's folder, an iteration or a run.

    Raises:
        ReadError: the file that the user named, or the first one, cannot be read.
        UsageError: the run has several checkpoints and no tracker file, or the rule file is malformed.
    """
    builder = CheckpointBuilder(NAME, path)
    inside = _iteration_above(path)
    if inside is None and _lone(path):
        alone = RankFolder(path, (0,))
        return _MegatronFolder(builder, path.parent, [alone], alone, options).checkpoint()
    folder = inside or folders.find_iteration(path, holds_rank_folders, options.follow_symlinks)
    found = folders.rank_folders(folder, options.follow_symlinks)
    asked = next((m for m in found if path in (m.path, m.path.parent)), found[0])
    found = [asked] if options.only_this_file and inside else found
    return _MegatronFolder(builder, folder, found, asked, options).checkpoint()


def _lone(path: Path) -> bool:
    return path.name in MODEL_FILES and path.is_file()


def _iteration_above(path: Path) -> Path | None:
    """The iteration's folder, for a rank's folder or the file in it."""
    folder = path if path.is_dir() else path.parent
    named = path.is_dir() or path.name in MODEL_FILES
    here = any((folder / name).is_file() for name in MODEL_FILES)
    return folder.parent if named and here and FOLDER.fullmatch(folder.name) else None


class _MegatronFolder:
    def __init__(
        self, builder: CheckpointBuilder, folder: Path, found: list[RankFolder], asked: RankFolder, options: Options
    ) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.found, self.options = folder, found, options
        self.assumed_names: frozenset[str] = frozenset()
        self.faults: dict[Path, Fault] = {}
        self.rules = read_rules(options.rules)
        first = self._first(asked, found)
        self.args = folders.arguments(first.tree)
        self.grid = folders.grid_of(self.args, found)
        size = self.grid.size
        if size > folders.MAX_RANKS:
            raise ReadError(first.path, f"args state {size} model-parallel ranks; no cluster has so many")
        if size > 1 and not FOLDER.fullmatch(asked.name):
            why = f"one of {size} ranks' files; its folder's name mp_rank_* says which one: put it back there"
            self.problems += strays([asked.path.name], why)
        self.places = {self.grid.place(member): member for member in reversed(found)}
        self.saved: dict[Coordinates, Saved] = {}
        self.flat: dict[str, Any] = {}
        # The first tensor-parallel rank of each stage has every name and shape.
        leaders = {(at.pp, at.ep): at for at in sorted(self.places, reverse=True)}.values()
        wanted = {at: m for at, m in sorted(self.places.items()) if options.all_ranks or m is asked or at in leaders}
        for at, member in wanted.items():
            self._read(at, member, first)
        self.all_ranks = len(wanted) == len(self.places)

    def _first(self, asked: RankFolder, found: list[RankFolder]) -> Saved:
        """Read one file for its arguments: the one that the user named, else the first readable one."""
        if asked.path == self.builder.path or asked.path.parent == self.builder.path:
            return self.options.read_file(asked.path)
        errors: list[ReadError] = []
        for member in found:
            try:
                return self.options.read_file(member.path)
            except ReadError as error:
                errors.append(error)
        raise errors[0]

    def _read(self, at: Coordinates, member: RankFolder, first: Saved) -> None:
        try:
            saved = first if member.path == first.path else self.options.read_file(member.path)
            if not isinstance(saved.tree, dict):
                raise ReadError(member.path, f"expected a dict with a model, found a {type(saved.tree).__name__}")
        except ReadError as error:
            self.faults[member.path] = Fault.of(error, member.path)
            return
        self.saved[at] = saved
        for path in member.optimizer:
            try:
                self.flat[f"{member.name}/{path.name}"] = self.options.read_file(path).tree
            except ReadError as error:
                self.faults[path] = Fault.of(error, path)

    def checkpoint(self) -> Checkpoint:
        merge = Merge()
        found = rank_checks.compare_ranks(merge, self._tree(merge))
        tree = found.tree
        self._add_files()
        self.problems += self._check_stages()
        args = {at: folders.arguments(saved.tree) for at, saved in self.saved.items()}
        self.problems += folders.check_arguments(self.grid, args)
        claims = list(folders.claims_of(self.grid, self.found, args))
        sizes = Coordinates(self.grid.pp, self.grid.ep, self.grid.tp).by_axis()
        self.problems += [*beyond(claims, sizes, ", as args state"), *twice(claims), *misplaced(claims)]
        self.problems += check_values(self.args, tree, self.grid)
        self.builder.add_rank_values(found)
        self.builder.add_saved(self.saved.values())
        return self.builder.checkpoint(
            name=self.folder.name,
            saved_as=f"Megatron-LM, {self.grid.sizes}",
            tree=tree,
            world_size=self.grid.world,
            step=find_step(self.folder, find_sections(tree)),
            module_order=JOINED,
            all_ranks=self.all_ranks,
            assumed_names=self.assumed_names,
            bytes_expected=rank_checks.expected_bytes(self.builder.files),
        )

    def _tree(self, merge: Merge) -> dict[Any, Any]:
        trees = {at: saved.tree for at, saved in sorted(self.saved.items())}
        model = Model(self.grid, trees, self.rules, self.args)
        optimizers = Optimizers(model, {at: t["optimizer"] for at, t in trees.items() if "optimizer" in t}, self.flat)
        weights, extra = model.tree()
        optimizer = optimizers.tree()
        tree: dict[Any, Any] = {}
        for key in dict.fromkeys("model" if is_chunk(k) else k for t in trees.values() for k in t):
            if key == "model":
                chosen = choose_weights(weights, masters_of(optimizer), self.options.weights)
                self.problems += chosen.problems
                tree[key] = model.with_tied_head(chosen.weights) if chosen.masters_taken else chosen.weights
            elif key == "optimizer":
                tree[key] = optimizer
            elif key != "args":
                tree[key] = merge.trees([(self.grid.rank(at), t[key]) for at, t in trees.items() if key in t], (key,))
            else:
                tree[key] = next(t[key] for t in trees.values() if key in t)
        tree.update({"extra_state": extra} if extra else {})
        tree.update({"optimizer": optimizer} if self.flat else {})
        self.assumed_names = frozenset(optimizers.assumed)
        self.problems += [*model.problems, *optimizers.problems, *optimizers.merge.problems]
        return tree

    def _add_files(self) -> None:
        for at in sorted({*self.places, *self.grid.every()}):
            member, rank = self.places.get(at), self.grid.rank(at)
            if member is not None:
                for path, part in ((member.path, ""), *((path, "optim") for path in member.optimizer)):
                    seen = looked_at(path, rank, part, self.faults, len(self.places), at in self.saved)
                    self.builder.add_listed(seen, self.faults, f"{member.name}/{path.name}")
            elif not self.options.only_this_file:
                name = f"{self.grid.folder(at)}/{MODEL_FILES[0]}"
                self.builder.add_missing(self.folder / name, rank, name=name)

    def _check_stages(self) -> Iterator[Problem]:
        """Find stages, or expert ranks of a stage, without a readable file: their weights are absent without a gap."""
        here = {file.rank for file in self.builder.files if file.is_here and not file.part}
        alone = f" with {spelled('only-this-file', True)}" if self.options.only_this_file else ""
        for stage in range(self.grid.pp):
            places = (Coordinates(stage, e, t) for e in range(self.grid.ep) for t in range(self.grid.tp))
            ranks = set(map(self.grid.rank, places))
            if not ranks & here:
                which = f"pipeline stage {stage} of {self.grid.pp}"
                text = f"{which}: none of its files is read{alone}, so its layers are missing"
                yield Problem(Code.MODEL_PART_MISSING, text, min(ranks))
                continue
            for expert in range(self.grid.ep):
                own = {self.grid.rank(at) for at in self.grid.every() if (at.pp, at.ep) == (stage, expert)}
                if own and not own & here:
                    which = f"expert-parallel rank {expert} of {self.grid.ep} in pipeline stage {stage}"
                    text = f"{which}: none of its files is read{alone}, so its experts are missing"
                    yield Problem(Code.MODEL_PART_MISSING, text, min(own))
