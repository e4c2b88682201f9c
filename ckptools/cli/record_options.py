"""The options of a command from the fields of a dataclass, so that each is declared, explained and given once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Record = TypeVar("Record")


def parameters(record: type) -> Iterator[inspect.Parameter]:
    """Yield a keyword parameter for typer per field that has a help text; a field that is a record brings its own.

    Args:
        record: a dataclass whose fields were made by `ckptools.training.option.option`.
    """
    hints = get_type_hints(record)
    for field in dataclasses.fields(record):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from parameters(hints[field.name])
        elif "help" in field.metadata:
            yield _parameter(field, hints[field.name])


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    flag = field.metadata["flag"] or "--" + field.name.replace("_", "-")
    if kind is bool and field.default:
        flag = f"{flag}/--no-{flag[2:]}"
    option = typer.Option(*flag.split(), help=field.metadata["help"], hidden=field.metadata["hidden"])
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
    )


def fill(record: type[Record], given: Mapping[str, Any]) -> Record:
    """Make the record, and those inside it, from what a command got; names in `given` that it lacks are left."""
    hints = get_type_hints(record)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            found[field.name] = fill(hints[field.name], given)
        elif field.name in given:
            found[field.name] = given[field.name]
    return record(**found)
