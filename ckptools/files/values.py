"""Plain values in the JSON and YAML files that trainers write beside a checkpoint: settings, counters, states.

YAML is read by PyYAML, which is optional. A tag in a file makes no object: only numbers, text, lists and dicts are
made, as PyYAML's `SafeLoader` makes them. A time stays text. A file with other tags or with merge keys (`<<`), which
few bytes of a file can make large without bounds, is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File, read_json
from ckptools.model.tree import TreeLimitError, check_tree_limits, describe_for_error
from ckptools.text import clip

YAML = (".yaml", ".yml")
SUFFIXES = (".json", *YAML)

MAX_YAML = 1 << 18
"""Bytes: PyYAML takes a second for as many."""

MAX_WHY = 160
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")


def read_values(path: Path) -> Any:
    """Read a JSON or a YAML file; a duplicate name in an object is refused, because readers differ in which they take.

    Raises:
        ReadError: it is neither, or beyond the bounds, or it is YAML and PyYAML is not installed.
    """
    if path.suffix not in YAML:
        return read_json(path)
    with File(path) as file:
        if file.size > MAX_YAML:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_YAML} of YAML are read")
        data = file.read(0, file.size)
    try:
        found = _parse_yaml(data.decode("utf-8"))
        check_tree_limits(found)
    except ImportError as error:
        raise ReadError(path, "is YAML; to read it: pip install 'ckptools[yaml]'") from error
    except (ValueError, RecursionError, TreeLimitError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else clip(str(error), MAX_WHY)
        raise ReadError(path, f"is no YAML that can be read: {why}") from error
    return found


def _parse_yaml(text: str) -> Any:
    """Parse YAML of plain values.

    Raises:
        ValueError: it is no YAML, or has another value.
    """
    import yaml  # type: ignore[import-untyped]

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        yaml_constructors = {
            f"tag:yaml.org,2002:{kind}": getattr(yaml.SafeLoader, f"construct_yaml_{kind}") for kind in PLAIN
        } | {"tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str}

        def flatten_mapping(self, node: Any) -> None:
            names = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(names)) < len(names) or any(tag == "tag:yaml.org,2002:merge" for tag, _ in names):
                raise ValueError(f"a key is twice, or merged from elsewhere, in line {node.start_mark.line + 1}")

    def refuse(_: Any, node: Any) -> None:
        raise ValueError(f"{describe_for_error(node.tag)} in line {node.start_mark.line + 1} is no plain value")

    Plain.add_constructor(None, refuse)
    try:
        return yaml.load(text, Plain)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(f"{error.problem}{f' in line {mark.line + 1}' if mark else ''}") from error
    except LookupError as error:
        raise ValueError("a value is not what its tag says") from error
    except yaml.YAMLError as error:
        raise ValueError("it has characters that YAML has not") from error
