"""State dicts of models whose weights are quantized, with the names, dtypes and shapes that each library writes.

The values are random: what is tested is how the parts are taken, not what they make. Sources as in
`ckptools.training_state.quantized_weights`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

ROWS, COLUMNS, LAYERS = 32, 64, 3


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bits of a dtype."""
    made = torch.randint(0, 120, shape, dtype=torch.uint8)
    return made.view(dtype) if dtype.itemsize == 1 else made.to(dtype)


def numbered(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The group of 32 of each index; of two indices, the shape of the weight."""
    return torch.tensor([ROWS, COLUMNS]) if shape == (2,) else (torch.arange(*shape) // 32).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


FP8 = torch.float8_e4m3fn
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)  # torch 2.7
I32 = torch.int32


class Way(NamedTuple):
    """A way to quantize: the parts of one weight by their names, what config.json says, and its words there."""

    parts: dict[str, tuple[Any, ...]]
    config: dict[str, Any]
    words: str
    weights: int | None = ROWS * COLUMNS


def group(form: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    config = {"config_groups": {"group_0": {"format": form, "weights": weights}}, "format": form}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **config}


WAYS = {
    "fp8 blocks": Way(
        {"weight": (codes, ROWS, COLUMNS, FP8), "weight_scale_inv": (numbers, 2, 4)},
        {"quant_method": "fp8", "weight_block_size": [16, 16]}, "fp8, block scales 16 x 16",
    ),
    "fp8 tensor": Way(
        {"weight": (codes, ROWS, COLUMNS, FP8), "weight_scale": (numbers,), "input_scale": (numbers,)},
        {"quant_method": "fp8", "activation_scheme": "static"}, "fp8",
    ),
    "DeepSeek": Way(
        {"weight": (codes, ROWS, COLUMNS, FP8), "scale": (codes, 1, 1, E8M0)}, {"quant_method": "fp8"}, "fp8",
    ),
    "float-quantized": Way(
        {"weight": (codes, ROWS, COLUMNS, FP8), "weight_scale": (numbers, ROWS, 1, torch.bfloat16)},
        group("float-quantized", type="float", num_bits=8), "compressed-tensors, float-quantized fp8",
    ),
    "int-quantized": Way(
        {"weight": (codes, ROWS, COLUMNS, torch.int8), "weight_scale": (numbers, ROWS, 1)},
        group("int-quantized", type="int", num_bits=8), "compressed-tensors, int-quantized int8",
    ),
    "pack-quantized": Way(
        {"weight_packed": (codes, ROWS, COLUMNS // 8, I32), "weight_scale": (numbers, ROWS, 2, torch.bfloat16),
         "weight_shape": (numbered, 2)},
        group("pack-quantized", type="int", num_bits=4, group_size=32),
        "compressed-tensors, pack-quantized int4, groups of 32",
    ),
    "nvfp4-pack-quantized": Way(
        {"weight_packed": (codes, ROWS, COLUMNS // 2), "weight_scale": (codes, ROWS, COLUMNS // 16, FP8),
         "weight_global_scale": (numbers, 1)},
        group("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16),
        "compressed-tensors, nvfp4-pack-quantized fp4, groups of 16",
    ),
    "mxfp4-pack-quantized": Way(
        {"weight_packed": (codes, ROWS, COLUMNS // 2), "weight_scale": (codes, ROWS, COLUMNS // 32)},
        group("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
        "compressed-tensors, mxfp4-pack-quantized fp4, groups of 32",
    ),
    "gpt-oss": Way(
        {"gate_up_proj_blocks": (codes, 2, ROWS // 2, COLUMNS // 32, 16),
         "gate_up_proj_scales": (codes, 2, ROWS // 2, COLUMNS // 32)},
        {"quant_method": "mxfp4"}, "mxfp4, blocks of 32",
    ),
    "gptq": Way(
        {"qweight": (codes, COLUMNS // 8, ROWS, I32), "qzeros": (codes, 2, ROWS // 8, I32),
         "scales": (numbers, 2, ROWS, torch.float16), "g_idx": (numbered, COLUMNS)},
        {"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq int4, groups of 32",
    ),
    "awq": Way(
        {"qweight": (codes, COLUMNS, ROWS // 8, I32), "qzeros": (codes, 2, ROWS // 8, I32),
         "scales": (numbers, 2, ROWS, torch.float16)},
        {"quant_method": "awq", "bits": 4, "group_size": 32}, "awq int4, groups of 32",
    ),
    "modelopt": Way(
        {"weight": (codes, ROWS, COLUMNS // 2), "weight_scale": (codes, ROWS, COLUMNS // 16, FP8),
         "weight_scale_2": (numbers,), "input_scale": (numbers,)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "modelopt NVFP4, groups of 16",
    ),
    "eetq": Way(
        {"weight": (codes, COLUMNS, ROWS, torch.int8), "weight_scales": (numbers, ROWS, torch.float16)},
        {"quant_method": "eetq"}, "eetq",
    ),
    "bitnet": Way(
        {"weight": (codes, ROWS // 4, COLUMNS), "weight_scale": (numbers, 1, torch.bfloat16)},
        {"quant_method": "bitnet"}, "bitnet",
    ),
    "quanto": Way(
        {"weight._data": (codes, ROWS, COLUMNS, torch.int8), "weight._scale": (numbers, ROWS, 1),
         "input_scale": (numbers,), "output_scale": (numbers,)},
        {"quant_method": "quanto", "weights": "int8"}, "quanto",
    ),
    "hqq": Way(
        {"W_q": (codes, ROWS // 2, COLUMNS), "scale": (numbers, ROWS, 1), "zero": (numbers, ROWS, 1)},
        {"quant_method": "hqq", "nbits": 4, "group_size": 64}, "hqq int4, groups of 64",
    ),
    "aqlm": Way(
        {"codes": (codes, ROWS, 8, 1, torch.int8), "codebooks": (numbers, 1, 256, 1, 8), "scales": (numbers, ROWS, 1)},
        {"quant_method": "aqlm", "nbits_per_codebook": 8}, "aqlm", None,
    ),
    "quip#": Way(
        {"Qidxs": (codes, ROWS, COLUMNS // 8, torch.int64), "Wscale": (numbers,), "SU": (numbers, COLUMNS),
         "SV": (numbers, ROWS), "codebook_id": (codes,)},
        {"quant_method": "quip"}, "quip", None,
    ),
    "mlx": Way(
        {"weight": (codes, ROWS, COLUMNS // 8, torch.uint32), "scales": (numbers, ROWS, 1, torch.float16),
         "biases": (numbers, ROWS, 1, torch.float16)},
        {"group_size": 64, "bits": 4}, "mlx int4, groups of 64",
    ),
}  # fmt: skip


DECODED = (
    "fp8 blocks", "float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "gpt-oss", "gptq", "awq", "modelopt", "DeepSeek",
)  # fmt: skip
"""The ways of which `--dequantize` writes the values, if a config states them."""

WITHOUT_CONFIG = ("fp8 blocks", "DeepSeek", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "gpt-oss")
"""The ways of which it writes the values without a config too."""


def made(way: Way, seed: int = 0) -> dict[str, torch.Tensor]:
    """A model of three layers with a quantized weight each, a norm and an embedding that are not."""
    torch.manual_seed(seed)
    state = {"embed.weight": torch.randn(8, COLUMNS)}
    for layer in range(LAYERS):
        for name, (make, *how) in way.parts.items():
            dtype = {"dtype": how.pop()} if how and isinstance(how[-1], torch.dtype) else {}
            state[f"layers.{layer}.mlp.{name}"] = make(*how, **dtype)
        state[f"layers.{layer}.norm.weight"] = torch.ones(COLUMNS)
    return state


def config_of(way: Way) -> dict[str, Any]:
    """A config.json that states the way."""
    key = "quantization_config" if "quant_method" in way.config else "quantization"
    return {"model_type": "llama", key: way.config}


def folder(path: Path, way: Way, config: bool | dict[str, Any] = True, **changed: torch.Tensor | None) -> Path:
    """A Hugging Face folder; `changed` has tensors in the place of others by name, None for gone."""
    state = {k: v for k, v in {**made(way), **changed}.items() if v is not None}
    path.mkdir(exist_ok=True)
    save_file(state, path / "model.safetensors", {"format": "pt"})
    if config:
        (path / "config.json").write_text(json.dumps(config_of(way) if config is True else config))
    return path
