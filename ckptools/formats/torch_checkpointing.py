"""torch_checkpointing: a file for each item and rank, and a `metadata.pkl` with the layout of the ranks' tensors.

    model_0.pt … model_3.pt             the item `model` of each rank: torch.save, whose DTensors state how they are cut
    optimizer_0.safetensors …           bare local tensors; only metadata.pkl states their places
    param_groups_0.json, step_0.pt …    items that are not cut
    metadata.pkl                        the layout; only of items that have a resharder

A layout may name the files otherwise; metadata.pkl then has the names, but only of items that are in it. If an
optimizer's state is in safetensors, its param groups are an item of their own, and are joined with it if their
`param_names` are those of the state. Without any metadata.pkl torch.save files are rank files, each item a part.

Source: torch_checkpointing/checkpoint_writer.py, checkpoint_layout.py, metadata_manager.py, default_resharder.py and
state_transformations.py of 0.1.1; checked on checkpoints of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import File, is_plain_path, parse_json, read_json, reading
from ckptools.files.safetensors_header import HeaderEntry, read_header, source_of
from ckptools.files.zip_archive import MAX_PICKLE
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, was_read
from ckptools.formats.shared.companions import unlike_states
from ckptools.formats.shared.merge import Merge, put
from ckptools.formats.shared.tensor_parallel import BoxPair
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints, grid_boxes
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor, TensorKind
from ckptools.model.tree import Absent, describe_for_error, leaf_at, tensors_in
from ckptools.pickles.classes.sharded import Placement, local_runs
from ckptools.pickles.machine import Machine, load_checked
from ckptools.pickles.objects import MAX_MESH
from ckptools.pickles.reader import Saved
from ckptools.rules.files import FileClaims, Place, misplaced, missing, twice
from ckptools.text import KeyPath, and_others, few, first_few, fqn_of
from ckptools.training_state.optimizers import AS_SAVED, SORTED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

# -- read `metadata.pkl`: the ranks' parts of every tensor, and the file of each rank's item ---------------------------
# A pickle of plain values, written by rank 0 when an item has a resharder:
#
#     {"version": "2.0", "world_size": 4, "metadata": {ITEM: {
#         "nested_path_to_metadata": {'["state","w","exp_avg"]': [
#             {"ranks": (0, 1), "sharding_metadata": {"type": …, "data": …}}]},
#         "rank_to_layout_info": {0: None | {"file_path": "model_0.safetensors",
#                                            "serialization_format": {"type": …}}}}}}
#
# In version 1.0 `metadata` has a key `'["ITEM","w"]'` for every tensor, and `rank_to_layout_info_mappings` has the
# files. Two types are known. `DTensorShardingMetadata` has global_shape, dtype, mesh_spec and placements (`Shard`,
# `StridedShard`, `Replicate`); a plain tensor is written as one that all ranks replicate. `default_tensor_v1` lists the
# boxes of each rank separately. Source: torch_checkpointing/distributed_metadata.py, dtensor_metadata.py,
# default_metadata.py and checkpoint_layout.py of 0.1.1.

METADATA = "metadata.pkl"
SIGN = b"sharding_metadata"
"""Bytes near the beginning of every `metadata.pkl` of this format."""

SIGN_WITHIN = 1 << 14
KINDS = {
    "TorchSerialization": "pt",
    "SafetensorsSerialization": "safetensors",
    "JsonSerialization": "json",
    "RawSerialization": "raw",
}
MAX_DIMS = 64
MAX_SIZE = 1 << 62


class Sharding(NamedTuple):
    """How some ranks hold a tensor of a whole `shape`: by placements on a mesh, or piece by piece.

    Attributes:
        ranks: ranks with a part of it, even an empty one.
        mesh: sizes of the device mesh; empty if the pieces are listed.
        mesh_ranks: the rank at each coordinate, in row-major order.
        listed: the pieces of each of `ranks`, if they are listed.
    """

    shape: Ints
    dtype: str
    ranks: Ints
    mesh: Ints = ()
    mesh_ranks: Ints = ()
    placements: tuple[Placement, ...] = ()
    listed: tuple[BoxPair, ...] | None = None

    def pieces(self, rank: int) -> tuple[BoxPair, ...]:
        """The boxes of the tensor on a rank."""
        if self.listed is not None:
            return self.listed
        return tuple(BoxPair(local, whole) for whole, local in grid_boxes(self._runs(rank)))

    def local_shape(self, rank: int) -> Ints | None:
        """The shape of a rank's own tensor; None if the list of its pieces does not determine it."""
        return tuple(sum(n for _, n in runs) for runs in self._runs(rank)) if self.listed is None else None

    def described(self) -> tuple[TensorKind, tuple[str, ...] | None, Ints | None]:
        """The kind, placements and mesh of the DTensor."""
        if self.listed is not None:
            return "chunks", None, None
        if all(placement.kind == "Replicate" for placement in self.placements):
            return "plain", None, None
        return "dtensor", tuple(map(str, self.placements)), self.mesh

    def _runs(self, rank: int) -> list[list[tuple[int, int]]]:
        coordinate = Box.whole(self.mesh).index_of(self.mesh_ranks.index(rank))
        return local_runs(self.shape, self.mesh, coordinate, self.placements)


@dataclass
class ItemMetadata:
    """The metadata of one item: its tensors by key path, and unusual files and file kinds by rank."""

    tensors: dict[KeyPath, list[Sharding]] = field(default_factory=dict)
    files: dict[int, tuple[str, str]] = field(default_factory=dict)

    def ranks(self) -> set[int]:
        """Ranks that hold any part of the tensor."""
        return {rank for shardings in self.tensors.values() for one in shardings for rank in one.ranks}

    def of_rank(self, rank: int) -> Iterator[tuple[KeyPath, Sharding]]:
        """The tensors on a rank, by key path."""
        for path, shardings in self.tensors.items():
            yield from ((path, one) for one in shardings if rank in one.ranks)


class Metadata(NamedTuple):
    """The content of `metadata.pkl`: its items by name, and dotted names that the pickle mentions."""

    items: dict[str, ItemMetadata]
    world_size: int
    nbytes: int
    names: tuple[str, ...]


def is_metadata(path: Path) -> bool:
    """Whether a file is a `metadata.pkl` of this format, by its name and its beginning."""
    if path.name != METADATA or not path.is_file():
        return False
    with File(path) as file:
        return SIGN in file.read(0, min(file.size, SIGN_WITHIN))


def read_metadata(path: Path) -> Metadata:
    """Read `metadata.pkl` inertly.

    Raises:
        ReadError: it is damaged, or not as the format writes it.
    """
    with File(path) as file:
        if file.size > MAX_PICKLE:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_PICKLE} are read")
        machine = Machine(file.read(0, file.size))
    tree = load_checked(machine, path, "pickle")
    try:
        items, world_size = _items(tree), tree["world_size"]
        if type(world_size) is not int or not 0 < world_size <= MAX_MESH:
            raise ValueError(f"world_size {describe_for_error(world_size)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ReadError(path, f"is not what torch_checkpointing writes: {why}") from error
    return Metadata(items, world_size, len(machine.data), tuple(g.dotted for g in machine.globals.values()))


def _items(tree: Any) -> dict[str, ItemMetadata]:
    stored, version = tree["metadata"], tree.get("version", "1.0")
    if version not in ("1.0", "2.0"):
        raise ValueError(f"version {describe_for_error(version)}; 1.0 and 2.0 are read")
    items: dict[str, ItemMetadata] = {}
    if version == "1.0":
        for text, groups in stored.items():
            name, *path = _path(text)
            items.setdefault(str(name), ItemMetadata()).tensors[tuple(path)] = list(map(_sharding, groups))
        for rank, layouts in tree["rank_to_layout_info_mappings"].items():
            for name, layout in layouts.items():
                _add_file(items.get(name), rank, layout)
        return items
    for name, item in stored.items():
        items[name] = ItemMetadata({_path(k): [*map(_sharding, v)] for k, v in item["nested_path_to_metadata"].items()})
        for rank, layout in item["rank_to_layout_info"].items():
            _add_file(items[name], rank, layout)
    return items


def _path(text: Any) -> KeyPath:
    found = parse_json(text)
    if not isinstance(found, list) or not all(isinstance(key, (str, int)) for key in found):
        raise ValueError(f"the path {describe_for_error(text)}")
    return tuple(found)


def _add_file(item: ItemMetadata | None, rank: Any, layout: Any) -> None:
    if item is None or layout is None:
        return
    name, kind = layout["file_path"], KINDS.get(layout["serialization_format"]["type"], "")
    if not isinstance(name, str) or not is_plain_path(name):
        raise ValueError(f"names the file {describe_for_error(name)}; only files below its own folder are read")
    item.files[int(rank)] = name, kind


def _sharding(group: Any) -> Sharding:
    ranks, packed = _ints(group["ranks"]), group["sharding_metadata"]
    kind, data = packed["type"], packed["data"]
    shape, dtype = _ints(data["global_shape"]), str(data["dtype"]).removeprefix("torch.")
    if len(shape) > MAX_DIMS or dtype not in ITEMSIZE:
        raise ValueError(f"a tensor {describe_for_error(dtype)} {describe_for_error(shape)}")
    if kind == "default_tensor_v1":
        names = ("global_offsets", "local_offsets", "local_sizes")
        columns = [[_ints(row) for row in data[name]] for name in names]
        pieces = tuple(BoxPair(Box(o, n), Box(g, n)) for g, o, n in zip(*columns, strict=True))
        if not all(piece.whole.inside(shape) and len(piece.local.offsets) == len(shape) for piece in pieces):
            raise ValueError(f"a piece outside of {describe_for_error(shape)}")
        return Sharding(shape, dtype, ranks, listed=pieces)
    if kind != "DTensorShardingMetadata":
        raise ValueError(f"the sharding {describe_for_error(kind)}, which is unknown")
    mesh = data["mesh_spec"]
    sizes, mesh_ranks = _ints(mesh["mesh_shape"]), _ints(mesh["mesh_data"])
    placements = tuple(_placement(p, len(shape)) for p in data["placements"])
    if prod(sizes) != len(mesh_ranks) or len(placements) != len(sizes) or len(mesh_ranks) > MAX_MESH:
        raise ValueError(f"{len(placements)} placements on a mesh {describe_for_error(sizes)}")
    if not set(ranks) <= set(mesh_ranks):
        raise ValueError("ranks that are not in their mesh")
    return Sharding(shape, dtype, ranks, sizes, mesh_ranks, placements)


def _placement(value: Mapping[str, Any], ndim: int) -> Placement:
    kind, dim, split = value["type"], value.get("dim", 0), value.get("split_factor", 1)
    if kind == "Replicate":
        return Placement("Replicate")
    if kind not in ("Shard", "StridedShard") or type(dim) is not int or not 0 <= dim < ndim:
        raise ValueError(f"the placement {describe_for_error(kind)} along {describe_for_error(dim)}")
    if type(split) is not int or not 1 <= split <= MAX_MESH:
        raise ValueError(f"a strided shard with split factor {describe_for_error(split)}")
    return Placement("Shard", dim) if kind == "Shard" else Placement("_StridedShard", dim, split)


def _ints(value: Any) -> Ints:
    listed = tuple(value) if isinstance(value, (list, tuple)) else (None,)
    if not all(type(n) is int and 0 <= n < MAX_SIZE for n in listed):
        raise ValueError(f"{describe_for_error(value)}, expected sizes or ranks")
    return listed


# -- the files of items: a rank's tree of an item, with its tensors in their places ------------------------------------
# A safetensors file has a rank's local tensors under the keys of their paths, joined by dots. Only the metadata states
# the path of each name and its box in the whole tensor. Source: torch_checkpointing/checkpoint_layout.py
# (`SafetensorsSerialization.prepare_tensors_for_save`, `default_torch_layout_info`).
#
# Param groups: safetensors hold only tensors, so an optimizer's state in them has its groups in another item.
# `param_names` identify the optimizer (`optimizer_transform_pre` keys the state by them): they have every name of
# the state. Source: torch_checkpointing/state_transformations.py.

FILE = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,7})\.(?P<kind>pt|safetensors|json)", re.DOTALL)
MAX_GAPS = 100
"""At most this many tensors with gaps are named."""

UNPLACED = f"only {METADATA} says which part of which tensor a rank's piece is, and it does not say so here"


class ItemFile(NamedTuple):
    """A file of one item of one rank, which may be missing: `pt`, `safetensors`, `json`, or `raw` for other bytes."""

    path: Path
    item: str
    rank: int
    kind: str


def parse(path: Path) -> ItemFile | None:
    """Parse the usual name of an item's file; None for any other name."""
    found = FILE.fullmatch(path.name)
    return ItemFile(path, found["item"], int(found["rank"]), found["kind"]) if found else None


def named_files(folder: Path, metadata: Metadata | None) -> dict[str, dict[int, ItemFile]]:
    """Files by item and rank: the files in the metadata, and files in the folder with the usual names."""
    found: dict[str, dict[int, ItemFile]] = {}
    for name, item in metadata.items.items() if metadata else ():
        for rank in sorted({*item.ranks(), *item.files}):
            file, kind = item.files.get(rank, (f"{name}_{rank}.pt", "pt"))
            found.setdefault(name, {})[rank] = ItemFile(folder / file, name, rank, kind)
    named = {file.path for files in found.values() for file in files.values()}
    with reading(folder):
        here = sorted(folder.iterdir())
    for parsed in map(parse, here):
        if parsed is not None and parsed.path not in named and (not metadata or parsed.item not in metadata.items):
            found.setdefault(parsed.item, {})[parsed.rank] = parsed
    return {name: dict(sorted(files.items())) for name, files in found.items()}


def read_safetensors(path: Path, rank: int, item: ItemMetadata | None, alone: bool) -> tuple[Any, list[str], int]:
    """A rank's tree of an item in safetensors, its contradictions to the metadata, and the number of bytes read.

    Without metadata, the tensors are whole if a single rank saved them (`alone`).

    Raises:
        ReadError: it is damaged.
    """
    tree: dict[Any, Any] = {}
    unlike: list[str] = []
    with File(path) as file:
        header = read_header(file)
        shardings = {fqn_of(key): (key, one) for key, one in item.of_rank(rank)} if item else {}
        for name, entry in header.tensors.items():
            key, sharding = shardings.get(name, ((name,), None))
            source = source_of(file, name, entry)
            if sharding is not None:
                why = _misfit(entry, sharding, rank)
                unlike += [f"{name} is {why}"] if why else []
                made = _tensor(sharding, rank, None if why else source)
            elif alone:
                made = Tensor(source.shape, source.dtype, (Shard(Box.whole(source.shape), rank, source),))
            else:
                made = Tensor(source.shape, source.dtype, (), "unreadable", note=UNPLACED)
            if not _put(tree, key, made):
                raise ReadError(path, f"{describe_for_error(name)} lies inside of another tensor")
    return tree, unlike, header.size


def _misfit(entry: HeaderEntry, sharding: Sharding, rank: int) -> str:
    """How a rank's tensor differs from its metadata; empty if it does not."""
    expected = sharding.local_shape(rank)
    if expected is None:
        fits = all(piece.local.inside(entry.shape) for piece in sharding.pieces(rank))
    else:
        fits = expected == entry.shape or not (prod(expected) or prod(entry.shape))
    if fits and entry.dtype == sharding.dtype:
        return ""
    return f"{entry.dtype} {list(entry.shape)}, expected {sharding.dtype} {list(expected or sharding.shape)}"


def _tensor(sharding: Sharding, rank: int, source: Source | None) -> Tensor:
    """A tensor as one rank has it; without its bytes if these do not fit."""
    pieces = (p for p in sharding.pieces(rank) if p.whole.numel or not p.whole.sizes)
    shards = tuple(Shard(p.whole, rank, source.part(p.local)) for p in pieces) if source else ()
    kind, placements, mesh = sharding.described()
    return Tensor(sharding.shape, sharding.dtype, shards, kind, placements, mesh)


def _put(tree: dict[Any, Any], path: KeyPath, value: Any) -> bool:
    """Put a value at a key path, creating dicts on the way; return whether the place was free."""
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return False
    return last not in tree and tree.setdefault(last, value) is value


def with_absent(tree: Any, item: ItemMetadata, absent: Collection[int]) -> Any:
    """Add the pieces of ranks without a file to the merged tree of an item; changed in place."""
    for path, shardings in item.tensors.items():
        tensor = leaf_at(tree, path)
        ranks = [(rank, one) for one in shardings for rank in one.ranks if rank in absent]
        if not ranks or not isinstance(tensor, Tensor) or tensor.note:
            continue
        lost = [
            Shard(piece.whole, rank, None) for rank, one in ranks for piece in one.pieces(rank) if piece.whole.numel
        ]
        tree = put(tree, path, with_lost(tensor, lost))
    return tree


def with_lost(tensor: Tensor, lost: Sequence[Shard]) -> Tensor:
    """Add the shards in lost files that a tensor lacks."""
    known = {(shard.rank, shard.box) for shard in tensor.shards}
    more = (shard for shard in lost if (shard.rank, shard.box) not in known)
    return replace(tensor, shards=in_rank_order((*tensor.shards, *more)))


def check_cover(tensors: Iterable[tuple[KeyPath, Tensor]]) -> Iterator[Problem]:
    """Yield problems of incomplete tensors; of many, the first by name and the number of the others."""
    found = (cover_problem(t, fqn_of(path)) for path, t in tensors if not t.note and t.kind != "meta")
    gaps = [problem for problem in found if problem is not None]
    yield from gaps[:MAX_GAPS]
    if len(gaps) > MAX_GAPS:
        yield Problem(Code.TENSOR_GAP, f"{len(gaps) - MAX_GAPS} more tensors have gaps")


def check_against(tree: Any, item: ItemMetadata, rank: int) -> list[str]:
    """List tensors of the metadata that a rank's tree lacks, or has in another shape or dtype."""
    wrong: list[str] = []
    for path, sharding in item.of_rank(rank):
        found = leaf_at(tree, path)
        if found is None:
            wrong.append(f"{fqn_of(path)} is not in it")
        elif isinstance(found, Tensor) and not found.note:
            unlike = (found.shape, found.dtype) != (sharding.shape, sharding.dtype)
            says = f"{found.dtype} {list(found.shape)}, {METADATA} says {sharding.dtype} {list(sharding.shape)}"
            wrong += [f"{fqn_of(path)} is {says}"] if unlike else []
    return wrong


# -- param groups ------------------------------------------------------------------------------------------------------

STATE, GROUPS = "state", "param_groups"
VERSION = "_optimizer_state_format_version"


def with_param_groups(ranked: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """Each rank's items, with every list of param groups moved into the only optimizer whose state has its names."""
    found = [pairs for _, tree in ranked if (pairs := _pairs(tree))]
    if not found or any(pairs != found[0] for pairs in found):
        return list(ranked)
    return [(rank, _joined(tree, found[0])) for rank, tree in ranked]


def _joined(tree: dict[str, Any], pairs: Mapping[str, str]) -> dict[str, Any]:
    """Put each optimizer and its param groups (`pairs`) into one item; a rank may have lost either file."""
    made = {name: value for name, value in tree.items() if name not in pairs.values()}
    for name, groups in pairs.items():
        if groups in tree:
            made[name] = {**made.get(name, {STATE: {}}), GROUPS: tree[groups]}
    return made


def _pairs(tree: Mapping[str, Any]) -> dict[str, str]:
    """Pair optimizers with their groups, by one rank's items; empty if a match is ambiguous."""
    states = {name: set(value[STATE]) for name, value in tree.items() if is_state(value)}
    lists = {name: listed for name, value in tree.items() if (listed := _names(value)) is not None}
    fitting = {group: [s for s, keys in states.items() if keys <= names] for group, names in lists.items()}
    pairs = {found[0]: group for group, found in fitting.items() if len(found) == 1}
    return pairs if len(pairs) == len(fitting) else {}


def check_groups(merge: Merge) -> Iterator[Problem]:
    """Find hyperparameters that not every rank has, though all ranks' param groups are the same."""
    for path in merge.partial:
        if len(path) > 3 and path[1] == GROUPS:
            ranks = [rank for rank, value in merge.values_or_absent(path).items() if isinstance(value, Absent)]
            text = f"rank {first_few(ranks)} lacks it, and others have it"
            yield Problem(Code.COPIES_DIFFER, text, ranks[0], fqn_of(path), ranks=tuple(ranks))


def is_state(value: Any) -> bool:
    """Whether an item is an optimizer's state without its param groups."""
    return isinstance(value, Mapping) and set(value) <= {STATE, VERSION} and isinstance(value.get(STATE), Mapping)


def _names(value: Any) -> set[str] | None:
    """The names in a list of param groups; None for any other value."""
    if not isinstance(value, list) or not value or not all(isinstance(group, Mapping) for group in value):
        return None
    names = [group.get("param_names") for group in value]
    listed = [name for some in names if isinstance(some, list) for name in some]
    good = all(isinstance(some, list) for some in names) and all(isinstance(name, str) for name in listed)
    return set(listed) if good else None


# -- the folder --------------------------------------------------------------------------------------------------------


NAME = "torch_checkpointing"
READS = "torch_checkpointing: model_0.pt or .safetensors, optimizer_0.pt … of each rank, with metadata.pkl"
KNOWN_BY = "metadata.pkl with sharding in it, or items of several ranks in safetensors that lack it"
TRIED = ("torch_checkpointing 0.1.1",)
JOINS = ("model", "optimizer", "rest")


def detect(path: Path) -> bool:
    """Whether a path is a folder with its metadata, a folder with safetensors of several ranks, or a file in one."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    """The folder of the checkpoint at a path, or around a file."""
    if path.is_dir():
        return path if is_metadata(path / METADATA) or _lacks_metadata(path) else None
    if path.name == METADATA or parse(path) is not None:
        return path.parent if path.is_file() and _root(path.parent) else None
    above = path.parent.parent
    return above if path.is_file() and is_metadata(above / METADATA) else None


def _lacks_metadata(folder: Path) -> bool:
    """Whether a folder has at least two items of the same two or more ranks, and one of them must be cut.

    Whole models of epochs 0 and 1 have such names too, and the same shapes. Files of torch.save alone are left to
    `rank_files`, because their tensors state how they are cut.
    """
    alike = [files for files in named_files(folder, None).values() if len(files) > 1 and 0 in files]
    pairs = [files for files in alike if sum(set(files) == set(other) for other in alike) > 1]
    with suppress(ReadError):
        return any(files[0].kind == "safetensors" and _is_cut(files[0].path, files[max(files)].path) for files in pairs)
    return False


def _is_cut(first: Path, last: Path) -> bool:
    with File(first) as one, File(last) as other:
        tensors, others = read_header(one).tensors, read_header(other).tensors
    return tensors.keys() == others.keys() and any(tensors[name].shape != others[name].shape for name in tensors)


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint in a folder, or around a file.

    Raises:
        ReadError: no file of it can be read.
        UnsafePathError: a file is a link out of the folder.
    """
    folder = _root(path) or path.parent
    only = path if options.only_this_file and not path.is_dir() and path.name != METADATA else None
    return _ItemsFolder(CheckpointBuilder(NAME, folder if only is None else path), folder, options, only).checkpoint()


class _ItemsFolder:
    def __init__(self, builder: CheckpointBuilder, folder: Path, options: Options, only: Path | None) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.options, self.only = folder, options, only
        self.files = builder.files
        self.here: dict[str, set[int]] = {}
        self.saved: list[Saved] = []
        self.claims: list[FileClaims] = []
        self.metadata = self._metadata()
        self.items = named_files(folder, self.metadata)
        if self.metadata is None and "safetensors" in self._kinds():
            more = " that can be read; it alone says how ranks cut what they have in safetensors"
            self.problems.append(missing(METADATA, more=more))
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
            self.builder.add_fault(path, error, None, "metadata")
            return None
        self.builder.add_file(path, None, "metadata")
        self.builder.add_read(1, found.nbytes, found.names)
        return found

    def _check_link(self, path: Path) -> None:
        if path != self.only:
            self.options.check_link(path, self.folder)

    def checkpoint(self) -> Checkpoint:
        ranked = self._ranked()
        self.problems += [*misplaced(self.claims, by_content=True), *twice(self.claims)]
        if not ranked:
            raise ReadError(self.folder, f"none of its files can be read: {few([p.message for p in self.problems])}")
        for name in dict.fromkeys(name for _, tree in ranked for name in tree):
            if self._state_of(name) is not None:
                self.problems += unlike_states(name, {rank: tree[name] for rank, tree in ranked if name in tree})
        merge = Merge()
        found = rank_checks.compare_ranks(merge, self._completed(merge.trees(ranked)))
        self.builder.add_rank_values(found)
        self.problems += [*check_groups(merge), *check_cover(tensors_in(found.tree))]
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
        """Each rank's items, in rank order; a file's content states the rank."""
        self.options.read_ahead([f.path for files in self.items.values() for f in files.values() if f.kind == "pt"])
        trees: dict[int, dict[str, Any]] = {}
        for name, files in self.items.items():
            found = self._of_item(name, files)
            self._check_missing(name, files, set(found))
            self.here[name] = set(found)
            # Without metadata, the tensors that other ranks' pieces in safetensors belong to are unknown.
            if found and self._state_of(name) is not None and next(iter(files.values())).kind == "safetensors":
                found = {min(found): found[min(found)]}
            for rank, tree in found.items():
                trees.setdefault(rank, {})[name] = tree
        return with_param_groups(sorted(trees.items()))

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
                self.builder.add_fault(file.path, error, file.rank, name, tensor=self._state_of(name))
                continue
            named: Place = {"item": name, "rank": file.rank}
            self.claims.append(FileClaims(file.path, file.rank, named, {"rank": rank}))
            if file.kind != "raw":
                found.setdefault(rank, tree)
            if wrong:
                text = f"{file.path.name} is not what {METADATA} says: {wrong[0]}{and_others(len(wrong) - 1)}"
                self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, rank))
        return found

    def _read(self, file: ItemFile) -> tuple[int, Any, Sequence[str]]:
        """The rank and content of a file, and its contradictions to the metadata."""
        item = self.metadata.items.get(file.item) if self.metadata else None
        if file.kind == "safetensors":
            tree, wrong, nbytes = read_safetensors(file.path, file.rank, item, self.world.value == 1)
            self._add(file, nbytes)
            lacking = check_against(tree, item, file.rank) if item else []
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
        return rank, saved.tree, check_against(saved.tree, item, rank) if item else []

    def _add(self, file: ItemFile, nbytes: int) -> None:
        self.builder.add_read(1, nbytes)
        self.builder.add_file(file.path, file.rank, file.item)

    def _rank_of(self, file: ItemFile, saved: Saved) -> int:
        """The rank in a file's DTensors, else in its name."""
        said = {rank for rank, _ in saved.claims if rank is not None}
        worlds = {world for _, world in saved.claims} if not saved.at_least else set()
        if self.metadata is not None and worlds - {self.world.value}:
            text = f"{file.path.name} is of a world of {max(worlds)}, {METADATA} of {self.world.value}"
            self.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text, file.rank))
        return said.pop() if len(said) == 1 else file.rank

    def _state_of(self, name: str) -> str | None:
        """The item to name in a problem, if the loss of a rank's file leaves no gap in its tensors."""
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
            self.builder.add_missing(path, rank, name, tensor=self._state_of(name))

    def _completed(self, tree: Any) -> Any:
        """Add the pieces in lost files to the merged tree, and an empty list to an optimizer without groups."""
        for name, item in self.metadata.items.items() if self.metadata else ():
            absent = item.ranks() - self.here.get(name, set())
            if absent and name in tree:
                tree[name] = with_absent(tree[name], item, absent)
        for name, value in tree.items():
            if is_state(value):
                value[GROUPS] = []
                text = "no item holds its param groups, so that its hyperparameters are not known"
                self.problems.append(Problem(Code.KEPT_AS_SAVED, text, None, name, "warning"))
        return tree
