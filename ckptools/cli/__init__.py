"""The command line: one thin file per command, one place where errors become a line and an exit code.

Exit codes: 0 done; 1 problems found; 2 usage; 3 unreadable; 4 refused; 70 a bug of ours; 130 interrupted. A reader that
closes the pipe early does not change them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable

import typer

from ckptools.cli.consolidate import consolidate
from ckptools.cli.create import create
from ckptools.cli.formats import formats
from ckptools.cli.inspect import inspect
from ckptools.cli.printing import discard_stdout
from ckptools.cli.shell import shell
from ckptools.cli.verify import verify
from ckptools.errors import CkptoolsError

COMMANDS: tuple[Callable[..., None], ...] = (inspect, verify, consolidate, create, shell, formats)

KEPT = frozenset({"torch", "ckptools.files.compressed"})
"""Modules that have something to undo when the process ends: threads and process groups, temporary files."""

BUG_EXIT = 70
INTERRUPTED_EXIT = 130
MAX_PROBLEMS = 20


def say(message: str) -> None:
    """Print one line on stderr, with everything in it that a terminal could act on made visible."""
    from ckptools.text import encodable, printable

    # Where stderr cannot be written there is nobody to tell; the exit code still says it.
    with contextlib.suppress(OSError):
        typer.echo(encodable(printable(message), sys.stderr.encoding), err=True)


def _more_of(error: CkptoolsError) -> list[str]:
    """What else is wrong, behind the first problem, which the error itself tells."""
    problems = getattr(error, "problems", ())[1:]
    if not problems:
        return []
    from ckptools.views.problems import error_lines

    return error_lines(problems)[: MAX_PROBLEMS - 1]


MAX_LINE = 1000
"""Characters of an error; names from files have any number."""


def _clipped(line: str) -> str:
    """The line without the middle of what is too long: it begins with the file and ends with what to do."""
    from ckptools.text import clip_middle

    return clip_middle(line, MAX_LINE)


def _say_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print our own warnings as a line, and nobody else's."""
    if category.__module__.startswith("ckptools"):
        say(f"warning: {message}")


def one_line_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Turn every error of a command into one line on stderr and the right exit code."""

    @functools.wraps(function)
    def command(*args: object, **kwargs: object) -> None:
        warnings.showwarning = _say_warning
        try:
            function(*args, **kwargs)
        except CkptoolsError as error:
            say(f"error: {_clipped(str(error))}")
            for line in _more_of(error):
                say(f"       {_clipped(line)}")
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            say("interrupted; nothing was left behind")
            raise typer.Exit(INTERRUPTED_EXIT) from None
        except BrokenPipeError:
            # Only what the user's code prints in a shell comes here; ending it is what its reader wanted.
            discard_stdout()
            raise typer.Exit(0) from None
        except OSError as error:
            # What a format or writer meets is a CkptoolsError by now; this is the output of the command itself.
            say(f"error: {error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}")
            raise typer.Exit(CkptoolsError.exit_code) from error
        except typer.Exit:
            raise
        except Exception as error:
            if os.environ.get("CKPTOOLS_DEBUG"):
                traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            say(
                f"error: a bug in ckptools: {type(error).__name__}: {error} ({where.name}:{where.lineno}); "
                "please report it with the output of CKPTOOLS_DEBUG=1"
            )
            raise typer.Exit(BUG_EXIT) from error

    return command


def program(commands: Iterable[Callable[..., None]]) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="ckptools",
        help="Open, check and consolidate distributed PyTorch checkpoints offline.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(lambda: None)  # without it, a single command would not be called by its name
    for function in commands:
        made.command(no_args_is_help=function is not formats)(one_line_errors(function))
    return made


app = program(COMMANDS)


def run() -> None:
    """Entry point of the `ckptools` command. A polite kill ends it as Ctrl-C does, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The options of the other commands take longer to put together than reading a small file.
    named = [function for function in COMMANDS if sys.argv[1:2] == [function.__name__]]
    try:
        program(named or COMMANDS)()
    except SystemExit as done:
        if KEPT.isdisjoint(sys.modules) and isinstance(done.code, int | None):
            _leave(done.code or 0)
        raise


def _leave(code: int) -> None:
    """End the process without taking its objects apart one by one, which takes an eighth of an inspect's time.

    Only where none of `KEPT` was loaded: nothing else here has anything to undo.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            pass
        except OSError as error:
            say(f"error: standard output: {(error.strerror or '').lower()}")
            code = CkptoolsError.exit_code
    os._exit(code)
