"""JSON that lies in a checkpoint's folder: indexes, trainer states. Read whole, within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files import File
from ckptools.pickles.budgets import PickleError
from ckptools.pickles.reader import check_budget
from ckptools.pickles.told import told

MAX_JSON = 64 << 20
"""Bytes: an index takes a hundred for a tensor, a trainer state as many for a step that it logged."""

MAX_VALUES = 8_000_000


def read_json(path: Path) -> Any:
    """Read a JSON file; a name that is twice in one object is refused, for readers differ in which one they take.

    Raises:
        ReadError: it is no JSON, or beyond the bounds.
    """
    with File(path) as file:
        if file.size > MAX_JSON:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_JSON} of JSON are read")
        data = file.read(0, file.size)
    if sum(map(data.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise ReadError(path, f"holds more than {MAX_VALUES} values")
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
        check_budget(found)
    except (ValueError, RecursionError, PickleError) as error:
        raise ReadError(path, f"is no JSON that can be read: {_why(error)}") from error
    return found


class TwiceError(ValueError):
    """One name is twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = {name for name in found if sum(name == other for other, _ in pairs) > 1}
        raise TwiceError(f"{told(min(twice))} is twice in one object")
    return found


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()} in line {error.lineno}"
    if isinstance(error, (TwiceError, PickleError)):
        return str(error)
    return {UnicodeDecodeError: "not UTF-8", RecursionError: "nested too deep"}.get(type(error), "a number too long")
