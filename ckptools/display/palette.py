"""The palette: the words that say whether all is well, and the colours of terminals.

Colour is never the only sign: the words stay, and mean the same. Red is for what is wrong, never for a change that was
asked about. A text is painted after it was made printable, so that no name from a file brings a colour of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ckptools.model.verdict import Level

Mark = Literal["", "bad", "warn", "good", "change", "dim", "heading", "doubtful", "sound"]
"""What a text is: wrong, doubtful, right, a difference that was asked about, an aside, what others stand below; or a
headline of a doubtful or sound checkpoint."""

SGR: Mapping[Mark, str] = {
    "bad": "1;31", "warn": "33", "good": "32", "change": "1", "dim": "2", "heading": "1", "doubtful": "1;33",
    "sound": "1;32",
}  # fmt: skip
"""Select Graphic Rendition parameters of each. Source: ECMA-48, 8.3.117."""

WORDS: Mapping[Mark, tuple[str, ...]] = {
    "bad": ("FAIL", "BAD", "error", "NOT WHOLE", "NONE", "MISSING", "missing", "cut", "bad", "unreadable", "no: ",
            "DOES NOT LOAD", "shape", "LEFT OUT", "left out: ", "filled: ", "whole, but "),
    "warn": ("warn", "warning", "cannot be compared", "unexpected", "whole, ",
             "partly"),
    "good": ("ok", "yes", "whole", "loads", "same", "the same", "within tolerance", "checked: ", "wrote "),
    "change": ("differs", "only in A", "only in B", "DIFFERENT", "different:", "would write "),
    "dim": ("not judged", "seen", "listed", "not compared", "not counted", "same checksum", "in neither", "dtype"),
}  # fmt: skip
"""Words that a cell is, or a line begins with."""

MARKS: Mapping[Level, Mark] = {"bad": "bad", "doubtful": "warn", "good": "good"}
"""The mark of a verdict of each level."""

HEADLINES: Mapping[Level, Mark] = {"bad": "bad", "doubtful": "doubtful", "good": "sound"}
"""The mark of a headline of each level."""


def mark_of(text: str) -> Mark:
    """The mark of a verdict or status; "" for other words.

    Only what is known to be one is asked for: a layout may be `whole`, and a key of a checkpoint has any name.
    """
    return next((mark for mark, words in WORDS.items() if any(_begins(text, word) for word in words)), "")


def _begins(text: str, word: str) -> bool:
    return text == word or text.startswith((f"{word}:", f"{word};", word if word.endswith((" ", ":")) else f"{word}: "))


def painted(text: str, mark: Mark, color: bool = True) -> str:
    """A printable text in the colour of a mark, where there is colour; blanks around it have none."""
    bare = text.strip()
    if not (color and mark and bare):
        return text
    before, _, after = text.partition(bare)
    return f"{before}\x1b[{SGR[mark]}m{bare}\x1b[0m{after}"
