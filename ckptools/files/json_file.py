"""JSON that lies in a checkpoint's folder: indexes, trainer states. Read whole, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.model.tree import TreeLimitError, check_tree_limits
from ckptools.model.values import describe_for_error

MAX_JSON = 64 << 20
"""Bytes: an index takes a hundred for a tensor, a trainer state as many for a step that it logged."""

MAX_VALUES = 8_000_000


def is_json(path: Path) -> bool:
    """Whether a path is a JSON by its name, and not the index of a model in several files."""
    return path.suffix == ".json" and not path.name.endswith(".index.json") and path.is_file()


def read_json(path: Path) -> Any:
    """Read a JSON file; a name that is twice in one object is refused, for readers differ in which one they take.

    Raises:
        ReadError: it is no JSON, or beyond the bounds.
    """
    with File(path) as file:
        if file.size > MAX_JSON:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_JSON} of JSON are read")
        data = file.read(0, file.size)
    try:
        return parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ReadError(path, "is no JSON that can be read: not UTF-8") from error
    except JsonError as error:
        raise ReadError(path, f"is no JSON that can be read: {error}") from error


class JsonError(ValueError):
    """The fault of a JSON text."""


def parse_json(text: str) -> Any:
    """Parse JSON within the same bounds.

    Raises:
        JsonError: it is none, or beyond the bounds.
    """
    if sum(map(text.count, "{[,")) > MAX_VALUES:
        raise JsonError(f"more than {MAX_VALUES} values")
    try:
        found = json.loads(text, object_pairs_hook=_object)
        check_tree_limits(found)
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg.lower()} in line {error.lineno}") from error
    except (JsonError, TreeLimitError) as error:
        raise JsonError(str(error)) from error
    except (RecursionError, ValueError) as error:
        raise JsonError("nested too deep" if isinstance(error, RecursionError) else "a number too long") from error
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = {name for name in found if sum(name == other for other, _ in pairs) > 1}
        raise JsonError(f"{describe_for_error(min(twice))} is twice in one object")
    return found
