"""The command line as typer sees it, built from the functions of the commands."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import typer.core

from ckptools.cli import arguments
from ckptools.cli.help import WORDS, Help, HelpAll, help_of
from ckptools.cli.mistakes import decimal_number, in_our_words, no_such_command, whole_number
from ckptools.cli.options import OutputOptions, declared_options, own_options, records_of, spellings
from ckptools.cli.printing import in_color, say, say_rendered, show
from ckptools.cli.running import one_line_errors
from ckptools.cli.terminal import Printing
from ckptools.cli.versions import version_line
from ckptools.errors import UsageError


class HelpedCommand(typer.core.TyperCommand):
    """A command whose help and mistakes are in ckptools' words.

    Attributes:
        common: names of the options that are declared as common.
    """

    common: frozenset[str] = frozenset()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line; without any word, show the help."""
        with _parsing(ctx, args):
            return super().parse_args(ctx, args)


class AllCommands(typer.core.TyperGroup):
    """The program, whose help and mistakes are in ckptools' words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line up to the name of the command; without any word, show the help."""
        with _parsing(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, unless no command has such a name."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise UsageError(None, no_such_command(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; in standalone mode, print mistakes and exit."""
        run = functools.partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except UsageError as error:
            say(f"error: {error}")
            code = error.exit_code
        except typer.Abort:
            raise KeyboardInterrupt from None
        raise SystemExit(code or 0)


@contextmanager
def _parsing(context: typer.Context, words: Sequence[str]) -> Iterator[None]:
    """Use the colour that a command line asks for, before it is parsed; without any word, show the help and exit."""
    context.meta[WORDS] = [*words]
    given = [word.partition("=")[2] for word in words if word.startswith("--color=")]
    given += [value for word, value in pairwise(words) if word == "--color"]
    Printing.color = next((value for value in given if value in ("always", "never")), "auto")
    command: Any = context.command
    if not words and command.no_args_is_help and not context.resilient_parsing:
        say_rendered([help_of(context, in_color(sys.stderr))])
        raise SystemExit(UsageError.exit_code)
    with in_our_words(context):
        yield


def program(help: str, functions: Iterable[Callable[..., None]], groups: Mapping[str, Iterable[str]]) -> typer.Typer:
    """Make a typer application with these commands, named after their functions; `groups` maps headings to names."""
    panels = {name: title for title, names in groups.items() for name in names}
    made = typer.Typer(
        name="ckptools",
        cls=AllCommands,
        help=help,
        no_args_is_help=True,
        add_help_option=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(_before_any)  # without it, typer would not expect the name of a single command
    for function in functions:
        name = function.__name__
        text, _, examples = (function.__doc__ or "").partition("\n\n    Examples:\n")
        made.command(
            cls=_command_class(function),
            help=text,
            epilog=examples,
            no_args_is_help=name not in ("explain", "formats"),
            add_help_option=False,
            rich_help_panel=panels[name],
        )(_flattened(function))
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
    help: Help = False,
) -> None:
    """Accept `--local-rank`, which `python -m torch.distributed.launch` puts before the arguments."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


def _command_class(function: Callable[..., None]) -> type[HelpedCommand]:
    """Make the class of one command, which knows the options that `--help` shows."""

    class Command(HelpedCommand):
        common = frozenset(name for name, known in declared_options(function).items() if known.metadata["common"])

    return Command


def _flattened(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function with flat options for typer: one for each field of its dataclasses, and those of any command."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        one_line_errors(function)(**given)

    every = (inspect.Parameter(name, KEYWORD, default=False, annotation=kind) for name, kind in HELP_OPTIONS.items())
    found = [*flat_parameters(function), *parameters(OutputOptions), *every]
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return command


KEYWORD = inspect.Parameter.KEYWORD_ONLY
HELP_OPTIONS = {"help": Help, "help_all": HelpAll}


def flat_parameters(command: Callable[..., None]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each argument and option of a command, as typer expects it."""
    hints = get_type_hints(command, {**vars(arguments), **command.__globals__}, include_extras=True)
    records, options = records_of(command), own_options(command)
    for name, parameter in inspect.signature(command).parameters.items():
        if name in records:
            yield from parameters(records[name])
        elif name in options:
            yield _parameter(name, options[name], hints[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=KEYWORD)


def parameters(record: type) -> Iterator[inspect.Parameter]:
    """Yield a keyword parameter for each field made by `option`, also of dataclasses inside."""
    hints = get_type_hints(record)
    for field in fields(record):
        if is_dataclass(hints[field.name]):
            yield from parameters(hints[field.name])
        elif "help" in field.metadata:
            kind = field.metadata["typed"] or hints[field.name]
            yield _parameter(field.name, field, kind, getattr(record, "heading", None))


def _parameter(name: str, field: Field[Any], kind: Any, heading: str | None = None) -> inspect.Parameter:
    words = spellings(name, field)
    if (kind is bool and field.default) or kind == bool | None:
        words = [f"{words[0]}/--no-{words[0][2:]}"]
    complete = {"keys": arguments.complete_keys, "sections": arguments.complete_sections}
    placeholder, parser = _value(kind)
    option = typer.Option(
        *words,
        help=field.metadata["help"],
        hidden=field.metadata["hidden"],
        metavar=field.metadata["metavar"] or placeholder,
        parser=parser,
        autocompletion=complete.get(field.metadata["completed"]),
        rich_help_panel=heading,
        readable=False,  # ckptools reports unreadable paths itself, with exit code 3 in place of typer's 2
    )
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(name, KEYWORD, default=default, annotation=Annotated[kind, option])


def _value(kind: Any) -> tuple[str | None, Callable[[str], Any] | None]:
    """Return the placeholder for a value of a type, and what parses it if typer's message would not name our words."""
    kinds = {known for known in get_args(kind) or (kind,) if known is not type(None)}
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind)), None
    if bool in kinds:
        return None, None
    if int in kinds:
        return "N", whole_number
    if float in kinds:
        return "NUMBER", decimal_number
    return ("FILE" if Path in kinds else "TEXT"), None
