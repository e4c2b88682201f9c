"""FSDP1 flat parameters (LOCAL_STATE_DICT), taken apart with their optimizer state into the parameters in them.

FSDP1 joins the parameters of a wrapped unit into one 1-D tensor and cuts that over the ranks. LOCAL_STATE_DICT saves it
so: `<path of the unit>._flat_param`, a 1-D ShardedTensor (`flat_param` in torch 1.13), and nothing on its content.

- In it are the unit's parameters in module order, those of nested units left out, a parameter that is shared within
  the unit once. `use_orig_params=False`: one behind the other.
- `use_orig_params=True`: each begins at 16 bytes of the dtype that the forward pass uses, so that a float32 parameter
  under bfloat16 mixed precision begins at a multiple of 8 elements; the end is padded to a multiple of the ranks
  (torch 2.1 on; 2.0 pads nothing). Beside it the file holds every parameter under its own name, as the 1-D run of it
  that this rank has, empty where it has none; tied names hold the same run.
- Optimizer state by number: `use_orig_params=False` numbers the flat parameters, and the moments have every rank's
  padding; `use_orig_params=True` numbers the parameters, and ranks without elements have no entry. Saved by name
  (`FSDP.optim_state_dict`) it has full shapes, and the parameters of a unit in the order in which they were flattened.

Where parameters lie follows from their shapes and their order, and is accepted only when it explains every flat
parameter to the last element, and every run where it was found. Source: torch/distributed/fsdp/_flat_param.py
(`_init_flat_param_and_metadata`, `_get_aligned_numel`), _state_dict_utils.py (`_local_post_state_dict_hook`),
_optim_utils.py; checked on files of torch 2.0.1 (Composer 0.14.1), 2.6.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from ckptools.formats.flat_parameters.flat_runs import FlatRun, Member, joined, overlap, run_of
from ckptools.formats.flat_parameters.units import Unit
from ckptools.formats.shared.given import Shapes
from ckptools.model.checkpoint import GivenNames, ModuleOrder
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizer_names import group_ids, name_parameters
from ckptools.training_state.optimizers import name_with
from ckptools.training_state.parameter_names import AS_SAVED, believed, order_of, without_wrappers
from ckptools.training_state.sections import is_flat_optimizer


def runs_of_member(member: Member, runs: Iterable[FlatRun]) -> Iterator[FlatRun]:
    """The parts of the flat parameter's runs that lie in a member, counted from the member's first element."""
    for run in runs:
        low, high = overlap(member, run)
        if low < high:
            yield run._replace(start=low - member.start, length=high - low, at=run.at + low - run.start)


def runs_of(unit: Unit) -> list[FlatRun]:
    """The runs of a flat parameter that the ranks hold."""
    return [run_of(s) for s in unit.flat.shards]


def take_apart(model: MutableMapping[str, Any], units: Sequence[Unit], note: str, order: Iterable[str]) -> None:
    """Replace the flat parameters of a model by the parameters in them, in place; `note` is for runs of unknown shape.

    The names in `order` are in module order, as far as that is known.
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


# -- optimizer state --------------------------------------------------------------------------------------------------

# Without `use_orig_params` a number is a flat parameter, and its moments are every rank's chunk with the padding that
# the saved parameter does not have; they are split like the flat parameter, so one number becomes the names of its
# parameters. With it a number is a parameter, and its moments are the ranks' runs; numbers stay.

UNPLACED = (
    "a run of a flattened parameter, and more than one parameter may be the one, or none; "
    "consolidate the model with --only model"
)


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
        RefusedError: the names that were given for numbers do not fit.
    """
    if is_flat_optimizer(optimizer) or any(isinstance(k, str) for k in optimizer["state"]):
        return
    originals = {u.original for u in units}
    if originals == {True}:
        _resolve_parameters(optimizer, model, units, given)
    elif originals == {False}:
        _resolve_units(optimizer, units, getattr(model, "_metadata", None))
    else:
        mark_runs(optimizer["state"].values())


def mark_runs(entries: Iterable[Any], note: str = UNPLACED) -> None:
    """Mark the 1-D tensors of an optimizer state as runs that have no place."""
    for entry in entries:
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and _is_run(tensor):
                entry[slot] = _unplaced(tensor, note)


def _is_run(tensor: Tensor) -> bool:
    return tensor.kind == "plain" and len(tensor.shape) == 1


def _unplaced(tensor: Tensor, note: str = UNPLACED) -> Tensor:
    return replace(tensor, kind="flat_pieces", note=note)


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


def _resolve_units(optimizer: MutableMapping[str, Any], units: Sequence[Unit], modules: Any) -> None:
    by_key = {u.key: u for u in units}
    flat = {u.key: as_moment(u) for u in units}
    names = name_parameters(optimizer, flat, order_of(flat, modules)).names
    name_units(optimizer, {number: by_key[key] for number, key in names.items() if key in by_key})


def name_units(optimizer: MutableMapping[str, Any], units: Mapping[Any, Unit]) -> None:
    """Name the parameters in an optimizer that numbers flat ones, in place; a number without a unit is marked."""
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
    """A flat parameter as its moments are: every rank whose file was read has a chunk of the same length."""
    size = _chunk_size(unit)
    shards = tuple(s._replace(box=Box((0,), (size,))) for s in unit.flat.found)
    return replace(unit.flat, shape=(size,), shards=shards, kind="plain")


def _chunk_size(unit: Unit) -> int:
    """Elements of a rank's chunk with padding: the length of the first, which is always full."""
    return max((s.box.numel for s in unit.flat.shards), default=0)


def _entries(unit: Unit, entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state of each parameter of a unit; a value that is no run belongs to every parameter."""
    by_slot = {slot: _padded(unit, t) for slot, t in entry.items() if isinstance(t, Tensor) and _is_run(t)}
    for member in unit.members:
        found = dict(entry)
        for slot, runs in by_slot.items():
            found[slot] = _part(entry[slot], member, runs)
        yield member.key, found


def _part(whole: Tensor, member: Member, runs: Sequence[FlatRun] | None) -> Tensor:
    """A parameter from the runs of a flat parameter, or its moments from those of flat moments."""
    if runs is None or member.shape is None:
        return _unplaced(whole)
    shards = joined(member.shape, runs_of_member(member, runs))
    return replace(whole, shape=member.shape, shards=shards, kind="flat_pieces")


def _padded(unit: Unit, moment: Tensor) -> list[FlatRun] | None:
    """The runs of a flat parameter's moments; None when a rank's are not as long as its chunk."""
    shards: dict[int | None, Shard] = {s.rank: s for s in moment.found}
    if any(shard.box.numel != _chunk_size(unit) for shard in shards.values()):
        return None
    sources = {rank: shard.source for rank, shard in shards.items()}
    return [run._replace(source=sources.get(run.rank)) for run in runs_of(unit)]
