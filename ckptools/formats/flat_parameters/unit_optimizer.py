"""The optimizer of FSDP1 with `use_orig_params=False`, saved unchanged beside a model that was saved by name.

verl's default: the model is a state dict of DTensors (or ShardedTensors), the optimizer a plain
`optimizer.state_dict()`, where each number is a flat parameter and each moment one rank's chunk of it. The model has
names, shapes, order and how many ranks share a parameter; `unit_search.py` finds the parameters in each flat one.
Checked on verl 0.9.1 with torch 2.13, and on files of torch 2.13's own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import lru_cache
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.formats.flat_parameters.flat_runs import Member, end_to_end, is_ragged
from ckptools.formats.flat_parameters.parameters import mark_runs, name_units
from ckptools.formats.flat_parameters.unit_search import Members, units_of
from ckptools.formats.flat_parameters.units import Unit, UnknownLayoutError
from ckptools.model.regions import Box, Ints, chunk
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.parameter_names import module_of, module_places, order_of
from ckptools.training_state.sections import is_flat_optimizer

REFUSED = (
    "pieces of FSDP flat parameters (use_orig_params=False), and the model does not show what is in them: {why}; "
    "save the optimizer by name (FSDP.optim_state_dict), or write the model with --only model"
)
FOUND = (
    "its numbers are FSDP flat parameters (use_orig_params=False), and nothing says what is in them; taken apart into "
    "{params} parameters of the model by order and shapes: one way only of wrapping its modules gives these lengths "
    "(assumed: layers that are alike are wrapped alike)"
)


def unit_lengths(optimizer: Mapping[str, Any]) -> dict[Any, int | None] | None:
    """Elements of a rank's chunk of each numbered parameter, None where it has no state; None if these are no chunks.

    A chunk is padded, so that every rank's is as long; runs of single parameters (`use_orig_params=True`) are not.
    """
    if is_flat_optimizer(optimizer):
        return None
    lengths: dict[Any, int | None] = {}
    for number in (i for ids in group_ids(optimizer) for i in ids):
        entry = optimizer["state"].get(number)
        tensors = [t for t in entry.values() if isinstance(t, Tensor)] if isinstance(entry, Mapping) else []
        found = {_chunk_length(t) for t in tensors if t.shape}
        if type(number) is not int or len(found) > 1 or None in found:
            return None
        lengths[number] = found.pop() if found else None
    complete = lengths.keys() >= optimizer["state"].keys()
    return lengths if complete and any(n is not None for n in lengths.values()) else None


def _chunk_length(tensor: Tensor) -> int | None:
    plain = tensor.kind == "plain" and len(tensor.shape) == 1 and not is_ragged(tensor) and tensor.numel
    return tensor.numel if plain and all(s.source is None or s.source.contiguous for s in tensor.shards) else None


def resolve_units(optimizer: MutableMapping[str, Any], model: Mapping[str, Any], all_ranks: bool) -> tuple[str, bool]:
    """Split an optimizer of flat parameters, or mark it; return a note for the user, and whether it was one."""
    try:
        note = take_apart(optimizer, model, all_ranks)
    except UnknownLayoutError as error:
        mark_runs(optimizer["state"].values(), REFUSED.format(why=error))
        return "", True
    return note, bool(note)


def take_apart(optimizer: MutableMapping[str, Any], model: Mapping[str, Any], all_ranks: bool) -> str:
    """Replace flat parameters in an optimizer by parameters, where one way of wrapping alone fits; changed in place.

    Returns:
        What was done, for people; empty when, by these ranks, the numbers are no flat parameters.

    Raises:
        UnknownLayoutError: they are, and their content is unknown.
    """
    lengths = unit_lengths(optimizer)
    params = {k: t for k, t in model.items() if isinstance(t, Tensor) and t.sharded and is_floating(t.dtype)}
    # Some numbers must be more than one parameter; as many numbers as parameters may each be one.
    most = len(params) if all_ranks else len(params) - 1
    if lengths is None or not params or len(lengths) > most:
        return ""
    try:
        units = _units(optimizer, lengths, in_module_order(params, getattr(model, "_metadata", None)))
    except UnknownLayoutError:
        if not all_ranks:
            # Runs of single parameters look the same to one rank.
            return ""
        raise
    name_units(optimizer, units)
    return FOUND.format(params=sum(len(u.members) for u in units.values()))


def in_module_order(params: Mapping[str, Tensor], modules: Any) -> dict[str, Tensor]:
    """The parameters of a model in the order of its modules, which FSDP1's state dicts of older versions do not keep.

    Raises:
        UnknownLayoutError: the state dict's list of `modules` (`_metadata`) is none, or lacks one.
    """
    places = module_places(modules if isinstance(modules, Mapping) else {})
    ordered = {n: params[n] for n in sorted(params, key=lambda n: places.get(module_of(n), -1))}
    order = order_of(ordered, modules)
    if not order.kept:
        raise UnknownLayoutError(order.why)
    return ordered


def _units(
    optimizer: Mapping[str, Any], lengths: Mapping[Any, int | None], params: Mapping[str, Tensor]
) -> dict[Any, Unit]:
    """The unit of each number, where there is one way alone."""
    if sum(1 for ids in group_ids(optimizer) if ids) > 1:
        raise UnknownLayoutError("there are several param groups, so the order of the numbers is not the modules'")
    world, ranks = sharing(params)
    ways = [dict(way) for way in units_of(params, list(lengths.values()), ranks)]
    single = _each_one(list(lengths.values()), params, ranks)
    if single is not None and single not in ways:
        ways.append(single)
    if len(ways) != 1:
        number = "no way" if not ways else "more than one way"
        raise UnknownLayoutError(f"{number} of wrapping its modules into {len(lengths)} units gives these lengths")
    named = list(params.items())
    numbered = enumerate(lengths.items())
    return {number: _unit(str(number), [named[m] for m in ways[0][i]], world, ranks) for i, (number, _) in numbered}


def _each_one(lengths: list[int | None], params: Mapping[str, Tensor], ranks: int) -> dict[int, Members] | None:
    """The other reading: with `use_orig_params` each number is a parameter, here one that its ranks share evenly."""
    numels = [t.numel for t in params.values()]
    same = len(lengths) == len(numels) and all(a == b * ranks for a, b in zip(numels, lengths, strict=True) if b)
    return {i: (i,) for i in range(len(numels))} if same else None


def _unit(key: str, named: list[tuple[str, Tensor]], world: int, ranks: int) -> Unit:
    """A flat parameter as torch cuts it: no bytes of its own, for the model was saved by name."""
    members, numel = end_to_end([Member(name, tensor.numel, tensor.shape) for name, tensor in named])
    boxes = [chunk(numel, ranks, rank % ranks) for rank in range(world)]
    shards = tuple(Shard(Box((at,), (n,)), rank, None) for rank, (at, n) in enumerate(boxes))
    return Unit(key, Tensor((numel,), named[0][1].dtype, shards, "sharded_tensor"), members, {}, False)


def sharing(params: Mapping[str, Tensor]) -> tuple[int, int]:
    """`(world_size, ranks that share a parameter)`: the second is smaller where groups repeat each other (HSDP).

    Raises:
        UnknownLayoutError: the model is not cut as FSDP1 cuts one, or not in rank order.
    """
    worlds = {t.world_size for t in params.values()}
    world = worlds.pop() if len(worlds) == 1 else None
    if not world:
        raise UnknownLayoutError("its parameters do not show one world size")
    sizes = [n for n in range(1, world + 1) if world % n == 0 and all(_is_cut(t, n) for t in params.values())]
    if len(sizes) != 1:
        raise UnknownLayoutError("its parameters are not cut along their rows over one number of ranks")
    for name, tensor in params.items():
        boxes = _chunks(tensor.shape, sizes[0])
        for shard in tensor.shards:
            if shard.rank is not None and shard.box.numel and shard.box != boxes[shard.rank % sizes[0]]:
                raise UnknownLayoutError(f"rank {shard.rank} does not hold the piece of {name} that its number says")
    return world, sizes[0]


def _is_cut(tensor: Tensor, ranks: int) -> bool:
    """Whether the pieces of a tensor are those of `ranks` chunks of its rows."""
    boxes = _chunks(tensor.shape, ranks) if tensor.shape else ()
    return {s.box for s in tensor.shards if s.box.numel} == {b for b in boxes if b.numel}


@lru_cache(maxsize=1024)
def _chunks(shape: Ints, ranks: int) -> tuple[Box, ...]:
    """The rows of a tensor on each of `ranks`."""
    rows, rest = (chunk(shape[0], ranks, i) for i in range(ranks)), shape[1:]
    return tuple(Box((at, *(0,) * len(rest)), (n, *rest)) for at, n in rows)
