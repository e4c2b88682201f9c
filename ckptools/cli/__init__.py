"""The command line: one thin file per command, one place where errors become a line and an exit code.

Exit codes: 0 done; 1 problems found; 2 usage; 3 unreadable; 4 refused; 70 a bug of ours; 130 interrupted. A reader that
closes the pipe early does not change them.
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
    atexit.register(Ending.leave)  # first of all, so that it is run last
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
    except OSError as error:  # of the help, which no command prints
        say_output_error(error)
        raise SystemExit(CkptoolsError.exit_code) from error


def __getattr__(name: str) -> Any:
    """Put `app`, the command line with all its commands, together when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module 'ckptools.cli' has no attribute {name!r}")
    from ckptools.cli.program import program

    return globals().setdefault("app", program(HELP, map(function_of, COMMANDS), GROUPS))
