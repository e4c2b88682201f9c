"""The model of a DeepSpeed checkpoint by name: which of its parts holds each tensor.

By default trainable parameters are the optimizer's fp32 copy, and everything that the optimizer does not know is taken
from `module` as it is: buffers, frozen parameters of ZeRO-1 and 2, integers. ZeRO-3 keeps nothing but placeholders of
0 elements (formerly 1) in `module`; frozen parameters are there in `frozen_param_fragments`. A name in `shared_params`
is another name of a stored tensor, and gets that one. Buffers are rank 0's, as in `zero_to_fp32.py`: stages 0 to 2
save no other, and only of ZeRO-3 it can be told that the ranks had different ones. With `--weights module` everything
is from `module`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptools.formats.deepspeed.states import ModelStates
from ckptools.formats.shared.copied_files import stated_checksum
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.training_state.sections import storage_identity

PLACEHOLDER = (
    "ZeRO-3 keeps no copy of it in module, only a placeholder; without --weights module the optimizer's fp32 copy "
    "is taken"
)
UNKNOWN = "module has a placeholder, and neither param_shapes nor frozen_param_shapes tell where its values are"


def aliases(model: ModelStates, stored: Mapping[str, Any]) -> dict[str, str]:
    """Second names of stored parameters, with the stored one: as `shared_params` says, else those that share its bytes.

    Args:
        model: model states of rank 0, the only one whose `shared_params` is filled in.
        stored: the parameters that are stored elsewhere than in `module`.
    """
    found = {alias: name for alias, name in model.shared.items() if name in stored and alias not in stored}
    module = model.module or {}
    owners = {storage_identity(t): fqn for fqn, t in module.items() if isinstance(t, Tensor) and fqn in stored}
    for fqn, tensor in module.items():
        identity = storage_identity(tensor) if isinstance(tensor, Tensor) and fqn not in stored else None
        if identity is not None and identity in owners:
            found.setdefault(fqn, owners[identity])
    return found


def fp32_model(
    model: ModelStates,
    masters: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    sharded: bool,
) -> dict[str, Any]:
    """The model with the optimizer's fp32 copy where it has one.

    Args:
        model: model states of the lowest rank; its `module` gives the order of names.
        masters: the fp32 copies.
        frozen: frozen parameters that were put together from pieces.
        sharded: whether `module` may hold placeholders (ZeRO-3).
    """
    stored = {**frozen, **masters}
    other_names = aliases(model, stored)
    found: dict[str, Any] = {}
    for fqn, value in (model.module or {}).items():
        name = other_names.get(fqn, fqn)
        if name in stored:
            found[fqn] = stored[name]
        elif sharded and _is_placeholder(fqn, value, model):
            found[fqn] = replace(value, shards=(), note=UNKNOWN)
        else:
            found[fqn] = value
    rest = {**stored, **{alias: stored[name] for alias, name in other_names.items()}}
    return found | {fqn: tensor for fqn, tensor in rest.items() if fqn not in found}


def module_model(model: ModelStates, shapes: Mapping[str, Ints], sharded: bool) -> dict[str, Any]:
    """The model as the forward pass used it; what ZeRO-3 left out of it has a note instead of values."""
    found: dict[str, Any] = {}
    for fqn, value in (model.module or {}).items():
        shape = shapes.get(fqn, shapes.get(model.shared.get(fqn, ""), None))
        if sharded and isinstance(value, Tensor) and shape is not None and value.numel != prod(shape):
            found[fqn] = replace(value, shape=shape, shards=(), note=PLACEHOLDER)
        elif sharded and shape is None and _is_placeholder(fqn, value, model):
            found[fqn] = replace(value, shards=(), note=PLACEHOLDER)
        else:
            found[fqn] = value
    return found


def differing_buffers(modules: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[Problem]:
    """Buffers that differ between the ranks of ZeRO-3, which alone saves every rank's: told by their checksums."""
    first, module = modules[0]
    for fqn, value in module.items():
        mine = stated_checksum(value, whole=True)
        others = ((rank, stated_checksum(other.get(fqn), whole=True)) for rank, other in modules[1:])
        odd = tuple(rank for rank, crc in others if mine and crc and crc != mine)
        if odd:
            text = f"differs between ranks; rank {first}'s copy is taken, the only one that stages 0 to 2 save"
            yield Problem(Code.COPIES_DIFFER, text, odd[0], f"model.{fqn}", severity="warning", ranks=odd)


def mismatched_shapes(model: ModelStates, shapes: Mapping[str, Ints], sharded: bool) -> Iterator[Problem]:
    """Parameters whose shape in `module` is not the one that the optimizer was told."""
    for fqn, value in (model.module or {}).items() if not sharded else ():
        if isinstance(value, Tensor) and value.shape != shapes.get(fqn, value.shape):
            text = f"shape {list(value.shape)} in module, {list(shapes[fqn])} in param_shapes"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{fqn}")


def _is_placeholder(fqn: str, value: Any, model: ModelStates) -> bool:
    buffers = model.tree.get("buffer_names")
    named = isinstance(buffers, (list, tuple, set, frozenset)) and fqn in buffers
    return isinstance(value, Tensor) and not named and value.shape in ((0,), (1,))
