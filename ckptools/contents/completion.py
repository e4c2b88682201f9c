"""The keys of a checkpoint that begin with what somebody has typed: for the completion of a shell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptools.model.checkpoint import Checkpoint

MANY = 100
"""More keys than this are shown up to their next dot only."""


def keys_beginning(path: str | Path, text: str) -> list[str]:
    """The keys of what is at a path that begin with a text, or where there are many, what they go on with next.

    Reads the structure of one rank alone, whatever lies beside it, and never raises: what cannot be read has no keys,
    and what a URL names is not asked for, since who types does not wait for a network.
    Names that a terminal could act on are left out, for nobody can type them.
    """
    from ckptools.files.location import local_path

    with contextlib.suppress(Exception):
        return sorted(_cut(_names(local_path(path)), text))
    return []


def sections_beginning(path: str | Path, text: str) -> list[str]:
    """The kinds of sections, and the names of those of what is at a path, that begin with a text; never raises."""
    from ckptools.contents.selection import KINDS
    from ckptools.files.location import local_path

    found = list(KINDS)
    with contextlib.suppress(Exception):
        from ckptools.training_state.sections import sections_of

        found += [section.name for section in sections_of(_opened(local_path(path)))] if path else []
    return sorted({name for name in found if name.startswith(text) and name.isprintable()})


def _opened(path: Path) -> Checkpoint:
    from ckptools.formats.opening import open_checkpoint
    from ckptools.training_state.modules import read_file

    return open_checkpoint([str(path)], all_ranks=False, only_this_file=path.is_file(), read_file=read_file)


def _names(path: Path) -> Iterable[str]:
    from ckptools.contents.entries import entries_of
    from ckptools.training_state.sections import sections_of

    ck = _opened(path)
    return [*(entry.name for entry in entries_of(ck)), *(section.name for section in sections_of(ck) if section.path)]


def _cut(names: Iterable[str], text: str) -> set[str]:
    found = {name for name in names if name.startswith(text) and name.isprintable()}
    if len(found) <= MANY:
        return found
    ends = ((name, name.find(".", len(text) + 1)) for name in found)
    return {name if end < 0 else name[:end] for name, end in ends}
