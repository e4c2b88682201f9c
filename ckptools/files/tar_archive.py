"""The members of a tar: the byte range of each regular file. Python's tarfile parses the headers.

Nothing is extracted. tarfile mistakes a damaged header, and the end of a cut file, for the end of the tar; so its last
read is checked here.
"""

from __future__ import annotations

import re
import tarfile
from typing import Any, cast

from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import File, Window
from ckptools.model.tree import describe_for_error

MAX_MEMBERS = 100_000
MAX_HEADERS = 1 << 16
"""Bytes of the headers of one member: they contain a path and a few numbers."""

MAX_DIGITS = 300
"""Consecutive digits in a header; before Python 3.11.10, tarfile searches them in quadratic time."""

_DIGITS = re.compile(rb"[0-9]+")


class _Headers:
    """Feeds tarfile the headers of one member at a time, and limits their bytes."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.last = b""
        self.move_to(0)

    def move_to(self, at: int) -> None:
        """Move to the headers of another member."""
        self.at, self.left = at, MAX_HEADERS

    def tell(self) -> int:
        return self.at

    def seek(self, at: int) -> None:
        self.at = at

    def read(self, length: int) -> bytes:
        if not 0 <= length <= self.left:
            raise ReadError(
                self.file.path, f"a member of the tar has too long a header; at most {MAX_HEADERS} bytes are read"
            )
        self.left -= length
        self.last = self.file.read(self.at, max(0, min(length, self.file.size - self.at)))
        self.at += len(self.last)
        if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(self.last)):
            raise self.fault()
        return self.last

    @property
    def ended(self) -> bool:
        """Whether the block of zeros that ends a tar was read."""
        return len(self.last) == tarfile.BLOCKSIZE and not any(self.last)

    def fault(self) -> ReadError:
        """The error at the place where tarfile stopped."""
        if self.at >= self.file.size:
            return ReadError(
                self.file.path, f"is cut short: {self.file.size} bytes, and the tar does not end there", "cut"
            )
        return ReadError(self.file.path, f"the tar's header at byte {self.at - len(self.last)} is damaged")


def members(file: File) -> dict[str, Window]:
    """The regular files in a tar, by name, without a leading `./`.

    Raises:
        ReadError: it is cut or damaged, or has links, devices, sparse files, or names that lead out of its folder.
    """
    headers, found = _Headers(file), dict[str, Window]()
    try:
        tar = tarfile.TarFile(fileobj=cast("Any", headers), encoding="utf-8", errors="replace")
        for _ in range(MAX_MEMBERS):
            member = tar.next()
            if member is None:
                break
            _add(file, found, member)
            # otherwise tarfile reads the last byte of the content
            headers.move_to(tar.offset)
        else:
            raise ReadError(file.path, f"a tar of more than {MAX_MEMBERS} members")
    except CkptoolsError:
        raise
    except Exception as error:
        # For a damaged header tarfile may also raise ValueError, IndexError or RecursionError.
        raise headers.fault() from error
    if not headers.ended:
        raise headers.fault()
    return found


def _add(file: File, found: dict[str, Window], member: tarfile.TarInfo) -> None:
    """Add a member that is a regular file; skip a folder."""
    if member.isdir():
        return
    if what := _irregular(member):
        raise ReadError(file.path, f"a tar that holds {what}; checkpoints are regular files")
    end = member.offset_data + member.size
    if member.size < 0:
        raise ReadError(file.path, f"a member of the tar has {describe_for_error(member.size)} bytes")
    if end > file.size:
        text = f"is cut short: {file.size} bytes, and a member of the tar ends at {describe_for_error(end)}"
        raise ReadError(file.path, text, "cut")
    name = _checked_name(file, member.name)
    if name in found:
        raise ReadError(file.path, f"holds two members called {describe_for_error(name)}")
    found[name] = Window(file, member.offset_data, member.size)


def _irregular(member: tarfile.TarInfo) -> str:
    """The kind of a member that is not a regular file; "" for a regular one."""
    if member.issparse():
        return "a sparse file"
    if member.issym() or member.islnk():
        return "a link"
    return "" if member.isreg() else f"a member of type {describe_for_error(member.type)}"


def _checked_name(file: File, name: str) -> str:
    plain = name.removeprefix("./")
    if not plain or "\0" in plain or plain.startswith("/") or not {"", ".", ".."}.isdisjoint(plain.split("/")):
        raise ReadError(
            file.path, f"a member of the tar is called {describe_for_error(name)}, which is no plain relative name"
        )
    return plain
