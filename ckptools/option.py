"""A field of a record that is an option of a command too: declared, explained and given its default once."""

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
    """Make a field that is an option of a command too.

    Args:
        default: its value where nothing is said.
        help: one line for `--help`, which is also what a reader of the record needs to know.
        flag: how it is spelled; None makes `--world-size` of `world_size`. Several spellings have spaces between them.
        hidden: left out of `--help`.
        metavar: what stands for its value in `--help`; None for the name of its type.
        completed: what of the checkpoint on the command line a shell completes it by.
        typed: its type on the command line, where Python takes more; None for that of the field.
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
