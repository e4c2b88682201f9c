"""The page of a difference: what `diff` finds between two checkpoints, in its words, with its JSON."""

from __future__ import annotations

import time
from pathlib import Path

from ckptools.diff.record import Difference
from ckptools.diff.text import verdict_line
from ckptools.display.html import Limits, Page, document, how_made
from ckptools.display.next_command import quoted
from ckptools.display.record_json import answer_json
from ckptools.display.screen import PIPE, Screen, mark_of
from ckptools.display.tables import wrapped
from ckptools.files.partial_files import write_text
from ckptools.pictures.heat_map import change_cells, heat_map
from ckptools.report.html import check_place
from ckptools.text import clip_middle, moment_utc

LIMITS = Limits(rows=5000, nbytes=2_000_000)
"""Limits of the page without its picture; the JSON in it is never cut."""


def difference_page(found: Difference, out: str = "report.html") -> str:
    """Render a difference as one document that includes the JSON of `diff`.

    `out` is the name of the page in the command that makes it again.
    """
    paths = quoted([str(found.a.path), str(found.b.path)])
    page = Page(f"ckptools diff {paths} --limit 0", LIMITS, headed=True)
    found._fill(page)
    if found.values_compared and (cells := change_cells(found)):
        names = " to ".join(clip_middle(side.name, 60) for side in (found.a, found.b))
        drawn = heat_map(f"change of weights from {names}", cells, absolute=True).html()
        page.drawing(f"<section>{page.heading('pictures')}{drawn}</section>")
    options = quoted(["-o", out, *["--values"] * found.values_compared])
    made = how_made(f"ckptools report {paths} {options}", f"written {moment_utc(time.time())}")
    title = " and ".join(clip_middle(side.name, 24) for side in (found.a, found.b))
    return document(title, title, page.html(), {"diff": answer_json("diff", found)}, "what differs", made=made)


def write_difference_report(found: Difference, out: str | Path, *, force: bool = False) -> None:
    """Write the page of a difference to a file, which appears whole or not at all.

    Raises:
        OutputExistsError: the file exists.
        UsageError: its name does not end with `.html`, or its folder does not exist.
    """
    check_place(Path(out), force)
    write_text(Path(out), difference_page(found, Path(out).name), force)


def outcome_lines(found: Difference, screen: Screen = PIPE) -> list[str]:
    """State whether the two differ."""
    line = verdict_line(found)
    return wrapped("", line, screen, mark=mark_of(line))
