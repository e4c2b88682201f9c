"""How much room there is for what is printed."""

from __future__ import annotations

import sys

from ckptools.views.tables import PIPE, Screen

ROWS = 40
"""Rows of a table on a terminal."""


def screen() -> Screen:
    """Cut to the terminal, and not at all in a pipe."""
    if not sys.stdout.isatty():
        return PIPE
    import shutil

    return Screen(shutil.get_terminal_size().columns, ROWS)
