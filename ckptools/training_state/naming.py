"""What is known of an optimizer's names: which parameter each of its ids is, and how sure that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

Id = Any
"""What an optimizer calls a parameter: an int, or the fqn itself."""

UNNAMED = "?"
"""How a format that joins ranks by name calls a number that has none."""

TELL = "tell them with --names FROM"
FITS = "more than one parameter fits, or none"


class Naming(NamedTuple):
    """Which parameter each id of an optimizer is.

    Attributes:
        names: fqn by id, for the ids that have a name.
        by: the weakest of what names were given by: `fqn` (the file says them), `shape` (only one parameter has it),
            `order` (assumed: groups list parameters in the order of the module), `told` (by the user), `none`.
        assumed: ids whose names hold only if their group has the order of the module.
        unnamed: ids without a name.
        note: one line for people, empty when the file has the names.
    """

    names: Mapping[Id, str]
    by: Literal["fqn", "told", "shape", "order", "none"]
    assumed: tuple[Id, ...]
    unnamed: tuple[Id, ...]
    note: str


def note_of(proven: int, assumed: int, unnamed: int, why: str, whose: str = "the model") -> str:
    """What people should know of names that the file does not have."""
    told = ["keyed by number"]
    told += [f"{proven} named by a shape that only one parameter has"] if proven else []
    order = f"named in the order of {whose}, assumed to be that of the groups (shapes agree)"
    told += [f"{assumed} {order}"] if assumed else []
    told += [f"{unnamed} of {proven + assumed + unnamed} without a name ({why}): {TELL}"] if unnamed else []
    return "; ".join(told)


def named_when_read(naming: Naming, assumed: Collection[str]) -> Naming:
    """The naming of an optimizer in which a format's reader already put names for numbers, `assumed` ones by order."""
    mine = tuple(i for i in naming.names if i in assumed)
    if naming.by != "fqn" or not (mine or naming.unnamed):
        return naming
    names = {i: fqn for i, fqn in naming.names.items() if i not in naming.unnamed}
    by: Literal["fqn", "order"] = "order" if mine else "fqn"
    note = note_of(len(names) - len(mine), len(mine), len(naming.unnamed), FITS)
    return Naming(names, by, mine, naming.unnamed, note)
