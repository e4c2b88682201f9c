"""A real browser without a window: what it makes of a page, and how the page looks.

No package index has one, so that a test which needs it is skipped where the machine has none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
"""Without a window, as root too, and without a word to the network of its own."""


def elements_of(page: Path, *options: str) -> str:
    """The HTML of a page's elements, as they are after everything that may run has run."""
    return _run(page, "--dump-dom", *options)


def picture_of(page: Path, png: Path, *options: str, width: int = 1200, height: int = 1600, dark: bool = False) -> Path:
    """Save what a page looks like, at a width in pixels."""
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    _run(page, f"--screenshot={png}", f"--window-size={width},{height}", *scheme, *options)
    return png


def printed(page: Path, pdf: Path) -> Path:
    """Print a page."""
    _run(page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    return pdf


def _run(page: Path, *options: str) -> str:
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        command = [BROWSER, *QUIET, f"--user-data-dir={profile}", *options, page.absolute().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def overflow_of(html: str, folder: Path, width: int) -> int:
    """By how many pixels a page is wider than a window; what can be scrolled in itself is no wider than its place.

    Args:
        html: the page; its policy is taken away, for what measures it is a script.
        folder: where it is put.
        width: of the window, at least 500.
    """
    root = "document.documentElement"
    measuring = f"<script>document.body.id='over'+({root}.scrollWidth-{root}.clientWidth)</script></body>"
    page = folder / "measured.html"
    page.write_text(re.sub("<meta http-equiv[^>]*>", "", html).replace("</body>", measuring))
    found = re.search(r'<body id="over(-?\d+)"', elements_of(page, f"--window-size={width},1000"))
    assert found is not None
    return int(found[1])
