"""Optimizer state by parameter name, even if the file keys it by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import is_floating
from ckptools.errors import RefusedError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import GivenNames, ModuleOrder
from ckptools.model.records import Rows, displayed, to_dict
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.tree import NumpyScalar, describe_for_error, leaf_at
from ckptools.option import spelled
from ckptools.text import KeyPath, clip_middle, fqn_of, plural
from ckptools.training_state.role_words import APART, NETWORKS, words_in
from ckptools.training_state.roles import candidates, role_of
from ckptools.training_state.sections import (
    STATE,
    Section,
    flat_key,
    free_name,
    is_flat_optimizer,
    sections_of,
    sections_of_kind,
    storage_identity,
)
from ckptools.training_state.wrappers import without_ddp, without_wrappers

# -- names of parameters: how an optimizer's numbers are mapped to names, and the order of the module ------------------
# FSDP1 joins the parameters of a wrapped module into `_flat_param`. Source: torch/distributed/fsdp/_common_utils.py
# (`FLAT_PARAM`; `flat_param` up to torch 1.13).
#
# Every checkpoint states what its format does to the order (`Checkpoint.module_order`): one of the statements here, or
# the format's own. `nn.Module.state_dict()` writes a module's own parameters, its buffers, then its children, so its
# parameters come in the order of `named_parameters()`. It also puts `_metadata` on the dict, an entry for each module
# in that same order. Filtering, sorting or copying a state dict key by key drops it, and a dict that was put together
# in another way (FSDP1 lists the parameters of the outermost unit last) contradicts it. So the order is believed if
# every name lies in a module of that list and the modules come in its order. Within a module nothing lists the
# parameters; all of torch's modules register `weight` before `bias`, and if these two have one shape and the opposite
# order (as after sorting), the order is not believed either. Source: torch/nn/modules/module.py
# (`state_dict`, `_save_to_state_dict`).


Id = Any
"""The key of a parameter in an optimizer's state: an int, or the fqn itself."""

UNNAMED = "?"
"""Prefix of a number without a name, in formats that match parameters of different ranks by name."""

FITS = "more than one parameter fits, or none"


def give_names() -> str:
    """The way to name parameters that have numbers alone."""
    return f"give them with {spelled('names')} FROM"


class Naming(NamedTuple):
    """The parameter of each id of an optimizer.

    Attributes:
        names: fqn by id, for the ids that have a name.
        by: the weakest source of the names: `fqn` (stated in the file), `shape` (only one parameter has the shape),
            `order` (assumed: groups list parameters in the order of the module), `told` (given by the user), `none`.
        assumed: ids whose names hold only if their group has the order of the module.
        unnamed: ids without a name.
        note: one line for people, empty when the file has the names.
    """

    names: Mapping[Id, str]
    by: Literal["fqn", "told", "shape", "order", "none"]
    assumed: tuple[Id, ...]
    unnamed: tuple[Id, ...]
    note: str


def note_of(proven: int, assumed: int, unnamed: int, why: str, whose: str = "the model", without_shape: int = 0) -> str:
    """Describe how names that the file lacks were found; `without_shape` of the assumed names have no moments."""
    notes = ["keyed by number"]
    notes += [f"{proven} named by a shape that only one parameter has"] if proven else []
    known = assumed - without_shape
    fits = "no shapes to compare" if not known else "shapes agree"
    fits += f" of {known}, the others have none" if known and without_shape else ""
    order = f"named in the order of {whose}, assumed to be that of the groups ({fits})"
    notes += [f"{assumed} {order}"] if assumed else []
    notes += [f"{unnamed} of {proven + assumed + unnamed} without a name ({why}): {give_names()}"] if unnamed else []
    return "; ".join(notes)


def named_when_read(naming: Naming, assumed: Collection[str]) -> Naming:
    """The naming of an optimizer whose ids a format's reader replaced by names, the `assumed` names by their order."""
    mine = tuple(i for i in naming.names if i in assumed)
    if naming.by != "fqn" or not (mine or naming.unnamed):
        return naming
    names = {i: fqn for i, fqn in naming.names.items() if i not in naming.unnamed}
    by: Literal["fqn", "order"] = "order" if mine else "fqn"
    note = note_of(len(names) - len(mine), len(mine), len(naming.unnamed), FITS)
    return Naming(names, by, mine, naming.unnamed, note)


# -- flat parameters ---------------------------------------------------------------------------------------------------


FLAT_PARAMETERS = ("_flat_param", "flat_param")


def is_flat_parameter(key: Any) -> bool:
    """Whether a key of a model names an FSDP1 flat parameter."""
    return str(key).rpartition(".")[2] in FLAT_PARAMETERS


# -- the order of the module -------------------------------------------------------------------------------------------


AS_SAVED = ModuleOrder(True, "torch.save keeps the order of a state dict")
"""The order of torch.save files; each state dict's `_metadata` shows whether it is the module's order."""

SORTED = ModuleOrder(False, "safetensors are sorted by dtype and name")
"""The order of safetensors files, as their own library writes them (`prepare`)."""

AS_WRITTEN = ModuleOrder(True, "a JSON is written in the order that its author means")
BY_UNIT = ModuleOrder(False, "parameters that were taken out of flat ones stand together by unit")

NO_METADATA = ModuleOrder(False, "the state dict does not list its modules (no _metadata), so its order may be any")
CONFIRMED = ModuleOrder(True, "the state dict lists its modules in this order")


def believed(stated: ModuleOrder, model: Mapping[str, Any]) -> ModuleOrder:
    """The order of a model's names that can be relied on: the format's statement, confirmed by the state dict."""
    return order_of(model, getattr(model, "_metadata", None)) if stated.kept else stated


def model_for_names(models: Sequence[Mapping[str, Any]], stated: ModuleOrder) -> Mapping[str, Any] | None:
    """The state dict that names an optimizer's parameters: the only one, or the original of all others.

    A copy (an average of the weights, a teacher) has the same names and shapes, or some of them. Among equal state
    dicts the first with a believed order is taken. If two believed orders disagree, the state dicts belong to different
    modules, and the optimizer's module is unknown: None.
    """
    shapes = [{k: v.shape for k, v in model.items() if isinstance(v, Tensor)} for model in models]
    whole = [m for m, own in zip(models, shapes, strict=True) if all(o.items() <= own.items() for o in shapes)]
    ordered = [m for m in models if believed(stated, m).kept] if whole else []
    shared = set(whole[0]).intersection(*ordered) if ordered else set()
    if len({tuple(name for name in m if name in shared) for m in ordered}) > 1:
        return None
    return next((m for m in whole if any(m is o for o in ordered)), whole[0] if whole else None)


def order_of(model: Mapping[str, Any], modules: Any) -> ModuleOrder:
    """Whether a state dict's tensors are in the order of its modules; `modules` is its `_metadata`."""
    if not isinstance(modules, Mapping) or not modules:
        return NO_METADATA
    places, at = module_places(modules), 0
    for name in (name for name, value in model.items() if isinstance(value, Tensor)):
        place = places.get(module_of(name))
        if place is None:
            return ModuleOrder(False, f"{name} lies in none of the modules that the state dict lists")
        if place < at:
            return ModuleOrder(False, f"{name} stands behind modules that the state dict lists after its own")
        at = place
    # Within a module: all of torch's modules have the weight before the bias.
    seen: set[str] = set()
    for name, value in model.items():
        seen.add(name)
        head, dot, last = name.rpartition(".")
        name_of_weight = f"{head}{dot}weight"
        weight = model.get(name_of_weight) if last == "bias" and name_of_weight not in seen else None
        if isinstance(value, Tensor) and isinstance(weight, Tensor) and value.shape == weight.shape:
            return ModuleOrder(False, f"{name} stands before {name_of_weight}, as in no module of torch")
    return CONFIRMED


def module_places(modules: Mapping[Any, Any]) -> dict[str, int]:
    """The index of each module in a state dict's list of modules, by its name without wrappers."""
    places: dict[str, int] = {}
    for module in modules:
        places.setdefault(without_wrappers(str(module)), len(places))
    return places


def module_of(name: str) -> str:
    """The name of a parameter's module, without wrappers."""
    return without_wrappers(name).rpartition(".")[0]


# -- moments: the tensors in a parameter's optimizer state that have the parameter's layout ----------------------------


FACTORS = {("row_var", "col_var"): 1, ("exp_avg_sq_row", "exp_avg_sq_col"): 0}
"""Slots of a factored second moment: means over the last and over the last but one dimension, kept as 1 or left out.

Source: torch/optim/_adafactor.py, `_init_group`; transformers/optimization.py, `Adafactor.step`.
"""

QUANT_STATE = "__bnb_optimizer_quant_state__"
"""Slot in which bitsandbytes from 0.48 on packs its tensors, so that FSDP leaves them unchanged."""

OF_BITSANDBYTES = ("state1", "state2")
"""The moments of bitsandbytes, in 8 or 32 bits; the slots beside them are scales of blocks, tables and norms.

Source: bitsandbytes/optim/optimizer.py, `Optimizer8bit.state_dict`, `Optimizer2State.init_state`.
"""


def moments_of(entry: Any) -> list[Tensor]:
    """The moments of a parameter as stored."""
    return list(_by_slot(entry).values())


def in_full(entry: Any) -> list[Tensor]:
    """The moments of a parameter; two factors are replaced by a tensor of the full shape."""
    slots = _by_slot(entry)
    for names, cut in FACTORS.items():
        row, column = (slots.get(name) for name in names)
        if row is None or column is None or not (row.shape and column.shape):
            continue
        above = row.shape[: len(row.shape) - cut]
        if row.shape == (*above, *(1,) * cut) and column.shape == (*above[:-1], *(1,) * cut, column.shape[-1]):
            slots = {k: v for k, v in slots.items() if k not in names}
            slots[names[0]] = Tensor((*above, column.shape[-1]), row.dtype, ())
    return list(slots.values())


def _by_slot(entry: Any) -> dict[Any, Tensor]:
    """The tensors of a parameter's state without the step counter; of bitsandbytes' slots only the moments."""
    slots = entry if isinstance(entry, Mapping) else {}
    packed = slots.get(QUANT_STATE)
    slots = packed if isinstance(packed, Mapping) else slots
    own = {slot: slots[slot] for slot in OF_BITSANDBYTES if slot in slots}
    return {slot: value for slot, value in (own or slots).items() if isinstance(value, Tensor) and slot != "step"}


# -- names for an optimizer's numbers ----------------------------------------------------------------------------------
# A plain `optimizer.state_dict()` numbers its parameters through all param groups. A name for a number is
#
# - stated by the file: the ids are names, or groups have `param_names` (`AdamW(model.named_parameters())`, torch 2.6
# on);
# - proven by its shape: one number has moments of that shape, and one parameter of the model has it;
# - assumed from the order: groups are made from `model.parameters()`, or from those that a filter selects, so that each
#   group lists its parameters in the order of the module. If the model's own order is the module's (`module_order`) and
#   the shapes leave only one assignment in that order, it gives the names, which are called assumed: two parameters of
#   one shape that were put into a group in the opposite order look the same;
# - or missing, and the number stays.
#
# Source: torch/optim/optimizer.py (`state_dict`, `add_param_group`), and formats seen in DDP, FSDP2 and verl files.


Parameters = Sequence[tuple[str, Tensor]]

MAX_STEPS = 10_000_000
"""Parameters that are visited while groups are matched to the model; a forged file may have any number of groups."""

MAX_ROUNDS = 16


def group_ids(optimizer: Mapping[str, Any]) -> list[list[Id]]:
    """The ids of each param group; an empty list for a group without ids (torch 1.13's sharded form).

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
    """Name the parameters of an optimizer, as far as possible.

    `model` is None when there is none, or its module is unknown among several; `order` is that of its names, and
    `whose` describes the owner of this order in messages.
    """
    state = optimizer["state"]
    groups = numbered_groups(optimizer)
    ids = [i for group in groups for i in group]
    stated = _stated_names(optimizer, ids, model)
    if stated is not None:
        return Naming(stated, "fqn", (), tuple(i for i in ids if str(i).startswith(UNNAMED)), "")
    if model is None:
        return Naming({}, "none", (), tuple(ids), f"keyed by number, and no one model is beside it; {give_names()}")
    params, pieces = _parameters(model, len(ids))
    proven = by_shape({i: state.get(i) for i in ids}, params, pieces)
    ordered = order.kept and _are_in_order(optimizer, ids)
    laid = by_order(groups, state, params, pieces) if ordered else {}
    without_shape = sum(_moment(state.get(i)) is None for i in laid if i not in proven)
    names = {**laid, **proven}
    assumed = tuple(i for i in ids if i in laid and i not in proven)
    unnamed = tuple(i for i in ids if i not in names)
    why = FITS if order.kept else f"their shapes fit several or none, and {order.why}"
    by: Literal["order", "shape", "none"] = "order" if assumed else "shape" if proven else "none"
    note = note_of(len(proven), len(assumed), len(unnamed), why, whose, without_shape)
    return Naming(names, by, assumed, unnamed, note)


def numbered_groups(optimizer: Mapping[str, Any]) -> list[list[Id]]:
    """The ids of each param group; if groups list none, the ids that have state, in ascending order."""
    groups = group_ids(optimizer)
    state = list(optimizer["state"])
    return groups if any(groups) else [sorted(state) if all(type(i) is int for i in state) else state]


def _are_in_order(optimizer: Mapping[str, Any], ids: Sequence[Id]) -> bool:
    """Whether the ids are distinct numbers in known groups."""
    numbers = all(type(i) is int for i in ids) and len(set(ids)) == len(ids)
    return numbers and (any(group_ids(optimizer)) or len(optimizer["param_groups"]) < 2)


# -- names in the file -------------------------------------------------------------------------------------------------


def _stated_names(
    optimizer: Mapping[str, Any], ids: Sequence[Id], model: Mapping[str, Any] | None
) -> dict[Id, str] | None:
    """The names that the file states for the ids; None if it states none."""
    listed = aligned(_param_names(optimizer), model)
    if listed:
        return listed
    # A dict keyed by `str(number)`; a parameter of an nn.ParameterList has such a name as well.
    numbers = all(str(i).isdecimal() for i in ids) and (model is None or not all(i in model for i in ids))
    return {i: i for i in ids} if all(isinstance(i, str) for i in ids) and not (ids and numbers) else None


def _param_names(optimizer: Mapping[str, Any]) -> dict[Id, str]:
    """Name by id as the param groups state them; empty if a group states none, or two ids have one name.

    Groups made from two modules' own `named_parameters()` both have a `weight`.
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
    """Names as in the model, matched without wrappers and DDP's leading `module`; empty if a name is not in it."""
    if model is None:
        return dict(names)
    known = {without_ddp(str(fqn)): str(fqn) for fqn in model}
    found = {i: name if name in model else known.get(without_ddp(name), "") for i, name in names.items()}
    return found if all(found.values()) and len(set(found.values())) == len(found) else {}


# -- names proven by shapes --------------------------------------------------------------------------------------------


def by_shape(entries: Mapping[Id, Any], params: Parameters, pieces: bool = False) -> dict[Id, str]:
    """Name the ids whose shape only one id and one parameter have.

    No id is named if more ids than parameters have a shape: then the model lacks parameters, or the moments do not have
    the parameters' layout (low-rank projections). With `pieces`, plain 1-D moments may be runs of a flattened
    parameter, whose length is no parameter's shape.
    """
    shapes = {i: shape for i, entry in entries.items() if (shape := only_shape(entry, pieces)) is not None}
    ids = Counter(shapes.values())
    fqns = Counter(t.shape for _, t in params)
    if len(params) < len(entries) or any(count > fqns[shape] for shape, count in ids.items()):
        return {}
    of_shape = {t.shape: fqn for fqn, t in params if fqns[t.shape] == 1}
    return {i: of_shape[shape] for i, shape in shapes.items() if shape in of_shape}


def only_shape(entry: Any, pieces: bool) -> Ints | None:
    """The shape that all moments of a parameter have; None if they differ, as low-rank moments do.

    Pieces of flattened parameters got their shape from a name, so their shape cannot prove a name: None.
    """
    moments = [moment for moment in in_full(entry) if moment.shape]
    runs = any(t.kind == "flat_pieces" or (pieces and not t.sharded and len(t.shape) == 1) for t in moments)
    shapes = {t.shape for t in moments}
    return shapes.pop() if len(shapes) == 1 and not runs else None


def _parameters(model: Mapping[str, Any], wanted: int) -> tuple[Parameters, bool]:
    """Collect the possible parameters, and whether ranks have pieces of them.

    Left out are tensors that are surely not parameters of their own: a name tied to an earlier one; the statistics of a
    normalization (torch/nn/modules/batchnorm.py, `_NormBase`); and, if FSDP sharded the model, unsharded tensors,
    because it shards every parameter and no buffer.
    """
    candidates = [(fqn, t) for fqn, t in model.items() if isinstance(t, Tensor) and is_floating(t.dtype)]
    seen: set[Any] = set()
    own: list[tuple[str, Tensor]] = []
    for fqn, tensor in candidates:
        identity = storage_identity(tensor)
        module, _, last = fqn.rpartition(".")
        statistic = last in ("running_mean", "running_var") and f"{module}.num_batches_tracked" in model
        if not statistic and (identity is None or identity not in seen):
            own.append((fqn, tensor))
        seen.add(identity)
    sharded = [c for c in own if c[1].sharded]
    return next((c for c in (sharded, own) if len(c) >= wanted), candidates), bool(sharded)


# -- names assumed from the order --------------------------------------------------------------------------------------


def by_order(groups: Sequence[list[Id]], state: Mapping[Id, Any], params: Parameters, pieces: bool) -> dict[Id, str]:
    """Match every group to the parameters in order; an id with only one possible place is named.

    A place that one group surely takes is no longer free for another, so this is repeated until nothing changes. If a
    group fits nowhere, no id is named: then the groups do not have the order of the module. With `pieces`, plain 1-D
    moments may be runs of a flattened parameter, whose length does not reveal its shape.
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
    """The first id without a place when its group is matched to a model in order; None when all have one."""
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
    """Place each id at the first fitting parameter after the previous one; stop at an id that fits nowhere."""
    placed: list[int] = []
    positions = iter(free)
    for i in ids:
        place = next((k for k in positions if _fits(moments[i], params[k][1], pieces)), None)
        if place is None:
            break
        placed.append(place)
    return placed


def _moment(entry: Any) -> Tensor | None:
    """A tensor of a parameter's state that has the parameter's layout; None if the state has none."""
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
    """Whether runs may belong to a parameter: with all ranks read, they add up to its elements, once per replica."""
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


def fits(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether an optimizer, whose state dict is `nested`, may be that of a model.

    Every name is one of the model's, with the shape of its moments; of numbers, the model has as many tensors of each
    shape as there are moments.
    """
    state = optimizer["state"]
    ids = [i for group in numbered_groups(optimizer) for i in group]
    names = _stated_names(optimizer, ids, None)
    if names is None:
        shapes = Counter(shape for i in ids if (shape := only_shape(state.get(i), True)) is not None)
        return bool(shapes) and shapes <= Counter(t.shape for t in model.values() if isinstance(t, Tensor))
    spelled = aligned(names, model)
    pairs = ((only_shape(state.get(i), True), model[fqn]) for i, fqn in spelled.items())
    return bool(spelled) and all(shape is None or shape == getattr(t, "shape", None) for shape, t in pairs)


# -- optimizers --------------------------------------------------------------------------------------------------------


def nested(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """An optimizer's state dict with `state` and `param_groups`; a flattened one is unflattened.

    Parameters with equal hyperparameters form one group, because flattening loses the groups.
    """
    if not is_flat_optimizer(value):
        return value
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, leaf in value.items():
        kind, fqn, name = flat_key(key)
        (state if kind == STATE else settings).setdefault(fqn, {})[name] = leaf
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in settings.items():
        groups.setdefault(repr(sorted(values.items())), {**values, "params": []})["params"].append(fqn)
    return {"state": state, "param_groups": list(groups.values())}


@displayed
@dataclass(frozen=True, repr=False)
class ParamGroup(Mapping[str, Any]):
    """One param group: hyperparameters as a mapping, and as attributes (`group.lr`) with numpy's numbers as Python's.

    Attributes:
        names: fqns of its parameters; `?` and the id if the name is unknown.
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
            value = self.values_[name]
        except KeyError:
            raise AttributeError(name) from None
        number = value.number if isinstance(value, NumpyScalar) else None
        return value if number is None else number

    def to_dict(self) -> dict[str, Any]:
        """The group's hyperparameters as plain data, and the names of its parameters as `params`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {**{str(key): value for key, value in self.values_.items()}, "params": self.names}

    def _summary(self) -> str:
        shown = [f"{key}={describe_for_error(value)}" for key, value in self.values_.items() if key != "params"]
        return f"of {plural(len(self.names), 'param')}: {', '.join(shown)}"


@displayed
@dataclass(frozen=True, repr=False)
class Optimizer:
    """An optimizer's saved state, by parameter name.

    Attributes:
        name: class name if the file has it, else the key.
        state: `{fqn: {slot: tensor or value}}`; an id without a name keeps its number.
    """

    name: str
    path: KeyPath
    state: Mapping[Any, Mapping[str, Any]]
    param_groups: Rows[ParamGroup]
    naming: Naming

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per param group, for pandas for example."""
        return self.param_groups.to_dicts()

    def _summary(self) -> str:
        groups = plural(len(self.param_groups), "param group")
        unsure = f", {len(self.naming.unnamed)} WITHOUT A NAME" if self.naming.unnamed else ""
        return f"{clip_middle(self.name, 60)}: state of {plural(len(self.state), 'parameter')}, {groups}{unsure}"


def optimizers_of(checkpoint: Checkpoint) -> Mapping[str, Optimizer]:
    """The optimizers of a checkpoint by class name or key; their state is keyed by fqn where names are known.

    Raises:
        RefusedError: the given names do not fit.
    """
    if "optimizers" not in checkpoint.worked_out:
        checkpoint.worked_out["optimizers"] = _described(checkpoint)
    found: dict[str, Optimizer] = checkpoint.worked_out["optimizers"]
    return found


def _described(checkpoint: Checkpoint) -> dict[str, Optimizer]:
    found: dict[str, Optimizer] = {}
    for section in sections_of_kind(checkpoint, "optimizer"):
        name, value = fqn_of(section.path[-1:]) or "optimizer", nested(section.value)
        naming = _named_by(_model_of(section, checkpoint), value, checkpoint)
        state = {naming.names.get(i, i): entry for i, entry in value["state"].items()}
        groups = [
            ParamGroup(group, tuple(naming.names.get(i, f"?{i}") for i in ids))
            for group, ids in zip(value["param_groups"], group_ids(value), strict=False)
        ]
        naming = named_when_read(naming, checkpoint.assumed_names)
        found[free_name(found, name)] = Optimizer(name, section.path, state, Rows(groups), naming)
    return found


# -- the model of an optimizer: the trained one, or a discriminator or a critic that has an optimizer of its own -------


def _model_of(section: Section, checkpoint: Checkpoint) -> Section | None:
    """The model that an optimizer trains; None if there is none, or if it may be one of several.

    Of several models that its states fit, it is the one of which each parameter has a state; of several such models,
    the trained one if there is no other optimizer, else the one that shares a word with it: `netD` and `optD`.
    """
    sections, optimizer = sections_of(checkpoint), nested(section.value)
    trained = candidates(sections)
    only = model_for_names([s.value for s in trained], checkpoint.module_order)
    fitting = [s for s in trained if only is None and fits(optimizer, s.value)]
    usual = fitting[0] if len(fitting) == 1 else next((s for s in trained if s.value is only), None)
    others = [s for s in sections if s.kind == "model" and s not in trained and role_of(s, sections) in APART]
    if not (others := [s for s in others if fits(optimizer, s.value)]) or len(trained) > 1:
        return usual
    possible = [s for s in trained if fits(optimizer, s.value)] + others
    count = len(optimizer["state"])
    covered = [s for s in possible if len(_parameters(s.value, 1)[0]) == count] or possible
    if usual in covered and len(sections_of_kind(checkpoint, "optimizer")) == 1:
        return usual
    words = set(words_in(section.path[-1:])) - NETWORKS
    alike = [s for s in covered if len(covered) == 1 or words.intersection(words_in(s.path[-1:]))]
    return alike[0] if len(alike) == 1 else None


def name_before(section: Section, checkpoint: Checkpoint) -> str:
    """What stands before a model's names in the state of its optimizer: "" for the model to look at and its copies.

    A discriminator, a critic or a reward model has names of its own, which follow the name of its section; if the user
    chose one of these, the names of the others do.
    """
    sections = sections_of(checkpoint)
    wanted = checkpoint.options.model if checkpoint.options is not None else None
    apart = {s.name: role for s in sections if s.kind == "model" and (role := role_of(s, sections)) in APART}
    looked_at = [name for name, role in apart.items() if wanted in (name, role)]
    mine = [name for name in apart if name == section.name]
    return "" if mine == looked_at[:1] else f"{section.name}."


def _named_by(model: Section | None, optimizer: Mapping[str, Any], checkpoint: Checkpoint) -> Naming:
    """Name an optimizer's parameters by its model; of a model inside a state dict, also by that state dict.

    Raises:
        RefusedError: the given names do not fit.
    """
    order, given = checkpoint.module_order, checkpoint.names_given
    before = "" if model is None else name_before(model, checkpoint)
    tries = [(None if model is None else model.value, {name: before + name for name in model.value} if model else {})]
    inner = [s for s in sections_of(checkpoint) if s.inside is not None]
    if inner:
        ways = {s.path: before if model is not None and s.path == model.path else f"{s.name}." for s in inner}
        spelled = {key: ways[s.path] + name for s in inner for name, key in s.keys.items()}
        tries.insert(0, (leaf_at(checkpoint.tree, inner[0].inside or ()), spelled))
    if given is not None and len(tries) > 1:
        given_names = {*given.shapes, *(name for names in given.listed for name in names)}
        tries = [one for one in tries if given_names.intersection(one[0] or ())][:1] or tries[:1]
    namings = [(name_with(optimizer, state, believed(order, state or {}), given), spell) for state, spell in tries]
    naming, spelled = max(namings, key=lambda n: (sum(name in n[1] for name in n[0].names.values()), n[0].by == "fqn"))
    return naming._replace(names={i: spelled.get(name, name) for i, name in naming.names.items()})


# -- names from another source than the checkpoint: `--names FROM` -----------------------------------------------------

# The names in FROM are believed, and checked against the checkpoint: the number of ids, the names in the model, and the
# shapes of the moments. A list in the optimizer's own order names every number. Parameters in the order of the module
# (of another checkpoint, or of a module) give the names that the checkpoint's own model would give if it had kept its
# order: proven by shapes, and assumed from the order.


def name_with(
    optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, order: ModuleOrder, given: GivenNames | None
) -> Naming:
    """Name an optimizer's parameters as `name_parameters` does, with the user's names for numbers.

    Raises:
        RefusedError: the names contradict the checkpoint; the message gives the first contradiction.
    """
    naming = name_parameters(optimizer, model, order)
    if given is None or naming.by == "fqn":
        return naming
    groups = numbered_groups(optimizer)
    sizes = [len(group) for group in groups]
    fits = [len(names) for names in given.listed] in (sizes, [sum(sizes)])
    listed = [name for names in given.listed for name in names] if fits else []
    if listed:
        names = dict(zip((i for group in groups for i in group), listed, strict=True))
        return Naming(
            _as_the_model(names, optimizer, model, given), "told", (), (), f"keyed by number; named by {given.given_by}"
        )
    if not given.shapes:
        raise _refused(given, _miscounted(given.listed, groups))
    return _in_its_order(optimizer, model, given)


def _refused(given: GivenNames, why: str) -> RefusedError:
    return RefusedError(None, f"{given.given_by}: {why}")


def _miscounted(listed: Sequence[Sequence[str]], groups: Sequence[Sequence[Id]]) -> str:
    given, found = ([len(one) for one in many] for many in (listed, groups))
    if len(given) == 1 or sum(given) != sum(found):
        return f"has the names of {sum(given)} parameters, and the optimizer numbers {sum(found)}"
    return f"has names in groups of {given}, and the optimizer has groups of {found}"


def _as_the_model(
    names: Mapping[Id, str], optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, given: GivenNames
) -> dict[Id, str]:
    """The given names in the model's spelling, after checking that they fit it."""
    spelled = aligned(names, model)
    stranger = next((n for n in names.values() if model is not None and n not in model), None)
    if not spelled:
        raise _refused(given, f"{stranger} is no tensor of the model here")
    pieces = any(isinstance(t, Tensor) and t.sharded for t in (model or {}).values())
    for number, fqn in spelled.items():
        parameter, shape = (model or {}).get(fqn), only_shape(optimizer["state"].get(number), pieces)
        if isinstance(parameter, Tensor) and shape is not None and shape != parameter.shape:
            text = f"{fqn} has shape {list(parameter.shape)}, and number {number}, which it would name, {list(shape)}"
            raise _refused(given, text)
    return spelled


def _in_its_order(optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, given: GivenNames) -> Naming:
    ordered = _ordered(model, given)
    naming = name_parameters(optimizer, ordered, ModuleOrder(True, ""), given.given_by)
    number = misfit(optimizer, ordered) if naming.unnamed else None
    if number is not None:
        shape = only_shape(optimizer["state"].get(number), False)
        text = f"number {number} of the optimizer, of shape {list(shape or ())}, fits none of its parameters in order"
        raise _refused(given, f"{text}; list the names in the optimizer's order in a JSON")
    return naming._replace(by="told")


def _ordered(model: Mapping[str, Any] | None, given: GivenNames) -> dict[str, Tensor]:
    """The given parameters, as tensors of this checkpoint's model.

    Without a model, shapes are compared with moments only.
    """
    if model is None:
        return {fqn: Tensor(shape, "float32", ()) for fqn, shape in given.shapes.items()}
    spelled = aligned({fqn: fqn for fqn in given.shapes}, model)
    if not spelled:
        stranger = next(fqn for fqn in given.shapes if fqn not in model)
        raise _refused(given, f"{stranger} is no tensor of the model here")
    for fqn, here in spelled.items():
        tensor = model[here]
        if not isinstance(tensor, Tensor) or tensor.shape != given.shapes[fqn]:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else "no tensor"
            raise _refused(given, f"{fqn} has shape {list(given.shapes[fqn])} there, and {found} here")
    more = (fqn for fqn, t in model.items() if isinstance(t, Tensor) and is_floating(t.dtype))
    absent = next((fqn for fqn in more if fqn not in set(spelled.values())), None) if given.buffers else None
    if absent is not None:
        raise _refused(given, f"{absent} of the model here is not in it")
    return {here: model[here] for here in spelled.values()}
