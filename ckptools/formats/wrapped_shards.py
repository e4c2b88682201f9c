"""Rank files of FSDP in fairscale and torch_xla, placed by the `shard_metadata` in the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.formats.flat_parameters import parameters
from ckptools.formats.flat_parameters.units import Member, Unit, end_to_end
from ckptools.model.facts import FILES_FOUND, Fact, ModuleOrder
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import empty_like
from ckptools.rules.files import ANOTHER, FileClaims, misplaced
from ckptools.text import KeyPath, few, fqn_of, plural
from ckptools.training_state.optimizers import name_parameters, order_of
from ckptools.training_state.sections import find_sections, is_flat_optimizer
from ckptools.training_state.wrappers import without_wrappers

if TYPE_CHECKING:
    from ckptools.pickles.reader import Saved


# -- the layout in `shard_metadata`: the parameters in each flattened one, in order, and each rank's padding -----------
# fairscale (`FullyShardedDataParallel.local_metadata_dict`), saved by metaseq, fairseq, VISSL and others:
#
#     {"param_metadata": [{"fsdp_path": "block", "params": {"flat_param_0": {"names", "shapes", "numels", "padding"}},
#                          "no_broadcast_optim_state": False, "shared_param_info": [(first, other)]}],
#      "buffer_names": [...]}
#
# A wrapper's names are below its path. Each flattened parameter is cut into as many chunks as there are ranks, of which
# all but the last are full; `padding` counts the elements behind this rank's own. In `shared_param_info` the last
# parts of the two names are exchanged, as that of one comes with the module of the other. No file states its rank.
# Source: fairscale/nn/data_parallel/fully_sharded_data_parallel.py (`_get_shard`, `local_metadata_dict`,
# `consolidate_shard_weights`); checked on files of 0.4.13.
#
# torch_xla (`XlaFullyShardedDataParallel.get_shard_metadata`):
#
#     {"shard_info": {"path": {"_fsdp_shard…": {"_orig_name", "_orig_size"}}}, "flatten_info": {"path.flat_param_0":
#      (names, shapes, numels)}, "buffer_info": {}, "world_size": 4, "rank": 0}
#
# Every rank has equally many elements, and elements behind the last parameter are padding. Source:
# torch_xla/distributed/fsdp/xla_fully_sharded_data_parallel.py, state_dict_utils.py; checked on files made by hand.

SHARD_METADATA = "shard_metadata"
MAX_NAMES = 1 << 20
MAX_DIMS = 64
MAX_SIZE = 1 << 62


class ShardMetadataError(ValueError):
    """`shard_metadata` is not as its writers write it; the message says why."""


class FlattenedParameter(NamedTuple):
    """A flattened parameter in a wrapper's state dict, and the parameters in it.

    Attributes:
        key: its name in the state dict.
        names: of the parameters in it, in order.
        shapes: of these, in order.
        tied: second names of some of them, with the first name.
        padding: elements behind this rank's own; None if that is not stated.
        own: whether each rank has a parameter of its own, whose rank is unknown.
    """

    key: str
    names: tuple[str, ...]
    shapes: tuple[Ints, ...]
    tied: Mapping[str, str]
    padding: int | None = None
    own: bool = False

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(map(prod, self.shapes))


class ShardMetadata(NamedTuple):
    """The content of `shard_metadata`.

    Attributes:
        writer: the library that wrote it, in words.
        parameters: by their names in the state dict, in the order of the module if `ordered`.
        world_size: None if it is not stated.
        ordered: whether its order is that of `model.parameters()`.
    """

    writer: str
    parameters: Mapping[str, FlattenedParameter]
    world_size: int | None
    ordered: bool


def stated_claim(tree: Any) -> tuple[int, int] | None:
    """Rank and world size in a file's metadata, as torch_xla states them; None if they are not stated."""
    stated = tree.get(SHARD_METADATA) if isinstance(tree, Mapping) else None
    rank, world = (stated.get("rank"), stated.get("world_size")) if isinstance(stated, Mapping) else (None, None)
    return (rank, world) if type(rank) is int and type(world) is int and 0 <= rank < world <= MAX_NAMES else None


def shard_metadata(tree: Mapping[str, Any]) -> ShardMetadata:
    """Read the metadata in a file's content.

    Raises:
        ShardMetadataError: it is not as its writers write it.
    """
    stated = tree[SHARD_METADATA]
    try:
        if "param_metadata" in stated:
            listed = list(_of_fairscale(stated["param_metadata"]))
            flat = all(p.key.rpartition(".")[2].startswith("flat_param_") for p in listed)
            return ShardMetadata("fairscale", _by_key(listed), None, flat)
        claim = stated_claim(tree)
        if claim is None:
            raise ShardMetadataError("it states no rank of a world size")
        return ShardMetadata("torch_xla", _by_key(list(_of_xla(stated))), claim[1], False)
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardMetadataError(f"expected names, shapes and numels of each wrapper ({error})") from error


def _by_key(listed: Sequence[FlattenedParameter]) -> dict[str, FlattenedParameter]:
    found = {parameter.key: parameter for parameter in listed}
    names = [name for parameter in listed for name in parameter.names]
    if len(found) < len(listed) or len(set(names)) < len(names):
        raise ShardMetadataError("it lists a parameter twice")
    return found


def _of_fairscale(wrappers: Sequence[Mapping[str, Any]]) -> Iterator[FlattenedParameter]:
    for wrapper in wrappers:
        path = str(wrapper["fsdp_path"])
        tied = [(str(first), str(other)) for first, other in wrapper["shared_param_info"]]
        for backing, stated in wrapper["params"].items():
            names, shapes = _parameters(stated["names"], stated["shapes"], stated["numels"])
            padding = stated["padding"]
            if type(padding) is not int or not 0 <= padding < MAX_SIZE:
                raise ShardMetadataError(f"{backing} has no padding")
            full = tuple(_below(path, name) for name in names)
            of_names = dict(_tied(names, tied))
            shared = {_below(path, other): _below(path, first) for other, first in of_names.items()}
            own = wrapper["no_broadcast_optim_state"] is not False
            yield FlattenedParameter(_below(path, str(backing)), full, shapes, shared, padding, own)


def _tied(names: Sequence[str], stated: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Second names of a wrapper's parameters with the first, from pairs whose last parts are exchanged."""
    for first, other in stated:
        (path_of_first, _, last_of_other), (path_of_other, _, last_of_first) = (
            first.rpartition("."),
            other.rpartition("."),
        )
        kept = _below(path_of_first, last_of_first)
        if kept in names:
            yield _below(path_of_other, last_of_other), kept


def _of_xla(stated: Mapping[str, Any]) -> Iterator[FlattenedParameter]:
    flattened = stated["flatten_info"]
    for path, shards in stated["shard_info"].items():
        for suffix, shard in shards.items():
            name, size = _below(str(path), str(shard["_orig_name"])), _shape(shard["_orig_size"])
            names: tuple[str, ...] = (name,)
            shapes: tuple[Ints, ...] = (size,)
            if name in flattened:
                listed, shapes = _parameters(*flattened[name])
                names = tuple(_below(name.rpartition(".")[0], one) for one in listed)
                if sum(map(prod, shapes)) != prod(size):
                    raise ShardMetadataError(f"{name} has {prod(size)} elements, the parameters in it have others")
            yield FlattenedParameter(_below(str(path), str(suffix)), tuple(map(without_wrappers, names)), shapes, {})


def _parameters(names: Any, shapes: Any, numels: Any) -> tuple[tuple[str, ...], tuple[Ints, ...]]:
    """The names and shapes in one flattened parameter, checked against the stated numbers of elements."""
    found = tuple(map(_shape, shapes))
    if not len(names) == len(found) == len(numels) or len(names) > MAX_NAMES or not names:
        raise ShardMetadataError("it has not as many names as shapes")
    if [prod(shape) for shape in found] != list(numels) or not all(isinstance(name, str) for name in names):
        raise ShardMetadataError(f"the shapes of {str(names[0])[:100]} and others have not as many elements as it says")
    return tuple(names), found


def _shape(stated: Any) -> Ints:
    shape = tuple(stated)
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < MAX_SIZE for n in shape):
        raise ShardMetadataError("it states a shape that is none")
    return shape


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- flattened parameters of all ranks, placed by `shard_metadata` and split, with the optimizer state of each ---------

MAX_DEPTH = 3
"""Levels of a file's content that are searched for flattened parameters: `extra_state.ema` beside `model`."""

MAX_WORLD = 1 << 16
IN_ORDER = ModuleOrder(True, "shard_metadata lists the wrappers in the order of the module")
OWN = "each rank has one of its own (no_broadcast_optim_state), and nothing says which rank's is which"


class WrappedRanks:
    """The ranks' files of one checkpoint, each with `shard_metadata`.

    Raises:
        ReadError: the metadata of a file is not as its writers write it.
    """

    def __init__(self, ranked: Sequence[tuple[int, Path, Any]], ranks: int) -> None:
        self.problems: list[Problem] = []
        self.paths = {rank: path for rank, path, _ in ranked}
        self.stated = {rank: _stated(path, tree) for rank, path, tree in ranked}
        first = min(self.stated)
        self.first: ShardMetadata = self.stated[first]
        self.lengths = dict(_lengths(next(tree for rank, _, tree in ranked if rank == first), self.first))
        self.world = self._world(ranks)
        self._check_alike(first)

    @property
    def saved_as(self) -> str:
        """How the checkpoint was saved, in words."""
        return f"per-rank .pt, {self.first.writer} FSDP, flattened parameters"

    def _world(self, ranks: int) -> Fact:
        """The world size: as stated, or by the lengths of the chunks, which only few sizes explain."""
        if self.first.world_size is not None:
            return Fact(self.first.world_size, (SHARD_METADATA,))
        least, most = 1, MAX_WORLD
        for key, chunk in self.lengths.items():
            numel = self.first.parameters[key].numel
            if not self.first.parameters[key].own and numel and chunk:
                least = max(least, -(-numel // chunk))
                most = min(most, (numel - 1) // (chunk - 1) if chunk > 1 else most)
        if least > most or ranks > most:
            text = f"{ranks} files, and the lengths of its flattened parameters are those of {least} to {most} ranks"
            self.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text))
        return Fact(max(least, ranks), (FILES_FOUND, SHARD_METADATA) if least <= ranks else (SHARD_METADATA,))

    def _check_alike(self, first: int) -> None:
        """Find files with the metadata of another wrapping, or of another rank."""
        for rank, stated in self.stated.items():
            if _without_padding(stated) != _without_padding(self.first):
                text = f"its {SHARD_METADATA} lists other parameters than rank {first}'s; the ranks are not of one run"
                self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, rank))
                continue
            odd = [key for key, p in stated.parameters.items() if key in self.lengths and not self._pads(rank, p)]
            if odd:
                parameter = stated.parameters[odd[0]]
                expected = self.lengths[odd[0]] - self._count(rank, parameter)
                by = f"{odd[0]} ends in {parameter.padding} elements of padding, this rank's has {expected}"
                claims = FileClaims(self.paths[rank], rank, {"rank": rank}, ANOTHER, by)
                self.problems += misplaced([claims])

    def _pads(self, rank: int, parameter: FlattenedParameter) -> bool:
        """Whether a rank's parameter has the padding that its place implies."""
        expected = self.lengths[parameter.key] - self._count(rank, parameter)
        return parameter.own or parameter.padding in (None, expected)

    def _count(self, rank: int, parameter: FlattenedParameter) -> int:
        """Number of elements of a flattened parameter on a rank, without padding."""
        chunk = self.lengths[parameter.key]
        return min(chunk, max(parameter.numel - rank * chunk, 0))

    # -- one rank's tree

    def placed(self, rank: int, tree: Any) -> Any:
        """A rank's tree without the metadata, with its flattened parameters placed in the whole ones."""
        return self._placed(rank, {k: v for k, v in tree.items() if k != SHARD_METADATA}, MAX_DEPTH)

    def _placed(self, rank: int, node: Any, depth: int) -> Any:
        if not isinstance(node, dict) or not depth:
            return node
        made = empty_like(node)
        for key, value in node.items():
            source = _flat_source(value) if key in self.lengths else None
            made[key] = self._run(rank, key, value, source) if source else self._placed(rank, value, depth - 1)
        return made

    def _run(self, rank: int, key: str, tensor: Tensor, source: Source) -> Tensor:
        parameter, chunk, world = self.first.parameters[key], self.lengths[key], min(self.world.value or 1, MAX_WORLD)
        if parameter.own and world > 1:
            return replace(tensor, kind="flat_pieces", note=OWN)
        # The first rank's tensor lists all chunks, as merging expects it; a tensor of another length is not a chunk.
        count = self._count(rank, parameter)
        shards = [self._chunk(r, parameter) for r in range(world) if r != rank] if rank == min(self.stated) else []
        if source.shape[0] == chunk:
            shards.append(self._chunk(rank, parameter)._replace(source=source.part(Box((0,), (count,)))))
        placed = in_rank_order(shards)
        return replace(tensor, shape=(parameter.numel,), shards=placed, kind="flat_pieces", world_size=world)

    def _chunk(self, rank: int, parameter: FlattenedParameter) -> Shard:
        start = min(rank * self.lengths[parameter.key], parameter.numel)
        return Shard(Box((start,), (self._count(rank, parameter),)), rank, None)

    # -- the tree of all ranks

    def take_apart(self, tree: Any) -> tuple[bool, dict[KeyPath, str], set[str]]:
        """Replace the flattened parameters in the ranks' tree, and name the optimizer's; changes the tree's dicts.

        Returns:
            As `resolve_flat_shards`: that flattened parameters are split, no notes, and parameters whose moments
            are named by the order of the module.
        """
        models = list(self._models(tree, (), MAX_DEPTH))
        optimizers = [s.value for s in find_sections(tree) if s.kind == "optimizer"]
        units = [list(self._units(path, model)) for path, model in models]
        for (_, model), found in zip(models, units, strict=True):
            parameters.take_apart(model, found, OWN, ())
        absent = [key for key in self.first.parameters if key not in self.lengths]
        if absent:
            lost = plural(len(absent), "flattened parameter")
            text = f"{lost} that {SHARD_METADATA} lists are in no file: {few(absent)}"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        assumed: set[str] = set()
        for optimizer in optimizers if units else ():
            if not is_flat_optimizer(optimizer) and isinstance(optimizer["state"], MutableMapping):
                assumed |= name_moments(optimizer, units[0], self._order(units[0], models[0][1]))
        return True, {}, assumed

    def _order(self, units: Sequence[Unit], model: Mapping[str, Any]) -> ModuleOrder:
        if self.first.ordered:
            return IN_ORDER
        return order_of({unit.key: unit.flat for unit in units}, getattr(model, "_metadata", None))

    def _models(self, node: Any, path: KeyPath, depth: int) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
        if isinstance(node, dict):
            if any(isinstance(node.get(key), Tensor) for key in self.lengths):
                yield path, node
            for key, value in node.items() if depth else ():
                yield from self._models(value, (*path, key), depth - 1)

    def _units(self, path: KeyPath, model: Mapping[str, Any]) -> Iterator[Unit]:
        # In the order of the metadata, which is that of an optimizer made from `model.parameters()`.
        listed = self.first.parameters if self.first.ordered else [key for key in model if key in self.lengths]
        for key in listed:
            stated = self.first.parameters[key]
            flat = model.get(key)
            if not isinstance(flat, Tensor) or flat.note:
                continue
            if flat.shape != (stated.numel,):
                text = f"has {flat.shape} elements, {SHARD_METADATA} says {stated.numel}"
                self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, fqn_of((*path, key))))
                continue
            named = zip(stated.names, stated.shapes, strict=True)
            members, _ = end_to_end([Member(n, Tensor(s, flat.dtype, ()).numel, s) for n, s in named])
            yield Unit(key, flat, members, stated.tied, False)


def name_moments(optimizer: MutableMapping[str, Any], units: Sequence[Unit], order: ModuleOrder) -> set[str]:
    """Name the flat moments of an optimizer, in place; return the parameters that are named by the order alone."""
    by_key = {unit.key: unit for unit in units}
    naming = name_parameters(optimizer, {key: parameters.as_moment(u) for key, u in by_key.items()}, order)
    if naming.by == "fqn":
        return set()
    parameters.name_units(optimizer, {number: by_key[key] for number, key in naming.names.items() if key in by_key})
    return {member.key for number in naming.assumed for member in by_key[naming.names[number]].members}


def _stated(path: Path, tree: Any) -> ShardMetadata:
    try:
        return shard_metadata(tree)
    except ShardMetadataError as error:
        raise ReadError(path, f"has a {SHARD_METADATA} that cannot be understood: {error}") from error


def _lengths(tree: Any, stated: ShardMetadata, depth: int = MAX_DEPTH) -> Iterator[tuple[str, int]]:
    """Elements of each flattened parameter in one rank's file, padding included."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        source = _flat_source(value) if key in stated.parameters else None
        if source is not None:
            yield key, source.shape[0]
        elif depth and key != SHARD_METADATA:
            yield from _lengths(value, stated, depth - 1)


def _flat_source(value: Any) -> Source | None:
    """The elements of a plain contiguous tensor; None for any other value."""
    if not isinstance(value, Tensor) or value.kind != "plain" or len(value.shards) != 1:
        return None
    source = value.shards[0].source
    return source.reshaped((value.numel,)) if source is not None and source.contiguous else None


def _without_padding(stated: ShardMetadata) -> ShardMetadata:
    listed = {key: parameter._replace(padding=None) for key, parameter in stated.parameters.items()}
    return stated._replace(parameters=listed)


# -- the rank files ----------------------------------------------------------------------------------------------------


def wrapped_ranks(saved: Mapping[Path, Saved], ranks: Mapping[Path, int], first: Path) -> WrappedRanks | None:
    """The ranks whose files were read, placed by their metadata; None if the first file has none.

    Raises:
        ReadError: the metadata of a file is not as its writers write it.
    """
    content = saved[first].content
    stated = content.get(SHARD_METADATA) if isinstance(content, Mapping) else None
    if not isinstance(stated, Mapping) or not ("param_metadata" in stated or "shard_info" in stated):
        return None
    ranked = [(ranks[path], path, one.tree) for path, one in saved.items()]
    return WrappedRanks(ranked, 1 + max(ranks.values()))
