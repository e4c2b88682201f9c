"""The options of a command from the fields of dataclasses, so that each is declared, explained and given once.

A parameter of a command whose default is such a record stands for all its fields; typer and a user see them flat.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

Record = TypeVar("Record")


def parameters(record: type) -> Iterator[inspect.Parameter]:
    """Yield a keyword parameter for typer per field that has a help text; a field that is a record brings its own.

    Args:
        record: a dataclass whose fields were made by `ckptools.option.option`.
    """
    hints = get_type_hints(record)
    for field in dataclasses.fields(record):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from parameters(hints[field.name])
        elif "help" in field.metadata:
            yield _parameter(field, hints[field.name])


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    from typing import Annotated

    import typer

    from ckptools.cli import arguments

    flag = field.metadata["flag"] or _flag(field.name)
    if kind is bool and field.default:
        flag = f"{flag}/--no-{flag[2:]}"
    description = {name: field.metadata[name] for name in ("help", "hidden", "metavar")}
    # A path that cannot be read is our own line with exit code 3, not typer's usage error.
    complete = {"keys": arguments.complete_keys, "sections": arguments.complete_sections}
    completing = complete.get(field.metadata["completed"])
    option = typer.Option(*flag.split(), readable=False, autocompletion=completing, **description)
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


def records_of(command: Callable[..., None]) -> dict[str, Any]:
    """The parameters of a command that stand for records, each with the record that is its default."""
    found = inspect.signature(command).parameters.values()
    return {p.name: p.default for p in found if dataclasses.is_dataclass(p.default)}


def call(command: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Call a command with flat options: those of its records are put into records."""
    taken = dict(given)
    for name, default in records_of(command).items():
        mine = {f.name: taken.pop(f.name) for f in dataclasses.fields(default) if f.name in taken}
        taken[name] = dataclasses.replace(default, **mine)
    command(**taken)


def flat_signature(command: Callable[..., None], names: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a command with a parameter per option, as typer takes it.

    Args:
        command: the function of a command.
        names: what the texts of its annotations may name.
    """
    hints = get_type_hints(command, {**names, **command.__globals__}, include_extras=True)
    found: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if dataclasses.is_dataclass(parameter.default):
            found += parameters(type(parameter.default))
        else:
            # What is written as a text has to be resolved; a signature of its own has its annotations already.
            text = isinstance(parameter.annotation, str)
            found.append(parameter.replace(annotation=hints[parameter.name]) if text else parameter)
    return inspect.Signature(found)


def flags_of(options: Any) -> dict[str, str]:
    """Every spelling of a flag that is off unless it is given, with its parameter: of a command, or of a record."""
    if dataclasses.is_dataclass(options):
        fields = [field for field in dataclasses.fields(options) if field.default is False]
        return {word: f.name for f in fields for word in (f.metadata["flag"] or _flag(f.name)).split()}
    found: dict[str, str] = {}
    for parameter in inspect.signature(options).parameters.values():
        if dataclasses.is_dataclass(parameter.default):
            found.update(flags_of(parameter.default))
        elif parameter.default is False:
            found[_flag(parameter.name)] = parameter.name
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
