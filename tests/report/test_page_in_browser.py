"""The report in a browser: a rank can be pinned, text stays legible, headings are not covered."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from ckptools.display.html import SHORT_TITLE, how_made, short_title
from ckptools.model.problems import Code, Problem
from ckptools.report.html import report_page
from tests.display.made import broken_run7, checkpoint, files
from tests.display.test_report_page import found_in, runs_too
from tools.browser import elements_of, needs_browser, overflow_of, printed

PROBLEMS = (
    Problem(Code.FILE_CUT, "is cut short", 137),
    Problem(Code.COPIES_DIFFER, "differs", None, "w", ranks=(3, 137)),
    Problem(Code.TENSOR_GAP, "gap [0:4]: in no file here, held by rank 137, 201", 137, "emb.weight"),
    Problem(Code.TENSOR_GAP, "gap [4:8]: in no file here, held by rank 201", 201, "norm.weight"),
)


def told(tmp_path: Path, act: str, interactive: bool = True, width: int = 1200) -> dict[str, Any]:
    """What a script finds on the page of a broken checkpoint: the fields of its object `found`."""
    html = report_page(found_in(broken_run7(), *PROBLEMS), interactive)
    if not interactive:
        html = re.sub("<meta http-equiv[^>]*>", "", html)
    page = tmp_path / "page.html"
    page.write_text(runs_too(html, f"const found = {{}};{act}; document.body.dataset.found = JSON.stringify(found);"))
    shown = re.search(r'data-found="([^"]*)"', elements_of(page, f"--window-size={width},900"))
    assert shown is not None
    found: dict[str, Any] = json.loads(unescape(shown[1]))
    return found


PINNING = """
const cell = (rank) => [...document.querySelectorAll(".band rect")]
  .find((one) => one.querySelector("title")?.textContent.startsWith(`rank ${rank}:`));
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const visible = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
const words = () => visible(".cause").map((one) => one.textContent).join(" ");
const state = () => ({
  button: visible(".pin").map((one) => one.textContent).join(), causes: words(),
  panel: document.querySelector(".band + section").innerText, tiles: visible(".tile").length,
  pressed: [...document.querySelectorAll("[aria-pressed=true]")].map((one) => one.ariaLabel.split(":")[0]),
});
"""


@needs_browser
@pytest.mark.slow
def test_a_click_on_a_rank_pins_it_and_all_that_is_about_others_goes_away(tmp_path):
    act = """
    found.before = state(); cell(137).dispatchEvent(new MouseEvent("click", {bubbles: true})); found.pinned = state();
    cell(5).dispatchEvent(new MouseEvent("click", {bubbles: true})); found.other = state();
    cell(5).dispatchEvent(new MouseEvent("click", {bubbles: true})); found.after = state();
    """
    found = told(tmp_path, PINNING + act)
    before, pinned = found["before"], found["pinned"]
    assert before["button"] == before["panel"] == "" and before["tiles"] == 6 and "ranks 201..203" in before["causes"]
    assert pinned["button"] == "only rank 137; Esc shows all" and pinned["pressed"] == ["rank 137"]
    assert "rank 137" in pinned["causes"] and "ranks 201..203" not in pinned["causes"] and pinned["tiles"] == 0
    assert "problems: 3" in pinned["panel"] and "norm.weight" not in pinned["panel"]
    assert all(words in pinned["panel"] for words in ("is cut short", "CK105 w differs", "emb.weight gap"))
    assert "no problem names it" in found["other"]["panel"] and found["other"]["pressed"] == ["rank 5"]
    assert found["after"] == before


@needs_browser
@pytest.mark.slow
def test_the_keyboard_pins_a_rank_and_escape_or_the_button_shows_all_again(tmp_path):
    act = """
    found.before = state(); cell(201).focus(); press(cell(201), "Enter"); found.pinned = state();
    press(document.body, "Escape"); found.after = state();
    press(cell(201), " "); document.querySelector(".pin").click(); found.clicked = state();
    found.role = [cell(201).getAttribute("role"), cell(201).closest("svg").getAttribute("role")];
    """
    found = told(tmp_path, PINNING + act)
    assert found["pinned"]["pressed"] == ["rank 201"] and "norm.weight gap" in found["pinned"]["panel"]
    assert found["after"] == found["clicked"] == found["before"] and found["role"] == ["button", "group"]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1200])
def test_no_text_is_smaller_than_11_pixels_and_the_page_is_no_wider_than_its_window(tmp_path, width):
    act = """
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    const drawn = [...document.querySelectorAll("svg text")]
      .map((one) => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a);
    const written = [...document.querySelectorAll("main *:not(svg *)")].filter((one) => one.checkVisibility())
      .map((one) => parseFloat(getComputedStyle(one).fontSize));
    found.drawn = Math.min(...drawn); found.written = Math.min(...written); found.texts = drawn.length;
    """
    found = told(tmp_path, act, interactive=False, width=width)
    assert found["drawn"] > 10.9 and found["written"] >= 11 and found["texts"] > 20
    html = report_page(found_in(broken_run7(), *PROBLEMS))
    assert overflow_of(html, tmp_path, width) <= 0


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1200])
def test_the_line_of_contents_stays_in_view_and_covers_no_heading(tmp_path, width):
    act = """
    const nav = document.querySelector("nav");
    found.apart = [...nav.querySelectorAll("a")].map((link) => {
      const part = document.querySelector(link.hash);
      part.scrollIntoView();
      return part.getBoundingClientRect().top - nav.getBoundingClientRect().bottom;
    });
    window.scrollTo(0, 700);
    found.top = nav.getBoundingClientRect().top; found.height = nav.getBoundingClientRect().height;
    """
    found = told(tmp_path, act, interactive=False, width=width)
    assert len(found["apart"]) > 5 and min(found["apart"]) >= 0
    assert found["top"] == 0 and found["height"] < 52


@needs_browser
@pytest.mark.slow
def test_a_page_has_one_main_landmark_headings_in_order_and_a_description_of_each_picture(tmp_path):
    act = """
    found.mains = document.querySelectorAll("main").length;
    found.levels = [...document.querySelectorAll("h1, h2, h3")].map((one) => Number(one.tagName[1]));
    found.pictures = [...document.querySelectorAll("svg")].map((one) => one.querySelector("desc").textContent.length);
    """
    found = told(tmp_path, act, interactive=False)
    assert found["mains"] == 1 and found["levels"][0] == 1 and found["levels"].count(1) == 1
    assert all(b <= a + 1 for a, b in zip(found["levels"], found["levels"][1:], strict=False))
    assert min(found["pictures"]) > 20


@needs_browser
@pytest.mark.slow
def test_on_paper_a_page_is_short_as_nothing_unfolds(tmp_path):
    gaps = [Problem(Code.TENSOR_GAP, f"gap {n}", 137, f"w{n}") for n in range(40)]
    html = report_page(found_in(broken_run7(), *PROBLEMS, *gaps))
    page = tmp_path / "page.html"
    pages = []
    for text in (html, html.replace("<details>", "<details open>")):
        page.write_text(text)
        pages.append(len(re.findall(rb"/Type */Page\b", printed(page, tmp_path / "page.pdf").read_bytes())))
    assert pages[0] < pages[1]


# -- without a browser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ep0-ba6", "checkpoint-" + "9" * 300, "<b>" * 60, ""])
@pytest.mark.parametrize(
    "words", ["whole", "NOT WHOLE: ranks 1..63 missing; rank 64 of another save (batch 3, others 6)"]
)
def test_a_title_is_short_and_begins_with_the_name_and_the_verdict(name, words):
    title = short_title(name, words)
    assert len(title) <= SHORT_TITLE < 60 and title.startswith(name[:8]) and words[:20] in title


def test_a_long_name_is_cut_in_title_and_heading_and_stands_whole_below():
    name = "run-" + "x" * 90
    ck = replace(checkpoint({}, files=files(2)), name=name, path=Path("/ckpt") / name)
    html = report_page(found_in(ck))
    title, heading = (re.search(rf"<{tag}>(.*?)</{tag}>", html)[1] for tag in ("title", "h1"))
    assert len(title) < 60 and len(heading) < 60 and f'<p class="where">/ckpt/{name} ' in html


def test_a_page_says_how_it_was_made_without_the_time_of_day():
    found = found_in(broken_run7())
    html = report_page(found._replace(options=("--deep", "--ignore", "CK206")), True, "run 7.html")
    made = unescape(re.search("<footer>(.*?)</footer>", html)[1])
    assert "-o 'run 7.html' --deep --ignore CK206 --interactive</code>" in made and "ckptools 0." in made
    assert report_page(found) == report_page(found)


def test_the_home_page_is_the_one_that_the_package_names(tmp_path, monkeypatch):
    assert "href" not in how_made("ckptools report x")
    info = tmp_path / "ckptools-9.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: ckptools\nVersion: 9\nProject-URL: {}\n"
    (info / "METADATA").write_text(text.format("Homepage, https://example.org/?a&b"))
    monkeypatch.syspath_prepend(tmp_path)
    assert '<a href="https://example.org/?a&amp;b" rel="noreferrer">' in how_made("ckptools report x")
    (info / "METADATA").write_text(text.format("Homepage, javascript:alert(1)"))
    assert "href" not in how_made("ckptools report x")
