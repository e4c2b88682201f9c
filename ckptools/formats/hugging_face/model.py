"""One model of a Hugging Face folder, put together from its weight files (safetensors or torch.save)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of, what_is
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import File
from ckptools.files.safetensors_header import Header, read_header, source_of
from ckptools.formats.hugging_face.files import (
    Index,
    ModelFiles,
    check_index,
    check_total_size,
    missing_files,
    missing_of_sets,
    read_index,
)
from ckptools.formats.hugging_face.flattened import Description, descriptions, put_together
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import Fault, file_now
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import KEY, Said
from ckptools.model.regions import Box
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.pickles.machine import gc_paused
from ckptools.text import few

MAX_LINES = 6
"""Up to this many missing files get a line each."""


@dataclass
class WeightModel:
    """One model of a folder, read from its weight files.

    Attributes:
        asked: the path that the user named: a file of it, its index, or the folder.
        files: its files, found or missing, and the index.
        weight_files: the content of the files that could be read.
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
        index, here, missing, unnamed = self._find()
        errors = [error for path in here if (error := self._read_file(path)) is not None]
        if errors and not self.weight_files:
            raise errors[0]
        lost = len(here) + len(missing) - len(self.weight_files)
        self.tree = self.weight_files[0].tree if len(here) == 1 and not missing and not index else self._joined()
        self._check_kinds()
        if index:
            self.problems += check_index(index, {one.path.name: one.tree for one in self.weight_files})
        if index and not lost:
            self.problems += check_total_size(index, (t for t in self.tree.values() if isinstance(t, Tensor)))
        self._put_together()
        if unnamed or (lost and not index):
            text = "what the missing or damaged files hold is not known, not even by name"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        return self

    @property
    def saved_as(self) -> str:
        """Describe how the model was saved."""
        kinds = " and ".join(sorted({".safetensors" if h.safetensors else ".bin" for h in self.weight_files}))
        count = sum(f.part != "index" for f in self.files)
        index = " and an index" if count < len(self.files) else ""
        return f"{'one' if count == 1 else count} {kinds}{index}, every tensor whole"

    def _find(self) -> tuple[Index | None, list[Path], list[Path], list[Path]]:
        """The index, the files that are here, those that are missing, and those of them that the index does not name.

        An index that was made again of what is left names no lost file, but the numbers in the names count them.
        """
        index, unnamed = None, list[Path]()
        if self.weights.index is None:
            here, missing = [f.path for f in self.weights.files], self._gaps()
        else:
            self._check_link(self.weights.index)
            index = read_index(self.weights.index)
            self.files.append(file_now(index.path, None, "index", "read"))
            self.bytes_read += self.files[-1].nbytes
            named = [index.path.with_name(name) for name in index.files]
            unnamed = [] if self._is_alone else missing_of_sets(named)
            paths = [*named, *unnamed]
            here = [path for path in paths if path.exists()]
            missing = sorted({*paths}.difference(here))
            unnamed = [path for path in missing if path in unnamed]
        names = [path.name for path in missing]
        if missing and not here:
            raise ReadError(self.asked, f"nothing of the model is here; no file {few(names)}")
        self.files += (RankFile(path, None, "", "missing", 0, None) for path in missing)
        lines = [(name,) for name in names] if len(names) <= MAX_LINES else [tuple(names)]
        unlisted = {path.name for path in unnamed}
        for line in lines:
            counted = f", which the others' names count and {index.path.name} does not name" if index else ""
            text = f"no file {few(line)}{counted if unlisted.issuperset(line) else ''}"
            self.problems.append(Problem(Code.FILE_MISSING, text, files=line))
        return index, here, missing, unnamed

    @property
    def _is_alone(self) -> bool:
        """Whether the user wants the file that was named, and no other."""
        return self.options.only_this_file and not self.asked.is_dir()

    def _gaps(self) -> list[Path]:
        """Missing files, by the numbers in the names of others."""
        if self._is_alone:
            return []
        beyond = [f.path.name for f in self.weights.files if f.number is not None and f.number > int(f.total or 0)]
        if beyond:
            self.problems.append(Problem(Code.STRAY_FILE, f"{few(beyond)}: a number beyond how many there are"))
        return missing_files(self.weights.files)

    def _check_link(self, path: Path) -> None:
        if not self.options.follow_symlinks and path != self.asked:
            check_stays_inside(path, self.asked if self.asked.is_dir() else self.asked.parent)

    def _read_file(self, path: Path) -> ReadError | None:
        """Read one file; return its fault, or raise it for the file that was asked for."""
        self._check_link(path)
        try:
            weights = read_weights(path, self.options)
        except ReadError as error:
            if path == self.asked:
                raise
            fault = Fault.of(error, path)
            self.problems.append(fault.problem(path.name))
            self.files.append(file_now(path, None, "", fault.status))
            return error
        self.weight_files.append(weights)
        self.files.append(RankFile(path, None, "", "read", weights.nbytes, weights.modified))
        self.bytes_read += weights.bytes_read
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

    def _put_together(self) -> None:
        """Put the parts of torchao's tensors together, by the descriptions that all files have."""
        described: dict[str, Description] = {}
        for one in self.weight_files:
            for name, told in one.described.items():
                if described.setdefault(name, told) != told:
                    text = f"{one.path.name} and another file describe {name} in two ways"
                    self.problems.append(Problem(Code.METADATA_CONTRADICTS, text, None, name))
        if described and isinstance(self.tree, dict):
            self.tree, problems = put_together(self.tree, described)
            self.problems += problems

    def _check_kinds(self) -> None:
        """Find files that are not of the kind in their names."""
        for one in self.weight_files:
            if one.safetensors != (one.path.suffix == ".safetensors"):
                what = "safetensors" if one.safetensors else "a torch.save file"
                self.problems.append(Problem(Code.NAME_CONTRADICTS, f"{one.path.name} is {what} by its content"))
            if one.sharded:
                text = f"{one.path.name} holds pieces of larger tensors: DCP wrote it, and its name does not say so"
                self.problems.append(Problem(Code.ONE_OF_SEVERAL, text))


SHARDING_INFO = "DCP_SHARDING_INFO"
MAX_LIKELY = 1 << 32
"""Longest header; a longer one means that the file is no safetensors."""


class WeightFile(NamedTuple):
    """The structure of one weight file: names and tensors of safetensors, or the whole tree of torch.save.

    A `sharded` one says that its tensors are pieces of larger ones (DCP); `names` are the dotted ones of its pickle;
    `described` is what torchao says of the tensors that the file holds in parts.
    """

    path: Path
    tree: Any
    nbytes: int
    modified: float
    bytes_read: int
    safetensors: bool
    sharded: bool = False
    names: tuple[str, ...] = ()
    described: Mapping[str, Description] = MappingProxyType({})


def is_safetensors(head: bytes, path: Path) -> bool:
    """Whether a file is meant as safetensors: it begins as one, or has the name and begins as nothing else."""
    return _begins_right(head) or (path.suffix == ".safetensors" and not content_of(head))


def _begins_right(head: bytes) -> bool:
    """Whether a length comes first, then an object."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_LIKELY


def read_weights(path: Path, options: Options) -> WeightFile:
    """Read the structure of one weight file.

    Raises:
        ReadError: it is damaged, or neither safetensors nor of torch.save.
    """
    with File(path) as file:
        head = head_of(file)
        if is_safetensors(head, path):
            return _of_safetensors(file, head, options)
    saved = options.read_file(path)
    return WeightFile(path, saved.tree, saved.nbytes, saved.modified, saved.bytes_read, False, names=saved.names)


def _of_safetensors(file: File, head: bytes, options: Options) -> WeightFile:
    what = "" if _begins_right(head) else what_is(head)
    if what:
        raise ReadError(file.path, f"is {what}")
    with gc_paused():
        header = read_header(file)
        tree = {name: _tensor(source_of(file, name, entry)) for name, entry in header.tensors.items()}
    if KEY in header.metadata:
        options.said[file.path] = Said(header.metadata[KEY])
    described = descriptions(header.metadata)
    return WeightFile(
        file.path, tree, file.size, file.modified, header.size, True, _says_pieces(header), described=described
    )


def _tensor(source: Source) -> Tensor:
    return Tensor(source.shape, source.dtype, (Shard(Box.whole(source.shape), None, source),))


def _says_pieces(header: Header) -> bool:
    """Whether DCP wrote it and a tensor in it begins elsewhere than at 0; a rank's own name is not needed for that."""
    try:
        info = json.loads(header.metadata.get(SHARDING_INFO, "{}"))
    except (ValueError, RecursionError):
        return True
    entries = info.values() if isinstance(info, dict) else ()
    return any(isinstance(e, dict) and any(e.get("saved_offsets") or ()) for e in entries)
