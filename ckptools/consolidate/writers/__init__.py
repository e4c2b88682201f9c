"""Output formats: one file each, and the visible tuple that lists them."""

from __future__ import annotations

from pathlib import Path

from ckptools.consolidate.writers import dcp, pt, safetensors
from ckptools.consolidate.writers.layout import Writer
from ckptools.errors import UsageError

WRITERS: tuple[Writer, ...] = (pt, safetensors, dcp)


def writer_for(out: Path, name: str | None = None) -> Writer:
    """The writer called `name`, or else the one that the name of the output asks for.

    A folder that is there already asks for safetensors, as Hugging Face has its models, unless it is called a DCP.

    Raises:
        UsageError: there is none.
    """
    if name is not None:
        named = next((w for w in WRITERS if name == w.NAME), None)
        if named is None:
            raise UsageError(None, f"--format {name}: choose one of {', '.join(w.NAME for w in WRITERS)}")
        return named
    suffix = out.suffix.lower()
    if out.is_dir() and suffix not in dcp.SUFFIXES:
        return safetensors
    for writer in WRITERS:
        if suffix in writer.SUFFIXES:
            return writer
    known = ", ".join(s for w in WRITERS for s in w.SUFFIXES)
    told = f"no output format for {out.suffix or 'a name without suffix'!r}; use one of {known}, or say --format"
    raise UsageError(out, told)
