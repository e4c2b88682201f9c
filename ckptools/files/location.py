"""Resolve what a user or a file names: a path, or the URL of something in a store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ckptools.errors import ReadError, UnsafePathError, UsageError
from ckptools.files.remote.path import RemotePath, named_url, refreshed, shown_url
from ckptools.files.storage import RemoteError
from ckptools.model.values import describe_for_error

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(path: str | Path) -> bool:
    """Whether a path as the user gave it is the URL of something elsewhere, such as `s3://bucket/run7`."""
    return isinstance(path, RemotePath) or (bool(_URL.match(str(path))) and not Path(path).exists())


def path_of(path: str | Path, by_user: bool = False) -> Path:
    """A path of this machine, or the URL of something in a store; spelled by ckptools unless it is `by_user`.

    Raises:
        ReadError: the URL names no file.
    """
    if isinstance(path, RemotePath) or not is_remote(path):
        return Path(path) if isinstance(path, str) else path
    try:
        return named_url(str(path), by_user)
    except RemoteError as error:
        raise _not_read(path, error) from error


def location(path: str | Path) -> Path:
    """Resolve what the user named: a path of this machine, or that of a URL, whose facts are asked for anew.

    Raises:
        UsageError: it is no path, or empty.
        ReadError: it is a URL that is not read.
    """
    check_path(path)
    found = path_of(path, by_user=True)
    try:
        return refreshed(found) if isinstance(found, RemotePath) else found
    except RemoteError as error:
        raise _not_read(path, error) from error


def check_path(path: object) -> None:
    """Refuse what is no path, or an empty one, which would be this folder.

    Raises:
        UsageError: it is that.
    """
    if not isinstance(path, (str, Path)):
        raise UsageError(None, f"expected a path, found {describe_for_error(path)}")
    if path == "":
        raise UsageError(None, "the path is empty; this folder is .")


def _not_read(path: str | Path, error: RemoteError) -> ReadError:
    return ReadError(None, f"{shown_url(path)}: {error.strerror}", "no access")


def local_path(path: str | Path) -> Path:
    """A path of this machine, as the user gave it.

    Raises:
        ReadError: it is a URL.
    """
    if is_remote(path):
        raise ReadError(None, f"{shown_url(path)}: is remote; this needs a local file: copy it to this machine first")
    return Path(path)


def tells_others(path: Path) -> bool:
    """Whether what lies beside a file can be found; a web server has only what is named."""
    return not isinstance(path, RemotePath) or path.store.lists


def real_path(path: Path) -> Path:
    """A path with every link in it followed; that of something in a store itself."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def is_there(path: Path) -> bool:
    """Whether anything is at a path, also a link that leads nowhere."""
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def common_folder(paths: Iterable[Path]) -> Path:
    """The innermost folder that some paths, absolute ones, are all in or are."""
    first, *others = paths
    return next(p for p in (first, *first.parents) if all(other.is_relative_to(p) for other in others))


def check_stays_inside(path: Path, folder: Path) -> None:
    """Refuse a link at `path` that leads out of `folder`.

    Raises:
        UnsafePathError: it does.
    """
    if leads_out(path, folder):
        target = real_path(path)
        raise UnsafePathError(
            path, f"is a link to {target}, out of the checkpoint's folder; follow it with --follow-symlinks"
        )


def leads_out(path: Path, folder: Path) -> bool:
    """Whether there is a link at `path` that leads out of `folder`."""
    # realpath ends also where links lead in a circle; opening such a link is an error of its own.
    return path.is_symlink() and not real_path(path).is_relative_to(real_path(folder))


def is_plain_name(text: str) -> bool:
    """Whether a name that a file gives is that of something in the same folder, on any system."""
    return text not in ("", ".", "..") and not {"/", "\\", "\0", os.sep} & set(text)


def is_plain_path(text: str) -> bool:
    """Whether a name that a file gives leads to a place below its own folder, on any system."""
    odd = not text or len(text) > 4096 or "\0" in text or "\\" in text or ":" in text.split("/")[0]
    return not odd and {"", ".", ".."}.isdisjoint(text.split("/"))
