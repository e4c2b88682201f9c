"""What `--names FROM` reads: names for an optimizer that is keyed by number.

FROM is a JSON list of names in the optimizer's order (or a list of such lists, one for each param group), a JSON of
name to shape in the order of the module, or a checkpoint: one whose own optimizer says its names, or whose state dict
has the order of the module. In Python it may be such a list, or the module. The list is made where the optimizer is:

    name = {p: n for n, p in model.named_parameters()}
    json.dump([[name[p] for p in group["params"]] for group in optimizer.param_groups], file)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from ckptools.dtypes import is_floating
from ckptools.errors import UsageError
from ckptools.files.json_file import read_json
from ckptools.formats.shared import shapes
from ckptools.formats.shared.shapes import Module
from ckptools.model.checkpoint import Checkpoint, GivenNames
from ckptools.model.tensor import Tensor
from ckptools.model.values import describe_for_error
from ckptools.training_state.module_order import believed
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import is_flat_optimizer, sections_of, sections_of_kind

NamesFrom = Union[str, Path, "list[str]", "list[list[str]]", Module]
"""What may tell names: a path, a list, or a module."""


def from_python(names: list[str] | list[list[str]] | Module) -> GivenNames:
    """The names in a list, by param group or of all, or those of a module's parameters.

    Raises:
        UsageError: it is no list of names.
    """
    if isinstance(names, (list, tuple)):
        return GivenNames("the list that was given", _listed(names, None))
    found = {name: tuple(parameter.shape) for name, parameter in names.named_parameters()}
    return GivenNames(f"the {type(names).__name__}", shapes=found)


def from_json(path: Path) -> GivenNames:
    """The names in a JSON: a list of them, or the keys of one that tells shapes.

    Raises:
        ReadError: it cannot be read, or holds something else.
        UsageError: its list is no list of names.
    """
    content = read_json(path)
    if isinstance(content, list):
        return GivenNames(str(path), _listed(content, path))
    found = shapes.from_json(path)
    return GivenNames(str(path), shapes={k: shape for k, shape in found.shapes.items() if k not in found.tied})


def _listed(content: Any, path: Path | None) -> tuple[tuple[str, ...], ...]:
    """Names by group; a flat list is one."""
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


def from_checkpoint(checkpoint: Checkpoint, path: Path) -> GivenNames:
    """The names that the optimizer of a checkpoint has, or its model where that keeps the module's order.

    Args:
        checkpoint: what tells them.
        path: where it was opened.

    Raises:
        UsageError: it tells no names, or has lost their order.
    """
    listed = _of_optimizer(checkpoint)
    models = sections_of_kind(checkpoint, "model")
    model: Mapping[str, Any] = models[0].value if len(models) == 1 else {}
    order = believed(checkpoint.module_order, model)
    if not listed and len(models) != 1:
        raise UsageError(path, f"holds {len(models)} models and no names of an optimizer; --names needs one")
    if not listed and not order.kept:
        raise UsageError(path, f"does not tell the order of parameters, for {order.why}; {OTHERWISE}")
    return GivenNames(str(path), listed, _shapes(model) if order.kept else {}, buffers=True)


OTHERWISE = (
    "--names needs a .pt that holds the module's state dict as it was, or a JSON list of names in the optimizer's order"
)


def _of_optimizer(checkpoint: Checkpoint) -> tuple[tuple[str, ...], ...]:
    """The names of the param groups, where a file has them, in the order in which it was saved."""
    named = [o for o in optimizers_of(checkpoint).values() if o.naming.by == "fqn" and o.state]
    if len(named) != 1 or not checkpoint.module_order.kept:
        return ()
    value = next(s.value for s in sections_of(checkpoint) if s.path == named[0].path)
    if is_flat_optimizer(value) or not any(group_ids(value)):
        return ()
    names = named[0].naming.names
    return tuple(tuple(names.get(i, "") for i in ids) for ids in group_ids(value))


def _shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what may be parameters; a tied name is a second one of its parameter."""
    tied = shapes.ties({k: t for k, t in model.items() if isinstance(t, Tensor)})
    tensors = ((k, t) for k, t in model.items() if isinstance(t, Tensor) and is_floating(t.dtype))
    return {k: t.shape for k, t in tensors if k not in tied}
