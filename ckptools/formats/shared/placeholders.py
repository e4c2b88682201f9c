"""Placeholders that DeepSpeed's ZeRO-3 leaves in a module: parameters without elements, in place of those that it cut.

Under ZeRO-3 `model.state_dict()` has the shape [0] for every parameter that is spread over the ranks, unless the
parameters were gathered first. Small parameters (`stage3_param_persistence_threshold`) and buffers are whole on every
rank. Who saves the state dict of one rank (torch.save, `save_pretrained`, PEFT) so saves names without values.

A parameter may have no elements by design, so the pattern must prove placeholders: most tensors of the model are
empty; or the weight of a module is, and its bias is not; or weights are, and no matrix is left; or an optimizer has
moments for an empty parameter. Source: deepspeed/runtime/zero/partition_parameters.py (`free_param`,
`_convert_to_deepspeed_param`); checked on files of DeepSpeed 0.19.8 and PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.formats.shared.merge import empty_like
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import sections_of_kind

EMPTY = (0,)
PLACEHOLDER = "a ZeRO-3 placeholder without elements"
"""The note of such a tensor."""

WHERE = "whose values are in the ranks' *_optim_states.pt and *_model_states.pt"


def with_placeholders(ck: Checkpoint) -> Checkpoint:
    """The checkpoint with a note on each placeholder, and a problem for each model that has some."""
    problems, noted = list[Problem](), dict[KeyPath, Tensor]()
    for section in sections_of_kind(ck, "model"):
        tensors = {
            name: value
            for name, value in section.value.items()
            if isinstance(value, Tensor) and value.kind != "meta" and not value.note and is_floating(value.dtype)
        }
        empty = [name for name, tensor in tensors.items() if tensor.shape == EMPTY]
        if empty and _are_placeholders(ck, tensors, empty):
            noted |= {(*section.path, name): replace(tensors[name], note=PLACEHOLDER) for name in empty}
            text = f"{len(empty)} of {len(tensors)} tensors are [0]: ZeRO-3 placeholders, {WHERE}"
            problems.append(Problem(Code.PLACEHOLDERS, text, None, fqn_of(section.path) or None))
    if not noted:
        return ck
    return replace(ck, tree=_with_leaves(ck.tree, noted), problems=worst_first([*ck.problems, *problems]))


def _are_placeholders(ck: Checkpoint, tensors: Mapping[str, Tensor], empty: Iterable[str]) -> bool:
    empty = list(empty)
    if len(empty) > 1 and 2 * len(empty) >= len(tensors):
        return True
    weights = [name for name in empty if name.rpartition(".")[2] == "weight"]
    if len(weights) > 1 and not any(len(tensor.shape) > 1 for tensor in tensors.values()):
        return True
    return any(_has_a_bias(tensors, name) for name in weights) or _have_moments(ck, empty)


def _has_a_bias(tensors: Mapping[str, Tensor], weight: str) -> bool:
    """Whether a module has a bias with elements, and nothing beside it that may hold the weight in another form."""
    module = weight.removesuffix("weight")
    bias = tensors.get(f"{module}bias")
    return bias is not None and bias.numel > 0 and sum(name.startswith(module) for name in tensors) == 2


def _have_moments(ck: Checkpoint, empty: Iterable[str]) -> bool:
    states = [o.state.get(name) for o in optimizers_of(ck).values() for name in empty]
    slots = [value for state in states if isinstance(state, Mapping) for value in state.values()]
    return any(isinstance(value, Tensor) and value.shape and value.numel for value in slots)


def _with_leaves(node: Any, leaves: Mapping[KeyPath, Any]) -> Any:
    """Copy a tree with other values at some key paths; what lies elsewhere is shared, not copied."""
    if () in leaves:
        return leaves[()]
    below: dict[Any, dict[KeyPath, Any]] = {}
    for (first, *rest), value in leaves.items():
        below.setdefault(first, {})[tuple(rest)] = value
    if isinstance(node, dict):
        made = empty_like(node)
        made.update((k, _with_leaves(v, below[k]) if k in below else v) for k, v in node.items())
        return made
    return type(node)(_with_leaves(v, below[i]) if i in below else v for i, v in enumerate(node))
