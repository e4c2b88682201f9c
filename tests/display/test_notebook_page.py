"""What a notebook shows, seen by a real browser: nothing is wider than the page, and no name becomes an element."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest

import ckptools
from tests.api.test_notebook import FILE, HELD
from tests.display.made import HOSTILE, broken_run7, checkpoint, hostile, plain
from tests.display.test_html import ALLOWED, DRAWN
from tools.browser import elements_of, needs_browser
from tools.tutorial import TUTORIAL, page_of

pytestmark = pytest.mark.slow

MARKUP = (
    "<img src=x onerror=\"document.title='ran'\">",
    "</td></table><script>document.title='ran'</script>",
    "'\"><svg onload=x>",
)
"""Names that would be elements, and run, if one of them got through."""

MADE = ALLOWED | DRAWN | {"tbody", "script"}
"""Elements that our pages have, the browser's own and the test's among them."""

LOOK = """<script>
for (const fold of document.querySelectorAll('details')) fold.open = true;
const all = [...document.body.querySelectorAll('*')], page = document.documentElement;
const outside = e => !e.closest('.wide') && e.getBoundingClientRect().right > page.clientWidth + 1;
const found = {
  title: document.title, page: page.clientWidth, wide: page.scrollWidth,
  names: [...new Set(all.map(e => e.tagName.toLowerCase()))],
  handlers: all.filter(e => [...e.attributes].some(a => /^on|href|src/.test(a.name))).length,
  beyond: all.filter(e => /^(TD|TH|SUMMARY|DIV)$/.test(e.tagName) && outside(e)).length,
  scrolled: all.filter(e => e.matches('.wide') && e.scrollWidth > e.clientWidth + 1).length,
};
document.body.setAttribute('data-found', JSON.stringify(found));
</script>"""
"""What the tests ask the page, behind everything that could have run on it."""


def looked_at(html: str, folder: Path, width: int = 1000) -> dict[str, Any]:
    """What a browser tells of a page whose folds are all open."""
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>page</title><body>{html}{LOOK}</body>", errors="replace"
    )
    dumped = elements_of(page, f"--window-size={width},900")
    told = re.search(r'data-found="([^"]*)"', dumped)
    assert told is not None
    found: dict[str, Any] = json.loads(unescape(told[1]))
    return found


@needs_browser
@pytest.mark.parametrize("width", [500, 1400])
def test_no_table_is_wider_than_the_page(tmp_path, width):
    with ckptools.open(FILE) as ck:
        shown = "".join(held(ck)._repr_html_() for held in HELD.values())
    found = looked_at(shown + broken_run7()._repr_html_(), tmp_path, width)
    assert (found["beyond"], found["wide"] <= found["page"]) == (0, True)
    assert width < 1400 or found["scrolled"] == 0
    assert set(found["names"]) <= MADE and found["handlers"] == 0


@needs_browser
def test_the_tutorial_fits_its_page(tmp_path):
    found = looked_at(page_of(nbformat.read(TUTORIAL, as_version=4)), tmp_path, 760)
    assert (found["beyond"], found["wide"] <= found["page"]) == (0, True)


@needs_browser
def test_no_name_runs_or_becomes_an_element(tmp_path):
    long = "<b>" * 4000
    names = {name: plain(2, 3, record=str(n)) for n, name in enumerate((*MARKUP, *HOSTILE, long))}
    traps = checkpoint({"model": names, MARKUP[1]: {MARKUP[0]: MARKUP[2]}, long: [1]}, name=MARKUP[0])
    things = [held for made in (traps, hostile()) for held in (
        made, made.sections, *made.sections, made.model, made.records(), made.records().rows, made.files, made.problems,
        made.optimizers, *made.optimizers.values(), made.schedulers, *names.values(), made.step, made.verify(),
    )]  # fmt: skip
    found = looked_at("".join(thing._repr_html_() for thing in things), tmp_path)
    assert (found["title"], found["handlers"], found["beyond"]) == ("page", 0, 0)
    assert set(found["names"]) <= MADE and found["wide"] <= found["page"]


TEMPLATES = {
    "lab": (
        "jp-RenderedHTMLCommon jp-RenderedHTML jp-OutputArea-output",
        """:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td, :not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon th,
        .jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th, .jp-RenderedHTMLCommon tr
        {text-align: right; vertical-align: middle; padding: 0.5em; max-width: 100px; white-space: normal}""",
    ),
    "classic": (
        "output_subarea rendered_html output_html",
        """.rendered_html tr, .rendered_html th, .rendered_html td
        {text-align: right; vertical-align: middle; padding: 0.5em; max-width: none; white-space: normal}""",
    ),
}
"""Classes around an output, and what JupyterLab's and the classic notebook's style, which templates of nbconvert bring
along, say of every table (@jupyterlab/rendermime/style/base.css; notebook/static/notebook/less/renderedhtml.less)."""

ALIGNED = """<script>
const cells = [...document.querySelectorAll('.ckpt td, .ckpt th')];
const of = rows => [...new Set(rows.map(cell => getComputedStyle(cell).textAlign))];
const found = {texts: of(cells.filter(c => !c.matches('.n'))), numbers: of(cells.filter(c => c.matches('.n')))};
document.body.setAttribute('data-found', JSON.stringify(found));
</script></body>"""


@needs_browser
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("behind", [False, True], ids=["the style first", "the style last"])
def test_text_is_aligned_left_and_numbers_right_whatever_a_notebook_says_of_tables(tmp_path, template, behind):
    classes, rules = TEMPLATES[template]
    html = broken_run7()._repr_html_() + ckptools.open(FILE)._repr_html_()
    output = f'<div class="{classes}">{html}</div>'
    parts = [f"<style>{rules}</style>", output][:: -1 if behind else 1]
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{''.join(parts)}{ALIGNED}", errors="replace")
    told = re.search(r'data-found="([^"]*)"', elements_of(page))
    assert told is not None
    assert json.loads(unescape(told[1])) == {"texts": ["left"], "numbers": ["right"]}
