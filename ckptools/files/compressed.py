"""Compressed files, unpacked into a temporary file so that tensors have a place in it.

Composer writes `.pt.gz`, `.pt.bz2`, `.pt.xz`, `.pt.lzma`, `.pt.zst`, `.pt.lz4` and `.pt.lzo` through command-line
tools (composer/utils/compression.py), and `.tar.gz`, `.tar.bz2`, `.tar.lzma` (which is xz) through Python's tarfile.
The first bytes decide, not the suffix.

Each source is unpacked once per process; see `ckptools.files.temporary` for where.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from ckptools.errors import ReadError
from ckptools.files.file_type import HEAD, content_of, what_is
from ckptools.files.opening import File, Window
from ckptools.files.temporary import LOOK_EVERY, check_room, room_in, temporary_file

PIECE = 4 << 20
"""Bytes that are unpacked at once, at most; memory stays flat."""

BOMB_RATIO = 1000
BOMB_BYTES = 8 << 30
"""A file that grows by more than this factor, to more than this many bytes, is refused as a bomb."""

MAX_MEMORY = 1 << 30
"""Bytes of dictionary or window that a file may ask for; the tools' highest ordinary levels take 64 to 128 MiB."""

SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".lzo")

_lock = threading.Lock()
_made: dict[tuple[object, ...], Path] = {}


def unpacked(file: File, content: str) -> Path:
    """The path of a temporary file with what a compressed file holds.

    Args:
        file: the compressed file, open.
        content: the compression, as `file_type.content_of` names it.

    Raises:
        ReadError: it is cut or damaged, is no checkpoint inside, or needs a package that is not installed.
        NoSpaceError: there is no room for it.
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
    """Write what a file unpacks to, as long as that is neither a bomb nor more than the disk can take."""
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


# -- the compressions ----------------------------------------------------------------------------------------


class _Sequential:
    """A file, or its rest, for readers that want to read on and on."""

    def __init__(self, file: File | Window) -> None:
        self._file = file
        self._at = 0

    def read(self, length: int = -1) -> bytes:
        rest = self._file.size - self._at
        data = self._file.read(self._at, rest if length < 0 else min(length, rest))
        self._at += len(data)
        return data


def has_zstd() -> bool:
    """Whether what unpacks zstd is installed."""
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
    except (OSError, zlib.error, lzma.LZMAError, MemoryError, ValueError, RuntimeError) as error:
        raise ReadError(file.path, f"cannot be unpacked as {content}: {_line(error)}") from error
    except Exception as error:
        # zstandard has an error class of its own, below Exception.
        if type(error).__name__ != "ZstdError":
            raise
        raise ReadError(file.path, f"cannot be unpacked as {content}: {_line(error)}") from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text and len(text) < 200 else type(error).__name__


def _by_reading(reader: Any) -> Iterator[bytes]:
    while piece := reader.read(PIECE):
        yield piece


def _by_steps(file: File | Window, new: Callable[[], Any]) -> Iterator[bytes]:
    """One decompressor per stream; a file may hold several, and zeros behind them."""
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

    # The package does not say when its input ends too early, but most frames say how long they are.
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
