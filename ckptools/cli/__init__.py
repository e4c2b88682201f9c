"""The command line: one thin file per command, one place where errors become a line and an exit code.

Exit codes: 0 done; 1 problems found; 2 usage; 3 unreadable; 4 refused; 70 a bug of ours; 130 interrupted. A reader that
closes the pipe early does not change them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptools.cli.commands import ARGUMENTS, COMMANDS, function_of, help_text
from ckptools.cli.ending import ended_at_once
from ckptools.cli.printing import remark, show

if TYPE_CHECKING:
    import typer

    app: typer.Typer

USAGE_EXIT = 2

WIDTH = 80
"""Columns beyond which help is not laid out any wider."""


def run() -> None:
    """Entry point of the `ckptools` command. A polite kill ends it as Ctrl-C does, so that nothing is left behind.

    Only the command that is called is imported, and typer only where there is an option to parse: with all its
    commands it takes longer to start than a small checkpoint to read.
    """
    arguments = sys.argv[1:] = _without_help_command(sys.argv[1:])
    name = arguments[0] if arguments else ""
    with ended_at_once():
        if "_CKPTOOLS_COMPLETE" not in os.environ and arguments in ([], ["-h"], ["--help"]) and _has_80_columns():
            _show_help(asked=bool(arguments))
        import signal

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not (name in ARGUMENTS and _run_without_typer(name, arguments[1:])):
            from ckptools.cli.program import program

            program([name] if name in COMMANDS else COMMANDS)()


def _without_help_command(arguments: Sequence[str]) -> list[str]:
    """`help` and `help COMMAND` spelled as `--help`."""
    if not arguments or arguments[0] != "help":
        return list(arguments)
    return [*arguments[1:2], "--help"]


def _run_without_typer(name: str, arguments: Sequence[str]) -> bool:
    """Run a command if it is given nothing to parse; return whether it was."""
    from ckptools.cli.exit_codes import one_line_errors
    from ckptools.cli.plain_arguments import plain_arguments

    function = function_of(name)
    given = plain_arguments(function, ARGUMENTS[name], arguments)
    if given is None:
        return False
    one_line_errors(function)(**given)
    return True


def _show_help(asked: bool) -> None:
    """Print the list of commands and exit; where nobody asked for it, that is a usage error.

    Raises:
        SystemExit: always.
    """
    main = sys.modules["__main__"]
    name = f"python -m {main.__package__}" if main.__package__ else os.path.basename(sys.argv[0])  # noqa: PTH119
    if not asked:
        remark(help_text(name))
        raise SystemExit(USAGE_EXIT)
    show(help_text(name))
    raise SystemExit(0)


def _has_80_columns() -> bool:
    """Whether help is laid out as where there is no terminal; typer does it where there is less room."""
    told = os.environ.get("COLUMNS", "")
    if told:
        return told.isdecimal() and int(told) >= WIDTH
    try:
        return not sys.stdout.isatty() or os.get_terminal_size().columns >= WIDTH
    except OSError:
        return False


def __getattr__(name: str) -> Any:
    """Put `app`, the command line with all its commands, together when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module 'ckptools.cli' has no attribute {name!r}")
    from ckptools.cli.program import program

    return globals().setdefault("app", program(COMMANDS))
