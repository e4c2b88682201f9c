"""Mistakes on the command line that typer finds, in the words of ckptools' other errors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer

from ckptools.cli.help import WORDS, examples, usage
from ckptools.errors import UsageError
from ckptools.text import clip_middle

MISTAKE: type[Exception] = typer.BadParameter.__mro__[1]
"""The class of every mistake, which typer does not export: the base of `BadParameter`."""

MAX_WORD = 80
"""Characters of a user's word in a message."""


def whole_number(text: str) -> int:
    """Parse the value of an option."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter("expected a whole number") from None


def decimal_number(text: str) -> float:
    """Parse the value of an option."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter("expected a number") from None


@contextmanager
def in_our_words(context: typer.Context) -> Iterator[None]:
    """Raise mistakes that typer finds within the block as `UsageError`."""
    try:
        yield
    except MISTAKE as mistake:
        raise UsageError(None, _sentence(mistake, context)) from mistake


def _sentence(mistake: Any, context: typer.Context) -> str:
    """Say in one line what is wrong, what was expected, and what to do."""
    command: Any = context.command
    kind, param = type(mistake).__name__, getattr(mistake, "param", None)
    name = (
        ""
        if param is None
        else param.metavar.strip("[].")
        if param.param_type_name == "argument"
        else max(param.opts, key=len)
    )
    if kind == "NoSuchOption":
        return _no_such_option(mistake.option_name, context)
    if kind == "MissingParameter":
        return f"{name} is missing; for example: {examples(context)[0]}"
    if kind == "BadOptionUsage":
        known = [option for option in command.params if mistake.option_name in option.opts]
        lacks = known and not known[0].is_flag
        fault = f"{known[0].metavar}: the value is missing" if lacks else "takes no value"
        return f"{mistake.option_name} {fault}; see {context.command_path} --help"
    given, more, _ = command.make_parser(context).parse_args([*context.meta[WORDS]])
    if kind == "BadParameter" and param is not None:
        choices = str(param.metavar).split("|")
        expected = f"expected {' or '.join(choices)}" if choices[1:] else mistake.message
        return f"{name} {_clipped(shlex.quote(given[param.name]))}: {expected}"
    if more:
        return f"{_clipped(more[0])}: one argument too many; expected {context.command_path} {usage(command)}"
    return f"{mistake.message.rstrip('.')}; see {context.command_path} --help"


def _no_such_option(word: str, context: typer.Context) -> str:
    command: Any = context.command
    if hasattr(command, "commands"):
        return f"{_clipped(word)}: no option of ckptools itself; options of a command stand behind its name"
    known = [word for param in command.params if not param.hidden for word in (*param.opts, *param.secondary_opts)]
    return f"{_clipped(word)}: no such option; {_near(word, known)}{context.command_path} --help-all lists all"


def no_such_command(word: str, known: Collection[str]) -> str:
    """Say that a word is not the name of a command; a path probably lacks the command before it."""
    if os.path.lexists(word):
        path = shlex.quote(word)
        return f"{word}: a path, where the name of a command is expected: ckptools inspect {path}"
    return f"{_clipped(word)}: no such command; {_near(word, known)}ckptools --help lists all"


def _near(word: str, known: Collection[str]) -> str:
    near = get_close_matches(word, known, n=3)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _clipped(word: object) -> str:
    return clip_middle(str(word), MAX_WORD)
