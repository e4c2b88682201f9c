"""The names and shapes that `--hollow FROM` stands for. Free of torch."""

from __future__ import annotations

from pathlib import Path

from ckptools.errors import UsageError
from ckptools.formats.shared.shapes import from_json

Shapes = dict[str, tuple[int, ...]]


def llama3(layers: int, hidden: int, intermediate: int, key_rows: int) -> Shapes:
    """Parameters of a Llama 3 model, by the names and in the order of `transformers.LlamaForCausalLM`.

    Args:
        layers: `num_hidden_layers`.
        hidden: `hidden_size`.
        intermediate: `intermediate_size`.
        key_rows: rows of `k_proj` and `v_proj`: `num_key_value_heads` times the size of a head.
    """
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_rows, hidden),
        "self_attn.v_proj": (key_rows, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    blocks = {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in block.items()}
    ends = {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    return {"model.embed_tokens.weight": (VOCABULARY, hidden)} | blocks | ends


VOCABULARY = 128_256
"""Tokens that Llama 3 knows."""

# Of the `config.json` of Meta-Llama-3-8B and Meta-Llama-3-70B: 8 key and value heads of 128 features each.
KNOWN = {
    "llama3-8b": (32, 4096, 14336, 1024),
    "llama3-70b": (80, 8192, 28672, 1024),
}


def shapes_from(source: str) -> Shapes:
    """The shapes of a model that is known by its name, or that a JSON of name to shape tells.

    Raises:
        UsageError: it is neither, or tells nothing that could be cut.
        ReadError: the file is no JSON of name to shape.
    """
    if source in KNOWN:
        return llama3(*KNOWN[source])
    path = Path(source)
    if not path.is_file():
        raise UsageError(None, f"--hollow {source}: expected {', '.join(KNOWN)}, or a JSON file of name to shape")
    told = from_json(path)
    found = {name: tuple(shape) for name, shape in told.shapes.items() if name not in told.tied}
    for name, shape in found.items():
        if not shape or 0 in shape:
            raise UsageError(path, f"{name}: {list(shape)} cannot be cut over ranks; expected sizes of at least 1")
    return found
