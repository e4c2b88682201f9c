"""Flattened parameters of all ranks, placed by `shard_metadata` and taken apart, with the optimizer state of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.flat_parameters import parameters
from ckptools.formats.flat_parameters.flat_runs import Member, end_to_end
from ckptools.formats.flat_parameters.units import Unit
from ckptools.formats.shared.merge import empty_like
from ckptools.formats.wrapped_shards.layout import (
    SHARD_METADATA,
    FlattenedParameter,
    ShardMetadata,
    ShardMetadataError,
    shard_metadata,
)
from ckptools.model.checkpoint import Fact, ModuleOrder
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.text import few, plural
from ckptools.training_state.optimizer_names import name_parameters
from ckptools.training_state.parameter_names import order_of
from ckptools.training_state.sections import find_sections, is_flat_optimizer

MAX_DEPTH = 3
"""Levels of a file's content that are searched for flattened parameters: `extra_state.ema` beside `model`."""

MAX_WORLD = 1 << 16
IN_ORDER = ModuleOrder(True, "shard_metadata lists the wrappers in the order of the module")
OWN = "each rank has one of its own (no_broadcast_optim_state), and nothing says which rank's is which"


class WrappedRanks:
    """The ranks' files of one checkpoint, each with `shard_metadata`.

    Raises:
        ReadError: the metadata of a file is not what its writers write.
    """

    def __init__(self, ranked: Sequence[tuple[int, Path, Any]], ranks: int) -> None:
        self.problems: list[Problem] = []
        self.stated = {rank: _stated(path, tree) for rank, path, tree in ranked}
        first = min(self.stated)
        self.first: ShardMetadata = self.stated[first]
        self.lengths = dict(_lengths(next(tree for rank, _, tree in ranked if rank == first), self.first))
        self.world = self._world(ranks)
        self._check_alike(first)

    @property
    def saved_as(self) -> str:
        """How it was saved, in words."""
        return f"per-rank .pt, {self.first.writer} FSDP, flattened parameters"

    def _world(self, ranks: int) -> Fact:
        """The world size: as stated, or by the lengths of the chunks, which few sizes explain."""
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
        return Fact(max(least, ranks), ("files found", SHARD_METADATA) if least <= ranks else (SHARD_METADATA,))

    def _check_alike(self, first: int) -> None:
        """Problems of files whose metadata is that of another wrapping, or of another rank."""
        for rank, stated in self.stated.items():
            if _without_padding(stated) != _without_padding(self.first):
                text = f"its {SHARD_METADATA} lists other parameters than rank {first}'s; the ranks are not of one run"
                self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, rank))
                continue
            odd = [key for key, p in stated.parameters.items() if key in self.lengths and not self._pads(rank, p)]
            if odd:
                parameter = stated.parameters[odd[0]]
                expected = self.lengths[odd[0]] - self._count(rank, parameter)
                text = f"{odd[0]} ends in {parameter.padding} elements of padding, this rank's has {expected}"
                self.problems.append(Problem(Code.STRAY_FILE, f"{text}: it is another rank's file", rank))

    def _pads(self, rank: int, parameter: FlattenedParameter) -> bool:
        """Whether a rank's parameter has the padding that its place demands."""
        expected = self.lengths[parameter.key] - self._count(rank, parameter)
        return parameter.own or parameter.padding in (None, expected)

    def _count(self, rank: int, parameter: FlattenedParameter) -> int:
        """Elements of a flattened parameter that a rank has, without padding."""
        chunk = self.lengths[parameter.key]
        return min(chunk, max(parameter.numel - rank * chunk, 0))

    # -- one rank's tree

    def placed(self, rank: int, tree: Any) -> Any:
        """A rank's tree without the metadata, its flattened parameters at their places in the whole ones."""
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
        # The first rank's tensor lists all chunks, as merging expects it; one of another length is no chunk.
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
            As `resolve_flat_shards`: that flattened parameters are taken apart, no notes, and parameters whose moments
            are theirs by the order of the module.
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
        # In the order of the metadata, in which an optimizer that was given `model.parameters()` has them.
        for key, stated in self.first.parameters.items() if self.first.ordered else self._as_in(model):
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

    def _as_in(self, model: Mapping[str, Any]) -> Iterator[tuple[str, FlattenedParameter]]:
        return ((key, self.first.parameters[key]) for key in model if key in self.lengths)


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
    """The elements of a plain tensor in a row; None for anything else."""
    if not isinstance(value, Tensor) or value.kind != "plain" or len(value.shards) != 1:
        return None
    source = value.shards[0].source
    return source.reshaped((value.numel,)) if source is not None and source.contiguous else None


def _without_padding(stated: ShardMetadata) -> ShardMetadata:
    listed = {key: parameter._replace(padding=None) for key, parameter in stated.parameters.items()}
    return stated._replace(parameters=listed)
