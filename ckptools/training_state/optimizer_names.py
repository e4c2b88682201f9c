"""Which parameter each entry of an optimizer's state is, where the file keeps it by number.

A plain `optimizer.state_dict()` numbers its parameters through all param groups. A name for a number is

- said by the file: the ids are names, or groups have `param_names` (`AdamW(model.named_parameters())`, torch 2.6 on);
- proven by its shape: one number has moments of that shape, and one parameter of the model has it;
- assumed from the order: groups are made from `model.parameters()`, or from those that some test lets through, so that
  each lists its parameters in the order of the module. Where the model's own order is the module's (`module_order`)
  and the shapes leave one way to lay every group there, that is the name, and it is called assumed: two parameters of
  one shape that were put into a group the other way round look the same;
- or it is not given, and the number stays.

Source: torch/optim/optimizer.py (`state_dict`, `add_param_group`), and formats seen in DDP, FSDP2 and verl files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ckptools.dtypes import is_floating
from ckptools.model.checkpoint import ModuleOrder
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.training_state.moments import in_full
from ckptools.training_state.parameter_names import FITS, GIVE, UNNAMED, Id, Naming, note_of, without_ddp
from ckptools.training_state.section_size import storage_identity

Parameters = Sequence[tuple[str, Tensor]]

MAX_STEPS = 10_000_000
"""Parameters that are looked at while groups are laid over the model; a forged file has as many groups as it likes."""

MAX_ROUNDS = 16


def group_ids(optimizer: Mapping[str, Any]) -> list[list[Id]]:
    """The ids of each param group; empty lists where a group has none (torch 1.13's sharded form), or no such ids.

    A group without `params` whose `param_names` are keys of the state lists its ids by these (torch_checkpointing).
    """
    found: list[list[Id]] = []
    for group in optimizer["param_groups"]:
        names, state = group.get("param_names"), optimizer["state"]
        are_keys = isinstance(names, (list, tuple)) and any(isinstance(name, str) and name in state for name in names)
        ids = group.get("params", names if are_keys else None)
        are_ids = isinstance(ids, (list, tuple)) and all(isinstance(i, (int, str)) for i in ids)
        found.append(list(ids) if are_ids else [])
    return found


def name_parameters(
    optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, order: ModuleOrder, whose: str = "the model"
) -> Naming:
    """Name the parameters of an optimizer, as far as that can be done.

    The model is None when there is none, or nothing says which of several; `order` is that of its names, and `whose`
    says to people what has this order.
    """
    state = optimizer["state"]
    groups = numbered_groups(optimizer)
    ids = [i for group in groups for i in group]
    said = _said(optimizer, ids, model)
    if said is not None:
        return Naming(said, "fqn", (), tuple(i for i in ids if str(i).startswith(UNNAMED)), "")
    if model is None:
        return Naming({}, "none", (), tuple(ids), f"keyed by number, and no one model is beside it; {GIVE}")
    params, pieces = _parameters(model, len(ids))
    proven = by_shape({i: state.get(i) for i in ids}, params, pieces)
    ordered = order.kept and _are_in_order(optimizer, ids)
    laid = by_order(groups, state, params, pieces) if ordered else {}
    without_shape = sum(_moment(state.get(i)) is None for i in laid if i not in proven)
    return _naming(ids, proven, laid, order, whose, without_shape)


def numbered_groups(optimizer: Mapping[str, Any]) -> list[list[Id]]:
    """The ids of each param group; where groups list none, those that have state, in the order of the numbers."""
    groups = group_ids(optimizer)
    state = list(optimizer["state"])
    return groups if any(groups) else [sorted(state) if all(type(i) is int for i in state) else state]


def _are_in_order(optimizer: Mapping[str, Any], ids: Sequence[Id]) -> bool:
    """Whether the ids are numbers, each once, and it is known which group they are in."""
    numbers = all(type(i) is int for i in ids) and len(set(ids)) == len(ids)
    return numbers and (any(group_ids(optimizer)) or len(optimizer["param_groups"]) < 2)


def _naming(
    ids: Sequence[Id],
    proven: Mapping[Id, str],
    laid: Mapping[Id, str],
    order: ModuleOrder,
    whose: str,
    without_shape: int,
) -> Naming:
    names = {**laid, **proven}
    assumed = tuple(i for i in ids if i in laid and i not in proven)
    unnamed = tuple(i for i in ids if i not in names)
    why = FITS if order.kept else f"their shapes fit several or none, and {order.why}"
    by: Literal["order", "shape", "none"] = "order" if assumed else "shape" if proven else "none"
    note = note_of(len(proven), len(assumed), len(unnamed), why, whose, without_shape)
    return Naming(names, by, assumed, unnamed, note)


# -- what the file says ----------------------------------------------------------------------------------------


def _said(optimizer: Mapping[str, Any], ids: Sequence[Id], model: Mapping[str, Any] | None) -> dict[Id, str] | None:
    """The names that the file has for the ids; None when it has none."""
    listed = aligned(_param_names(optimizer), model)
    if listed:
        return listed
    # A dict with `str(number)` for keys; a parameter of an nn.ParameterList is called so as well.
    numbers = all(str(i).isdecimal() for i in ids) and (model is None or not all(i in model for i in ids))
    return {i: i for i in ids} if all(isinstance(i, str) for i in ids) and not (ids and numbers) else None


def _param_names(optimizer: Mapping[str, Any]) -> dict[Id, str]:
    """Name by id as the param groups say them; nothing where one does not, or two have one name.

    Groups that were made of two modules' own `named_parameters()` have each module's `weight`.
    """
    found: dict[Id, str] = {}
    for group, ids in zip(optimizer["param_groups"], group_ids(optimizer), strict=True):
        names = group.get("param_names", [] if not ids else None)
        if not isinstance(names, (list, tuple)) or len(names) != len(ids):
            return {}
        found |= dict(zip(ids, names, strict=True))
    good = all(isinstance(n, str) for n in found.values()) and len(set(found.values())) == len(found)
    return found if good else {}


def aligned(names: Mapping[Id, str], model: Mapping[str, Any] | None) -> dict[Id, str]:
    """Names as the model has them: the same but for wrappers and DDP's leading `module`; nothing where one is not."""
    if model is None:
        return dict(names)
    known = {without_ddp(str(fqn)): str(fqn) for fqn in model}
    found = {i: name if name in model else known.get(without_ddp(name), "") for i, name in names.items()}
    return found if all(found.values()) and len(set(found.values())) == len(found) else {}


# -- what shapes prove -----------------------------------------------------------------------------------------


def by_shape(entries: Mapping[Id, Any], params: Parameters, pieces: bool = False) -> dict[Id, str]:
    """Name the ids whose shape one id and one parameter have.

    Nothing is named where more ids than parameters have a shape: then the model lacks parameters, or the moments are
    not laid out as the parameters are (low-rank projections). With `pieces`, plain 1-D moments may be runs of a
    flattened parameter, whose length is no parameter's shape.
    """
    shapes = {i: shape for i, entry in entries.items() if (shape := only_shape(entry, pieces)) is not None}
    ids = Counter(shapes.values())
    fqns = Counter(t.shape for _, t in params)
    if len(params) < len(entries) or any(count > fqns[shape] for shape, count in ids.items()):
        return {}
    of_shape = {t.shape: fqn for fqn, t in params if fqns[t.shape] == 1}
    return {i: of_shape[shape] for i, shape in shapes.items() if shape in of_shape}


def only_shape(entry: Any, pieces: bool) -> Ints | None:
    """The shape that all moments of a parameter have; None where they differ, as low-rank ones do.

    Pieces of flattened parameters got their shape from a name, so that it cannot prove one.
    """
    moments = [moment for moment in in_full(entry) if moment.shape]
    runs = any(t.kind == "flat_pieces" or (pieces and not t.sharded and len(t.shape) == 1) for t in moments)
    shapes = {t.shape for t in moments}
    return shapes.pop() if len(shapes) == 1 and not runs else None


def _parameters(model: Mapping[str, Any], wanted: int) -> tuple[Parameters, bool]:
    """Collect what may be parameters, and whether ranks have pieces of them.

    Left out is what surely is none of its own: a name tied to an earlier one, and, where FSDP sharded the model, what
    it did not shard, for it shards every parameter and no buffer.
    """
    candidates = [(fqn, t) for fqn, t in model.items() if isinstance(t, Tensor) and is_floating(t.dtype)]
    seen: set[Any] = set()
    own: list[tuple[str, Tensor]] = []
    for fqn, tensor in candidates:
        identity = storage_identity(tensor)
        if identity is None or identity not in seen:
            own.append((fqn, tensor))
        seen.add(identity)
    sharded = [c for c in own if c[1].sharded]
    return next((c for c in (sharded, own) if len(c) >= wanted), candidates), bool(sharded)


# -- what the order suggests -----------------------------------------------------------------------------------


def by_order(groups: Sequence[list[Id]], state: Mapping[Id, Any], params: Parameters, pieces: bool) -> dict[Id, str]:
    """Lay every group over the parameters; an id whose first and last possible place are the same is named.

    What one group surely takes is no longer free for another, so this is repeated until nothing changes. Nothing is
    named when a group finds no place at all: then the groups do not have the order of the module. With `pieces`, plain
    1-D moments may be runs of a flattened parameter, whose length says nothing of its shape.
    """
    moments = {i: _moment(state.get(i)) for group in groups for i in group}
    taken: dict[int, Id] = {}
    if len(groups) * len(params) > MAX_STEPS:
        return {}
    for _ in range(MAX_ROUNDS):
        before = len(taken)
        for ids in groups:
            mine = set(ids)
            free = [k for k in range(len(params)) if k not in taken or taken[k] in mine]
            first = _lay(ids, moments, params, free, pieces)
            last = _lay(ids[::-1], moments, params, free[::-1], pieces)
            if min(len(first), len(last)) < len(ids):
                return {}
            taken |= {k: i for i, k, other in zip(ids, first, reversed(last), strict=True) if k == other}
        if len(taken) == before:
            break
    return {i: params[k][0] for k, i in taken.items()}


def misfit(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> Id | None:
    """The first id that finds no place when its group is laid over a model in order; None when all do."""
    groups = numbered_groups(optimizer)
    params, pieces = _parameters(model, sum(map(len, groups)))
    moments = {i: _moment(optimizer["state"].get(i)) for ids in groups for i in ids}
    for ids in groups:
        placed = _lay(ids, moments, params, range(len(params)), pieces)
        if len(placed) < len(ids):
            return ids[len(placed)]
    return None


def _lay(
    ids: Sequence[Id], moments: Mapping[Id, Tensor | None], params: Parameters, free: Sequence[int], pieces: bool
) -> list[int]:
    """Place each id at the first parameter that fits and is behind the one before, up to one that finds no place."""
    placed: list[int] = []
    positions = iter(free)
    for i in ids:
        place = next((k for k in positions if _fits(moments[i], params[k][1], pieces)), None)
        if place is None:
            break
        placed.append(place)
    return placed


def _moment(entry: Any) -> Tensor | None:
    """A tensor of a parameter's state that is laid out as the parameter is; None when the state has none."""
    # Some optimizers keep 0-d counters of other names beside their moments.
    return min(in_full(entry), key=lambda t: (not t.sharded, -len(t.shape)), default=None)


def _fits(moment: Tensor | None, parameter: Tensor, pieces: bool) -> bool:
    if moment is None:
        return True
    if parameter.kind == "flat_pieces" and not parameter.note and _held(moment) != _held(parameter):
        return False
    run = pieces and not moment.sharded and len(moment.shape) == 1
    return _may_be_runs(moment, parameter) if run else moment.shape == parameter.shape


def _may_be_runs(moment: Tensor, parameter: Tensor) -> bool:
    """Whether runs may be those of a parameter: once all ranks are read, they hold its elements once per replica."""
    if not parameter.numel or sum(_held(parameter).values()) < parameter.numel:
        return True
    copies, rest = divmod(sum(_held(moment).values()), parameter.numel)
    return not rest and copies > 0 and (parameter.world_size or copies) % copies == 0


def _held(tensor: Tensor) -> dict[int | None, int]:
    """Elements of a flattened tensor on each rank whose file was read: a moment is cut as its parameter is."""
    counts: dict[int | None, int] = {}
    for shard in tensor.found:
        if shard.box.numel:
            counts[shard.rank] = counts.get(shard.rank, 0) + shard.box.numel
    return counts
