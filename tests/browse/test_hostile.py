"""Names from files: whatever they are, they are text on the screen, and nothing else."""

from __future__ import annotations

import pytest

from tests.browse.driven import Driven, drive
from tests.display.made import HOSTILE, checkpoint, hostile, plain
from tests.truth import FIXTURES


@pytest.mark.parametrize("tab", "1234567")
def test_no_name_reaches_the_terminal_as_anything_but_text(tab):
    async def script(driven: Driven):
        await driven.press(tab)
        for _ in range(12):
            await driven.press("l", "j")
        for name in ("left", "right", "problems"):
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
