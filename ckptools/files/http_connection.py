"""One HTTP request and its answer, within a time limit that holds for all of it; connections are kept for the next.

Python's own client follows no redirect and repeats nothing by itself: both are decided in `web`. Format of messages:
RFC 9110 and 9112.
"""

from __future__ import annotations

import atexit
import io
import os
import re
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import SplitResult

from ckptools.files.proxies import host_and_port, login, proxy_of

_NO_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})")
"""What Python's client says where a proxy refuses; the rest is the proxy's own text."""

ERROR_BODY = 64 << 10
"""Bytes that are read of the body of an error."""


class Answer(NamedTuple):
    """What a server has answered.

    Attributes:
        status: the code, as 206.
        headers: by name in lower case; of one that comes twice the first.
        body: its bytes, or those that came; nothing of a body that is larger than was allowed.
        fault: why the body is not whole; "" where it is.
        too_large: whether the body was larger than allowed.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    fault: str = ""
    too_large: bool = False


class TransportError(Exception):
    """No answer came; the message is one line.

    Args:
        reason: that line.
        passing: whether another try may have one.
    """

    def __init__(self, reason: str, passing: bool = True) -> None:
        super().__init__(reason)
        self.passing = passing


class Connections:
    """Connections to servers, kept open between requests for whichever thread asks next."""

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[int, str, str, SplitResult | None], list[HTTPConnection]] = defaultdict(list)
        self._trust: ssl.SSLContext | None = None
        atexit.register(self.close)

    def get(self, url: SplitResult, headers: Mapping[str, str], most: int, seconds: float) -> Answer:
        """Ask for a URL.

        Args:
            url: of http or https.
            headers: of the request, besides `Host`.
            most: bytes of a body that are read.
            seconds: the whole request may take.

        Raises:
            TransportError: no answer.
        """
        deadline = time.monotonic() + seconds
        # By process: one that was forked must not speak into its parent's connections.
        proxy = proxy_of(url)
        idle = self._idle[os.getpid(), url.scheme, url.netloc, proxy]
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._connection(url, proxy)
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        if proxy and url.scheme == "http":
            target, headers = f"http://{url.netloc}{target}", {**headers, **login(proxy)}
        try:
            answer, keep = _exchange(connection, target, headers, most, deadline)
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            raise _transport_error(error, url, proxy, seconds) from error
        if keep:
            idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close those that nobody uses."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    def _connection(self, url: SplitResult, proxy: SplitResult | None) -> HTTPConnection:
        if proxy and proxy.scheme == "https":
            raise TransportError(f"the proxy {proxy.hostname} is to be asked by TLS, which is not done", passing=False)
        try:
            server = host_and_port(proxy or url)
            if url.scheme == "http":
                return HTTPConnection(*server)
            self._trust = self._trust or ssl.create_default_context()
            connection = HTTPSConnection(*server, context=self._trust)
            if proxy:
                connection.set_tunnel(url.hostname or "", url.port or 443, dict(login(proxy)))
        except (HTTPException, ValueError) as error:
            raise TransportError(f"{url.netloc} is no host and port", passing=False) from error
        return connection


def _exchange(
    connection: HTTPConnection, target: str, headers: Mapping[str, str], most: int, deadline: float
) -> tuple[Answer, bool]:
    """Ask and read the answer; also whether the connection can be used again."""
    connection.timeout = _left(deadline)
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)
    made: Any = lambda sock, method: _Response(sock, method, deadline)  # noqa: E731
    connection.response_class = made
    connection.request("GET", target, headers=dict(headers))
    response = connection.getresponse()
    found = {name.lower(): value for name, value in reversed(response.getheaders())}
    most = most if response.status in (200, 206) else ERROR_BODY
    if response.length is not None and response.length > most:
        return Answer(response.status, found, b"", too_large=True), False
    body, fault = _body(response, most)
    too_large = len(body) > most
    answer = Answer(response.status, found, b"" if too_large else body, fault, too_large)
    return answer, response.isclosed() and not response.will_close and not fault and not too_large


def _body(response: HTTPResponse, most: int) -> tuple[bytes, str]:
    """The bytes of a body, one more than `most` at most, and why they are not all."""
    expected = response.length
    buffer, done = bytearray(most + 1 if expected is None else expected), 0
    try:
        while done < len(buffer) and (n := response.readinto(memoryview(buffer)[done:])):
            done += n
    except (OSError, HTTPException, ValueError) as error:
        return bytes(buffer[:done]), _failure(error)
    if expected is None and not response.chunked:
        return bytes(buffer[:done]), "the server does not tell how long its answer is"
    if expected is not None and done < expected:
        return bytes(buffer[:done]), f"the server closed the connection after {done} of {expected} bytes"
    if expected is not None:
        response.close()
    return bytes(buffer[:done]), ""


class _Response(HTTPResponse):
    """An answer whose reader gives up at a deadline, however slowly the bytes come."""

    def __init__(self, sock: socket.socket, method: str | None, deadline: float) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        self.fp = io.BufferedReader(_Reader(sock, deadline))


class _Reader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)  # keeps the socket open until the body is read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer) or 0

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _transport_error(error: Exception, url: SplitResult, proxy: SplitResult | None, seconds: float) -> TransportError:
    asked = proxy or url
    host = f"the proxy {asked.hostname}" if proxy else asked.hostname or asked.netloc
    if isinstance(error, ssl.SSLCertVerificationError):
        return TransportError(
            f"the certificate of {url.hostname} is not trusted: {error.verify_message}", passing=False
        )
    if isinstance(error, socket.gaierror):
        return TransportError(f"no host {asked.hostname} was found", passing=error.errno == socket.EAI_AGAIN)
    if isinstance(error, TimeoutError):
        return TransportError(f"{host} does not answer within {seconds:g} seconds")
    if refusal := _NO_TUNNEL.search(str(error)):
        return TransportError(f"{host} lets nothing through to {url.hostname}: {refusal[1]}", passing=False)
    return TransportError(f"{host}: {_failure(error)}")


def _failure(error: Exception) -> str:
    """What went wrong with a connection, in words."""
    if isinstance(error, TimeoutError):
        return "the rest does not come in time"
    if isinstance(error, ConnectionRefusedError):
        return "refuses the connection"
    if isinstance(error, (ConnectionError, HTTPException)) and not isinstance(error, ssl.SSLError):
        return "the server broke off the connection" if isinstance(error, ConnectionError) else "does not speak HTTP"
    return f"the connection failed ({type(error).__name__})"
