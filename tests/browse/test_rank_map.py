"""The map of ranks: 1,024 on a screen, in the colours of their states, chosen by keys and mouse."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import pytest
from textual.color import Color

from ckptools.browse.rank_map import COLOURS, READ, RankMap, arranged
from ckptools.browse.session import CheckpointReport, Session
from ckptools.model.facts import Fact
from ckptools.pictures.rank_map import Grouping
from tests.browse.driven import Driven, drive
from tests.display import made
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
MANY = Grouping(32, 8, 1 << 20)


def thousand(*gone: int):
    """1,024 ranks, all read, of which some are missing."""
    found = made.files(1024, here=set(range(1024)) - {*gone}, read=True)
    return made.run7(files=found, world_size=Fact(1024, ("layout",)), problems=made.missing(*gone))


def drawn(driven: Driven) -> list[str]:
    """The lines of the map and its legend."""
    area = driven.app.query_one(RankMap).region
    return [line[area.x : area.right] for line in driven.pictured().split("\n")[area.y : area.bottom]]


def colours_at(driven: Driven, x: int, y: int) -> set[str]:
    """The colours of a character of the map."""
    area = driven.app.query_one(RankMap).region
    style = driven.app.screen.get_style_at(area.x + x, area.y + y)
    return {colour.name for colour in (style.color, style.bgcolor) if colour is not None}


def test_few_ranks_have_wide_cells_with_letters_and_many_have_halves():
    few, many = arranged(64, MANY, 80, True), arranged(1024, MANY, 80, True)
    assert (few.wide, few.tall, few.height) == (3, 1, 4)
    assert (many.wide, many.tall, many.height) == (1, 2, 8)
    assert many.column(63) < 80


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("count", [1, 3, 8, 100, 256, 1024, 5000])
@pytest.mark.parametrize("how", [MANY, Grouping(2, 2, 4), Grouping(24, 8, 48), Grouping(32, 32, 128)])
def test_every_cell_has_a_place_of_its_own_on_the_screen(width, count, how):
    found = arranged(count, how, width, True)
    cells = [cell for row in found.rows for cell in row]
    assert cells == list(range(count))
    assert all(found.column(len(row) - 1) + found.wide <= width for row in found.rows if row)
    for cell in {0, count // 2, count - 1}:
        row, place = found.place_of(cell)
        assert cell in found.at(found.column(place), row // found.tall)


def test_a_thousand_ranks_are_on_one_screen_and_a_missing_one_has_its_colour():
    async def script(driven: Driven):
        await driven.press("3")
        lines = drawn(driven)
        assert sum(line.count("▀") for line in lines) == 512
        assert any("missing: rank 700" in line for line in lines)
        row, place = driven.app.query_one(RankMap).arranged.place_of(700)
        x = driven.app.query_one(RankMap).arranged.column(place)
        assert colours_at(driven, x, row // 2) == {COLOURS["missing"], COLOURS["fine"]}

    drive(thousand(700), script)


def test_arrows_and_clicks_choose_a_rank():
    async def script(driven: Driven):
        await driven.press("3", "right", "right")
        assert driven.rows("right")[0].startswith("rank 2: ")
        await driven.press("down")
        assert driven.rows("right")[0].startswith("rank 66: ")
        await driven.press("up", "left", "G")
        assert driven.rows("right")[0].startswith("rank 1023: ")
        cells = driven.app.query_one(RankMap).arranged
        await driven.pilot.click("#map", offset=(cells.column(8), 1))
        await driven.settled()
        assert driven.rows("right")[0].startswith("rank 136: ")
        await driven.pilot.click("#map", offset=(cells.column(8), 1))
        await driven.settled()
        assert driven.rows("right")[0].startswith("rank 200: ")

    drive(thousand(), script)


def test_a_map_of_ranks_follows_the_axes_of_the_mesh():
    async def script(driven: Driven):
        await driven.press("3", "right")
        assert "mesh shard 2 x tp 2" in driven.rows("right")
        assert [line[:11].rstrip() for line in drawn(driven)[:2]] == ["   0    [ ]", "   2"]

    drive(FIXTURES / "torch2.13.0-fsdp2-tp2x2-w4", script)


def test_p_leaves_the_ranks_with_problems_where_they_are():
    async def script(driven: Driven):
        await driven.press("3", "p")
        assert driven.text("counted").startswith("problems only: 4 of 256 ranks")
        assert driven.rows("right")[0].startswith("rank 137: ")
        await driven.press("right")
        assert driven.rows("right")[0].startswith("rank 201: ")
        await driven.press("up")
        assert driven.rows("right")[0].startswith("rank 137: ")
        await driven.press("escape")
        assert not driven.app.query_one("#counted").display

    drive(made.broken_run7(), script)


def test_without_colour_each_rank_is_a_letter(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(driven: Driven):
        await driven.press("3")
        lines = drawn(driven)
        assert not any("▀" in line for line in lines)
        assert sum(line.count(".") for line in lines[:16]) == 1022 and lines[0][5] == "@"
        assert "M" in lines[700 // 64] and "missing: rank 700" in lines[16]

    drive(thousand(700), script)


def test_without_colour_a_sound_rank_is_a_dot_in_a_wide_cell_too(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(driven: Driven):
        await driven.press("3")
        assert drawn(driven)[0].split() == ["0", "[.]", ".", ".", "."]

    drive(RANKS, script)


def test_ranks_are_grey_until_they_are_read_and_counted_meanwhile(monkeypatch):
    go = threading.Event()

    def slowly(self, job):
        for file in self.looked.checkpoint.files[:789]:
            job.on_file(file.path)
        go.wait(10)
        return CheckpointReport(replace(self.looked.checkpoint, all_ranks=True), self.looked.report)

    async def script(driven: Driven):
        await driven.pilot.press("3")
        await driven.until(lambda: "789 of 1,024 read" in driven.text("counted"))
        await driven.pilot.pause(0.1)
        assert any("read, not compared yet: 788 ranks" in line for line in drawn(driven))
        assert any("not looked into: 235 ranks" in line for line in drawn(driven))
        assert colours_at(driven, 5 + 40, 0) == {READ} and colours_at(driven, 5 + 40, 7) == {COLOURS["looked at"]}
        go.set()
        await driven.settled()

    monkeypatch.setattr(Session, "every_rank", slowly)
    files = made.files(1024)
    drive(made.run7(files=files, world_size=Fact(1024, ("layout",)), all_ranks=False), script, wait=False)


def test_a_fault_of_a_file_colours_its_rank(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", tmp_path / "ckpt")
    (folder / "__1_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes()[:100])

    async def script(driven: Driven):
        assert "NOT WHOLE" in driven.text("title")
        await driven.press("3")
        assert any("cut, damaged or unreadable: rank 1" in line for line in drawn(driven))
        assert COLOURS["cut"] in colours_at(driven, 5 + 3 + 1, 0)

    drive(folder, script)


def test_black_letters_are_readable_on_every_colour_of_the_map():
    """At least 4.5 to 1. Source: Web Content Accessibility Guidelines 2.1, 1.4.3."""
    for colour in (*COLOURS.values(), READ):
        red, green, blue = (
            v / 12.92 if v <= 0.04 else ((v + 0.055) / 1.055) ** 2.4 for v in Color.parse(colour).normalized
        )
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05 >= 4.5, colour
