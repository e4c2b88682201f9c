"""The real process in terminals as people have them over ssh: it starts, answers, and leaves the screen as it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from ckptools.cli import app
from tests.browse.terminal import Terminal
from tests.truth import FIXTURES

RANKS = str(FIXTURES / "torch2.13.0-fsdp1-sharded-w4")
RESTORED = b"\x1b[?1049l"


@pytest.mark.parametrize("term", ["xterm", pytest.param("screen", marks=pytest.mark.slow)])
@pytest.mark.parametrize("no_color", [{}, pytest.param({"NO_COLOR": "1"}, marks=pytest.mark.slow)])
def test_it_starts_and_leaves_in_terminals_of_few_colours(term, no_color):
    with Terminal(["browse", RANKS], TERM=term, **no_color) as terminal:
        terminal.until(b"all 4 rank files are here")
        terminal.press("q")
        assert terminal.ended() == 0
    assert RESTORED in terminal.output and b"\x1b[38;2" not in terminal.output


def test_without_colour_there_are_shades_of_grey_alone():
    with Terminal(["browse", RANKS], TERM="xterm-256color", NO_COLOR="1") as terminal:
        terminal.until(b"all 4 rank files are here")
        terminal.press("q")
        assert terminal.ended() == 0
    colors = {int(n) for n in re.findall(rb"[34]8;5;(\d+)", terminal.output)}
    # The greys of a terminal of 256 colours. Source: xterm's 256colres.h.
    assert all(n in (0, 7, 8, 15, 16, 59, 102, 145, 188, 231) or n >= 232 for n in colors), colors


def test_y_sends_the_command_line_to_the_clipboard_of_the_terminal():
    with Terminal(["browse", RANKS], TERM="xterm") as terminal:
        terminal.until(b"all 4 rank files are here")
        terminal.press("y")
        terminal.press("q")
        assert terminal.ended() == 0
    assert b"\x1b]52;c;" in terminal.output


def test_a_polite_kill_gives_the_terminal_back():
    with Terminal(["browse", RANKS], TERM="xterm") as terminal:
        terminal.until(b"all 4 rank files are here")
        terminal.signal(signal.SIGTERM)
        assert terminal.ended() == 130
    assert RESTORED in terminal.output


def test_what_is_not_there_is_one_line_and_exit_code_3(tmp_path):
    with Terminal(["browse", str(tmp_path / "none.pt")], TERM="xterm") as terminal:
        assert terminal.ended() == 3
    assert b"no such file or folder" in terminal.output.rpartition(RESTORED)[2]


def test_without_a_terminal_it_is_refused():
    result = CliRunner().invoke(app, ["browse", RANKS])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "browse needs a terminal" in result.stderr


def test_without_textual_one_line_says_how_to_get_it(tmp_path):
    (tmp_path / "textual.py").write_text("raise ModuleNotFoundError(name='textual')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with Terminal(["browse", RANKS], TERM="xterm", NO_COLOR="1", PYTHONPATH=path) as it:
        assert it.ended() == 2
    assert it.text().strip() == "error: browse needs textual: pip install 'ckptools[browse]'"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["inspect", RANKS], ["browse", "--help"]])
def test_no_other_command_and_no_help_imports_textual(words):
    code = "import sys\nfrom ckptools.cli import app\ntry: app(sys.argv[1:])\nexcept SystemExit: pass\n"
    lazy = ("textual",) if typer.__version__.startswith("0.19.") else ("textual", "rich")  # that typer imports rich
    code += f"print([m for m in {lazy} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
