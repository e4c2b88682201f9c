"""Output formats: one file each, and the visible tuple that lists them."""

from __future__ import annotations

from pathlib import Path

from ckptools.consolidate.writers import pt, safetensors
from ckptools.consolidate.writers.layout import Writer
from ckptools.errors import UsageError

WRITERS: tuple[Writer, ...] = (pt, safetensors)


def writer_for(out: Path) -> Writer:
    """The writer that a file name asks for.

    Raises:
        UsageError: none does.
    """
    for writer in WRITERS:
        if out.suffix.lower() in writer.SUFFIXES:
            return writer
    known = ", ".join(s for w in WRITERS for s in w.SUFFIXES)
    raise UsageError(out, f"no output format for {out.suffix or 'a name without suffix'!r}; use one of {known}")
