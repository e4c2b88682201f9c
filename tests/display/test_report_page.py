"""The page of a report: the verdict first, in the words of inspect and verify; names from a file are text in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptools
from ckptools.display.html import POLICY, Limits, Page, document
from ckptools.display.tables import Column
from ckptools.inspect.record import facts, inspect_report
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.report.html import PageContents, all_problems, findings, report_page
from ckptools.rules.verdict import verdict_of
from ckptools.text import parse_bytes
from ckptools.verify.record import Check, Verification, summary
from tests.display.made import HOSTILE, broken_run7, checkpoint, hostile, run7, sharded, snapshot
from tests.display.test_html import Reader
from tests.truth import FIXTURES
from tools.browser import elements_of, needs_browser, overflow_of, printed

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "footer", "h1", "h2",
    "p", "div", "details", "summary", "table", "tr", "th",
    "thead", "tbody", "td", "pre", "br", "b", "i", "span", "a", "nav", "section", "code", "wbr", "script", "svg",
    "desc", "g", "rect", "text", "tspan", "path", "line", "polyline", "defs", "pattern", "use",
}  # fmt: skip
TRAPS = (
    "</script><script>document.title='ran'</script>",
    "<!--<script>",
    "]]>",
    "<img src=x onerror=document.title=1>",
)


def found_in(ck: Checkpoint, *problems: Problem) -> PageContents:
    """What a page is about, without reading anything."""
    checks = (
        Check("files", "FAIL" if problems else "ok", "4 of 4", problems),
        Check("finite values", "not judged", "not asked"),
    )
    verified = Verification(ck.path, checks, verdict_of(ck, problems or ck.problems))
    return PageContents(ck, inspect_report(ck), verified, False, False, None)


def answers_in(html: str) -> dict[str, Any]:
    """The JSON of a page, as a program reads it: by the tags alone."""
    pattern = r'<script type="application/json" id="(\w+)">\n(.*?)\n</script>'
    return {name: json.loads(text) for name, text in re.findall(pattern, html, re.DOTALL)}


def shown(html: str) -> str:
    """The text of a page as a reader sees it, without its head and the JSON."""
    body = html.partition("<body>")[2].partition('<script type="application/json"')[0]
    return "".join(Reader(re.sub("<style>.*?</style>", "", body, flags=re.DOTALL)).text)


def trapped() -> Checkpoint:
    """Names that end the elements which they stand in, if they are not escaped."""
    model = {name: sharded(8, 3, record=str(n)) for n, name in enumerate((*TRAPS, *HOSTILE))}
    groups = [{"lr": 1e-3, TRAPS[0]: TRAPS[1], "params": list(model)}]
    tree = {"model": model, "optim": {"state": {}, "param_groups": groups}, TRAPS[0]: {TRAPS[1]: TRAPS[3]}}
    return checkpoint(tree, name=TRAPS[0], path=Path(f"/ckpt/{TRAPS[3]}"), saved_as=TRAPS[0])


@pytest.mark.parametrize("made", [run7, broken_run7, snapshot, hostile, trapped], ids=lambda made: made.__name__)
def test_a_page_is_ascii_and_has_no_element_but_our_own(made):
    html = report_page(found_in(made(), Problem(Code.TENSOR_GAP, TRAPS[0], 3, TRAPS[1])))
    page = Reader(html.replace("<!doctype html>", ""))
    assert html.isascii() and set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 2 and page.tags.count("h1") == page.tags.count("body") == 1
    assert not any(name.startswith("on") or name in ("src", "action") for name in page.attributes)
    assert set(re.findall(r'href="(.)', html)) <= {"#"}


def test_traps_are_shown_as_text_and_read_back_as_they_were():
    html = report_page(found_in(trapped(), Problem(Code.TENSOR_GAP, TRAPS[0], 3, TRAPS[1])))
    answers = answers_in(html)
    assert TRAPS[0] in shown(html) and answers["inspect"]["name"] == TRAPS[0]
    assert answers["verify"]["checks"][0]["problems"][0]["tensor"] == TRAPS[1]
    assert TRAPS[1] in answers["inspect"]["optimizers"][0]["param_groups"][0].values()


def test_the_verdict_comes_first_then_problems_then_facts():
    html = shown(report_page(found_in(broken_run7(), Problem(Code.FILE_CUT, "is cut short", 137))))
    words = (
        "NOT WHOLE",
        "causes: 2 of 2",
        "CK002",
        "next:",
        "checks: 1 failed, 1 not judged",
        "256 ranks of",
        "ranks here",
        "bytes of",
    )
    order = [html.index(word) for word in words]
    assert order == sorted(order)


def test_an_error_that_only_a_check_finds_is_in_the_headline_of_a_whole_checkpoint():
    found = found_in(run7(), Problem(Code.NOT_FINITE, "3 NaN", 1, "emb.weight"))
    html, words = report_page(found), "whole, but 1 error: NaN or infinity: emb.weight (rank 1)"
    assert html.index(f'<b class="bad">{words}</b>') < html.index("CK201") < html.index("checks: 1 failed")
    assert (
        "<title>ep0-ba12000: whole, but 1 error: NaN or infinity: ...</title>" in html
        and "whole: all 256" not in shown(html)
    )


def test_the_words_are_those_of_inspect_and_verify():
    found = found_in(run7())
    text = shown(report_page(found))
    words = [
        found.report.verdict.headline,
        summary(found.verification),
        *(word for row in facts(found.report) for word in row),
    ]
    assert [word for word in words if word not in text] == []


def test_a_problem_that_only_inspect_tells_is_on_the_page_and_none_is_twice():
    note = Problem(Code.KEPT_AS_SAVED, "kept as it is")
    cut = Problem(Code.FILE_CUT, "is cut short", 1)
    named = Problem(Code.NAME_CONTRADICTS, "the name tells another step")
    ck = run7(problems=(cut, named, note))
    assert list(all_problems(found_in(ck, cut))) == [cut, named, note]


def test_the_first_screen_has_six_facts_and_three_causes_and_counts_what_passed():
    nan = [Problem(Code.NOT_FINITE, f"{n} NaN", n, f"w{n}") for n in range(3)]
    more = [Problem(kind, kind.meaning, None, "w") for kind in (Code.TENSOR_OVERLAP, Code.PARAM_GROUPS)]
    html = report_page(found_in(broken_run7(), Problem(Code.FILE_CUT, "is cut short", 137), *nan, *more))
    assert (
        html.count('<div class="tile">') == 6 and "causes: 3 of 5" in shown(html) and "2 more problems" in shown(html)
    )
    assert html.index("copy the file again") < html.index('class="tile"') and "252 of 256" in shown(html)


def test_headings_are_headings_that_a_line_of_contents_leads_to_and_codes_lead_to_what_they_mean():
    html = report_page(found_in(broken_run7(), Problem(Code.FILE_CUT, "is cut short", 137)))
    titles = re.findall(r'<h2 id="([^"]+)">', html)
    contents = html.partition("<nav ")[2].partition("</nav>")[0]
    links = re.findall(r'<a href="#([^"]+)">', contents)
    assert re.findall(r">([^<]+)</a>", contents)[:3] == ["causes", "pictures", "checks"]
    assert links == titles and len(titles) == len(set(titles)) > 5
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(re.findall(r' id="([^"]+)"', html))
    assert html.count("<thead>") == html.count("<table>") > 2 and '<th scope="col"' in html


def test_gaps_of_a_lost_file_are_folded_below_it():
    gaps = [Problem(Code.TENSOR_GAP, f"gap {n}", 137, f"w{n}") for n in range(40)]
    html = report_page(found_in(broken_run7(), Problem(Code.FILE_CUT, "is cut short", 137), *gaps))
    below = html.partition("is cut short")[2]
    assert below.index("<summary>40 tensors have gaps (CK002 and CK001)</summary>") < below.index("w19 gap 19")
    assert "20 more are in the JSON of this page" in below and "w20 gap 20" not in below.partition('class="tile"')[0]


@pytest.mark.slow
def test_a_page_of_256_ranks_and_300_tensors_stays_small_and_is_written_in_a_moment():
    model = {f"blocks.{n}.attn.weight": sharded(4096, 16, ranks=256, record=str(n)) for n in range(300)}
    ck = replace(run7(), tree={"state": {"model": model}}, all_ranks=True)
    gaps = [Problem(Code.TENSOR_GAP, "gap [16:32]: 256 of 65536 elements are in no file here", 1, n) for n in model]
    started = time.process_time()
    html = report_page(found_in(ck, *gaps))
    assert len(html) < 300_000 and time.process_time() - started < 5
    assert len(answers_in(html)["verify"]["checks"][0]["problems"]) == 300


def test_a_page_of_names_without_end_ends():
    model = {f"{n}{'<' * 100_000}": sharded(8, record=str(n)) for n in range(40)}
    html = report_page(found_in(checkpoint({"model": model}, name="&" * 10**6)))
    assert len(html.partition("<script")[0]) < 400_000


def test_a_document_has_the_references_of_what_is_not_ascii():
    html = document("\u6f22", "\u2713", "", {"inspect": '{"a": "<"}'})
    assert "<title>&#28450;</title>" in html and answers_in(html) == {"inspect": {"a": "<"}}


@needs_browser
def test_a_browser_runs_nothing_and_makes_no_element_of_a_name(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(report_page(found_in(trapped(), Problem(Code.TENSOR_GAP, TRAPS[3], 3, TRAPS[0]))))
    made = elements_of(page)
    assert "<title>&lt;/script&gt;" in made and made.count("<title>") == made.count("</title>")
    elements = re.findall(r"<([a-z0-9]+)", re.sub(r"<script.*?</script>|<title.*?</title>", "", made, flags=re.DOTALL))
    assert set(elements) <= ALLOWED


@needs_browser
@pytest.mark.parametrize(("opened", "pages"), [(False, 1), (True, 4)])
def test_on_paper_folds_stay_as_they_are(tmp_path, opened, pages):
    made = Page("", Limits(rows=300))
    made.table("fold", [Column("row")], [[str(n)] for n in range(300)], opened=opened)
    page = tmp_path / "page.html"
    page.write_text(document("fold", "fold", made.html(), {}))
    found = len(re.findall(rb"/Type */Page\b", printed(page, tmp_path / "page.pdf").read_bytes()))
    assert found == 1 if pages == 1 else found >= pages


A4 = 700
"""Pixels that a line has on A4 paper, between margins of 12 mm."""


@needs_browser
def test_no_table_is_cut_on_a_screen_or_on_paper(tmp_path):
    html = report_page(findings(ckptools.open(COMPOSER, all_ranks=True), values=True))
    assert overflow_of(html, tmp_path, 500) <= 0
    assert overflow_of(html.replace("@media print", "@media all"), tmp_path, A4) <= 0


def test_figures_of_values_are_on_the_page_where_they_were_asked_for():
    page = shown(report_page(findings(ckptools.open(COMPOSER, all_ranks=True), values=True)))
    assert re.search(r"values of \d+ tensors", page) and "values of" not in shown(report_page(found_in(run7())))


# -- with a script ----------------------------------------------------------------------------------------------------


def runs_too(html: str, script: str) -> str:
    """The page with a script of the test behind its own, which the policy allows by its hash too."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1).replace(
        "</body>", f"<script>{script}</script></body>"
    )


def test_only_an_interactive_page_has_a_script_that_runs_and_a_policy_for_it():
    found = found_in(run7())
    plain, page = report_page(found), report_page(found, interactive=True)
    assert "script-src" not in plain and "<script>" not in plain
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert len(script) == 1 and f"""content="{POLICY}; script-src 'sha256-{digest}'">""" in page
    assert page.isascii() and len(script[0]) < 12_000
    told = answers_in(page)
    assert told.pop("ranks") == {"of_problems": []} and told == answers_in(plain)


@needs_browser
@pytest.mark.slow
def test_in_a_browser_the_script_runs_and_no_name_does(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(report_page(found_in(trapped(), Problem(Code.TENSOR_GAP, TRAPS[0], 3, TRAPS[1])), interactive=True))
    made = elements_of(page)
    assert 'tabindex="0"' in made
    assert "<title>ran</title>" not in made and "<title>1</title>" not in made
    assert 'tabindex="0"' not in elements_of(page_without_hash(page))


def page_without_hash(page: Path) -> Path:
    """The same page with one letter of its script changed, which the policy then forbids."""
    page.write_text(page.read_text().replace('"use strict"', '"use strict" ', 1))
    return page


@needs_browser
@pytest.mark.slow
def test_in_a_browser_tables_sort_by_their_numbers_and_filter(tmp_path):
    act = """
    const table = [...document.querySelectorAll("table")].find((one) => one.tHead.textContent.includes("tensors"));
    const head = [...table.tHead.rows[0].cells].find((one) => one.textContent === "size");
    const sizes = () => [...table.tBodies[0].rows].filter((row) => !row.hidden)
      .map((row) => row.cells[head.cellIndex].textContent);
    head.click(); const up = sizes().join("|"); head.click();
    document.body.dataset.up = up; document.body.dataset.down = sizes().join("|");
    const find = document.querySelector(".find");
    find.value = "STEP"; find.dispatchEvent(new Event("input"));
    const rows = [...find.nextElementSibling.querySelectorAll("tbody tr")];
    document.body.dataset.kept = rows.filter((row) => !row.hidden).length + "/" + rows.length;
    """
    page = tmp_path / "page.html"
    page.write_text(runs_too(report_page(found_in(run7()), interactive=True), act))
    body = elements_of(page).partition("<body")[2].partition(">")[0]
    up, down = (re.search(rf'data-{name}="([^"]*)"', body)[1].split("|") for name in ("up", "down"))
    nbytes = [parse_bytes(text) for text in up if text != "-"]
    assert len(nbytes) > 1 and nbytes == sorted(nbytes) and parse_bytes(down[0]) == max(nbytes)
    kept, rows = map(int, re.search(r'data-kept="(\d+)/(\d+)"', body).groups())
    assert 0 < kept < rows


@needs_browser
@pytest.mark.slow
def test_in_a_browser_facts_of_several_rows_stay_together(tmp_path):
    act = """
    const table = [...document.querySelectorAll("table")].find((one) => !one.tHead.rows[0].cells[0].textContent);
    const text = () => table.tBodies[0].textContent;
    const before = text();
    for (const head of table.tHead.rows[0].cells) head.click();
    document.body.dataset.same = text() === before && !table.parentNode.previousElementSibling?.matches(".find");
    """
    page = tmp_path / "page.html"
    page.write_text(runs_too(report_page(found_in(run7()), interactive=True), act))
    assert 'data-same="true"' in elements_of(page).partition("<body")[2].partition(">")[0]


@needs_browser
@pytest.mark.slow
def test_in_a_browser_a_rank_under_the_pointer_is_marked_wherever_it_is(tmp_path):
    act = """
    const cell = [...document.querySelectorAll("rect")]
      .find((one) => one.querySelector("title")?.textContent.startsWith("rank 137:"));
    cell.dispatchEvent(new Event("pointerover", {bubbles: true}));
    const lit = [...document.querySelectorAll(".lit")];
    document.body.dataset.lit = [...new Set(lit.map((one) => one.tagName.toLowerCase()))].sort().join(" ");
    document.body.dataset.causes = lit.filter((one) => one.matches(".cause")).length;
    """
    page = tmp_path / "page.html"
    page.write_text(runs_too(report_page(found_in(broken_run7(), *broken_run7().problems), interactive=True), act))
    body = elements_of(page).partition("<body")[2].partition(">")[0]
    assert "rect" in body and "div" in body and 'data-causes="1"' in body


@needs_browser
@pytest.mark.slow
def test_in_a_browser_the_keyboard_sorts_filters_and_marks_ranks(tmp_path):
    act = """
    const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    const said = () => document.activeElement.querySelector("title").textContent.split(":")[0];
    const data = document.body.dataset;
    const map = [...document.querySelectorAll("svg")].find((one) => one.textContent.includes("rank 137:"));
    const stops = [...map.querySelectorAll("rect[tabindex='0']")];
    data.stops = stops.length;
    stops[0].focus();
    data.begins = said();
    press(document.activeElement, "ArrowRight"); press(document.activeElement, "ArrowDown");
    data.ends = said();
    data.lit = document.querySelectorAll(".lit").length;
    const head = document.querySelector("th");
    press(head, " ");
    data.sorted = head.getAttribute("aria-sort");
    const find = document.querySelector(".find");
    const body = find.nextElementSibling.querySelector("tbody");
    find.value = [...body.rows].at(-1).textContent.slice(-9); find.dispatchEvent(new Event("input"));
    const shown = [...body.rows].filter((row) => !row.hidden);
    data.row = shown[0].tabIndex + " of " + (shown.length < body.rows.length);
    """
    page = tmp_path / "page.html"
    page.write_text(runs_too(report_page(found_in(broken_run7(), *broken_run7().problems), interactive=True), act))
    body = elements_of(page).partition("<body")[2].partition(">")[0]
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', body))
    assert found["stops"] == "1" and found["begins"] == "rank 0" and found["ends"] == "rank 17"
    assert int(found["lit"]) > 0 and found["sorted"] == "ascending" and found["row"] == "0 of true"
