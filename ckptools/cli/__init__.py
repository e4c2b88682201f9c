"""The command line: a short module for each command, and one place that turns errors into a line and an exit code.

Exit codes: 0 done; 1 problems found; 2 usage; 3 unreadable; 4 refused; 70 a bug in ckptools; 130 interrupted. A reader
that closes the pipe early does not change them.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any

from ckptools.cli.printing import Ending, open_closed_streams, say_output_error
from ckptools.cli.start import COMMANDS, GROUPS, HELP, function_of, start
from ckptools.errors import CkptoolsError

if TYPE_CHECKING:
    import typer

    app: typer.Typer


def run() -> None:
    """Entry point of the `ckptools` command."""
    atexit.register(Ending.leave)  # registered first, so that it runs last
    open_closed_streams()
    words = sys.argv[1:]
    if words[:1] == ["help"]:
        words = sys.argv[1:] = [*words[1:2], "--help"]
    try:
        start(words)
        Ending.code = 0
    except SystemExit as done:
        if done.code is None or isinstance(done.code, int):
            Ending.code = done.code or 0
        raise
    except OSError as error:  # while printing the help, outside of any command
        say_output_error(error)
        raise SystemExit(CkptoolsError.exit_code) from error


def __getattr__(name: str) -> Any:
    """Make `app`, the command line with all its commands, on first use."""
    if name != "app":
        raise AttributeError(f"module 'ckptools.cli' has no attribute {name!r}")
    from ckptools.cli.program import program

    return globals().setdefault("app", program(HELP, map(function_of, COMMANDS), GROUPS))
