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
  RendezvousError           3   nodes or ranks of a run did not find each other

A message is one line that starts with the file and ends with what to do. Facts are attributes too, so that
a message need not be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from ckptools.text import few


def original_of(path: Path) -> Path:
    """The file that a temporary one was made from, which its path names as `original`; any other file itself."""
    original: Path = getattr(path, "original", path)
    return original


class CkptoolsError(Exception):
    """Root of the tree.

    Attributes:
        path: the file or folder that it is about, if there is one; of a temporary file the one that it was made from.
        reason: the message without the path.
        exit_code: what the command line returns for it.
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
    """An error that came from another process, whatever its class takes to make one."""
    error = kind.__new__(kind, message)
    error.__dict__.update(facts)
    return error


ReadErrorKind = Literal["absent", "no access", "cut", "unfinished", "damaged", "contradicts"]
"""Why a file cannot be read: there is none; the system did not let us, so that nothing is known of the content; it is
empty or ends too early; the file that its writer writes last is not there; its content is something else than it claims
to be, or than the metadata beside it says."""


class ReadError(CkptoolsError):
    """A file cannot be read as what it claims to be; `kind` says why, for those who go on differently."""

    def __init__(self, path: str | Path | None, reason: str, kind: ReadErrorKind = "damaged") -> None:
        super().__init__(path, reason)
        self.kind = kind


SAVE_FAILED = "torch.save began it and failed before it wrote the object"
"""What is known of an archive that holds nothing but what torch.save writes around every object."""


class UnknownFormatError(ReadError):
    """No format recognises the path."""


class TrackerError(ReadError):
    """The tracker in the folder of a run names another checkpoint than the only one that is here."""


class UnsafePathError(ReadError):
    """A name leads out of the checkpoint's folder, or to something that is not a regular file."""


class DamagedError(ReadError):
    """A record, in which the tensor `fqn` lies, is not what its container's checksum says."""

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


class _ProblemLike(Protocol):
    """One thing that is wrong, as `ckptools.Problem` has it, which this room may not import."""

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
    """Parts of the checkpoint are missing, overlap or disagree: `problems` has every one, not just the first."""

    def __init__(self, path: str | Path, reason: str, problems: Sequence[_ProblemLike] = ()) -> None:
        super().__init__(path, reason)
        self.problems = tuple(problems)


MAX_NAMES = 8
"""Classes that a message lists."""

MAX_NAME = 100
"""Characters of the name of a class that a message has."""


class ForeignClassError(RefusedError):
    """The torch loader would have to import classes that are not on its allow-list; `names` are dotted."""

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


class RendezvousError(CkptoolsError):
    """Nodes or ranks of a run did not find each other, or are not those that were expected."""


def remade(kind: str, message: str) -> CkptoolsError | None:
    """Make an error again that another process raised, from its texts; None where the name is no such error's."""
    known = globals().get(kind)
    if not (isinstance(known, type) and issubclass(known, CkptoolsError)):
        return None
    # Some take more than a path and a reason to be made, which the message has in it already.
    error = known.__new__(known, message)
    CkptoolsError.__init__(error, None, message)
    return error


# -- errors in the words of Python: what commands call `--prefer-rank` is the argument `prefer_rank` here --------------


P = ParamSpec("P")
R = TypeVar("R")

COMMAND = re.compile(
    r"ckptools (?:consolidate|create|diff|doctor|formats|inspect|ls|match|report|shell|show|stats|tree|verify)\b[^;:)]*"
)
"""A command line in a message, which stays as it is typed."""

CHOICE = re.compile(r"--(only|fill|dtype|weights|format) ([a-z0-9_]+)(?![a-z0-9_.-])")
OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Let the errors of a public function name its arguments as Python does."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CkptoolsError as error:
            error.args = tuple(python_words(a) if isinstance(a, str) else a for a in error.args)
            error.reason = python_words(error.reason)
            raise

    return called


def python_words(text: str) -> str:
    """A message without the dashes of options, but in commands."""
    commands = COMMAND.findall(text)
    parts = (CHOICE.sub(r"\1='\2'", part) for part in COMMAND.split(text))
    rest = [OPTION.sub(lambda option: option[1].replace("-", "_"), part) for part in parts]
    return "".join(part for pair in zip(rest, [*commands, ""], strict=True) for part in pair)
