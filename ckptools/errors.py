"""Every error that ckptools raises on purpose.

CkptoolsError               exit code
  ReadError                 3   a file cannot be read in the claimed format
    UnknownFormatError      3   no format detects the path
    UnsafePathError         3   a name or link leads out of the checkpoint, or to something other than a regular file
    DamagedError            4   the bytes of a zip entry do not match its checksum
  UsageError                2   the arguments contradict each other
    SeveralError            2   a folder holds several checkpoints
  RefusedError              4   ckptools could go on, but the result would be wrong, unsafe or in the way
    NotWholeError           4   parts are missing, overlap or disagree; `.problems` lists them all
    ForeignClassError       4   the torch loader would need a class that is not on its allow-list
    OutputExistsError       4   the output is already there, or lies inside the input
    NoSpaceError            4   the output does not fit on the disk
  WriteError                3   the output could not be written
  RendezvousError           3   nodes or ranks of a run did not find each other

A message is one line that starts with the file and ends with what to do. Facts are attributes too, so that
a message need not be parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ckptools.option import spelled
from ckptools.text import few


def original_of(path: Path) -> Path:
    """The file from which a temporary one was made (its path's `original`); any other path itself."""
    original: Path = getattr(path, "original", path)
    return original


class CkptoolsError(Exception):
    """The base class of ckptools' errors.

    Attributes:
        path: the file or folder that it is about, if any; for a temporary file, the file from which it was made.
        reason: the message without the path.
        exit_code: the exit code of the command line.
    """

    exit_code = 3

    def __init__(self, path: str | Path | None, reason: str) -> None:
        path = Path(path) if isinstance(path, str) else path
        self.path = None if path is None else original_of(path)
        self.reason = reason
        super().__init__(reason if path is None else f"{self.path}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[CkptoolsError], message: str, facts: Mapping[str, Any]) -> CkptoolsError:
    """Rebuild an error that came from another process, whatever arguments its class takes."""
    error = kind.__new__(kind, message)
    error.__dict__.update(facts)
    return error


ReadErrorKind = Literal["absent", "no access", "cut", "unfinished", "damaged", "without object", "contradicts"]
"""Why a file cannot be read. `absent`: there is no such file. `no access`: the system refused, so that the content is
unknown. `cut`: it is empty or ends too early. `unfinished`: the file that its writer writes last is missing. `damaged`:
its content is not of the claimed format. `without object`: torch.save failed before it wrote the object.
`contradicts`: its content disagrees with the metadata beside it.
"""


class ReadError(CkptoolsError):
    """A file cannot be read in the claimed format; `kind` says why."""

    def __init__(self, path: str | Path | None, reason: str, kind: ReadErrorKind = "damaged") -> None:
        super().__init__(path, reason)
        self.kind = kind


class UnknownFormatError(ReadError):
    """No format detects the path."""


class TrackerError(ReadError):
    """The tracker in a run's folder names a checkpoint other than the only one present."""


class UnsafePathError(ReadError):
    """A name leads out of the checkpoint's folder, or to something other than a regular file."""


class DamagedError(ReadError):
    """The bytes of a zip entry with the tensor `fqn` do not match the checksum that the archive states."""

    exit_code = 4

    def __init__(self, path: str | Path, fqn: str, damage: str, way: str = "") -> None:
        way = way or f"leave out what it holds with {spelled('allow-missing', True)}"
        super().__init__(path, f"{fqn}: {damage}; the file is damaged: take another copy of the file, or {way}")
        self.fqn = fqn


class UsageError(CkptoolsError):
    """The arguments contradict each other."""

    exit_code = 2


class SeveralError(UsageError):
    """A folder contains several checkpoints, and the user did not choose one."""


class RefusedError(CkptoolsError):
    """The result would be wrong or unsafe."""

    exit_code = 4


class _ProblemLike(Protocol):
    """A problem, with the attributes of `ckptools.Problem`, which this module may not import."""

    @property
    def code(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def tensor(self) -> str | None: ...


class NotWholeError(RefusedError):
    """Parts of the checkpoint are missing, overlap or disagree; `problems` lists all of them."""

    def __init__(self, path: str | Path, reason: str, problems: Sequence[_ProblemLike] = ()) -> None:
        super().__init__(path, reason)
        self.problems = tuple(problems)


MAX_NAMES = 8
"""At most this many classes are listed in a message."""

MAX_NAME = 100
"""Characters of a class name in a message."""


class ForeignClassError(RefusedError):
    """The torch loader would have to import classes that are not on its allow-list; `names` are dotted."""

    def __init__(self, path: str | Path, names: Sequence[str]) -> None:
        listed = few([name[:MAX_NAME] for name in names], MAX_NAMES)
        super().__init__(
            path,
            f"needs {listed}, not on the allow-list of the torch loader; if you trust this file, load it with "
            f"{spelled('trust', True)}, or look inside without running it: ckptools inspect",
        )
        self.names = tuple(names)


class OutputExistsError(RefusedError):
    """The output already exists, lies inside the input, or would be read as a part of it."""


class NoSpaceError(RefusedError):
    """The disk has less space than the output needs."""


class WriteError(CkptoolsError):
    """The output could not be written; no partial output has its name."""


class RendezvousError(CkptoolsError):
    """Nodes or ranks of a run did not find each other, or are not the expected ones."""


def remade(kind: str, message: str) -> CkptoolsError | None:
    """Rebuild an error of another process from its texts; None if the name is not one of ckptools' errors."""
    known = globals().get(kind)
    if not (isinstance(known, type) and issubclass(known, CkptoolsError)):
        return None
    # Some classes take more than a path and a reason; the message contains both already.
    error = known.__new__(known, message)
    CkptoolsError.__init__(error, None, message)
    return error
