"""What a notebook shows, seen by a real browser: nothing is wider than the page, and no name becomes an element."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

import ckptools
from ckptools.display.drawing import DIVERGING
from ckptools.display.html import values_html
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


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> tuple[Path, Path]:
    """Two steps of a model whose names have 60 characters."""
    folder, generator = tmp_path_factory.mktemp("deep"), torch.Generator().manual_seed(0)
    roles = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "post_attention_layernorm")
    names = [f"base_model.model.model.layers.{n}.{role}.base_layer.weight" for n in range(12) for role in roles]
    for step in (1000, 2000):
        model = {name: torch.randn(64, 64, generator=generator) / 50 for name in names}
        adam = {name: torch.rand(64, 64, generator=generator) for name in names}
        state = {n: {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": m} for n, m in adam.items()}
        groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": names}]
        optimizer = {"state": state, "param_groups": groups}
        torch.save({"model": model, "optimizer": optimizer, "step": step}, folder / f"checkpoint-{step}.pt")
    return folder / "checkpoint-1000.pt", folder / "checkpoint-2000.pt"


@needs_browser
def test_at_1000_pixels_no_column_of_a_table_is_out_of_sight(tmp_path, deep):
    ck, found = ckptools.open(deep[1]), ckptools.diff(*deep, values=True)
    things = (ck, ck.verify(values=True), ck.stats(), ck.moments(), ck.records(), ck.records().rows, ck.model,
              found, found.tensors, found.values, ckptools.match(ck, deep[0]))  # fmt: skip
    looked = looked_at("".join(thing._repr_html_() for thing in things), tmp_path, 1000)
    assert (looked["scrolled"], looked["beyond"], looked["wide"] <= looked["page"]) == (0, 0, True)


def test_a_long_list_of_keys_is_folded_and_a_short_one_is_open(deep):
    model = ckptools.open(deep[1]).model
    assert len(model) == 48 and "<details><summary>48 keys" in model._repr_html_()
    assert "<details open><summary>2 keys" in values_html(dict(list(model.items())[:2]))


def test_a_healthy_heat_map_has_a_tone_that_its_legend_explains(deep):
    picture = ckptools.open(deep[1]).plot.heat()
    cells = set(re.findall(r'fill="(#\w+)" class="rim"><title>', picture.svg))
    middle = DIVERGING[len(DIVERGING) // 2]
    assert cells == {middle} and int(middle[5:7], 16) - int(middle[1:3], 16) > 50 and "median of the row" in picture.svg


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
