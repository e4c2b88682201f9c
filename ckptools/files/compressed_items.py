"""Items that were compressed one by one (DCP's `stream.zstd`), unpacked so that tensors have a place in a file.

`dcp.save` with the extension `ZStandard` sends each item through a stream of its own before it is written; the metadata
says so and does not say how long the item was. A tensor's length follows from its dtype, shape and an archive's
directory; an object's is bounded. What is unpacked at once goes into one temporary file, in the folder that
`ckptools.files.temporary` keeps, and is found there for the rest of the process.

Source: torch/distributed/checkpoint/_extension.py of torch 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

from ckptools.errors import ReadError
from ckptools.files import compressed
from ckptools.files.opening import File, Window
from ckptools.files.temporary import room_in, temporary_file

ZSTD = "stream.zstd"
"""The extension's name in a transform descriptor; a version follows behind a slash."""

ARCHIVE = 64 << 10
"""Bytes that an archive of one tensor has beside its values, at most; torch writes less than two thousand."""


class CompressedItem(NamedTuple):
    """A compressed part of a file.

    Attributes:
        offset: where it begins.
        length: its bytes there.
        limit: bytes that it may unpack to.
    """

    offset: int
    length: int
    limit: int


class UnpackedItem(NamedTuple):
    """The place of an unpacked part: a temporary file, byte offset and length there."""

    path: Path
    start: int
    size: int


_lock = threading.Lock()
_unpacked: dict[tuple[object, ...], UnpackedItem] = {}


def is_zstd(transforms: tuple[str, ...]) -> bool:
    """Whether an item went through zstd, in the form that is known, and through nothing else."""
    name, _, version = transforms[0].partition("/") if len(transforms) == 1 else ("", "", "")
    return name == ZSTD and version.partition(".")[0] == "1"


def unpack(file: File, parts: Iterable[CompressedItem], most: int) -> None:
    """Unpack parts of a file into one temporary file; for those that cannot be, `window` raises the error.

    Args:
        file: what they lie in.
        parts: which.
        most: bytes that all of them together may unpack to.

    Raises:
        NoSpaceError: there is no room for them.
    """
    with _lock:
        wanted = [part for part in parts if _key(file, part) not in _unpacked]
        if wanted:
            _unpack(file, wanted, most)


def window(file: File, part: CompressedItem) -> tuple[File, Window]:
    """Open what a part unpacks to: a temporary file, which the caller closes, and the window that the part is there.

    Raises:
        ReadError: it cannot be unpacked, or to more than it may.
        NoSpaceError: there is no room for it.
    """
    with _lock:
        if _key(file, part) not in _unpacked or not _unpacked[_key(file, part)].path.exists():
            _unpack(file, [part], None)
        place = _unpacked[_key(file, part)]
    opened = File(place.path)
    return opened, Window(opened, place.start, place.size)


def _key(file: File, part: CompressedItem) -> tuple[object, ...]:
    return *file.identity, part.offset, part.length


def _unpack(file: File, parts: list[CompressedItem], most: int | None) -> None:
    """Write what parts unpack to into a new temporary file; without a limit for all, one that fails is an error."""
    target = temporary_file(file.path, file.path.name)
    needed = sum(part.limit for part in parts)
    with room_in(target, file.path, min(needed, most or needed)), target.open("xb") as out:
        for part in parts:
            start = out.tell()
            limit = part.limit if most is None else min(part.limit, most - start)
            try:
                _write(out, file, part._replace(limit=limit))
            except ReadError:
                if most is None:
                    raise
                out.seek(start)
                out.truncate()
            else:
                _unpacked[_key(file, part)] = UnpackedItem(target, start, out.tell() - start)


def _write(out: IO[bytes], file: File, part: CompressedItem) -> None:
    done = 0
    for piece in compressed.pieces(Window(file, part.offset, part.length), "zstd"):
        done += len(piece)
        if done > part.limit:
            raise ReadError(file.path, f"its {part.length} bytes unpack to more than the {part.limit} that it may hold")
        out.write(piece)
