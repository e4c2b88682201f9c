"""`python -m tools.front_picture`: the recordings and the picture at the top of the README and of the site.

Trains a run, damages its newest checkpoint, asks `doctor` in a terminal, and writes the report. The recordings are
drawn from what terminals got, that of `browse` from `docs/browse.cast`; Chromium takes the picture of the report, light
and dark. `tests/test_front_picture.py` holds their words against what the commands say today.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from html import unescape
from pathlib import Path

from tools.browser import elements_of, picture_of
from tools.documents import Step, run
from tools.terminal_svg import drawn

DOCS = Path(__file__).parent.parent / "docs"
IMAGES = DOCS / "images"

RUN = "ckptools create run7 --strategy fsdp1 --world-size 4 --steps 6 --save-every 3"
BROKEN = "run7/ep0-ba6-rank0.pt"
DOCTOR = f"ckptools doctor {BROKEN}"
REPORT = f"ckptools report {BROKEN} -o report.html --deep --values"

SAVED = 1_760_000_000
"""When the files were written, in seconds since 1970; a picture that is made anew has the same time."""

KEY, THINKING = 0.045, 0.4
"""Seconds from one key to the next, and from a command to its answer."""

WIDTH, SCALE = 1000, 2
"""Pixels of the page that is pictured, each of which is so many of the picture."""

MARGIN = 36
"""Pixels below the last text of the page."""


def broken_run(folder: Path) -> None:
    """Train a run in a folder; of its newest checkpoint rank 2 is lost, and rank 3 is the file of an earlier step."""
    run(Step(0, RUN, ""), folder)
    (folder / "run7" / "ep0-ba6-rank2.pt").unlink()
    shutil.copy(folder / "run7" / "ep0-ba3-rank3.pt", folder / "run7" / "ep0-ba6-rank3.pt")
    for path in folder.glob("run7/*"):
        os.utime(path, (SAVED, SAVED))


def recording_of_doctor(folder: Path) -> str:
    """The command, typed key by key, and what a terminal shows of its answer."""
    events, at = [(0.0, "\x1b[35m$\x1b[0m ")], 0.6
    for key in DOCTOR:
        events.append((at, key))
        at += KEY
    answer = run(Step(0, f"{DOCTOR} --color always", ""), folder).rstrip().replace("\n", "\r\n")
    events.append((at + THINKING, f"\r\n{answer}"))
    return drawn(events, "ckptools doctor says which ranks of a checkpoint are broken, and what to do")


def recording_of_browse() -> str:
    """What docs/browse.cast has recorded."""
    head, *events = map(json.loads, (DOCS / "browse.cast").read_text().splitlines())
    events = [(at, text) for at, _, text in events]
    return drawn(events, "ckptools browse", head["width"], head["height"])


def report_page(folder: Path) -> str:
    """The report of the broken checkpoint, up to its first pictures."""
    run(Step(0, REPORT, ""), folder)
    return top_of((folder / "report.html").read_text())


def top_of(page: str) -> str:
    """A report up to the second of its headings: the verdict, the facts, the causes."""
    return page[: [found.start() for found in re.finditer("<h2", page)][1]]


def words_of(page: str) -> str:
    """The text of a page, a line for each piece; what is folded away is not there."""
    page = re.sub(r"<details>(.*?</summary>).*?(</details>|$)", r"\1", page, flags=re.DOTALL)
    page = re.sub(r"<(style|script|title|head)\b.*?</\1>", "", page, flags=re.DOTALL)
    return "\n".join(filter(None, (unescape(text).strip() for text in re.split("<[^>]*>", page))))


def main(images: Path = IMAGES) -> None:
    """Write all of them."""
    images.mkdir(exist_ok=True)
    (images / "browse.svg").write_text(recording_of_browse())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broken_run(folder)
        (images / "doctor.svg").write_text(recording_of_doctor(folder))
        html = report_page(folder)
        (images / "report.txt").write_text(f"{words_of(html)}\n")
        page = folder / "top.html"
        page.write_text(html)
        height = _height_of(html, folder)
        for scheme in ("light", "dark"):
            picture = images / f"report-{scheme}.png"
            scale = f"--force-device-scale-factor={SCALE}"
            picture_of(page, picture, scale, width=WIDTH, height=height, dark=scheme == "dark")


def _height_of(page: str, folder: Path) -> int:
    """Pixels down to the last text of a page, and a margin; its policy is taken away, for a script measures it."""
    measured = folder / "measured.html"
    texts = "[...document.querySelectorAll('body *')].filter((e) => !e.children.length && e.checkVisibility())"
    bottom = f"Math.ceil(Math.max(...{texts}.map((e) => e.getBoundingClientRect().bottom)))"
    script = f"<script>document.body.id = 'high' + {bottom}</script>"
    measured.write_text(re.sub("<meta http-equiv[^>]*>", "", page) + script)
    found = re.search(r'id="high(\d+)"', elements_of(measured, f"--window-size={WIDTH},1000"))
    assert found is not None
    return int(found[1]) + MARGIN


if __name__ == "__main__":
    main()
