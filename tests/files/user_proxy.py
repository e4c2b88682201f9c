"""A proxy as companies have them: it reaches hosts that nobody else knows, once it is told a password."""

from __future__ import annotations

import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread

PASSWORD = "somebody:c0ffee"


@dataclass
class UserProxy:
    """What was asked of the proxy, and where it is.

    Attributes:
        behind: host and port that all requests are passed on to, whatever host they name.
        address: host and port of the proxy.
        asked: first lines of the requests that came with the password.
    """

    behind: tuple[str, int]
    address: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, client: socket.socket) -> None:
        """Pass on one connection."""
        with client, suppress(OSError), socket.create_connection(self.behind) as server:
            head = client.recv(1 << 16)
            if b64encode(PASSWORD.encode()) not in head:
                client.sendall(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            self.asked.append(head.split(b"\r\n")[0].decode())
            if head.startswith(b"CONNECT "):
                client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                method, _, rest = head.partition(b" http://")
                server.sendall(method + b" /" + rest.partition(b"/")[2])
            Thread(target=_copy, args=(client, server), daemon=True).start()
            _copy(server, client)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def user_proxy(behind: tuple[str, int], tls: ssl.SSLContext | None = None) -> Iterator[UserProxy]:
    """Yield a proxy; with TLS where a context is given."""
    with socket.create_server(("127.0.0.1", 0)) as plain:
        server = tls.wrap_socket(plain, server_side=True) if tls else plain
        proxy = UserProxy(behind, f"127.0.0.1:{server.getsockname()[1]}")

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    Thread(target=proxy.answer, args=(client,), daemon=True).start()

        Thread(target=serve, daemon=True).start()
        with server:
            yield proxy
            server.shutdown(socket.SHUT_RDWR)
