"""Nanotron: a safetensors file for each parameter, and for each slice of one; an optimizer file for each rank.

    checkpoint_metadata.json                         version, tp, dp, steps
    model/model/decoder/0/pp_block/attn/qkv_proj/
        model_bias.safetensors                       a parameter that every rank has, or a tied one: written once
        model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors
    optimizer/optimizer_config.json                  type and sizes
    optimizer/optimizer_pp-0-of-2_tp-1-of-2_exp-0-of-1.pt
    lr_scheduler/  random/

A file holds one tensor, `data`. The path below `model/`, with the part of the file's name behind `model_`, is the
parameter's name. A slice's header has `unsharded_shape` and `local_global_slices_pairs`, pairs `local#global` joined by
`;`, each one `start,stop,step` per dimension, joined by `|`. An optimizer file is a torch state dict by number, with
`names` by number; its moments are cut as the weight is. Names there list what each rank trains, so that a parameter's
file that is missing is noticed. ZeRO-1 (`ZeroDistributedOptimizer`) flattens and cuts the moments once more, and
experts over ranks have slices of another kind: both are refused by name.

Source: nanotron/serialize/{main,weights,optimizer,utils,metadata}.py, nanotron/optim/named_optimizer.py of 0.4; checked
on a checkpoint of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError, UnknownFormatError
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import File, reading
from ckptools.files.safetensors_header import read_header, source_of
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, file_now
from ckptools.formats.shared.merge import Merge
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard, Source, Tensor, in_rank_order
from ckptools.model.tree import leaf_at
from ckptools.training_state.parameter_names import SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "nanotron"
READS = "Nanotron: a safetensors file per parameter and slice, optimizer files per rank"
KNOWN_BY = "checkpoint_metadata.json beside model/; any file below it"

METADATA = "checkpoint_metadata.json"
CONFIG = "optimizer_config.json"
LEVELS = 12
"""Most folders above a file that are looked at: a module's file lies as deep as its name has parts."""

RANKS = r"pp-rank-(?P<pp>\d{1,5})-of-(?P<pps>\d{1,5})_tp-rank-(?P<tp>\d{1,5})-of-(?P<tps>\d{1,5})"
WEIGHT = re.compile(rf"model_(?P<name>.+?)(?:_{RANKS}(?P<experts>_exp-rank-\d+-of-\d+)?)?\.safetensors")
OPTIMIZER = re.compile(
    r"optimizer_pp-(?P<pp>\d{1,5})-of-(?P<pps>\d{1,5})(?P<dp>_dp-\d+-of-\d+)?"
    r"_tp-(?P<tp>\d{1,5})-of-(?P<tps>\d{1,5})_exp-(?P<exp>\d{1,5})-of-(?P<exps>\d{1,5})\.pt"
)
MAX_RANKS = 1 << 12
MAX_PIECES = 1 << 12
MAX_DEPTH = 32
"""Folders of the names of modules, one in the other."""
ZERO_1 = "ZeRO-1 of Nanotron cuts flattened moments once more, and they are not joined; --only model writes the model"
EXPERTS = "experts that are spread over ranks are not joined"


def detect(path: Path) -> bool:
    """A folder with Nanotron's metadata beside `model`, or what lies below one."""
    return _root(path) is not None


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint that a folder or a file belongs to.

    Raises:
        ReadError: its metadata, or the file that was named, cannot be read.
        UnknownFormatError: its metadata states no sizes.
        UnsafePathError: a file is a link out of the folder.
    """
    return _NanotronFolder(CheckpointBuilder(NAME, path), _root(path) or path, options).checkpoint()


def _root(path: Path) -> Path | None:
    """The checkpoint's folder, for a path in it."""
    folders = [path, *path.absolute().parents[:LEVELS]]
    return next((f for f in folders if (f / METADATA).is_file() and (f / "model").is_dir()), None)


class SlicePair(NamedTuple):
    """A box of a slice, and the box of the whole parameter that it is."""

    local: Box
    whole: Box


@dataclass(frozen=True)
class Slice:
    """One file of a parameter: the tensor in it, and its pieces of the whole."""

    place: tuple[int, int] | None
    source: Source
    shape: Ints
    pieces: tuple[SlicePair, ...]

    def shards(self, source: Source, rank: int | None) -> Iterator[Shard]:
        """The shards of a tensor that is cut as this one is."""
        for local, whole in self.pieces:
            yield Shard(whole, rank, source.part(local))


def pieces_of(text: str, local: Ints, whole: Ints) -> tuple[SlicePair, ...]:
    """The pieces in `local_global_slices_pairs`.

    Raises:
        ValueError: they are no boxes, or do not fill the slice.
    """
    pairs = text.split(";")
    if len(pairs) > MAX_PIECES:
        raise ValueError("too many pieces")
    found = tuple(
        SlicePair(*(_box(p, s) for p, s in zip(pair.split("#"), (local, whole), strict=True))) for pair in pairs
    )
    if any(a.sizes != b.sizes for a, b in found) or sum(p.local.numel for p in found) != prod(local):
        raise ValueError("pieces that do not fill the slice")
    return found


def _files_in(folder: Path, suffix: str, depth: int) -> Iterator[Path]:
    """The files with a suffix in and below a folder; none where it does not exist."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file() and path.name.endswith(suffix):
            yield path
        elif depth and not path.is_symlink():
            yield from _files_in(path, suffix, depth - 1)


def _box(text: str, shape: Ints) -> Box:
    """The box that `start,stop,step|…` says of a tensor."""
    offsets, sizes = [], []
    for part, n in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if word == "None" else int(word) for word in part.split(","))
        low, high = start or 0, n if stop is None else stop
        if step not in (None, 1) or not 0 <= low <= high <= n:
            raise ValueError(f"a slice {part} of {n}")
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def _shape(text: str) -> Ints:
    words = [word for word in text.strip("()[] ").replace("torch.Size(", "").split(",") if word.strip()]
    return tuple(int(word) for word in words)


class _NanotronFolder:
    """The steps of opening one checkpoint, with what they find on the way."""

    def __init__(self, builder: CheckpointBuilder, folder: Path, options: Options) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.options = folder, options
        found = read_json(folder / METADATA)
        if not isinstance(found, dict):
            raise ReadError(folder / METADATA, f"holds a {type(found).__name__}, expected sizes and steps")
        self.metadata: dict[Any, Any] = found
        own = (p for p in (folder / METADATA, folder / "optimizer" / CONFIG) if p.is_file())
        self.files: list[RankFile] = [file_now(p, None, p.name, "read") for p in own]
        self.faults: dict[Path, Fault] = {}
        self.slices: dict[str, list[Slice]] = {}
        self.notes: dict[str, str] = {}
        self.tp, self.pp = self._size("tp"), 1
        self.dp = self._size("dp")
        for path in self._below("model", ".safetensors"):
            self._read_weight(path)
        self.optimizers = dict(self._read_optimizers())

    def _size(self, key: str) -> int:
        size = self.metadata.get(key)
        if type(size) is not int or not 0 < size <= MAX_RANKS:
            text = f"a Nanotron checkpoint whose {METADATA} states no number of ranks under {key}"
            raise UnknownFormatError(self.builder.path, text)
        return size

    def _below(self, part: str, suffix: str) -> list[Path]:
        """The files of a part, in the order of their names."""
        with reading(self.folder):
            found = sorted(_files_in(self.folder / part, suffix, MAX_DEPTH))
        for path in () if self.options.follow_symlinks else found:
            check_stays_inside(path, self.folder)
        return found

    def _rank(self, place: tuple[int, int] | None) -> int | None:
        """The lowest global rank of a pipeline and tensor-parallel rank: pipeline stages, data, tensor."""
        return None if place is None else (place[0] * self.dp) * self.tp + place[1]

    def _read_weight(self, path: Path) -> None:
        named = WEIGHT.fullmatch(path.name)
        if named is None:
            return
        fqn = ".".join([*path.parent.relative_to(self.folder / "model").parts, named["name"]])
        place = (int(named["pp"]), int(named["tp"])) if named["pp"] is not None else None
        if place is not None:
            self.pp = max(self.pp, min(int(named["pps"]), MAX_RANKS))
        part = path.relative_to(self.folder).as_posix()
        try:
            with File(path) as file:
                header = read_header(file)
                if list(header.tensors) != ["data"]:
                    raise ReadError(path, "holds other tensors than `data`; not of Nanotron, or damaged")
                source = source_of(file, "data", header.tensors["data"])
                self._add(path, fqn, place, source, header.metadata, (int(named["tps"]) if place else 1))
        except ReadError as error:
            if path == self.builder.path:
                raise
            self.faults[path] = fault = Fault.of(error, path)
            self.files.append(file_now(path, self._rank(place), part, fault.status))
            return
        if named["experts"]:
            self.notes[fqn] = EXPERTS
        self.builder.add_read(1, header.size)
        self.files.append(file_now(path, self._rank(place), part, "read"))

    def _add(
        self, path: Path, fqn: str, place: tuple[int, int] | None, source: Source, stated: Mapping[str, str], tps: int
    ) -> None:
        """Note one file of a parameter.

        Raises:
            ReadError: its name and its header contradict each other.
        """
        if place is None or "unsharded_shape" not in stated:
            if place is not None or "unsharded_shape" in stated:
                raise ReadError(path, "has a name of a slice and no unsharded_shape, or the other way round")
            whole = Box.whole(source.shape)
            self.slices.setdefault(fqn, []).append(Slice(None, source, source.shape, (SlicePair(whole, whole),)))
            return
        if tps != self.tp:
            raise ReadError(path, f"is of {tps} tensor-parallel ranks by its name, {METADATA} states {self.tp}")
        try:
            shape = _shape(stated["unsharded_shape"])
            pieces = pieces_of(stated["local_global_slices_pairs"], source.shape, shape)
        except (KeyError, ValueError, TypeError) as error:
            raise ReadError(path, f"says of no pieces where they are ({error})") from error
        self.slices.setdefault(fqn, []).append(Slice(place, source, shape, pieces))

    def _read_optimizers(self) -> Iterator[tuple[tuple[int, int], dict[Any, Any]]]:
        here = self._below("optimizer", ".pt") if (self.folder / "optimizer").is_dir() else []
        names = [(path, found) for path in here if (found := OPTIMIZER.fullmatch(path.name))]
        self.zero_1 = any(found["dp"] for _, found in names)
        self.odd_experts = any(int(found["exps"]) > 1 for _, found in names)
        for path, found in names:
            place, part = (int(found["pp"]), int(found["tp"])), path.relative_to(self.folder).as_posix()
            self.pp = max(self.pp, min(int(found["pps"]), MAX_RANKS))
            try:
                saved = self.options.read_file(path)
                if not isinstance(saved.tree, dict) or not isinstance(saved.tree.get("state"), dict):
                    raise ReadError(path, "has no state; not an optimizer of Nanotron, or damaged")
            except ReadError as error:
                if path == self.builder.path:
                    raise
                self.faults[path] = fault = Fault.of(error, path)
                self.files.append(file_now(path, self._rank(place), part, fault.status))
                continue
            self.builder.add_saved([saved])
            self.files.append(file_now(path, self._rank(place), part, "read"))
            yield place, saved.tree

    def checkpoint(self) -> Checkpoint:
        """Put everything together."""
        tree: dict[Any, Any] = {"model": {fqn: self._weight(fqn) for fqn in sorted(self.slices)}}
        if self.optimizers:
            tree["optimizer"] = self._optimizer()
        tree |= {"checkpoint_metadata": self.metadata, **self._others()}
        self._check_files()
        step = leaf_at(self.metadata, ("metas", "last_train_step"))
        step = step if type(step) is int and step >= 0 else None
        world = Fact(self.tp * self.pp * self.dp, (METADATA, "file names"))
        return self.builder.checkpoint(
            name=self.folder.name,
            saved_as=f"Nanotron, tensor parallel {self.tp} x pipeline {self.pp}",
            tree=tree,
            files=self.files,
            world_size=world,
            step=Fact(step, (METADATA,)) if step is not None else find_step(self.folder, find_sections(tree)),
            module_order=SORTED,
            bytes_expected=rank_checks.expected_bytes(self.files),
        )

    def _weight(self, fqn: str) -> Tensor:
        slices = self.slices[fqn]
        first = slices[0]
        odd = next((s for s in slices if (s.shape, s.source.dtype) != (first.shape, first.source.dtype)), None)
        if odd is not None:
            text = f"{odd.source.dtype} {list(odd.shape)}, another file says {first.source.dtype} {list(first.shape)}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, self._rank(odd.place), f"model.{fqn}"))
        # Tensor-parallel ranks have their slices in order, so a header in another rank's place is another rank's.
        placed = sorted((s.place, s.pieces[0].whole.offsets) for s in slices if s.place is not None)
        swapped = next((p for (_, a), (p, b) in pairwise(placed) if a >= b), None) if fqn not in self.notes else None
        if swapped is not None and odd is None:
            text = f"the file of tp-rank {swapped[1]} holds the slice of another rank than its name says"
            self.problems.append(Problem(Code.STRAY_FILE, text, self._rank(swapped), f"model.{fqn}"))
        note = self.notes.get(fqn, "") or ("its files contradict each other" if odd is not None else "")
        return self._joined(fqn, [(s, s.source) for s in slices], note)

    def _joined(self, fqn: str, found: list[tuple[Slice, Source]], note: str) -> Tensor:
        first, source = found[0]
        shards = in_rank_order(s for cut, at in found for s in cut.shards(at, self._rank(cut.place)))
        kind: Any = "tensor_parallel" if first.place is not None else "plain"
        return Tensor(first.shape, source.dtype, () if note else shards, kind, world_size=self.tp, note=note)

    def _optimizer(self) -> dict[str, Any]:
        merge = Merge()
        gathered: dict[str, dict[str, list[tuple[tuple[int, int], Any]]]] = {}
        groups: dict[str, dict[str, Any]] = {}
        for place, tree in sorted(self.optimizers.items()):
            names = tree.get("names")
            names = names if isinstance(names, dict) else {}
            for number, entry in tree["state"].items():
                for slot, value in entry.items() if isinstance(entry, dict) else ():
                    fqn = names.get(number, f"?{number} of pp {place[0]}, tp {place[1]}")
                    gathered.setdefault(str(fqn), {}).setdefault(str(slot), []).append((place, value))
            for group in tree.get("param_groups") or ():
                kept = {k: v for k, v in group.items() if k != "params"}
                joined = groups.setdefault(repr(kept), {**kept, "params": {}})
                joined["params"] |= dict.fromkeys(str(names.get(i, f"?{i}")) for i in group.get("params") or ())
        lost = sorted(fqn for fqn in gathered if fqn not in self.slices and not fqn.startswith("?"))
        if lost:
            text = f"{len(lost)} parameters that the optimizer names have no file in model/: {', '.join(lost[:3])}"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        state = {f: {s: self._slot(merge, f, s, v) for s, v in slots.items()} for f, slots in gathered.items()}
        self.problems += merge.problems
        listed = [{**group, "params": list(group["params"])} for group in groups.values()]
        return {"state": state, "param_groups": listed}

    def _slot(self, merge: Merge, fqn: str, slot: str, values: list[tuple[tuple[int, int], Any]]) -> Any:
        """One slot of a parameter's state: cut as the parameter is, or the same on every rank that has it."""
        first = values[0][1]
        # A tied parameter is written by its first stage alone, and trained by others, cut over the same ranks.
        slices = self.slices.get(fqn, ())
        cut = (
            {s.place[1] if s.place else None: s for s in slices}
            if len({s.place for s in slices}) == len(slices)
            else {}
        )
        if not isinstance(first, Tensor) or not first.shape:
            return merge.trees([(self._rank(p) or 0, v) for p, v in values], ("optimizer", "state", fqn, slot))
        note = ZERO_1 if self.zero_1 else EXPERTS if self.odd_experts else ""
        found: list[tuple[Slice, Source]] = []
        for place, value in values:
            own = cut.get(place[1]) or cut.get(None)
            source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
            if own is None or source is None or value.shape != own.source.shape or value.dtype != first.dtype:
                note = note or f"of {list(value.shape) if isinstance(value, Tensor) else value}, unlike its parameter"
            else:
                found.append((replace(own, place=place), source))
        if note or not found:
            return replace(first, shards=(), note=note or "its parameter has no file, so nothing says how it was cut")
        return self._joined(fqn, found, "")

    def _others(self) -> dict[str, Any]:
        """Schedulers and random states, each rank's file as it is."""
        found: dict[str, Any] = {}
        for part in ("lr_scheduler", "random"):
            for path in self._below(part, ".pt") if (self.folder / part).is_dir() else ():
                try:
                    saved = self.options.read_file(path)
                except ReadError as error:
                    self.faults[path] = fault = Fault.of(error, path)
                    self.files.append(file_now(path, None, path.relative_to(self.folder).as_posix(), fault.status))
                    continue
                self.builder.add_saved([saved])
                self.files.append(file_now(path, None, path.relative_to(self.folder).as_posix(), "read"))
                found.setdefault(part, {})[path.stem] = saved.tree
        return {part: next(iter(of.values())) if list(of) == [part] else of for part, of in found.items()}

    def _check_files(self) -> None:
        """Problems of files that cannot be read, and of ranks that have no optimizer file."""
        for file in self.files:
            if file.path in self.faults:
                self.problems.append(self.faults[file.path].problem(file.part, file.rank))
        if not self.optimizers and not any("optimizer/" in f.part for f in self.files):
            text = "no optimizer files: a parameter's file that is missing from model/ is not noticed"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text, severity="warning"))
            return
        here: set[Any] = set(self.optimizers) | {f.rank for f in self.files if f.path in self.faults}
        for place in ((p, t) for p in range(self.pp) for t in range(self.tp)):
            if place not in here and self._rank(place) not in here and not self.zero_1 and not self.odd_experts:
                name = f"optimizer/optimizer_pp-{place[0]}-of-{self.pp}_tp-{place[1]}-of-{self.tp}_exp-0-of-1.pt"
                self.files.append(RankFile(self.folder / name, self._rank(place), name, "missing", 0, None))
                self.problems.append(Problem(Code.FILE_MISSING, f"no file {name}", self._rank(place)))
