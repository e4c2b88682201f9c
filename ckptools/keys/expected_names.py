"""Read names and shapes for `--to`: from a checkpoint, a safetensors file or index, a config, a function, or a JSON."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE, SAFETENSORS, SHORT
from ckptools.errors import ReadError, RefusedError, UsageError
from ckptools.files.opening import File, OpenFiles, check_stays_inside, is_json, location, path_of, read_json, reading
from ckptools.formats.hugging_face.files import model_files_in
from ckptools.formats.open import open_checkpoint, with_all_ranks
from ckptools.formats.shared.given_names_and_shapes import is_shape
from ckptools.formats.shared.model_config import without_quantization
from ckptools.keys.entries import entries_of
from ckptools.keys.layouts import Sizes
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error, tensors_in
from ckptools.option import spelled
from ckptools.rules.verdict import verdict_of
from ckptools.text import few
from ckptools.torch_engine import module_shapes
from ckptools.torch_engine.module_shapes import NamedShape, PublishedPart, StateDictShapes
from ckptools.training_state.models import chosen_models, models_of, prefix_of, put_together, the_models
from ckptools.training_state.optimizers import believed
from ckptools.training_state.sections import Section, sections_of, storage_identity

DTYPES = {
    **{name: name for name in ITEMSIZE},
    **{v: k for k, v in SHORT.items()},
    **{v: k for k, v in SAFETENSORS.items()},
}
"""Full names of dtypes by each of their spellings."""


def shapes_expected(
    to: Any, section: str = "", follow_symlinks: bool = False, names: Collection[str] = ()
) -> StateDictShapes:
    """The names and shapes that a model expects.

    `to` is a path or `package.module:function`; in Python also a checkpoint, an `nn.Module`, a state dict, or shapes by
    name. `names` are those of the models that are compared with it: if they are names of a state dict that holds
    several models, that state dict is meant.

    Raises:
        ReadError: it cannot be read, or the user's code raises.
        UsageError: it has no names and shapes.
    """
    if isinstance(to, Checkpoint):
        return _of_checkpoint(put_together(with_all_ranks(to), names), section, "")
    if not isinstance(to, (str, Path)):
        return module_shapes.shapes_of(to)
    path = path_of(to)
    if not path.exists() and module_shapes.is_function_name(str(to)):
        return module_shapes.shapes_from_function(str(to))
    if is_json(path):
        content = read_json(path)
        if module_shapes.is_model_config(content):
            return module_shapes.shapes_from_config(path, content)
        if not isinstance(content, dict) or not content:
            raise ReadError(path, f"expected a JSON object of name to shape, found {describe_for_error(content)}")
        found: dict[str, NamedShape] = {}
        for name, value in content.items():
            found[name] = _named_shape(path, name, value, found)
        return StateDictShapes(str(path), found, ordered=True)
    opened = open_checkpoint(to, all_ranks=True, follow_symlinks=follow_symlinks)
    return _of_checkpoint(put_together(opened, names), section, str(to))


def _of_checkpoint(ck: Checkpoint, section: str, given_by: str) -> StateDictShapes:
    """The shapes of another checkpoint; a single model is used whatever the name of its section."""
    models = [model.section.name for model in models_of(ck)]
    if len(models) > 1 and section not in models and not chosen_models(ck):
        way = f"choose one with {spelled('section')}, or give the checkpoint that has it alone"
        raise UsageError(ck.path, f"holds {len(models)} models: {', '.join(models)}; {way}")
    return saved_shapes(ck, section if len(models) > 1 else "", given_by)


def _named_shape(path: Path, name: str, value: Any, before: Mapping[str, NamedShape]) -> NamedShape:
    """Parse the JSON value of one name: a shape, a shape and a dtype, or an earlier name to which it is tied."""
    if isinstance(value, str) and value in before:
        return before[value]._replace(tied=before[value].tied or value)
    said = value if isinstance(value, dict) else {"shape": value}
    dtype = said.get("dtype", "")
    known = dtype == "" or (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES)
    if not is_shape(said.get("shape")) or not known or said.keys() - {"shape", "dtype"}:
        expected = 'a list of sizes, {"shape": [...], "dtype": "float32"}, or an earlier name that it is tied to'
        raise ReadError(path, f"{describe_for_error(name)}: expected {expected}; found {describe_for_error(value)}")
    return NamedShape(tuple(said["shape"]), DTYPES[dtype.removeprefix("torch.")] if dtype else "")


def saved_shapes(ck: Checkpoint, section: str = "", given_by: str = "") -> StateDictShapes:
    """The names of a checkpoint's model, the same in every command, with their shapes; `ck` has every rank's structure.

    Raises:
        ReadError: it has no model.
        UsageError: it has several, and nothing says which one was trained.
    """
    model = _model(ck, section)
    names = {entry.path: entry.name for entry in entries_of(ck) if entry.kind == "model"}
    alone = not prefix_of(ck, model)
    found = {names.get(model.place_of((key,)), str(key)) if alone else str(key): v for key, v in model.value.items()}
    order = believed(ck.module_order, model.value)
    return StateDictShapes(given_by or str(ck.path), shapes_of_state(found), order.kept)


def _model(ck: Checkpoint, section: str) -> Section:
    """Find the section that holds the model: the one of the name `section`, else the one to look at."""
    models = [model.section for model in models_of(ck)]
    if not models:
        here = ", ".join(sorted({s.kind for s in sections_of(ck)})) or "nothing"
        raise ReadError(ck.path, f"holds no model to compare; it holds {here}")
    named = [s for s in models if section == s.name]
    if section not in ("", "model") and not named:
        names = ", ".join(s.name for s in models)
        raise UsageError(ck.path, f"{spelled('section')} {section}: is no model; there is {names}")
    wanted = named or the_models(ck)
    if len(wanted) > 1:
        names = ", ".join(s.name for s in wanted)
        raise UsageError(ck.path, f"{spelled('model', 'all')}: one model is compared, of {names}")
    return wanted[0]


def shapes_of_state(values: Mapping[str, Any]) -> dict[str, NamedShape]:
    """Shapes by name; a tied name has the shape of the first name with the same bytes."""
    first: dict[Any, str] = {}
    found: dict[str, NamedShape] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):  # such as a module's extra state
            found[name] = NamedShape(None)
            continue
        identity = storage_identity(value)
        same = name if identity is None else first.setdefault(identity, name)
        note = value.note or ("has no values" if value.kind == "meta" else "")
        found[name] = NamedShape(value.shape, value.dtype, "" if same == name else same, note, value.coded)
    return found


# -- a Hugging Face model whose names and files an output gets (`--like`) ----------------------------------------------
# It is a folder with `config.json` and, usually, safetensors; or `config.json` alone, from which transformers makes the
# model on torch's meta device. Only a given URL is downloaded, and no code of the folder is run or copied.


CONFIG = "config.json"
QUANTIZED = "quantization_config"
"""The key of a config that says how the weights are quantized."""

MAX_COPIED = 256 << 20
"""At most this many bytes of one small file are copied; a large tokenizer has 35 MB."""

COPIED = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|tokenizer\.model(\.v\d+)?|tekken\.json|vocab\.(json|txt)"
    r"|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)|spiece\.model"
    r"|sentencepiece\.bpe\.model|(pre)?processor_config\.json|.*\.tiktoken"
)
"""Names of the small files, such as the tokenizer's, that a folder of weights needs to be usable."""

VOCABULARIES = re.compile(r"tokenizer\.json|tokenizer\.model.*|tekken\.json|vocab\.txt|.*\.model|.*\.tiktoken")
"""Names of a vocabulary in one file; `vocab.json` needs `merges.txt`."""


@dataclass(frozen=True)
class Original:
    """A Hugging Face model whose names, shapes and files an output gets.

    Attributes:
        path: as the user gave it.
        shapes: every name that the output gets, with its shape and dtype.
        config: the content of `config.json`.
        files: the weight file of each name; empty if there is only a config.
        copied: the content of small files by name, `config.json` last.
        dequantized: whether the config's statement about quantization was taken out of `config`; `copied` keeps it.
        made: the model that transformers makes of the config; None if it was not asked.
    """

    path: Path
    shapes: StateDictShapes
    config: Mapping[str, Any] = field(repr=False)
    files: Mapping[str, str] = field(repr=False)
    copied: Mapping[str, bytes] = field(repr=False)
    dequantized: bool = False
    made: StateDictShapes | None = field(default=None, repr=False)

    @property
    def model_type(self) -> str:
        """The type of the model, such as `llama`."""
        return str(self.config.get("model_type", ""))

    @property
    def sizes(self) -> Sizes:
        """The model's numbers of heads and experts."""
        heads = self._number("num_attention_heads", "n_head")
        groups = self._number("num_key_value_heads") or heads
        return Sizes(heads, groups, self._number("num_experts", "num_local_experts", "n_routed_experts"))

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding; if the config does not say, transformers' default."""
        stated = self.config.get("tie_word_embeddings")
        return stated if isinstance(stated, bool) else self.model_type in ("gpt2",)

    def as_published(self) -> tuple[StateDictShapes, Mapping[str, PublishedPart]]:
        """The state dict of the model, and the places in it of the tensors that transformers saves.

        Both are empty if transformers cannot make the model.
        """
        folder = self.path if self.path.is_dir() else self.path.parent
        with contextlib.suppress(UsageError, ReadError):
            made = self.made or module_shapes.shapes_from_config(folder / CONFIG, self.config)
            found = (made.published() if made.published is not None else None) or {}
            return made, {name: part for name, part in found.items() if part is not None}
        return StateDictShapes("", {}), {}

    def _number(self, *names: str) -> int:
        values = (self.config.get(name) for name in names)
        return next((v for v in values if type(v) is int and 0 < v <= module_shapes.MAX_PARTS), 0)


def read_original(
    given: str | Path, follow_symlinks: bool = False, dequantize: bool = False, published: bool = True
) -> Original:
    """Read the names, the config and the small files of a Hugging Face model; no values.

    With `dequantize`, and of a config alone, it is the model without its quantization: names and dtypes of the decoded
    weights, and a config that states none. Of a config alone, the names are those that `save_pretrained` writes if
    `published`, else those of the model's state dict.

    Raises:
        UsageError: it is not a Hugging Face model.
        ReadError: it cannot be read.
        RefusedError: it is not whole, or its tokenizer is incomplete.
    """
    path = location(given)
    with reading(path):
        folder = path if path.is_dir() else path.parent
        if path != folder and path.name != CONFIG:
            raise UsageError(path, f"{spelled('like')} takes a Hugging Face folder, or its {CONFIG}")
        config_path = folder / CONFIG
        if not config_path.is_file():
            raise UsageError(path, f"{spelled('like')}: there is no {CONFIG} here, so it is no Hugging Face model")
    config = read_json(config_path)
    if not module_shapes.is_model_config(config):
        raise ReadError(config_path, "states no model_type; it is no config of a Hugging Face model")
    copied = _copied(folder, follow_symlinks) if path == folder else {CONFIG: _content(config_path, follow_symlinks)}
    has_weights = path == folder and bool(model_files_in(folder))
    plain = without_quantization(config)
    changed = plain != config and (dequantize or not has_weights)
    config = plain if changed else config
    if has_weights:
        whole = open_checkpoint(path, all_ranks=True, follow_symlinks=follow_symlinks)
        if dequantize and whole.quantized:
            from ckptools.training_state.packed_values import with_values  # imports numpy

            with OpenFiles() as opened:
                whole = with_values(whole, opened)
        verdict = verdict_of(whole)
        if verdict.whole is False:
            raise RefusedError(
                path, f"{spelled('like')}: {verdict.in_one_line}; its names are not all known, take a whole one"
            )
        alone = ((key[-1], t.found[0].sources[0].path) for key, t in tensors_in(whole.tree) if len(t.found) == 1)
        files = {name: path.name for name, path in alone if path.suffix == ".safetensors"}
        return Original(path, saved_shapes(whole), config, files, copied, changed)
    made = module_shapes.shapes_from_config(config_path, config)
    # A saved model lacks tied names, and has the config's dtype.
    said = config.get("dtype", config.get("torch_dtype"))
    dtype = DTYPES.get(said, "") if isinstance(said, str) else ""
    kept = {
        name: one._replace(dtype=dtype) if dtype and one.dtype.startswith(("float", "bfloat")) else one
        for name, one in made.tensors.items()
        if not (one.tied and published)
    }
    found = made.published() if published and made.published is not None else None
    if found is not None and (absent := [name for name, part in found.items() if part is None]):
        text = f"no rule makes the tensors that transformers saves of this model: {few(absent)}"
        raise RefusedError(config_path, f"{spelled('like')}: {text}; its weights are not copied from its state dict")
    if found is not None:
        parts = {name: part for name, part in found.items() if part is not None}
        kept = {name: kept[part.name]._replace(shape=part.shape) for name, part in parts.items()}
    copied = copied if published else {}
    return Original(path, replace(made, tensors=kept), config, {}, copied, changed, made)


def can_be_like(path: Path) -> bool:
    """Whether it is the config of a Hugging Face model whose weights are not quantized."""
    content: Any = read_json(path) if path.is_file() else None
    return module_shapes.is_model_config(content) and not content.get(QUANTIZED)


def original_of(checkpoint: Checkpoint) -> Original | None:
    """The `Original` of a checkpoint that was opened as such a folder; None for any other."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = folder / CONFIG
    if checkpoint.format != "hugging_face" or not config.is_file():
        return None
    found = read_json(config)
    return Original(folder, saved_shapes(checkpoint), found, {}, {}) if module_shapes.is_model_config(found) else None


# -- small files -------------------------------------------------------------------------------------------------------


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
    """Refuse an incomplete tokenizer: one without its vocabulary, or a vocabulary without its merges."""
    if any(VOCABULARIES.fullmatch(name) for name in names):
        return
    lacks = {"vocab.json", "merges.txt"} - names
    described = names & {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    if len(lacks) == 1:
        raise RefusedError(
            folder, f"{spelled('like')}: half a tokenizer: there is no {lacks.pop()}; add it, or name {CONFIG} alone"
        )
    if lacks and described:
        text = f"half a tokenizer: {min(described)} and no vocabulary (tokenizer.json, tokenizer.model, vocab.json)"
        raise RefusedError(folder, f"{spelled('like')}: {text}; add it, or name {CONFIG} alone")


def _content(path: Path, follow_symlinks: bool) -> bytes:
    if not follow_symlinks:
        check_stays_inside(path, path.parent)
    if path.suffix == ".json":
        read_json(path)  # refuses a file that was cut short
    with File(path) as file:
        if file.size > MAX_COPIED:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_COPIED} are copied beside weights")
        if not file.size:
            raise ReadError(path, "is empty")
        return bytes(file.read(0, file.size))
