"""Command lines of arguments and flags, which need no parser: most calls of `inspect` and `verify` are like that.

To import typer and to let it find out what a command takes costs more time than reading a small checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ckptools.cli.output_options import AS_ALWAYS
from ckptools.cli.record_options import flags_of


def plain_arguments(command: Callable[..., None], names: str, arguments: Sequence[str]) -> dict[str, Any] | None:
    """What a command is called with, by parameter; None where there is anything that typer has to look at.

    On Windows that is always so: there typer finds what a `*` in a path stands for.

    Args:
        command: the function of a command.
        names: of its positional parameters, as in `commands.ARGUMENTS`.
        arguments: what the user typed behind the command's name.
    """
    known = {**flags_of(command), **flags_of(AS_ALWAYS)}
    options = [argument for argument in arguments if argument.startswith("-")]
    if os.name == "nt" or not all(option in known for option in options):
        return None
    given = _positional(names.split(), [argument for argument in arguments if not argument.startswith("-")])
    return None if given is None else {**given, **{known[option]: True for option in options}}


def _positional(names: Sequence[str], values: Sequence[str]) -> dict[str, Any] | None:
    """The values by parameter; None where there are too few of them or too many."""
    repeats = names[-1].endswith("*")
    if len(values) < len(names) or (len(values) > len(names) and not repeats):
        return None
    single = names[:-1] if repeats else names
    given: dict[str, Any] = dict(zip(single, values, strict=False))
    return {**given, names[-1][:-1]: list(values[len(single) :])} if repeats else given
