"""Options of commands, which are also arguments of Python functions: declared once, and spelled for who reads of them.

A field of a record that is also an option is declared, explained and given its default by `option`. A message that
names an option says it with `spelled`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import field
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def option(
    default: Any,
    help: str,
    flag: str | None = None,
    common: bool = False,
    hidden: bool = False,
    metavar: str | None = None,
    completed: Literal["", "keys", "sections"] = "",
    typed: Any = None,
) -> Any:
    """Make a field of a record, or the default of a command's parameter, that is an option of the command.

    Args:
        default: its default value; `dataclasses.MISSING` if it has none and must be given.
        help: one line for `--help`, which also documents the field.
        flag: its spelling; None makes `--world-size` of `world_size`. Several spellings are separated by spaces.
        common: whether `--help` of a command with many options shows it; `--help-all` shows all options.
        hidden: whether every help leaves it out, and no shell completes it: an option that the command refuses.
        metavar: placeholder for its value in `--help`; None for the name of its type.
        completed: names of the given checkpoint that a shell offers as completions.
        typed: its type on the command line, if Python accepts more types; None for the field's type.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "flag": flag,
            "common": common,
            "hidden": hidden,
            "metavar": metavar,
            "completed": completed,
            "typed": typed,
        },
    )


# -- options in messages -----------------------------------------------------------------------------------------------


_FROM_PYTHON = ContextVar("called from Python", default=False)


def spelled(name: str, *value: object) -> str:
    """Name an option in a message, as its reader gives it: `--only model` in a command, `only='model'` in Python.

    A flag has the value True or False: `--deep` and `--no-deep` in a command, `deep=True` and `deep=False` in Python.

    Messages are made when they are needed, not as constants: who reads them is only known then.

    Args:
        name: as the command spells it, without its first dashes: `prefer-rank`.
        value: the option's value, if the message has one that was given or is to be given.
    """
    if _FROM_PYTHON.get():
        return name.replace("-", "_") + "".join(f"={one!r}" for one in value)
    if value and value[0] is False:
        return f"--no-{name}"
    return f"--{name}" + "".join(f" {one}" for one in value if one is not True)


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that messages made while it runs name its arguments as Python does.

    The command line calls no such function. Threads begin in the command line's words: start them in a copy of the
    context.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _FROM_PYTHON.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _FROM_PYTHON.reset(before)

    return called
