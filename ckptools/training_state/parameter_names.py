"""Names of parameters: how an optimizer's numbers got theirs, their wrappers, and their order in the module.

A wrapper is a module that holds one other, so its name is no part of a parameter's. DDP's is `module`, a name that
others use as well: it is taken for DDP's only at the front. FSDP1 also joins the parameters of a wrapped module into
`_flat_param`. Source: torch/distributed/fsdp/_common_utils.py (`FSDP_WRAPPED_MODULE`, `FLAT_PARAM`; `_fpw_module` and
`flat_param` up to torch 1.13), torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py,
torch/_dynamo/eval_frame.py, torch/nn/parallel/distributed.py.

Every checkpoint states what its format does to the order (`Checkpoint.module_order`): one of the statements here, or
the format's own. `nn.Module.state_dict()` writes a module's own parameters, its buffers, then its children, so its
parameters come in the order of `named_parameters()`. It also puts `_metadata` on the dict, an entry for each module in
that same order. Filtering, sorting or copying a state dict key by key drops it, and a dict that was put together in
another way (FSDP1 lists the parameters of the outermost unit last) contradicts it. So the order is believed where every
name lies in a module of that list and the modules come in its order. Within a module nothing lists the parameters; all
of torch's modules register `weight` before `bias`, and where these two have one shape and stand the other way round (as
sorting does it), the order is not believed either. Source: torch/nn/modules/module.py (`state_dict`,
`_save_to_state_dict`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ckptools.model.checkpoint import ModuleOrder
from ckptools.model.tensor import Tensor

Id = Any
"""The key of a parameter in an optimizer's state: an int, or the fqn itself."""

UNNAMED = "?"
"""Prefix of a number without a name, in formats that join ranks by name."""

GIVE = "give them with --names FROM"
FITS = "more than one parameter fits, or none"


class Naming(NamedTuple):
    """Which parameter each id of an optimizer is.

    Attributes:
        names: fqn by id, for the ids that have a name.
        by: the weakest source of the names: `fqn` (the file says them), `shape` (only one parameter has it),
            `order` (assumed: groups list parameters in the order of the module), `told` (by the user), `none`.
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
    """Describe how names were found that the file does not have; `without_shape` of those assumed have no moments."""
    notes = ["keyed by number"]
    notes += [f"{proven} named by a shape that only one parameter has"] if proven else []
    known = assumed - without_shape
    fits = "no shapes to compare" if not known else "shapes agree"
    fits += f" of {known}, the others have none" if known and without_shape else ""
    order = f"named in the order of {whose}, assumed to be that of the groups ({fits})"
    notes += [f"{assumed} {order}"] if assumed else []
    notes += [f"{unnamed} of {proven + assumed + unnamed} without a name ({why}): {GIVE}"] if unnamed else []
    return "; ".join(notes)


def named_when_read(naming: Naming, assumed: Collection[str]) -> Naming:
    """The naming of an optimizer in which a format's reader already put names for numbers, `assumed` ones by order."""
    mine = tuple(i for i in naming.names if i in assumed)
    if naming.by != "fqn" or not (mine or naming.unnamed):
        return naming
    names = {i: fqn for i, fqn in naming.names.items() if i not in naming.unnamed}
    by: Literal["fqn", "order"] = "order" if mine else "fqn"
    note = note_of(len(names) - len(mine), len(mine), len(naming.unnamed), FITS)
    return Naming(names, by, mine, naming.unnamed, note)


# -- wrappers ---------------------------------------------------------------------------------------------------------


WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_orig_mod")
FLAT_PARAMETERS = ("_flat_param", "flat_param")
DDP = "module."


def without_wrappers(name: str) -> str:
    """A name without the modules that only wrap another; DDP's `module` stays."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_ddp(name: str) -> str:
    """A name without the modules that only wrap another, DDP's leading `module` included."""
    return without_wrappers(name).removeprefix(DDP)


def ddp_prefix(names: Sequence[str]) -> str:
    """`module.` where every name of a model begins with it behind its wrappers, as in DDP's state dict; else empty."""
    return DDP if names and all(without_wrappers(name).startswith(DDP) for name in names) else ""


def is_flat_parameter(key: Any) -> bool:
    """Whether a key of a model is that of an FSDP1 flat parameter."""
    return str(key).rpartition(".")[2] in FLAT_PARAMETERS


# -- the order of the module ------------------------------------------------------------------------------------------


AS_SAVED = ModuleOrder(True, "torch.save keeps the order of a state dict")
"""The order of torch.save files; each state dict's `_metadata` says whether that is the module's order."""

SORTED = ModuleOrder(False, "safetensors are sorted by dtype and name")
"""The order of safetensors files, as their own library writes them (`prepare`)."""

AS_WRITTEN = ModuleOrder(True, "a JSON is written in the order that its author means")
BY_UNIT = ModuleOrder(False, "parameters that were taken out of flat ones stand together by unit")

NO_METADATA = ModuleOrder(False, "the state dict does not list its modules (no _metadata), so its order may be any")
CONFIRMED = ModuleOrder(True, "the state dict lists its modules in this order")


def believed(stated: ModuleOrder, model: Mapping[str, Any]) -> ModuleOrder:
    """The order of a model's names that can be relied on, beside what its format says."""
    return order_of(model, getattr(model, "_metadata", None)) if stated.kept else stated


def model_for_names(models: Sequence[Mapping[str, Any]], stated: ModuleOrder) -> Mapping[str, Any] | None:
    """The state dict that names an optimizer's parameters: the only one, or the one that all others are copies of.

    A copy (an average of the weights, a teacher) has the same names and shapes, or some of them. Of several that are
    alike the first is taken whose order is believed. If two such orders disagree, they are of different modules, and
    nothing says whose parameters the numbers are.
    """
    shapes = [{k: v.shape for k, v in model.items() if isinstance(v, Tensor)} for model in models]
    whole = [m for m, own in zip(models, shapes, strict=True) if all(o.items() <= own.items() for o in shapes)]
    ordered = [m for m in models if believed(stated, m).kept] if whole else []
    shared = set(whole[0]).intersection(*ordered) if ordered else set()
    if len({tuple(name for name in m if name in shared) for m in ordered}) > 1:
        return None
    return next((m for m in whole if any(m is o for o in ordered)), whole[0] if whole else None)


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
    seen: set[str] = set()
    for name, value in model.items():
        seen.add(name)
        head, dot, last = name.rpartition(".")
        name_of_weight = f"{head}{dot}weight"
        weight = model.get(name_of_weight) if last == "bias" and name_of_weight not in seen else None
        if isinstance(value, Tensor) and isinstance(weight, Tensor) and value.shape == weight.shape:
            return ModuleOrder(False, f"{name} stands before {name_of_weight}, as in no module of torch")
    return CONFIRMED
