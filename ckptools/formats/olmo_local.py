"""OLMo's local checkpoints: folders `model`, `optim` and `train` with a file for each rank, and a `metadata.yaml`.

`olmo_flat` describes their content. `metadata.yaml` says `world_size: N`. Folders of the same names that hold ordinary
state dicts are put side by side all the same: each part is merged as rank files are.

OLMo's other checkpoints: `rank3.pt` (`torch_legacy`) is read by `rank_files`, `model_and_optim/` (`torch_new`) is DCP.
Source: olmo/checkpoint.py (`LocalShardedCheckpointer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import check_stays_inside, head_at
from ckptools.formats import olmo_flat
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.rank_search.rank_names import RankName, check_links, names_in, parse, siblings
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, looked_at, was_read
from ckptools.formats.shared.merge import Merge
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.tree import tensors_in
from ckptools.pickles.reader import Saved
from ckptools.training_state.optimizers import AS_SAVED, BY_UNIT
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "olmo_local"
READS = "OLMo's local checkpoints: model/rankN.pt, optim/rankN.pt, train/rankN.pt"
KNOWN_BY = "folders model and optim with one rankN.pt per rank in each"
TRIED = ()
BY_HAND = ("OLMo",)
JOINS = ("model", "optimizer", "rest")


PARTS = ("model", "optim", "train")
METADATA = "metadata.yaml"
WORLD = re.compile(rb"(?m)^world_size:\s*(\d{1,7})\s*$")
MAX_METADATA = 1 << 16
MAX_WORLD = 1 << 16


def detect(path: Path) -> bool:
    """A folder with rank files in its `model` and in its `optim`, or one of those folders or files."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    below = path.parent if path.is_file() and parse(path) else path
    for folder in (path, below.parent) if below.name in PARTS else (path,):
        if all((folder / part / "rank0.pt").is_file() for part in PARTS[:2]):
            return folder
    return None


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint that a folder or a file of it belongs to.

    Raises:
        ReadError: the file that is read first is unreadable, or not OLMo's.
    """
    builder = CheckpointBuilder(NAME, path)
    root = _root(path)
    if root is None:
        raise ReadError(path, "no folders model and optim with rank files")
    return _OlmoFolder(builder, root, options).checkpoint()


class _OlmoFolder:
    def __init__(self, builder: CheckpointBuilder, root: Path, options: Options) -> None:
        self.builder, self.root, self.options = builder, root, options
        path = builder.path
        self.files = dict(self._found())
        self.found = tuple(dict.fromkeys(part for part, _ in self.files))
        ranks = sorted({rank for _, rank in self.files})
        named = parse(path) if path.is_file() else None
        asked = named.rank if named else ranks[0]
        self.all_ranks = options.all_ranks or len(ranks) == 1
        self.saved: dict[tuple[str, int], Saved] = {}
        self.faults: dict[Path, Fault] = {}
        for key, name in self.files.items():
            if options.all_ranks or key[1] == asked:
                try:
                    self.saved[key] = options.read_file(name.path)
                except ReadError as error:
                    if key[1] == asked:
                        raise
                    self.faults[name.path] = Fault.of(error, name.path)

    def _found(self) -> Iterator[tuple[tuple[str, int], RankName]]:
        for part in PARTS:
            folder = self.root / part
            if not self.options.follow_symlinks:
                check_stays_inside(folder, self.root)
            first = next((n for n in names_in(folder) if n.path.name == "rank0.pt"), None) if folder.is_dir() else None
            group = siblings(first) if first else []
            if not self.options.follow_symlinks:
                check_links(group, asked=self.builder.path)
            for name in group:
                yield (part, name.rank), name

    def checkpoint(self) -> Checkpoint:
        merge, world = Merge(), self._world_size()
        placed = {rank: self._of_rank(rank) for rank in sorted({rank for _, rank in self.saved})}
        tree = {p: merge.trees([(r, t[p]) for r, t in placed.items() if p in t], (p,)) for p in self.found}
        found = rank_checks.compare_ranks(merge, tree)
        tree = found.tree
        sections, tensors = find_sections(tree), list(tensors_in(tree))
        ranks = sorted({*range(min(world.value, MAX_WORLD)), *(rank for _, rank in self.files)})
        files = tuple(self._file(part, rank) for rank in ranks for part in self.found)
        flat = any(t.kind == "flat_pieces" for _, t in tensors)
        self.builder.problems += rank_checks.check_files(files, self.faults, world.value, flat)
        self.builder.add_rank_values(found)
        self.builder.add_saved(self.saved.values())
        return self.builder.checkpoint(
            name=self.root.name or "checkpoint",
            saved_as=f"OLMo local, {'FSDP flat parameters and their shapes' if flat else 'every tensor whole'}",
            tree=tree,
            files=files,
            world_size=world,
            step=find_step(self.root, sections),
            module_order=BY_UNIT if flat else AS_SAVED,
            all_ranks=self.all_ranks,
            bytes_expected=rank_checks.expected_bytes(files),
        )

    def _of_rank(self, rank: int) -> dict[str, Any]:
        """A rank's parts, with the model's and the optimizer's runs in their places."""
        trees = {part: self.saved[part, rank].tree for part in self.found if (part, rank) in self.saved}
        model = trees.get("model")
        if model is None and "model" in self.found:
            trees.pop("optim", None)  # without the model's runs its moments belong to unknown parameters
        if not olmo_flat.is_flat_model(model):
            return trees
        path = self.files["model", rank].path
        try:
            pieces = {fqn: piece for fqn, piece, _ in olmo_flat.parameter_runs(model)}
            trees["model"] = olmo_flat.read_model(model, rank, self.all_ranks)
            optim = trees.get("optim")
            if isinstance(optim, dict) and {"state", "param_groups"} <= optim.keys():
                path = self.files["optim", rank].path
                trees["optim"] = olmo_flat.read_optimizer(optim, pieces, rank, self.all_ranks)
        except (ValueError, TypeError) as error:
            raise ReadError(path, f"is not what OLMo writes: {error}") from error
        return trees

    def _world_size(self) -> Fact:
        path = self.root / METADATA
        if path.is_file():
            stated = WORLD.search(head_at(path, MAX_METADATA))
            if stated and int(stated[1]) > 0:
                return Fact(int(stated[1]), (METADATA,))
        return Fact(len({rank for _, rank in self.files}), ("files found",))

    def _file(self, part: str, rank: int) -> RankFile:
        name, saved = self.files.get((part, rank)), self.saved.get((part, rank))
        if saved is not None:
            return was_read(saved, rank, part)
        if name is None:
            return RankFile(self.root / part / f"rank{rank}.pt", rank, part, "missing", 0, None)
        return looked_at(name.path, rank, part, self.faults, len(self.files))
