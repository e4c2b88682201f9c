"""Real transformers models of toy sizes, with a config and a tokenizer in their folder.

transformers is imported where a model is made: most processes that collect these tests run none of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_SIZES, **_MOE, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_SIZES, **_MOE, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "deepseek-v3": ("DeepseekV3Config", {**_SIZES, **_DEEPSEEK}),
    "minimax-m2": ("MiniMaxM2Config", {**_SIZES, "num_local_experts": 4, "head_dim": 8, "rotary_dim": 8}),
    "granitemoe": ("GraniteMoeConfig", {**_SIZES, "num_local_experts": 4}),
    "phi3": ("Phi3Config", {**_SIZES, "pad_token_id": 0}),
}
"""The class of each model's config, and its fields."""


def toy_model(name: str, seed: int = 0) -> Any:
    """A model of which every weight matters: values large enough that a swapped row changes the logits."""
    import transformers

    torch.manual_seed(seed)
    kind, fields = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def save_original(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A folder as the hub has it: the model before training, with other values, and a tokenizer."""
    toy_model(name, seed=1).to(dtype).save_pretrained(folder, **options)
    words = {"<unk>": 0, **{f"w{n}": n for n in range(1, VOCABULARY)}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def logits(model: Any) -> torch.Tensor:
    """What a model says to a fixed text."""
    tokens = torch.arange(2 * 17).reshape(2, 17) * 7 % VOCABULARY
    with torch.no_grad():
        return model.eval()(tokens).logits


def loaded_strictly(folder: Path) -> Any:
    """The model that transformers loads from a folder, with nothing missing, unexpected or of another shape."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model
