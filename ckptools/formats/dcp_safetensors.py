"""Shards that torch's `HuggingFaceStorageWriter(save_distributed=True)` writes: each rank's pieces as safetensors.

    shard-00003-model-00001-of-00002.safetensors        rank 2's pieces of the tensors of file 1 of 2

The number in the name is the rank plus one. `__metadata__` holds `DCP_SHARDING_INFO`, a JSON of name to
`{"saved_offsets": [...]}`: the offsets of a piece in the whole tensor. The size of the whole is not stated; as in
torch's own reader it is inferred from the ends of its pieces, which must cover it exactly. So a missing last rank, or
the last file of that rank, leaves no trace, unless a `config.json` beside them states a larger size. Completeness is
known only if the shapes are: from the user, an optimizer beside them, or the files that `consolidate_safetensors_files`
made above. A rank that owns nothing of a file writes none. Replicated tensors are in one rank's file.

With `enable_consolidation=True` the shards are in `sharded/`, below the consolidated model that `hugging_face` reads.
Objects other than tensors are written before the safetensors of their file, which neither torch's reader nor this one
can undo. Source: torch/distributed/checkpoint/hf_storage.py, _hf_utils.py, filesystem.py,
_consolidate_hf_safetensors.py of torch 2.13; checked on its files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import CkptoolsError, ReadError, UsageError
from ckptools.files.opening import File, JsonError, content_of, head_of, parse_json, reading
from ckptools.files.safetensors_header import Header, read_header, source_of
from ckptools.formats import hugging_face
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.formats.shared.given_names_and_shapes import shapes_from_checkpoint
from ckptools.formats.shared.model_config import config_beside
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.facts import Fact, ModelConfig
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error
from ckptools.rules.files import FileClaims, misplaced, missing
from ckptools.rules.stated_model import stated_shapes
from ckptools.text import plural
from ckptools.training_state.optimizers import SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "dcp_safetensors"
READS = "safetensors shards of DCP: torch's HuggingFaceStorageWriter with save_distributed"
KNOWN_BY = "shard-00001-model-00001-of-00002.safetensors, or a folder of such files"
TRIED = ("torch 2.13.0",)
JOINS = ("model",)

FILE = re.compile(r"shard-(\d{1,6})-model-(\d{1,6})-of-(\d{1,6})\.safetensors")
MAX_RANKS = 1 << 16
MAX_OFFSET = 1 << 62
INFO = "DCP_SHARDING_INFO"
CONSOLIDATED_FROM = "sharded"
"""The folder with the shards of a consolidated model, below that model."""


class ShardFile(NamedTuple):
    """A rank's shard of file `part`, counted from 1, of a model in `parts` files."""

    path: Path
    rank: int
    part: int
    parts: int


def parse(path: Path) -> ShardFile | None:
    """Parse the name of a shard file; None for other names."""
    found = FILE.fullmatch(path.name)
    if found is None or int(found[1]) == 0:
        return None
    return ShardFile(path, int(found[1]) - 1, int(found[2]), int(found[3]))


def detect(path: Path) -> bool:
    """Whether a path is a file with such a name, or a folder with such files."""
    return bool(files_in(path)) if path.is_dir() else parse(path) is not None and path.is_file()


def files_in(folder: Path) -> list[ShardFile]:
    """The shards in a folder, in rank order."""
    with reading(folder):
        found = [f for f in map(parse, folder.iterdir()) if f is not None]
    return sorted(found, key=lambda f: (f.rank, f.part))


def read(path: Path, options: Options) -> Checkpoint:
    """Open the shards in a folder, or beside the named shard.

    Raises:
        ReadError: one of them is damaged, or contradicts another.
        UsageError: the folder contains shards of two checkpoints.
    """
    builder = CheckpointBuilder(NAME, path)
    folder = path if path.is_dir() else path.parent
    files = files_in(folder)
    totals = sorted({f.parts for f in files})
    if len(totals) > 1:
        listed = ", ".join(f"-of-{n:05d}" for n in totals[:6])
        raise UsageError(folder, f"holds shards of {len(totals)} checkpoints ({listed}); put each into a folder")
    if options.only_this_file:
        files = [f for f in files if path in (folder, f.path)]
    for file in files:
        if file.path != path:
            options.check_link(file.path, folder)
    alone = options.only_this_file and path != folder
    config, _ = config_beside(folder, options, hugging_face=False)
    return _SafetensorsPieces(builder, files, _whole_shapes(folder, options), alone, config).checkpoint(files)


@dataclass
class _Whole:
    """A tensor while its pieces are collected in rank order; `reach` has the sizes up to their ends."""

    dtype: str
    shards: list[Shard]
    reach: Ints


class _SafetensorsPieces:
    """The pieces in some files; `shapes` are those of whole tensors, as far as they are known."""

    def __init__(
        self,
        builder: CheckpointBuilder,
        files: Sequence[ShardFile],
        shapes: Mapping[str, Ints],
        alone: bool,
        config: ModelConfig | None,
    ) -> None:
        self.builder, self.path, self.problems = builder, builder.path, builder.problems
        self.shapes, self.alone, self.config = shapes, alone, config
        self.wholes: dict[str, _Whole] = {}
        self.files = builder.files
        self.world = max(f.rank for f in files) + 1
        for file in files:
            self._read(file)

    def _read(self, named: ShardFile) -> None:
        part = str(named.part) if named.parts > 1 else ""
        try:
            with File(named.path) as file:
                header, offsets = _header(file)
                for name, entry in header.tensors.items():
                    self._add(name, Shard(Box(offsets[name], entry.shape), named.rank, source_of(file, name, entry)))
        except ReadError as error:
            self.builder.add_fault(named.path, error, named.rank, part)
            return
        self.builder.add_read(0, header.size)
        self.builder.add_file(named.path, named.rank, part)

    def _add(self, name: str, shard: Shard) -> None:
        assert shard.source is not None
        whole = self.wholes.setdefault(name, _Whole(shard.source.dtype, [], shard.box.ends))
        if shard.source.dtype != whole.dtype or len(shard.box.sizes) != len(whole.reach):
            has = f"{shard.source.dtype} of {len(shard.box.sizes)} dimensions"
            text = f"{has}, another rank has {whole.dtype} of {len(whole.reach)}; the shards are not of one save"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, shard.rank, name))
            return
        whole.shards.append(shard)
        whole.reach = tuple(map(max, whole.reach, shard.box.ends))

    def _stated(self) -> dict[str, Ints]:
        """Shapes that the config states for tensors that seem smaller, if their last piece is not a shorter one.

        torch cuts a dimension into equal pieces and a shorter last one, behind which nothing can be missing.
        """
        if self.config is None:
            return {}
        reached = {name: whole.reach for name, whole in self.wholes.items() if name not in self.shapes}
        larger = {}
        for name, least in stated_shapes(reached, self.config).items():
            shards, reach = self.wholes[name].shards, reached[name]
            short = [d for d, n in enumerate(least) if n > reach[d]]
            if short and all(
                max(s.box.sizes[d] for s in shards if s.box.ends[d] == reach[d]) == max(s.box.sizes[d] for s in shards)
                for d in short
            ):
                larger[name] = tuple(map(max, least, reach))
        return larger

    def _tensor(self, name: str, whole: _Whole, stated: Mapping[str, Ints]) -> Tensor:
        shape = stated.get(name) or self.shapes.get(name, whole.reach)
        if len(shape) != len(whole.reach) or any(n < reached for n, reached in zip(shape, whole.reach, strict=True)):
            text = f"its pieces reach to {list(whole.reach)}, and its shape is said to be {list(shape)}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, name))
            shape = whole.reach
        cut = len({s.box for s in whole.shards}) > 1 or whole.shards[0].box.sizes != shape
        tensor = Tensor(shape, whole.dtype, tuple(whole.shards), "chunks" if cut else "plain", world_size=self.world)
        problem = cover_problem(tensor, name)
        if problem is not None and name in stated and self.config is not None:
            text = f"{self.config.name} states a shape of {list(shape)}, and its pieces reach to {list(whole.reach)}"
            problem = replace(problem, message=f"{text}; {problem.message}")
        self.problems += [problem] if problem else []
        return tensor

    def _check_files(self, files: Sequence[ShardFile]) -> None:
        """Find ranks without any file, and files that only some ranks have."""
        if self.alone:
            text = f"{self.path.name} is one file of several, and only this one is read"
            self.problems.append(Problem(Code.ONE_OF_SEVERAL, text))
            return
        ranks = {f.rank for f in files}
        for rank in range(min(self.world, MAX_RANKS)):
            if rank not in ranks:
                path = files[0].path.with_name(f"shard-{rank + 1:05d}-model-00001-of-{files[0].parts:05d}.safetensors")
                self.builder.add_missing(path, rank, more=", nor another of this rank")
        for rank in sorted(ranks):
            parts = {f.part for f in files if f.rank == rank}
            absent = len(set(range(1, min(files[0].parts, MAX_RANKS) + 1)) - parts)
            if absent:
                text = (
                    f"file of {plural(absent, 'part')} of {files[0].parts}; a rank that owns nothing of it writes none"
                )
                self.problems.append(missing(text, rank, kind="", severity="warning"))

    def _check_copies(self) -> None:
        """Find files with the same pieces: DCP writes each piece once, so one was copied over another."""
        pieces: dict[Path, set[tuple[str, Box]]] = {}
        ranks: dict[Path, int | None] = {}
        for name, whole in self.wholes.items():
            for shard in whole.shards:
                if shard.source is not None and shard.box.numel:
                    pieces.setdefault(shard.source.path, set()).add((name, shard.box))
                    ranks[shard.source.path] = shard.rank
        first: dict[frozenset[tuple[str, Box]], Path] = {}
        others = {path: first.setdefault(frozenset(pieces[path]), path) for path in sorted(pieces)}
        verb, by = "has the pieces of", "each piece is written once"
        self.problems += misplaced(
            FileClaims(path, ranks[path], {"file": path.name}, {"file": other.name}, by, verb)
            for path, other in others.items()
        )

    def _check_names(self) -> None:
        """Find tensors that only lost files had, which leave no gap."""
        lost = any(f.status != "read" for f in self.files)
        absent = sorted(set(self.shapes) - set(self.wholes))
        unknown = set(self.wholes) - set(self.shapes)
        if absent:
            text = (
                f"{plural(len(absent), 'tensor')} of the whole model, in no shard here: "
                f"{', '.join(map(describe_for_error, absent[:3]))}"
            )
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        elif lost and (unknown or not self.shapes):
            text = "files are missing or damaged, and tensors that only they have are not known, not even by name"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        elif not self.alone and unknown and (not self.shapes or self._lacks_a_file()):
            text = "no file states the shapes, which are taken from where the pieces end: a last rank may be missing"
            self.problems.append(Problem(Code.SIZE_UNSTATED, text))

    def _lacks_a_file(self) -> bool:
        """Whether a rank lacks a file: either the rank owned no tensor of that file, or the file was lost."""
        return any(p.kind is Code.FILE_MISSING and p.severity == "warning" for p in self.problems)

    def checkpoint(self, files: Sequence[ShardFile]) -> Checkpoint:
        stated = self._stated()
        tree = {name: self._tensor(name, whole, stated) for name, whole in self.wholes.items()}
        self._check_files(files)
        self._check_copies()
        self._check_names()
        per_rank = f", {files[0].parts} files per rank" if files[0].parts > 1 else ""
        self.builder.add_read(len(self.files), 0)
        return self.builder.checkpoint(
            name=files[0].path.parent.absolute().name or "checkpoint",
            saved_as=f"DCP safetensors shards{per_rank}",
            tree=tree,
            files=self.files,
            world_size=Fact(self.world, ("shard numbers",)),
            step=find_step(files[0].path, find_sections(tree)),
            module_order=SORTED,
            bytes_expected=None if self.problems else sum(f.nbytes for f in self.files),
        )


def _header(file: File) -> tuple[Header, dict[str, Ints]]:
    """The header of a shard, and the offsets of each of its pieces."""
    if content_of(head_of(file)):
        raise ReadError(file.path, "begins with objects that DCP wrote in front of its tensors, which hides them")
    header = read_header(file)
    try:
        info = parse_json(header.metadata.get(INFO, "null"))
    except JsonError as error:
        raise ReadError(file.path, f"{INFO} is no JSON that can be read: {error}") from error
    if not isinstance(info, dict):
        raise ReadError(file.path, f"its header has no {INFO}, which says where its pieces belong")
    return header, {name: _offsets(file, name, info.get(name), len(e.shape)) for name, e in header.tensors.items()}


def _offsets(file: File, name: str, stated: Any, ndim: int) -> Ints:
    offsets = stated.get("saved_offsets") if isinstance(stated, dict) else None
    listed = offsets if isinstance(offsets, list) else [None]
    if len(listed) != ndim or not all(type(o) is int and 0 <= o < MAX_OFFSET for o in listed):
        text = (
            f"{INFO}: {describe_for_error(name)}: expected {ndim} saved_offsets, "
            f"found {describe_for_error(offsets)}; damaged"
        )
        raise ReadError(file.path, text)
    return tuple(listed)


def _whole_shapes(folder: Path, options: Options) -> Mapping[str, Ints]:
    """Shapes of the whole tensors: the given ones, else those of the consolidated model above `sharded/`."""
    if options.shapes is not None:
        return options.shapes.shapes
    above = folder.absolute().parent
    if folder.absolute().name != CONSOLIDATED_FROM or not hugging_face.detect(above):
        return {}
    try:
        return shapes_from_checkpoint(hugging_face.read(above, Options()), above).shapes
    except CkptoolsError:
        return {}
