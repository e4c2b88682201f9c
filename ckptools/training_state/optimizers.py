"""Optimizer state by parameter name, also where the file keeps it by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.errors import RefusedError
from ckptools.model.checkpoint import Checkpoint, GivenNames, ModuleOrder
from ckptools.model.records import Rows, displayed, to_dict
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import describe_for_error
from ckptools.text import clip_middle, plural
from ckptools.training_state.optimizer_names import (
    aligned,
    group_ids,
    misfit,
    name_parameters,
    numbered_groups,
    only_shape,
)
from ckptools.training_state.parameter_names import Id, Naming, believed, model_for_names, named_when_read
from ckptools.training_state.sections import STATE, flat_key, free_name, is_flat_optimizer, sections_of_kind


def nested(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """An optimizer's state dict with `state` and `param_groups`, also where the file has it flattened.

    Parameters whose hyperparameters are all equal form one group, as flattening has lost which ones did.
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
    """One param group: its hyperparameters as a mapping, and as attributes (`group.lr`).

    Attributes:
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

    def to_dict(self) -> dict[str, Any]:
        """Its hyperparameters as plain data, and the names of its parameters as `params`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {**{str(key): value for key, value in self.values_.items()}, "params": self.names}

    def _summary(self) -> str:
        shown = [f"{key}={describe_for_error(value)}" for key, value in self.values_.items() if key != "params"]
        return f"of {plural(len(self.names), 'param')}: {', '.join(shown)}"


@displayed
@dataclass(frozen=True, repr=False)
class Optimizer:
    """An optimizer's saved state, by name.

    Attributes:
        name: class name where the file has it, else the key.
        state: `{fqn: {slot: tensor or value}}`; an id that has no name keeps its number.
    """

    name: str
    path: KeyPath
    state: Mapping[Any, Mapping[str, Any]]
    param_groups: Rows[ParamGroup]
    naming: Naming

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per param group, such as pandas takes."""
        return self.param_groups.to_dicts()

    def _summary(self) -> str:
        groups = plural(len(self.param_groups), "param group")
        unsure = f", {len(self.naming.unnamed)} WITHOUT A NAME" if self.naming.unnamed else ""
        return f"{clip_middle(self.name, 60)}: state of {plural(len(self.state), 'parameter')}, {groups}{unsure}"


def optimizers_of(checkpoint: Checkpoint) -> Mapping[str, Optimizer]:
    """The optimizers of a checkpoint by class name or key, their state by fqn where names are known.

    Raises:
        RefusedError: the names that were given do not fit.
    """
    if "optimizers" not in checkpoint.worked_out:
        checkpoint.worked_out["optimizers"] = _described(checkpoint)
    found: dict[str, Optimizer] = checkpoint.worked_out["optimizers"]
    return found


def _described(checkpoint: Checkpoint) -> dict[str, Optimizer]:
    models = [section.value for section in sections_of_kind(checkpoint, "model")]
    model = model_for_names(models, checkpoint.module_order)
    order = believed(checkpoint.module_order, model or {})
    found: dict[str, Optimizer] = {}
    for section in sections_of_kind(checkpoint, "optimizer"):
        name, value = fqn_of(section.path[-1:]) or "optimizer", nested(section.value)
        naming = name_with(value, model, order, checkpoint.names_given)
        state = {naming.names.get(i, i): entry for i, entry in value["state"].items()}
        groups = [
            ParamGroup(group, tuple(naming.names.get(i, f"?{i}") for i in ids))
            for group, ids in zip(value["param_groups"], group_ids(value), strict=False)
        ]
        naming = named_when_read(naming, checkpoint.assumed_names)
        found[free_name(found, name)] = Optimizer(name, section.path, state, Rows(groups), naming)
    return found


# -- names from another source than the checkpoint: `--names FROM` ----------------------------------------------------

# FROM is believed, and checked against the checkpoint: how many numbers there are, which names the model has, and the
# shapes of the moments. A list in the optimizer's own order names every number. Parameters in the order of the module
# (of another checkpoint, or of a module) name what the checkpoint's own model would if it had kept its order: what
# shapes prove, and what order suggests.


def name_with(
    optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, order: ModuleOrder, given: GivenNames | None
) -> Naming:
    """Name the parameters of an optimizer as `name_parameters` does, with names that were given where it has numbers.

    Raises:
        RefusedError: the names contradict the checkpoint; says where first.
    """
    naming = name_parameters(optimizer, model, order)
    if given is None or naming.by == "fqn":
        return naming
    groups = numbered_groups(optimizer)
    listed = _by_group(given.listed, groups)
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


def _by_group(listed: Sequence[Sequence[str]], groups: Sequence[Sequence[Id]]) -> list[str]:
    """The names, one for each number; nothing where there are not as many, in each group."""
    sizes = [len(group) for group in groups]
    fits = [len(names) for names in listed] in (sizes, [sum(sizes)])
    return [name for names in listed for name in names] if fits else []


def _miscounted(listed: Sequence[Sequence[str]], groups: Sequence[Sequence[Id]]) -> str:
    given, found = ([len(one) for one in many] for many in (listed, groups))
    if len(given) == 1 or sum(given) != sum(found):
        return f"has the names of {sum(given)} parameters, and the optimizer numbers {sum(found)}"
    return f"has names in groups of {given}, and the optimizer has groups of {found}"


def _as_the_model(
    names: Mapping[Id, str], optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, given: GivenNames
) -> dict[Id, str]:
    """The names, spelled as the model spells them, once they are seen to fit it."""
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
    """The parameters that are given, as the model here has them.

    Without a model here, the shapes are compared with moments only.
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
