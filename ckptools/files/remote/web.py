"""Files of a web server: fsspec's file system for HTTP, with a check that each answer is what the request asked for.

A server lists nothing, so ckptools looks only at named files, by asking for their first bytes. Semantics of ranges and
conditions: RFC 9110, 13 and 14.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from email.utils import parsedate_to_datetime
from http.client import responses
from typing import Any

import aiohttp
from fsspec.implementations.http import HTTPFileSystem  # type: ignore[import-untyped]

from ckptools._version import __version__
from ckptools.files.remote import timeout
from ckptools.files.remote.cached_file import SMALL
from ckptools.files.storage import DeniedError, RemoteError, in_one_line, replaced
from ckptools.text import printable

WHOLE = 10 << 20
"""Files of at most this many bytes are read whole if the server knows no ranges: indexes and configs are smaller."""

PROGRESS = 256 << 10
"""If an answer with at least this many bytes is cut short, they are kept, and only the rest is requested again."""

TOO_LARGE = "the server knows no ranges and sends whole files only; copy it to this machine first"
REDIRECTS = 5
PASSING = (408, 429, 500, 502, 503, 504)
"""Answers after which the same request may succeed."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class WebFileSystem(HTTPFileSystem):  # type: ignore[misc]
    """Web servers, asked for ranges of one version of a file."""

    cachable = False  # the environment may have changed

    def __init__(self) -> None:
        asked = {"Accept-Encoding": "identity", "User-Agent": f"ckptools/{__version__}"}
        limit = aiohttp.ClientTimeout(total=timeout())
        options: dict[str, Any] = {"headers": asked, "timeout": limit, "trust_env": True, "auto_decompress": False}
        super().__init__(client_kwargs=options, get_client=_client, encoded=True)

    async def _info(self, url: str, **_: Any) -> dict[str, Any]:
        """Size, version and time of a file, and its first bytes, from one request."""
        answer, body = await self._get(url, 0, SMALL)
        empty = answer.status == 416 and re.fullmatch(r"bytes \*/0", answer.headers.get("Content-Range", ""))
        size = 0 if empty else _size(answer, body, 0, SMALL)
        if size is None:
            raise RemoteError("its server does not tell how large it is")
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        info: dict[str, Any] = {"name": url, "type": "file", "size": size, "version": f"{tag} {size}"}
        return {**info, "mtime": _modified(answer), "first": body[:SMALL] if len(body) >= min(size, SMALL) else b""}

    async def _cat_file(
        self, url: str, start: int | None = None, end: int | None = None, version: str = " ", **_: Any
    ) -> bytes:
        assert start is not None and end is not None
        tag, expected = version.rpartition(" ")[::2]
        answer, body = await self._get(url, start, end, tag)
        name = "ETag" if tag.startswith(('"', "W/")) else "Last-Modified"
        if answer.status in (412, 416) or (tag and answer.headers.get(name, tag) != tag):
            raise replaced()
        size = _size(answer, body, start, end)
        if expected and size is not None and str(size) != expected:
            raise replaced()
        return body if answer.status == 206 else body[start:end]

    async def _get(self, url: str, start: int, end: int, tag: str = "") -> tuple[aiohttp.ClientResponse, bytes]:
        """Request a range; return the answer and its body."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if tag.startswith('"'):  # A weak ETag, or a time, is compared with the answer's.
            headers["If-Match"] = tag
        session = await self.set_session()
        async with session.get(self.encode_url(url), headers=headers, max_redirects=REDIRECTS) as answer:
            _check(url, answer)
            most, body = WHOLE if answer.status == 200 else end - start, bytearray()
            try:
                while len(body) <= most and (piece := await answer.content.read(most + 1 - len(body))):
                    body += piece
            except (aiohttp.ClientPayloadError, asyncio.TimeoutError):
                if answer.status == 200 or len(body) < PROGRESS:
                    raise
            if len(body) > most and answer.status == 200:
                raise RemoteError(TOO_LARGE)
            return answer, bytes(body)


async def _client(**options: Any) -> aiohttp.ClientSession:
    # aiohttp's own context has the certificates that the environment named when aiohttp was imported.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=ssl.create_default_context()), **options)


def _check(url: str, answer: aiohttp.ClientResponse) -> None:
    """Refuse an answer that cannot contain bytes of the file, such as a redirect to a server without TLS."""
    if url.startswith("https:") and any(one.url.scheme == "http" for one in (*answer.history, answer)):
        raise RemoteError(f"the server redirects to http://{answer.url.host}, without TLS; that is not followed")
    if answer.status in (404, 410):
        raise FileNotFoundError
    named = f"{answer.status} {responses.get(answer.status, '')}".strip()
    if answer.status in (401, 403, 407):
        text = f"access denied by the server ({named}); is the URL whole, and not expired?"
        raise DeniedError(text, errno.EACCES)
    if answer.status not in (200, 206, 412, 416):
        raise RemoteError(f"the server answers {named}", passing=answer.status in PASSING)
    if answer.status == 200 and (answer.content_length or 0) > WHOLE:
        raise RemoteError(TOO_LARGE)
    if answer.status == 200 and not {"Content-Length", "Transfer-Encoding"} & set(answer.headers):
        raise RemoteError("the server does not tell how long its answer is")
    if answer.headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
        raise RemoteError("the server sends it compressed, though it was asked not to; copy it to this machine first")


def _size(answer: aiohttp.ClientResponse, body: bytes, start: int, end: int) -> int | None:
    """The file's size as the answer states it; refuse an answer that is neither the file nor the requested range."""
    if answer.status == 200:
        return len(body)
    if answer.status == 416:
        raise RemoteError("the server answers 416 Range Not Satisfiable")
    stated = answer.headers.get("Content-Range", "no range").strip()
    found = _CONTENT_RANGE.fullmatch(stated)
    first, last = (int(found[1]), int(found[2]) + 1) if found else (-1, -1)
    cut = len(body) < last - first and len(body) < PROGRESS
    if first != start or last > end or cut or len(body) > last - first:
        text = (
            f"the server answers with {len(body)} bytes as {printable(stated)}; bytes {start}-{end - 1} were asked for"
        )
        raise RemoteError(text)
    return None if found is None or found[3] == "*" else int(found[3])


def _modified(answer: aiohttp.ClientResponse) -> float:
    try:
        return parsedate_to_datetime(answer.headers.get("Last-Modified", "")).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


REASONS: tuple[tuple[type[Exception], str, bool], ...] = (
    (aiohttp.TooManyRedirects, f"the server redirects more than {REDIRECTS} times", False),
    (aiohttp.ClientConnectorDNSError, "there is no such host", False),
    (aiohttp.ClientConnectorCertificateError, "its certificate is not trusted", False),
    (aiohttp.ClientSSLError, "the server does not speak TLS", False),
    (aiohttp.ClientProxyConnectionError, "the proxy does not answer", False),
    (aiohttp.ClientConnectorError, "the server refuses the connection", True),
    (aiohttp.ClientPayloadError, "the server broke off its answer", True),
    (aiohttp.ClientConnectionError, "the server broke off the connection", True),
    (ValueError, "is no URL: its host and port are none", False),
)
"""What an error of aiohttp means, and whether the same request may succeed a moment later."""


def web_error(error: Exception) -> OSError:
    """An error of a request in one line, without the query of its URL."""
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return RemoteError(f"the server does not answer within {timeout():g} seconds", passing=True)
    for kind, reason, passing in REASONS:
        if isinstance(error, kind):
            return RemoteError(reason, passing=passing)
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return DeniedError(f"the proxy answers {error.status}", errno.EACCES)
    if isinstance(error, aiohttp.ClientResponseError):
        return RemoteError("the server does not speak HTTP", passing=True)
    return in_one_line(error)
