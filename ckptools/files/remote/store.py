"""A bucket, server or repository, through a file system of fsspec: list a folder, look at a key, read a range.

Listings are cached, so that a hundred questions about the files of a folder are one request. A range is always read of
the version that was listed: if the file was replaced meanwhile, that is an error, not a mixture.

Buckets are read through obstore's file system, extended in this module; web servers through fsspec's own, extended in
`web`; the Hugging Face Hub at the commit that a revision has when it is first asked for; any other URL as fsspec does.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import obstore
from obstore.exceptions import PreconditionError
from obstore.fsspec import FsspecStore

from ckptools.files.remote import HUB, WEB, timeout
from ckptools.files.remote.cached_file import BlockCache, RemoteFile
from ckptools.files.storage import FOLDER, DeniedError, RemoteError, Status, in_one_line, replaced
from ckptools.text import first_line

# -- buckets of S3, Google Cloud Storage and Azure: obstore's file system, with what it leaves out ---------------------
# obstore's file system lacks file times in lists, ranges of one version only (`If-Match`), and uploads that leave
# nothing behind when they fail.
# Credentials come from the usual chain: environment variables, then the role of the machine or container; for S3 also
# the profiles of `~/.aws`, if boto3 is installed.
# Source of the settings: object_store's and obstore's documentation.


PART = 8 << 20
"""At least this many bytes per part of an upload; stores require 5 MiB, except for the last part."""

MAX_PARTS = 9_999
"""At most this many parts of an upload, not counting the last; S3 and Google Cloud Storage allow 10,000."""

IN_FLIGHT = 32 << 20
"""Bytes of one upload that are under way at once, but at least two parts."""

PARTS_LEFT = "the parts that were uploaded could not be removed: abort the upload, or let a rule of the bucket do so"

BUCKET_RETRIES = 6
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT")
"""Environment variables that name a server in place of the cloud's own."""

_CODE = re.compile(r"<Code>(\w+)</Code>|Server returned non-2xx status code: (\d+ [A-Za-z ]+)")
_REQUEST = re.compile(
    r"(Error performing list request: )?Error performing \w+ (?P<url>\S+) in [^\s,]+"
    r"(, after (?P<retries>\d+) retries, max_retries: \d+, retry_timeout: \w+)?\s+- "
)
"""The beginning of obstore's errors: the request, with its address."""

CAUSES = {
    "kind: ConnectionRefused": "it refuses the connection",
    "dns error": "there is no such host",
    "invalid peer certificate": "its certificate is not trusted",
    "407 Proxy": "the proxy wants another name and password (407)",
    "TooManyRedirects": "it redirects more than 10 times",
    "redirect without LOCATION": "it redirects without saying where to; is AWS_REGION the bucket's?",
}
"""Why a request failed, by words in obstore's errors that are meant for its developers."""


class BucketFileSystem(FsspecStore):
    """The buckets of one cloud, by its scheme: `s3`, `gs` or `az`."""

    cachable = False  # the environment may have changed

    def __init__(self, scheme: str) -> None:
        # A server without TLS is used only if the user has named it as the endpoint.
        plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
        seconds = timedelta(seconds=timeout())
        how: Any = {
            "client_options": {"timeout": seconds, "connect_timeout": timedelta(seconds=5), "allow_http": plain},
            "retry_config": {"max_retries": BUCKET_RETRIES, "retry_timeout": 4 * seconds},
            "credential_provider": _profile() if scheme == "s3" else None,
        }
        super().__init__(scheme, **how)  # type: ignore[call-overload] # one overload for each literal

    # Called from threads, obstore itself is a tenth faster than through fsspec's event loop.

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the files and folders in a folder."""
        bucket, folder = self._split_path(path)
        found = obstore.list_with_delimiter(self._construct_store(bucket), folder or None)
        folders: list[Any] = [{"path": name, "type": "directory"} for name in found["common_prefixes"]]
        listed = [{"name": f"{bucket}/{one['path']}", "type": "file", **one} for one in (*folders, *found["objects"])]
        return listed if detail else [one["name"] for one in listed]

    def cat_file(self, path: str, start: int, end: int, version: str = "", **_: Any) -> bytes:
        """Read the bytes from `start` to before `end`, of the given version of the file, if any."""
        bucket, key = self._split_path(path)
        wanted: Any = {"range": (start, end)} | ({"if_match": version} if version else {})
        try:
            found = obstore.get(self._construct_store(bucket), key, options=wanted)
            data = found.buffer()
        except PreconditionError as error:
            raise replaced() from error
        if version and found.meta["e_tag"] != version:
            raise replaced()
        return bytes(data)

    def write_parts(self, path: str, size: int, pieces: Iterator[bytes]) -> None:
        """Write a large file in parts of at least `PART` bytes; a store knows no condition for such a write."""
        bucket, key = self._split_path(path)
        count = min(max(1, size // PART), MAX_PARTS)
        # The last part has less than `count` bytes, so next to nothing waits in memory for the end of the other parts.
        part = max(1, size // count)
        at_once = max(2, min(8, IN_FLIGHT // part))
        how: Any = {"use_multipart": True, "chunk_size": part, "max_concurrency": at_once}
        ended: list[Exception] = []

        def noting() -> Iterator[bytes]:
            try:
                yield from pieces
            except Exception as error:  # obstore would make another error of it
                ended.append(error)
                raise

        try:
            obstore.put(self._construct_store(bucket), key, noting(), **how)
        except Exception as error:
            if "Error performing DELETE" in str(error):
                said = bucket_error(ended[0] if ended else error).strerror
                raise RemoteError(f"{said}; {PARTS_LEFT}") from error
            raise ended[0] if ended else bucket_error(error) from None


def _profile() -> Any:
    """A reader of the profiles in `~/.aws`, if the user has any and boto3 is installed; else None."""
    if "AWS_ACCESS_KEY_ID" in os.environ or os.environ.get("AWS_SKIP_SIGNATURE"):
        return None
    named = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    files = (Path(named), Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")))
    if "AWS_PROFILE" not in os.environ and not any(file.expanduser().is_file() for file in files):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    return Boto3CredentialProvider()


def bucket_error(error: Exception) -> OSError:
    """An error of obstore in one line, without the request's address and the text after it, meant for developers."""
    if isinstance(error, (RemoteError, FileNotFoundError)):
        return in_one_line(error)
    text = str(error)
    code = ", ".join({one[0] or one[1].strip(): None for one in _CODE.findall(text)})
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or "403 Forbidden" in text:
        return DeniedError(f"access denied by the store ({code}); check the credentials", errno.EACCES)
    line = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", first_line(error))  # Azure's signatures are in the query
    line = _REQUEST.sub(_retries, re.sub(r"^Generic \w+ error: ", "", line))
    cause = next((cause for sign, cause in CAUSES.items() if sign in text), "")
    line = (
        line.replace("HTTP error: error sending request", cause) if cause and "error sending" in line else cause or line
    )
    return RemoteError(f"the store does not answer as it should: {line if cause else code or line}")


def _retries(request: re.Match[str]) -> str:
    host = urlsplit(request["url"]).netloc.rpartition("@")[2]
    return f"no answer after {request['retries']} retries from {host}: " if request["retries"] else ""


RETRIES = 5
# -- a bucket, server or repository ------------------------------------------------------------------------------------


FIRST_WAIT = 0.2
"""Seconds before the second try, at most; each further wait is at most twice as long."""

MODIFIED = ("last_modified", "LastModified", "mtime", "modified", "created")
VERSION = ("e_tag", "ETag", "etag", "version", "generation", "VersionId")
"""Names that file systems have for a file's time and version."""


class Place(NamedTuple):
    """The file system of a store, the paths in it, and the way to notice changed files.

    Attributes:
        path_of: maps a key to its path in the file system `fs` of fsspec.
        version: how a changed file is noticed: each request states the version (`checked`), ckptools asks for the
            version again after each range (`compared`), or the path itself names a version, so that nothing can change
            (`fixed`).
        lists: whether folders can be listed.
        in_one_line: turns an error of the file system into one line.
    """

    fs: Any
    path_of: Callable[[str], str]
    version: Literal["checked", "compared", "fixed"] = "compared"
    lists: bool = True
    in_one_line: Callable[[Exception], OSError] = in_one_line


class Store:
    """The files of one bucket, server or repository; `again` makes its place anew, such as for a branch that moved."""

    def __init__(self, place: Place, again: Callable[[], Place] | None = None) -> None:
        self._place, self._again, self.lists = place, again, place.lists
        self._folders: dict[str, Mapping[str, Status]] = {}
        self._files: dict[str, Status | None] = {}  # files that are in no listing
        self._cache, self._file_locks = BlockCache(), defaultdict[str, Lock](Lock)
        self._lock = RLock()
        # Threads may perhaps not share a file system that is not asynchronous.
        alone = place.version == "compared" and not place.fs.async_impl
        self._one_at_a_time = RLock() if alone else nullcontext()

    def anew(self) -> Store:
        """The same store, without cached listings."""
        return Store(self._again() if self._again else self._place, self._again)

    def status(self, key: str) -> Status:
        """The status of a key: of a file, or of a folder with files below it."""
        above, _, name = key.rpartition("/")
        if not name and not self.lists:
            raise DeniedError("a web server lists no files; name one", errno.ENOTSUP)
        with self._lock:
            try:
                found = self._entries(above).get(name) if name else FOLDER
            except DeniedError:
                if key not in self._files:
                    self._files[key] = self._look(key)
                found = self._files[key]
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder")
        return found

    def entries(self, key: str) -> Mapping[str, Status]:
        """The files and folders in a folder, by name; if the store lists nothing, the files that were looked at."""
        with self._lock:
            if not self.lists:
                known = {path.rpartition("/"): status for path, status in self._files.items() if status is not None}
                return {name: status for (folder, _, name), status in known.items() if folder == key}
            found = self._entries(key)
        if not found and key:
            raise FileNotFoundError(errno.ENOENT, "no such folder")
        return found

    def _entries(self, folder: str) -> Mapping[str, Status]:
        if folder not in self._folders:
            self._folders[folder] = self._list(folder)
        return self._folders[folder]

    def open(self, key: str) -> RemoteFile:
        """Open a file for reading."""
        status = self.status(key)
        if status.is_folder:
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        fetch = partial(self._fetch, key, status.version)
        return RemoteFile(key, fetch, status, self._cache, self._file_locks[key])

    def upload(self, key: str, size: int, pieces: Iterator[bytes]) -> None:
        """Write a file as its pieces come; it appears once all are written, and an error in `pieces` aborts it.

        Raises:
            RemoteError: the file cannot be written.
        """
        fs, path = self._place.fs, self._place.path_of(key)
        if not self.lists or self._place.version == "fixed":
            text = "is in a store that is only read; give an output in a bucket, or on this machine"
            raise RemoteError(text, errno.EROFS)
        if hasattr(fs, "write_parts"):
            fs.write_parts(path, size, pieces)
            return
        part = f"{path}.part"
        try:
            self._ask("makedirs", fs._parent(path), exist_ok=True)
            with self._ask("open", part, "wb") as file:
                for piece in pieces:
                    file.write(piece)
            self._ask("mv", part, path)
        except BaseException as error:
            with suppress(OSError):
                self._ask("rm_file", part)
            if isinstance(error, OSError):
                raise self._place.in_one_line(error) from error
            raise

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files."""
        for key in keys:
            self._ask("rm_file", self._place.path_of(key))

    def _list(self, folder: str) -> Mapping[str, Status]:
        """List the files and folders in a folder; empty if there is no such folder."""
        if not self.lists:
            raise DeniedError("its server lists no files", errno.ENOTSUP)
        path = self._place.path_of(folder)
        try:
            found = self._ask("ls", path, detail=True)
        except FileNotFoundError:
            return {}
        names = [info["name"].rstrip("/") for info in found]
        return {n.rpartition("/")[2]: _status(i) for n, i in zip(names, found, strict=True) if n != path.rstrip("/")}

    def _look(self, key: str) -> Status | None:
        try:
            info = self._ask("info", self._place.path_of(key))
        except FileNotFoundError:
            return None
        self._cache.put(key, 0, info.get("first", b""))
        return _status(info)

    def _fetch(self, key: str, version: str, start: int, end: int) -> bytes:
        """Read the bytes from `start` to before `end` of this version of a file."""
        place, path, data = self._place, self._place.path_of(key), b""
        how: dict[str, Any] = {"version": version} if place.version == "checked" else {}
        if not place.fs.async_impl:
            how["cache_type"] = "none"  # The file system would read megabytes around the range.
        try:
            while len(data) < end - start:
                more = self._ask("cat_file", path, start=start + len(data), end=end, **how)
                if not more:
                    raise RemoteError(f"the store gave {len(data)} bytes at {start}; expected {end - start}")
                data += more
            if place.version == "compared" and _status(self._ask("info", path)).version != version:
                raise replaced()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "was removed meanwhile") from error
        return data

    def _ask(self, what: str, *arguments: Any, **more: Any) -> Any:
        """Call a method of the file system, and again after a while if that may help; errors have one line."""
        for number in range(RETRIES + 1):
            try:
                with self._one_at_a_time:
                    if self._place.version == "compared":
                        self._place.fs.invalidate_cache()
                    return getattr(self._place.fs, what)(*arguments, **more)
            except Exception as error:
                said = self._place.in_one_line(error)
                if not getattr(said, "passing", False):
                    raise said from error
                if number == RETRIES:
                    raise RemoteError(f"{said.strerror}, {RETRIES + 1} times; try again later") from error
            longest = FIRST_WAIT * 2**number
            time.sleep(random.uniform(longest / 2, longest))
        raise AssertionError


def _status(info: Mapping[str, Any]) -> Status:
    if info["type"] == "directory":
        return FOLDER
    times = [info[name] for name in MODIFIED if isinstance(info.get(name), (datetime, int, float))]
    modified = next((t.timestamp() if isinstance(t, datetime) else float(t) for t in times), 0.0)
    size = int(info["size"] or 0)
    version = next((str(info[name]) for name in VERSION if info.get(name)), f"{size} {modified}")
    return Status(size, modified, version)


# -- which file system serves a URL ------------------------------------------------------------------------------------


BUCKETS = ("s3", "gs", "az")


def store_of(scheme: str, name: str, queries: Mapping[str, str]) -> Store:
    """The store of a bucket, host or repository called `name`; `queries` by key are sent, and never shown.

    Raises:
        RemoteError: a package that is needed for this is not installed, or nothing serves such a URL.
    """
    try:
        if scheme in BUCKETS:
            return Store(_bucket(scheme, name))
        if scheme in WEB:
            return Store(_web(f"{scheme}://{name.partition('#')[0]}", queries))
        if scheme == HUB:
            return Store(_hub(name), lambda: _hub(name))  # A branch may have moved.
        return Store(_any(f"{scheme}://{name}"))
    except RemoteError:
        raise
    except ImportError as error:
        wanted = {**dict.fromkeys(BUCKETS, "obstore"), **dict.fromkeys(WEB, "aiohttp"), HUB: "huggingface_hub"}
        if scheme in wanted:
            text = f"needs the package {wanted[scheme]}: pip install 'ckptools[remote]'"
            raise RemoteError(text, errno.ENOTSUP) from error
        raise in_one_line(error) from error
    except Exception as error:
        raise RemoteError(f"cannot be reached: {first_line(error)}", errno.ENOTSUP) from error


def _bucket(scheme: str, name: str) -> Place:

    fs = BucketFileSystem(scheme)
    return Place(fs, lambda key: f"{name}/{key}", "checked", in_one_line=bucket_error)


def _web(origin: str, queries: Mapping[str, str]) -> Place:
    from ckptools.files.remote.web import WebFileSystem, web_error

    def url(key: str) -> str:
        query = queries.get(key, "")
        # A percent-encoded part of a URL stays as it is; a name from a file, such as an index's shard, is encoded here.
        return f"{origin}/{quote(key, safe='/%:@!$&()*+,;=~')}" + (f"?{query}" if query else "")

    return Place(WebFileSystem(), url, "checked", lists=False, in_one_line=web_error)


def _hub(name: str) -> Place:
    from huggingface_hub import HfApi, HfFileSystem

    endpoint = os.environ.get("HF_ENDPOINT") or None
    repository, _, revision = name.partition("@")
    kind, _, rest = repository.partition("/")
    typed = (rest, kind[:-1]) if kind in ("datasets", "spaces") else (repository, None)
    if typed[0].count("/") != 1:
        raise RemoteError("names no repository: hf://organization/name/path is expected", errno.EINVAL)
    try:
        commit = HfApi(endpoint).repo_info(typed[0], repo_type=typed[1], revision=unquote(revision) or None).sha
    except Exception as error:
        raise _hub_error(error) from error
    fs = HfFileSystem(endpoint=endpoint, skip_instance_cache=True)
    return Place(fs, lambda key: f"{repository}@{commit}/{key}", "fixed", in_one_line=_hub_error)


def _hub_error(error: Exception) -> OSError:
    cause = error if hasattr(error, "response") else error.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in (401, 403):
        text = "no such repository, or it needs a token in HF_TOKEN, or its terms to be accepted"
        return DeniedError(f"access denied by the Hub ({status}): {text}", errno.EACCES)
    if status == 404 and "Entry" not in type(cause).__name__:
        return RemoteError("the Hub answers 404: no such repository or revision?")
    return in_one_line(error)


def _any(url: str) -> Place:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        fs, root = url_to_fs(url, skip_instance_cache=True)
    except ValueError as error:
        known = ", ".join(f"{scheme}://" for scheme in (*BUCKETS, *WEB, HUB))
        text = f"is not read; {known} are, and what fsspec has a file system for: {first_line(error)}"
        raise RemoteError(text) from error
    return Place(fs, lambda key: f"{root.rstrip('/')}/{key}" if key else root)
