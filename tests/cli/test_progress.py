"""The progress of a command, on a terminal of its own and in a pipe, by a clock that the test moves."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.cli.options import OpeningOptions
from ckptools.cli.printing import opened, say
from ckptools.cli.progress import Progress
from ckptools.cli.terminal import Printing
from ckptools.tensor_io.fetch_ahead import begin_stage
from tests.truth import FIXTURES

MIB = 1 << 20
UP = re.compile(r"\x1b\[(\d+)A")


class Terminal:
    """A pseudo-terminal that takes the place of stderr, and a screen that understands what progress writes."""

    def __init__(self, monkeypatch, columns: int = 80, encoding: str = "utf-8") -> None:
        self.reader, writer = pty.openpty()
        os.set_blocking(self.reader, False)
        self.stream = os.fdopen(writer, "w", encoding=encoding)
        self.encoding = encoding
        self.resize(columns)
        monkeypatch.setattr(sys, "stderr", self.stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def written(self) -> str:
        """Everything that was written since the last call."""
        found = b""
        while select.select([self.reader], [], [], 0)[0]:
            found += os.read(self.reader, 1 << 16)
        return found.decode(self.encoding)

    def lines(self) -> list[str]:
        """What is on the screen after that: a carriage return goes to the start of a line, and `K` erases it."""
        return [line.rpartition("\x1b[K")[2].rpartition("\r")[2] for line in self.written().split("\r\n")]


@pytest.fixture(autouse=True)
def printing(monkeypatch):
    """Settings that an earlier command of this process may have left, and a bar that a test leaves on its terminal."""
    for setting, value in (("quiet", False), ("silent", False), ("erase", None)):
        monkeypatch.setattr(Printing, setting, value)


@pytest.fixture
def terminals(monkeypatch):
    """Open a terminal in place of stderr; a fixture cannot, as pytest sets stderr anew before the test."""
    made: list[Terminal] = []

    def opened(**how) -> Terminal:
        made.append(Terminal(monkeypatch, **how))
        return made[-1]

    yield opened
    for terminal in made:
        terminal.stream.close()
        os.close(terminal.reader)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def after(progress: Progress, clock: Clock, seconds: float, nbytes: int = 0, name: str = "layers.0.weight") -> None:
    """Count bytes, and let some seconds pass."""
    clock.now += seconds
    progress(nbytes, name)
    progress.tick()


# -- on a terminal -----------------------------------------------------------------------------------------------------


def test_a_bar_shows_share_rate_and_time_left_from_the_first_second_on(terminals, clock):
    terminal = terminals()
    with Progress(100 * MIB, clock=clock, ticking=False) as progress:
        after(progress, clock, 0.9, 10 * MIB)
        assert terminal.written() == ""
        after(progress, clock, 0.1, 10 * MIB)
        (line,) = terminal.lines()
        bar = "█" * 3 + "▊" + "░" * 15
        assert line == f" 20%  {bar}  20.0 of 100.0 MiB  20.0 MiB/s  4 s left  lay...eight"
    assert terminal.lines() == [""]


def test_a_bar_is_there_before_the_first_byte_is(terminals, clock):
    terminal = terminals()
    progress = Progress(100 * MIB, clock=clock, ticking=False)
    clock.now += 1
    progress.tick()
    assert terminal.lines() == [f"  0%  {'░' * 19}  0 B of 100.0 MiB  0 B/s"]


def test_the_rate_is_that_of_the_last_ten_seconds(terminals, clock):
    terminal = terminals()
    progress = Progress(1000 * MIB, clock=clock, ticking=False)
    after(progress, clock, 1, 880 * MIB)  # was cached
    for _ in range(11):
        after(progress, clock, 1, MIB)
    assert "  1.0 MiB/s  1 min 49 s left" in terminal.written().rpartition("\r")[2]
    for _ in range(11):
        after(progress, clock, 1)
    assert "  0 B/s  layers" in terminal.written().rpartition("\r")[2]


@pytest.mark.parametrize(
    ("seconds", "words"), [(1, "1 s left"), (59, "59 s left"), (61, "1 min 1 s left"), (7300, "2 h 1 min left")]
)
def test_the_time_left_is_told_as_people_tell_it(terminals, clock, seconds, words):
    terminal = terminals()
    progress = Progress((seconds + 1) * MIB, clock=clock, ticking=False)
    after(progress, clock, 1, MIB)
    assert f"MiB/s  {words}" in terminal.written()


def test_of_an_unknown_total_bytes_and_rate_are_shown(terminals, clock):
    terminal = terminals()
    progress = Progress(clock=clock, ticking=False)
    after(progress, clock, 1)
    assert terminal.written() == ""
    after(progress, clock, 1, 6 * MIB)
    assert terminal.lines() == ["6.0 MiB  3.0 MiB/s  layers.0.weight"]


def test_items_are_counted(terminals, clock):
    terminal = terminals()
    progress = Progress(stage="looking into the run", noun="checkpoint", clock=clock, ticking=False)
    clock.now += 1
    progress.tick()
    assert terminal.lines() == ["looking into the run"]
    progress.item(Path("run/step-3"))
    progress.tick()
    assert terminal.lines() == ["looking into the run  1 checkpoint  step-3"]


def test_a_pass_is_called_by_its_name_and_may_take_more_bytes_than_were_expected(terminals, clock):
    terminal = terminals()
    progress = Progress(10 * MIB, clock=clock, ticking=False)
    after(progress, clock, 1, 10 * MIB)
    assert terminal.lines()[0].startswith("100%")
    begin_stage(progress, "reading back", 10 * MIB)
    after(progress, clock, 1, 10 * MIB // 2)
    assert "  5 s left" not in terminal.written()
    progress.tick()
    (line,) = terminal.lines()
    assert line.startswith(" 75%") and "15.0 of 20.0 MiB" in line and "░  reading back  " in line
    begin_stage(lambda nbytes, name: None, "reading back")  # a function of a user's


@pytest.mark.parametrize("columns", [200, 80, 60, 40, 20, 9])
def test_a_bar_fits_into_any_terminal_and_says_the_most_important_first(terminals, clock, columns):
    terminal = terminals(columns=columns)
    progress = Progress(100 << 30, clock=clock, ticking=False)
    begin_stage(progress, "comparing checksums")
    after(progress, clock, 1, 20 << 30, "layers." * 40)
    (line,) = terminal.lines()
    assert len(line) < columns and line.startswith(" 20%")
    assert ("4 s left" in line) == (columns > 15) and ("comparing checksums" in line) == (columns > 40)


def test_a_terminal_that_is_resized_gets_a_bar_of_its_new_width(terminals, clock):
    terminal = terminals()
    progress = Progress(100 << 30, clock=clock, ticking=False)
    after(progress, clock, 1, 20 << 30, "layers." * 40)
    assert len(terminal.lines()[0]) == 79
    terminal.resize(30)  # it wraps the bar into three lines, and the cursor is in the last of them
    progress.tick()
    written = terminal.written()
    assert written.startswith("\r\x1b[2A\x1b[J") and len(written.rpartition("\x1b[J")[2]) < 30
    terminal.resize(200)
    progress.tick()
    assert not UP.search(written := terminal.written()) and len(written) > 90


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_block_characters_gets_a_bar_of_others(terminals, clock, encoding):
    terminal = terminals(encoding=encoding)
    progress = Progress(100, clock=clock, ticking=False)
    after(progress, clock, 1, 50, "größe.weight")
    assert terminal.lines() == [f" 50%  {'#' * 9}{'.' * 10}  50 of 100 B  50 B/s  1 s left"]


def test_control_characters_in_a_name_do_not_reach_the_terminal(terminals, clock):
    terminal = terminals()
    progress = Progress(100, clock=clock, ticking=False)
    after(progress, clock, 1, 50, "w\x1b[31m\nx")
    assert terminal.written().count("\x1b") == 1


def test_a_message_stands_on_a_line_of_its_own_and_the_bar_below_it(terminals, clock):
    terminal = terminals()
    progress = Progress(100, clock=clock, ticking=False)
    after(progress, clock, 1, 50, "w")
    say("warning: rank 3 is slow")
    progress.tick()
    assert [line[:8] for line in terminal.lines()] == ["warning:", " 50%  ██"]


def test_a_bar_is_gone_before_an_error_is_printed(terminals, clock):
    terminal = terminals()
    with pytest.raises(KeyboardInterrupt), Progress(100, clock=clock, ticking=False) as progress:
        after(progress, clock, 1, 50, "w")
        raise KeyboardInterrupt
    say("error: interrupted")
    assert terminal.lines() == ["error: interrupted", ""]


def test_the_bar_is_drawn_while_the_work_goes_on(terminals):
    terminal = terminals()
    seconds = iter([0.0])
    with Progress(100, clock=lambda: next(seconds, 60.0)):  # a second has passed at its first look
        assert select.select([terminal.reader], [], [], 60)[0]
        assert terminal.written().startswith("\r\x1b[K  0%  ░")
    assert terminal.written().endswith("\r\x1b[K")


INTERRUPTED = """
import os, signal, sys
from ckptools.cli.progress import Progress
seconds = iter([0.0])
print("before", flush=True)
with Progress(100, clock=lambda: next(seconds, 60.0), ticking=False) as progress:
    progress(50, "w")
    progress.tick()
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupted_command_leaves_no_half_of_a_bar(terminals):
    terminal = terminals()
    child = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], stdout=terminal.stream, stderr=terminal.stream, check=False, timeout=60
    )
    written = terminal.written()
    assert child.returncode != 0 and " 50%  █" in written
    assert written.partition(" left")[2].startswith("  w\r\x1b[KTraceback")


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_where_there_is_no_terminal_a_plain_line_is_printed_every_ten_seconds(capsys, clock):
    with Progress(100 * MIB, clock=clock, ticking=False) as progress:
        begin_stage(progress, "reading back")
        for _ in range(25):
            after(progress, clock, 1, MIB, "w\x1b[31m")
    assert capsys.readouterr().err.splitlines() == [
        "[00:10]  10%  reading back  10.0 of 100.0 MiB  1.0 MiB/s  1 min 30 s left",
        "[00:20]  20%  reading back  20.0 of 100.0 MiB  1.0 MiB/s  1 min 20 s left",
    ]


def test_a_terminal_that_cannot_erase_gets_such_lines_too(terminals, clock, monkeypatch):
    terminal = terminals()
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(100, clock=clock, ticking=False)
    after(progress, clock, 5, 50, "w")
    assert terminal.written() == ""
    after(progress, clock, 5, 1, "w")
    assert terminal.lines() == ["[00:10]  51%  51 of 100 B  5 B/s  10 s left", ""]


@pytest.mark.parametrize("setting", ["quiet", "silent"])
def test_quiet_hides_progress_and_so_do_the_ranks_beside_the_first(terminals, clock, monkeypatch, setting):
    terminal = terminals()
    monkeypatch.setattr(Printing, setting, True)
    with Progress(100, clock=clock) as progress:
        after(progress, clock, 60, 50)
        assert progress._thread is None
    assert terminal.written() == ""


def test_a_closed_stderr_does_not_stop_the_work(clock, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(100, clock=clock, ticking=False) as progress:
        stream.close()
        after(progress, clock, 60, 50)


def test_a_checkpoint_that_is_opened_again_counts_no_files_where_nothing_shows_them():
    found = opened([str(FIXTURES / "torch2.4.1-fsdp2-w3")], OpeningOptions())
    assert found.options is not None and found.options.on_file is None


@pytest.mark.parametrize("command", ["inspect", "verify", "stats", "ls", "doctor"])
def test_a_short_command_shows_none(command):
    found = CliRunner().invoke(app, [command, str(FIXTURES / "torch2.4.1-fsdp2-w3")])
    assert "%" not in found.stderr and "reading the structure" not in found.stderr and "\x1b" not in found.stderr
