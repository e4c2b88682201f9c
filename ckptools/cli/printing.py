"""Printing: a command's output on stdout, errors, warnings and remarks on stderr; flushed at the end of the process."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TextIO

from ckptools.display.tables import PIPE, Screen
from ckptools.text import encodable, plural, printable


class Printing:
    """How much this process prints, and whether in colour; set from `OutputOptions`.

    `silent` is for nothing at all: another rank speaks for this one.
    """

    quiet = verbose = debug = silent = False
    color = "auto"


def in_color(stream: TextIO) -> bool:
    """Whether what is printed on a stream has colour: where it is a terminal that has any, unless the user says."""
    if Printing.color != "auto":
        return Printing.color == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def show(text: str, words: str = "") -> None:
    """Print to stdout; `words`, a key of `WORDS`, says which words have a colour on a terminal.

    A reader that closed the pipe, as `| head` does, changes no exit code: that is the verdict.
    """
    if Printing.silent:
        return
    text = _with_color(text, words, sys.stdout)
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Let everything that is still printed go nowhere, so that Python does not complain while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def remark_private(left_out: int) -> None:
    """Say how many private values were left out, and how to see them."""
    if left_out:
        remark(f"{plural(left_out, 'private value')} not shown: --private")


def remark(text: str) -> None:
    """Print lines on stderr, which are no part of the output; none where the user wants quiet."""
    if not Printing.quiet:
        _complain(text)


def _complain(text: str) -> None:
    if Printing.silent:
        return
    sys.stderr.write(f"{encodable(text, sys.stderr.encoding)}\n")
    sys.stderr.flush()


def say(message: str) -> None:
    """Print one line on stderr, with everything in it that a terminal could act on made visible."""
    # Where stderr cannot be written, the exit code still says it.
    with contextlib.suppress(OSError):
        _complain(_with_color(printable(message), "errors", sys.stderr))


# -- colour -----------------------------------------------------------------------------------------------------------
#
# It is never the only sign: the words stay, and mean the same.

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
    "errors": r"^(?:(?P<red>error)|(?P<yellow>warning))(?=:)",
    "inspect": rf"{VERDICTS}|^  (?P<bold>CK\d{{3}})(?=  )",
    "verify": rf"{VERDICTS}|^\S.*?  +{RESULTS}",
}
"""Patterns of the words that have a colour in the output of commands, and in the lines of errors.

Groups are named by colours, as in `CODES`, and behind a `_` by what makes the name unique."""


def _with_color(text: str, words: str, stream: TextIO) -> str:
    """The text with colour around the words that have one, where the stream has any."""
    if words not in WORDS or not in_color(stream):
        return text
    return re.sub(WORDS[words], _painted, text, flags=re.MULTILINE)


def _painted(found: re.Match[str]) -> str:
    group = found.lastgroup or "bold"
    start, end = (at - found.start() for at in found.span(group))
    return f"{found[0][:start]}\x1b[{CODES[group.partition('_')[0]]}m{found[0][start:end]}\x1b[0m{found[0][end:]}"


ROWS = 40
"""Rows of a table on a terminal."""


def screen(stream: TextIO | None = None) -> Screen:
    """Cut to the terminal that a stream leads to, stdout where none is given, and not at all in a pipe."""
    if not (stream or sys.stdout).isatty():
        return PIPE
    import shutil

    return Screen(shutil.get_terminal_size().columns, ROWS)


class Ending:
    """The end of the process: at once, which takes a tenth less of an inspect than to take its objects apart.

    Attributes:
        code: its exit code, when that is known; None where Python has more to say, such as a traceback.
        with_torch: end at once with torch imported too: gloo's threads may wait for Python's lock, and it for them.
            Otherwise torch's threads, and what a user's code in `ckptools shell` has open, end as they always do.
    """

    code: int | None = None
    with_torch = False

    @classmethod
    def leave(cls) -> None:
        """Flush what was printed, and end."""
        if cls.code is None or ("torch" in sys.modules and not cls.with_torch):
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(cls.code)
