"""Find and read the Hugging Face `config.json` of a checkpoint: the one place where a reader opens it.

It lies in the checkpoint's folder, in its `huggingface/` (verl) or in its `.hf_metadata/` (NeMo Automodel). Other
programs call files of their own `config.json`: unless beside a Hugging Face model, it counts only if it states a
`model_type`. PEFT's adapters have an `adapter_config.json` of their own. Source: peft/config.py.

If the weights are quantized, it describes how: `quantization_config` (transformers, vLLM), also for the text model
inside a larger one; `quantization` (MLX, TensorRT-LLM); `compression_config` (old compressed-tensors). NVIDIA's
ModelOpt writes `hf_quant_config.json` beside it. Source: transformers/configuration_utils.py (`to_dict`),
quantizers/auto.py; vllm/transformers_utils/config.py; mlx_lm/utils.py (`save_config`); modelopt/torch/export.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import is_remote, leads_out, read_json
from ckptools.formats.options import Options
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import ADAPTER_CONFIG, ModelConfig
from ckptools.model.problems import Code, Problem, worst_first

CONFIG = "config.json"
PLACES = ("", "huggingface", ".hf_metadata")
MODELOPT = "hf_quant_config.json"
KEYS = ("quantization_config", "quantization", "compression_config")
INSIDE = ("text_config", "llm_config", "language_config")
VERL = "lora_train_meta.json"
OF_ADAPTERS = (ADAPTER_CONFIG, f"lora_adapter/{ADAPTER_CONFIG}", f"model/{ADAPTER_CONFIG}", VERL)
"""Where an adapter's config lies: beside its weights; in verl's actor folder, whose own file has r and alpha alone; in
NeMo Automodel's step. Source: verl 0.9.1 (utils/checkpoint/fsdp_checkpoint_manager.py)."""

VERSION = "transformers_version"
MAX_VERSION = 60
"""Characters of a version."""


def with_config(ck: Checkpoint) -> Checkpoint:
    """Add the config beside a checkpoint, and the version of transformers that it states."""
    config, note = config_beside(ck.path, ck.options, ck.format == "hugging_face")
    if note is not None:
        return replace(ck, problems=worst_first([*ck.problems, note]))
    if config is None:
        return ck
    return replace(ck, config=config, stated_versions={**ck.stated_versions, **_version(ck, config)})


def config_beside(path: Path, options: Options, hugging_face: bool) -> tuple[ModelConfig | None, Problem | None]:
    """The configs beside a checkpoint; or a problem, if the config of a Hugging Face model cannot be read."""
    alone = bool(options.files) or not path.is_dir()
    # In a store, only files that the user named or that the format reads are fetched.
    if options.only_this_file or (is_remote(path) and (alone or not hugging_face)):
        return None, None
    folder = path if path.is_dir() else path.parent
    adapter, adapter_in = _adapter(folder, options)
    for place in PLACES:
        found = folder / place / CONFIG
        if not found.is_file() or (leads_out(found, folder) and not options.follow_symlinks):
            continue
        name = found.relative_to(folder).as_posix()
        try:
            content = read_json(found)
        except ReadError as error:
            if not hugging_face:
                continue
            return None, Problem(Code.NOT_READ, f"{name}: {error.reason}", severity="note", files=(name,))
        if isinstance(content, Mapping) and (hugging_face or isinstance(content.get("model_type"), str)):
            return ModelConfig(name, content, *_quantization(found, name, content), adapter, adapter_in), None
    return ModelConfig(adapter_in, {}, adapter=adapter, adapter_in=adapter_in) if adapter else None, None


def _adapter(folder: Path, options: Options) -> tuple[Mapping[str, Any], str]:
    """The config of PEFT's adapter in a folder, and the file that has it; empty if there is none that can be read."""
    for name in OF_ADAPTERS:
        path = folder / name
        if not path.is_file() or (leads_out(path, folder) and not options.follow_symlinks):
            continue
        with suppress(ReadError):
            content = read_json(path)
            if isinstance(content, Mapping) and (path.name == VERL or isinstance(content.get("peft_type"), str)):
                return content, name
    return {}, ""


def _version(ck: Checkpoint, config: ModelConfig) -> Mapping[str, str]:
    """The version of transformers that saved a Hugging Face model, by the key that states it."""
    version = config.content.get(VERSION) if ck.format == "hugging_face" else None
    if not isinstance(version, str) or not 0 < len(version) < MAX_VERSION:
        return {}
    return {f"{config.name}.{VERSION}": version}


def _quantization(path: Path, name: str, content: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The stated quantization of the weights, and the file that states it."""
    inside = (content[key] for key in INSIDE if isinstance(content.get(key), Mapping))
    for config in (content, *inside):
        for key in KEYS:
            if isinstance(config.get(key), Mapping) and config[key]:
                return config[key], name
    beside = path.with_name(MODELOPT)
    try:
        found = read_json(beside) if beside.is_file() and not beside.is_symlink() else None
    except ReadError:
        found = None
    stated = found.get("quantization") if isinstance(found, Mapping) else None
    return ({**stated, "quant_method": "modelopt"}, MODELOPT) if isinstance(stated, Mapping) else ({}, "")


def without_quantization(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what it states about the quantization of the weights."""
    kept = {key: value for key, value in content.items() if key not in KEYS}
    inside = {key: kept[key] for key in INSIDE if isinstance(kept.get(key), Mapping)}
    return {**kept, **{key: {k: v for k, v in config.items() if k not in KEYS} for key, config in inside.items()}}
