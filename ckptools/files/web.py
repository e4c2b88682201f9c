"""Files of a web server, by ranges: `https://` and `http://`.

A server tells nothing of what else it has, so only files that are named are looked at, by asking for their first bytes.
A redirect is followed within the same server only. Semantics of ranges and conditions: RFC 9110, 13 and 14.
"""

from __future__ import annotations

import errno
import re
from abc import abstractmethod
from collections.abc import Mapping
from http.client import responses
from typing import NoReturn
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from ckptools._version import __version__
from ckptools.files.http_connection import Answer, Connections, TransportError
from ckptools.files.remote_file import SMALL, Held
from ckptools.files.remote_store import DeniedError, NoListError, RemoteError, RemoteStore, replaced
from ckptools.files.retries import Tries, timeout
from ckptools.files.storage import Status

PROGRESS = 256 << 10
"""Bytes of an answer that was cut short after which the count of failures begins anew."""

WHOLE = 10 << 20
"""Bytes of a file that is taken whole where the server knows no ranges: indexes and configurations are smaller."""

REDIRECTS = 5
FOLLOWED = (301, 302, 303, 307, 308)
RETRIED = (408, 429, 500, 502, 503, 504)

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_connections = Connections()


class HttpStore(RemoteStore):
    """Files that are had by HTTP."""

    @abstractmethod
    def _url(self, key: str) -> str:
        """Where a file is asked for."""

    def _fetch(self, key: str, version: str, start: int, end: int) -> bytes:
        size, data, tries = self.status(key).size, bytearray(), Tries()
        while (at := start + len(data)) < end:
            headers = {"Range": f"bytes={at}-{end - 1}", **_condition(version)}
            answer = self._get(self._url(key), headers, tries, end - at)
            data += _part(answer, at, end, size, version)
            if answer.fault:
                tries.failed(answer.fault, fresh=len(answer.body) >= PROGRESS)
        return bytes(data)

    def _get(self, url: str, headers: Mapping[str, str], tries: Tries, length: int = 0) -> Answer:
        """The answer to a request, after as many tries as it needs; the store's refusals are errors."""
        while True:
            try:
                _, answer = self._followed(url, headers, max(length, WHOLE))
            except TransportError as error:
                if not error.passing:
                    raise RemoteError(str(error)) from error
                tries.failed(str(error))
                continue
            if answer.status not in RETRIED:
                return answer
            tries.failed(f"the server answers {_named(answer.status)}", _wait_asked(answer))

    def _followed(self, url: str, headers: Mapping[str, str], most: int) -> tuple[str, Answer]:
        """Where the redirects of a request lead, and the answer there."""
        for _ in range(REDIRECTS + 1):
            parts = urlsplit(url)
            answer = _connections.get(parts, {**BASE, **self._credentials(parts), **headers}, most, timeout())
            if answer.status not in FOLLOWED:
                return url, answer
            target = urljoin(url, answer.headers.get("location", ""))
            self._check_redirect(parts, urlsplit(target))
            url = target
        raise RemoteError(f"the server redirects more than {REDIRECTS} times")

    def _credentials(self, _url: SplitResult) -> Mapping[str, str]:
        return {}

    def _check_redirect(self, origin: SplitResult, target: SplitResult) -> None:
        if (origin.scheme, target.scheme) == ("https", "http"):
            raise RemoteError(f"the server redirects to http://{_host(target)}, without TLS; that is not followed")
        if authority(target) != authority(origin) and not _gains_tls(origin, target):
            raise RemoteError(
                f"the server redirects to another, {_host(target)}; that is not followed: name the file's URL there"
            )


class Web(HttpStore):
    """A web server.

    Args:
        origin: its scheme, host and port: `https://host:8443`.
        queries: what follows the `?` in the URL of a file, by key; sent, and never shown.
    """

    lists = False

    def __init__(self, origin: str, queries: Mapping[str, str]) -> None:
        super().__init__()
        self.origin, self.queries = origin, queries

    def _list(self, folder: str) -> Mapping[str, Status]:
        raise NoListError("its server lists no files", errno.ENOTSUP)

    def status(self, key: str) -> Status:
        """What is at a key; of what else there may be nothing is known."""
        if not key:
            raise DeniedError("a web server lists no files; name one", errno.ENOTSUP)
        return super().status(key)

    def entries(self, key: str) -> Mapping[str, Status]:
        """The files of a folder that were named and looked at: those that may be beside them are not told."""
        with self._lock:
            known = {path.rpartition("/"): status for path, status in self._files.items() if status is not None}
        return {name: status for (folder, _, name), status in known.items() if folder == key}

    def _look(self, key: str) -> Status | None:
        tries = Tries()
        while True:
            answer = self._get(self._url(key), {"Range": f"bytes=0-{SMALL - 1}"}, tries)
            if answer.status in (404, 410):
                return None
            if not answer.fault or answer.status not in (200, 206):
                break
            tries.failed(answer.fault)
        status = _first_status(answer)
        if status.size:
            self._known_of(key).add(Held(0, answer.body[:SMALL]))
        return status

    def _url(self, key: str) -> str:
        query = self.queries.get(key, "")
        # What is percent-encoded in a URL stays so; names that others give (an index its shards) are encoded here.
        return f"{self.origin}/{quote(key, safe='/%:@!$&()*+,;=~')}" + (f"?{query}" if query else "")


BASE = {"Accept-Encoding": "identity", "User-Agent": f"ckptools/{__version__}"}
"""What every request says: bytes are wanted as they are stored."""


def _first_status(answer: Answer) -> Status:
    """What is known of a file by the answer to a request for its first bytes."""
    modified, version = _modified(answer), _version(answer)
    if answer.status == 416 and re.fullmatch(r"bytes \*/0", answer.headers.get("content-range", "")):
        return Status(0, modified, version)
    if answer.status == 200:
        return Status(len(_whole(answer)), modified, version)
    if answer.status != 206:
        _refuse(answer)
    total = _range_of(answer, 0, SMALL)[2]
    if total is None:
        raise RemoteError("its server does not tell how large it is")
    return Status(total, modified, version)


def _part(answer: Answer, start: int, end: int, size: int, version: str) -> bytes:
    """The bytes from `start` to `end` at most that an answer has, of the file that has that size and version."""
    if answer.status in (404, 410):
        raise FileNotFoundError(errno.ENOENT, "was removed meanwhile")
    if answer.status in (412, 416):
        raise replaced()
    if answer.status not in (200, 206):
        _refuse(answer)
    if _contradicts(version, answer):
        raise replaced()
    if answer.status == 200:
        whole = _whole(answer)
        if len(whole) != size and not answer.fault:
            raise replaced()
        return whole[start:end]
    _, _, total = _range_of(answer, start, end)
    if total is not None and total != size:
        raise replaced()
    return answer.body


def _range_of(answer: Answer, start: int, end: int) -> tuple[int, int, int | None]:
    """First byte, one past the last, and the file's size, as the answer tells; checked against what was asked."""
    told = answer.headers.get("content-range", "")
    found = _CONTENT_RANGE.fullmatch(told.strip())
    if found is None:
        raise RemoteError("the server answers with a part of the file and does not say which")
    first, last = int(found[1]), int(found[2]) + 1
    if first != start or not first < last <= end:
        raise RemoteError(f"the server answers with bytes {first} to {last - 1}; expected {start} to {end - 1}")
    if answer.too_large or len(answer.body) > last - first or (len(answer.body) < last - first and not answer.fault):
        raise RemoteError(f"the server announces {last - first} bytes and sends {_sent(answer)}")
    _check_encoding(answer)
    return first, last, None if found[3] == "*" else int(found[3])


def _sent(answer: Answer) -> str:
    return "more" if answer.too_large else str(len(answer.body))


def _whole(answer: Answer) -> bytes:
    """The file, from a server that sends all of it whatever was asked for."""
    if answer.too_large:
        raise RemoteError("the server knows no ranges and sends whole files only; copy it to this machine first")
    _check_encoding(answer)
    return answer.body


def _check_encoding(answer: Answer) -> None:
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise RemoteError("the server sends it compressed, though it was asked not to; copy it to this machine first")


def _refuse(answer: Answer) -> NoReturn:
    """Say in one line that the server does not give a file."""
    if answer.status in (401, 403, 407):
        raise DeniedError(
            f"access denied by the server ({_named(answer.status)}); is the URL whole, and not expired?", errno.EACCES
        )
    raise RemoteError(f"the server answers {_named(answer.status)}")


def _named(status: int) -> str:
    return f"{status} {responses.get(status, '')}".strip()


def _version(answer: Answer) -> str:
    return answer.headers.get("etag") or answer.headers.get("last-modified") or ""


def _condition(version: str) -> dict[str, str]:
    """The header by which the server itself refuses another version."""
    if version.startswith('"'):
        return {"If-Match": version}
    # A weak ETag never satisfies If-Match; it is compared in the answer.
    return {"If-Unmodified-Since": version} if version and not version.startswith("W/") else {}


def _contradicts(version: str, answer: Answer) -> bool:
    """Whether an answer is of another version, by what it says itself."""
    is_tag = version.startswith(('"', "W/"))
    told = answer.headers.get("etag" if is_tag else "last-modified", "")
    return bool(version and told) and told != version


def _modified(answer: Answer) -> float:
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(answer.headers.get("last-modified", "")).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _wait_asked(answer: Answer) -> float | None:
    told = answer.headers.get("retry-after", "")
    return float(told) if re.fullmatch(r"\d{1,9}", told) else None


def _host(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


def authority(url: SplitResult) -> tuple[str, str, int | None]:
    """Scheme, host and port of a URL."""
    try:
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    except ValueError:
        port = None
    return url.scheme, url.hostname or "", port


def _gains_tls(origin: SplitResult, target: SplitResult) -> bool:
    """Whether a redirect leads from http to https of the same host, each on its usual port."""
    host = origin.hostname or ""
    return authority(origin) == ("http", host, 80) and authority(target) == ("https", host, 443)
