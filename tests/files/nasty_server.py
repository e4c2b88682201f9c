"""A web server on a real socket that keeps one file and misbehaves as it is told to."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from ckptools.files.remote import path

DATA = bytes(range(251)) * 400


class NastyServer:
    """A server, what it does, and what it was asked.

    Attributes:
        data: the file's content, under every path.
        etag: of it; none is sent where it is "".
        faults: what it does with the next requests, one each, by name; then it is as it should be.
        always: what it does with each request once `faults` are used up.
        location: where it redirects to.
        asked: path, range and other headers of each request so far.
    """

    def __init__(self) -> None:
        self.data, self.etag = DATA, '"one"'
        self.faults: list[str] = []
        self.always = "good"
        self.location = ""
        self.asked: list[tuple[str, str | None, dict[str, str]]] = []
        self.port = 0

    @property
    def url(self) -> str:
        """Of the file."""
        return f"http://127.0.0.1:{self.port}/run7/rank0.pt"


@contextmanager
def nasty_server(tls: ssl.SSLContext | None = None, idle: float | None = None) -> Iterator[NastyServer]:
    """Yield a server that runs until the block ends.

    Args:
        tls: it speaks TLS where a context is given.
        idle: seconds after which it closes a connection that nobody uses.
    """
    told = NastyServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Told", (_Handler,), {"told": told, "timeout": idle}))
    server.daemon_threads = True
    server.socket = tls.wrap_socket(server.socket, server_side=True) if tls else server.socket
    told.port = server.server_port
    # The system may give the port of an earlier server again, whose URLs had other queries.
    for scheme in ("http", "https"):
        path._queries.pop((scheme, f"127.0.0.1:{told.port}"), None)
        path._stores.pop((scheme, f"127.0.0.1:{told.port}"), None)  # it would go on with those queries
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    told: NastyServer

    def do_GET(self) -> None:
        told = self.told
        told.asked.append((self.path, self.headers["Range"], {k.lower(): v for k, v in self.headers.items()}))
        fault = told.faults.pop(0) if told.faults else told.always
        if fault.isdecimal():
            self._send(int(fault), b"an error")
        else:
            getattr(self, f"_{fault}")()

    def _range(self) -> tuple[int, int]:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        return int(first), min(int(last) + 1, len(self.told.data))

    def _send(self, status: int, body: bytes, length: int | None = None, **headers: Any) -> None:
        self.send_response(status)
        if self.told.etag:
            self.send_header("ETag", self.told.etag)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def _part(self, first: int, end: int, told: str = "", **more: Any) -> None:
        told = told or f"bytes {first}-{end - 1}/{len(self.told.data)}"
        self._send(206, self.told.data[first:end], Content_Range=told, **more)

    def _good(self) -> None:
        first, end = self._range()
        if self.headers.get("If-Match", self.told.etag) != self.told.etag:
            self._send(412, b"")
        elif first >= len(self.told.data):
            self._send(416, b"", Content_Range=f"bytes */{len(self.told.data)}")
        else:
            self._part(first, end)

    def _ignores_if_match(self) -> None:
        self._part(*self._range())

    def _fewer(self) -> None:
        first, end = self._range()
        self._part(first, first + max((end - first) // 2, 1))

    def _announces_more(self) -> None:
        first, end = self._range()
        self._send(206, self.told.data[first : end - 1], Content_Range=f"bytes {first}-{end - 1}/{len(self.told.data)}")

    def _breaks_off(self) -> None:
        first, end = self._range()
        self._part(
            first, end - (end - first) // 2, f"bytes {first}-{end - 1}/{len(self.told.data)}", length=end - first
        )
        self._hang_up()

    def _hangs_up(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _sleeps(self) -> None:
        time.sleep(0.9)
        self.close_connection = True

    def _drips(self) -> None:
        first, end = self._range()
        self._part(first, first + 1, f"bytes {first}-{end - 1}/{len(self.told.data)}", length=end - first)
        for at in range(first + 1, min(first + 12, end)):
            time.sleep(0.08)
            self.wfile.write(self.told.data[at : at + 1])
        self._hang_up()

    def _knows_no_ranges(self) -> None:
        self._send(200, self.told.data)

    def _announces_terabytes(self) -> None:
        self._send(200, b"", length=1 << 40)
        self._hang_up()

    def _whole_without_length(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + self.told.data[:100])
        self._hang_up()

    def _other_range(self) -> None:
        first, end = self._range()
        self._part(first + 1, end)

    def _no_content_range(self) -> None:
        first, end = self._range()
        self._send(206, self.told.data[first:end])

    def _untold_size(self) -> None:
        first, end = self._range()
        self._part(first, end, f"bytes {first}-{end - 1}/*")

    def _other_size(self) -> None:
        first, end = self._range()
        self._part(first, end, f"bytes {first}-{end - 1}/{len(self.told.data) + 1}")

    def _compressed(self) -> None:
        self._part(*self._range(), Content_Encoding="gzip")

    def _redirects(self) -> None:
        self._send(302, b"", Location=self.told.location)

    def _later(self) -> None:
        self._send(503, b"", Retry_After="0")

    def _much_later(self) -> None:
        self._send(429, b"", Retry_After="86400")

    def _no_http(self) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        self._hang_up()

    def log_message(self, *_: Any) -> None:
        pass
