"""A real process in a terminal of its own, without a window: what it writes there, and keys for it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path
from types import TracebackType

SECONDS = 90
QUIET = 0.4
"""The answer to a key has come when nothing more comes for so long."""


class Terminal:
    """`ckptools` with some arguments in a terminal; `output` is all that it has written.

    Args:
        arguments: of the command line.
        environment: variables beside those of this process.
    """

    def __init__(self, arguments: list[str], columns: int = 80, lines: int = 24, **environment: str) -> None:
        self.output = b""
        self._code: int | None = None
        variables = {name: value for name, value in os.environ.items() if name not in ("COLORTERM", "NO_COLOR")}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            command = [sys.executable, "-m", "ckptools", *arguments]
            os.execve(command[0], command, variables | environment)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def _read(self, seconds: float) -> bool:
        """Take what it has written; False if nothing came in so many seconds, or it has ended."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        try:
            found = os.read(self._fd, 1 << 16)
        except OSError:  # Linux says so where the other end is closed
            return False
        self.output += found
        return bool(found)

    def seen(self, text: bytes) -> None:
        """Wait until it has written something."""
        end = time.monotonic() + SECONDS
        while text not in self.output and time.monotonic() < end:
            self._read(0.1)
        assert text in self.output, self.output[-2000:]

    def until(self, text: bytes) -> None:
        """Wait until it has written something, and is quiet."""
        self.seen(text)
        while self._read(QUIET):
            pass

    def processor_seconds(self) -> float:
        """What it has used of the processor so far. Source: proc(5), `stat`."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def press(self, key: str) -> None:
        """Press a key, and wait until it is quiet."""
        os.write(self._fd, key.encode())
        while self._read(QUIET):
            pass

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._pid, number)

    def text(self, since: int = 0) -> str:
        """What it has written after so many bytes."""
        return self.output[since:].decode(errors="replace")

    def ended(self) -> int:
        """Wait for its end; return its exit code."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self._read(0.05)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                while self._read(0):
                    pass
                self._code = os.waitstatus_to_exitcode(status)
                return self._code
        raise AssertionError("it does not end")
