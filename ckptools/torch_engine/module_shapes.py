"""Names and shapes of a module's state dict: of one that is here, or that a function of the user's makes.

This is the one place where a user's own code is imported, and only by a name that the user typed; no file says one.
It is called on torch's meta device, where tensors have shapes and no values, so that it takes no memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ckptools.errors import ReadError, UsageError
from ckptools.model.matching import NamedShape, StateDictShapes
from ckptools.text import clip, first_line, no_such_key

MAX_MESSAGE = 200
"""Characters of an error of the user's code that are told."""


def is_function_name(text: str) -> bool:
    """Whether a text is spelled as `package.module:function` is."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def shapes_from_function(name: str) -> StateDictShapes:
    """What the module, or the state dict, holds that a function or class makes when it is called with no arguments.

    Args:
        name: `package.module:function`, or a class in its place; the folder that the process runs in comes first.

    Raises:
        UsageError: there is no such module or function, or it makes something else.
        ReadError: the user's code raises.
    """
    with _users_code(name):
        made = _called(name)
        return shapes_of(made, name)


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
        text = (
            f"--to {name}: there is no module {error.name} here; it is looked for in this folder and in Python's path"
        )
        raise UsageError(None, text) from error
    except (Exception, SystemExit) as error:
        raise ReadError(None, _raised(name, error)) from error
    finally:
        sys.path.pop(0)


def _raised(name: str, error: BaseException) -> str:
    said = clip(first_line(error), MAX_MESSAGE)
    return f"--to {name}: raised {type(error).__name__}: {said}; it is called with no arguments, on torch's meta device"


def shapes_of(model: Any, told_by: str = "") -> StateDictShapes:
    """Names and shapes of a module, of a state dict, or of a mapping of name to shape.

    Args:
        model: an `nn.Module`, on any device; or a mapping.
        told_by: what to call it; "" for its class.

    Raises:
        UsageError: it is none of these, or empty.
    """
    state = _with_ties(model) if hasattr(model, "state_dict") else model
    if not isinstance(state, Mapping):
        text = f"expected an nn.Module, a state dict, or shapes by name; found {type(model).__name__}"
        raise UsageError(None, f"{told_by}: {text}" if told_by else text)
    found: dict[str, NamedShape] = {}
    first: dict[int, str] = {}
    for name, value in state.items():
        tied = first.setdefault(id(value), str(name)) if hasattr(value, "dtype") else ""
        found[str(name)] = _shape(value)._replace(tied="" if tied == str(name) else tied)
    if not found:
        raise UsageError(None, f"{told_by or type(model).__name__}: has no parameters and no buffers to load")
    return StateDictShapes(told_by or f"the {type(model).__name__}", found, hasattr(model, "state_dict"))


def _with_ties(module: Any) -> Any:
    """A module's state dict in which tied names have one object; of a wrapper that cannot keep them, its own."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:
        return module.state_dict()


def _shape(value: Any) -> NamedShape:
    """The shape of a tensor, or one that was told in its place."""
    if isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value):
        return NamedShape(tuple(value))
    try:
        return NamedShape(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))
    except RuntimeError:  # a lazy parameter, which has no shape before the first forward pass
        return NamedShape(None, note="has no shape yet: it is a lazy parameter")
    except AttributeError:
        return NamedShape(None)
