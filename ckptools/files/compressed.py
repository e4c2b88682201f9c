"""Compressed files, and compressed items of files, unpacked into temporary files so that tensors have byte offsets.

Composer writes `.pt.gz`, `.pt.bz2`, `.pt.xz`, `.pt.lzma`, `.pt.zst`, `.pt.lz4` and `.pt.lzo` through command-line
tools (composer/utils/compression.py), and `.tar.gz`, `.tar.bz2`, `.tar.lzma` (which is xz) through Python's tarfile.
The first bytes decide, not the suffix.

Each source is unpacked once per process; `ckptools.files.partial_files` chooses the place.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ckptools.errors import ReadError
from ckptools.files.opening import HEAD, File, Window, content_of, what_is
from ckptools.files.partial_files import LOOK_EVERY, check_room, room_in, temporary_file

PIECE = 4 << 20
"""At most this many bytes are unpacked at once, so that memory stays flat."""

BOMB_RATIO = 1000
BOMB_BYTES = 8 << 30
"""A file that unpacks to more than this, and to more than `BOMB_RATIO` times its size, is refused as a bomb."""

MAX_MEMORY = 1 << 30
"""Bytes of dictionary or window that a file may require; the tools' highest ordinary levels take 64 to 128 MiB."""

_lock = threading.Lock()
_made: dict[tuple[object, ...], Path] = {}


def unpacked(file: File, content: str) -> Path:
    """Unpack a compressed file into a temporary file, and return its path.

    `content` is the compression, as `opening.content_of` names it.

    Raises:
        ReadError: it is cut or damaged, has no checkpoint inside, or needs a package that is not installed.
        NoSpaceError: the disk is too full.
    """
    key = file.identity
    with _lock:
        if key not in _made or not _made[key].exists():
            _made[key] = _unpack(file, content)
        return _made[key]


def _unpack(file: File, content: str) -> Path:
    target = temporary_file(file.path, file.path.with_suffix("").name)
    found = pieces(file, content)
    first = b"".join(islice(found, 1))
    inside = content_of(first[:HEAD])
    if inside not in ("zip", "legacy", "tar"):
        what = what_is(first[:HEAD]) or inside or "something else"
        raise ReadError(file.path, f"is compressed by {content}, and no torch.save file is inside but {what}")
    with room_in(target, file.path):
        _write(target, file, chain((first,), found))
    return target


def _write(target: Path, file: File, pieces: Iterable[bytes]) -> None:
    """Write a file's unpacked bytes, unless they are too many: a bomb, or more than the disk has room for."""
    done = checked = 0
    with target.open("xb") as out:
        for piece in pieces:
            if done >= checked:
                check_room(target.parent)
                checked += LOOK_EVERY
            out.write(piece)
            done += len(piece)
            if done > max(BOMB_BYTES, BOMB_RATIO * file.size):
                text = f"its {file.size} bytes unpack to more than {done}, as a decompression bomb does"
                raise ReadError(file.path, f"{text}; if you trust it, unpack it first")


# -- items that were compressed one by one (DCP's `stream.zstd`) -------------------------------------------------------

# `dcp.save` with the extension `ZStandard` compresses each item as a stream of its own. The metadata states the
# extension but not the item's unpacked length. A tensor's length follows from its dtype, shape and an archive's
# directory; an object's is bounded. Source: torch/distributed/checkpoint/_extension.py of torch 2.13.

ZSTD = "stream.zstd"
"""The extension's name in a transform descriptor; a slash and a version follow it."""

ARCHIVE = 64 << 10
"""At most this many bytes of a one-tensor archive are not values; torch writes less than two thousand."""


class CompressedItem(NamedTuple):
    """A part of a file, `length` bytes at `offset`, that may unpack to `limit` bytes."""

    offset: int
    length: int
    limit: int


_unpacked: dict[tuple[object, ...], tuple[Path, int, int]] = {}
"""Temporary file, byte offset and length of each unpacked part."""


def is_zstd(transforms: tuple[str, ...]) -> bool:
    """Whether an item was compressed by zstd, in the known version, and by nothing else."""
    name, _, version = transforms[0].partition("/") if len(transforms) == 1 else ("", "", "")
    return name == ZSTD and version.partition(".")[0] == "1"


def unpack(file: File, parts: Iterable[CompressedItem], most: int) -> None:
    """Unpack parts of a file into one temporary file; for a part that cannot be unpacked, `window` raises the error.

    All parts together may unpack to at most `most` bytes.

    Raises:
        NoSpaceError: the disk is too full.
    """
    with _lock:
        wanted = [part for part in parts if _key(file, part) not in _unpacked]
        if wanted:
            _unpack_items(file, wanted, most)


def window(file: File, part: CompressedItem) -> tuple[File, Window]:
    """Return the temporary file with an unpacked part, which the caller closes, and the part's window in it.

    Raises:
        ReadError: it cannot be unpacked, or unpacks to more bytes than its limit.
        NoSpaceError: the disk is too full.
    """
    with _lock:
        key = _key(file, part)
        if key not in _unpacked or not _unpacked[key][0].exists():
            _unpack_items(file, [part], None)
        path, start, size = _unpacked[key]
    opened = File(path)
    return opened, Window(opened, start, size)


def _key(file: File, part: CompressedItem) -> tuple[object, ...]:
    return *file.identity, part.offset, part.length


def _unpack_items(file: File, parts: list[CompressedItem], most: int | None) -> None:
    """Unpack parts into a new temporary file; without a total limit, a part that fails is an error."""
    target = temporary_file(file.path, file.path.name)
    needed = sum(part.limit for part in parts)
    with room_in(target, file.path, min(needed, most or needed)), target.open("xb") as out:
        for part in parts:
            start = out.tell()
            limit = part.limit if most is None else min(part.limit, most - start)
            try:
                _write_item(out, file, part._replace(limit=limit))
            except ReadError:
                if most is None:
                    raise
                out.seek(start)
                out.truncate()
            else:
                _unpacked[_key(file, part)] = target, start, out.tell() - start


def _write_item(out: IO[bytes], file: File, part: CompressedItem) -> None:
    done = 0
    for piece in pieces(Window(file, part.offset, part.length), "zstd"):
        done += len(piece)
        if done > part.limit:
            raise ReadError(file.path, f"its {part.length} bytes unpack to more than the {part.limit} that it may hold")
        out.write(piece)


# -- the compressions --------------------------------------------------------------------------------------------------


UNPACK_ERRORS = (OSError, zlib.error, lzma.LZMAError, MemoryError, ValueError, RuntimeError)


class _Sequential:
    """Gives a file the sequential `read` that decompressors need."""

    def __init__(self, file: File | Window) -> None:
        self._file = file
        self._at = 0

    def read(self, length: int = -1) -> bytes:
        rest = self._file.size - self._at
        data = self._file.read(self._at, rest if length < 0 else min(length, rest))
        self._at += len(data)
        return data


def has_zstd() -> bool:
    """Whether a package that unpacks zstd is installed."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd  # noqa: F401
        else:
            import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


def pieces(file: File | Window, content: str) -> Iterator[bytes]:
    """Unpack the file in pieces of at most `PIECE` bytes.

    Raises:
        ReadError: it is cut or damaged, or needs a package that is not installed.
    """
    try:
        yield from _UNPACK[content](file)
    except ImportError as error:
        text = f"is compressed by {content}; to read it: pip install 'ckptools[compressed]'"
        raise ReadError(file.path, text) from error
    except EOFError as error:
        raise ReadError(file.path, f"is cut short: its {content} stream does not end", "cut") from error
    except Exception as error:
        # zstandard has an error class of its own, below Exception.
        if not isinstance(error, UNPACK_ERRORS) and type(error).__name__ != "ZstdError":
            raise
        text = " ".join(str(error).split())
        why = text if text and len(text) < 200 else type(error).__name__
        raise ReadError(file.path, f"cannot be unpacked as {content}: {why}") from error


def _by_reading(reader: Any) -> Iterator[bytes]:
    return iter(partial(reader.read, PIECE), b"")


def _by_steps(file: File | Window, new: Callable[[], Any]) -> Iterator[bytes]:
    """Unpack with one decompressor per stream; a file may have several streams, and zeros behind them."""
    source = _Sequential(file)
    data, stream = source.read(PIECE), new()
    while True:
        if piece := stream.decompress(data, PIECE):
            yield piece
        data = b""
        if stream.eof:
            data = (stream.unused_data or source.read(PIECE)).lstrip(b"\0")
            while not data and (more := source.read(PIECE)):
                data = more.lstrip(b"\0")
            if not data:
                return
            stream = new()
        elif stream.needs_input and not (data := source.read(PIECE)):
            raise EOFError


def _gzip(file: File | Window) -> Iterator[bytes]:
    return _by_reading(gzip.GzipFile(fileobj=cast("Any", _Sequential(file)), mode="rb"))


def _lzma(file: File | Window) -> Iterator[bytes]:
    return _by_steps(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=MAX_MEMORY))


def _zstd(file: File | Window) -> Iterator[bytes]:
    if sys.version_info >= (3, 14):
        from compression import zstd

        yield from _by_reading(zstd.ZstdFile(cast("Any", _Sequential(file))))
        return
    import zstandard

    # The package does not report a truncated input, but most frames state their length.
    expected = max(1, zstandard.frame_content_size(file.read(0, min(HEAD, file.size))))
    done = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_MEMORY)
    for piece in _by_reading(decompressor.stream_reader(cast("Any", _Sequential(file)), read_across_frames=True)):
        done += len(piece)
        yield piece
    if done < expected:
        raise EOFError


def _lz4(file: File | Window) -> Iterator[bytes]:
    from lz4.frame import LZ4FrameDecompressor  # type: ignore[import-untyped,import-not-found,unused-ignore]

    return _by_steps(file, LZ4FrameDecompressor)


def _lzop(file: File | Window) -> Iterator[bytes]:
    raise ReadError(file.path, "is compressed by lzop, which ckptools does not read; unpack it with `lzop -d` first")


_UNPACK: dict[str, Callable[[File | Window], Iterator[bytes]]] = {
    "gzip": _gzip,
    "bzip2": lambda file: _by_steps(file, bz2.BZ2Decompressor),
    "xz": _lzma,
    "lzma": _lzma,
    "zstd": _zstd,
    "lz4": _lz4,
    "lzop": _lzop,
}
