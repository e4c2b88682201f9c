"""Rows about optimizers with their param groups, and about learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.training_state.sections import schedulers_of, section_name, sections_of, sections_of_kind

if TYPE_CHECKING:
    from ckptools.training_state.optimizers import Optimizer, ParamGroup


class GroupRow(NamedTuple):
    """One param group.

    Attributes:
        values: its hyperparameters as the file has them, without the list of parameters.
        tensors: parameters in it; None when the file does not list them.
        params: elements of them together; None when that cannot be told for every one.
        names: their fqns, `?3` where only the number is known.
    """

    values: Mapping[str, Any]
    tensors: int | None
    params: int | None
    names: tuple[str, ...]


class OptimizerRow(NamedTuple):
    """One optimizer.

    Attributes:
        name: class name, or the key where the file has no class.
        section: name of its section.
        groups: its param groups.
        slots: names of the state per parameter, such as `exp_avg`.
        entries: parameters that have state.
        named_by: `fqn`, `order`, `shape` or `none`: how parameters got their names.
        assumed: how many have a name that holds only if the groups list parameters in the order of the module.
        unnamed: how many have none.
        note: a line about the naming; empty when the file has the names.
    """

    name: str
    section: str
    groups: tuple[GroupRow, ...]
    slots: tuple[str, ...]
    entries: int
    named_by: str
    assumed: int
    unnamed: int
    note: str


class SchedulerRow(NamedTuple):
    """One scheduler.

    Attributes:
        name: class name or key.
        section: name of its section.
        state: its state as the file has it.
        agrees: whether its last learning rates are those of the param groups; None when they cannot be compared.
    """

    name: str
    section: str
    state: Any
    agrees: bool | None


def optimizer_rows(ck: Checkpoint) -> tuple[OptimizerRow, ...]:
    """A row for each optimizer."""
    if not sections_of_kind(ck, "optimizer"):
        return ()
    from ckptools.training_state.optimizers import optimizers_of

    return tuple(_optimizer_row(ck, optimizer) for optimizer in optimizers_of(ck).values())


def _optimizer_row(ck: Checkpoint, optimizer: Optimizer) -> OptimizerRow:
    from ckptools.training_state.optimizer_names import group_ids
    from ckptools.training_state.optimizers import nested

    slots = {slot: None for entry in optimizer.state.values() if isinstance(entry, Mapping) for slot in entry}
    raw = next(s.value for s in sections_of(ck) if s.path == optimizer.path)
    listed = [bool(ids) or not optimizer.state for ids in group_ids(nested(raw))]
    sizes = _sizes(ck, optimizer)
    rows = tuple(_group_row(g, sizes, known) for g, known in zip(optimizer.param_groups, listed, strict=False))
    naming = optimizer.naming
    return OptimizerRow(
        name=optimizer.name,
        section=section_name(optimizer.path),
        groups=rows,
        slots=tuple(map(str, slots)),
        entries=len(optimizer.state),
        named_by=naming.by,
        assumed=len(naming.assumed),
        unnamed=len(naming.unnamed),
        note=naming.note,
    )


def _group_row(group: ParamGroup, sizes: Mapping[str, int], listed: bool) -> GroupRow:
    values = {key: value for key, value in group.items() if key != "params"}
    if not listed:
        return GroupRow(values, None, None, ())
    known = [sizes[name] for name in group.names if name in sizes]
    params = sum(known) if len(known) == len(group.names) else None
    return GroupRow(values, len(group.names), params, group.names)


def _sizes(ck: Checkpoint, optimizer: Optimizer) -> dict[str, int]:
    """Elements of each parameter by its name in the groups: of the model's tensor, else of its moments.

    A piece of a flattened parameter does not tell how large the parameter is.
    """
    sizes: dict[str, int] = {}
    for key, entry in optimizer.state.items():
        moments = [v for k, v in entry.items() if isinstance(v, Tensor) and k != "step"] if _is_entry(entry) else []
        if moments and moments[0].kind != "flat_pieces":
            sizes[key if isinstance(key, str) else f"?{key}"] = moments[0].numel
    for section in sections_of_kind(ck, "model"):
        pairs = section.value.items() if isinstance(section.value, Mapping) else ()
        sizes.update({k: t.numel for k, t in pairs if isinstance(t, Tensor) and t.kind != "flat_pieces"})
    return sizes


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping)


def scheduler_rows(ck: Checkpoint) -> tuple[SchedulerRow, ...]:
    """A row for each scheduler."""
    sections = sections_of_kind(ck, "scheduler")
    if not sections:
        return ()
    from ckptools.training_state.learning_rates import learning_rates

    rows = zip(sections, schedulers_of(ck), learning_rates(ck), strict=True)
    return tuple(SchedulerRow(name, s.name, s.value, rates.agree if rates else None) for s, name, rates in rows)
