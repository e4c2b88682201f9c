"""The proxy of the environment: that which obstore takes by itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import S3Store

from ckptools.files.proxies import proxy_of

HERE, NAME = "http://127.0.0.5:9", "http://localhost:9"
"""Endpoints where nothing listens."""

ASKED = [
    (HERE, {}),
    (HERE, {"HTTP_PROXY": "http://PROXY"}),
    (HERE, {"http_proxy": "http://PROXY"}),
    (HERE, {"HTTP_PROXY": "PROXY"}),
    (HERE, {"HTTP_PROXY": "http://somebody:secret@PROXY"}),
    (HERE, {"HTTP_PROXY": "http://PROXY", "http_proxy": "http://127.0.0.1:1"}),
    (HERE, {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://PROXY"}),
    (HERE, {"HTTPS_PROXY": "http://PROXY"}),
    (HERE, {"ALL_PROXY": "http://PROXY"}),
    (HERE, {"ALL_PROXY": "http://PROXY", "HTTP_PROXY": "http://127.0.0.1:1"}),
    (HERE, {"HTTP_PROXY": "socks5://PROXY"}),
    (HERE, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "127.0.0.5"}),
    (HERE, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "127.0.0.50, 10.0.0.0/8"}),
    (HERE, {"HTTP_PROXY": "http://PROXY", "no_proxy": "127.0.0.4/31"}),
    (HERE, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "127.0.0.5:9"}),
    (NAME, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "localhost"}),
    (NAME, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "LOCALHOST"}),
    (NAME, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": ".localhost"}),
    (NAME, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "host"}),
    (NAME, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "a.localhost"}),
    (NAME, {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "example.org,*"}),
    ("http://a.localhost:9", {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "localhost"}),
    ("http://[::1]:9", {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "::1"}),
    ("http://[::1]:9", {"HTTP_PROXY": "http://PROXY", "NO_PROXY": "[::1]"}),
]


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """An address, and what was sent there."""
    asked: list[bytes] = []

    def listen() -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                with client:
                    asked.append(client.recv(4096))
                    client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=listen, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)


def store(endpoint: str) -> S3Store:
    plain, once = {"allow_http": True}, {"max_retries": 0}
    return S3Store("bucket", endpoint=endpoint, skip_signature=True, client_options=plain, retry_config=once)


@pytest.mark.parametrize(("endpoint", "environment"), ASKED, ids=[str(asked) for asked in ASKED])
def test_the_proxy_is_that_which_obstore_takes(endpoint, environment, listener, monkeypatch):
    address, asked = listener
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("PROXY", address))
    with suppress(GenericError, PermissionDeniedError):
        obstore.get(store(endpoint), "key")
    found = proxy_of(urlsplit(endpoint))
    assert (found is not None and found.netloc.endswith(address)) == bool(asked)


def test_a_star_means_no_proxy_for_addresses_too(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "*")
    assert proxy_of(urlsplit(HERE)) is None
