"""What a Hugging Face `config.json` beside a checkpoint says of its model: the content of a JSON. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ADAPTER_CONFIG = "adapter_config.json"


class ModelConfig(NamedTuple):
    """The content of a `config.json`.

    Attributes:
        name: how it is called from the checkpoint's folder: `config.json`.
        content: its values by key.
        quantization: how the weights are quantized, by the config or by the `hf_quant_config.json` beside it; empty
            where neither says that they are.
        quantization_in: the file that says so.
        adapter: the content of PEFT's `adapter_config.json` beside it; empty where there is none.
    """

    name: str
    content: Mapping[str, Any]
    quantization: Mapping[str, Any] = {}
    quantization_in: str = ""
    adapter: Mapping[str, Any] = {}
