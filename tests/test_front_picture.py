"""The pictures at the top of the README say what the commands say today.

`python -m tools.front_picture` makes them anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.documents import masked
from tools.front_picture import (
    IMAGES,
    SCALE,
    WIDTH,
    broken_run,
    recording_of_browse,
    recording_of_doctor,
    report_page,
    words_of,
)
from tools.terminal_svg import drawn, last_screen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front")
    broken_run(folder)
    return folder


def test_the_recording_of_doctor_ends_on_todays_answer(run: Path) -> None:
    shown, today = ((IMAGES / "doctor.svg").read_text(), recording_of_doctor(run))
    assert masked(last_screen(shown)) == masked(last_screen(today))


def test_the_picture_of_the_report_has_todays_words(run: Path) -> None:
    assert masked((IMAGES / "report.txt").read_text()) == masked(words_of(report_page(run)))


def test_the_recording_of_browse_is_drawn_of_the_asciicast() -> None:
    assert (IMAGES / "browse.svg").read_text() == recording_of_browse()


@pytest.mark.parametrize("name", ["doctor.svg", "browse.svg", "report-light.png", "report-dark.png"])
def test_a_picture_of_the_front_loads_at_once(name: str) -> None:
    assert (IMAGES / name).stat().st_size < 350_000


def test_the_picture_of_the_report_is_sharp_on_every_screen() -> None:
    # Source: PNG specification, 11.2.2: width and height are the first fields of IHDR.
    wide, high = zip(
        *(struct.unpack(">II", (IMAGES / f"report-{s}.png").read_bytes()[16:24]) for s in ("light", "dark")),
        strict=True,
    )
    assert wide == (WIDTH * SCALE, WIDTH * SCALE) and high[0] == high[1]


def texts(events: Sequence[tuple[float, str]], lines: int | None = None) -> str:
    svg = drawn(events, "t", 20, lines)
    ElementTree.fromstring(svg)
    return last_screen(svg)


def test_a_recording_holds_the_last_screen() -> None:
    assert texts([(0, "$ "), (0.5, "ls\r\n"), (1, "a  <b>\r\n\x1b[31mred\x1b[0m\r\n")]) == "$ ls\na  <b>\nred"


def test_a_row_is_drawn_once_for_the_time_in_which_it_stays() -> None:
    svg = drawn([(0, "one\r\ntwo"), (2, "\rnew"), (3.5, "er")], "t", 20)
    assert svg.count(">one<") == 1 and 'class="w" style="animation-duration:0.00s"' in svg
    assert 'class="v" style="animation-duration:2.00s;animation-delay:0.00s"' in svg
    assert 'class="v" style="animation-duration:1.50s;animation-delay:2.00s"' in svg
    assert 'class="w" style="animation-duration:3.50s"' in svg and last_screen(svg) == "one\nnewer"


def test_what_a_program_leaves_behind_it_is_no_screen_of_a_recording() -> None:
    screen, left = "\x1b[?1049h\x1b[>1u\x1b[2J\x1b[Hanswer", "\x1b[?1049l\x1b[<u$ "
    assert texts([(0, screen), (1, left)], lines=3) == "answer"


def test_colours_of_a_terminal_follow_the_page_and_those_of_a_program_stay() -> None:
    svg = drawn(
        [(0, "\x1b[1;31mbad\x1b[0m \x1b[38;2;1;2;3mown\x1b[0m \x1b[7mturned\x1b[0m \x1b[2mfaint\x1b[0m")], "t", 40
    )
    assert 'class="red b">bad<' in svg and 'style="fill:#010203">own<' in svg
    assert 'class="back">turned<' in svg and 'class="brightblack">faint<' in svg
    assert svg.count(".red{fill:") == 2 and "prefers-color-scheme:dark" in svg
