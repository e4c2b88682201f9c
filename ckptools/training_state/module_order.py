"""Whether the names of a model stand in the order of its module: what says so, and what has lost it.

Every checkpoint states what its format does to the order (`Checkpoint.module_order`): one of the statements here, or
the format's own.

`nn.Module.state_dict()` writes a module's own parameters, its buffers, then its children, so its parameters come in the
order of `named_parameters()`. It also puts `_metadata` on the dict, an entry for each module in that same order.
Filtering, sorting or copying a state dict key by key drops it, and a dict that was put together in another way (FSDP1
lists the parameters of the outermost unit last) contradicts it. So the order is believed where every name lies in a
module of that list and the modules come in its order. Within a module nothing lists the parameters; all of torch's
modules register `weight` before `bias`, and where these two have one shape and stand the other way round (as sorting
does it), the order is not believed either. Source: torch/nn/modules/module.py (`state_dict`, `_save_to_state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptools.model.checkpoint import ModuleOrder
from ckptools.model.tensor import Tensor
from ckptools.training_state.wrappers import without_wrappers

AS_SAVED = ModuleOrder(True, "torch.save keeps the order of a state dict")
"""What a format of torch.save files states; whether that is the module's order, each state dict's `_metadata` tells."""

SORTED = ModuleOrder(False, "safetensors are sorted by dtype and name")
"""What a format of safetensors files states: their own library writes them so (`prepare`)."""

AS_WRITTEN = ModuleOrder(True, "a JSON is written in the order that its author means")
BY_UNIT = ModuleOrder(False, "parameters that were taken out of flat ones stand together by unit")

NO_METADATA = ModuleOrder(False, "the state dict does not list its modules (no _metadata), so its order may be any")
CONFIRMED = ModuleOrder(True, "the state dict lists its modules in this order")


def believed(stated: ModuleOrder, model: Mapping[str, Any]) -> ModuleOrder:
    """What to believe of the order of a model's names.

    Args:
        stated: what its format says.
        model: the state dict, with its `_metadata` where it has one.
    """
    return order_of(model, getattr(model, "_metadata", None)) if stated.kept else stated


def model_for_names(models: Sequence[Mapping[str, Any]], stated: ModuleOrder) -> Mapping[str, Any] | None:
    """The state dict that names an optimizer's parameters: the only one, or the one that all others are copies of.

    A copy (an average of the weights, a teacher) has the same names and shapes, or some of them. Of several that are
    alike the first is taken whose order is believed.
    """
    shapes = [{k: v.shape for k, v in model.items() if isinstance(v, Tensor)} for model in models]
    whole = [m for m, own in zip(models, shapes, strict=True) if all(o.items() <= own.items() for o in shapes)]
    return next((m for m in whole if believed(stated, m).kept), whole[0] if whole else None)


def order_of(model: Mapping[str, Any], modules: Any) -> ModuleOrder:
    """Whether the tensors of a state dict stand in the order in which `modules` (its `_metadata`) has their modules."""
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
    return _weights_before_biases(model)


def module_places(modules: Mapping[Any, Any]) -> dict[str, int]:
    """The place of each module in the list of a state dict, by its name without wrappers."""
    places: dict[str, int] = {}
    for module in modules:
        places.setdefault(without_wrappers(str(module)), len(places))
    return places


def module_of(name: str) -> str:
    """The module that a parameter lies in, without wrappers."""
    return without_wrappers(name).rpartition(".")[0]


def _weights_before_biases(model: Mapping[str, Any]) -> ModuleOrder:
    places = {name: n for n, name in enumerate(model)}
    for bias, weight in _pairs(model):
        if places[bias] < places[weight] and model[bias].shape == model[weight].shape:
            return ModuleOrder(False, f"{bias} stands before {weight}, as in no module of torch")
    return CONFIRMED


def _pairs(model: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The `bias` and the `weight` of each module that has both, of whatever shapes."""
    for name, value in model.items():
        head, dot, last = name.rpartition(".")
        weight = f"{head}{dot}weight"
        if last == "bias" and isinstance(value, Tensor) and isinstance(model.get(weight), Tensor):
            yield name, weight
