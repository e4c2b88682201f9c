"""The user's `--shapes FROM` and `--names FROM`, for checkpoints that lack shapes or names of parameters.

FROM of `--shapes`, for flattened parameters, is a JSON that maps names to shapes, or another checkpoint: its model's
names, shapes and ties are taken, no values. The order is taken only if it is the module's: from a torch.save file
whose state dict lists its modules in that order (`ckptools.training_state.optimizers`), or from a JSON, whose
author chose the order.

    {"emb.weight": [33, 17], "head.weight": "emb.weight"}

A name instead of a shape means that the parameter is tied to that parameter. Such a JSON is made from the model by
`json.dump({k: list(v.shape) for k, v in model.named_parameters()}, file)`. In Python it may be the model itself.

FROM of `--names`, for an optimizer that is keyed by number, is a JSON list of names in the optimizer's order (or a list
of such lists, one for each param group), a JSON of name to shape in the order of the module, or a checkpoint: one whose
own optimizer has names, or whose state dict has the order of the module. In Python it may be such a list, or the
module. The list is made from the optimizer by

    name = {p: n for n, p in model.named_parameters()}
    json.dump([[name[p] for p in group["params"]] for group in optimizer.param_groups], file)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Union

from ckptools.dtypes import is_floating
from ckptools.errors import ReadError, UsageError
from ckptools.files.opening import read_json
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import GivenNames, ModuleOrder
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error
from ckptools.option import spelled
from ckptools.training_state.models import trained_or_all
from ckptools.training_state.optimizers import AS_WRITTEN, BY_UNIT, believed, group_ids, optimizers_of
from ckptools.training_state.sections import is_flat_optimizer, sections_of_kind, storage_identity

MAX_DIMS = 64
MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class Shapes:
    """Shapes, ties and order of a model's parameters, given by the user.

    Attributes:
        source: their origin, for messages.
        tied: names that are another parameter under a second name, with the first name.
        order: whether the names are in the order of the module.
    """

    source: str
    shapes: Mapping[str, Ints]
    tied: Mapping[str, str]
    order: ModuleOrder

    @property
    def ordered(self) -> bool:
        """Whether the names are in the order of the module."""
        return self.order.kept


class Module(Protocol):
    """The part of a model that is used here; `torch.nn.Module` fits."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Names and parameters, in the order of the module, each parameter once."""


ShapesFrom = str | Path | Module
"""Sources of shapes: a path, or a module before it was wrapped."""


def shapes_from_python(module: Module) -> Shapes:
    """The shapes of a module's parameters; a tied one has its first name."""
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return Shapes(f"the {type(module).__name__}", found, {}, AS_WRITTEN)


def shapes_from_checkpoint(checkpoint: Checkpoint, path: Path) -> Shapes:
    """The shapes of the model in a checkpoint, which was opened at `path`.

    Raises:
        UsageError: it has no model, several, or one whose shapes are unknown too.
    """
    models = trained_or_all(checkpoint)
    if len(models) != 1:
        raise UsageError(path, f"holds {len(models)} models; {spelled('shapes')} needs something that holds one")
    tensors = {k: t for k, t in models[0].value.items() if isinstance(t, Tensor)}
    whole = {k: t for k, t in tensors.items() if not t.note or t.kind == "meta"}
    if any(t.kind == "flat_pieces" and t.note for t in tensors.values()):
        raise UsageError(
            path, f"has no shapes either; {spelled('shapes')} needs a checkpoint with whole tensors, or a JSON"
        )
    pieces = any(t.kind == "flat_pieces" for t in whole.values())
    order = BY_UNIT if pieces else believed(checkpoint.module_order, models[0].value)
    return Shapes(str(path), {k: t.shape for k, t in whole.items()}, ties(whole), order)


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied names: names with the bytes of an earlier name, which they map to."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        identity = storage_identity(tensor)
        if identity is not None and first.setdefault(identity, name) != name:
            tied[name] = first[identity]
    return tied


def shapes_from_json(path: Path) -> Shapes:
    """The shapes in a JSON.

    Raises:
        ReadError: it is not a JSON of name to shape.
    """
    found = read_json(path)
    if not isinstance(found, dict) or not found:
        raise ReadError(
            path, f"no JSON of name to shape: expected an object of names, found {describe_for_error(found)}"
        )
    shapes: dict[str, Ints] = {}
    tied: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, str) and value in shapes:
            tied[name] = tied.get(value, value)
            shapes[name] = shapes[value]
        elif is_shape(value):
            shapes[name] = tuple(value)
        else:
            raise ReadError(
                path,
                f"{describe_for_error(name)}: expected a list of sizes, "
                f"or the earlier name that it is tied to; found {describe_for_error(value)}",
            )
    return Shapes(str(path), shapes, tied, AS_WRITTEN)


def is_shape(value: Any) -> bool:
    """Whether a value of a JSON is a list of sizes."""
    return (
        isinstance(value, list) and len(value) <= MAX_DIMS and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)
    )


# -- names -------------------------------------------------------------------------------------------------------------

NamesFrom = Union[str, Path, "list[str]", "list[list[str]]", Module]
"""Sources of names: a path, a list, or a module."""


def names_from_python(names: list[str] | list[list[str]] | Module) -> GivenNames:
    """Parameter names from a list, from a list per param group, or from a module.

    Raises:
        UsageError: it is not a list of names.
    """
    if isinstance(names, (list, tuple)):
        return GivenNames("the list that was given", _listed(names, None))
    found = shapes_from_python(names)
    return GivenNames(found.source, shapes=found.shapes)


def names_from_json(path: Path) -> GivenNames:
    """The names in a JSON: a list of names, or the keys of a JSON of name to shape.

    Raises:
        ReadError: it cannot be read, or has another content.
        UsageError: its list is not a list of names.
    """
    content = read_json(path)
    if isinstance(content, list):
        return GivenNames(str(path), _listed(content, path))
    found = shapes_from_json(path)
    return GivenNames(str(path), shapes={k: shape for k, shape in found.shapes.items() if k not in found.tied})


def _listed(content: Any, path: Path | None) -> tuple[tuple[str, ...], ...]:
    """Names by group; a flat list is one group."""
    groups = content if content and all(isinstance(group, (list, tuple)) for group in content) else [content]
    names = [name for group in groups for name in group]
    stranger = next((name for name in names if not isinstance(name, str) or not name), None)
    if stranger is not None or not names:
        raise UsageError(
            path, f"no list of names: expected text, found {describe_for_error(stranger) if names else 'nothing'}"
        )
    twice, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UsageError(path, f"{describe_for_error(twice)} is listed {times} times; each number is one parameter")
    return tuple(tuple(group) for group in groups)


def names_from_checkpoint(checkpoint: Checkpoint, path: Path) -> GivenNames:
    """The names in the optimizer of a checkpoint, or in its model if that keeps the module's order.

    Raises:
        UsageError: it has no names, or not in the module's order.
    """
    listed = _of_optimizer(checkpoint)
    models = trained_or_all(checkpoint)
    model: Mapping[str, Any] = models[0].value if len(models) == 1 else {}
    order = believed(checkpoint.module_order, model)
    if not listed and len(models) != 1:
        raise UsageError(path, f"holds {len(models)} models and no names of an optimizer; {spelled('names')} needs one")
    if not listed and not order.kept:
        way = (
            f"{spelled('names')} needs a .pt that holds the module's state dict as it was, or a JSON list of names in "
            "the optimizer's order"
        )
        raise UsageError(path, f"does not state the order of parameters, for {order.why}; {way}")
    return GivenNames(str(path), listed, _shapes(model) if order.kept else {}, buffers=True)


def _of_optimizer(checkpoint: Checkpoint) -> tuple[tuple[str, ...], ...]:
    """The names of the param groups, if a file has them, in the order in which it was saved."""
    named = [o for o in optimizers_of(checkpoint).values() if o.naming.by == "fqn" and o.state]
    if len(named) != 1 or not checkpoint.module_order.kept:
        return ()
    value = next(s.value for s in sections_of_kind(checkpoint, "optimizer") if s.path == named[0].path)
    if is_flat_optimizer(value) or not any(group_ids(value)):
        return ()
    names = named[0].naming.names
    return tuple(tuple(names.get(i, "") for i in ids) for ids in group_ids(value))


def _shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the possible parameters; a tied name is a second name of its parameter."""
    tensors = {k: t for k, t in model.items() if isinstance(t, Tensor)}
    tied = ties(tensors)
    return {k: t.shape for k, t in tensors.items() if is_floating(t.dtype) and k not in tied}


SOURCES = {
    "shapes": (shapes_from_python, shapes_from_json, shapes_from_checkpoint),
    "names": (names_from_python, names_from_json, names_from_checkpoint),
}
"""The readers of either, for a Python object, a JSON and a checkpoint."""
