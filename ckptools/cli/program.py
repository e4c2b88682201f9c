"""The command line as typer sees it, built from the functions of the commands."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from ckptools.cli import arguments
from ckptools.cli.options import OutputOptions, own_options, records_of, spellings
from ckptools.cli.printing import show
from ckptools.cli.running import one_line_errors
from ckptools.cli.versions import version_line
from ckptools.model.records import grouped

MAX_HELP = 200
"""Longest summary of a command in characters; longer than every first line."""


class GroupedCommands(typer.core.TyperGroup):
    """Lists commands in `--help` under the heading of their group, which typer itself does only with rich."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups in the order of their first commands, with aligned summaries."""
        width = max(map(len, self.commands))
        listed: Iterable[tuple[str, Any]] = self.commands.items()
        for title, commands in grouped(listed, lambda item: item[1].rich_help_panel).items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), made.get_short_help_str(MAX_HELP)) for name, made in commands])


def program(help: str, functions: Iterable[Callable[..., None]], groups: Mapping[str, Iterable[str]]) -> typer.Typer:
    """Make a typer application with these commands, named after their functions; `groups` maps headings to names."""
    panels = {name: title for title, names in groups.items() for name in names}
    made = typer.Typer(
        name="ckptools",
        cls=GroupedCommands,
        help=help,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(_before_any)  # without it, typer would not expect the name of a single command
    for function in functions:
        name = function.__name__
        made.command(no_args_is_help=name not in ("explain", "formats"), rich_help_panel=panels[name])(
            _flattened(function)
        )
    return made


def only_listed(name: str, known: tuple[str, str]) -> Callable[..., None]:
    """Make a command for the list in `--help`, from name and summary, without importing its module."""

    def command() -> None: ...

    command.__name__, command.__doc__ = name, known[0]
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        show(version_line())
        raise typer.Exit


def _before_any(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the version and exit; with -v, what a bug report needs.",
        ),
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)] = None,
) -> None:
    """Accept `--local-rank`, which `python -m torch.distributed.launch` puts before the arguments."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


def _flattened(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function with flat options for typer: one for each field of its dataclasses, and the common options."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        one_line_errors(function)(**given)

    found = [*flat_parameters(function), *parameters(OutputOptions)]
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return command


def flat_parameters(command: Callable[..., None]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each option of a command, as typer expects it."""
    hints = get_type_hints(command, {**vars(arguments), **command.__globals__}, include_extras=True)
    records, options = records_of(command), own_options(command)
    for name, parameter in inspect.signature(command).parameters.items():
        if name in records:
            yield from parameters(records[name])
        elif name in options:
            yield _parameter(name, options[name], hints[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY)


def parameters(record: type) -> Iterator[inspect.Parameter]:
    """Yield a keyword parameter for each field made by `option`, also of dataclasses inside."""
    hints = get_type_hints(record)
    for field in fields(record):
        if is_dataclass(hints[field.name]):
            yield from parameters(hints[field.name])
        elif "help" in field.metadata:
            yield _parameter(field.name, field, field.metadata["typed"] or hints[field.name])


def _parameter(name: str, field: Field[Any], kind: Any) -> inspect.Parameter:
    words = spellings(name, field)
    if kind is bool and field.default:
        words = [f"{words[0]}/--no-{words[0][2:]}"]
    description = {word: field.metadata[word] for word in ("help", "hidden", "metavar")}
    complete = {"keys": arguments.complete_keys, "sections": arguments.complete_sections}
    completing = complete.get(field.metadata["completed"])
    # ckptools reports unreadable paths itself, with exit code 3 in place of typer's 2.
    option = typer.Option(*words, readable=False, autocompletion=completing, **description)
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
