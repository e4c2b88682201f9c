"""The site builds without a warning, asks no other host for anything, and is searched from a folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptools.cli.start import COMMANDS
from ckptools.model.problems import Code
from tools.browser import elements_of, needs_browser

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

SEARCH = """<script>setTimeout(() => {
const box = document.querySelector("#__search"), words = document.querySelector(".md-search__input")
box.checked = true; box.dispatchEvent(new Event("change")); words.focus(); words.value = "CRC-32 flipped"
words.dispatchEvent(new Event("input")); words.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}))
}, 3000)</script>"""


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
