"""The shapes of tensors that a `config.json` states: those of the vocabulary, and of the layers of well-known models.

A config is believed only where its hidden size is the second one of a quarter of the matrices, which no rank's loss
changes where FSDP cuts the first. A vocabulary may be padded, so a stated size is the least that a tensor has. Sizes
that a config leaves to a default are not stated, except a `head_dim` that the code of a model works out.

Source: transformers/models/*/modeling_*.py and configuration_*.py of 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from ckptools.model.model_config import ModelConfig
from ckptools.model.regions import Ints
from ckptools.training_state.stated_model import BY_DESIGN, EMBEDDING, HIDDEN, VOCABULARY, Scope, scopes_of

HEADS = ("lm_head.weight", "embed_out.weight")
MAX_SIZE = 1 << 32
MAX_WORDS = 5
"""Words at the end of a name that say which tensor it is."""

Sizes = tuple[str, ...]
"""The name of each size of a tensor, which `_numbers` gives a number."""

H = "hidden"
LLAMA: Mapping[str, Sizes] = {
    "self_attn.q_proj.weight": ("query", H),
    "self_attn.k_proj.weight": ("key", H),
    "self_attn.v_proj.weight": ("key", H),
    "self_attn.o_proj.weight": (H, "query"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
    "self_attn.qkv_proj.weight": ("query + 2 key", H),
    "mlp.gate_proj.weight": ("inner", H),
    "mlp.up_proj.weight": ("inner", H),
    "mlp.gate_up_proj.weight": ("2 inner", H),
    "mlp.down_proj.weight": (H, "inner"),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "pre_feedforward_layernorm.weight": (H,),
    "post_feedforward_layernorm.weight": (H,),
    "model.norm.weight": (H,),
}
GPT2: Mapping[str, Sizes] = {
    "attn.c_attn.weight": (H, "3 hidden"),
    "attn.c_attn.bias": ("3 hidden",),
    "attn.c_proj.weight": (H, H),
    "attn.c_proj.bias": (H,),
    "mlp.c_fc.weight": (H, "inner"),
    "mlp.c_fc.bias": ("inner",),
    "mlp.c_proj.weight": ("inner", H),
    "mlp.c_proj.bias": (H,),
    **{f"{name}.{kind}": (H,) for name, kind in product(("ln_1", "ln_2", "ln_f"), ("weight", "bias"))},
}
GPT_NEOX: Mapping[str, Sizes] = {
    "attention.query_key_value.weight": ("3 hidden", H),
    "attention.query_key_value.bias": ("3 hidden",),
    "attention.dense.weight": (H, H),
    "mlp.dense_h_to_4h.weight": ("inner", H),
    "mlp.dense_4h_to_h.weight": (H, "inner"),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "final_layer_norm.weight": (H,),
}
BERT: Mapping[str, Sizes] = {
    **{f"attention.self.{name}.weight": (H, H) for name in ("query", "key", "value")},
    **{f"attention.self.{name}.bias": (H,) for name in ("query", "key", "value")},
    "attention.output.dense.weight": (H, H),
    "intermediate.dense.weight": ("inner", H),
    "output.dense.weight": (H, "inner"),
    "LayerNorm.weight": (H,),
    "LayerNorm.bias": (H,),
}
LAYERS_OF: Mapping[str, Mapping[str, Sizes]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), LLAMA),
    **dict.fromkeys(("bert", "roberta"), BERT),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
}
"""The tensors of models by the ends of their names; layers of other models may differ from each other by design."""

EVEN_HEADS = ("llama", "mistral", "qwen2", "phi3")
"""Model types whose heads share the hidden size where no `head_dim` is stated."""


def stated_shapes(shapes: Mapping[str, Ints], config: ModelConfig) -> dict[str, Ints]:
    """The least shape that a config states of each tensor, 0 where it does not state a size, by name.

    `shapes` are those that the tensors seem to have.
    """
    scopes = scopes_of(config.content)
    scope = next((s for s in scopes if s.number(VOCABULARY)), None)
    if scope is None or config.quantization or len({s.number(VOCABULARY) for s in scopes} - {None}) > 1:
        return {}
    numbers = _numbers(scope)
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    if not numbers.get(H) or 4 * sum(shape[1] == numbers[H] for shape in matrices) < len(matrices):
        return {}
    known = {} if any(config.content.get(key) for key in (*BY_DESIGN, "pruned_heads")) or scope.key else LAYERS_OF
    of_layers = known.get(str(scope.values.get("model_type")), {})
    vocabularies = {v for s in scopes for k, v in s.values.items() if "vocab" in k and type(v) is int}
    found = {}
    for name, shape in shapes.items():
        words = name.split(".")[-MAX_WORDS:]
        ends = (".".join(words[n:]) for n in range(len(words)))
        sizes: Sizes = next((of_layers[end] for end in ends if end in of_layers), ())
        if (EMBEDDING.search(name) and "position" not in name) or name.endswith(HEADS):
            sizes = () if shape[:1] and shape[0] in vocabularies else ("vocabulary", H if of_layers else "")
        if len(sizes) == len(shape) and any(size in numbers for size in sizes):
            found[name] = tuple(numbers.get(size, 0) for size in sizes)
    return found


def _numbers(scope: Scope) -> dict[str, int]:
    """The number for each name of a size that a config states."""
    hidden, heads = scope.number(HIDDEN), scope.number(("num_attention_heads",))
    each = scope.number(("head_dim",))
    if each is None and hidden and heads and scope.values.get("model_type") in EVEN_HEADS:
        each = hidden // heads
    groups = scope.number(("num_key_value_heads",))
    inner = scope.number(("intermediate_size", "n_inner"))
    query, key = (each * n if each and n else None for n in (heads, groups))
    found = {
        H: hidden,
        "3 hidden": hidden and 3 * hidden,
        "vocabulary": scope.number(VOCABULARY),
        "query": query,
        "key": key,
        "query + 2 key": query and key and query + 2 * key,
        "inner": inner,
        "2 inner": inner and 2 * inner,
    }
    return {name: n for name, n in found.items() if n and n < MAX_SIZE}
