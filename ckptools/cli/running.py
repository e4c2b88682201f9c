"""Run any command: set its output options, join its other ranks, and report its errors and its cost."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ckptools.cli.options import OutputOptions, call, fill
from ckptools.cli.printing import Ending, discard_stdout, remark, say, say_output_error, say_rendered, screen
from ckptools.cli.terminal import Printing
from ckptools.errors import CkptoolsError
from ckptools.text import clip_middle, duration, size

BUG_EXIT = 70
INTERRUPTED_EXIT = 130

LIBRARIES = ("torch", "numpy", "safetensors", "tabulate")
"""Libraries that `pip install --no-deps` leaves out, and some commands do not need."""

MAX_LINE = 1000
"""Longest line of an error in characters; a name in a file may have any length."""


def one_line_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command with flat options that turns every error into a line on stderr and an exit code."""

    @functools.wraps(function)
    def command(**given: Any) -> None:
        warnings.showwarning = _say_warning
        try:
            for name, value in vars(fill(OutputOptions, given)).items():
                setattr(Printing, name, value)
            with with_other_ranks(function.__name__, given), measured() if Printing.verbose else nullcontext():
                call(function, given)
        except CkptoolsError as error:
            _say_error(error)
            raise SystemExit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            say(str(interrupt) or "interrupted; nothing was left behind")
            raise SystemExit(INTERRUPTED_EXIT) from None
        except BrokenPipeError:
            # Only output of the user's code in a shell gets here; its reader closed the pipe.
            discard_stdout()
            raise SystemExit(0) from None
        except OSError as error:
            # Formats and writers raise CkptoolsError; an OSError is about the output of the command itself.
            say_output_error(error)
            raise SystemExit(CkptoolsError.exit_code) from error
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
                say(f"error: this needs {error.name}, which is not installed: pip install {error.name}")
                raise SystemExit(CkptoolsError.exit_code) from error
            _say_bug(error)
            raise SystemExit(BUG_EXIT) from error

    return command


def _say_error(error: CkptoolsError) -> None:
    """Print an error in a line, and below it the causes behind its problems.

    A long line is cut in its middle, as it begins with the file and ends with advice.
    """
    said = clip_middle(str(error), MAX_LINE)
    say(f"error: {said}")
    problems = getattr(error, "problems", ())
    if problems:
        from ckptools.display.tables import error_lines

        say_rendered(error_lines(problems, said, screen(sys.stderr)))


def _say_bug(error: Exception) -> None:
    import traceback

    if Printing.debug or os.environ.get("CKPTOOLS_DEBUG"):
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    say(
        f"error: a bug in ckptools: {type(error).__name__}: {error} ({where.name}:{where.lineno}); "
        "please report it with the output of --debug"
    )


def _say_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning of ckptools as a line, and drop warnings of other packages."""
    if category.__module__.startswith("ckptools"):
        say(f"warning: {message}")


SHARED = ("consolidate", "verify", "stats", "diff")
"""Commands whose work is shared among ranks; for other commands, each rank does all the work."""


@contextmanager
def with_other_ranks(command: str, given: dict[str, Any]) -> Iterator[None]:
    """Share a command's work with all ranks that were started with this one; alone if there are none.

    `given["jobs"]` is set to this rank's share of the machine's cores.
    """
    if command not in SHARED or not is_a_rank():
        yield
        return
    from ckptools.cluster.environment import calm_torch, derive

    place = derive(os.environ)
    if (place.number("WORLD_SIZE") or 1) < 2:
        yield
        return
    calm_torch()  # before torch is imported
    from ckptools.cluster.ranks import joined

    beside = place.number("LOCAL_WORLD_SIZE") or 1
    # More than 8 threads do not copy faster.
    given["jobs"] = given.get("jobs") or max(1, min(8, (os.cpu_count() or 1) // beside))
    Ending.with_torch = True
    try:
        with joined(place, " ".join(sys.argv[1:]), remark) as ranks:
            Printing.silent = ranks.rank != 0
            yield
    except (Exception, KeyboardInterrupt):
        # One rank comes here with an error that all share, and every rank with a bug of ours that it meets.
        Printing.silent = False
        raise


def is_a_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    from ckptools.cluster.environment import starter_of

    return starter_of(os.environ) is not None


@contextmanager
def measured() -> Iterator[None]:
    """Report the time, memory and bytes read of the command run within the block."""
    started, used = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        wall, cpu = time.perf_counter() - started, time.process_time() - used
        from ckptools.files.opening import File

        # Bytes read by other processes are not counted.
        read = f"{size(File.total_read)} read from files"
        remark(f"took {duration(wall)}, {duration(cpu)} of CPU{_memory()}; {read}")


def _memory() -> str:
    """Peak memory of this process, in words, if the system tells it."""
    try:
        # On Linux, getrusage would include the memory of the process that started this one.
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        nbytes = int(found[1]) * 1024 if found else 0
    except OSError:
        nbytes = _peak_by_getrusage()
    return f"; {size(nbytes)} of memory at most" if nbytes else ""


def _peak_by_getrusage() -> int:
    """Peak memory in bytes; 0 on Windows, which has no getrusage."""
    try:
        import resource
    except ImportError:
        return 0
    # macOS counts bytes, other systems kilobytes. Source: getrusage(2) of each.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
