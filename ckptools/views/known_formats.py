"""The formats that are read and written, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from ckptools.formats.plugins import formats_from_outside
from ckptools.formats.registry import FORMATS
from ckptools.text import printable


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
    return json.dumps({"schema": "ckptools/formats/1", "read": read, "written": written}, indent=2)
