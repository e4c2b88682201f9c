"""The help of commands, in the colours of their output.

`--help` of a command with many options shows the options that are declared as common, and two examples; `--help-all`
shows every option.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from ckptools.cli.printing import in_color, show
from ckptools.display.screen import in_roles, painted
from ckptools.model.records import grouped

SHORT = 10
"""Most options that `--help` shows of a command with more than `MANY`: the first ones that are common."""
MANY = 12

MAX_CELL = 30
"""Widest first column of a table, in characters."""

WORDS = "ckptools.words"
"""Under this name a context keeps the words of its command line."""


def help_of(context: typer.Context, color: bool, everything: bool = False) -> str:
    """Return the help of the command that is being parsed, with its common options or with every option."""
    command: Any = context.command
    subcommands = getattr(command, "commands", {})
    tables = {"Arguments": [(known.metavar, known.help) for known in _params(command, "argument")]}
    tables |= _options(command, everything)
    for panel, made in grouped(subcommands.values(), lambda made: made.rich_help_panel).items():
        width = max(map(len, subcommands))
        tables[panel] = [(known.name.ljust(width), _paragraphs(known.help)[0]) for known in made]
    first = f"Usage: {context.command_path} "
    lines = [*_wrapped(usage(command), first, " " * len(first))]
    for paragraph in _paragraphs(command.help):
        lines += ["", *_wrapped(paragraph, "  ", "  ")]
    for title, rows in tables.items():
        lines += ["", f"{title}:", *_table(rows)] if rows else []
    if command.epilog:
        lines += ["", "Examples:", *(f"  {line}" for line in examples(context))]
    return "\n".join(_painted(line, bool(subcommands)) if color else line for line in lines)


def _painted(line: str, lists_commands: bool) -> str:
    """Colour a line of the help: its heading, the name of the command that it describes, and what a user can type."""
    if heading := re.match(r"\w[\w ]*:", line):
        return painted(heading[0], "heading") + in_roles(line[heading.end() :])
    if lists_commands and (name := re.match(r"  [a-z]+(?=  )", line)):
        return painted(name[0], "typed") + line[name.end() :]
    return in_roles(line)


def _wrapped(text: str, first: str, next: str) -> list[str]:
    """Break a text into lines of the terminal's width, of at most 78 characters, but never an option at its hyphens."""
    width = max(min(shutil.get_terminal_size().columns, 80) - 2, 50)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=next, break_on_hyphens=False)


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table; a long first cell has a line of its own."""
    width = min(max(len(first) for first, _ in rows), MAX_CELL)
    for first, text in rows:
        if len(first) > width:
            yield f"  {first}"
        start = first if len(first) <= width else ""
        yield from _wrapped(text, f"  {start:{width}}  ", " " * (width + 4))


def usage(command: Any) -> str:
    """Return the words that follow the name of a command: `[OPTIONS] PATH...`."""
    arguments = [known.metavar for known in _params(command, "argument")]
    return " ".join(["[OPTIONS]", *arguments, *(["COMMAND [ARGS]..."] if hasattr(command, "commands") else [])])


def examples(context: typer.Context) -> list[str]:
    """Return examples of the command that is being parsed, with the path that the user has given, if it exists."""
    words = context.meta[WORDS]
    path = next((shlex.quote(word) for word in words if word[:1] != "-" and os.path.lexists(word)), "")
    lines = [line.strip() for line in str(context.command.epilog).strip().splitlines()]
    return [re.sub(r"\b(PATH|DIR|A)\b", lambda _: path, line, count=1) if path else line for line in lines]


def _params(command: Any, kind: str) -> list[Any]:
    return [known for known in command.params if known.param_type_name == kind and not getattr(known, "hidden", False)]


def _options(command: Any, everything: bool) -> dict[str, list[tuple[str, str]]]:
    """Return tables of options by their headings."""
    options = _params(command, "option")
    if len(options) <= MANY:
        return {"Options": [_row(known) for known in options if known.name != "help_all"]}
    if everything:
        panels = grouped(options, lambda known: known.rich_help_panel or "Options")
        return {title: [_row(known) for known in panel] for title, panel in panels.items()}
    rows = [_row(known) for known in options if known.name in command.common]
    return {"Options": [*rows[:SHORT], ("--help-all", f"Show all {len(options)} options.")]}


def _row(option: Any) -> tuple[str, str]:
    """Return the spellings of an option with the placeholder of its value, and its help with its default."""
    words = sorted(option.opts, key=len)
    spelled = ", ".join(words) + (f" {option.metavar}" if option.metavar else "")
    spelled += "".join(f" / {word}" for word in option.secondary_opts)
    default = words[-1][2:] if option.default is True else option.default
    default = f"{default:g}" if isinstance(default, float) else default
    more = "  [required]" if option.required else f"  [default: {default}]" if default else ""
    return spelled, f"{option.help}{more}"


# -- the options that show it ------------------------------------------------------------------------------------------


def _shown(context: typer.Context, wanted: bool, everything: bool) -> None:
    if wanted and not context.resilient_parsing:
        show(help_of(context, in_color(sys.stdout), everything))
        raise typer.Exit


def _short(context: typer.Context, wanted: bool) -> None:
    _shown(context, wanted, everything=False)


def _full(context: typer.Context, wanted: bool) -> None:
    _shown(context, wanted, everything=True)


EAGER: dict[str, Any] = {"is_eager": True, "rich_help_panel": "Every command"}

Help = Annotated[bool, typer.Option("--help", "-h", callback=_short, help="Show this help.", **EAGER)]
HelpAll = Annotated[bool, typer.Option("--help-all", callback=_full, help="Show every option.", **EAGER)]
