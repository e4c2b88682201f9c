"""`ckptools formats`: what is read and written, and how each is recognised."""

from __future__ import annotations

from ckptools.cli.arguments import AsJson
from ckptools.cli.printing import show


def formats(json: AsJson = False) -> None:
    """List the formats that are read and written.

    In the order in which they are tried. Other packages bring more through the entry point group ckptools.formats;
    theirs are tried first.
    """
    from ckptools.consolidate.writers import WRITERS
    from ckptools.views.known_formats import known_formats_json, known_formats_text

    show(known_formats_json(WRITERS) if json else known_formats_text(WRITERS))
