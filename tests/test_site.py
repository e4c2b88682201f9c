"""The site builds without a warning, asks no other host for anything, is searched from a folder, and clips nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import ClassVar

import pytest

from ckptools.cli.start import COMMANDS
from ckptools.explain import SUBJECTS
from ckptools.model.problems import Code
from tools.browser import BROWSER, QUIET, elements_of, needs_browser

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

SEARCH = """<script>setTimeout(() => {
const box = document.querySelector("#__search"), words = document.querySelector(".md-search__input")
box.checked = true; box.dispatchEvent(new Event("change")); words.focus(); words.value = "CRC-32 flipped"
words.dispatchEvent(new Event("input")); words.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}))
}, 3000)</script>"""

MEASURED = """<body><script>(async () => {
const clipped = []
for (const page of PAGES) for (const width of [1200, 500]) {
  const frame = document.createElement("iframe"), loaded = new Promise((resolve) => frame.onload = resolve)
  frame.style.cssText = `width: ${width}px; height: 900px`
  frame.src = page
  document.body.append(frame)
  await loaded
  const root = frame.contentDocument.documentElement
  if (root.scrollWidth > root.clientWidth) clipped.push([width, page, "the page", root.scrollWidth])
  for (const one of root.querySelectorAll(".md-content *"))
    if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth && getComputedStyle(one).overflowX !== "visible")
      clipped.push([width, page, one.className, one.scrollWidth])
  frame.remove()
}
fetch("measured", {method: "POST", body: JSON.stringify(clipped)})
})()</script>"""
"""A page with a wide and a narrow frame for each page of the site; it lists what is wider than its room."""

SCROLLED = ("table", "md-typeset__scrollwrap")
"""Elements that are scrolled by themselves: tables of a console block, whose edge then has a shadow, and of a text."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_code_and_every_command_has_its_page(site):
    assert [
        kind.code for kind in Code if kind.meaning not in (site / "problems" / f"{kind.code}.html").read_text()
    ] == []
    assert [name for name in COMMANDS if f"Usage: ckptools {name} " not in (site / f"{name}.html").read_text()] == []
    assert "problems/CK101.html" in (site / "verify.html").read_text()
    assert "--dequantize" in (site / "consolidate.html").read_text()  # only the full help has it


def test_the_list_of_codes_has_a_table_for_each_subject(site):
    listed = (site / "problems" / "index.html").read_text()
    assert [subject for subject in SUBJECTS.values() if f">{subject.capitalize()}<" not in listed] == []
    assert listed.count("<table>") == len(SUBJECTS) and listed.count('<td><span class="') == len(Code)


def test_the_page_of_report_shows_a_report_of_today(site: Path) -> None:
    report = (site / "broken-report.html").read_text()
    assert '<iframe class="report" src="broken-report.html"' in (site / "report.html").read_text()
    assert "NOT WHOLE" in report and "model.layers." in report and len(report) < 300_000


def test_no_page_loads_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    loaded = [
        tag for page in pages for tag in re.findall(r"<(?:script|link|img|iframe|source)[^>]*>", page.read_text())
    ]
    assert len(pages) > 90 and [tag for tag in loaded if re.search(r"(?:src|href|srcset)=.?(?:https?:)?//", tag)] == []


@needs_browser
def test_the_site_is_searched_from_a_folder(site):
    page = site / "searched.html"
    page.write_text((site / "index.html").read_text().replace("</body>", f"{SEARCH}</body>"))
    made = elements_of(page, "--virtual-time-budget=20000")
    assert re.search(r"md-search-result__meta\">\d+ matching documents", made)
    assert "problems/CK004.html" in made.partition("md-search-result__list")[2]


class Measuring(SimpleHTTPRequestHandler):
    """Serve the site, and take what a page of it has measured."""

    found: ClassVar[Queue[list[tuple[int, str, str, int]]]] = Queue()

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write no line for each request."""


@needs_browser
@pytest.mark.timeout(600)
def test_nothing_is_clipped_on_a_wide_or_a_narrow_screen(site: Path) -> None:
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    (site / "measured.html").write_text(MEASURED.replace("PAGES", json.dumps(pages)))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Measuring, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            address = f"http://127.0.0.1:{server.server_port}/measured.html"
            command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", address]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as browser:
                try:
                    clipped = Measuring.found.get(timeout=500)
                finally:
                    os.killpg(browser.pid, signal.SIGTERM)
        server.shutdown()
    # The longest table there is does not fit a narrow screen: the measure finds something.
    assert [one for one in clipped if one[2] in SCROLLED] and [one for one in clipped if one[2] not in SCROLLED] == []
