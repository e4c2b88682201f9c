"""The command line as typer sees it, put together from the functions of its commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ckptools.cli import arguments
from ckptools.cli.commands import HELP, function_of
from ckptools.cli.exit_codes import one_line_errors
from ckptools.cli.output_options import OutputOptions
from ckptools.cli.record_options import flat_signature, parameters


def program(names: Iterable[str]) -> typer.Typer:
    """Return the command line with these commands. To put one together takes longer than reading a small file."""
    made = typer.Typer(
        name="ckptools",
        help=HELP,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(_before_any)  # without it, a single command would not be called by its name
    for name in names:
        made.command(no_args_is_help=name != "formats")(_flattened(function_of(name)))
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        from ckptools.cli.commands import version_text
        from ckptools.cli.printing import show

        show(version_text())
        raise typer.Exit


def _before_any(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)] = None,
) -> None:
    """Take what `python -m torch.distributed.launch` puts between the name of a module and its arguments."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


def _flattened(function: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: with an option for each field of its records, and those that all commands have."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        one_line_errors(function)(**given)

    flat = flat_signature(function, vars(arguments))
    found = [*flat.parameters.values(), *parameters(OutputOptions)]
    command.__signature__ = flat.replace(parameters=found)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return command
