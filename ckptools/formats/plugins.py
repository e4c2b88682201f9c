"""Formats that other packages bring: the entry point group `ckptools.formats`.

An entry point names a module, or an object, with what `Format` asks for. A package that brings one is installed on
purpose, so its formats are asked before our own. One that cannot be loaded, or fails, is a warning and nothing more.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckptools.errors import CkptoolsError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckptools.formats.options import Options
    from ckptools.formats.registry import Format
    from ckptools.model.checkpoint import Checkpoint

GROUP = "ckptools.formats"
NEEDS = ("NAME", "READS", "KNOWN_BY", "detect", "read")


class PluginWarning(UserWarning):
    """A format that another package brings is broken, and is left out."""


class Guarded:
    """A format that another package brings, whose failures do not end the program.

    Attributes:
        NAME, READS, KNOWN_BY: as the format has them.
    """

    def __init__(self, format_: Any) -> None:
        self._format = format_
        self.NAME, self.READS, self.KNOWN_BY = str(format_.NAME), str(format_.READS), str(format_.KNOWN_BY)

    def detect(self, path: Path) -> bool:
        """Whether the format says that it knows `path`; not when it fails."""
        try:
            return bool(self._format.detect(path))
        except Exception as error:
            _warn(self.NAME, f"detect failed on {path.name}", error)
            return False

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Open a checkpoint of this format.

        Raises:
            CkptoolsError: as the format raises it, or the format fails in a way that it should not.
        """
        try:
            return cast("Checkpoint", self._format.read(path, options))
        except CkptoolsError:
            raise
        except Exception as error:
            text = f"the format {self.NAME}, which another package brings, failed: {type(error).__name__}: {error}"
            raise CkptoolsError(path, text) from error


@lru_cache(maxsize=1)
def formats_from_outside() -> tuple[Format, ...]:
    """Every format that an installed package brings and that can be loaded, in the order of their names."""
    # `python -m` puts the current folder on the path; what lies beside a checkpoint is never a package to trust.
    folders = [folder for folder in sys.path if folder and Path(folder) != Path.cwd()]
    if not any(map(_brings_one, folders)):
        return ()
    # 30 ms to import, which an inspect without plug-ins should not pay.
    from importlib.metadata import distributions

    points = {p.name: p for d in distributions(path=folders) for p in d.entry_points if p.group == GROUP}
    found = (_load(points[name]) for name in sorted(points))
    return tuple(f for f in found if f is not None)


def _load(point: EntryPoint) -> Format | None:
    try:
        format_ = point.load()
        absent = [name for name in NEEDS if not hasattr(format_, name)]
        if absent:
            raise AttributeError(f"has no {', '.join(absent)}")
        return Guarded(format_)
    except Exception as error:
        _warn(point.name, f"{point.value} cannot be used", error)
        return None


def _warn(name: str, what: str, error: Exception) -> None:
    text = f"format {name} from another package: {what}: {type(error).__name__}: {error}; it is left out"
    warnings.warn(text, PluginWarning, stacklevel=3)


def _brings_one(folder: str) -> bool:
    """Whether the metadata of a package in a folder of Python's path names the group."""
    return any(_names_group(path) for path in _metadata_files(folder))


def _metadata_files(folder: str) -> Iterator[str]:
    try:
        names: Sequence[str] = os.listdir(folder)  # noqa: PTH208 - a Path for each entry costs more than the search
    except OSError:
        return
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            yield f"{folder}/{name}/entry_points.txt"


def _names_group(path: str) -> bool:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return b"[" + GROUP.encode() + b"]" in file.read(1 << 20)
    except OSError:
        return False
