"""`ckptools formats`: what is read and written, and how each is recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptools.cli.arguments import AsJson
from ckptools.cli.printing import show
from ckptools.formats.registry import FORMATS, formats_from_outside
from ckptools.text import printable


def formats(json: AsJson = False) -> None:
    """List the formats that are read and written.

    In the order in which they are tried. Other packages bring more through the entry point group ckptools.formats;
    theirs are tried first.
    """
    from ckptools.consolidate.writers import WRITERS

    show(known_formats_json(WRITERS) if json else known_formats_text(WRITERS))


# -- known formats ----------------------------------------------------------------------------------------------------


class OutputFormat(Protocol):
    """What is shown of a format that is written.

    Attributes:
        NAME: an identifier.
        WRITES: what it writes, in one line.
        SUFFIXES: of the output names that ask for it.
    """

    NAME: str
    WRITES: str
    SUFFIXES: tuple[str, ...]


def known_formats_text(outputs: Sequence[OutputFormat]) -> str:
    """Formats that are read, in the order in which they are tried, then those that are written; two lines each."""
    lines = ["read, the first that recognises a path:"]
    for known in (*formats_from_outside(), *FORMATS):
        lines.append(f"  {printable(known.NAME)}: {printable(known.READS)}")
        lines.append(f"      known by {printable(known.KNOWN_BY)}")
    lines += ["", "written, by the suffix of the output:"]
    for output in outputs:
        lines.append(f"  {output.NAME}: {output.WRITES}")
        lines.append(f"      {', '.join(output.SUFFIXES)}")
    return "\n".join(lines)


def known_formats_json(outputs: Sequence[OutputFormat]) -> str:
    """Every format that is read and every one that is written, as one JSON object."""
    read = [{"name": f.NAME, "reads": f.READS, "known_by": f.KNOWN_BY} for f in (*formats_from_outside(), *FORMATS)]
    written = [{"name": o.NAME, "writes": o.WRITES, "suffixes": list(o.SUFFIXES)} for o in outputs]
    from ckptools.display.record_json import to_json

    return to_json({"schema": "ckptools/formats/1", "read": read, "written": written}, indent=2)
