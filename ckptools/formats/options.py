"""What a caller may ask of any format when it opens a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptools.pickles import reader
from ckptools.pickles.reader import Saved

Reader = Callable[[Path], Saved]


@dataclass(frozen=True)
class Options:
    """How to open a checkpoint.

    Attributes:
        all_ranks: read every rank's structure, not just that of the file that was named.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: what reads one torch.save file; the inert reader unless somebody asks for torch's.
    """

    all_ranks: bool = False
    only_this_file: bool = False
    follow_symlinks: bool = False
    read_file: Reader = reader.read
