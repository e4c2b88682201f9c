"""Printing: a command's output on stdout; errors, warnings and remarks on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from ckptools.text import encodable, plural, printable


class Output:
    """How much this process says, and whether in colour; see `OutputOptions`, which a command is given.

    Attributes:
        quiet: nothing but the answer, and errors.
        verbose: also what was read, and how long it took.
        debug: where something goes wrong, Python's traceback too.
        color: `auto` (on a terminal), `always` or `never`.
        silent: nothing at all: another rank speaks for this one.
    """

    quiet = verbose = debug = silent = False
    color = "auto"


def in_color(stream: TextIO) -> bool:
    """Whether what is printed on a stream has colour: where it is a terminal that has any, unless the user says."""
    if Output.color != "auto":
        return Output.color == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def show(text: str, words: str = "") -> None:
    """Print to stdout. A reader that closed the pipe, as `| head` does, changes no exit code: that is the verdict.

    Args:
        text: what to print.
        words: whose words have a colour on a terminal: a key of `ckptools.views.colors.WORDS`.
    """
    if Output.silent:
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
    if not Output.quiet:
        _complain(text)


def _complain(text: str) -> None:
    if Output.silent:
        return
    sys.stderr.write(f"{encodable(text, sys.stderr.encoding)}\n")
    sys.stderr.flush()


def say(message: str) -> None:
    """Print one line on stderr, with everything in it that a terminal could act on made visible."""
    # Where stderr cannot be written there is nobody to tell; the exit code still says it.
    with contextlib.suppress(OSError):
        _complain(_with_color(printable(message), "errors", sys.stderr))


def _with_color(text: str, words: str, stream: TextIO) -> str:
    if not words or not in_color(stream):
        return text
    from ckptools.views.colors import WORDS, painted

    return painted(text, WORDS[words]) if words in WORDS else text
