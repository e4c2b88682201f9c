"""Printing a command's output."""

from __future__ import annotations

import os
import sys

import typer


def show(text: str) -> None:
    """Print to stdout. A reader that closed the pipe, as `| head` does, changes no exit code: that is the verdict."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Let everything that is still printed go nowhere, so that Python does not complain while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
