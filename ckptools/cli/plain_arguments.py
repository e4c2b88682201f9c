"""Command lines of paths and flags, which need no parser: most calls of `inspect` and `verify` are like that.

To import typer and to let it find out what a command takes costs more time than reading a small checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

TAKE_PATHS = ("inspect", "verify")
"""Commands whose only argument is paths."""


class PlainArguments(NamedTuple):
    """What a command is called with.

    Attributes:
        paths: its paths, at least one.
        flags: names of the parameters that are turned on.
    """

    paths: list[str]
    flags: dict[str, bool]


def plain_arguments(command: Callable[..., None], arguments: Sequence[str]) -> PlainArguments | None:
    """Tell paths and flags apart; None where there is anything else, which typer has to look at.

    On Windows that is always so: there typer finds what a `*` in a path stands for.
    """
    known = _flags_of(command)
    paths = [argument for argument in arguments if not argument.startswith("-")]
    options = [argument for argument in arguments if argument.startswith("-")]
    if os.name == "nt" or not paths or not all(option in known for option in options):
        return None
    return PlainArguments(paths, {known[option]: True for option in options})


def _flags_of(command: Callable[..., None]) -> dict[str, str]:
    """The flags of a command, with the names of their parameters: those that are off unless they are given."""
    code, defaults = command.__code__, command.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    with_defaults = zip(names[len(names) - len(defaults) :], defaults, strict=True)
    return {f"--{name.replace('_', '-')}": name for name, default in with_defaults if default is False}
