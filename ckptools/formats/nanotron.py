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
`;`, each one `start,stop,step` per dimension, joined by `|`. The optimizer lists the parameters that each rank trains,
so that a missing parameter file is noticed. Experts over ranks have slices of another kind and are refused by name.

Source: nanotron/serialize/{main,weights,optimizer,utils,metadata}.py of 0.4; checked on a checkpoint of it. Files of
ZeRO-1 were made by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError, UnknownFormatError
from ckptools.files.opening import File, read_json, reading
from ckptools.files.safetensors_header import read_header, source_of
from ckptools.formats.flat_parameters.units import boxes_of
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.tensor_parallel import BoxPair
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import leaf_at
from ckptools.pickles.reader import Saved
from ckptools.rules.files import FileClaims, misplaced, missing
from ckptools.text import few
from ckptools.training_state.optimizers import SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

# -- the files of a Nanotron checkpoint: the part and rank of each, and the unreadable ones ----------------------------

METADATA = "checkpoint_metadata.json"
CONFIG = "optimizer_config.json"
MAX_RANKS = 1 << 12
MAX_DEPTH = 32
"""Nesting depth of folders that are named after modules."""


def _files_in(folder: Path, suffix: str, depth: int) -> Iterator[Path]:
    """The files with a suffix in and below a folder; empty if it does not exist."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file() and path.name.endswith(suffix):
            yield path
        elif depth and not path.is_symlink():
            yield from _files_in(path, suffix, depth - 1)


class NanotronFiles:
    """A checkpoint's files while it is opened, with the problems found on the way.

    Attributes:
        tp, pp, dp: numbers of tensor-parallel ranks, pipeline stages and data-parallel ranks.
    """

    def __init__(self, builder: CheckpointBuilder, folder: Path, options: Options) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.options = folder, options
        found = read_json(folder / METADATA)
        if not isinstance(found, dict):
            raise ReadError(folder / METADATA, f"holds a {type(found).__name__}, expected sizes and steps")
        self.metadata: dict[Any, Any] = found
        for path in (folder / METADATA, folder / "optimizer" / CONFIG):
            if path.is_file():
                builder.add_file(path, None, path.name)
        self.tp, self.pp, self.dp = self._size("tp"), 1, self._size("dp")

    def _size(self, key: str) -> int:
        size = self.metadata.get(key)
        if type(size) is not int or not 0 < size <= MAX_RANKS:
            text = f"a Nanotron checkpoint whose {METADATA} states no number of ranks under {key}"
            raise UnknownFormatError(self.builder.path, text)
        return size

    def has_stages(self, stages: int) -> None:
        """Note the number of pipeline stages in a file's name, its only source."""
        self.pp = max(self.pp, min(stages, MAX_RANKS))

    def below(self, part: str, suffix: str) -> list[Path]:
        """The files of a part, in the order of their names.

        Raises:
            UnsafePathError: one is a link out of the folder.
        """
        with reading(self.folder):
            found = sorted(_files_in(self.folder / part, suffix, MAX_DEPTH))
        for path in found:
            self.options.check_link(path, self.folder)
        return found

    def part(self, path: Path) -> str:
        """The path of a file below the folder."""
        return path.relative_to(self.folder).as_posix()

    def rank(self, place: tuple[int, int] | None, dp: int = 0) -> int | None:
        """The global rank: pipeline stages, then data-parallel, then tensor-parallel ranks, which vary fastest."""
        return None if place is None else (place[0] * self.dp + dp) * self.tp + place[1]

    def add_read(self, path: Path, rank: int | None = None) -> None:
        """List a file that was read."""
        self.builder.add_file(path, rank, self.part(path))

    def add_fault(self, path: Path, error: ReadError, rank: int | None = None) -> None:
        """Note a file that cannot be read.

        Raises:
            ReadError: it is the file that the user named.
        """
        part = self.part(path)
        self.builder.add_fault(path, error, rank, part, name=part, tensor=_tensor(part, rank))

    def add_missing(self, part: str, rank: int | None = None) -> None:
        """Note a missing file, by its path below the folder."""
        self.builder.add_missing(self.folder / part, rank, part, name=part, tensor=_tensor(part, rank))


def _tensor(part: str, rank: int | None) -> str | None:
    """The part of the checkpoint in a rank's file, which no other rank has; None for a file of all ranks."""
    return None if rank is None else part.partition("/")[0]


# -- slices of a parameter on tensor-parallel ranks, placed by the headers of Nanotron's files -------------------------

MAX_PIECES = 1 << 12


@dataclass(frozen=True)
class Slice:
    """One file of a parameter: the tensor in it, and the boxes of its pieces in the whole.

    Attributes:
        place: pipeline and tensor-parallel rank; None for a parameter that is written once.
        shape: of the whole parameter.
    """

    place: tuple[int, int] | None
    source: Source
    shape: Ints
    pieces: tuple[BoxPair, ...]

    def shards(self, source: Source, rank: int | None) -> Iterator[Shard]:
        """The shards of a tensor that is cut like this one."""
        for local, whole in self.pieces:
            yield Shard(whole, rank, source.part(local))

    def claims(self, rank: int | None, tensor: str) -> FileClaims:
        """The tensor-parallel rank by the file's name, and by its first piece."""
        first, (pp, tp) = self.pieces[0].whole, self.place or (0, 0)
        stated = next((start // n for start, n in zip(first.offsets, first.sizes, strict=True) if start and n), 0)
        return FileClaims(self.source.path, rank, {"pp-rank": pp, "tp-rank": tp}, {"tp-rank": stated}, tensor=tensor)

    def shards_of_run(self, source: Source, start: int, rank: int | None) -> Iterator[Shard]:
        """The shards of a run of this slice, flattened, which begins at element `start`."""
        for run in boxes_of(self.source.shape, start, source.shape[0], rank):
            in_run = run.shard_in(source)
            for local, whole in self.pieces:
                common = in_run.box.intersect(local)
                if common is not None and in_run.source is not None:
                    inside = common.seen_from(local)
                    offsets = tuple(a + b for a, b in zip(inside.offsets, whole.offsets, strict=True))
                    yield Shard(Box(offsets, common.sizes), rank, in_run.source.part(common.seen_from(in_run.box)))


def pieces_of(text: str, local: Ints, whole: Ints) -> tuple[BoxPair, ...]:
    """Parse the pieces in `local_global_slices_pairs`.

    Raises:
        ValueError: they are not boxes, or do not fill the slice.
    """
    pairs = text.split(";")
    if len(pairs) > MAX_PIECES:
        raise ValueError("too many pieces")
    found = tuple(
        BoxPair(*(_box(p, s) for p, s in zip(pair.split("#"), (local, whole), strict=True))) for pair in pairs
    )
    if any(a.sizes != b.sizes for a, b in found) or sum(p.local.numel for p in found) != prod(local):
        raise ValueError("pieces that do not fill the slice")
    return found


def _box(text: str, shape: Ints) -> Box:
    """The box of a tensor that `start,stop,step|…` describes."""
    offsets, sizes = [], []
    for part, n in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if word == "None" else int(word) for word in part.split(","))
        low, high = start or 0, n if stop is None else stop
        if step not in (None, 1) or not 0 <= low <= high <= n:
            raise ValueError(f"a slice {part} of {n}")
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


# -- the model of a Nanotron checkpoint: a safetensors file for each parameter, and for each slice of one --------------

RANKS = r"pp-rank-(?P<pp>\d{1,5})-of-(?P<pps>\d{1,5})_tp-rank-(?P<tp>\d{1,5})-of-(?P<tps>\d{1,5})"
WEIGHT = re.compile(rf"model_(?P<name>.+?)(?:_{RANKS}(?P<experts>_exp-rank-\d+-of-\d+)?)?\.safetensors")
EXPERTS = "experts that are spread over ranks are not joined"


class Weights:
    """The files of a model, read on construction.

    Attributes:
        slices: the files of each parameter.
        notes: why some parameters are not joined.
    """

    def __init__(self, folder: NanotronFiles) -> None:
        self.folder, self.problems = folder, folder.builder.problems
        self.slices: dict[str, list[Slice]] = {}
        self.notes: dict[str, str] = {}
        for path in folder.below("model", ".safetensors"):
            self._read(path)

    def _read(self, path: Path) -> None:
        named, folder = WEIGHT.fullmatch(path.name), self.folder
        if named is None:
            return
        fqn = ".".join([*path.parent.relative_to(folder.folder / "model").parts, named["name"]])
        place = (int(named["pp"]), int(named["tp"])) if named["pp"] is not None else None
        if place is not None:
            folder.has_stages(int(named["pps"]))
        try:
            with File(path) as file:
                header = read_header(file)
                if list(header.tensors) != ["data"]:
                    raise ReadError(path, "holds other tensors than `data`; not of Nanotron, or damaged")
                source = source_of(file, "data", header.tensors["data"])
                self._add(path, fqn, place, source, header.metadata, (int(named["tps"]) if place else 1))
        except ReadError as error:
            folder.add_fault(path, error, folder.rank(place))
            return
        if named["experts"]:
            self.notes[fqn] = EXPERTS
        folder.builder.add_read(1, header.size)
        folder.add_read(path, folder.rank(place))

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
            self.slices.setdefault(fqn, []).append(Slice(None, source, source.shape, (BoxPair(whole, whole),)))
            return
        if tps != self.folder.tp:
            raise ReadError(
                path, f"is of {tps} tensor-parallel ranks by its name, the metadata states {self.folder.tp}"
            )
        try:
            # `torch.Size([4, 3])` or `(4, 3)`
            words = stated["unsharded_shape"].strip("()[] ").replace("torch.Size(", "").split(",")
            shape = tuple(int(word) for word in words if word.strip())
            pieces = pieces_of(stated["local_global_slices_pairs"], source.shape, shape)
        except (KeyError, ValueError, TypeError) as error:
            raise ReadError(path, f"says of no pieces where they are ({error})") from error
        self.slices.setdefault(fqn, []).append(Slice(place, source, shape, pieces))

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter, joined."""
        return {fqn: self._weight(fqn, self.slices[fqn]) for fqn in sorted(self.slices)}

    def _weight(self, fqn: str, slices: Sequence[Slice]) -> Tensor:
        first, folder = slices[0], self.folder
        odd = next((s for s in slices if (s.shape, s.source.dtype) != (first.shape, first.source.dtype)), None)
        if odd is not None:
            text = f"{odd.source.dtype} {list(odd.shape)}, another file says {first.source.dtype} {list(first.shape)}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, folder.rank(odd.place), f"model.{fqn}"))
        elif fqn not in self.notes:
            self.problems += misplaced(s.claims(folder.rank(s.place), f"model.{fqn}") for s in slices)
        note = self.notes.get(fqn, "") or ("its files contradict each other" if odd is not None else "")
        shards = [s for cut in slices for s in cut.shards(cut.source, folder.rank(cut.place))]
        return joined(first, first.source.dtype, () if note else shards, folder.tp, note)

    def cut_of(self, fqn: str) -> Mapping[int | None, Slice]:
        """The slices of a parameter by tensor-parallel rank; empty if its files contradict each other.

        A tied parameter is written only by its first stage, and trained also by others, cut over the same ranks.
        """
        slices = self.slices.get(fqn, ())
        distinct = len({s.place for s in slices}) == len(slices)
        return {s.place[1] if s.place else None: s for s in slices} if distinct else {}


def joined(cut: Slice, dtype: str, shards: Sequence[Shard], tp: int, note: str = "") -> Tensor:
    """A tensor with the shape of a parameter, from some shards."""
    kind: Any = "tensor_parallel" if cut.place is not None else "plain"
    return Tensor(cut.shape, dtype, in_rank_order(shards), kind, world_size=tp, note=note)


# -- the optimizer of a Nanotron checkpoint: a file of torch.save for each rank, by number, with names -----------------
# A moment has the shape of the rank's slice of its parameter. Under ZeRO-1 (`ZeroDistributedOptimizer`; `_dp-D-of-DPS`
# in the file's name) that slice is flattened and cut over the data-parallel ranks: all have equal numbers of elements,
# but the last ones may have one fewer, or none, and then no entry. `gradient_accumulator` has fp32 copies of the
# parameters by name, cut likewise. `param_name_to_dp_rank_offsets` in `optimizer_config.json` states the cuts of the
# first rank's slices; the others follow the same rule, which the lengths of the moments confirm.
#
# Source: nanotron/optim/zero.py (`_partition_parameters`, `merge_dp_shard_in_zero1_optimizer`), named_optimizer.py,
# gradient_accumulator.py (`state_dict`), serialize/optimizer.py.

FILE = re.compile(
    r"optimizer_pp-(?P<pp>\d{1,5})-of-(?P<pps>\d{1,5})(?:_dp-(?P<dp>\d{1,5})-of-(?P<dps>\d{1,5}))?"
    r"_tp-(?P<tp>\d{1,5})-of-(?P<tps>\d{1,5})_exp-(?P<exp>\d{1,5})-of-(?P<exps>\d{1,5})\.pt"
)
COPIES = "gradient_accumulator"
NO_PARAMETER = "its parameter has no file, so nothing says how it was cut"


class OptimizerRank(NamedTuple):
    """The ranks that wrote an optimizer file; `dp` is None without ZeRO-1."""

    pp: int
    dp: int | None
    tp: int


Ranked = list[tuple[OptimizerRank, Any]]


class OptimizerFiles:
    """The optimizer files, read on construction.

    Attributes:
        zero_1: whether moments are cut over data-parallel ranks.
        note: why no moment is joined, if so.
    """

    def __init__(self, folder: NanotronFiles) -> None:
        self.folder, self.problems = folder, folder.builder.problems
        self.found = [(p, m) for p in folder.below("optimizer", ".pt") if (m := FILE.fullmatch(p.name))]
        self.zero_1 = any(found["dp"] for _, found in self.found)
        self.note = EXPERTS if any(int(found["exps"]) > 1 for _, found in self.found) else ""
        self.offsets = self._stated_offsets() if self.zero_1 else {}
        self.saved: list[Saved] = []
        self.trees = dict(self._read())
        folder.builder.add_saved(self.saved)

    def _stated_offsets(self) -> Mapping[Any, Any]:
        """The cuts in the configuration: first element and one past the last, as text, by name and rank."""
        path = self.folder.folder / "optimizer" / CONFIG
        found = read_json(path) if path.is_file() else {}
        stated = leaf_at(found, ("configs", "param_name_to_dp_rank_offsets"))
        if not isinstance(stated, dict):
            text = f"param_name_to_dp_rank_offsets in optimizer/{CONFIG}, which ZeRO-1 writes"
            self.problems.append(missing(text, kind="", severity="warning"))
        return stated if isinstance(stated, dict) else {}

    def _read(self) -> Iterator[tuple[OptimizerRank, dict[Any, Any]]]:
        folder = self.folder
        for path, found in self.found:
            rank = OptimizerRank(int(found["pp"]), int(found["dp"]) if found["dp"] else None, int(found["tp"]))
            folder.has_stages(int(found["pps"]))
            try:
                if (rank.dp is not None) != self.zero_1:
                    raise ReadError(path, "is with ZeRO-1 by its name and others are not, or the other way round")
                if (int(found["tps"]), int(found["dps"] or folder.dp)) != (folder.tp, folder.dp):
                    raise ReadError(path, f"is of other sizes than tp {folder.tp} and dp {folder.dp} of the metadata")
                saved = folder.options.read_file(path)
                if not isinstance(saved.tree, dict) or not isinstance(saved.tree.get("state"), dict):
                    raise ReadError(path, "has no state; not an optimizer of Nanotron, or damaged")
            except ReadError as error:
                folder.add_fault(path, error, self._rank(rank))
                continue
            self.saved.append(saved)
            folder.add_read(path, self._rank(rank))
            yield rank, saved.tree

    def _rank(self, rank: OptimizerRank) -> int:
        return self.folder.rank((rank.pp, rank.tp), rank.dp or 0) or 0

    def check_files(self) -> None:
        """Note missing files: each rank writes one."""
        here = {(int(m["pp"]), int(m["dp"] or 0), int(m["tp"])) for _, m in self.found}
        folder, dps = self.folder, self.folder.dp if self.zero_1 else 1
        for pp, dp, tp in ((p, d, t) for p in range(folder.pp) for d in range(dps) for t in range(folder.tp)):
            if (pp, dp, tp) not in here and not self.note:
                cut = f"_dp-{dp}-of-{dps}" if self.zero_1 else ""
                name = f"optimizer/optimizer_pp-{pp}-of-{folder.pp}{cut}_tp-{tp}-of-{folder.tp}_exp-0-of-1.pt"
                folder.add_missing(name, self._rank(OptimizerRank(pp, dp, tp)))

    # -- joined optimizer

    def state_dict(self, weights: Weights) -> dict[str, Any]:
        """The optimizer's state dict by name, with its moments cut like the weights."""
        merge, groups = Merge(), dict[str, dict[str, Any]]()
        moments: dict[str, dict[str, Ranked]] = {}
        copies: dict[str, Ranked] = {}
        for rank, tree in sorted(self.trees.items()):
            names = tree.get("names")
            names = names if isinstance(names, dict) else {}
            for number, entry in tree["state"].items():
                fqn = str(names.get(number, f"?{number} of pp {rank.pp}, tp {rank.tp}"))
                for slot, value in entry.items() if isinstance(entry, dict) else ():
                    moments.setdefault(fqn, {}).setdefault(str(slot), []).append((rank, value))
            for fqn, value in tree[COPIES].items() if isinstance(tree.get(COPIES), dict) else ():
                copies.setdefault(str(fqn), []).append((rank, value))
            for group in tree.get("param_groups") or ():
                kept = {k: v for k, v in group.items() if k != "params"}
                listed = groups.setdefault(repr(kept), {**kept, "params": {}})
                listed["params"] |= dict.fromkeys(str(names.get(i, f"?{i}")) for i in group.get("params") or ())
        lost = sorted(fqn for fqn in {*moments, *copies} if fqn not in weights.slices and not fqn.startswith("?"))
        if lost:
            text = f"{len(lost)} parameters that the optimizer names have no file in model/: {few(lost, 3)}"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        made: dict[str, Any] = {
            "state": {
                f: {s: self._slot(merge, weights, ("state", f, s), v) for s, v in slots.items()}
                for f, slots in moments.items()
            },
            "param_groups": [{**group, "params": list(group["params"])} for group in groups.values()],
        }
        if copies:
            made[COPIES] = {f: self._slot(merge, weights, (COPIES, f), values) for f, values in copies.items()}
        self.problems += merge.problems
        return made

    def _slot(self, merge: Merge, weights: Weights, path: tuple[str, ...], values: Ranked) -> Any:
        """One slot of a parameter's state: cut like the parameter, or equal on every rank that has it."""
        first, fqn = values[0][1], path[1]
        if not isinstance(first, Tensor) or not first.shape:
            return merge.trees([(self._rank(r), v) for r, v in values], ("optimizer", *path))
        cut, shards, note = weights.cut_of(fqn), list[Shard](), self.note
        for rank, value in values:
            own = cut.get(rank.tp) or cut.get(None)
            found = self._shards(fqn, own, rank, value) if own and value.dtype == first.dtype else NO_PARAMETER
            if isinstance(found, str):
                note = note or found
            else:
                shards += found
        if note or not cut:
            return Tensor(first.shape, first.dtype, (), first.kind, note=note or NO_PARAMETER)
        some = next(iter(cut.values()))
        return joined(replace(some, place=some.place or (0, 0)), first.dtype, shards, self.folder.tp)

    def _shards(self, fqn: str, own: Slice, rank: OptimizerRank, value: Any) -> Sequence[Shard] | str:
        """The shards of one rank's moment, or why they cannot be placed."""
        source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
        of = f"of {list(value.shape) if isinstance(value, Tensor) else value}"
        if source is None:
            return f"{of}, which is no dense tensor"
        if rank.dp is None:
            fits = value.shape == own.source.shape
            return list(own.shards(source, self._rank(rank))) if fits else f"{of}, unlike its parameter"
        start, end = zero_1_run(prod(own.source.shape), self.folder.dp, rank.dp)
        stated = leaf_at(self.offsets, (fqn, str(rank.dp))) if (rank.pp, rank.tp) == (0, 0) else None
        if isinstance(stated, (list, tuple)) and list(map(str, stated)) != [str(start), str(end)]:
            return f"{CONFIG} says that rank {rank.dp} has {list(stated)} of it, not {start} to {end}"
        if value.shape != (end - start,) or not source.contiguous:
            return f"{of} on data-parallel rank {rank.dp}, {end - start} elements expected"
        return list(own.shards_of_run(source, start, self._rank(rank)))


def zero_1_run(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """First element, and one past the last, of a flattened parameter on a data-parallel rank: `_partition_parameters`.

    The first ranks have ceil(numel / ranks) elements, the last ones one fewer.
    """
    full = -(-numel // ranks)
    shorter = full * ranks - numel
    start = rank * full - max(rank - (ranks - shorter), 0)
    return start, start + full - (rank >= ranks - shorter)


# -- the folder --------------------------------------------------------------------------------------------------------


NAME = "nanotron"
READS = "Nanotron: a safetensors file per parameter and slice, optimizer files per rank, also under ZeRO-1"
KNOWN_BY = "checkpoint_metadata.json beside model/; any file below it"
TRIED = ("Nanotron 0.4",)
BY_HAND = ("ZeRO-1",)
JOINS = ("model", "optimizer", "rest")

LEVELS = 12
"""At most this many folders above a file are searched: a module's file lies as deep as its name has parts."""

OTHERS = ("lr_scheduler", "random")
SIZES = re.compile(r"(pp|dp|tp|exp)-(\d{1,5})-of-(\d{1,5})")


def detect(path: Path) -> bool:
    """Whether a path is, or lies below, a folder with Nanotron's metadata beside `model`; never an empty folder."""
    return _root(path) is not None and (path.is_file() or any(path.iterdir()))


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of a folder or a file.

    Raises:
        ReadError: its metadata, or the file that the user named, cannot be read.
        UnknownFormatError: its metadata states no sizes.
        UnsafePathError: a file is a link out of the folder.
    """
    return _NanotronFolder(NanotronFiles(CheckpointBuilder(NAME, path), _root(path) or path, options)).checkpoint()


def _root(path: Path) -> Path | None:
    folders = [path, *path.absolute().parents[:LEVELS]]
    return next((f for f in folders if (f / METADATA).is_file() and (f / "model").is_dir()), None)


class _NanotronFolder:
    def __init__(self, files: NanotronFiles) -> None:
        self.found, self.problems = files, files.builder.problems
        self.weights = Weights(files)
        self.optimizer = OptimizerFiles(files)

    def checkpoint(self) -> Checkpoint:
        tree: dict[Any, Any] = {"model": self.weights.state_dict()}
        if self.optimizer.trees:
            tree["optimizer"] = self.optimizer.state_dict(self.weights)
        tree |= {"checkpoint_metadata": self.found.metadata, **self._others()}
        self._check_files()
        step = leaf_at(self.found.metadata, ("metas", "last_train_step"))
        step = step if type(step) is int and step >= 0 else None
        return self.found.builder.checkpoint(
            name=self.found.folder.name,
            saved_as=f"Nanotron, tensor parallel {self.found.tp} x pipeline {self.found.pp}"
            + (f", ZeRO-1 over {self.found.dp}" if self.optimizer.zero_1 else ""),
            tree=tree,
            world_size=Fact(self.found.tp * self.found.pp * self.found.dp, (METADATA, "file names")),
            step=Fact(step, (METADATA,)) if step is not None else find_step(self.found.folder, find_sections(tree)),
            module_order=SORTED,
            bytes_expected=rank_checks.expected_bytes(self.found.builder.files),
        )

    def _others(self) -> dict[str, Any]:
        """Schedulers and random states, each rank's file unchanged."""
        found: dict[str, Any] = {}
        read: list[Saved] = []
        for part in OTHERS:
            for path in self.found.below(part, ".pt"):
                try:
                    saved = self.found.options.read_file(path)
                except ReadError as error:
                    self.found.add_fault(path, error)
                    continue
                read.append(saved)
                self.found.add_read(path)
                found.setdefault(part, {})[path.stem] = saved.tree
        self.found.builder.add_saved(read)
        return {part: next(iter(of.values())) if list(of) == [part] else of for part, of in found.items()}

    def _check_files(self) -> None:
        """Find ranks without a file."""
        if not self.optimizer.found:
            text = "no optimizer files: a parameter's file that is missing from model/ is not noticed"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text, severity="warning"))
            return
        self.optimizer.check_files()
        for part in OTHERS:
            for name in [*self._lost_of_ranks(part)]:
                self.found.add_missing(name)
        if not any(file.part.startswith("lr_scheduler/") for file in self.found.builder.files):
            text = "file in lr_scheduler/, which every save with an optimizer writes unless it is told not to"
            self.problems.append(missing(text, kind="", severity="warning"))

    def _lost_of_ranks(self, part: str) -> Iterator[str]:
        """The names of a part's missing files, if the names of the others state the number of ranks."""
        named = [file for file in self.found.builder.files if file.part.startswith(f"{part}/")]
        counts = {file.part: SIZES.findall(file.part) for file in named}
        sizes = {tuple((word, size) for word, _, size in found) for found in counts.values()}
        if len(sizes) != 1 or not (of := next(iter(sizes))) or prod(int(size) for _, size in of) > MAX_RANKS:
            return
        template = SIZES.sub(r"\1-{}-of-\3", re.sub(r"[{}]", r"\g<0>\g<0>", next(iter(counts))))
        here = {tuple(int(rank) for _, rank, _ in found) for found in counts.values()}
        for ranks in product(*(range(int(size)) for _, size in of)):
            if ranks not in here:
                yield template.format(*ranks)
