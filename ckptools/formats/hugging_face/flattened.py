"""Tensors of torchao's classes that safetensors files hold part by part, put together as `__metadata__` describes them.

`tensor_names` lists every tensor; each has a JSON of its own in `__metadata__`, with its class, its attributes and the
names of its parts. The part `qdata` of `a.weight` is the tensor `a._weight_qdata`. transformers writes all of it into
every file of a model, also for tied weights that it leaves out.

Source: torchao 0.18.0, prototype/safetensors (`flatten_tensor_state_dict`, `TensorSubclassAttributeJSONEncoder`);
transformers 5.23, quantizers/quantizer_torchao.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.files.json_file import JsonError, parse_json
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.pickles.classes.tensor_classes import LIBRARY, of_class
from ckptools.text import few

NAMES = "tensor_names"
"""The key of `__metadata__` that lists all tensors."""

PLAIN = "Tensor"
CODES, SCALE = "qdata", "scale"


class Description(NamedTuple):
    """What `__metadata__` says of one tensor; without a class where that cannot be read.

    Attributes:
        kind: name of its class; `Tensor` for a plain one.
        attributes: what the class keeps beside its parts.
        parts: the tensors that it consists of, by the names of their attributes.
    """

    kind: str
    attributes: Mapping[str, Any]
    parts: Mapping[str, str]


def descriptions(metadata: Mapping[str, str]) -> dict[str, Description]:
    """The tensors that torchao describes in the `__metadata__` of a file; none if it is not torchao's."""
    names = _json(metadata.get(NAMES))
    if not isinstance(names, list) or not all(isinstance(name, str) and name in metadata for name in names):
        return {}
    return {name: _description(name, _json(metadata[name])) for name in names}


def _json(text: str | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except JsonError:
        return None


def _description(name: str, told: Any) -> Description:
    kind, attributes, parts = (told.get(key) if isinstance(told, dict) else None for key in KEYS)
    if kind == PLAIN:
        return Description(PLAIN, {}, {})
    module, dot, weight = name.rpartition(".")
    texts = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    if not (dot and isinstance(kind, str) and isinstance(attributes, dict) and texts and parts):
        return Description("", {}, {})
    return Description(kind, attributes, {part: f"{module}._{weight}_{part}" for part in parts})


KEYS = ("_type", "_data", "_tensor_data_names")


def put_together(tree: dict[Any, Any], described: Mapping[str, Description]) -> tuple[dict[Any, Any], list[Problem]]:
    """The tensors with one of torchao's in the place of its parts, in the order of the parts; and what is wrong."""
    owners = {part: name for name, one in described.items() for part in one.parts.values() if part in tree}
    made: dict[Any, Any] = {}
    for key, value in tree.items():
        owner = owners.get(key)
        if owner is None:
            made[key] = value
        elif owner not in made:
            made[owner] = _tensor(tree, described[owner])
    return made, list(_problems(tree, described))


def _problems(tree: Mapping[Any, Any], described: Mapping[str, Description]) -> Iterator[Problem]:
    absent = []
    for name, one in described.items():
        lacking = [part for part in one.parts.values() if part not in tree]
        if not one.kind:
            yield Problem(Code.METADATA_CONTRADICTS, f"__metadata__ has a description of {name} that cannot be read")
        elif name in tree and one.parts:
            yield Problem(Code.METADATA_CONTRADICTS, f"{name} is here, and __metadata__ says that it is in parts")
        elif lacking and len(lacking) < len(one.parts):
            text = f"without {few(lacking)}, a part of it by __metadata__"
            yield Problem(Code.MODEL_PART_MISSING, text, None, name)
        elif lacking or (not one.parts and name not in tree):
            absent.append(name)
    if absent:
        text = f"__metadata__ describes {few(absent)}, which is not here; of tied weights only one is written"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="note")


def _tensor(tree: Mapping[Any, Any], one: Description) -> Tensor:
    """The tensor that parts make."""
    parts: dict[str, Any] = {part: tree[key] for part, key in one.parts.items() if key in tree}
    first: Tensor = parts.get(CODES) or next(iter(parts.values()))
    state = {**{key: _attribute(value) for key, value in one.attributes.items()}, **parts}
    name = f"{LIBRARY}{one.kind}"
    if len(parts) < len(one.parts):
        lacking = few([part for part in one.parts if part not in parts])
        note = f"a tensor of class {name} without its {lacking}, which no file here has"
        return Tensor(first.shape, first.dtype, (), "unreadable", note=note)
    return of_class(name, _shape(one, first), _dtype(one, parts, first), state)


def _attribute(value: Any) -> Any:
    """An attribute as a pickle would have it; a dtype by its name, other objects as they are spelled."""
    return value.get("_data") if isinstance(value, dict) and value.keys() == {"_type", "_data"} else value


def _shape(one: Description, codes: Tensor) -> Ints:
    """The shape of the whole; of classes that do not state it, that of the codes, of which a byte may have two."""
    stated = one.attributes.get("shape")
    if isinstance(stated, list) and all(type(n) is int and n >= 0 for n in stated):
        return tuple(stated)
    two = one.kind == "NVFP4Tensor" or _attribute(one.attributes.get("elem_dtype")) == "float4_e2m1fn_x2"
    return (*codes.shape[:-1], 2 * codes.shape[-1]) if two and codes.shape else codes.shape


def _dtype(one: Description, parts: Mapping[str, Tensor], codes: Tensor) -> str:
    """The dtype of the values; of classes that do not state it, that of their scales."""
    stated = _attribute(one.attributes.get("dtype", one.attributes.get("orig_dtype")))
    if isinstance(stated, str) and stated in ITEMSIZE:
        return stated
    return "bfloat16" if one.kind == "Int4TilePackedTo4dTensor" else parts.get(SCALE, codes).dtype
