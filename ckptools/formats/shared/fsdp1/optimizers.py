"""Optimizer state beside FSDP1 flat parameters, where it is keyed by number and cut as they are.

Without `use_orig_params` a number is a flat parameter, and its moments are every rank's chunk with the padding that
the saved parameter does not have; they are taken apart like the flat parameter, so one number becomes its parameters'
names. With it a number is a parameter, and its moments are the runs that the ranks hold; numbers stay. See
`fsdp1.flat_parameters` for the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from ckptools.formats.shared.flat_runs import FlatRun, joined
from ckptools.formats.shared.fsdp1.flat_layout import Member
from ckptools.formats.shared.fsdp1.flat_parameters import runs_of, runs_of_member
from ckptools.formats.shared.fsdp1.units import Unit
from ckptools.formats.shared.shapes import Shapes
from ckptools.model.checkpoint import GivenNames, ModuleOrder
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard, Tensor
from ckptools.training_state.given_names import name_with
from ckptools.training_state.module_order import AS_SAVED, believed, order_of
from ckptools.training_state.optimizer_names import group_ids, name_parameters
from ckptools.training_state.sections import is_flat_optimizer

UNPLACED = (
    "a run of a flattened parameter, and more than one parameter may be the one, or none; "
    "consolidate the model with --only model"
)


def shapes_by_name(optimizer: Mapping[str, Any], of_dcp: bool = False) -> Shapes | None:
    """The shapes of an optimizer state that is keyed by name, which are those of its moments; None without any.

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
    """Place the moments of an optimizer whose model had flat parameters; changed in place.

    Args:
        optimizer: its state dict.
        model: with the parameters in place of the flat ones.
        units: what they were.
        given: names for numbers that are parameters.

    Raises:
        RefusedError: the names that were given do not fit.
    """
    if is_flat_optimizer(optimizer) or any(isinstance(k, str) for k in optimizer["state"]):
        return
    originals = {u.original for u in units}
    if originals == {True}:
        _resolve_parameters(optimizer, model, units, given)
    elif originals == {False}:
        _resolve_units(optimizer, units, getattr(model, "_metadata", None))
    else:
        _leave(optimizer["state"].values())


def _leave(entries: Any) -> None:
    for entry in entries:
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and _is_run(tensor):
                entry[slot] = _unplaced(tensor)


def _is_run(tensor: Tensor) -> bool:
    return tensor.kind == "plain" and len(tensor.shape) == 1


def _unplaced(tensor: Tensor) -> Tensor:
    return replace(tensor, kind="flat_pieces", note=UNPLACED)


# -- numbers that are parameters -------------------------------------------------------------------------------


def _resolve_parameters(
    optimizer: MutableMapping[str, Any], model: Mapping[str, Any], units: Sequence[Unit], given: GivenNames | None
) -> None:
    names = name_with(optimizer, model, believed(AS_SAVED, model), given).names
    members = {m.key: (m, u) for u in units for m in u.members}
    for number, entry in optimizer["state"].items():
        member, unit = members.get(names.get(number, ""), (None, None))
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and _is_run(tensor):
                found = _run_of(tensor, member, unit) if member and unit else None
                entry[slot] = found or _unplaced(tensor)


def _run_of(moment: Tensor, member: Member, unit: Unit) -> Tensor | None:
    """The moments of one parameter; None when they are not as long as the runs of the parameter."""
    if member.shape is None:
        return None
    held = {s.rank: s for s in moment.found}
    runs = []
    for run in runs_of_member(member, runs_of(unit)):
        shard = held.pop(run.rank, None)
        if shard and shard.box.numel != run.length:
            return None
        runs.append(run._replace(source=shard.source if shard else None, at=0))
    if any(shard.box.numel for shard in held.values()):
        return None
    return replace(moment, shape=member.shape, shards=joined(member.shape, runs), kind="flat_pieces")


# -- numbers that are flat parameters --------------------------------------------------------------------------


def _resolve_units(optimizer: MutableMapping[str, Any], units: Sequence[Unit], modules: Any) -> None:
    by_key = {u.key: u for u in units}
    flat = {u.key: _as_moment(u) for u in units}
    names = name_parameters(optimizer, flat, order_of(flat, modules)).names
    name_units(optimizer, {number: by_key[key] for number, key in names.items() if key in by_key})


def name_units(optimizer: MutableMapping[str, Any], units: Mapping[Any, Unit]) -> None:
    """Name the parameters in an optimizer that numbers flat ones; changed in place.

    Args:
        optimizer: its state dict.
        units: what each number is; those that are not here are left, and their runs marked.
    """
    state: dict[Any, Any] = {}
    for number, entry in optimizer["state"].items():
        unit = units.get(number)
        if unit is None or not isinstance(entry, Mapping):
            _leave([entry])
            state[number] = entry
        else:
            state |= dict(_entries(unit, entry))
    optimizer["state"].clear()
    optimizer["state"].update(state)
    for group, ids in zip(optimizer["param_groups"], group_ids(optimizer), strict=True):
        if ids and isinstance(group, MutableMapping):
            group["params"] = [fqn for i in ids for fqn in _fqns(units.get(i), i)]


def _fqns(unit: Unit | None, number: Any) -> list[Any]:
    return [m.key for m in unit.members] if unit else [number]


def _as_moment(unit: Unit) -> Tensor:
    """A flat parameter as its moments are: every rank whose file was read has a chunk of the same length."""
    size = _chunk_size(unit)
    ranks = {s.rank for s in unit.flat.found}
    shards = tuple(s._replace(box=Box((0,), (size,))) for s in unit.flat.found if s.rank in ranks)
    return replace(unit.flat, shape=(size,), shards=shards, kind="plain")


def _chunk_size(unit: Unit) -> int:
    """Elements of a rank's chunk with its padding: that of the first, which is always full."""
    return max((s.box.numel for s in unit.flat.shards), default=0)


def _entries(unit: Unit, entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of each parameter of a unit; what is no run is every parameter's."""
    by_slot = {slot: _padded(unit, t) for slot, t in entry.items() if isinstance(t, Tensor) and _is_run(t)}
    for member in unit.members:
        found = dict(entry)
        for slot, runs in by_slot.items():
            found[slot] = _part(entry[slot], member, runs)
        yield member.key, found


def _part(moment: Tensor, member: Member, runs: Sequence[FlatRun] | None) -> Tensor:
    if runs is None or member.shape is None:
        return _unplaced(moment)
    shards = joined(member.shape, runs_of_member(member, runs))
    return replace(moment, shape=member.shape, shards=shards, kind="flat_pieces")


def _padded(unit: Unit, moment: Tensor) -> list[FlatRun] | None:
    """A flat parameter's moments as the ranks hold them; None when a rank's are not as long as its chunk."""
    held: dict[int | None, Shard] = {s.rank: s for s in moment.found}
    if any(shard.box.numel != _chunk_size(unit) for shard in held.values()):
        return None
    sources = {rank: shard.source for rank, shard in held.items()}
    return [run._replace(source=sources.get(run.rank)) for run in runs_of(unit)]
