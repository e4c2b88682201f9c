"""A Hugging Face model's weights as torchtitan and Megatron have them, by their own definitions.

Neither trainer runs in the tests: torchtitan asks for a GPU build of torch, Megatron for CUDA extensions. So these
functions say once more, with torch's operations on whole tensors, what their sources say, and the tests compare the
logits of what comes back with those of the model that went in.

Sources: torchtitan b5bcd76, models/llama3/state_dict_adapter.py (`from_hf`, `_reverse_permute`), models/qwen3/
state_dict_adapter.py (`from_hf`: no permutation, experts stacked). Megatron-LM d98e8a6, core/transformer/attention.py
(`get_query_key_value_tensors`: `[sq, b, ng, (np/ng + 2) * hn]`), core/transformer/mlp.py (`[gate, up]`),
core/transformer/moe/shared_experts.py (`gate_weight`), tools/checkpoint/schema_core.py (names).
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

TITAN = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate.": "moe.router.gate.",
    "model.layers": "layers",
}  # fmt: skip


def torchtitan_state(model: Any, newer: bool = False) -> Tensors:
    """A Llama or Qwen3-MoE under torchtitan's names; the `newer` ones of 2026, or those of 2025."""
    state: Tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            where = f"layers.{_layer(name)}.moe.experts."
            state[where + "w1"], state[where + "w3"] = (half.contiguous() for half in value.chunk(2, 1))
            continue
        if name.endswith("experts.down_proj"):
            state[f"layers.{_layer(name)}.moe.experts.w2"] = value
            continue
        if model.config.model_type == "llama" and "_proj" in name and ("q_" in name or "k_" in name):
            heads = model.config.num_attention_heads if "q_" in name else model.config.num_key_value_heads
            value = _reverse_permute(value, heads)
        for old, new in TITAN.items():
            name = name.replace(old, new)
        state[name] = value
    return {_newer(name) if newer else name: value for name, value in state.items()}


def _newer(name: str) -> str:
    name = re.sub(r"attention\.(w[qkv])\.", r"attention.qkv_linear.\1.", name).replace("output.", "lm_head.")
    ends = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
    return re.sub(r"moe\.experts\.(w\d)", lambda m: f"moe.routed_experts.inner_experts.{ends[m[1]]}", name)


def _layer(name: str) -> str:
    return name.split(".layers.")[1].split(".")[0]


def _reverse_permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


# -- Megatron ---------------------------------------------------------------------------------------------------------


def megatron_state(model: Any, te: bool = True) -> Tensors:
    """A Llama, Qwen-MoE or GPT-2 under Megatron-core's names, with Transformer Engine's fused norms or local ones."""
    source = model.state_dict()
    return _gpt2(source, model.config, te) if model.config.model_type == "gpt2" else _llama(source, model.config, te)


def _grouped(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Queries, keys and values of each group one behind the other."""
    rows = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(rows, 1).reshape(-1, *parts[0].shape[1:])


def _norms(layer: str, te: bool, dense: bool) -> tuple[str, str]:
    first = "self_attention.linear_qkv.layer_norm_" if te else "input_layernorm."
    return layer + first, layer + ("mlp.linear_fc1.layer_norm_" if te and dense else "pre_mlp_layernorm.")


def _llama(source: Tensors, config: Any, te: bool) -> Tensors:
    state = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
        "output_layer.weight": source["lm_head.weight"],
    }
    for n in range(config.num_hidden_layers):
        old, new = f"model.layers.{n}.", f"decoder.layers.{n}."
        moe = old + "mlp.experts.gate_up_proj" in source
        first, second = _norms(new, te, not moe)
        state[first + "weight"] = source[old + "input_layernorm.weight"]
        state[second + "weight"] = source[old + "post_attention_layernorm.weight"]
        for end in ("weight", "bias"):
            if f"{old}self_attn.q_proj.{end}" in source:
                parts = [source[f"{old}self_attn.{p}_proj.{end}"] for p in "qkv"]
                state[f"{new}self_attention.linear_qkv.{end}"] = _grouped(parts, config.num_key_value_heads)
        state[new + "self_attention.linear_proj.weight"] = source[old + "self_attn.o_proj.weight"]
        for p in "qk":
            if f"{old}self_attn.{p}_norm.weight" in source:
                state[f"{new}self_attention.{p}_layernorm.weight"] = source[f"{old}self_attn.{p}_norm.weight"]
        state |= _moe(source, old, new, te) if moe else _dense(source, old + "mlp.", new + "mlp.")
    return state


def _dense(source: Tensors, old: str, new: str) -> Tensors:
    first = torch.cat([source[f"{old}gate_proj.weight"], source[f"{old}up_proj.weight"]])
    return {f"{new}linear_fc1.weight": first, f"{new}linear_fc2.weight": source[f"{old}down_proj.weight"]}


def _moe(source: Tensors, old: str, new: str, te: bool) -> Tensors:
    state = {new + "mlp.router.weight": source[old + "mlp.gate.weight"]}
    gate_up, down = source[old + "mlp.experts.gate_up_proj"], source[old + "mlp.experts.down_proj"]
    for e in range(len(down)):
        for name, value in (("linear_fc1", gate_up[e]), ("linear_fc2", down[e])):
            spelled = f"experts.{name}.weight{e}" if te else f"experts.local_experts.{e}.{name}.weight"
            state[f"{new}mlp.{spelled}"] = value.clone()
    if old + "mlp.shared_expert_gate.weight" in source:
        state |= _dense(source, old + "mlp.shared_expert.", new + "mlp.shared_experts.")
        state[new + "mlp.shared_experts.gate_weight"] = source[old + "mlp.shared_expert_gate.weight"]
    return state


def _gpt2(source: Tensors, config: Any, te: bool) -> Tensors:
    state = {
        "embedding.word_embeddings.weight": source["transformer.wte.weight"],
        "embedding.position_embeddings.weight": source["transformer.wpe.weight"],
        **{f"decoder.final_layernorm.{end}": source[f"transformer.ln_f.{end}"] for end in ("weight", "bias")},
    }
    for n in range(config.n_layer):
        old, new = f"transformer.h.{n}.", f"decoder.layers.{n}."
        first, second = _norms(new, te, True)
        for end in ("weight", "bias"):
            state[first + end], state[second + end] = source[f"{old}ln_1.{end}"], source[f"{old}ln_2.{end}"]
            fused = source[f"{old}attn.c_attn.{end}"]
            parts = list(fused.t().chunk(3) if end == "weight" else fused.chunk(3))
            state[f"{new}self_attention.linear_qkv.{end}"] = _grouped(parts, config.n_head)
            for name, there in (("attn.c_proj", "self_attention.linear_proj"), ("mlp.c_fc", "mlp.linear_fc1"),
                                ("mlp.c_proj", "mlp.linear_fc2")):  # fmt: skip
                value = source[f"{old}{name}.{end}"]
                state[f"{new}{there}.{end}"] = value.t().contiguous() if end == "weight" else value
    return state


COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.bias")


def save_megatron(model: Any, folder: Path, tp: int = 2, te: bool = True, padded: int = 0, **args: Any) -> Path:
    """Write the rank files of a run with some tensor-parallel ranks, as `--ckpt-format torch` does.

    The vocabulary is padded to `padded` rows, of random values: those that training leaves there are no zeros either.
    """
    state, config = megatron_state(model, te), model.config
    for name in ("embedding.word_embeddings.weight", "output_layer.weight") if padded else ():
        if name in state:
            more = torch.randn(padded - len(state[name]), state[name].shape[1])
            state[name] = torch.cat([state[name], more])
    stated = Namespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        num_layers=config.num_hidden_layers,
        world_size=tp,
        padded_vocab_size=len(state["embedding.word_embeddings.weight"]),
        untie_embeddings_and_output_weights="output_layer.weight" in state,
        rotary_interleaved=False,
        **{"make_vocab_size_divisible_by": 8, "apply_layernorm_1p": False, **args},
    )
    for rank in range(tp):
        part = {name: _part(name, value, rank, tp, config.model_type != "gpt2") for name, value in state.items()}
        place = folder / "iter_0000003" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        tree = {"args": stated, "checkpoint_version": 3.0, "iteration": 3, "model": part}
        torch.save(tree, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def _part(name: str, value: torch.Tensor, rank: int, tp: int, gated: bool) -> torch.Tensor:
    bare = re.sub(r"\d+$", "", name)
    if bare.endswith("linear_fc1.weight"):
        blocks = value.chunk(2) if gated else [value]
        return torch.cat([block.chunk(tp)[rank] for block in blocks]).clone()
    if bare.endswith(COLUMNS):
        return value.chunk(tp, 1)[rank].clone()
    return value.chunk(tp)[rank].clone() if bare.endswith(ROWS) else value
