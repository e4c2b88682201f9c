"""A JSON of old name to new, such as `match --write-map` writes and `consolidate --map` reads.

    {"schema": "ckptools/map/1", "map": {"module.emb.weight": "emb.weight"}}

One that is nothing but old name to new is read as well.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckptools.errors import OutputExistsError, ReadError, WriteError
from ckptools.files.json_file import read_json
from ckptools.model.values import describe_for_error

SCHEMA = "ckptools/map/1"


def read_map(path: Path) -> dict[str, str]:
    """The new names by the old ones.

    Raises:
        ReadError: it cannot be read, or is no such JSON.
    """
    content = read_json(path)
    found = content.get("map") if _has_schema(path, content) else content
    if not isinstance(found, dict) or not found:
        raise ReadError(path, f"expected a JSON object of old name to new, found {describe_for_error(found)}")
    for old, new in found.items():
        if not isinstance(new, str) or not new:
            text = f"expected a new name for {describe_for_error(old)}, found {describe_for_error(new)}"
            raise ReadError(path, text)
    return dict(found)


def _has_schema(path: Path, content: Any) -> bool:
    """Whether it says that it is such a map; one name `schema` that is mapped like the others says nothing."""
    if not isinstance(content, dict) or not isinstance(content.get("map"), dict):
        return False
    if content.get("schema") != SCHEMA or len(content) != 2:
        found = describe_for_error(content.get("schema"))
        raise ReadError(path, f"expected `schema` {SCHEMA} and `map`, and nothing else; found schema {found}")
    return True


def write_map(path: Path, names: Mapping[str, str]) -> None:
    """Write new names by the old ones; a file that is there stays as it is.

    Raises:
        OutputExistsError: there is something already.
        WriteError: it cannot be written; then nothing is left.
    """
    text = json.dumps({"schema": SCHEMA, "map": dict(names)}, indent=1)
    try:
        with path.open("x", encoding="ascii") as file:
            _write(path, file, text)
    except FileExistsError as error:
        raise OutputExistsError(path, "is already there; give the map another name") from error
    except OSError as error:
        raise WriteError(path, f"cannot be written: {error.strerror or error}") from error


def _write(path: Path, file: Any, text: str) -> None:
    try:
        file.write(f"{text}\n")
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


# -- renames ----------------------------------------------------------------------------------------------------------


def replaced_prefix(name: str, old: str, new: str) -> str:
    """The name with `new` in the place of a beginning `old`; both are empty or end with a dot."""
    return new + name[len(old) :] if name.startswith(old) else name


def replaced_module(name: str, old: str, new: str) -> str:
    """The name with `new` in the place of `old`, which is the name itself or the module that it begins with."""
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


def replaced_component(name: str, old: str, new: str) -> str:
    """The name with `new` in the place of every component `old`."""
    if old not in name:
        return name
    return ".".join([new if part == old else part for part in name.split(".")])


def without_components(name: str, gone: Collection[str]) -> str:
    """The name without its components that are among some."""
    return ".".join([part for part in name.split(".") if part not in gone])
