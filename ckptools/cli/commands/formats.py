"""`ckptools formats`: list the formats for reading and writing, and how each is recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptools.cli.options import JsonOptions
from ckptools.cli.printing import screen, show
from ckptools.display.screen import Screen, painted
from ckptools.display.tables import wrapped
from ckptools.formats.registry import FORMATS, Format, formats_from_outside
from ckptools.text import printable

if TYPE_CHECKING:
    from ckptools.consolidate.writers import Writer


def formats(*, form: JsonOptions) -> None:
    """List the formats that are read and written.

    In the order in which they are tried, with the writers on whose checkpoints each was tested. Other packages can add
    formats through the entry point group ckptools.formats; theirs are tried first.

    Examples:
        ckptools formats
        ckptools formats --json
    """
    from ckptools.consolidate.writers import WRITERS

    read = (*formats_from_outside(), *FORMATS)
    show(_as_json(read, WRITERS) if form.json else _as_text(read, WRITERS, screen()))


def _as_text(read: Sequence[Format], written: Sequence[Writer], screen: Screen) -> str:
    """Render the formats for reading, in the order of detection, then the formats for writing; two lines each."""
    lines = [painted("read, the first that recognises a path:", "heading", screen.color)]
    for known in read:
        lines += wrapped(f"  {printable(known.NAME)}: ", printable(known.READS), screen, label="heading")
        lines += wrapped("      ", f"known by {printable(known.KNOWN_BY)}", screen, mark="dim")
        tried = _tried(known)
        lines += wrapped("      ", printable(tried), screen, mark="dim") if tried else []
    lines += ["", painted("written, by the suffix of the output:", "heading", screen.color)]
    for output in written:
        lines += wrapped(f"  {output.NAME}: ", output.WRITES, screen, label="heading")
        lines += wrapped("      ", ", ".join(output.SUFFIXES), screen, mark="dim")
    return "\n".join(lines)


def _tried(known: Format) -> str:
    """List the writers with which a format was tested, in one line; empty if the format does not state them."""
    said = (("tried on ", known.TRIED), ("on files made by hand: ", known.BY_HAND))
    return "; ".join(words + ", ".join(writers) for words, writers in said if writers)


def _as_json(read: Sequence[Format], written: Sequence[Writer]) -> str:
    from ckptools.display.record_json import to_json

    inputs = [
        {
            "name": f.NAME,
            "reads": f.READS,
            "known_by": f.KNOWN_BY,
            "joins": list(f.JOINS),
            "tried": list(f.TRIED),
            "by_hand": list(f.BY_HAND),
        }
        for f in read
    ]
    outputs = [{"name": o.NAME, "writes": o.WRITES, "suffixes": list(o.SUFFIXES)} for o in written]
    return to_json({"schema": "ckptools/formats/1", "read": inputs, "written": outputs}, indent=2)
