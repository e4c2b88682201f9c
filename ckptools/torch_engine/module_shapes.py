"""Names and shapes of a module's state dict: one that is here, a user's function makes, or a `config.json` describes.

This is the one place where a user's own code is imported, and only by a name that the user typed; no file says one.
It is called on torch's meta device, where tensors have shapes and no values, so that it takes no memory.

A Hugging Face config is taken where transformers is installed. Nothing is downloaded, and no code but that of
transformers is run: what a config says of code of its own (`auto_map`) is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError, UsageError
from ckptools.model.regions import Ints
from ckptools.model.tensor import Coded
from ckptools.model.values import describe_for_error
from ckptools.text import clip, first_line, no_such_key
from ckptools.torch_engine.from_pretrained import Loading, loading
from ckptools.torch_engine.optimizer_shapes import OptimizerShapes, optimizer_shapes

MAX_MESSAGE = 200
"""Characters of an error of the user's code that a message quotes."""


class NamedShape(NamedTuple):
    """The shape of one name of a state dict, as far as it is known.

    Attributes:
        shape: sizes; None where they are unknown, or it is no tensor.
        dtype: torch's name; "" when unknown.
        tied: an earlier name that has the same values, such as `emb.weight` of `head.weight`; "" for none.
        note: why it cannot be compared or loaded; "" where it can.
        coded: of which quantized weight it is a part; None where it is a value of its own.
    """

    shape: Ints | None
    dtype: str = ""
    tied: str = ""
    note: str = ""
    coded: Coded | None = None


@dataclass(frozen=True)
class StateDictShapes:
    """The names of a state dict with their shapes: what a checkpoint holds, or what a model expects.

    Attributes:
        given_by: where they come from, for people.
        tensors: shape by name, in the order in which it has them.
        ordered: whether that is the order of the module.
        ties_optional: whether a name may be absent whose values come with another, as when transformers loads.
        loading: what `from_pretrained` would make of names and shapes; None where it is no model of transformers.
        converts: whether the model is loaded so, and not by `load_state_dict`.
        optimizer: the optimizer that was made with the module; None without one.
        ranks: how many ranks saved tensors of these shapes.
    """

    given_by: str
    tensors: Mapping[str, NamedShape] = field(repr=False)
    ordered: bool = False
    ties_optional: bool = False
    loading: Callable[[Mapping[str, NamedShape]], Loading | None] | None = field(default=None, repr=False)
    converts: bool = False
    optimizer: OptimizerShapes | None = None
    ranks: int = 1


def is_function_name(text: str) -> bool:
    """Whether a text is spelled as `package.module:function` is."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def shapes_from_function(name: str) -> StateDictShapes:
    """The shapes of what `package.module:function`, or a class in its place, makes when called with no arguments.

    It may make a module and an optimizer of it. The folder that the process runs in comes first.
    """
    with _users_code(name):
        made = _called(name)
        if not (isinstance(made, tuple) and len(made) > 1 and hasattr(made[1], "param_groups")):
            return shapes_of(made, name)
        return replace(shapes_of(made[0], name), optimizer=optimizer_shapes(made[0], made[1]))


def _called(name: str) -> Any:
    import torch

    module, _, path = name.partition(":")
    function: Any = import_module(module)
    for part in path.split("."):
        if not hasattr(function, part):
            raise UsageError(None, f"--to {name}: {no_such_key(part, dir(function))}")
        function = getattr(function, part)
    with torch.device("meta"):
        made = isinstance(function, type) or not hasattr(function, "state_dict")
        return function() if callable(function) and made else function


@contextlib.contextmanager
def _users_code(name: str) -> Iterator[None]:
    """Let modules in this folder be found, what they print go to stderr, and what they raise be one line."""
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109 - sys.path holds texts
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (UsageError, ReadError):
        raise
    except ModuleNotFoundError as error:
        if not error.name or not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise ReadError(None, _raised(name, error)) from error
        text = f"there is no module {error.name} here; it is looked for in this folder and in Python's path"
        raise UsageError(None, f"--to {name}: {text}") from error
    except (Exception, SystemExit) as error:
        raise ReadError(None, _raised(name, error)) from error
    finally:
        sys.path.pop(0)


def _raised(name: str, error: BaseException) -> str:
    said = clip(first_line(error), MAX_MESSAGE)
    return f"--to {name}: raised {type(error).__name__}: {said}; it is called with no arguments, on torch's meta device"


def shapes_of(model: Any, given_by: str = "") -> StateDictShapes:
    """Names and shapes of a module on any device, of a state dict, or of a mapping of name to shape."""
    state = _with_ties(model) if hasattr(model, "state_dict") else model
    if not isinstance(state, Mapping):
        text = f"expected an nn.Module, a state dict, or shapes by name; found {type(model).__name__}"
        raise UsageError(None, f"{given_by}: {text}" if given_by else text)
    found: dict[str, NamedShape] = {}
    first: dict[int, str] = {}
    for name, value in state.items():
        tied = first.setdefault(id(value), str(name)) if hasattr(value, "dtype") else ""
        found[str(name)] = _shape(value)._replace(tied="" if tied == str(name) else tied)
    if not found:
        raise UsageError(None, f"{given_by or type(model).__name__}: has no parameters and no buffers to load")
    made = StateDictShapes(given_by or f"the {type(model).__name__}", found, hasattr(model, "state_dict"))
    return replace(made, loading=_loading_of(model)) if _is_of_transformers(model) else made


def _is_of_transformers(model: Any) -> bool:
    """Whether it is a model of one of transformers' own classes; transformers is not imported for it."""
    library = sys.modules.get("transformers") if hasattr(model, "state_dict") else None
    known = getattr(library, "PreTrainedModel", None)
    return isinstance(known, type) and isinstance(model, known) and type(model).__module__.startswith("transformers.")


def _loading_of(model: Any) -> Callable[[Mapping[str, NamedShape]], Loading | None]:
    """What `from_pretrained` of a model's class makes of names, with another model of its config."""

    def loads(saved: Mapping[str, NamedShape]) -> Loading | None:
        import torch
        import transformers

        tensors = {n: (one.shape, one.dtype) for n, one in saved.items() if one.shape is not None and not one.note}
        with _offline(transformers), contextlib.redirect_stdout(sys.stderr), torch.device("meta"):
            return loading(type(model)._from_config(deepcopy(model.config)), tensors)

    return loads


def _with_ties(module: Any) -> Any:
    """A module's state dict in which tied names have one object; of a wrapper that cannot keep them, its own."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:
        return module.state_dict()


def _shape(value: Any) -> NamedShape:
    """The shape of a tensor, or one that was given in its place."""
    if isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value):
        return NamedShape(tuple(value))
    try:
        return NamedShape(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))
    except RuntimeError:  # a lazy parameter, which has no shape before the first forward pass
        return NamedShape(None, note="has no shape yet: it is a lazy parameter")
    except AttributeError:
        return NamedShape(None)


# -- a Hugging Face config --------------------------------------------------------------------------------------------


MAX_PARTS = 10_000
"""Layers, experts or heads: a config of a few bytes may ask for any number of modules."""


def is_model_config(content: Any) -> bool:
    """Whether the content of a JSON is a Hugging Face config of a model."""
    return isinstance(content, Mapping) and isinstance(content.get("model_type"), str)


def shapes_from_config(path: Path, content: Mapping[str, Any]) -> StateDictShapes:
    """The state dict of the model that a `config.json` describes, made on torch's meta device."""
    _check_size(path, content)
    try:
        import transformers
    except ImportError as error:
        text = "describes a model for transformers, which is not installed: pip install transformers; or name the "
        raise UsageError(path, text + "function that makes it: --to package.module:function") from error
    try:
        with _offline(transformers), contextlib.redirect_stdout(sys.stderr):
            made = shapes_of(_model(transformers, path, content), str(path))
    except (UsageError, ReadError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {clip(first_line(error), MAX_MESSAGE)}"
        raise ReadError(path, f"transformers {transformers.__version__} makes no model of it: {said}") from error
    # from_pretrained ties what the config says is tied, whether the file has it or not.
    return replace(made, ties_optional=True, converts=True)


def _model(transformers: Any, path: Path, content: Mapping[str, Any]) -> Any:
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
def _offline(transformers: Any) -> Iterator[None]:
    """Keep transformers off the network and quiet, for this one model: the program around us may need both later."""
    from huggingface_hub import constants

    logging = transformers.utils.logging
    offline, verbosity = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
