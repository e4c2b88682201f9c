"""Optimizer state by parameter name, also where the file keeps it by number.

A plain `optimizer.state_dict()` numbers its parameters in the order of the param groups and stores no names. The
model's state dict has the names, in module order, with buffers in between. A group lists its parameters in module
order, so each group is a subsequence of the model; names follow where the shapes of the moments leave exactly one
way to lay it there. Source: torch/optim/optimizer.py (`state_dict`), and formats seen in DDP, FSDP2 and verl files.
Where a model's order is not the module's (safetensors sorts by dtype and name), only a shape that is there once tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.model import KeyPath, Tensor
from ckptools.regions import Ints
from ckptools.sections import GROUPS, STATE, is_flat_optimizer, storage_identity

Id = Any
"""What an optimizer calls a parameter: an int, or the fqn itself."""


@dataclass(frozen=True)
class Naming:
    """Which parameter each id of an optimizer is.

    Attributes:
        names: fqn by id, for the ids that have exactly one possible name.
        by: `fqn` when the file itself has the names, `order` when they follow from parameter order and shapes,
            `shape` from shapes alone, `none` when nothing tells.
        unnamed: ids that could be more than one parameter, or none.
        note: one line for people, empty when the file has the names.
    """

    names: dict[Id, str]
    by: str
    unnamed: tuple[Id, ...]
    note: str


def nested(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """An optimizer's state dict with `state` and `param_groups`, also where the file has it flattened.

    Parameters whose hyperparameters are all equal form one group, as flattening has lost which ones did.
    """
    if not is_flat_optimizer(value):
        return value
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, leaf in value.items():
        kind = STATE if key.startswith(STATE) else GROUPS
        fqn, _, name = key[len(kind) :].rpartition(".")
        (state if kind == STATE else settings).setdefault(fqn, {})[name] = leaf
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in settings.items():
        groups.setdefault(repr(sorted(values.items())), {**values, "params": []})["params"].append(fqn)
    return {"state": state, "param_groups": list(groups.values())}


def group_ids(optimizer: Mapping[str, Any]) -> list[list[Id]]:
    """The ids of each param group; empty lists where a group has none (torch 1.13's sharded form), or no such ids."""
    return [_ids(group.get("params")) for group in optimizer["param_groups"]]


def _ids(params: Any) -> list[Id]:
    listed = list(params) if isinstance(params, (list, tuple)) else []
    return listed if all(isinstance(i, (int, str)) for i in listed) else []


def name_parameters(optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, ordered: bool = True) -> Naming:
    """Name the parameters of an optimizer with the help of the model's state dict, where it can be done surely.

    Args:
        optimizer: with `state` and `param_groups`.
        model: the state dict; None when there is none.
        ordered: whether it has the order of the module.
    """
    state = optimizer["state"]
    groups = group_ids(optimizer)
    ids = [i for group in groups for i in group] or list(state)
    if all(isinstance(i, str) for i in ids):
        return Naming({i: i for i in ids}, "fqn", (), "")
    if model is None:
        return Naming({}, "none", tuple(ids), "keyed by number, and there is no model beside it to take names from")
    candidates = [(fqn, t) for fqn, t in model.items() if isinstance(t, Tensor) and is_floating(t.dtype)]
    pieces = any(t.sharded for _, t in candidates)
    moments = {i: _moment(state.get(i)) for i in ids}
    params = _parameters(candidates, len(ids))
    names = (
        _settle(groups or [ids], moments, params, pieces)
        if ordered
        else _by_shape({i: state.get(i) for i in ids}, params)
    )
    unnamed = tuple(i for i in ids if i not in names)
    by = "none" if not names else "order" if ordered else "shape"
    return Naming(names, by, unnamed, _note(len(ids), len(unnamed), ordered))


def _note(total: int, unnamed: int, ordered: bool) -> str:
    if not unnamed:
        how = "the parameter order, shapes agree" if ordered else "their shapes, each of which is there once"
        return f"keyed by number; named through {how}"
    told = f"keyed by number; {unnamed} of {total} could not be named: "
    if ordered:
        return told + "more than one parameter fits, or none"
    return told + "the model's file has lost their order, and several have their shape, or none"


def _by_shape(entries: Mapping[Id, Any], params: Sequence[tuple[str, Tensor]]) -> dict[Id, str]:
    """Name the ids whose shape one id and one parameter have; nothing when the model lacks parameters."""
    shapes = {i: shape for i, entry in entries.items() if (shape := _only_shape(entry)) is not None}
    ids = Counter(shapes.values())
    fqns = Counter(t.shape for _, t in params)
    of_shape = {t.shape: fqn for fqn, t in params if fqns[t.shape] == 1}
    if len(params) < len(entries):
        return {}
    return {i: of_shape[shape] for i, shape in shapes.items() if ids[shape] == 1 and shape in of_shape}


def _only_shape(entry: Any) -> Ints | None:
    """The shape that all moments of a parameter have; factored ones (Adafactor) differ, and tell nothing."""
    slots = entry.items() if isinstance(entry, Mapping) else ()
    shapes = {t.shape for slot, t in slots if isinstance(t, Tensor) and slot != "step" and t.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _parameters(candidates: list[tuple[str, Tensor]], wanted: int) -> list[tuple[str, Tensor]]:
    """Drop what is surely no parameter of its own: a name tied to an earlier one, and, where FSDP sharded the
    model, what it did not shard, for it shards every parameter and no buffer.
    """
    seen: set[Any] = set()
    own: list[tuple[str, Tensor]] = []
    for fqn, tensor in candidates:
        identity = storage_identity(tensor)
        if identity is None or identity not in seen:
            own.append((fqn, tensor))
        seen.add(identity)
    sharded = [c for c in own if c[1].sharded]
    return next((c for c in (sharded, own) if len(c) >= wanted), candidates)


def _moment(entry: Any) -> Tensor | None:
    """A tensor of a parameter's state that is laid out as the parameter is; None when the state has none."""
    slots = entry.items() if isinstance(entry, Mapping) else ()
    moments = [t for slot, t in slots if isinstance(t, Tensor) and slot != "step"]
    # Some optimizers keep 0-d counters of other names beside their moments.
    return min(moments, key=lambda t: (not t.sharded, -len(t.shape)), default=None)


def _settle(
    groups: Sequence[list[Id]], moments: dict[Id, Tensor | None], params: list[tuple[str, Tensor]], pieces: bool
) -> dict[Id, str]:
    """Lay every group over the parameters; an id whose first and last possible place are the same is named.

    What one group surely takes is no longer free for another, so this is repeated until nothing changes. With
    `pieces`, plain 1-D moments may be runs of a flattened parameter, whose length tells nothing of its shape.
    """
    taken: dict[int, Id] = {}
    while True:
        before = len(taken)
        for ids in groups:
            mine = set(ids)
            free = [k for k in range(len(params)) if taken.get(k, ids and ids[0]) in mine or k not in taken]
            first = _lay(ids, moments, params, free, pieces)
            last = _lay(ids[::-1], moments, params, free[::-1], pieces)
            if first is None or last is None:
                continue
            for i in ids:
                if first[i] == last[i]:
                    taken[first[i]] = i
        if len(taken) == before:
            return {i: params[k][0] for k, i in taken.items()}


def _lay(
    ids: Sequence[Id],
    moments: dict[Id, Tensor | None],
    params: list[tuple[str, Tensor]],
    free: Sequence[int],
    pieces: bool,
) -> dict[Id, int] | None:
    """Place each id at the first parameter that fits and is behind the one before; None when one finds no place."""
    placed: dict[Id, int] = {}
    positions = iter(free)
    for i in ids:
        for k in positions:
            if _fits(moments[i], params[k][1], pieces):
                placed[i] = k
                break
        else:
            return None
    return placed


def _fits(moment: Tensor | None, parameter: Tensor, pieces: bool) -> bool:
    if moment is None:
        return True
    if parameter.kind == "flat_pieces" and not parameter.note and _held(moment) != _held(parameter):
        return False
    run = pieces and not moment.sharded and len(moment.shape) == 1
    return run or moment.shape == parameter.shape


def _held(tensor: Tensor) -> dict[int | None, int]:
    """Elements of a flattened tensor on each rank whose file was read: a moment is cut as its parameter is."""
    held: dict[int | None, int] = {}
    for shard in tensor.found:
        if shard.box.numel:
            held[shard.rank] = held.get(shard.rank, 0) + shard.box.numel
    return held


@dataclass(frozen=True)
class ParamGroup(Mapping[str, Any]):
    """One param group: its hyperparameters as a mapping, and as attributes (`group.lr`).

    Attributes:
        values_: everything the file has for the group.
        names: fqns of its parameters, `?` and the id where the name is unknown.
    """

    values_: Mapping[str, Any]
    names: tuple[str, ...]

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Any:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values_[name]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self.values_.items() if k != "params" and len(repr(v)) < 40)
        return f"<ParamGroup {shown}, {len(self.names)} params>"


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's saved state, by name.

    Attributes:
        name: class name where the file has it, else the key.
        path: key path in the tree.
        state: `{fqn: {slot: tensor or value}}`; an id that has no name keeps its number.
        param_groups: the groups, names resolved.
        naming: how the names came about.
    """

    name: str
    path: KeyPath
    state: Mapping[Any, Mapping[str, Any]]
    param_groups: tuple[ParamGroup, ...]
    naming: Naming

    def __repr__(self) -> str:
        return f"<Optimizer {self.name}: {len(self.state)} parameters, {len(self.param_groups)} groups>"


def describe(
    name: str, path: KeyPath, value: Mapping[str, Any], model: Mapping[str, Any] | None, ordered: bool = True
) -> Optimizer:
    """Describe the optimizer at `path`; `ordered` says whether `model` has the order of the module."""
    value = nested(value)
    naming = name_parameters(value, model, ordered)
    state = {naming.names.get(i, i): entry for i, entry in value["state"].items()}
    groups = [
        ParamGroup(group, tuple(naming.names.get(i, f"?{i}") for i in ids))
        for group, ids in zip(value["param_groups"], group_ids(value), strict=False)
    ]
    return Optimizer(name, path, state, tuple(groups), naming)
