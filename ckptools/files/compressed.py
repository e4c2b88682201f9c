"""Compressed files, unpacked into a temporary file so that tensors have a place in it.

Composer writes `.pt.gz`, `.pt.bz2`, `.pt.xz`, `.pt.lzma`, `.pt.zst`, `.pt.lz4` and `.pt.lzo` through command-line
tools (composer/utils/compression.py), and `.tar.gz`, `.tar.bz2`, `.tar.lzma` (which is xz) through Python's tarfile.
The first bytes decide, not the suffix.

The temporary files lie in a folder that only this user may enter, below `TMPDIR`, and are removed when the process
ends, however it ends short of being killed. Each source is unpacked once per process. An error about a temporary file
names the file that it stands for.
"""

from __future__ import annotations

import atexit
import bz2
import errno
import gzip
import lzma
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, cast

from ckptools.errors import NoSpaceError, ReadError, stands_for
from ckptools.files.file_type import HEAD, content_of, what_is
from ckptools.files.opening import File, Window

PIECE = 4 << 20
"""Bytes that are unpacked at once, at most; memory stays flat."""

BOMB_RATIO = 1000
BOMB_BYTES = 8 << 30
"""A file that grows more than so many times, to more than so many bytes, is made to fill the disk."""

RESERVE = 256 << 20
"""Bytes that the disk keeps free."""

LOOK_EVERY = 64 << 20
"""Bytes between two looks at the free space."""

MAX_MEMORY = 1 << 30
"""Bytes of dictionary or window that a file may ask for; the tools' highest ordinary levels take 64 to 128 MiB."""

SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".lzo")

_lock = threading.Lock()
_made: dict[tuple[int, int, int, int], Path] = {}
_numbers = count()
_folder: Path | None = None


def unpacked(file: File, content: str) -> Path:
    """The path of a temporary file with what a compressed file holds.

    Args:
        file: the compressed file, open.
        content: the compression, as `contents.content_of` names it.

    Raises:
        ReadError: it is cut or damaged, is no checkpoint inside, or needs a package that is not installed.
        NoSpaceError: there is no room for it.
    """
    status = os.fstat(file.fd)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    with _lock:
        if key not in _made or not _made[key].exists():
            _made[key] = _unpack(file, content)
        return _made[key]


def _unpack(file: File, content: str) -> Path:
    target = temporary_file(file.path.with_suffix(""))
    stands_for(target, file.path)
    found = pieces(file, content)
    first = b"".join(islice(found, 1))
    inside = content_of(first[:HEAD])
    if inside not in ("zip", "legacy", "tar"):
        what = what_is(first[:HEAD]) or inside or "something else"
        raise ReadError(file.path, f"is compressed by {content}, and no torch.save file is inside but {what}")
    with room_in(target, file.path):
        _write(target, file, chain((first,), found))
    return target


def temporary_file(original: Path) -> Path:
    """A new name in the temporary folder for what is unpacked of a file."""
    target = _temporary_folder() / f"{next(_numbers)}-{original.name[-200:]}"
    stands_for(target, original)
    return target


@contextmanager
def room_in(target: Path, original: Path, nbytes: int = 0) -> Iterator[None]:
    """Remove a temporary file that could not be finished, and say so where the disk is full.

    Args:
        target: the temporary file.
        original: what it is made of.
        nbytes: bytes that there must be room for from the first.

    Raises:
        NoSpaceError: the disk has less room than is needed.
    """
    try:
        _check_room(target.parent, nbytes)
        yield
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            why = (error.strerror or "").lower()
            text = f"no room to unpack {original.name} ({why}); set TMPDIR to a folder with more"
            raise NoSpaceError(target.parent, text) from error
        raise


def _write(target: Path, file: File, pieces: Iterable[bytes]) -> None:
    """Write what a file unpacks to, as long as that is neither a bomb nor more than the disk can take."""
    done = checked = 0
    with target.open("xb") as out:
        for piece in pieces:
            if done >= checked:
                _check_room(target.parent)
                checked += LOOK_EVERY
            out.write(piece)
            done += len(piece)
            if done > max(BOMB_BYTES, BOMB_RATIO * file.size):
                text = f"its {file.size} bytes unpack to more than {done}, as a decompression bomb does"
                raise ReadError(file.path, f"{text}; if you trust it, unpack it first")


def _check_room(folder: Path, nbytes: int = 0) -> None:
    if shutil.disk_usage(folder).free < max(nbytes, LOOK_EVERY) + RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- the temporary folder ------------------------------------------------------------------------------------


def _temporary_folder() -> Path:
    global _folder
    if _folder is None or not _folder.is_dir():
        try:
            _folder = Path(tempfile.mkdtemp(prefix="ckptools-"))
        except OSError as error:
            text = f"no temporary folder can be made ({(error.strerror or '').lower()}); set TMPDIR to one"
            raise NoSpaceError(None, text) from error
        atexit.register(_remove, _folder, os.getpid())
    return _folder


def _remove(folder: Path, made_by: int) -> None:
    # A forked child has this registered too, and must leave the folder to its parent.
    if os.getpid() == made_by:
        shutil.rmtree(folder, ignore_errors=True)


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
    """What the file unpacks to, in pieces of at most `PIECE` bytes.

    Raises:
        ReadError: it is cut or damaged, or needs a package that is not installed.
    """
    try:
        yield from _UNPACK[content](file)
    except ImportError as error:
        text = f"is compressed by {content}; to read it: pip install 'ckptools[compressed]'"
        raise ReadError(file.path, text) from error
    except EOFError as error:
        raise ReadError(file.path, f"is cut short: its {content} stream does not end") from error
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
