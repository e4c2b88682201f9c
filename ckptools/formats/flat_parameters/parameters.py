"""Split FSDP1 flat parameters (LOCAL_STATE_DICT), with their optimizer state, into the original parameters.

FSDP1 joins the parameters of a wrapped unit into one 1-D tensor and cuts that over the ranks. LOCAL_STATE_DICT saves it
so: `<path of the unit>._flat_param`, a 1-D ShardedTensor (`flat_param` in torch 1.13), without a description.

- It contains the unit's parameters in module order, without those of nested units, and a parameter that is shared
  within the unit once. `use_orig_params=False`: one directly behind the other.
- `use_orig_params=True`: each begins at 16 bytes of the dtype of the forward pass, so that a float32 parameter
  under bfloat16 mixed precision begins at a multiple of 8 elements; the end is padded to a multiple of the ranks
  (torch 2.1 on; 2.0 pads nothing). Beside it the file holds every parameter under its own name, as this rank's 1-D run
  of it, empty if the rank has none; tied names hold the same run.
- Optimizer state by number: `use_orig_params=False` numbers the flat parameters, and the moments have every rank's
  padding; `use_orig_params=True` numbers the parameters, and ranks without elements have no entry. Saved by name
  (`FSDP.optim_state_dict`) it has full shapes, and the parameters of a unit in the order in which they were flattened.

The places of parameters follow from their shapes and their order, and are accepted only if they explain every flat
parameter to the last element, and every stored run. Source: torch/distributed/fsdp/_flat_param.py
(`_init_flat_param_and_metadata`, `_get_aligned_numel`), _state_dict_utils.py (`_local_post_state_dict_hook`),
_optim_utils.py; checked on files of torch 2.0.1 (Composer 0.14.1), 2.6.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.formats.flat_parameters.units import (
    FlatRun,
    Member,
    Members,
    Unit,
    UnknownLayoutError,
    end_to_end,
    infer_flat_layout,
    is_ragged,
    joined,
    overlap,
    run_of,
    shards_of,
    storage_of,
    units_of,
)
from ckptools.formats.shared.given_names_and_shapes import Shapes
from ckptools.model.facts import GivenNames, ModuleOrder
from ckptools.model.regions import Box, Ints, chunk
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.tensor_io.copies import is_constant
from ckptools.text import KeyPath
from ckptools.training_state.optimizers import (
    AS_SAVED,
    believed,
    group_ids,
    is_flat_parameter,
    module_of,
    module_places,
    name_parameters,
    name_with,
    order_of,
)
from ckptools.training_state.roles import candidates
from ckptools.training_state.sections import find_sections, is_flat_optimizer
from ckptools.training_state.wrappers import without_wrappers


def runs_of_member(member: Member, runs: Iterable[FlatRun]) -> Iterator[FlatRun]:
    """The parts of a flat parameter's runs in a member, with starts relative to the member's first element."""
    for run in runs:
        low, high = overlap(member, run)
        if low < high:
            yield run._replace(start=low - member.start, length=high - low, at=run.at + low - run.start)


def runs_of(unit: Unit) -> list[FlatRun]:
    """The ranks' runs of a flat parameter."""
    return [run_of(s) for s in unit.flat.shards]


def take_apart(model: MutableMapping[str, Any], units: Sequence[Unit], note: str, order: Iterable[str]) -> None:
    """Replace the flat parameters of a model by the parameters in them, in place; `note` is for runs of unknown shape.

    The names in `order` are in module order, as far as known.
    """
    made: dict[str, Any] = {}
    by_key = {u.key: u for u in units}
    named = {k: v for u in units if u.original for k, v in _parameters(u, model, note)}
    for key, value in model.items():
        if key in by_key:
            made |= {} if by_key[key].original else dict(_parameters(by_key[key], model, note))
        else:
            made[key] = named.get(key, value)
    places = {name: i for i, name in enumerate(order)}
    last = -1
    at: dict[str, int] = {}
    for key in made:
        at[key] = last = places.get(without_wrappers(key), last)
    model.clear()
    model.update((key, made[key]) for key in sorted(made, key=at.__getitem__))


def _parameters(unit: Unit, model: Mapping[str, Any], note: str) -> Iterator[tuple[str, Tensor]]:
    runs = runs_of(unit)
    found = {
        m.key: _unplaced(model[m.key], note) if m.shape is None else _part(unit.flat, m, runs) for m in unit.members
    }
    yield from found.items()
    yield from ((name, found[first]) for name, first in unit.tied.items())


# -- optimizer state ---------------------------------------------------------------------------------------------------
# Without `use_orig_params` a number is a flat parameter, and its moments are every rank's chunk with padding that the
# saved parameter lacks; they are split like the flat parameter, so one number becomes the names of its parameters. With
# it a number is a parameter, and its moments are the ranks' runs; numbers stay.

UNPLACED_RUN = "a run of a flattened parameter, and more than one parameter may be the one, or none"


def shapes_by_name(optimizer: Mapping[str, Any], of_dcp: bool = False) -> Shapes | None:
    """The shapes of the moments in an optimizer state that is keyed by name; None without any.

    In a DCP every tensor is whole, and the order of its keys is not that of the state dict.
    """
    if is_flat_optimizer(optimizer) or not all(isinstance(k, str) for k in optimizer["state"]):
        return None
    found: dict[str, Ints] = {}
    for fqn, entry in optimizer["state"].items():
        tensors = [t for t in entry.values() if isinstance(t, Tensor)] if isinstance(entry, Mapping) else []
        shapes = {t.shape for t in tensors if (t.sharded or (of_dcp and t.shape)) and not t.note}
        if len(shapes) == 1:
            found[fqn] = shapes.pop()
    listed = [fqn for group in group_ids(optimizer) for fqn in group]
    complete = set(listed) == set(found) and len(listed) == len(found)
    names = listed if complete else list(found)
    order = ModuleOrder(complete or not of_dcp, "FSDP lists what it flattened in order")
    return Shapes("the optimizer state", {fqn: found[fqn] for fqn in names}, {}, order) if found else None


def resolve_optimizer(
    optimizer: MutableMapping[str, Any], model: Mapping[str, Any], units: Sequence[Unit], given: GivenNames | None
) -> None:
    """Place the moments of an optimizer, in place; its model has the parameters of `units` instead of flat ones.

    Raises:
        RefusedError: the given names for numbers do not fit.
    """
    if is_flat_optimizer(optimizer) or any(isinstance(k, str) for k in optimizer["state"]):
        return
    originals = {u.original for u in units}
    if originals == {True}:
        names = name_with(optimizer, model, believed(AS_SAVED, model), given).names
        members = {m.key: (m, u) for u in units for m in u.members}
        for number, entry in optimizer["state"].items():
            member, unit = members.get(names.get(number, ""), (None, None))
            for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
                if isinstance(tensor, Tensor) and _is_run(tensor):
                    found = _run_of(tensor, member, unit) if member and unit else None
                    entry[slot] = _unplaced(tensor) if found is None else found
    elif originals == {False}:
        by_key = {u.key: u for u in units}
        flat = {u.key: as_moment(u) for u in units}
        names = name_parameters(optimizer, flat, order_of(flat, getattr(model, "_metadata", None))).names
        name_units(optimizer, {number: by_key[key] for number, key in names.items() if key in by_key})
    else:
        mark_runs(optimizer["state"].values())


def mark_runs(entries: Iterable[Any], note: str = "") -> None:
    """Mark the 1-D tensors of an optimizer state as runs without a known place."""
    for entry in entries:
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and _is_run(tensor):
                entry[slot] = _unplaced(tensor, note)


def _is_run(tensor: Tensor) -> bool:
    return tensor.kind == "plain" and len(tensor.shape) == 1


def _unplaced(tensor: Tensor, note: str = "") -> Tensor:
    note = note or f"{UNPLACED_RUN}; consolidate the model with {spelled('only', 'model')}"
    return replace(tensor, kind="flat_pieces", note=note)


def _run_of(moment: Tensor, member: Member, unit: Unit) -> Tensor | None:
    """The moments of one parameter; None if they are not as long as the parameter's runs."""
    if member.shape is None:
        return None
    shards = {s.rank: s for s in moment.found}
    runs = []
    for run in runs_of_member(member, runs_of(unit)):
        shard = shards.pop(run.rank, None)
        if shard and shard.box.numel != run.length:
            return None
        runs.append(run._replace(source=shard.source if shard else None, at=0))
    if any(shard.box.numel for shard in shards.values()):
        return None
    return replace(moment, shape=member.shape, shards=joined(member.shape, runs), kind="flat_pieces")


def name_units(optimizer: MutableMapping[str, Any], units: Mapping[Any, Unit]) -> None:
    """Name the parameters in an optimizer that numbers flat ones, in place; a number without a unit gets a note."""
    state: dict[Any, Any] = {}
    for number, entry in optimizer["state"].items():
        unit = units.get(number)
        if unit is None or not isinstance(entry, Mapping):
            mark_runs([entry])
            state[number] = entry
        else:
            state |= dict(_entries(unit, entry))
    optimizer["state"].clear()
    optimizer["state"].update(state)
    names = {number: [member.key for member in unit.members] for number, unit in units.items()}
    for group, ids in zip(optimizer["param_groups"], group_ids(optimizer), strict=True):
        if ids and isinstance(group, MutableMapping):
            group["params"] = [fqn for i in ids for fqn in names.get(i, [i])]


def as_moment(unit: Unit) -> Tensor:
    """A flat parameter with the padding of its moments: all ranks whose files were read have chunks of one length."""
    size = _chunk_size(unit)
    shards = tuple(s._replace(box=Box((0,), (size,))) for s in unit.flat.found)
    return replace(unit.flat, shape=(size,), shards=shards, kind="plain")


def _chunk_size(unit: Unit) -> int:
    """Elements of a rank's chunk with padding: the length of the first chunk, which is always full."""
    return max((s.box.numel for s in unit.flat.shards), default=0)


def _entries(unit: Unit, entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of each parameter of a unit; a value other than a run belongs to every parameter."""
    by_slot = {slot: _padded(unit, t) for slot, t in entry.items() if isinstance(t, Tensor) and _is_run(t)}
    for member in unit.members:
        found = dict(entry)
        for slot, runs in by_slot.items():
            found[slot] = _part(entry[slot], member, runs)
        yield member.key, found


def _part(whole: Tensor, member: Member, runs: Sequence[FlatRun] | None) -> Tensor:
    """A parameter from the runs of a flat parameter, or its moments from the runs of flat moments."""
    if runs is None or member.shape is None:
        return _unplaced(whole)
    shards = joined(member.shape, runs_of_member(member, runs))
    return replace(whole, shape=member.shape, shards=shards, kind="flat_pieces")


def _padded(unit: Unit, moment: Tensor) -> list[FlatRun] | None:
    """The runs of a flat parameter's moments; None if a rank's are not as long as its chunk."""
    shards: dict[int | None, Shard] = {s.rank: s for s in moment.found}
    if any(shard.box.numel != _chunk_size(unit) for shard in shards.values()):
        return None
    sources = {rank: shard.source for rank, shard in shards.items()}
    return [run._replace(source=sources.get(run.rank)) for run in runs_of(unit)]


# -- the optimizer of FSDP1 with `use_orig_params=False`, saved unchanged beside a model that was saved by name --------
# verl's default: the model is a state dict of DTensors (or ShardedTensors), the optimizer a plain
# `optimizer.state_dict()`, where each number is a flat parameter and each moment one rank's chunk of it. The model has
# names, shapes, order and the number of ranks that share a parameter; `units_of` finds the parameters in each flat one.
# Checked on verl 0.9.1 with torch 2.13, and on torch 2.13's own files.

FOUND = (
    "its numbers are FSDP flat parameters (use_orig_params=False), and nothing says what is in them; taken apart into "
    "{params} parameters of the model by order and shapes: one way only of wrapping its modules gives these lengths "
    "(assumed: layers that are alike are wrapped alike)"
)


def unit_lengths(optimizer: Mapping[str, Any]) -> dict[Any, int | None] | None:
    """Chunk length in elements of each numbered parameter, None without state; None if the state does not have chunks.

    A chunk is padded, so that all ranks' have one length; runs of single parameters (`use_orig_params=True`) have not.
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


def take_optimizer_apart(optimizer: MutableMapping[str, Any], model: Mapping[str, Any], all_ranks: bool) -> str:
    """Replace flat parameters in an optimizer by parameters, in place, if only one way of wrapping fits.

    Returns:
        A note for people; empty if, judged by these ranks, the numbers are not flat parameters.

    Raises:
        UnknownLayoutError: they are flat parameters, and their content is unknown.
    """
    lengths = unit_lengths(optimizer)
    params = {k: t for k, t in model.items() if isinstance(t, Tensor) and t.sharded and is_floating(t.dtype)}
    # Some numbers must stand for several parameters; otherwise each may be one parameter.
    most = len(params) if all_ranks else len(params) - 1
    if lengths is None or not params or len(lengths) > most:
        return ""
    try:
        units = _units(optimizer, lengths, in_module_order(params, getattr(model, "_metadata", None)))
    except UnknownLayoutError:
        if not all_ranks:
            # On a single rank, runs of single parameters look the same.
            return ""
        raise
    name_units(optimizer, units)
    return FOUND.format(params=sum(len(u.members) for u in units.values()))


def in_module_order(params: Mapping[str, Tensor], modules: Any) -> dict[str, Tensor]:
    """The parameters of a model in the order of its modules, which FSDP1's state dicts of older versions do not keep.

    Raises:
        UnknownLayoutError: the state dict has no list of `modules` (`_metadata`), or the list lacks one.
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
    """The unit of each number, if there is only one possible assignment."""
    if sum(1 for ids in group_ids(optimizer) if ids) > 1:
        raise UnknownLayoutError("there are several param groups, so the order of the numbers is not the modules'")
    world, ranks = sharing(params)
    ways = [dict(way) for way in units_of(params, list(lengths.values()), ranks)]
    # The other reading: with `use_orig_params` each number is a parameter, here one that its ranks share evenly.
    single: dict[int, Members] = {i: (i,) for i in range(len(params))}
    pairs = zip((t.numel for t in params.values()), lengths.values(), strict=False)
    if len(lengths) == len(params) and all(a == b * ranks for a, b in pairs if b) and single not in ways:
        ways.append(single)
    if len(ways) != 1:
        number = "no way" if not ways else "more than one way"
        raise UnknownLayoutError(f"{number} of wrapping its modules into {len(lengths)} units gives these lengths")
    named = list(params.items())
    numbered = enumerate(lengths.items())
    return {number: _unit(str(number), [named[m] for m in ways[0][i]], world, ranks) for i, (number, _) in numbered}


def _unit(key: str, named: list[tuple[str, Tensor]], world: int, ranks: int) -> Unit:
    """A flat parameter as torch cuts it, without bytes of its own, because the model was saved by name."""
    members, numel = end_to_end([Member(name, tensor.numel, tensor.shape) for name, tensor in named])
    boxes = [chunk(numel, ranks, rank % ranks) for rank in range(world)]
    shards = tuple(Shard(Box((at,), (n,)), rank, None) for rank, (at, n) in enumerate(boxes))
    return Unit(key, Tensor((numel,), named[0][1].dtype, shards, "sharded_tensor"), members, {}, False)


def sharing(params: Mapping[str, Tensor]) -> tuple[int, int]:
    """`(world_size, ranks that share a parameter)`: the second is smaller if groups repeat each other (HSDP).

    Raises:
        UnknownLayoutError: the model is not cut as FSDP1 does it, or not in rank order.
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
    """Whether the shards of a tensor are the `ranks` chunks of its rows."""
    boxes = _chunks(tensor.shape, ranks) if tensor.shape else ()
    return {s.box for s in tensor.shards if s.box.numel} == {b for b in boxes if b.numel}


@lru_cache(maxsize=1024)
def _chunks(shape: Ints, ranks: int) -> tuple[Box, ...]:
    rows, rest = (chunk(shape[0], ranks, i) for i in range(ranks)), shape[1:]
    return tuple(Box((at, *(0,) * len(rest)), (n, *rest)) for at, n in rows)


# -- pieces of flattened parameters: FSDP1's local state, and its optimizer state under `use_orig_params` --------------
# In a plain `optimizer.state_dict()` a rank's runs are 1-D tensors without their place. They can be placed if the
# parameter's shape is known (from a DTensor model saved beside it, as verl does): in rank order they follow each other
# and together have as many elements as the parameter. If the shape is unknown, or equal lengths may be pieces or
# replicas, they stay unplaced: nothing is joined by guessing. Checked on verl 0.9.1 files.

LOCAL = "FSDP1 local state: a piece of a flattened parameter"
UNPLACED_PIECE = (
    "a 1-D piece in a sharded checkpoint whose parameter's shape is not known, so it may be a replica or a part"
)


def _no_shapes() -> str:
    given = f"give them with {spelled('shapes')} (another checkpoint, or a JSON of name to shape in module order)"
    return f"{LOCAL}, and the file holds no shapes to place it by; {given}, or save with SHARDED_STATE_DICT"


def resolve_flat_shards(
    tree: Any,
    all_ranks: bool,
    shapes: Shapes | None = None,
    by_name: Shapes | None = None,
    given: GivenNames | None = None,
) -> tuple[bool, dict[KeyPath, str], set[str]]:
    """Place the flat shards of a merged tree that can be placed, and note the others; changes the tree's dicts.

    Without all ranks the place of a piece is unknown; its tensor then has the parameter's shape and no shards. Shapes
    are given by the user, or come from an optimizer state elsewhere (`by_name`); given names are for numbers.

    Returns:
        Whether the model was saved as flat parameters; notes for the user, by the key path of an optimizer; and the
        parameters that replaced a number, by the model's order.

    Raises:
        RefusedError: the given names do not fit.
    """
    sections = find_sections(tree)
    likely = candidates(sections)
    optimizers = {s.path: s.value for s in sections if s.kind == "optimizer"}
    local = [s for s in sections if s.kind == "model" and any(map(is_flat_parameter, s.value))]
    trained = [s for s in local if s in likely]
    known = _shapes_by_name(optimizers.values(), by_name)
    if len(trained) == 1 and _take_apart(trained[0].value, list(optimizers.values()), shapes, known, all_ranks, given):
        for section in local:  # an average of the weights is flat like the model
            if section is not trained[0] and not _take_apart(section.value, [], shapes, known, all_ranks, given):
                _mark_local(section.value, _no_shapes())
        return True, {}, set()
    for section in local:
        _mark_local(section.value, _no_shapes())
    notes, assumed = dict[KeyPath, str](), set[str]()
    model = likely[0].value if len(likely) == 1 else None
    for path, optimizer in optimizers.items():
        note = _resolve_optimizer(optimizer, model, all_ranks, given)
        if note:
            notes[path] = note
            assumed |= {name for names in group_ids(optimizer) for name in names}
    return bool(local), notes, assumed


def _shapes_by_name(optimizers: Iterable[Mapping[str, Any]], otherwise: Shapes | None) -> Shapes | None:
    """The shapes that the only optimizer with names states, if there is one."""
    found = [named for o in optimizers if (named := shapes_by_name(o)) is not None]
    return found[0] if len(found) == 1 else otherwise


def _take_apart(
    model: MutableMapping[str, Any],
    optimizers: Sequence[MutableMapping[str, Any]],
    shapes: Shapes | None,
    by_name: Shapes | None,
    all_ranks: bool,
    given: GivenNames | None,
) -> bool:
    """Split a local state dict into parameters; if that fails and shapes were given, note the reason."""
    try:
        units = infer_flat_layout(model, shapes, by_name)
    except UnknownLayoutError as error:
        if shapes is not None:
            more = "" if all_ranks else f" (known from one rank only; try {spelled('all-ranks', True)})"
            _mark_local(model, f"{LOCAL}; {error}{more}")
        return False
    take_apart(model, units, _no_shapes(), shapes.shapes if shapes and shapes.ordered else ())
    for optimizer in optimizers:
        resolve_optimizer(optimizer, model, units, given)
    return True


def _mark_local(model: MutableMapping[str, Any], note: str) -> None:
    tensors = {k: t for k, t in model.items() if isinstance(t, Tensor)}
    flat = {k for k in tensors if is_flat_parameter(k)}
    storages = {storage_of(s) for k in flat for s in tensors[k].found}
    for key, tensor in tensors.items():
        views = any(storage_of(s) in storages for s in tensor.found)
        run = tensor.kind == "plain" and len(tensor.shape) == 1 and (views or is_ragged(tensor))
        if not tensor.note and (key in flat or run):
            model[key] = replace(tensor, kind="flat_pieces", note=note)


def _resolve_optimizer(
    optimizer: Any, model: Mapping[str, Any] | None, all_ranks: bool, given: GivenNames | None
) -> str | None:
    """Place the pieces of one optimizer, or add notes to them; return a note for the user."""
    if is_flat_optimizer(optimizer):
        return None
    naming = name_with(optimizer, model, believed(AS_SAVED, model or {}), given)
    sharded = model is None or any(isinstance(t, Tensor) and t.sharded for t in model.values())
    if model is not None and sharded and naming.by != "fqn":
        try:
            note = take_optimizer_apart(optimizer, model, all_ranks)
        except UnknownLayoutError as error:
            text = "pieces of FSDP flat parameters (use_orig_params=False), and the model does not show what is in them"
            way = f"or write the model with {spelled('only', 'model')}"
            note = f"{text}: {error}; save the optimizer by name (FSDP.optim_state_dict), {way}"
            mark_runs(optimizer["state"].values(), note)
            return ""
        if note:
            return note
    unplaced: list[tuple[MutableMapping[Any, Any], Any, Tensor]] = []
    for key, entry in optimizer["state"].items():
        parameter = model.get(naming.names[key]) if model is not None and key in naming.names else None
        shape = parameter.shape if isinstance(parameter, Tensor) and not parameter.note else None
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and tensor.kind == "plain" and tensor.shape and not tensor.note:
                placed = _placed(tensor, shape, sharded, all_ranks)
                entry[slot] = tensor if placed is None else placed
                unplaced += [(entry, slot, tensor)] if placed is None else []
    if unplaced and not (all_ranks and _is_copied_whole(optimizer["state"])):
        way = "" if model is None else f"; consolidate the model with {spelled('only', 'model')}"
        for entry, slot, tensor in unplaced:
            if not (all_ranks and _are_copies(tensor) and _varies(tensor)):
                entry[slot] = replace(tensor, kind="flat_pieces", note=f"{UNPLACED_PIECE}{way}")
    return None


def _placed(tensor: Tensor, shape: Ints | None, sharded: bool, all_ranks: bool) -> Tensor | None:
    """A tensor with its pieces in their places; a whole tensor unchanged; None if the place is unknown."""
    if not is_ragged(tensor) and (tensor.shape == shape or not sharded or len(tensor.shape) != 1):
        return tensor
    if shape is not None and not all_ranks and tensor.numel <= prod(shape):
        return replace(tensor, shape=shape, shards=(), kind="flat_pieces")
    pieces = _pieces(tensor.shards, shape) if shape is not None else None
    if pieces is None or shape is None:
        return None
    return replace(tensor, shape=shape, shards=tuple(pieces), kind="flat_pieces")


# Moments whose checksums are equal on all ranks are replicas, not pieces. Examples: a data-parallel part beside sharded
# tables (torchrec shards tables and leaves the rest to DDP); a full optimizer state, which FSDP1 lets every rank save
# (`full_optim_state_dict(rank0_only=False)`), with moments that are views of one storage for each unit.


def _is_copied_whole(state: Mapping[Any, Any]) -> bool:
    """Whether each rank saved the same optimizer state: every moment is a copy, and one is neither zeros nor ones.

    Pieces of parameters that are all zeros or all ones would be equal too, which proves nothing.
    """
    entries = (entry for entry in state.values() if isinstance(entry, Mapping))
    tensors = [t for entry in entries for t in entry.values() if isinstance(t, Tensor) and t.shape]
    return all(map(_are_copies, tensors)) and any(t.kind == "plain" and _varies(t) for t in tensors)


def _are_copies(tensor: Tensor) -> bool:
    """Whether ranks have a tensor at the same offset of zip entries with one name, size and checksum."""
    sources = [source for shard in tensor.found for source in shard.sources]
    stated = {(s.record, s.offset - s.record_span[0], s.strides, s.crc, s.record_span[1]) for s in sources}
    return len(stated) == 1 and len(sources) > 1 and bool(sources[0].crc)


def _varies(tensor: Tensor) -> bool:
    """Whether a tensor that ranks have copies of is neither all zeros nor all ones."""
    source = tensor.found[0].sources[0]
    return tensor.numel > 1 and not is_constant(source.dtype, source.crc, source.record_span[1])


def _pieces(shards: Sequence[Shard], shape: Ints) -> list[Shard] | None:
    """Lay the ranks' runs end to end, starting over when the parameter is complete (replica groups)."""
    total = prod(shape)
    start, placed = 0, []
    for shard in sorted(shards, key=lambda s: -1 if s.rank is None else s.rank):
        source, length = shard.source, shard.box.numel
        if source is None or not source.contiguous or len(source.shape) != 1 or start + length > total:
            return None
        placed += shards_of(shape, FlatRun(start, length, source, shard.rank))
        start = (start + length) % total if total else 0
    return placed if start == 0 else None
