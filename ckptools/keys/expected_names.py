"""Shapes for `--to`: another checkpoint, a safetensors file or index, a config, a function, or a JSON of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE, SAFETENSORS, SHORT
from ckptools.errors import ReadError, UsageError
from ckptools.files.json_file import is_json, read_json
from ckptools.files.location import path_of
from ckptools.formats.open import open_checkpoint, with_all_ranks
from ckptools.formats.shared.given import is_shape
from ckptools.keys.entries import entries_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.values import describe_for_error
from ckptools.torch_engine import module_shapes
from ckptools.torch_engine.module_shapes import NamedShape, StateDictShapes
from ckptools.training_state.parameter_names import believed
from ckptools.training_state.section_size import storage_identity
from ckptools.training_state.sections import Section, sections_of, sections_of_kind

DTYPES = {
    **{name: name for name in ITEMSIZE},
    **{v: k for k, v in SHORT.items()},
    **{v: k for k, v in SAFETENSORS.items()},
}
"""Full names of dtypes by every spelling of them."""


def shapes_expected(to: Any, section: str = "", follow_symlinks: bool = False) -> StateDictShapes:
    """The names and shapes that a model expects.

    `to` is a path or `package.module:function` as text; a path; in Python also a checkpoint, an `nn.Module`, a state
    dict, or shapes by name.

    Raises:
        ReadError: it cannot be read, or the user's code raises.
        UsageError: it has no names and shapes.
    """
    if isinstance(to, Checkpoint):
        return _of_checkpoint(with_all_ranks(to), section, "")
    if not isinstance(to, (str, Path)):
        return module_shapes.shapes_of(to)
    path = path_of(to)
    if not path.exists() and module_shapes.is_function_name(str(to)):
        return module_shapes.shapes_from_function(str(to))
    if is_json(path):
        return _from_json(path)
    return _of_checkpoint(open_checkpoint(to, all_ranks=True, follow_symlinks=follow_symlinks), section, str(to))


def _of_checkpoint(ck: Checkpoint, section: str, given_by: str) -> StateDictShapes:
    """The shapes of another checkpoint; a single model is used whatever its section is called."""
    return saved_shapes(ck, section if len(sections_of_kind(ck, "model")) > 1 else "", given_by)


def _from_json(path: Path) -> StateDictShapes:
    content = read_json(path)
    if module_shapes.is_model_config(content):
        return module_shapes.shapes_from_config(path, content)
    if not isinstance(content, dict) or not content:
        raise ReadError(path, f"expected a JSON object of name to shape, found {describe_for_error(content)}")
    found: dict[str, NamedShape] = {}
    for name, value in content.items():
        found[name] = _named_shape(path, name, value, found)
    return StateDictShapes(str(path), found, ordered=True)


def _named_shape(path: Path, name: str, value: Any, before: Mapping[str, NamedShape]) -> NamedShape:
    """Parse the JSON value of one name: a shape, a shape and a dtype, or an earlier name that it is tied to."""
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
    """The names of a checkpoint's model, the same in every command, with their shapes; `ck` has all ranks read.

    Raises:
        ReadError: it has no model.
        UsageError: it has several, and none was chosen.
    """
    model = _model(ck, section)
    names = {entry.path: entry.name for entry in entries_of(ck) if entry.kind == "model"}
    alone = len(sections_of_kind(ck, "model")) == 1
    found = {names.get((*model.path, key), str(key)) if alone else str(key): v for key, v in model.value.items()}
    order = believed(ck.module_order, model.value)
    return StateDictShapes(given_by or str(ck.path), shapes_of_state(found), order.kept)


def _model(ck: Checkpoint, section: str) -> Section:
    """Find the section of the model."""
    models = sections_of_kind(ck, "model")
    wanted = [s for s in models if section == s.name] or [s for s in models if section in ("", s.kind)]
    if len(wanted) == 1:
        return wanted[0]
    if not models:
        here = ", ".join(sorted({s.kind for s in sections_of(ck)})) or "nothing"
        raise ReadError(ck.path, f"holds no model to compare; it holds {here}")
    names = ", ".join(s.name for s in models)
    if not wanted:
        raise UsageError(ck.path, f"--section {section}: is no model; there is {names}")
    raise UsageError(ck.path, f"holds {len(models)} models: {names}; choose one with --section")


def shapes_of_state(values: Mapping[str, Any]) -> dict[str, NamedShape]:
    """Shapes by name; a tied name has the shape of the first one with the same bytes."""
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
