"""Print records as JSON: their fields, with the name and version of a schema; NaN becomes null."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from ckptools.display.tables import described, key_name
from ckptools.keys.entries import is_brief
from ckptools.model.records import Rows, to_dict
from ckptools.model.tree import Opaque, scalar
from ckptools.text import clip


def to_json(data: Mapping[str, Any], indent: int | None = None) -> str:
    """Encode an object in ASCII, on one line unless indented; NaN and infinities become null."""
    encoder = json.JSONEncoder(allow_nan=False, indent=indent)
    try:
        return encoder.encode(data)
    except ValueError:  # NaN or infinity: rare, and searching for them takes longer than encoding
        return encoder.encode(_finite(data))


def answer_json(command: str, answer: Any) -> str:
    """Encode a record as one object: the schema, named after its command, then its fields."""
    return to_json({"schema": f"ckptools/{command}/1", **to_dict(answer)}, indent=1)


def json_lines(rows: Rows[Any]) -> Iterator[str]:
    """Encode each row as one object on a line of its own."""
    return map(to_json, rows.to_dicts())


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None: a bare NaN is not JSON, and jq silently reads it as null."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    return [_finite(child) for child in value] if isinstance(value, list) else value


MAX_JSON_VALUES = 10_000
"""Most values of one subtree in JSON: a container may occur many times, so small files can be huge trees."""

MAX_JSON_TEXT = 10_000

MAX_JSON_DEPTH = 240
"""Most levels of containers: trees have fewer, but foreign objects may have any number."""


class JsonValues:
    """Converts values of a tree to JSON types, and counts values that JSON cannot express or that exceed the limits.

    Attributes:
        nonfinite: number of NaN and infinite values, which became null.
        left_out: number of values beyond the limits.
    """

    def __init__(self) -> None:
        self.nonfinite = 0
        self.left_out = 0
        self._budget = MAX_JSON_VALUES
        self._depth = 0

    def of(self, value: Any) -> Any:
        """Convert one subtree to dict, list, text, number, boolean or None. Limits apply to each call anew."""
        self._budget = MAX_JSON_VALUES
        return self._convert(value)

    def _convert(self, value: Any) -> Any:
        value = scalar(value)
        self._budget -= 1
        if self._budget < 0:
            self.left_out += 1
            return None
        if isinstance(value, float):
            finite = value - value == 0
            self.nonfinite += not finite
            return value if finite else None
        if isinstance(value, str):
            return clip(value, MAX_JSON_TEXT)
        if isinstance(value, Opaque) and self._depth and value.fields and not is_brief(value):
            return {"class": clip(value.name, MAX_JSON_TEXT), "fields": self._inside(value.fields)}
        description = described(value)
        if description is not None:
            return description
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return self._inside(value)
        return value.total_seconds() if isinstance(value, timedelta) else str(value)

    def _inside(self, value: Any) -> Any:
        """Convert a container; levels too deep in foreign objects, which may contain themselves, are left out."""
        self._depth += 1
        if self._depth > MAX_JSON_DEPTH:
            self.left_out += len(value)
            made: Any = None
        elif isinstance(value, Mapping):
            made = {}
            for key in self._some(value):
                name = clip(key_name(key), MAX_JSON_TEXT)
                # 1 and '1' are two keys in Python but one in JSON; keep both.
                while name in made:
                    name = f"{name} ({type(key).__name__})"
                made[name] = self._convert(value[key])
        else:
            made = [self._convert(item) for item in self._some(value)]
        self._depth -= 1
        return made

    def _some(self, items: Any) -> Any:
        for done, item in enumerate(items):
            if self._budget <= 0:
                self.left_out += len(items) - done
                return
            yield item
