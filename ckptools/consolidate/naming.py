"""What an output and the files beside it are called: one rule.

The suffix of the name says the format. A name without one needs `format`, and a file gets that format's suffix. A
name that ends with `/`, or that a folder has, is a folder: `model.safetensors` goes into it, or `model.pt`, as
`format` says; never into a folder of the source, where it could pass for the checkpoint, unless it is named. A DCP is
a folder itself and is called exactly as it is told. Everything else that is written lies beside the output under its
whole name and one word more: `OUT.json`, `OUT.left-out.json`, `OUT.manifest.json`, `OUT.index.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptools.consolidate.writers import FOLDER_HOLDS, WRITERS
from ckptools.consolidate.writers.layout import Writer
from ckptools.errors import UsageError, WriteError
from ckptools.files.location import is_remote, location
from ckptools.files.remote_store import RemoteError


@dataclass(frozen=True)
class Output:
    """Where an output goes.

    Attributes:
        path: the file, or the folder of a format that is one.
        writer: what writes it.
        new_folder: the folder that has to be made for it; None where it is there, was not asked for, or is in a
            bucket, which has no folders but by the names of what is in it.
        named: whether the user gave the file's name, not only a folder for it.
    """

    path: Path
    writer: Writer
    new_folder: Path | None = None
    named: bool = True


def output_of(out: str | Path, format: str | None = None) -> Output:
    """Find the file and the format that `out` asks for.

    Args:
        out: as the user gave it; a text may end with `/`.
        format: the name of a format, where the user gave one.

    Raises:
        UsageError: the name says no format, or another one than `format`, or is none.
        ReadError, WriteError: it is in a store that is not reached.
    """
    if not str(out):
        raise UsageError(None, "--out is empty; give a name for the output")
    path = location(out)
    with store_errors(path):
        folder = str(out).endswith(("/", os.sep)) or path.is_dir()
    writer = _writer(path, folder, format)
    if not writer.FILE:
        if path.name in ("", ".."):
            raise UsageError(path, "is no name for an output")
        return Output(path, writer)
    if folder:
        here = is_remote(path) or path.is_dir()
        return Output(path / writer.FILE, writer, None if here else path, named=False)
    named = path.suffix.lower() in writer.SUFFIXES
    return Output(path if named else path.with_name(path.name + writer.SUFFIXES[0]), writer)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Tell what a store says of the place of an output in one line.

    Raises:
        WriteError: it does not answer, or not to us.
    """
    try:
        yield
    except RemoteError as error:
        raise WriteError(path, error.strerror or "the store does not answer") from error


def _writer(path: Path, folder: bool, format: str | None) -> Writer:
    asked, by_name = _called(format), _by_suffix(path)
    if folder and by_name is not None and by_name.FILE:
        by_name = None  # `weights.pt/` is a folder that happens to be called so
    if asked is not None and by_name not in (None, asked):
        told = f"{path.suffix} is written as {by_name.NAME}" if by_name else ""
        raise UsageError(path, f"{told}, and --format says {asked.NAME}; choose one of the two")
    writer = asked or by_name or (FOLDER_HOLDS if folder else None)
    if writer is None:
        known = ", ".join(s for w in WRITERS for s in w.SUFFIXES)
        suffix = repr(path.suffix) if path.suffix else "a name without suffix"
        raise UsageError(path, f"no output format for {suffix}; use one of {known}, or say --format")
    return writer


def _called(name: str | None) -> Writer | None:
    found = next((w for w in WRITERS if name == w.NAME), None)
    if name is not None and found is None:
        raise UsageError(None, f"--format {name}: choose one of {', '.join(w.NAME for w in WRITERS)}")
    return found


def _by_suffix(path: Path) -> Writer | None:
    return next((w for w in WRITERS if path.suffix.lower() in w.SUFFIXES), None)
