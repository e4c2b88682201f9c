"""torch_checkpointing: a file for each item and rank, and a `metadata.pkl` with the layout of the ranks' tensors.

    model_0.pt … model_3.pt             the item `model` of each rank: torch.save, whose DTensors say how they are cut
    optimizer_0.safetensors …           bare local tensors; only metadata.pkl says which part of which tensor they are
    param_groups_0.json, step_0.pt …    items that are not cut
    metadata.pkl                        see `metadata`; only of items that have a resharder

A layout may name the files otherwise; metadata.pkl then has the names, but only of items that are in it. Where an
optimizer's state is in safetensors, its param groups are an item of their own, and are joined with it where their
`param_names` are those of the state. Without any metadata.pkl torch.save files are rank files, each item a part.

Source: torch_checkpointing/checkpoint_writer.py, checkpoint_layout.py, metadata_manager.py, default_resharder.py and
state_transformations.py of 0.1.1; checked on checkpoints of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import File
from ckptools.files.safetensors_header import read_header
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, file_now, was_read
from ckptools.formats.shared.companions import unlike_states
from ckptools.formats.shared.merge import Merge
from ckptools.formats.torch_checkpointing import items
from ckptools.formats.torch_checkpointing.items import ItemFile
from ckptools.formats.torch_checkpointing.metadata import METADATA, Metadata, is_metadata, read_metadata
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.pickles.reader import Saved
from ckptools.text import and_others, few
from ckptools.training_state.parameter_names import AS_SAVED, SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "torch_checkpointing"
READS = "torch_checkpointing: model_0.pt or .safetensors, optimizer_0.pt … of each rank, with metadata.pkl"
KNOWN_BY = "metadata.pkl with sharding in it, or items of several ranks in safetensors that lack it"
TRIED = ("torch_checkpointing 0.1.1",)
JOINS = ("model", "optimizer", "rest")


def detect(path: Path) -> bool:
    """A folder with its metadata, or with items of several ranks in safetensors that lack it; or a file of one."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    """The folder of the checkpoint that a path is, or that a file belongs to."""
    if path.is_dir():
        return path if is_metadata(path / METADATA) or _lacks_metadata(path) else None
    if path.name == METADATA or items.parse(path) is not None:
        return path.parent if path.is_file() and _root(path.parent) else None
    above = path.parent.parent
    return above if path.is_file() and is_metadata(above / METADATA) else None


def _lacks_metadata(folder: Path) -> bool:
    """Whether a folder holds at least two items of the same two or more ranks, and one of them must be cut.

    Whole models of epochs 0 and 1 have such names too, and the same shapes. Files of torch.save alone are left to
    `rank_files`, because their tensors state how they are cut.
    """
    alike = [files for files in items.named_files(folder, None).values() if len(files) > 1 and 0 in files]
    pairs = [files for files in alike if sum(set(files) == set(other) for other in alike) > 1]
    with suppress(ReadError):
        return any(files[0].kind == "safetensors" and _is_cut(files[0].path, files[max(files)].path) for files in pairs)
    return False


def _is_cut(first: Path, last: Path) -> bool:
    with File(first) as one, File(last) as other:
        tensors, others = read_header(one).tensors, read_header(other).tensors
    return tensors.keys() == others.keys() and any(tensors[name].shape != others[name].shape for name in tensors)


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint in a folder, or that a file belongs to.

    Raises:
        ReadError: no file of it can be read.
        UnsafePathError: a file is a link out of the folder.
    """
    folder = _root(path) or path.parent
    only = path if options.only_this_file and not path.is_dir() and path.name != METADATA else None
    return _ItemsFolder(CheckpointBuilder(NAME, folder if only is None else path), folder, options, only).checkpoint()


class _ItemsFolder:
    """The steps of opening one checkpoint, with what they find on the way."""

    def __init__(self, builder: CheckpointBuilder, folder: Path, options: Options, only: Path | None) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.options, self.only = folder, options, only
        self.files: list[RankFile] = []
        self.here: dict[str, set[int]] = {}
        self.saved: list[Saved] = []
        self.metadata = self._metadata()
        self.items = items.named_files(folder, self.metadata)
        if self.metadata is None and "safetensors" in self._kinds():
            text = f"no {METADATA} that can be read; it alone says how ranks cut what they have in safetensors"
            self.problems.append(Problem(Code.FILE_MISSING, text))
        if only is not None:
            chosen = {name: {r: f for r, f in files.items() if f.path == only} for name, files in self.items.items()}
            self.items = {name: files for name, files in chosen.items() if files}
            text = f"{only.name} is one file of several, and only this one is read"
            self.problems.append(Problem(Code.ONE_OF_SEVERAL, text))
        ranks = [rank for files in self.items.values() for rank in files]
        self.world = Fact(max(ranks, default=0) + 1, ("file names",))
        if self.metadata is not None:
            self.world = Fact(self.metadata.world_size, (METADATA,))

    def _kinds(self) -> set[str]:
        return {file.kind for files in self.items.values() for file in files.values()}

    def _metadata(self) -> Metadata | None:
        path = self.folder / METADATA
        if not path.is_file():
            return None
        self._check_link(path)
        try:
            found = read_metadata(path)
        except ReadError as error:
            fault = Fault.of(error, path)
            self.problems.append(fault.problem(METADATA))
            self.files.append(file_now(path, None, "metadata", fault.status))
            return None
        self.files.append(file_now(path, None, "metadata", "read"))
        self.builder.add_read(1, found.nbytes, found.names)
        return found

    def _check_link(self, path: Path) -> None:
        if not self.options.follow_symlinks and path != self.only:
            check_stays_inside(path, self.folder)

    def checkpoint(self) -> Checkpoint:
        """Put everything together."""
        ranked = self._ranked()
        if not ranked:
            raise ReadError(self.folder, f"none of its files can be read: {few([p.message for p in self.problems])}")
        for name in dict.fromkeys(name for _, tree in ranked for name in tree):
            if self._state_of(name) is not None:
                self.problems += unlike_states(name, {rank: tree[name] for rank, tree in ranked if name in tree})
        merge = Merge()
        found = rank_checks.compare_ranks(merge, self._completed(merge.trees(ranked)))
        self.builder.add_rank_values(found)
        self.problems += [*items.check_groups(merge), *items.check_cover(tensors_in(found.tree))]
        self.builder.add_saved(self.saved)
        kinds = sorted(self._kinds() - {"raw"})
        return self.builder.checkpoint(
            name=self.folder.absolute().name or "checkpoint",
            saved_as=f"torch_checkpointing, a file per item and rank ({', '.join(kinds)})",
            tree=found.tree,
            files=sorted(self.files, key=lambda f: -1 if f.rank is None else f.rank),
            world_size=self.world,
            step=find_step(self.folder, find_sections(found.tree)),
            module_order=SORTED if "safetensors" in kinds else AS_SAVED,
            bytes_expected=rank_checks.expected_bytes(self.files),
        )

    def _ranked(self) -> list[tuple[int, dict[str, Any]]]:
        """Each rank's items, in rank order; the rank is the one in a file's content."""
        self.options.read_ahead([f.path for files in self.items.values() for f in files.values() if f.kind == "pt"])
        trees: dict[int, dict[str, Any]] = {}
        for name, files in self.items.items():
            found = self._of_item(name, files)
            self._check_missing(name, files, set(found))
            self.here[name] = set(found)
            # In safetensors that no metadata describes, the tensors of other ranks' pieces are unknown.
            if found and self._state_of(name) is not None and next(iter(files.values())).kind == "safetensors":
                found = {min(found): found[min(found)]}
            for rank, tree in found.items():
                trees.setdefault(rank, {})[name] = tree
        return items.with_param_groups(sorted(trees.items()))

    def _of_item(self, name: str, files: Mapping[int, ItemFile]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for file in files.values():
            if not file.path.exists():
                continue
            self._check_link(file.path)
            try:
                rank, tree, wrong = self._read(file)
            except UnsafePathError:
                raise
            except ReadError as error:
                fault = Fault.of(error, file.path)
                self.problems.append(fault.problem(file.path.name, file.rank, self._state_of(name)))
                self.files.append(file_now(file.path, file.rank, name, fault.status))
                continue
            if rank in found:
                text = f"{file.path.name} holds rank {rank}, as another file does"
                self.problems.append(Problem(Code.STRAY_FILE, text, rank))
            elif file.kind != "raw":
                found[rank] = tree
            if wrong:
                text = f"{file.path.name} is not what {METADATA} says: {wrong[0]}{and_others(len(wrong) - 1)}"
                self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, rank))
        return found

    def _read(self, file: ItemFile) -> tuple[int, Any, Sequence[str]]:
        """The rank and content of a file, and how they contradict the metadata."""
        item = self.metadata.items.get(file.item) if self.metadata else None
        if file.kind == "safetensors":
            tree, wrong, nbytes = items.read_safetensors(file.path, file.rank, item, self.world.value == 1)
            self._add(file, nbytes)
            lacking = items.check_against(tree, item, file.rank) if item else []
            return file.rank, tree, [*wrong, *lacking]
        if file.kind == "json":
            content = read_json(file.path)
            self._add(file, file.path.stat().st_size)
            return file.rank, content, []
        if file.kind != "pt":
            text = f"{file.path.name} holds bytes of which nothing is known"
            self.problems.append(Problem(Code.NOT_READ, text, file.rank, files=(file.path.name,)))
            self._add(file, 0)
            return file.rank, None, []
        saved = self.options.read_file(file.path)
        rank = self._rank_of(file, saved)
        self.saved.append(saved)
        self.files.append(was_read(saved, rank, file.item))
        return rank, saved.tree, items.check_against(saved.tree, item, rank) if item else []

    def _add(self, file: ItemFile, nbytes: int) -> None:
        self.builder.add_read(1, nbytes)
        self.files.append(file_now(file.path, file.rank, file.item, "read"))

    def _rank_of(self, file: ItemFile, saved: Saved) -> int:
        """The rank in a file's DTensors, else in its name."""
        said = {rank for rank, _ in saved.claims if rank is not None}
        worlds = {world for _, world in saved.claims} if not saved.at_least else set()
        if self.metadata is not None and worlds - {self.world.value}:
            text = f"{file.path.name} is of a world of {max(worlds)}, {METADATA} of {self.world.value}"
            self.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text, file.rank))
        if len(said) != 1 or file.rank in said:
            return file.rank
        (rank,) = said
        text = f"{file.path.name} holds rank {rank}; the content is believed"
        self.problems.append(Problem(Code.NAMED_AS_ANOTHER_RANK, text, file.rank))
        return rank

    def _state_of(self, name: str) -> str | None:
        """The item to name in a problem, where none of its tensors has a gap if a rank's file is lost."""
        return None if self.metadata and name in self.metadata.items else name

    def _check_missing(self, name: str, files: Mapping[int, ItemFile], here: set[int]) -> None:
        """Find ranks that lack a file of an item; rank 0 may rightly be the only one with a file."""
        present = {rank for rank, file in files.items() if file.path.exists()}
        of_all = self._state_of(name) is None or present != {0}
        if self.only is not None or (not of_all and self.world.value == 1):
            return
        if not of_all:
            text = f"rank 0 alone has a file of {name}, which holds for all, or is one that is left of several"
            self.problems.append(Problem(Code.KEPT_AS_SAVED, text, None, name))
            return
        expected = set(files) if self._state_of(name) is None else range(self.world.value)
        for rank in sorted({*expected} - present - here):
            file = files.get(rank) or next(iter(files.values()))
            path = file.path if file.rank == rank else file.path.with_name(f"{name}_{rank}.{file.kind}")
            self.files.append(RankFile(path, rank, name, "missing", 0, None))
            self.problems.append(Problem(Code.FILE_MISSING, f"no file {path.name}", rank, self._state_of(name)))

    def _completed(self, tree: Any) -> Any:
        """Add the pieces in lost files to the merged tree, and an empty list where an optimizer lacks its groups."""
        for name, item in self.metadata.items.items() if self.metadata else ():
            absent = item.ranks() - self.here.get(name, set())
            if absent and name in tree:
                tree[name] = items.with_absent(tree[name], item, absent)
        for name, value in tree.items():
            if items.is_state(value):
                value[items.GROUPS] = []
                text = "no item holds its param groups, so that its hyperparameters are not known"
                self.problems.append(Problem(Code.KEPT_AS_SAVED, text, None, name, "warning"))
        return tree
