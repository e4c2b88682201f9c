"""Where the errors of every command become a line on stderr and an exit code."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

from ckptools.cli.output_options import with_output
from ckptools.cli.printing import Output, discard_stdout, say
from ckptools.cli.ranks import with_other_ranks
from ckptools.cli.record_options import call
from ckptools.errors import CkptoolsError
from ckptools.text import clip_middle

BUG_EXIT = 70
INTERRUPTED_EXIT = 130

MAX_PROBLEMS = 20
"""Lines of an error that has many reasons."""

MAX_LINE = 1000
"""Characters of a line of an error; names from files have any number."""


def one_line_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose options are flat, and whose every error is a line on stderr and the right exit code."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        warnings.showwarning = _say_warning
        try:
            _run(function, with_output(given))
        except CkptoolsError as error:
            _say_error(error)
            raise SystemExit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            say(str(interrupt) or "interrupted; nothing was left behind")
            raise SystemExit(INTERRUPTED_EXIT) from None
        except BrokenPipeError:
            # Only what the user's code prints in a shell comes here; ending it is what its reader wanted.
            discard_stdout()
            raise SystemExit(0) from None
        except OSError as error:
            # What a format or writer meets is a CkptoolsError by now; this is the output of the command itself.
            say(f"error: {error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}")
            raise SystemExit(CkptoolsError.exit_code) from error
        except Exception as error:
            _say_bug(error)
            raise SystemExit(BUG_EXIT) from error

    return command


def _run(function: Callable[..., None], given: dict[str, Any]) -> None:
    with with_other_ranks(function.__name__, given):
        if not Output.verbose:
            call(function, given)
            return
        from ckptools.cli.measured import measured

        with measured():
            call(function, given)


def _say_error(error: CkptoolsError) -> None:
    say(f"error: {_clipped(str(error))}")
    for line in _more_of(error):
        say(f"       {_clipped(line)}")


def _more_of(error: CkptoolsError) -> list[str]:
    """What else is wrong, behind the first problem, which the error itself tells."""
    problems = getattr(error, "problems", ())[1:]
    if not problems:
        return []
    from ckptools.views.problems import error_lines

    return error_lines(problems)[: MAX_PROBLEMS - 1]


def _clipped(line: str) -> str:
    """The line without the middle of what is too long: it begins with the file and ends with what to do."""
    return clip_middle(line, MAX_LINE)


def _say_bug(error: Exception) -> None:
    import traceback

    if Output.debug or os.environ.get("CKPTOOLS_DEBUG"):
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    say(
        f"error: a bug in ckptools: {type(error).__name__}: {error} ({where.name}:{where.lineno}); "
        "please report it with the output of --debug"
    )


def _say_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print our own warnings as a line, and nobody else's."""
    if category.__module__.startswith("ckptools"):
        say(f"warning: {message}")
