"""Along which dimension each weight of a GPT-style Megatron model is cut over the tensor-parallel ranks.

A column-parallel layer cuts its output rows (dim 0), a row-parallel one its input columns (dim 1); norms, position
embeddings and the biases of row-parallel layers are the same on every rank. Source: megatron/core/tensor_parallel/
layers.py, megatron/core/transformer/{attention,mlp}.py, and the `mpu` layers of v1.0 to v3.0.

A fused QKV weight holds, for each query group, the rows of its queries, then of its key, then of its value; a rank
holds whole groups (with fewer groups than ranks, a plain part of the same rows), so the ranks one behind the other are
the order of a run without tensor parallelism. A gated first MLP layer (SwiGLU, GeGLU) is `[gate; up]` on every rank,
and is joined half by half into `[all gates; all ups]`, as torch_dist stores it too (`apply_swiglu_sharded_factory`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptools.formats.shared.tensor_parallel import (
    COLUMNS,
    GATED,
    NO_RULE,
    REPLICATED,
    ROWS,
    GivenRules,
    Rule,
    given_rule,
)
from ckptools.model.tensor import Tensor

_MODEL = r"(?:language_model\.)?"
_LAYER = _MODEL + r"(?:encoder|decoder|transformer)\.layers\.\d+\."
_ATTENTION = r"(?:self_attention|attention|cross_attention|inter_attention)\."
_WB = r"(?:weight|bias)"

BUILT_IN: tuple[tuple[str, Rule], ...] = (
    (_MODEL + r"embedding\.word_embeddings\.weight|word_embeddings_for_head\.weight", ROWS),
    (_MODEL + r"output_layer\." + _WB + r"|lm_head\.bias", ROWS),
    (_LAYER + r"(?:self_attention|attention)\.(?:linear_qkv|query_key_value)\." + _WB, ROWS),
    (_LAYER + r"cross_attention\.(?:linear_q|linear_kv)\." + _WB, ROWS),
    (_LAYER + r"inter_attention\.(?:query|key_value)\." + _WB, ROWS),
    (_LAYER + _ATTENTION + r"(?:linear_proj|dense)\.weight", COLUMNS),
    (_LAYER + r"mlp\.(?:linear_fc2|dense_4h_to_h)\.weight", COLUMNS),
    (_LAYER + _ATTENTION + r"(?:linear_proj|dense)\.bias", REPLICATED),
    (_LAYER + r"mlp\.(?:linear_fc2|dense_4h_to_h)\.bias", REPLICATED),
    (_LAYER + r"(?:input|post_attention|post_inter_attention)_(?:layer)?norm\." + _WB, REPLICATED),
    (_LAYER + r"(?:pre_mlp|pre_cross_attn|post_self_attn|post_mlp)_layernorm\." + _WB, REPLICATED),
    (_LAYER + _ATTENTION + r"(?:linear_qkv|linear_q)\.layer_norm_" + _WB, REPLICATED),
    (_LAYER + r"mlp\.linear_fc1\.layer_norm_" + _WB, REPLICATED),
    (_LAYER + _ATTENTION + r"[qk]_layernorm\." + _WB, REPLICATED),
    (_MODEL + r"embedding\.(?:position|tokentype)_embeddings\.weight", REPLICATED),
    (_MODEL + r"(?:encoder|decoder|transformer)\.final_(?:layer)?norm\." + _WB, REPLICATED),
    (_MODEL + r"pooler\.dense\." + _WB + r"|binary_head\." + _WB, REPLICATED),
    (r"lm_head\.(?:dense|layernorm|layer_norm)\." + _WB + r"|rotary_pos_emb\.inv_freq", REPLICATED),
)
FC1 = re.compile(rf"(?P<mlp>{_LAYER}mlp\.)(?P<name>linear_fc1|dense_h_to_4h)\.{_WB}")
FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
QKV = re.compile(r".*\.(?:linear_qkv|query_key_value|linear_kv|key_value)\.(?:weight|bias)")

_COMPILED = [(re.compile(pattern), rule) for pattern, rule in BUILT_IN]


class Rules:
    """The rules that join the weights of one checkpoint: the user's first, then the built-in ones.

    Args:
        given: the rules that the user gave, which come first.
    """

    def __init__(self, given: GivenRules = ()) -> None:
        self.given = given

    def of(self, fqn: str, pieces: Mapping[str, Any]) -> Rule | str:
        """The rule for a weight, or why there is none.

        Args:
            fqn: its name.
            pieces: what one rank holds of the model, by name: the shapes of a gated layer tell that it is one.
        """
        given = given_rule(self.given, fqn)
        if given is not None:
            return given
        found = FC1.fullmatch(fqn)
        if found:
            return _first_layer(fqn, found["mlp"] + FC2[found["name"]] + ".weight", pieces)
        built_in = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(fqn)), None)
        return built_in or NO_RULE


def _first_layer(fqn: str, second: str, pieces: Mapping[str, Any]) -> Rule | str:
    """The rule of an MLP's first layer: it has as many rows as the second has columns, or twice as many when gated."""
    first, after = pieces.get(fqn), pieces.get(second)
    if isinstance(first, Tensor) and isinstance(after, Tensor) and first.shape and len(after.shape) == 2:
        rows, columns = first.shape[0], after.shape[1]
        if rows == 2 * columns and rows:
            return GATED
        if rows == columns:
            return ROWS
    return "its rows do not tell, with the columns of the second layer, whether it is gated; say it with --rules FILE"
