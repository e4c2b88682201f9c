"""Names for an optimizer's numbers that something beside the checkpoint tells: `--names FROM`.

FROM is believed, and held against what the checkpoint has: how many numbers there are, which names the model has, and
the shapes of the moments. A list in the optimizer's own order names every number. Parameters in the order of the module
(of another checkpoint, or of a module) name what the checkpoint's own model would if it had kept its order: what shapes
prove, and what order suggests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.errors import RefusedError
from ckptools.model.checkpoint import GivenNames, ModuleOrder
from ckptools.model.tensor import Tensor
from ckptools.training_state.naming import Id, Naming
from ckptools.training_state.optimizer_names import (
    aligned,
    misfit,
    name_parameters,
    numbered_groups,
    only_shape,
)


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
            _as_the_model(names, optimizer, model, given), "told", (), (), f"keyed by number; named by {given.told_by}"
        )
    if not given.shapes:
        raise _refused(given, _miscounted(given.listed, groups))
    return _in_its_order(optimizer, model, given)


def _refused(given: GivenNames, why: str) -> RefusedError:
    return RefusedError(None, f"{given.told_by}: {why}")


# -- a list in the optimizer's order ---------------------------------------------------------------------------


def _by_group(listed: Sequence[Sequence[str]], groups: Sequence[Sequence[Id]]) -> list[str]:
    """The names, one for each number; nothing where there are not as many, in each group."""
    sizes = [len(group) for group in groups]
    fits = [len(names) for names in listed] in (sizes, [sum(sizes)])
    return [name for names in listed for name in names] if fits else []


def _miscounted(listed: Sequence[Sequence[str]], groups: Sequence[Sequence[Id]]) -> str:
    told, found = ([len(one) for one in many] for many in (listed, groups))
    if len(told) == 1 or sum(told) != sum(found):
        return f"tells the names of {sum(told)} parameters, and the optimizer numbers {sum(found)}"
    return f"tells names in groups of {told}, and the optimizer has groups of {found}"


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


# -- parameters in the order of the module ---------------------------------------------------------------------


def _in_its_order(optimizer: Mapping[str, Any], model: Mapping[str, Any] | None, given: GivenNames) -> Naming:
    ordered = _ordered(model, given)
    naming = name_parameters(optimizer, ordered, ModuleOrder(True, ""), given.told_by)
    number = misfit(optimizer, ordered) if naming.unnamed else None
    if number is not None:
        shape = only_shape(optimizer["state"].get(number), False)
        text = f"number {number} of the optimizer, of shape {list(shape or ())}, fits none of its parameters in order"
        raise _refused(given, f"{text}; list the names in the optimizer's order in a JSON")
    return naming._replace(by="told")


def _ordered(model: Mapping[str, Any] | None, given: GivenNames) -> dict[str, Tensor]:
    """The parameters that are given, as the model here has them.

    Without a model here, moments are all that the shapes are held against.
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
