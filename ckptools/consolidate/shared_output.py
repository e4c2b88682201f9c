"""The files of an output in the making: rank 0 makes them, and gives them their names; all ranks write into them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptools.cluster.team import current
from ckptools.consolidate.journal import Kept
from ckptools.consolidate.writers.layout import Layout
from ckptools.errors import WriteError
from ckptools.files.partial_files import PartialFiles


@dataclass(frozen=True)
class Output:
    """The files of an output, open under temporary names.

    Attributes:
        partial: gives them their own; None where another rank does.
        targets: their descriptors.
        paths: where they are now.
    """

    partial: PartialFiles | None
    targets: Sequence[int]
    paths: Sequence[Path]


@contextmanager
def opened_output(layout: Layout, new_folder: Path | None, kept: Kept | None) -> Iterator[Output]:
    """Open the files of an output under their temporary names; at the end all ranks have closed them.

    Args:
        layout: what files there are.
        new_folder: a folder that is made for them; None where it is there.
        kept: where they stay if they do not come to their end; None where nothing stays.

    Raises:
        RefusedError: what stays of an earlier run is of another plan.
        WriteError: one cannot be made, or another rank does not see it.
    """
    with ExitStack() as stack:
        made = PartialFiles(kept.folder if kept else None)
        partial = stack.enter_context(made) if current().rank == 0 else None
        targets = [] if partial is None else _made(partial, layout, new_folder, kept)
        paths = current().gather([] if partial is None else [partial.place(path) for path, _ in layout.files])[0]
        if partial is None:
            with current().own_work():
                targets = [_opened(path, final, stack) for path, (final, _) in zip(paths, layout.files, strict=True)]
        yield Output(partial, targets, paths)


def _made(partial: PartialFiles, layout: Layout, new_folder: Path | None, kept: Kept | None) -> list[int]:
    if new_folder is not None:
        partial.make_folder(new_folder)
    if kept is not None:
        kept.begin()
    if layout.folder is not None:
        partial.create_folder(layout.folder)
    return [partial.create(path, size) for path, size in layout.files]


def _opened(path: Path, final: Path, stack: ExitStack) -> int:
    """A file that rank 0 has made, opened for writing until the end."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        why = (error.strerror or "").lower()
        raise WriteError(final, f"the file that rank 0 has made for it cannot be opened here: {why}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def synced(targets: Sequence[int]) -> None:
    """Bring to the disk what every rank has written, where others are to see it.

    Raises:
        OSError: the disk failed.
    """
    if current().world_size > 1:
        with current().own_work():
            for descriptor in targets:
                os.fsync(descriptor)
        current().gather(None)
