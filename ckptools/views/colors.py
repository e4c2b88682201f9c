"""Colour for words that say whether all is well. It is never the only sign: the words stay, and mean the same."""

from __future__ import annotations

import re

CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}
"""Select Graphic Rendition parameters. Source: ECMA-48, 8.3.117."""

RESULTS = r"(?:(?P<red>FAIL)|(?P<yellow>warn)|(?P<green>ok)|(?P<dim>skip))(?=  |$)"
"""Results of checks, in a column of their own."""

VERDICTS = (
    r"^(?:(?P<red_verdict>NOT WHOLE(?=: )|whole(?=, but ))"
    r"|(?P<yellow_verdict>whole(?=, (?:not joinable|\d+ warnings?): ))|(?P<green_verdict>whole(?=: ))"
    r"|(?P<yellow_listed>all \d+ .+ are here(?=; contents not compared)))"
)
"""Headlines: red where something is wrong, yellow where something is doubtful."""

WORDS = {
    "errors": re.compile(r"^(?:(?P<red>error)|(?P<yellow>warning))(?=:)", re.MULTILINE),
    "inspect": re.compile(rf"{VERDICTS}|^  (?P<bold>CK\d{{3}})(?=  )", re.MULTILINE),
    "verify": re.compile(rf"{VERDICTS}|^\S.*?  +{RESULTS}", re.MULTILINE),
}
"""What has a colour in what a command prints, and in the lines of errors."""


def painted(text: str, words: re.Pattern[str]) -> str:
    """The text with colour around what a pattern finds.

    Args:
        text: lines without control characters.
        words: its groups are named by colours, as in `CODES`, and behind a `_` by what else tells two apart.
    """
    return words.sub(_painted, text)


def _painted(found: re.Match[str]) -> str:
    group = found.lastgroup or "bold"
    start, end = (at - found.start() for at in found.span(group))
    return f"{found[0][:start]}\x1b[{CODES[group.partition('_')[0]]}m{found[0][start:end]}\x1b[0m{found[0][end:]}"
