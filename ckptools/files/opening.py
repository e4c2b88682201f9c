"""Open untrusted files: regular files only, read at offsets, with one-line errors.

A descriptor is opened once and kept, so that the file that was checked is the file that is read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

from ckptools.errors import ReadError, UnsafePathError, UsageError
from ckptools.files.remote.path import RemotePath, named_url, refreshed, shown_url
from ckptools.files.storage import DiskFile, NotRegularError, RemoteError
from ckptools.model.tree import TreeLimitError, check_tree_limits, describe_for_error
from ckptools.option import spelled

if TYPE_CHECKING:
    from ckptools.files.remote.cached_file import RemoteFile


_COUNTING = Lock()


class File:
    """A file open for reading at offsets, on the local disk or in a store; size and time are read when it is opened.

    Its methods raise a ReadError if it ends too early, or if the disk or store fails.
    """

    start = 0
    """Byte offset of its start in its file, as for a `Window`."""

    total_read = 0
    """Bytes that this process read through files that are closed by now."""

    __slots__ = ("_ranges", "modified", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ranges: DiskFile | RemoteFile
        with reading(path):
            self._ranges = path.store.open(path.key) if isinstance(path, RemotePath) else DiskFile(os.fspath(path))
        self.size, self.modified = self._ranges.size, self._ranges.modified

    @property
    def bytes_read(self) -> int:
        """The number of bytes read from the file."""
        return self._ranges.bytes_read

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that no other file, and no other content of this file, has."""
        if self.descriptor is None:
            return self.path, self.size, self.modified, self._ranges.version
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    @property
    def descriptor(self) -> int | None:
        """The descriptor of a file on the local disk; None for a remote one."""
        return self._ranges.descriptor

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset`."""
        _check_range(self, offset, length)
        try:
            data = self._ranges.read(offset, length)
            if len(data) == length:
                return data
            pieces, done = [data], self._checked(len(data), offset)
            while done < length:
                pieces.append(self._ranges.read(offset + done, length - done))
                done += self._checked(len(pieces[-1]), offset + done)
        except OSError as error:  # the context manager `reading` would take longer than a small read
            raise _refused(self.path, error) from error
        return b"".join(pieces)

    def read_each(self, offsets: Sequence[int], lengths: Sequence[int]) -> bytes:
        """Read exactly `lengths[i]` bytes at each of many offsets, concatenated; for a file on the local disk."""
        data = b"".join(self.read_rows(offsets, lengths))
        if len(data) != sum(lengths):
            raise ReadError(self.path, "became shorter while it was read")
        return data

    def read_rows(self, offsets: Iterable[int], lengths: Iterable[int]) -> list[bytes]:
        """Read up to `lengths[i]` bytes at each of many offsets; fewer at the end of the file."""
        with reading(self.path):
            if self.descriptor is None:
                return list(map(self._ranges.read, offsets, lengths))
            rows = list(map(os.pread, repeat(self.descriptor), lengths, offsets))
        self._ranges.bytes_read += sum(map(len, rows))
        return rows

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Read into all of a buffer at `offset`."""
        _check_range(self, offset, len(buffer))
        self.read_all_into(offset, buffer)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ranges `(start, end)` that will be read, so that a store needs fewer requests."""
        self._ranges.expect(ranges)

    def prefetch(self, ranges: Iterable[tuple[int, int]], most: int) -> None:
        """Fetch ranges of a remote file into its cache, for later reads.

        Ranges that lie close together are fetched by one request of at most `most` bytes; a larger range is skipped.
        """
        with reading(self.path):
            self._ranges.prefetch(ranges, most)

    def read_all_into(self, offset: int, buffer: memoryview) -> None:
        """Read into all of a buffer at `offset`, even if the file has grown or shrunk since it was opened."""
        done = 0
        with reading(self.path):
            while done < len(buffer):
                count = self._ranges.read_into(offset + done, buffer[done:])
                done += self._checked(count, offset + done)

    def _checked(self, count: int, offset: int) -> int:
        if count == 0:
            raise ReadError(self.path, f"became shorter while it was read: no byte {offset}")
        return count

    def close(self) -> None:
        """Close the file."""
        self._ranges.close()
        with _COUNTING:
            File.total_read += self.bytes_read

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Window:
    """A part of an open file that is itself a file: an item of a `.distcp`, an uncompressed member of a tar."""

    __slots__ = ("_file", "path", "size", "start")

    def __init__(self, file: File, start: int, size: int) -> None:
        _check_range(file, start, size)
        self._file = file
        self.path, self.start, self.size = file.path, start, size

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset` of the window."""
        _check_range(self, offset, length)
        return self._file.read(self.start + offset, length)

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the file on the local disk; None for a remote file."""
        return self._file.descriptor

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce ranges of the window that will be read."""
        self._file.expect((self.start + first, self.start + end) for first, end in ranges)


def _check_range(file: File | Window, offset: int, length: int) -> None:
    if offset < 0 or length < 0 or offset + length > file.size:
        raise ReadError(file.path, f"ends at byte {file.size}; expected {length} bytes at {offset}")


class OpenFiles:
    """Source files that stay open between uses, at most `limit` of them idle; threads may share it."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._idle: dict[Path, list[File]] = {}
        """Idle files by path, the most recently used path last; no list is empty."""
        self._count = 0
        self._lock = Lock()

    @contextmanager
    def open(self, path: Path) -> Iterator[File]:
        """Lend an open file to one user at a time."""
        with self._lock:
            file = self._take(path) if path in self._idle else None
        file = file or File(path)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        with self._lock:
            self._idle[path] = [*self._idle.pop(path, ()), file]
            self._count += 1
            if self._count > self._limit:
                self._take(next(iter(self._idle))).close()

    def _take(self, path: Path) -> File:
        """An idle file of this path, or a new one."""
        files = self._idle[path]
        file = files.pop()
        self._count -= 1
        if not files:
            del self._idle[path]
        return file

    def close(self) -> None:
        """Close every idle file."""
        with self._lock:
            for file in chain.from_iterable(self._idle.values()):
                file.close()
            self._idle.clear()
            self._count = 0

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refused(path: Path, error: OSError) -> ReadError:
    """The error for a file that the system refuses to open or read."""
    if isinstance(error, NotRegularError):
        return UnsafePathError(path, "not a regular file")
    if isinstance(error, RemoteError):
        return ReadError(path, f"cannot be read: {error.strerror}", "no access")
    why = (error.strerror or type(error).__name__).lower()
    if isinstance(error, FileNotFoundError):
        return ReadError(path, why, "absent")
    return ReadError(path, f"cannot be read: {why}", "no access")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a one-line ReadError."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from error


# -- resolve paths given by the user or a file: a local path, or a URL -------------------------------------------------


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(path: str | Path) -> bool:
    """Whether a path given by the user is the URL of a remote file, such as `s3://bucket/run7`."""
    return isinstance(path, RemotePath) or (bool(_URL.match(str(path))) and not Path(path).exists())


def path_of(path: str | Path, by_user: bool = False) -> Path:
    """A local path, or the path of a URL; `by_user` marks one that the user typed.

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
    """Resolve a path given by the user: a local one, or a URL, whose cached facts are dropped.

    Raises:
        UsageError: it is not a path, or empty.
        ReadError: it is a URL of an unsupported kind.
    """
    check_path(path)
    found = path_of(path, by_user=True)
    try:
        return refreshed(found) if isinstance(found, RemotePath) else found
    except RemoteError as error:
        raise _not_read(path, error) from error


def check_path(path: object) -> None:
    """Refuse a value that is not a path, or an empty path, which would be the current folder.

    Raises:
        UsageError: it is refused.
    """
    if not isinstance(path, (str, Path)):
        raise UsageError(None, f"expected a path, found {describe_for_error(path)}")
    if path == "":
        raise UsageError(None, "the path is empty; this folder is .")


def _not_read(path: str | Path, error: RemoteError) -> ReadError:
    return ReadError(None, f"{shown_url(path)}: {error.strerror}", "no access")


def local_path(path: str | Path) -> Path:
    """A local path as the user gave it.

    Raises:
        ReadError: it is a URL.
    """
    if is_remote(path):
        raise ReadError(None, f"{shown_url(path)}: is remote; this needs a local file: copy it to this machine first")
    return Path(path)


def tells_others(path: Path) -> bool:
    """Whether a file's neighbours can be listed; a web server serves only the named file."""
    return not isinstance(path, RemotePath) or path.store.lists


def real_path(path: Path) -> Path:
    """A path with every link followed; a remote path is unchanged."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def is_there(path: Path) -> bool:
    """Whether a path exists, even as a broken link."""
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def common_folder(paths: Iterable[Path]) -> Path:
    """The innermost folder that contains, or is, each of some absolute paths."""
    first, *others = paths
    return next(p for p in (first, *first.parents) if all(other.is_relative_to(p) for other in others))


def check_stays_inside(path: Path, folder: Path) -> None:
    """Refuse a link at `path` that leads out of `folder`.

    Raises:
        UnsafePathError: it leads out.
    """
    if leads_out(path, folder):
        target = real_path(path)
        raise UnsafePathError(
            path,
            f"is a link to {target}, out of the checkpoint's folder; follow it with {spelled('follow-symlinks', True)}",
        )


def leads_out(path: Path, folder: Path) -> bool:
    """Whether `path` is a link that leads out of `folder`."""
    # realpath also returns for circular links; opening such a link raises its own error.
    return path.is_symlink() and not real_path(path).is_relative_to(real_path(folder))


def status_inside(path: Path, folder: Path, follow_symlinks: bool) -> os.stat_result | None:
    """The status of a file that is named by a file in `folder` and lies in or below it; None if it is missing.

    Raises:
        ReadError: the system refuses to report on it.
        UnsafePathError: it is not a regular file, or lies behind a link out of the folder that may not be followed.
    """
    try:
        status = path.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        if not follow_symlinks and (is_link or path.parent != folder):
            for step in (path, *path.parents):
                if step == folder:
                    break
                check_stays_inside(step, folder)
        if is_link:
            status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReadError(path, (error.strerror or "cannot be looked at").lower()) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePathError(path, "not a regular file")
    return status


def is_plain_name(text: str) -> bool:
    """Whether a name stated in a file can only name a file in the same folder, on any system."""
    return text not in ("", ".", "..") and not {"/", "\\", "\0", os.sep} & set(text)


def is_plain_path(text: str) -> bool:
    """Whether a path stated in a file leads to a place below its own folder, on any system."""
    odd = not text or len(text) > 4096 or "\0" in text or "\\" in text or ":" in text.split("/")[0]
    return not odd and {"", ".", ".."}.isdisjoint(text.split("/"))


# -- detect a file's content by its first bytes; the suffix proves nothing ---------------------------------------------
# A content that ckptools reads itself has a short name (`zip`, `legacy`, `tar`, the compressions); a file that is often
# mistaken for a checkpoint has a sentence that describes it.


HEAD = 512
"""Bytes at the start that are examined: a tar's magic lies at 257."""

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""The first pickle in a file of torch.save before torch 1.6. Source: torch/serialization.py."""

_BINARY_MAGIC = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little") + b"."
_TEXT_MAGIC = b"L%dL\n." % LEGACY_MAGIC

COMPRESSIONS: dict[bytes, str] = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"]\0\0": "lzma",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x89LZO\0\r\n\x1a\n": "lzop",
}
"""First bytes of each compression. Sources: RFC 1952, 8878; the xz, lz4 and lzop formats' descriptions."""

_KNOWN: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs.", "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"),
    (b"GGUF", "a GGUF file (llama.cpp), not a PyTorch checkpoint"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, h5py), not a PyTorch checkpoint"),
    (b"\x93NUMPY", "one numpy array (.npy), not a checkpoint"),
    (b"PAR1", "a Parquet table, not a checkpoint"),
    (b"\x7fELF", "a program or library, not a checkpoint"),
    (b"%PDF", "a PDF, not a checkpoint"),
    (b"\x89PNG\r\n\x1a\n", "a picture (PNG), not a checkpoint"),
    (b"\xff\xd8\xff", "a picture (JPEG), not a checkpoint"),
    (b"GIF8", "a picture (GIF), not a checkpoint"),
    (b"SQLite format 3\0", "an SQLite database, not a checkpoint"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
)


def content_of(head: bytes) -> str:
    """Name a content that ckptools reads itself: `zip`, `legacy`, `tar`, or a compression; "" for any other."""
    if head.startswith(b"PK\3\4"):
        return "zip"
    # Protocols 2 to 5 begin with PROTO, in 4 and 5 followed by a frame; protocols 0 and 1 have neither.
    if (head[:1] == b"\x80" and _BINARY_MAGIC in head[:32]) or head.startswith(_TEXT_MAGIC):
        return "legacy"
    if head[257:262] == b"ustar":
        return "tar"
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), "")


def head_of(file: File | Window) -> bytes:
    """The first bytes of a file, for `content_of` and `what_is`."""
    return file.read(0, min(HEAD, file.size))


def head_at(path: Path, most: int = HEAD) -> bytes:
    """The first bytes of the file at a path.

    Raises:
        ReadError: it cannot be read.
    """
    with File(path) as file:
        return file.read(0, min(most, file.size))


def what_is(head: bytes) -> str:
    """Describe a file that is not a checkpoint, by its first bytes; "" if they are unknown."""
    if not head:
        return "empty"
    if not any(head):
        return "zeros from its first byte on: it was never written, or its download did not finish"
    for magic, what in _KNOWN:
        if head.startswith(magic):
            return what
    return _text(head) or _binary(head)


def _text(head: bytes) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page (HTML), probably an error message or a login page that was saved under this name"
    if start.startswith(b"<?xml"):
        return "XML, probably an error message of a storage service that was saved under this name"
    if start.startswith((b"{", b"[")) and _printable(start):
        return "JSON text, not a torch.save file"
    return "text, not a torch.save file" if _printable(head) else ""


def _binary(head: bytes) -> str:
    if b"onnx" in head[:64].lower() or (head[:1] == b"\x08" and b"pytorch" in head[:32]):
        return "an ONNX model, not a PyTorch checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file, or one that begins like it"
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        return "a plain Python pickle, which torch.save did not write"
    if 0x81 <= head[0] <= 0x8F or head[:1] in (b"\xde", b"\xdf"):
        return "not written by torch; perhaps msgpack (Flax, JAX)"
    return ""


def _printable(data: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in data) and b"\x7f" not in data


# -- JSON in a checkpoint's folder: indexes, trainer states; read whole, within bounds ---------------------------------


MAX_JSON = 64 << 20
"""Bytes: an index takes a hundred per tensor, a trainer state as many per logged step."""

MAX_VALUES = 8_000_000


def is_json(path: Path) -> bool:
    """Whether a path has the name of a JSON file that is not the index of a model in several files."""
    return path.suffix == ".json" and not path.name.endswith(".index.json") and path.is_file()


def read_json(path: Path) -> Any:
    """Read a JSON file; a duplicate name in an object is refused, because readers differ in which one they take.

    Raises:
        ReadError: it is not JSON, or beyond the bounds.
    """
    with File(path) as file:
        if file.size > MAX_JSON:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_JSON} of JSON are read")
        data = file.read(0, file.size)
    try:
        return parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ReadError(path, "is no JSON that can be read: not UTF-8") from error
    except JsonError as error:
        raise ReadError(path, f"is no JSON that can be read: {error}") from error


class JsonError(ValueError):
    """The fault of a JSON text."""


def parse_json(text: str) -> Any:
    """Parse JSON of bounded depth and number of values.

    Raises:
        JsonError: it is not JSON, or beyond the bounds.
    """
    if sum(map(text.count, "{[,")) > MAX_VALUES:
        raise JsonError(f"more than {MAX_VALUES} values")
    try:
        found = json.loads(text, object_pairs_hook=_object)
        check_tree_limits(found)
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg.lower()} in line {error.lineno}") from error
    except (JsonError, TreeLimitError) as error:
        raise JsonError(str(error)) from error
    except (RecursionError, ValueError) as error:
        raise JsonError("nested too deep" if isinstance(error, RecursionError) else "a number too long") from error
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = {name for name in found if sum(name == other for other, _ in pairs) > 1}
        raise JsonError(f"{describe_for_error(min(twice))} is twice in one object")
    return found


# -- bytes that threads write at offsets in any order and one reader takes in order, with few of them in memory --------
# A thread that is too far ahead of the reader waits. If ranges are begun in the order of their offsets, it cannot wait
# for ever: the thread with the lowest range is at the reader's place, and writes there without waiting.


WINDOW = 32 << 20
"""Bytes ahead of the reader's place that are kept in memory."""


class StoppedError(Exception):
    """The transfer was stopped: no more bytes are written or taken."""


class InOrder:
    """A pipe with offsets: threads write at most `window` bytes ahead of the reader, which takes the bytes in order.

    Once it is stopped, its methods raise a StoppedError.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._pieces: dict[int, bytes] = {}
        self._taken = 0
        self._stopped = False
        self._changed = Condition()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at `offset`, once the reader is near."""
        with self._changed:
            self._wait_while(lambda: offset > self._taken and offset + len(data) > self._taken + self._window)
            self._pieces[offset] = bytes(data)  # the caller reuses its buffer
            self._changed.notify_all()

    def take(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from `start` to before `end` as they are written; the reader's place must be at `start`."""
        self.wait_for(start)
        while start < end:
            with self._changed:
                self._wait_while(lambda at=start: at not in self._pieces)  # type: ignore[misc]
                data = self._pieces.pop(start)
            yield data
            start += len(data)
            self.pass_over(len(data))

    def pass_over(self, nbytes: int) -> None:
        """Move the reader's place over bytes that no thread writes."""
        with self._changed:
            self._taken += nbytes
            self._changed.notify_all()

    def wait_for(self, place: int) -> None:
        """Wait until the reader has reached a place."""
        with self._changed:
            self._wait_while(lambda: self._taken < place)

    def stop(self) -> None:
        """Make every waiting and later call raise a StoppedError."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait_while(self, waits: Callable[[], bool]) -> None:
        while not self._stopped and waits():
            self._changed.wait()
        if self._stopped:
            raise StoppedError
