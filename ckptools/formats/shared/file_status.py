"""What is known of a checkpoint's file that is here: it was read, looked at from its end, or found to be damaged."""

from __future__ import annotations

from pathlib import Path

from ckptools.files.opening import NO_ACCESS
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code
from ckptools.pickles import reader
from ckptools.pickles.reader import Saved


def fault(why: str) -> Code:
    """The problem code for a file that cannot be read: the system did not let us, or it is cut short or damaged."""
    return Code.FILE_UNREADABLE if NO_ACCESS in why else Code.FILE_CUT


def was_read(saved: Saved, rank: int | None = None, part: str = "") -> RankFile:
    """A file that was read in full."""
    return RankFile(saved.path, rank, part, "read", saved.nbytes, saved.modified)


def looked_at(path: Path, rank: int | None, part: str, wrong: dict[Path, str], read: bool = False) -> RankFile:
    """A file whose content is not at hand.

    Args:
        path: the file; it may be gone by now.
        rank: whose it is.
        part: what of a rank it holds.
        wrong: what is known to be wrong with files; what is found out here is noted in it.
        read: whether it was read, so that there is nothing to look for.
    """
    why = wrong.get(path) or ("" if read else reader.probe_error(path))
    status = path.stat() if path.exists() else None
    size, modified = (status.st_size, status.st_mtime) if status else (0, None)
    if why:
        wrong[path] = why
        return RankFile(path, rank, part, "cut" if "cut short" in why or not size else "bad", size, modified)
    return RankFile(path, rank, part, "read" if read else "seen", size, modified)
