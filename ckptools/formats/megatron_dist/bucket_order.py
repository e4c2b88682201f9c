"""Order in which Megatron's modules create the parameters of a GPT model, for buckets that do not name them.

A gradient buffer holds its parameters in the reverse of this order. A layer makes its parameters in one of a few
orders (`orders`), which depend on its modules: norms of their own or fused ones, experts one after the other
(`SequentialMLP`) or all first layers before all second ones (`TEGroupedMLP`). Source: megatron/core/models/gpt/
gpt_model.py, transformer/{transformer_layer,attention,mlp}.py, transformer/moe/{moe_layer,experts,shared_experts}.py
(core 0.16.1; rules since 0.9).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from ckptools.model.values import describe_for_error

EXPERT = re.compile(r"(?P<layer>.+)\.mlp\.experts\.experts\.(?P<expert>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
"""A weight of one expert, by its number among all; see `parts`."""

NO_PARAMETER = re.compile(r".+\.mlp\.router\.(?:expert_bias|local_tokens_per_expert)", re.DOTALL)
"""Weights that no optimizer trains: buffers of the router."""

_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
_BEFORE = tuple(f"embedding.{what}_embeddings.weight" for what in ("word", "position", "tokentype"))
_AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight", "output_layer.bias")
_EXPERTS = "mlp.experts"


def _both(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}{last}" for module in modules for last in ("weight", "bias"))


_INPUT, _PROJ = _both("input_layernorm."), _both("self_attention.linear_proj.")
_QKV_NORM, _QKV = _both("self_attention.linear_qkv.layer_norm_"), _both("self_attention.linear_qkv.")
_QK_NORMS, _PRE_MLP = _both("self_attention.q_layernorm.", "self_attention.k_layernorm."), _both("pre_mlp_layernorm.")
_FC1_NORM, _FC1, _FC2 = _both("mlp.linear_fc1.layer_norm_"), _both("mlp.linear_fc1."), _both("mlp.linear_fc2.")
_SHARED = (*_both("mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2."), "mlp.shared_experts.gate_weight")
_MOE = (*_both("mlp.router."), _EXPERTS, *_SHARED)
_OF_EXPERT = _both("linear_fc1.", "linear_fc2.")

_LAYERS = (
    # Norms as modules of their own, which are stored under the names of fused ones.
    (*_INPUT, *_QKV_NORM, *_PROJ, *_QKV, *_QK_NORMS, *_PRE_MLP, *_FC1_NORM, *_FC1, *_FC2, *_MOE),
    # Transformer Engine's fused layers, which make the norm's parameters first; and the other way round.
    (*_INPUT, *_PROJ, *_QKV_NORM, *_QKV, *_QK_NORMS, *_PRE_MLP, *_FC1_NORM, *_FC1, *_FC2, *_MOE),
    (*_INPUT, *_PROJ, *_QKV, *_QKV_NORM, *_QK_NORMS, *_PRE_MLP, *_FC1, *_FC1_NORM, *_FC2, *_MOE),
)
"""Parameters of a layer in the order in which its modules create them."""

Rank = tuple[int, int, int, int, int]


class UnjoinedError(ValueError):
    """Buckets cannot be taken apart; the message says why."""


def orders(names: Iterable[str]) -> list[list[str]]:
    """The names in every order that Megatron could have made them in.

    Raises:
        UnjoinedError: a name has no place in them.
    """
    every = list(names)
    grouped = (False, True) if any(map(EXPERT.fullmatch, every)) else (False,)
    return [sorted(every, key=partial(_rank_of, layer, of_all)) for layer in _LAYERS for of_all in grouped]


def _rank_of(of_layer: Sequence[str], grouped: bool, name: str) -> Rank:
    """Sort key of a weight; with `grouped`, an expert's first layer comes before every second one."""
    layer = _LAYER.fullmatch(name)
    if name in _BEFORE:
        return 0, 0, _BEFORE.index(name), 0, 0
    if layer and layer["rest"] in of_layer:
        return 1, int(layer["layer"]), of_layer.index(layer["rest"]), 0, 0
    expert = EXPERT.fullmatch(name) if layer else None
    if layer and expert and expert["rest"] in _OF_EXPERT:
        number, part = int(expert["expert"]), _OF_EXPERT.index(expert["rest"])
        first, second = (part // 2, number * 2 + part % 2) if grouped else (number, part)
        return 1, int(layer["layer"]), of_layer.index(_EXPERTS), first, second
    if name in _AFTER:
        return 2, 0, _AFTER.index(name), 0, 0
    raise UnjoinedError(f"nothing says where {describe_for_error(name)} comes in the order of parameters")
