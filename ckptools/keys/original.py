"""A Hugging Face model that an output is to be like: its names, shapes, dtypes and files, its config and its tokenizer.

It is a folder with `config.json` and, usually, safetensors; or `config.json` alone, of which transformers makes the
model on torch's meta device. Nothing is downloaded but what a URL names, and no code of the folder is run or copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, RefusedError, UsageError
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside, location
from ckptools.files.opening import File, reading
from ckptools.formats.hugging_face.files import model_files_in
from ckptools.formats.open import open_checkpoint
from ckptools.keys.expected_names import DTYPES, saved_shapes
from ckptools.keys.layouts.forms import Sizes
from ckptools.keys.layouts.tables import HUB
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.torch_engine import module_shapes
from ckptools.torch_engine.module_shapes import StateDictShapes
from ckptools.training_state.judgement import verdict_of

CONFIG = "config.json"
MAX_COPIED = 256 << 20
"""Bytes of one small file that are copied; a large tokenizer has 35 MB."""

COPIED = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|tokenizer\.model(\.v\d+)?|tekken\.json|vocab\.(json|txt)"
    r"|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)|spiece\.model"
    r"|sentencepiece\.bpe\.model|(pre)?processor_config\.json|.*\.tiktoken"
)
"""Names of the small files that make a folder of weights one that loads and talks."""

VOCABULARIES = re.compile(r"tokenizer\.json|tokenizer\.model.*|tekken\.json|vocab\.txt|.*\.model|.*\.tiktoken")
"""A vocabulary in one file; `vocab.json` needs `merges.txt`."""


@dataclass(frozen=True)
class Original:
    """A Hugging Face model to be like.

    Attributes:
        path: as the user gave it.
        shapes: every name that the output gets, with its shape and dtype.
        config: the content of `config.json`.
        files: the weight file of each name; empty where its config alone is known.
        copied: the content of small files by name, `config.json` last.
    """

    path: Path
    shapes: StateDictShapes
    config: Mapping[str, Any] = field(repr=False)
    files: Mapping[str, str] = field(repr=False)
    copied: Mapping[str, bytes] = field(repr=False)

    @property
    def model_type(self) -> str:
        """The type of the model, such as `llama`."""
        return str(self.config.get("model_type", ""))

    @property
    def sizes(self) -> Sizes:
        """Its numbers of heads and experts."""
        heads = self._number("num_attention_heads", "n_head")
        groups = self._number("num_key_value_heads") or heads
        return Sizes(heads, groups, self._number("num_experts", "num_local_experts", "n_routed_experts"))

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding; transformers' default where the config does not say."""
        stated = self.config.get("tie_word_embeddings")
        return stated if isinstance(stated, bool) else self.model_type in ("gpt2",)

    def _number(self, *names: str) -> int:
        values = (self.config.get(name) for name in names)
        return next((v for v in values if type(v) is int and 0 < v <= module_shapes.MAX_PARTS), 0)


def read_original(given: str | Path, follow_symlinks: bool = False) -> Original:
    """Read the names, the config and the small files of a Hugging Face model; no values.

    Raises:
        UsageError: it is no Hugging Face model.
        ReadError: it cannot be read.
        RefusedError: it is not whole, or has half a tokenizer.
    """
    path = location(given)
    with reading(path):
        folder = path if path.is_dir() else path.parent
        if path != folder and path.name != CONFIG:
            raise UsageError(path, f"--like takes a Hugging Face folder, or its {CONFIG}")
        config_path = folder / CONFIG
        if not config_path.is_file():
            raise UsageError(path, f"--like: there is no {CONFIG} here, so it is no Hugging Face model")
    config = read_json(config_path)
    if not module_shapes.is_model_config(config):
        raise ReadError(config_path, "states no model_type; it is no config of a Hugging Face model")
    copied = _copied(folder, follow_symlinks) if path == folder else {CONFIG: _content(config_path, follow_symlinks)}
    if path == folder and model_files_in(folder):
        return _of_weights(path, config, copied, follow_symlinks)
    shapes = module_shapes.shapes_from_config(config_path, config)
    return Original(path, _untied(shapes, config), config, {}, copied)


def can_be_like(path: Path) -> bool:
    """Whether `consolidate --like` can be given a config and then writes the tensors that its model has."""
    if not path.is_file():
        return False
    content = read_json(path)
    return module_shapes.is_model_config(content) and any(content["model_type"] in layout.model_types for layout in HUB)


def original_of(checkpoint: Checkpoint) -> Original | None:
    """A checkpoint that was opened as such a folder; None if it is none."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = folder / CONFIG
    if checkpoint.format != "hugging_face" or not config.is_file():
        return None
    found = read_json(config)
    return Original(folder, saved_shapes(checkpoint), found, {}, {}) if module_shapes.is_model_config(found) else None


def _of_weights(path: Path, config: Mapping[str, Any], copied: Mapping[str, bytes], follow_symlinks: bool) -> Original:
    whole = open_checkpoint(path, all_ranks=True, follow_symlinks=follow_symlinks)
    verdict = verdict_of(whole)
    if verdict.whole is False:
        raise RefusedError(path, f"--like: {verdict.headline}; its names are not all known, take a whole one")
    files = {key[-1]: t.found[0].sources[0].path.name for key, t in tensors_in(whole.tree) if _in_one_file(t)}
    return Original(path, saved_shapes(whole), config, files, copied)


def _in_one_file(tensor: Tensor) -> bool:
    return len(tensor.found) == 1 and tensor.found[0].sources[0].path.suffix == ".safetensors"


def _untied(shapes: StateDictShapes, config: Mapping[str, Any]) -> StateDictShapes:
    """The names that are saved of a model of its config, without tied ones; with the dtype that the config says."""
    said = config.get("dtype", config.get("torch_dtype"))
    dtype = DTYPES.get(said, "") if isinstance(said, str) else ""
    kept = {name: one for name, one in shapes.tensors.items() if not one.tied}
    floats = {n: _with_dtype(one, dtype) for n, one in kept.items()} if dtype else kept
    return replace(shapes, tensors=floats)


def _with_dtype(one: module_shapes.NamedShape, dtype: str) -> module_shapes.NamedShape:
    """A floating-point tensor of another dtype; any other as it is."""
    return one._replace(dtype=dtype) if one.dtype.startswith(("float", "bfloat")) else one


# -- small files ------------------------------------------------------------------------------------------------------


def _copied(folder: Path, follow_symlinks: bool) -> dict[str, bytes]:
    """The small files of a folder, checked, `config.json` last."""
    with reading(folder):
        names = sorted(p.name for p in folder.iterdir() if COPIED.fullmatch(p.name) and p.is_file())
    _check_tokenizer(folder, set(names))
    return {
        name: _content(folder / name, follow_symlinks)
        for name in sorted(names, key=lambda name: (name == CONFIG, name))
    }


def _check_tokenizer(folder: Path, names: set[str]) -> None:
    """Refuse half a tokenizer: what describes one without its vocabulary, or a vocabulary without its merges."""
    if any(VOCABULARIES.fullmatch(name) for name in names):
        return
    lacks = {"vocab.json", "merges.txt"} - names
    described = names & {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    if len(lacks) == 1:
        raise RefusedError(
            folder, f"--like: half a tokenizer: there is no {lacks.pop()}; add it, or name {CONFIG} alone"
        )
    if lacks and described:
        text = f"half a tokenizer: {min(described)} and no vocabulary (tokenizer.json, tokenizer.model, vocab.json)"
        raise RefusedError(folder, f"--like: {text}; add it, or name {CONFIG} alone")


def _content(path: Path, follow_symlinks: bool) -> bytes:
    if not follow_symlinks:
        check_stays_inside(path, path.parent)
    if path.suffix == ".json":
        read_json(path)  # one that was cut short is refused
    with File(path) as file:
        if file.size > MAX_COPIED:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_COPIED} are copied beside weights")
        if not file.size:
            raise ReadError(path, "is empty")
        return bytes(file.read(0, file.size))
