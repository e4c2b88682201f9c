"""Opening what a command is about, with a line that says how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptools.checkpoint import Checkpoint
    from ckptools.cli.inspect import Weights
    from ckptools.formats.options import Reader


def opened(
    path: Path,
    only_this_file: bool,
    follow_symlinks: bool,
    weights: Weights,
    rules: Path | None,
    shapes: Path | None,
    all_ranks: bool = True,
    read: Reader | None = None,
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does; `read` reads one file, by default the inert reader."""
    from ckptools.cli.progress import ReadingLine
    from ckptools.formats import open_checkpoint
    from ckptools.pickles import reader

    with ReadingLine(read or reader.read) as line:
        return open_checkpoint(
            path,
            all_ranks=all_ranks,
            only_this_file=only_this_file,
            follow_symlinks=follow_symlinks,
            read_file=line,
            weights=weights.value,
            rules=rules,
            shapes=shapes,
        )
