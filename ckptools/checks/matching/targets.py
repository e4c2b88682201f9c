"""What `--to` names: another checkpoint, a safetensors file or index, a config, a function, or a JSON of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptools.checks.matching.saved_shapes import saved_shapes
from ckptools.dtypes import ITEMSIZE, SAFETENSORS, SHORT
from ckptools.errors import ReadError
from ckptools.files.json_file import is_json, read_json
from ckptools.files.location import path_of
from ckptools.formats.opening import open_checkpoint, with_all_ranks
from ckptools.formats.shared.shapes import is_shape
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.matching import NamedShape, StateDictShapes
from ckptools.model.values import describe_for_error
from ckptools.torch_engine import hugging_face_shapes, module_shapes
from ckptools.training_state.sections import sections_of_kind

DTYPES = {
    **{name: name for name in ITEMSIZE},
    **{v: k for k, v in SHORT.items()},
    **{v: k for k, v in SAFETENSORS.items()},
}
"""Full names of dtypes by every spelling of them."""


def shapes_expected(to: Any, section: str = "", follow_symlinks: bool = False) -> StateDictShapes:
    """The names and shapes that a model expects.

    Args:
        to: a path or `package.module:function` as text; a path; in Python also a checkpoint, an `nn.Module`, a state
            dict, or shapes by name.
        section: name of the model's section in a checkpoint that holds several.
        follow_symlinks: accept links in a checkpoint that lead out of its folder.

    Raises:
        ReadError: it cannot be read, or the user's code raises.
        UsageError: it is nothing that tells names and shapes.
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


def _of_checkpoint(ck: Checkpoint, section: str, told_by: str) -> StateDictShapes:
    """The shapes of another checkpoint; where it has only one model, that is it, whatever the section is called."""
    return saved_shapes(ck, section if len(sections_of_kind(ck, "model")) > 1 else "", told_by)


def _from_json(path: Path) -> StateDictShapes:
    content = read_json(path)
    if hugging_face_shapes.is_model_config(content):
        return hugging_face_shapes.shapes_from_config(path, content)
    if not isinstance(content, dict) or not content:
        raise ReadError(path, f"expected a JSON object of name to shape, found {describe_for_error(content)}")
    found: dict[str, NamedShape] = {}
    for name, value in content.items():
        found[name] = _told(path, name, value, found)
    return StateDictShapes(str(path), found, ordered=True)


def _told(path: Path, name: str, value: Any, before: Mapping[str, NamedShape]) -> NamedShape:
    """What a JSON says of one name: a shape, a shape and a dtype, or an earlier name that it is tied to."""
    if isinstance(value, str) and value in before:
        return before[value]._replace(tied=before[value].tied or value)
    said = value if isinstance(value, dict) else {"shape": value}
    dtype = said.get("dtype", "")
    known = dtype == "" or (isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES)
    if not is_shape(said.get("shape")) or not known or said.keys() - {"shape", "dtype"}:
        expected = 'a list of sizes, {"shape": [...], "dtype": "float32"}, or an earlier name that it is tied to'
        raise ReadError(path, f"{describe_for_error(name)}: expected {expected}; found {describe_for_error(value)}")
    return NamedShape(tuple(said["shape"]), DTYPES[dtype.removeprefix("torch.")] if dtype else "")
