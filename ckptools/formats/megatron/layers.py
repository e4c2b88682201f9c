"""Weights of a GPT-style Megatron model: the dimension along which each is cut, and its name over all stages.

A column-parallel layer cuts its output rows (dim 0), a row-parallel one its input columns (dim 1); norms, position
embeddings and the biases of row-parallel layers are the same on every rank. Source: megatron/core/tensor_parallel/
layers.py, megatron/core/transformer/{attention,mlp}.py, and the `mpu` layers of v1.0 to v3.0.

A fused QKV weight holds, for each query group, the rows of its queries, then of its key, then of its value; a rank
holds whole groups (with fewer groups than ranks, a plain part of the same rows), so the ranks one behind the other are
the order of a run without tensor parallelism. A gated first MLP layer (SwiGLU, GeGLU) is `[gate; up]` on every rank,
and is joined half by half into `[all gates; all ups]`, as torch_dist stores it too (`apply_swiglu_sharded_factory`).

Each stage numbers its layers from 0, in each of its chunks when the pipeline is interleaved (`model0`, `model1`, …).
Layers follow each other chunk by chunk, and within a chunk stage by stage, however many each has: even and uneven
pipelines, `pipeline_model_parallel_layout`, embedding and loss counted as layers or stages of their own. So the number
of a stage's first layer is the number of layers before it, which the files themselves show. Source:
megatron/core/transformer/transformer_layer.py (`get_transformer_layer_offset`); arguments.py for older versions.

Experts are numbered from 0 on each expert-parallel rank too, as many on each: local expert i of rank e is expert
e x (experts on a rank) + i. Routers, shared experts and everything else are the same on every expert-parallel rank.
With Transformer Engine all of a rank's are in one module, as `linear_fc1.weight0`, `weight1` and so on. The experts'
own tensor-parallel size may be another one (`expert_tensor_parallel_size`); with 1 each is whole in its file. Source:
megatron/core/transformer/moe/{moe_layer,experts,router,shared_experts}.py.

Old versions (`megatron/model`, up to v3.0 and core 0.5) nest the model's state dict (`language_model`, `encoder`);
its keys are joined with dots here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from ckptools.formats.shared.tensor_parallel import (
    COLUMNS,
    GATED,
    NO_RULE,
    REPLICATED,
    ROWS,
    GivenRules,
    JoinRule,
    given_rule,
)
from ckptools.model.checkpoint import ModuleOrder
from ckptools.model.tensor import Tensor
from ckptools.training_state.parameter_names import CONFIRMED, order_of

_MODEL = r"(?:language_model\.)?"
_LAYER = _MODEL + r"(?:encoder|decoder|transformer)\.layers\.\d+\."
_ATTENTION = r"(?:self_attention|attention|cross_attention|inter_attention)\."
_WB = r"(?:weight|bias)"
_EXPERT = r"mlp\.(?:shared_experts|experts(?:\.(?:local_experts|experts)\.\d+)?)\."

BUILT_IN: tuple[tuple[str, JoinRule], ...] = (
    (_MODEL + r"embedding\.word_embeddings\.weight|word_embeddings_for_head\.weight", ROWS),
    (_MODEL + r"output_layer\." + _WB + r"|lm_head\.bias", ROWS),
    (_LAYER + r"(?:self_attention|attention)\.(?:linear_qkv|query_key_value)\." + _WB, ROWS),
    (_LAYER + r"cross_attention\.(?:linear_q|linear_kv)\." + _WB, ROWS),
    (_LAYER + r"inter_attention\.(?:query|key_value)\." + _WB, ROWS),
    (_LAYER + _ATTENTION + r"(?:linear_proj|dense)\.weight", COLUMNS),
    (_LAYER + r"mlp\.(?:linear_fc2|dense_4h_to_h)\.weight", COLUMNS),
    (_LAYER + _EXPERT + r"linear_fc2\.weight\d*", COLUMNS),
    (_LAYER + _EXPERT + r"linear_fc2\.bias\d*", REPLICATED),
    (_LAYER + r"mlp\.router\.(?:weight|bias|expert_bias|local_tokens_per_expert)", REPLICATED),
    (_LAYER + r"mlp\.shared_experts\.gate_weight", REPLICATED),
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
FC1 = re.compile(rf"(?P<mlp>{_LAYER}(?:mlp\.|{_EXPERT}))(?P<name>linear_fc1|dense_h_to_4h)\.{_WB}(?P<number>\d*)")
FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
QKV = re.compile(r".*\.(?:linear_qkv|query_key_value|linear_kv|key_value)\.(?:weight|bias)")


def rule_of(fqn: str, pieces: Mapping[str, Any], given: GivenRules) -> JoinRule | str:
    """The user's rule for a weight, else the built-in one, or why there is none.

    In `pieces`, one rank's part of the model, the shapes of a gated layer show that it is one.
    """
    rule = given_rule(given, fqn)
    if rule is not None:
        return rule
    found = FC1.fullmatch(fqn)
    if found:
        return _first_layer(fqn, f"{found['mlp']}{FC2[found['name']]}.weight{found['number']}", pieces)
    return next((rule for pattern, rule in BUILT_IN if re.fullmatch(pattern, fqn)), NO_RULE)


def _first_layer(fqn: str, second: str, pieces: Mapping[str, Any]) -> JoinRule | str:
    """The rule of an MLP's first layer: it has as many rows as the second has columns, or twice as many when gated."""
    first, after = pieces.get(fqn), pieces.get(second)
    if isinstance(first, Tensor) and isinstance(after, Tensor) and first.shape and len(after.shape) == 2:
        rows, columns = first.shape[0], after.shape[1]
        if rows == 2 * columns and rows:
            return GATED
        if rows == columns:
            return ROWS
    return "its rows, with the columns of the second layer, do not show whether it is gated; say it with --rules FILE"


# -- names over pipeline stages ---------------------------------------------------------------------------------------


Chunk = Mapping[str, Any]
"""Part of the model on one rank: values by that rank's names."""

Place = tuple[int, int]
"""`(chunk, stage)`: layers are sorted by these."""

LAYER = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<index>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
CHUNK = re.compile(r"model(\d{1,4})")


def chunks_of(tree: Mapping[Any, Any]) -> list[Chunk]:
    """The model in one file: one chunk under `model`, or several under `model0`, `model1` and so on."""
    return [dict(_flat(part, "")) for part in _parts(tree)]


def _parts(tree: Mapping[Any, Any]) -> list[Any]:
    if isinstance(tree.get("model"), dict):
        return [tree["model"]]
    numbers = {int(m[1]): tree[k] for k in tree if isinstance(k, str) and (m := CHUNK.fullmatch(k))}
    return [numbers[i] for i in sorted(numbers)] if sorted(numbers) == list(range(len(numbers))) else []


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Join nested keys with dots. The reader's budget bounds the depth."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


EXPERT = re.compile(
    r"(?P<prefix>(?:.*\.)?(?:local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(?P<number>\d{1,6})(?P<rest>|\..+)",
    re.DOTALL,
)
EXPERTS = re.compile(r"(?:.*\.)?(?:local_)?experts\..*", re.DOTALL)
"""Weights of routed experts; those of `EXPERT` are of one, with its number on its rank."""


def expert_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts of each layer a rank has, by the layer's prefix; none where their numbers have holes."""
    found: dict[str, set[int]] = {}
    for expert in filter(None, map(EXPERT.fullmatch, names)):
        found.setdefault(expert["prefix"], set()).add(int(expert["number"]))
    return {prefix: len(numbers) for prefix, numbers in found.items() if numbers == set(range(len(numbers)))}


def module_order_in(tree: Mapping[Any, Any]) -> ModuleOrder:
    """Whether the model in one file has the order of its modules, chunk by chunk.

    Older versions put the state dicts of embedding, encoder and output layer into dicts by hand, in that order.
    """
    parts = (part for part in _parts(tree) if isinstance(part, dict))
    orders = (order_of(dict(_flat(part, "")), dict(_modules(part, ""))) for part in parts)
    return next((order for order in orders if not order.kept), CONFIRMED)


def _modules(node: Any, prefix: str) -> Iterator[tuple[str, None]]:
    """Every module that the state dicts in a part of the model list."""
    listed = getattr(node, "_metadata", None)
    for module in listed if isinstance(listed, dict) else ():
        yield f"{prefix}{module}".removesuffix("."), None
    for key, value in node.items() if listed is None else ():
        if isinstance(value, dict):
            yield from _modules(value, f"{prefix}{key}.")


def is_chunk(key: Any) -> bool:
    """Whether a key of a file holds the model, or a part of it."""
    return isinstance(key, str) and (key == "model" or CHUNK.fullmatch(key) is not None)


class Layers:
    """Numbers the layers of the whole model, counted over the pipeline stages."""

    def __init__(self, chunks: Mapping[Place, Chunk], stages: int, number: int | None) -> None:
        self.virtual, self.stages = 1 + max((chunk for chunk, _ in chunks), default=0), stages
        # Whether the files here cover every place; and layers per block, such as `decoder.layers`, and place.
        self.complete = len(chunks) == self.virtual * stages
        self.counts: dict[str, dict[Place, set[int]]] = {}
        for place, names in chunks.items():
            for layer in filter(None, map(LAYER.fullmatch, names)):
                self.counts.setdefault(layer["block"], {p: set() for p in chunks})[place].add(int(layer["index"]))
        self.starts = {block: dict(self._starts(counts, number)) for block, counts in self.counts.items()}

    def _starts(self, counts: Mapping[Place, set[int]], number: int | None) -> Iterator[tuple[Place, int]]:
        """The first number at each place, up to the first unknown one."""
        lengths = {len(indices) for indices in counts.values()}
        even = number == max(lengths) * self.virtual * self.stages and len(lengths) == 1
        start = 0
        for place in product(range(self.virtual), range(self.stages)):
            if counts.get(place, set()) != set(range(len(counts.get(place, ())))):
                return
            yield place, start
            if place not in counts and not even:
                return
            start += len(counts[place]) if place in counts else max(lengths)

    def name(self, name: str, place: Place) -> tuple[str, str]:
        """The name in the whole model, and why its layer's number is unknown, or nothing."""
        found = LAYER.fullmatch(name)
        if found is None:
            return name, ""
        block, index, rest = found["block"], int(found["index"]), found["rest"]
        start = self.starts[block].get(place)
        if start is not None:
            return f"{block}.{start + index}.{rest}", ""
        why = f"the layers before pipeline stage {place[1]} cannot be counted, so this one's number is not known"
        return f"{block}.?{index} of stage {place[1]}.{rest}", why
