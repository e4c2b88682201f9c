"""Optimizer state by parameter name, also where the file keeps it by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptools.model.checkpoint import Checkpoint, GivenNames, ModuleOrder
from ckptools.model.records import displayed, to_dict
from ckptools.model.rows import Rows
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import describe_for_error
from ckptools.text import clip_middle, plural
from ckptools.training_state.given_names import name_with
from ckptools.training_state.module_order import believed, model_for_names
from ckptools.training_state.naming import Naming, named_when_read
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.sections import GROUPS, STATE, free_name, is_flat_optimizer, sections_of_kind


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


@displayed
@dataclass(frozen=True, repr=False)
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

    def to_dict(self) -> dict[str, Any]:
        """Its hyperparameters as plain data, and the names of its parameters as `params`."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {**{str(key): value for key, value in self.values_.items()}, "params": self.names}

    def _told(self) -> str:
        shown = [f"{key}={describe_for_error(value)}" for key, value in self.values_.items() if key != "params"]
        return f"of {plural(len(self.names), 'param')}: {', '.join(shown)}"


@displayed
@dataclass(frozen=True, repr=False)
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
    param_groups: Rows[ParamGroup]
    naming: Naming

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per param group, such as pandas takes."""
        return self.param_groups.to_dicts()

    def _told(self) -> str:
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
        name = fqn_of(section.path[-1:]) or "optimizer"
        optimizer = describe(name, section.path, section.value, model, order, checkpoint.names_given)
        naming = named_when_read(optimizer.naming, checkpoint.assumed_names)
        found[free_name(found, optimizer.name)] = replace(optimizer, naming=naming)
    return found


def describe(
    name: str,
    path: KeyPath,
    value: Mapping[str, Any],
    model: Mapping[str, Any] | None,
    order: ModuleOrder,
    given: GivenNames | None = None,
) -> Optimizer:
    """Describe the optimizer at `path`.

    Args:
        name: what to call it.
        path: where it is in the tree.
        value: its state dict, nested or flattened.
        model: the model's state dict, where there is one.
        order: whether that has the order of the module.
        given: names for numbers that something beside the checkpoint tells.

    Raises:
        RefusedError: the names that were given do not fit.
    """
    value = nested(value)
    naming = name_with(value, model, order, given)
    state = {naming.names.get(i, i): entry for i, entry in value["state"].items()}
    groups = [
        ParamGroup(group, tuple(naming.names.get(i, f"?{i}") for i in ids))
        for group, ids in zip(value["param_groups"], group_ids(value), strict=False)
    ]
    return Optimizer(name, path, state, Rows(groups), naming)
