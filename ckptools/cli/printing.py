"""Printing: a command's output on stdout, errors, warnings and remarks on stderr; flushed at the end of the process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from ckptools.display.palette import Mark, mark_of, painted
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


def show(text: str) -> None:
    """Print to stdout.

    A reader that closed the pipe, as `| head` does, changes no exit code: that is the verdict.
    """
    if Printing.silent:
        return
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Let everything that is still printed go nowhere, so that Python does not complain while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_output_error(error: OSError) -> None:
    """Say that the output of the command itself cannot be written, and write no more of it."""
    say(f"error: {error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}")
    discard_stdout()


def open_closed_streams() -> None:
    """Open what the caller has closed (`>&-`) to nowhere; the next file to be opened would take its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # for the ranks that `create` starts
            setattr(sys, name, os.fdopen(number, mode))


def remark_private(left_out: int) -> None:
    """Say how many private values were left out, and how to see them."""
    if left_out:
        remark(f"{plural(left_out, 'private value')} not shown: --private")


def remark(text: str) -> None:
    """Print lines on stderr, which are no part of the output; none where the user wants quiet."""
    if not Printing.quiet:
        _complain(text)


def say_rendered(lines: Iterable[str]) -> None:
    """Print lines on stderr that were made printable before they got their colours."""
    for line in lines:
        with contextlib.suppress(OSError):
            _complain(line)


def _complain(text: str) -> None:
    if Printing.silent:
        return
    sys.stderr.write(f"{encodable(text, sys.stderr.encoding)}\n")
    sys.stderr.flush()


def say(message: str, mark: Mark = "") -> None:
    """Print one line on stderr, with everything in it that a terminal could act on made visible.

    `mark` is that of the line; without one, an error or a warning has its own.
    """
    # Where stderr cannot be written, the exit code still says it.
    with contextlib.suppress(OSError):
        text, color = printable(message), in_color(sys.stderr)
        word, colon, rest = text.partition(":")
        severe = word in ("error", "warning") and not mark
        _complain(f"{painted(word, mark_of(word), color)}{colon}{rest}" if severe else painted(text, mark, color))


ROWS = 40
"""Rows of a table on a terminal."""


def screen(stream: TextIO | None = None) -> Screen:
    """Cut to the terminal that a stream leads to, stdout where none is given, and not at all in a pipe."""
    to = stream or sys.stdout
    if not to.isatty():
        return PIPE._replace(color=in_color(to))
    import shutil

    return Screen(shutil.get_terminal_size().columns, ROWS, in_color(to))


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
