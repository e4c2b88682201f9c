"""Names and shapes of the model that a Hugging Face `config.json` describes, where transformers is installed.

Nothing is downloaded, and no code but that of transformers is run: what a config says of code of its own (`auto_map`)
is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UsageError
from ckptools.model.matching import StateDictShapes
from ckptools.model.values import describe_for_error
from ckptools.text import clip, first_line
from ckptools.torch_engine.module_shapes import MAX_MESSAGE, shapes_of

MAX_PARTS = 10_000
"""Layers, experts or heads: a config of a few bytes may ask for any number of modules."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def is_model_config(content: Any) -> bool:
    """Whether the content of a JSON is a Hugging Face config of a model."""
    return isinstance(content, Mapping) and isinstance(content.get("model_type"), str)


def shapes_from_config(path: Path, content: Mapping[str, Any]) -> StateDictShapes:
    """The state dict of the model that a config describes, made on torch's meta device.

    Args:
        path: the `config.json`.
        content: what is in it.

    Raises:
        UsageError: transformers is not installed, or has no such model.
        ReadError: it cannot be made.
    """
    _check_size(path, content)
    with _offline():
        try:
            import transformers
        except ImportError as error:
            text = "describes a model for transformers, which is not installed: pip install transformers; or name the "
            raise UsageError(path, text + "function that makes it: --to package.module:function") from error
        try:
            with contextlib.redirect_stdout(sys.stderr):
                made = shapes_of(_model(transformers, path, content), str(path))
        except (UsageError, ReadError):
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {clip(first_line(error), MAX_MESSAGE)}"
            raise ReadError(path, f"transformers {transformers.__version__} makes no model of it: {said}") from error
    # from_pretrained ties what the config says is tied, whether the file has it or not.
    return replace(made, ties_optional=True)


def _model(transformers: Any, path: Path, content: Mapping[str, Any]) -> Any:
    """The module, without values."""
    import torch

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if content["model_type"] not in known:
        raise UsageError(path, _lacks(transformers, f"models of type {describe_for_error(content['model_type'])}"))
    config = known[content["model_type"]].from_dict(dict(content))
    with torch.device("meta"):
        return _class(transformers, path, content)._from_config(config)


def _class(transformers: Any, path: Path, content: Mapping[str, Any]) -> Any:
    """The class that a config names; only one of transformers' own."""
    named = content.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str):
        raise UsageError(path, "does not say of which class the model is: expected a name in its `architectures`")
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UsageError(path, _lacks(transformers, f"model class {describe_for_error(name)}"))
    return found


def _lacks(transformers: Any, what: str) -> str:
    way = "code from elsewhere is not run; name the function that makes it: --to package.module:function"
    return f"transformers {transformers.__version__} has no {what}; {way}"


def _check_size(path: Path, content: Any) -> None:
    """Refuse numbers of layers and the like that would take all time and memory."""
    stack = [content]
    while stack:
        node = stack.pop()
        if not isinstance(node, Mapping):
            continue
        stack += node.values()
        for key, value in node.items():
            parts = isinstance(value, (int, float)) and value > MAX_PARTS
            if parts and any(word in str(key) for word in ("layer", "num_", "depth", "expert", "block", "head")):
                text = f"{describe_for_error(key)} is {describe_for_error(value)}; at most {MAX_PARTS} are made"
                raise ReadError(path, text)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let transformers ask nobody for anything; it looks at these when it is imported."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
