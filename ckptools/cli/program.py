"""The command line as typer sees it, put together from the functions of its commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from ckptools._version import __version__
from ckptools.cli import arguments
from ckptools.cli.printing import show
from ckptools.cli.record_options import flat_signature, parameters
from ckptools.cli.running import OutputOptions, one_line_errors


def program(help: str, functions: Iterable[Callable[..., None]]) -> typer.Typer:
    """Return the command line with these commands, each called as its function."""
    made = typer.Typer(
        name="ckptools",
        help=help,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(_before_any)  # without it, a single command would not be called by its name
    for function in functions:
        made.command(no_args_is_help=function.__name__ != "formats")(_flattened(function))
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        show(version_text())
        raise typer.Exit


def version_text() -> str:
    """The text of `--version`: the version, and those of Python and the libraries that matter for a report."""
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    found = [f"ckptools {__version__}", f"Python {python_version()}"]
    for name in ("torch", "numpy", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


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
