"""What a terminal shows: its size, and the colours of verdicts, and of commands, options and codes.

Nothing that reads a checkpoint is imported here, so that `--version` and errors cost little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ckptools.model.verdict import Level


class Screen(NamedTuple):
    """Limits of the output: characters per line, rows per table (both None in a pipe), and whether it has colour.

    Rows are `limited` if the user gave their number.
    """

    width: int | None = None
    rows: int | None = None
    color: bool = False
    limited: bool = False


PIPE = Screen()

# Colour only repeats the meaning of words. Red means a fault, never a difference that the user asked about. A text is
# coloured after it was made printable, so that a name from a file cannot contain colours.


Mark = Literal["", "bad", "warn", "good", "change", "dim", "heading", "doubtful", "sound", "values", "typed"]
"""Meaning of a text: a fault, a warning, a good result, a difference the user asked about, an aside, a heading; the
headline of a doubtful or sound checkpoint; values, in which only what is not finite is coloured; or a command or option
that the user can type."""

SGR: Mapping[Mark, str] = {
    "bad": "1;31", "warn": "33", "good": "32", "change": "1", "dim": "2", "heading": "1", "doubtful": "1;33",
    "sound": "1;32", "typed": "36",
}  # fmt: skip
"""Select Graphic Rendition parameters of each mark. Source: ECMA-48, 8.3.117."""

COUNTED = r"[1-9]\d* (?:elements? )?(?:NaN|Inf|infinite|not finite)"
NOT_FINITE = re.compile(rf"""(?<![\w.'"-])(?:-?(?:nan|inf)|{COUNTED})(?![\w.'"])""")
"""Floats that are not finite, as Python writes them, and counts of them; a text among values has quotes around it."""

WORDS: Mapping[Mark, tuple[str, ...]] = {
    "bad": ("FAIL", "BAD", "error", "NOT WHOLE", "NONE", "MISSING", "missing", "cut", "bad", "unreadable", "no: ",
            "DOES NOT LOAD", "shape", "LEFT OUT", "left out: ", "filled: ", "whole, but "),
    "warn": ("warn", "warning", "cannot be compared", "unexpected", "whole, ",
             "partly"),
    "good": ("ok", "yes", "whole", "loads", "same", "the same", "within tolerance", "checked: ", "wrote "),
    "change": ("differs", "only in A", "only in B", "DIFFERENT", "different:", "would write "),
    "dim": ("not judged", "seen", "listed", "not compared", "not counted", "same checksum", "in neither", "dtype"),
}  # fmt: skip
"""Words that make up a cell or begin a line, by their mark."""

MARKS: Mapping[Level, Mark] = {"bad": "bad", "doubtful": "warn", "good": "good"}
"""Mark of a verdict by its level."""

HEADLINES: Mapping[Level, Mark] = {"bad": "bad", "doubtful": "doubtful", "good": "sound"}
"""Mark of a headline by its level."""


def mark_of(text: str) -> Mark:
    """Return the mark of a verdict or status; "" for other words.

    Call it only for verdicts: a layout may be `whole`, and a key of a checkpoint may have any name.
    """
    return next((mark for mark, words in WORDS.items() if any(_begins(text, word) for word in words)), "")


def _begins(text: str, word: str) -> bool:
    return text == word or text.startswith((f"{word}:", f"{word};", word if word.endswith((" ", ":")) else f"{word}: "))


def painted(text: str, mark: Mark, color: bool = True) -> str:
    """Colour a printable text by its mark, if `color`; spaces around it stay uncoloured."""
    if mark == "values":
        return NOT_FINITE.sub(lambda found: painted(found[0], "bad"), text) if color else text
    bare = text.strip()
    if not (color and mark and bare):
        return text
    before, _, after = text.partition(bare)
    return f"{before}\x1b[{SGR[mark]}m{bare}\x1b[0m{after}"


NAMES = (
    "inspect", "doctor", "ls", "tree", "show", "browse", "verify", "watch", "stats", "diff", "match", "consolidate",
    "report", "explain", "create", "shell", "formats",
)  # fmt: skip
"""Names of the commands, which this module may not import from the command line."""

ROLES = re.compile(
    rf"(?P<typed>\bckptools ({'|'.join(NAMES)})\b|(?<![\w-])--[a-z][\w-]*|(?<![^\s(])-[a-z](?![\w-]))"
    r"|(?P<heading>\bCK\d{3}\b)"
)
"""Commands, options and problem codes in a text of ckptools."""


def in_roles(text: str, color: bool = True) -> str:
    """Colour the commands, options and problem codes in a printable text of ckptools, if `color`."""
    return ROLES.sub(lambda found: painted(found[0], "typed" if found["typed"] else "heading"), text) if color else text
