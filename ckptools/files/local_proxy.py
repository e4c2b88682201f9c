"""A proxy on this machine that lets the requests of a library through to hosts that were named, and to no others.

obstore follows a redirect to any host, and no setting of its keeps it from that. But it can be told to ask a proxy for
all hosts but some: those are the bucket's, and this is the proxy. Where the user's own proxy leads to the bucket, this
one passes on what goes there. Messages: RFC 9110, 9.3.6 (CONNECT), and RFC 9112, 3.2.2.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from ckptools.files.proxies import basic, host_and_port, login
from ckptools.files.retries import timeout

REFUSED = "421 Misdirected Request"
"""What is answered for other hosts; no store says this, and nobody tries it again."""

HEAD_SECONDS = 10.0
MAX_HEAD = 64 << 10
PIECE = 256 << 10
"""Bytes that are passed on at a time."""

HOP = ("proxy-authorization", "proxy-connection", "connection")
"""Headers that are between one proxy and its client."""

CLOSE = {"Connection": "close"}


class LocalProxy:
    """A proxy for the other threads of this process.

    What is passed on with the password of the user's own proxy needs a password here too, so that nobody else on this
    machine makes use of it.

    Args:
        ways: hosts that may be reached, each with the URL of the proxy that leads there.

    Attributes:
        refused: the server that was refused last, as its scheme, host and port; None while none was.
        trouble: why the user's proxy passed nothing on when it was asked last; "" where it did.
    """

    def __init__(self, ways: Mapping[str, SplitResult]) -> None:
        self._ways = ways
        self.refused: SplitResult | None = None
        self.trouble = ""
        self._password = os.urandom(16).hex()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        Thread(target=self._serve, name="local proxy", daemon=True).start()

    @property
    def url(self) -> str:
        """What clients are told."""
        return f"http://ckptools:{self._password}@127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> LocalProxy:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of its port; `accept` returns only if the socket is shut down too."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        # Once no more descriptors or threads are to be had, nothing is let through.
        with suppress(OSError, RuntimeError), self._server:
            while True:
                client, _ = self._server.accept()
                Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        # Whatever fails here, the client sees a connection that ends, and has its own words for that.
        with client, suppress(OSError, ValueError):
            client.settimeout(HEAD_SECONDS)
            request = _head(client)
            server = _server(request.line)
            way = self._ways.get(server.hostname or "")
            if way is None:
                self.refused = server
                _say(client, REFUSED)
            elif way.username and request.headers.get("proxy-authorization") != basic(f"ckptools:{self._password}"):
                _say(client, "407 Proxy Authentication Required")
            else:
                self._pass_on(request, client, way)

    def _pass_on(self, request: _Head, client: socket.socket, way: SplitResult) -> None:
        client.settimeout(None)
        try:
            proxy = _connected(way)
        except OSError:
            self.trouble = f"the proxy {way.hostname} cannot be reached"
            raise
        with proxy:
            try:
                answer = _asked(request, client, proxy, way)
            except (OSError, ValueError):
                self.trouble = f"the proxy {way.hostname} gives no answer"
                raise
            status, is_tunnel = answer.line.split(" ")[1], request.line.startswith("CONNECT ")
            refused = status == "407" or (is_tunnel and not status.startswith("2"))
            self.trouble = f"the proxy {way.hostname} lets nothing through: {status}" if refused else ""
            # Whoever asks again by the same connection would not be looked at.
            client.sendall(answer.passed_on({} if is_tunnel else CLOSE))
            proxy.settimeout(None)
            _relay(client, proxy)


class _Head(NamedTuple):
    """What a message of HTTP begins with.

    Attributes:
        line: its first line.
        headers: by name in lower case.
        rest: what came after them.
    """

    line: str
    headers: Mapping[str, str]
    rest: bytes

    def passed_on(self, more: Mapping[str, str]) -> bytes:
        """The message as it is for the next, with more headers."""
        headers = {name: value for name, value in self.headers.items() if name not in HOP} | dict(more)
        lines = [self.line, *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.rest


def _head(sender: socket.socket) -> _Head:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = sender.recv(MAX_HEAD)
        if not piece or len(data) > MAX_HEAD:
            raise ValueError("no message of HTTP")
        data += piece
    line, *headers = data[:end].decode("latin-1").split("\r\n")
    pairs = [header.partition(":") for header in headers]
    return _Head(line, {name.strip().lower(): value.strip() for name, _, value in pairs}, data[end + 4 :])


def _server(line: str) -> SplitResult:
    """Scheme, host and port that a request is for; TLS is what a tunnel (CONNECT) is made for."""
    method, target, _ = line.split(" ")
    if method == "CONNECT":
        return urlsplit(f"https://{target.removesuffix(':443')}")
    url = urlsplit(target)
    return url._replace(netloc=url.netloc.rpartition("@")[2], path="", query="")


def _say(client: socket.socket, status: str) -> None:
    client.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode("ascii"))


def _asked(request: _Head, client: socket.socket, proxy: socket.socket, way: SplitResult) -> _Head:
    """What the answer to a request begins with, after all of the request was passed on."""
    proxy.settimeout(timeout())
    if request.line.startswith("CONNECT "):
        proxy.sendall(request.passed_on(login(way)))
    else:
        proxy.sendall(request.passed_on({**login(way), **CLOSE}))
        _copy(client, proxy, int(request.headers.get("content-length", "0")) - len(request.rest))
    return _head(proxy)


def _copy(client: socket.socket, proxy: socket.socket, length: int) -> None:
    while length > 0:
        data = client.recv(min(PIECE, length))
        if not data:
            raise ValueError("the request is cut short")
        proxy.sendall(data)
        length -= len(data)


def _connected(proxy: SplitResult) -> socket.socket:
    plain = socket.create_connection(host_and_port(proxy), HEAD_SECONDS)
    if proxy.scheme == "http":
        return plain
    import ssl

    return ssl.create_default_context().wrap_socket(plain, server_hostname=proxy.hostname)


def _relay(client: socket.socket, proxy: socket.socket) -> None:
    """Pass on what either sends, until one of them ends; both by one thread, since TLS allows no two."""
    # What TLS has decrypted already is no longer seen in the socket.
    decrypted: Callable[[], int] = getattr(proxy, "pending", int)
    poll, to = select.poll(), {client.fileno(): (client, proxy), proxy.fileno(): (proxy, client)}
    for number in to:
        poll.register(number, select.POLLIN)
    while True:
        for number in [proxy.fileno()] if decrypted() else [number for number, _ in poll.poll()]:
            sender, receiver = to[number]
            data = sender.recv(PIECE)
            if not data:
                return
            receiver.sendall(data)
