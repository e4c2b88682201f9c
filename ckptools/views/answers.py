"""Answers as JSON: every record by its fields, under the name and version of a schema in `schemas/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptools.model.records import to_dict
from ckptools.model.rows import Rows

SCHEMAS = Path(__file__).parent / "schemas"
"""A JSON Schema for each command's answer, `inspect.json` for `ckptools/inspect/1`."""

ON_ONE_LINE, INDENTED = json.JSONEncoder(allow_nan=False), json.JSONEncoder(allow_nan=False, indent=1)


def answer_json(command: str, answer: Any, version: int = 1) -> str:
    """An answer as one JSON object: its schema, and its fields; NaN and infinities are null.

    Args:
        command: name of the command, which is also that of the schema.
        answer: a record.
        version: of the schema.
    """
    return _encoded(INDENTED, {"schema": f"ckptools/{command}/{version}", **to_dict(answer)})


def json_lines(rows: Rows[Any]) -> Iterator[str]:
    """A JSON object per row, on a line of its own; NaN and infinities are null."""
    return (_encoded(ON_ONE_LINE, row) for row in rows.to_dicts())


def _encoded(encoder: json.JSONEncoder, told: dict[str, Any]) -> str:
    try:
        return encoder.encode(told)
    except ValueError:  # a NaN or an infinity: there are few, and to look for them takes longer than to encode
        return encoder.encode(_finite(told))


def _finite(value: Any) -> Any:
    """The value with null where JSON has nothing: a bare NaN is not JSON, and jq reads it as null without a word."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    return [_finite(child) for child in value] if isinstance(value, list) else value
