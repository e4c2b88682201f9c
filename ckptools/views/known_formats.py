"""The formats that are read and written, as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ckptools.consolidate.writers import WRITERS
from ckptools.formats import FORMATS
from ckptools.formats.plugins import formats_from_outside
from ckptools.text import printable


def known_formats_text() -> str:
    """Every format that is read, in the order of trying, then every one that is written; two lines each."""
    return "\n".join(
        ["read, the first that recognises a path:", *_read(), "", "written, by the suffix of the output:", *_written()]
    )


def _read() -> Iterator[str]:
    for format_ in (*formats_from_outside(), *FORMATS):
        yield f"  {printable(format_.NAME)}: {printable(format_.READS)}"
        yield f"      known by {printable(format_.KNOWN_BY)}"


def _written() -> Iterator[str]:
    for writer in WRITERS:
        yield f"  {writer.NAME}: {writer.WRITES}"
        yield f"      {', '.join(writer.SUFFIXES)}"


def known_formats_json() -> str:
    """The same for programs."""
    read = [{"name": f.NAME, "reads": f.READS, "known_by": f.KNOWN_BY} for f in (*formats_from_outside(), *FORMATS)]
    written = [{"name": w.NAME, "writes": w.WRITES, "suffixes": list(w.SUFFIXES)} for w in WRITERS]
    return json.dumps({"schema": "ckptools/formats/1", "read": read, "written": written}, indent=2)
