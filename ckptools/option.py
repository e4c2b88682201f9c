"""A field of a record that is also an option of a command: declared, explained and given its default once."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal


def option(
    default: Any,
    help: str,
    flag: str | None = None,
    hidden: bool = False,
    metavar: str | None = None,
    completed: Literal["", "keys", "sections"] = "",
    typed: Any = None,
) -> Any:
    """Make a field that is also an option of a command.

    Args:
        default: its default value.
        help: one line for `--help`, which also documents the field.
        flag: its spelling; None makes `--world-size` of `world_size`. Several spellings are separated by spaces.
        hidden: whether `--help` leaves it out.
        metavar: placeholder for its value in `--help`; None for the name of its type.
        completed: names of the given checkpoint that a shell offers as completions.
        typed: its type on the command line, if Python accepts more types; None for the field's type.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "flag": flag,
            "hidden": hidden,
            "metavar": metavar,
            "completed": completed,
            "typed": typed,
        },
    )
