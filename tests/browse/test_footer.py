"""The last line: the keys of the pane that has the focus, at any width, whatever is said above it."""

from __future__ import annotations

import pytest

from ckptools.browse import view
from ckptools.browse.footer import HINTS, TYPED, footer
from ckptools.browse.view import TABS
from tests.browse.driven import Driven, drive
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


def last_line(driven: Driven) -> str:
    return driven.pictured().split("\n")[-1].strip()


@pytest.mark.parametrize("pane", HINTS)
def test_the_keys_of_a_pane_fit_80_columns_and_the_most_useful_fit_40(pane):
    for width in (80, 40):
        line = footer(pane, True, width).plain
        assert len(line) <= width and line.endswith("q quit") is (pane not in TYPED)
        assert width == 40 or line.startswith(" ".join(HINTS[pane][0]))


def test_each_tab_and_the_details_have_their_keys():
    async def script(driven: Driven):
        seen = []
        for tab in range(len(TABS)):
            await driven.press(str(tab + 1))
            seen.append(last_line(driven))
        assert len(set(seen)) >= 6 and all(line.endswith("? keys  q quit") for line in seen)
        await driven.press("2")
        assert last_line(driven).startswith("Enter shards  f values")
        await driven.press("tab")
        assert last_line(driven).startswith("j k scroll")
        await driven.press("tab")
        assert last_line(driven).startswith("Enter shards")
        await driven.press("slash")
        assert last_line(driven) == "Enter to the keys found  Esc all keys"
        await driven.press("enter", "question_mark")
        await driven.until(lambda: driven.text("keys") == "Enter takes it  Esc closes it")
        await driven.press("escape")
        await driven.until(lambda: driven.text("keys").startswith("Enter shards"))

    drive(RANKS, script)


def test_a_message_stands_above_the_keys_and_goes_away(monkeypatch):
    monkeypatch.setattr(view, "MESSAGE_SECONDS", 0.3)

    async def script(driven: Driven):
        keys = last_line(driven)
        driven.app.say("a long message " * 12)
        await driven.pilot.pause(0.05)
        assert last_line(driven) == keys and "a long message" in driven.pictured().split("\n")[-3]
        await driven.until(lambda: driven.text("message") == "")
        await driven.pilot.pause(0.05)
        assert last_line(driven) == keys and "a long message" not in driven.pictured()

    drive(RANKS, script)


def test_a_click_chooses_a_row_and_a_second_one_opens_it():
    async def script(driven: Driven):
        await driven.press("2")
        await driven.pilot.click("#left", offset=(4, 1))
        await driven.settled()
        assert driven.app.left.cursor == 1
        await driven.press("slash", *"blocks.0.up.w", "enter")
        await driven.pilot.click("#left", offset=(4, 0), times=2)
        await driven.settled()
        assert driven.app.key_page is not None and "blocks.0.up.weight" in driven.app.key_page.full

    drive(RANKS, script)
