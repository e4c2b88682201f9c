"""Hugging Face folders: safetensors or `.bin` files, one or several with an index, and what training left beside them.

transformers, diffusers, PEFT and Accelerate write a model as names and tensors, every tensor whole; `weight_files`
tells the names of the files, `weight_index` the index, `beside` the companions. A lone model is the bare state dict;
with companions the tree is `{"model": …, "optimizer": …, …}`. Of tied weights safetensors hold one name, the others
are absent; in `.bin` they share a storage of one file. torch's `HuggingFaceStorageWriter` writes the same, from rank 0
or by `consolidate_safetensors_files`; what its ranks write on their own is `dcp_safetensors`' matter.

Checked on files of transformers 4.56 (`.bin`) and 5.23 (safetensors), and of torch 2.13.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptools.checkpoint import Checkpoint, ReadCost
from ckptools.errors import ReadError
from ckptools.files import check_stays_inside
from ckptools.formats.beside import Beside, read_beside
from ckptools.formats.options import Options
from ckptools.formats.weight_files import Weights, absent, chosen, few, of_file, parse_index, weights_in
from ckptools.formats.weight_index import Index, compare, compare_size, read_index
from ckptools.formats.weight_tensors import Held, is_safetensors, read_weights
from ckptools.model import Fact, Problem, RankFile, Tensor
from ckptools.pickles.contents import HEAD, content_of
from ckptools.pickles.told import told
from ckptools.sections import find_sections
from ckptools.steps import find_step
from ckptools.views.words import plural

NAME = "hugging_face"
READS = "Hugging Face models: safetensors or .bin, one file or several, with the state of Trainer or Accelerate"
KNOWN_BY = "model.safetensors, model-00001-of-00004.safetensors, pytorch_model.bin in a folder, their index.json"


def detect(path: Path) -> bool:
    """A safetensors file, an index, one of several `.bin` that are here, or a folder with any of these."""
    if path.is_dir():
        return bool(weights_in(path))
    if not path.is_file() or parse_index(path) is not None:
        return path.is_file()
    with path.open("rb") as file:
        head = file.read(HEAD)
    if is_safetensors(head) or (path.suffix == ".safetensors" and not content_of(head)):
        return True
    weights = of_file(path)
    return weights.kind == "bin" and (len(weights.files) > 1 or weights.index is not None)


def read(path: Path, options: Options) -> Checkpoint:
    """Open a folder, an index, a file, or the set that a file is one of.

    Raises:
        ReadError: nothing of it can be read.
        UsageError: the folder holds several models.
        UnsafePathError: a file is a link out of the folder, or the index names one elsewhere.
    """
    started = time.perf_counter()
    opening = _Opening(path, options)
    models = opening.folder() if path.is_dir() else {"model": opening.model(opening.asked_for())}
    beside = read_beside(path, options) if path.is_dir() else Beside()
    tree = {**models, **beside.tree} if beside.files or len(models) > 1 else models["model"]
    return opening.checkpoint(tree, beside, started)


@dataclass
class _Opening:
    """The steps of opening one checkpoint, with what they find on the way.

    Attributes:
        path: what was asked for.
        options: how.
        name: of the checkpoint.
        files: the model's files, found or missing.
        problems: what is wrong with them.
        names: dotted names in pickles.
        bytes_read: how much was read.
        saved_as: how each model was saved.
    """

    path: Path
    options: Options
    name: str = ""
    files: list[RankFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    bytes_read: int = 0
    saved_as: list[str] = field(default_factory=list)

    def folder(self) -> dict[str, Any]:
        """Every model of the folder that is read, by its name in the tree."""
        found = weights_in(self.path)
        read = chosen(self.path, found)
        models = {name: self.model(weights) for name, weights in read.items()}
        self.name = self.path.absolute().name or "checkpoint"
        self._tell_of_others(found, {(w.base, w.kind) for w in read.values()})
        return models

    def asked_for(self) -> Weights:
        """The set that a file or an index is of."""
        key = parse_index(self.path)
        weights = Weights(*key, (), self.path) if key else of_file(self.path)
        if key or weights.files[0].number is None:
            return weights
        if self.options.only_this_file:
            text = f"{self.path.name} is one file of several, and only this one is read"
            self.problems.append(Problem("CK011", "error", text))
            return replace(weights, files=tuple(f for f in weights.files if f.path == self.path), index=None)
        listed = weights.index is None or self.path.name in read_index(weights.index).files
        return weights if listed else replace(weights, index=None)

    def model(self, weights: Weights) -> Any:
        """Read the files of one model and put their tensors into one dict."""
        self.name = weights.base
        index = None if weights.index is None else self._index(weights.index)
        paths = [weights.index.with_name(n) for n in index.files] if index and weights.index else []
        missing = [p for p in paths if not p.exists()] if index else self._gaps(weights)
        self._missing(missing, index)
        here = [p for p in paths if p not in missing] if index else [f.path for f in weights.files]
        held = self._read_all(here)
        self._describe(held, len(here) + len(missing), index)
        if index:
            tensors = {h.path.name: h.tree for h in held if isinstance(h.tree, dict)}
            self.problems += compare(index, tensors)
        if len(held) == 1 and not missing:
            return held[0].tree
        tree = self._joined(held)
        if index and len(held) == len(index.files):
            self.problems += compare_size(index, (t for t in tree.values() if isinstance(t, Tensor)))
        return tree

    def _index(self, path: Path) -> Index:
        self._check_link(path)
        index = read_index(path)
        status = path.stat()
        self.bytes_read += status.st_size
        self.files.append(RankFile(path, None, "index", "read", status.st_size, status.st_mtime))
        return index

    def _check_link(self, path: Path) -> None:
        if not self.options.follow_symlinks and path != self.path:
            check_stays_inside(path, self.path if self.path.is_dir() else self.path.parent)

    def _gaps(self, weights: Weights) -> list[Path]:
        return [] if self.options.only_this_file else absent(weights.files)

    def _missing(self, paths: Sequence[Path], index: Index | None) -> None:
        for path in paths:
            self.files.append(RankFile(path, None, "", "missing", 0, None))
        if not paths:
            return
        names = [path.name for path in paths]
        lost = [name for name, file in index.weight_map.items() if file in names] if index else []
        told_by = (
            f"; {plural(len(lost), 'tensor')} are in no other file: {few(sorted(map(told, lost)))}" if lost else ""
        )
        self.problems.append(Problem("CK001", "error", f"no file {few(names)}{told_by}"))

    def _read_all(self, paths: Sequence[Path]) -> list[Held]:
        """Read what can be read; the only file, or the one that was asked for, must be."""
        errors: list[ReadError] = []
        held: list[Held] = []
        for path in paths:
            self._check_link(path)
            try:
                held.append(read_weights(path, self.options))
            except ReadError as error:
                if path == self.path:
                    raise
                errors.append(error)
                self._bad(path, error)
        if errors and not held:
            raise errors[0]
        for one in held:
            self.files.append(RankFile(one.path, None, "", "read", one.nbytes, one.modified))
            self.bytes_read += one.bytes_read
            self.names += one.names
        return held

    def _bad(self, path: Path, error: ReadError) -> None:
        why = str(error).removeprefix(f"{path}: ")
        self.problems.append(Problem("CK002", "error", f"{path.name} {why}"))
        status = path.stat()
        cut = "cut short" in why or "is empty" in why
        self.files.append(RankFile(path, None, "", "cut" if cut else "bad", status.st_size, status.st_mtime))

    def _joined(self, held: Sequence[Held]) -> dict[Any, Any]:
        """The tensors of several files in one dict; each must be in one of them only."""
        tree: dict[Any, Any] = {}
        where: dict[Any, str] = {}
        for one in held:
            if not isinstance(one.tree, dict):
                raise ReadError(one.path, f"holds a {type(one.tree).__name__}, not the names and tensors of a model")
            for name, value in one.tree.items():
                if name in where:
                    text = f"is in {where[name]} and in {one.path.name}; the first is shown"
                    self.problems.append(Problem("CK009", "error", text, None, str(name)))
                    continue
                tree[name], where[name] = value, one.path.name
        return tree

    def _describe(self, held: Sequence[Held], files: int, index: Index | None) -> None:
        """How it was saved, and which files are not what their names say."""
        kinds = sorted({".safetensors" if h.safetensors else ".bin" for h in held})
        count = "one" if files == 1 else str(files)
        self.saved_as.append(f"{count} {' and '.join(kinds)}{' and an index' if index else ''}, every tensor whole")
        for one in held:
            if one.safetensors != (one.path.suffix == ".safetensors"):
                what = "safetensors" if one.safetensors else "a torch.save file"
                self.problems.append(Problem("CK010", "warning", f"{one.path.name} is {what} by its content"))
            if one.sharded:
                text = f"{one.path.name} holds pieces of larger tensors: DCP wrote it, and its name does not say so"
                self.problems.append(Problem("CK011", "error", text))

    def _tell_of_others(self, found: Sequence[Weights], bases: set[tuple[str, str]]) -> None:
        """Weights in the folder that are not read: other spellings of the model, other models, left-overs."""
        read = {file.path for file in self.files}
        others = {f.path.name: (w.base, w.kind) for w in found for f in w.files if f.path not in read}
        if not others:
            return
        # One name for a file and for several: one of the two is left over, and nothing tells which.
        doubtful = not bases.isdisjoint(others.values())
        text = f"not read, since {self.files[0].path.name} is here: {few(sorted(others))}; name a file to open it"
        self.problems.append(Problem("CK013", "warning" if doubtful else "note", text))

    def checkpoint(self, tree: Any, beside: Beside, started: float) -> Checkpoint:
        """Put everything together."""
        sections = find_sections(tree)
        files = (*self.files, *beside.files)
        order = ("error", "warning", "note")
        problems = sorted([*self.problems, *beside.problems], key=lambda p: order.index(p.severity))
        whole = not any(f.status in ("missing", "cut", "bad") for f in files)
        read = sum(f.status == "read" for f in files)
        with_state = "; training state beside it" if beside.tree else ""
        world = beside.world_size if beside.world_size.value else Fact(1, ("every tensor whole",))
        return Checkpoint(
            path=self.path,
            name=self.name,
            format=NAME,
            saved_as="; ".join(dict.fromkeys(self.saved_as)) + with_state,
            tree=tree,
            files=files,
            world_size=world if len(files) > 1 else Fact(1, ("one file",)),
            step=find_step(files[0].path, sections),
            problems=tuple(problems),
            names=tuple(dict.fromkeys([*self.names, *beside.names])),
            bytes_expected=sum(f.nbytes for f in files) if whole else None,
            cost=ReadCost(read, time.perf_counter() - started, self.bytes_read + beside.bytes_read),
            # safetensors are sorted by dtype and name.
            module_order=not any(f.path.suffix == ".safetensors" for f in self.files),
        )
