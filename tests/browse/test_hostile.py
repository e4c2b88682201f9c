"""Names from files: whatever they are, they are text on the screen, and nothing else."""

from __future__ import annotations

import sys

import pytest

from tests.browse.driven import Driven, drive
from tests.browse.terminal import Terminal
from tests.display.made import HOSTILE, checkpoint, hostile, plain
from tests.hostile.cases import CASES, TRAP
from tests.truth import FIXTURES


@pytest.mark.slow
@pytest.mark.parametrize("tab", "1234567")
def test_no_name_reaches_the_terminal_as_anything_but_text(tab):
    async def script(driven: Driven):
        await driven.press(tab)
        for _ in range(12):
            await driven.press("l", "j")
        for name in ("left", "right"):
            assert all(row.isprintable() for row in driven.rows(name)), name
        assert all(line.isprintable() for line in driven.pictured().split("\n"))

    app = drive(hostile(), script)
    assert app.error is None


def test_markup_in_a_name_stays_as_it_is():
    async def script(driven: Driven):
        await driven.press("2", "o")
        assert any("layers[red].w[/bold]" in row for row in driven.rows())
        assert "layers[red].w[/bold]" in driven.pictured()
        await driven.press("y")
        driven.app.say("[/bold] [link='x']")
        assert driven.text("message") == "[/bold] [link='x']"

    drive(checkpoint({name: plain(2, record=str(n)) for n, name in enumerate(HOSTILE)}), script)


@pytest.mark.parametrize("key", ["e", "w", "s"])
def test_a_dialog_about_a_hostile_name_opens(key):
    async def script(driven: Driven):
        await driven.press("2", "o", key)
        assert all(line.isprintable() for line in driven.pictured().split("\n"))
        await driven.press("escape")

    drive(checkpoint({name: plain(2, record=str(n)) for n, name in enumerate(HOSTILE)}, name="a\x1b[2J/b"), script)


def test_foreign_objects_are_described_and_not_made():
    async def script(driven: Driven):
        await driven.press("2", "j", "l", "j", "enter")

    assert drive(FIXTURES / "foreign-objects", script).bug is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("bomb: ")][::25])
def test_a_hostile_file_can_do_no_more_than_in_inspect(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "case").mkdir()
    path = CASES[name](tmp_path / "case")
    monkeypatch.chdir(tmp_path / "here")

    async def script(driven: Driven):
        for key in ("2", "l", "G", "f", "enter", "5", "enter", "6", "7", "w", "escape"):
            if driven.app.is_running:
                await driven.pilot.press(key)
                await driven.until(lambda: not driven.app.jobs.running or not driven.app.is_running)
                assert all(line.isprintable() for line in driven.pictured().split("\n"))

    app = drive(path, script, wait=False)
    assert app.bug is None and (app.error is None or app.error.exit_code in (3, 4))
    assert TRAP not in sys.modules and list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_a_bomb_keeps_nobody_from_leaving(tmp_path):
    path = CASES["bomb: a size of 2^40 steps"](tmp_path)
    with Terminal(["browse", str(path)], TERM="xterm") as terminal:
        terminal.seen(b"whole: one file")
        for key in "213q":
            terminal.press(key)
        assert terminal.ended() == 0
