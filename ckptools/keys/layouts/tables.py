"""The names of an architecture's weights as Hugging Face and trainers spell them, and the form in which each is stored.

`{}` in a name stands for a layer's number, `{e}` for an expert's. Parts have names of their own, which no file has:
`layers.{}.q.weight` is the query projection of a layer in every layout.

Sources: transformers' models `llama`, `mixtral`, `qwen2_moe`, `qwen3_moe`, `gpt2` (`Conv1D` is stored as [inputs,
outputs]), `phi3` (fused `qkv_proj` and `gate_up_proj`), and `conversion_mapping.py` for experts in one tensor (5.x) and
one by one (4.x, and every file); torchtitan `models/{llama3,qwen3}/state_dict_adapter.py`, whose Llama (like Meta's own
files) has rotary pairs next to each other and whose Qwen has not, and whose experts were called `moe.experts.w{1,2,3}`
in 2025; Megatron `core/transformer/{attention,mlp}.py`, `core/transformer/moe/experts.py`, and
`tools/checkpoint/schema_core.py` for the two spellings of norms (local, and fused into Transformer Engine's layers).
"""

from __future__ import annotations

from typing import NamedTuple

from ckptools.keys.layouts.forms import (
    EXPERTS,
    EXPERTS_GATE_UP,
    FUSED_QKV,
    GATE_UP,
    GROUPED_QKV,
    PAIRED_KEYS,
    PAIRED_QUERIES,
    PLAIN,
    TURNED,
    TURNED_QKV,
    Form,
)


class StoredTensor(NamedTuple):
    """A stored tensor of a layout: its name, the parts in it, and how it is made of them."""

    name: str
    parts: tuple[str, ...]
    form: Form = PLAIN


class NamedLayout(NamedTuple):
    """The names of a trainer or of a library.

    Attributes:
        name: for people.
        stored: every tensor that it may have.
        model_types: types of models in a config that it holds for; empty for all.
        recomputed: ends of names of buffers that the model computes anew, which are not written.
    """

    name: str
    stored: tuple[StoredTensor, ...]
    model_types: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()


def _wb(name: str, parts: tuple[str, ...], form: Form = PLAIN) -> tuple[StoredTensor, ...]:
    """A weight and its bias."""
    return tuple(
        StoredTensor(f"{name}.{end}", tuple(f"{part}.{end}" for part in parts), form) for end in ("weight", "bias")
    )


def _one(name: str, part: str, form: Form = PLAIN) -> tuple[StoredTensor, ...]:
    return _wb(name, (part,), form)


def _experts(*parts: str) -> tuple[str, ...]:
    return tuple(f"layers.{{}}.experts.{{e}}.{part}.weight" for part in parts)


QKV = ("layers.{}.q", "layers.{}.k", "layers.{}.v")
GATED = ("layers.{}.gate", "layers.{}.up")
SHARED = ("layers.{}.shared.gate", "layers.{}.shared.up")

_ROTARY = ("rotary_emb.inv_freq",)
_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."
_MIXTRAL = "model.layers.{}.block_sparse_moe."

HUGGING_FACE = NamedLayout(
    "Hugging Face (Llama, Qwen)",
    (
        *_one("model.embed_tokens", "embed"),
        *_one("model.norm", "norm"),
        *_one("lm_head", "head"),
        *(s for n in "qkvo" for s in _one(f"{_ATTENTION}{n}_proj", f"layers.{{}}.{n}")),
        *_wb(f"{_ATTENTION}qkv_proj", QKV, FUSED_QKV),
        *(s for n in "qk" for s in _one(f"{_ATTENTION}{n}_norm", f"layers.{{}}.{n}_norm")),
        *_one("model.layers.{}.input_layernorm", "layers.{}.norm1"),
        *_one("model.layers.{}.post_attention_layernorm", "layers.{}.norm2"),
        *(s for n in ("gate", "up", "down") for s in _one(f"{_MLP}{n}_proj", f"layers.{{}}.{n}")),
        *_wb(f"{_MLP}gate_up_proj", GATED, GATE_UP),
        *_one(f"{_MLP}gate", "layers.{}.router"),
        *(
            StoredTensor(f"{_MLP}experts.{{e}}.{n}_proj.weight", (f"layers.{{}}.experts.{{e}}.{n}.weight",))
            for n in ("gate", "up", "down")
        ),
        StoredTensor(f"{_MLP}experts.gate_up_proj", _experts("gate", "up"), EXPERTS_GATE_UP),
        StoredTensor(f"{_MLP}experts.down_proj", _experts("down"), EXPERTS),
        *(s for n in ("gate", "up", "down") for s in _one(f"{_MLP}shared_expert.{n}_proj", f"layers.{{}}.shared.{n}")),
        *_one(f"{_MLP}shared_expert_gate", "layers.{}.shared_gate"),
        *_one(f"{_MIXTRAL}gate", "layers.{}.router"),
        *(
            StoredTensor(f"{_MIXTRAL}experts.{{e}}.{w}.weight", (f"layers.{{}}.experts.{{e}}.{n}.weight",))
            for w, n in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
        ),
    ),
    ("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    _ROTARY,
)

_GPT2 = (
    *_one("transformer.wte", "embed"),
    *_one("transformer.wpe", "positions"),
    *_one("transformer.ln_f", "norm"),
    *_one("transformer.h.{}.ln_1", "layers.{}.norm1"),
    *_one("transformer.h.{}.ln_2", "layers.{}.norm2"),
    *_wb("transformer.h.{}.attn.c_attn", QKV, TURNED_QKV),
    *_one("transformer.h.{}.attn.c_proj", "layers.{}.o", TURNED),
    *_one("transformer.h.{}.mlp.c_fc", "layers.{}.up", TURNED),
    *_one("transformer.h.{}.mlp.c_proj", "layers.{}.down", TURNED),
)
_GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")

GPT2 = NamedLayout("Hugging Face (GPT-2)", (*_GPT2, *_one("lm_head", "head")), ("gpt2",), _GPT2_BUFFERS)
GPT2_BASE = NamedLayout(
    "Hugging Face (GPT-2 without its head)",
    tuple(s._replace(name=s.name.removeprefix("transformer.")) for s in _GPT2),
    ("gpt2",),
    _GPT2_BUFFERS,
)


def _torchtitan(paired: bool) -> tuple[StoredTensor, ...]:
    queries, keys = (PAIRED_QUERIES, PAIRED_KEYS) if paired else (PLAIN, PLAIN)
    forms = {"q": queries, "k": keys, "v": PLAIN}
    experts = ("moe.experts.{}", "moe.routed_experts.inner_experts.{}")
    named = (("w1", "gate", "w1_EFD"), ("w2", "down", "w2_EDF"), ("w3", "up", "w3_EFD"))
    return (
        *_one("tok_embeddings", "embed"),
        *_one("norm", "norm"),
        *_one("output", "head"),
        *_one("lm_head", "head"),
        *(
            s
            for between in ("", "qkv_linear.")
            for n, form in forms.items()
            for s in _one(f"layers.{{}}.attention.{between}w{n}", f"layers.{{}}.{n}", form)
        ),
        *_one("layers.{}.attention.wo", "layers.{}.o"),
        *(s for n in "qk" for s in _one(f"layers.{{}}.attention.{n}_norm", f"layers.{{}}.{n}_norm")),
        *_one("layers.{}.attention_norm", "layers.{}.norm1"),
        *_one("layers.{}.ffn_norm", "layers.{}.norm2"),
        *(s for w, n, _ in named for s in _one(f"layers.{{}}.feed_forward.{w}", f"layers.{{}}.{n}")),
        *_one("layers.{}.moe.router.gate", "layers.{}.router"),
        *(
            StoredTensor(f"layers.{{}}.{where.format(name)}", _experts(n), EXPERTS)
            for w, n, suffixed in named
            for where, name in zip(experts, (w, suffixed), strict=True)
        ),
    )


_COMPUTED = ("freqs_cis", "rope.freqs", "rope.cache", "rope_cache", "moe.tokens_per_expert")
TORCHTITAN_LLAMA = NamedLayout("torchtitan (Llama)", _torchtitan(True), ("llama",), _COMPUTED)
TORCHTITAN_QWEN = NamedLayout("torchtitan (Qwen)", _torchtitan(False), ("qwen3", "qwen3_moe"), _COMPUTED)

_LAYER = "decoder.layers.{}."


def _megatron_mlp(gated: bool) -> tuple[StoredTensor, ...]:
    """The MLPs; whether the first layer is gated is a matter of the model, not of the name."""
    first = _wb(f"{_LAYER}mlp.linear_fc1", GATED, GATE_UP) if gated else _one(f"{_LAYER}mlp.linear_fc1", GATED[1])
    down = ("layers.{}.experts.{e}.down.weight",)
    spelled = (
        ("local_experts.{e}.linear_fc1.weight", _EXPERT_GATE_UP, GATE_UP),
        ("linear_fc1.weight{e}", _EXPERT_GATE_UP, GATE_UP),
        ("local_experts.{e}.linear_fc2.weight", down, PLAIN),
        ("linear_fc2.weight{e}", down, PLAIN),
        ("experts.linear_fc1.weight", _experts("gate", "up"), EXPERTS_GATE_UP),
        ("experts.linear_fc2.weight", _experts("down"), EXPERTS),
    )
    return (
        *first,
        *_one(f"{_LAYER}mlp.linear_fc2", "layers.{}.down"),
        *_one(f"{_LAYER}mlp.router", "layers.{}.router"),
        *(StoredTensor(f"{_LAYER}mlp.experts.{name}", parts, form) for name, parts, form in spelled),
        *_wb(f"{_LAYER}mlp.shared_experts.linear_fc1", SHARED, GATE_UP),
        *_one(f"{_LAYER}mlp.shared_experts.linear_fc2", "layers.{}.shared.down"),
        StoredTensor(f"{_LAYER}mlp.shared_experts.gate_weight", ("layers.{}.shared_gate.weight",)),
    )


_EXPERT_GATE_UP = ("layers.{}.experts.{e}.gate.weight", "layers.{}.experts.{e}.up.weight")
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "layers.{}.norm1."),
    ("mlp.linear_fc1.layer_norm_", "layers.{}.norm2."),
)
_MEGATRON = (
    *_one("embedding.word_embeddings", "embed"),
    *_one("embedding.position_embeddings", "positions"),
    *_one("output_layer", "head"),
    *_one("decoder.final_layernorm", "norm"),
    *_wb(f"{_LAYER}self_attention.linear_qkv", QKV, GROUPED_QKV),
    *_one(f"{_LAYER}self_attention.linear_proj", "layers.{}.o"),
    *(s for n in "qk" for s in _one(f"{_LAYER}self_attention.{n}_layernorm", f"layers.{{}}.{n}_norm")),
    *_one(f"{_LAYER}input_layernorm", "layers.{}.norm1"),
    *_one(f"{_LAYER}pre_mlp_layernorm", "layers.{}.norm2"),
    *(
        StoredTensor(f"{_LAYER}{name}{end}", (f"{part}{end}",))
        for name, part in _FUSED_NORMS
        for end in ("weight", "bias")
    ),
)
_MEGATRON_STATE = ("._extra_state", "rotary_pos_emb.inv_freq", "router.local_tokens_per_expert")
MEGATRON = NamedLayout(
    "Megatron",
    (*_MEGATRON, *_megatron_mlp(True)),
    ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    _MEGATRON_STATE,
)
MEGATRON_GPT2 = NamedLayout("Megatron (GPT-2)", (*_MEGATRON, *_megatron_mlp(False)), ("gpt2",), _MEGATRON_STATE)

LAYOUTS = (HUGGING_FACE, GPT2, GPT2_BASE, TORCHTITAN_LLAMA, TORCHTITAN_QWEN, MEGATRON, MEGATRON_GPT2)
"""Every layout, those of Hugging Face models first."""

HUB = (HUGGING_FACE, GPT2, GPT2_BASE)
"""Layouts of Hugging Face models."""
