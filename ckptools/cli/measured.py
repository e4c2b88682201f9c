"""What a command cost, for `-v`: time, memory, bytes read."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptools.cli.printing import remark
from ckptools.text import duration, size


@contextmanager
def measured() -> Iterator[None]:
    """Say what the command that is run within this cost, once it is done."""
    started, used = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        wall, cpu = time.perf_counter() - started, time.process_time() - used
        remark(f"took {duration(wall)}, {duration(cpu)} of CPU{_memory()}{_read()}")


def _read() -> str:
    """Bytes that this process read of checkpoints; not those that other processes read for it."""
    from ckptools.files.opening import File

    return f"; {size(File.total_read)} read from files"


def _memory() -> str:
    """The most memory that this process had, where the system tells."""
    try:
        # Not getrusage on Linux: what it tells begins with the memory of the process that started this one.
        told = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        nbytes = int(told[1]) * 1024 if told else 0
    except OSError:
        nbytes = _peak_by_getrusage()
    return f"; {size(nbytes)} of memory at most" if nbytes else ""


def _peak_by_getrusage() -> int:
    """Bytes; 0 on Windows, which has no getrusage."""
    try:
        import resource
    except ImportError:
        return 0
    # In bytes on macOS, in kilobytes elsewhere. Source: getrusage(2) of each.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
