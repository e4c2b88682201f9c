"""Every error that ckptools raises on purpose.

CkptoolsError               exit code
  ReadError                 3   a file cannot be read as what it claims to be
    UnknownFormatError      3   no format recognises the path
    UnsafePathError         3   a name or link leads out of the checkpoint, or is no regular file
    DamagedError            4   a record is not what its checksum says
  UsageError                2   the caller asks for something that does not fit together
    SeveralError            2   a folder holds several checkpoints
  RefusedError              4   ckptools could go on, but the result would be wrong, unsafe or in the way
    NotWholeError           4   parts are missing, overlap or disagree; `.problems` lists them all
    ForeignClassError       4   the torch loader would need a class that is not on its allow-list
    OutputExistsError       4   the output is already there, or lies inside the input
    NoSpaceError            4   the output does not fit on the disk
  WriteError                3   the output could not be written

A message is one line that starts with the file and ends with what to do. Facts are attributes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.text import few

if TYPE_CHECKING:
    from ckptools.model.problems import Problem


_ORIGINALS: dict[Path, Path] = {}


def stands_for(temporary: Path, original: Path) -> None:
    """Let errors about a temporary file name the file that it was made from."""
    _ORIGINALS[temporary] = original


def original_of(path: Path) -> Path:
    """The file that a temporary one was made from; any other file itself."""
    return _ORIGINALS.get(path, path)


class CkptoolsError(Exception):
    """Root of the tree.

    Attributes:
        path: the file or folder that it is about, if there is one.
        exit_code: what the command line returns for it.
    """

    exit_code = 3

    def __init__(self, path: str | Path | None, message: str) -> None:
        path = path if path is None else original_of(Path(path))
        super().__init__(message if path is None else f"{path}: {message}")
        self.path = None if path is None else Path(path)


class ReadError(CkptoolsError):
    """A file cannot be read as what it claims to be."""


class UnknownFormatError(ReadError):
    """No format recognises the path."""


class UnsafePathError(ReadError):
    """A name leads out of the checkpoint's folder, or to something that is not a regular file."""


class DamagedError(ReadError):
    """A record is not what its container's checksum says.

    Attributes:
        fqn: a tensor that lies in it.
    """

    exit_code = 4

    def __init__(self, path: str | Path, fqn: str, damage: str) -> None:
        way = "take another copy of the file, or leave out what it holds with --allow-missing"
        super().__init__(path, f"{fqn}: {damage}; the file is damaged: {way}")
        self.fqn = fqn


class UsageError(CkptoolsError):
    """The arguments do not fit together."""

    exit_code = 2


class SeveralError(UsageError):
    """A folder holds several checkpoints, and which one is meant is not known."""


class RefusedError(CkptoolsError):
    """Going on would give a wrong or unsafe result."""

    exit_code = 4


class NotWholeError(RefusedError):
    """Parts of the checkpoint are missing, overlap or disagree.

    Attributes:
        problems: every problem found, not just the first.
    """

    def __init__(self, path: str | Path, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(path, message)
        self.problems = tuple(problems)


MAX_NAMES = 8
"""Classes that a message lists."""

MAX_NAME = 100
"""Characters of the name of a class that a message has."""


class ForeignClassError(RefusedError):
    """The torch loader would have to import a class that is not on its allow-list.

    Attributes:
        names: dotted names of the classes.
    """

    def __init__(self, path: str | Path, names: Sequence[str]) -> None:
        listed = few([name[:MAX_NAME] for name in names], MAX_NAMES)
        super().__init__(
            path,
            f"needs {listed}, not on the allow-list of the torch loader; if you trust this file, load it with "
            f"trust=True (--trust), or look inside without running it: ckptools inspect",
        )
        self.names = tuple(names)


class OutputExistsError(RefusedError):
    """The output is in the way of something, or something is in its way."""


class NoSpaceError(RefusedError):
    """The disk has less room than the output needs."""


class WriteError(CkptoolsError):
    """The output could not be written; nothing that looks finished was left."""
