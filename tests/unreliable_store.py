"""A proxy in front of the S3 server that answers as stores and networks do on a bad day."""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

SLOW = 1.5
"""Seconds that a slow answer takes; a request may take half a second in these tests."""

SEEN = "?seen="
"""What a redirect may put behind a request's target, so that it is let through where it leads to the same host."""


@dataclass
class Answer:
    """What the proxy sends.

    Attributes:
        status: HTTP's.
        headers: by name, each word of it with a capital.
        body: all bytes that the length is said of.
        sent: how many of them are sent before the connection is closed; None for all.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    sent: int | None = None


Fault = Callable[[Answer], Answer]
"""Turns a good answer to a request for a range into a bad one."""


@dataclass
class Proxy:
    """What goes on between a client and the server.

    Attributes:
        address: where the client finds it.
        behind: address of the server.
        faults: what happens to the next answers with bytes of files, each one of them once.
        always: what happens to all further ones.
        redirects: the status and `Location` that a request is answered with, by its kind: list, range, head or write.
        requests: how many requests there were.
        versions: the ETags that ranges were to be of (`If-Match`).
    """

    address: str
    behind: str
    faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    redirects: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: int = 0
    versions: list[str | None] = field(default_factory=list)

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes = b"") -> Answer:
        """What the server answers, or what becomes of that."""
        self.requests += 1
        if (kind := _kind(method, headers)) in self.redirects and SEEN not in target:
            status, location = self.redirects[kind]
            return Answer(status, {"Location": location.format(target=target)} if location else {}, b"")
        connection = http.client.HTTPConnection(urlsplit(self.behind).netloc, timeout=20)
        try:
            connection.request(method, target.partition(SEEN)[0], body, headers)
            found = connection.getresponse()
            good = Answer(found.status, {name.title(): value for name, value in found.getheaders()}, found.read())
        finally:
            connection.close()
        lowered = {name.lower(): value for name, value in headers.items()}
        if "range" not in lowered:
            return good
        self.versions.append(lowered.get("if-match"))
        fault = self.faults.pop(0) if self.faults else self.always
        return fault(good) if fault else good


def _kind(method: str, headers: dict[str, str]) -> str:
    if method in ("GET", "HEAD"):
        is_range = "range" in {name.lower() for name in headers}
        return "head" if method == "HEAD" else "range" if is_range else "list"
    return "write"


@contextmanager
def proxy_of(
    behind: str, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, idle: float | None = None
) -> Iterator[Proxy]:
    """Yield a proxy in front of a server; it speaks TLS where a context is given.

    It closes connections that nobody has used for `idle` seconds.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version, timeout = "HTTP/1.1", idle

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            target = re.sub("^http://[^/]*", "", self.path)  # whole as another proxy is asked
            found = proxy.answer(self.command, target, headers, body)
            left_out = ("content-length", "transfer-encoding", "connection")
            self.send_response(found.status)
            for name, value in found.headers.items():
                if name.lower() not in left_out:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(found.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(found.body[: found.sent])
            self.close_connection = found.sent is not None

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815 - names that the base class looks for

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that has given up

    with Server((host, 0), Handler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True) if tls else server.socket
        proxy = Proxy(f"http{'s' if tls else ''}://{host}:{server.server_port}", behind)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


def slow(answer: Answer) -> Answer:
    """Later than a client waits."""
    time.sleep(SLOW)
    return answer


def dropped(answer: Answer) -> Answer:
    """The connection ends half-way."""
    return Answer(answer.status, answer.headers, answer.body, len(answer.body) // 2)


def shorter(answer: Answer) -> Answer:
    """A well-formed answer with fewer bytes than were asked for."""
    body = answer.body[: len(answer.body) // 2]
    unit, _, span = answer.headers["Content-Range"].partition(" ")
    first, total = span.split("-")[0], span.split("/")[1]
    told = {"Content-Range": f"{unit} {first}-{int(first) + len(body) - 1}/{total}"}
    return Answer(answer.status, answer.headers | told, body)


def elsewhere(answer: Answer) -> Answer:
    """Bytes of another place in the file."""
    unit, _, span = answer.headers["Content-Range"].partition(" ")
    total = int(span.split("/")[1])
    told = {"Content-Range": f"{unit} 1-{len(answer.body)}/{total}"}
    return Answer(answer.status, answer.headers | told, answer.body)


def without_range(answer: Answer) -> Answer:
    """The range is ignored, as a server does that knows none."""
    return Answer(200, {k: v for k, v in answer.headers.items() if k != "Content-Range"}, answer.body + b"more")


def another_version(answer: Answer) -> Answer:
    """The file was replaced, and the server does not look at If-Match."""
    return Answer(answer.status, answer.headers | {"Etag": '"0123456789abcdef0123456789abcdef"'}, answer.body)


def failed(status: int) -> Fault:
    """An error of the server."""
    return lambda _: Answer(status, {"Content-Type": "application/xml"}, b"<Error><Code>Sorry</Code></Error>")
