"""One model of a Hugging Face folder, read from its files: which are here, what they hold, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.location import check_stays_inside
from ckptools.formats.hugging_face.files import ModelFiles, missing_files
from ckptools.formats.hugging_face.index import Index, check_index, check_total_size, read_index
from ckptools.formats.hugging_face.tensors import WeightFile, read_weights
from ckptools.formats.options import Options
from ckptools.formats.shared.file_status import Fault, file_now
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.text import few

MAX_LINES = 6
"""Missing files that get a line each."""


@dataclass
class WeightModel:
    """One model of a folder, read from its weight files.

    Attributes:
        weights: its files by name.
        asked: what the user named: a file of it, its index, or the folder.
        options: how it is opened.
        tree: its names and tensors, once read.
        files: its files, found or missing, and the index.
        problems: what is wrong with them.
        weight_files: what the files that could be read hold.
        bytes_read: how much was read.
    """

    weights: ModelFiles
    asked: Path
    options: Options
    tree: Any = None
    files: list[RankFile] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    weight_files: list[WeightFile] = field(default_factory=list)
    bytes_read: int = 0

    def read(self) -> WeightModel:
        """Read the index and every weight file, and put their tensors together.

        Raises:
            ReadError: no file of it can be read, or not the one that was asked for.
            UnsafePathError: a file is a link out of the folder, or the index names one elsewhere.
        """
        index = self._index()
        here, missing = self._wanted(index)
        self._tell_missing(missing, here)
        errors = [error for path in here if (error := self._read_file(path)) is not None]
        if errors and not self.weight_files:
            raise errors[0]
        lost = len(here) + len(missing) - len(self.weight_files)
        self.tree = self.weight_files[0].tree if len(here) == 1 and not missing and not index else self._joined()
        self._check_kinds()
        if index:
            self._check_index(index, lost)
        elif lost:
            text = "what the missing or damaged files hold is not known, not even by name"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        return self

    @property
    def saved_as(self) -> str:
        """How the model was saved, in words for people."""
        kinds = " and ".join(sorted({".safetensors" if h.safetensors else ".bin" for h in self.weight_files}))
        count = sum(f.part != "index" for f in self.files)
        index = " and an index" if count < len(self.files) else ""
        return f"{'one' if count == 1 else count} {kinds}{index}, every tensor whole"

    def _index(self) -> Index | None:
        if self.weights.index is None:
            return None
        self._check_link(self.weights.index)
        index = read_index(self.weights.index)
        self.files.append(file_now(index.path, None, "index", "read"))
        self.bytes_read += self.files[-1].nbytes
        return index

    def _wanted(self, index: Index | None) -> tuple[list[Path], list[Path]]:
        """The files that are here and those that are missing."""
        if index is None:
            return [f.path for f in self.weights.files], self._gaps()
        paths = [index.path.with_name(name) for name in index.files]
        return [p for p in paths if p.exists()], [p for p in paths if not p.exists()]

    def _gaps(self) -> list[Path]:
        """The files that the numbers in the names of others speak of, and that are not here."""
        if self.options.only_this_file and not self.asked.is_dir():
            return []
        beyond = [f.path.name for f in self.weights.files if f.number is not None and f.number > int(f.total or 0)]
        if beyond:
            self.problems.append(Problem(Code.STRAY_FILE, f"{few(beyond)}: a number beyond how many there are"))
        return missing_files(self.weights.files)

    def _tell_missing(self, missing: Sequence[Path], here: Sequence[Path]) -> None:
        names = [path.name for path in missing]
        if missing and not here:
            raise ReadError(self.asked, f"nothing of the model is here; no file {few(names)}")
        self.files += (RankFile(path, None, "", "missing", 0, None) for path in missing)
        lines = names if len(names) <= MAX_LINES else [few(names)]
        self.problems += (Problem(Code.FILE_MISSING, f"no file {line}") for line in lines)

    def _check_link(self, path: Path) -> None:
        if not self.options.follow_symlinks and path != self.asked:
            check_stays_inside(path, self.asked if self.asked.is_dir() else self.asked.parent)

    def _read_file(self, path: Path) -> ReadError | None:
        """Read one file; return what is wrong with it, unless it is the one that was asked for."""
        self._check_link(path)
        try:
            held = read_weights(path, self.options)
        except ReadError as error:
            if path == self.asked:
                raise
            fault = Fault.of(error, path)
            self.problems.append(fault.problem(path.name))
            self.files.append(file_now(path, None, "", fault.status))
            return error
        self.weight_files.append(held)
        self.files.append(RankFile(path, None, "", "read", held.nbytes, held.modified))
        self.bytes_read += held.bytes_read
        return None

    def _joined(self) -> dict[Any, Any]:
        """The tensors of several files in one dict; each must be in one of them only."""
        tree: dict[Any, Any] = {}
        where: dict[Any, str] = {}
        for one in self.weight_files:
            if not isinstance(one.tree, dict):
                raise ReadError(one.path, f"holds a {type(one.tree).__name__}, not the names and tensors of a model")
            for name, value in one.tree.items():
                if name in where:
                    text = f"is in {where[name]} and in {one.path.name}; the first is shown"
                    self.problems.append(Problem(Code.STRAY_FILE, text, None, str(name)))
                    continue
                tree[name], where[name] = value, one.path.name
        return tree

    def _check_kinds(self) -> None:
        """Files that are not what their names say."""
        for one in self.weight_files:
            if one.safetensors != (one.path.suffix == ".safetensors"):
                what = "safetensors" if one.safetensors else "a torch.save file"
                self.problems.append(Problem(Code.NAME_CONTRADICTS, f"{one.path.name} is {what} by its content"))
            if one.sharded:
                text = f"{one.path.name} holds pieces of larger tensors: DCP wrote it, and its name does not say so"
                self.problems.append(Problem(Code.ONE_OF_SEVERAL, text))

    def _check_index(self, index: Index, lost: int) -> None:
        self.problems += check_index(index, {one.path.name: one.tree for one in self.weight_files})
        if not lost:
            self.problems += check_total_size(index, (t for t in self.tree.values() if isinstance(t, Tensor)))
