"""The proxy that lets nothing through but what was named: by itself, and in front of the user's own."""

from __future__ import annotations

import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from threading import Thread
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.files import bucket as buckets
from ckptools.files import remote_path
from ckptools.files.local_proxy import LocalProxy
from tests.files.certificates import trusted
from tests.files.user_proxy import PASSWORD, UserProxy, user_proxy
from tests.object_store import BUCKET, Bucketful
from tests.truth import FIXTURES
from tests.unreliable_store import Proxy, proxy_of

NAME = "torch2.13.0-fsdp1-sharded-w4"
URL = f"s3://{BUCKET}/{NAME}/rank0.pt"
STORE = "http://store.invalid:9000"
"""An endpoint that only the user's proxy finds."""

DATA = bytes(range(251)) * 8_000


@pytest.fixture
def store(bucket: Bucketful) -> Iterator[Proxy]:
    bucket.put(FIXTURES / NAME)
    with proxy_of(bucket.address) as found:
        yield found


@pytest.fixture
def user(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserProxy]:
    """The user's proxy, in whose environment the next commands run."""
    parts = urlsplit(store.address)
    monkeypatch.setattr(remote_path, "_stores", {})
    monkeypatch.setattr(buckets, "RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", STORE)
    with user_proxy((parts.hostname or "", parts.port or 0)) as found:
        monkeypatch.setenv("HTTP_PROXY", f"http://{PASSWORD}@{found.address}")
        yield found


def test_a_bucket_is_read_through_the_users_proxy(user):
    here, there = ckptools.open(FIXTURES / NAME / "rank0.pt").model, ckptools.open(URL).model
    key = next(iter(here))
    assert there[key].numpy().tobytes() == here[key].numpy().tobytes()
    assert user.asked and all(f" {STORE}/" in line for line in user.asked)


def test_a_bucket_is_written_through_the_users_proxy(user, s3):
    out = f"s3://{BUCKET}/proxied.safetensors"
    done = CliRunner().invoke(app, ["consolidate", f"s3://{BUCKET}/{NAME}", "-o", out, "--check"])
    assert done.exit_code == 0 and "all equal" in done.output
    assert any(line.startswith(("PUT", "POST")) for line in user.asked)


def test_large_files_go_through_the_users_proxy_both_ways(user):
    store, size = buckets.Bucket(f"s3://{BUCKET}"), 2 * buckets.PART
    store.upload("proxied", size, iter([DATA[:size]] * (size // len(DATA)) + [DATA[: size % len(DATA)]]))
    got = store._fetch("proxied", "", 0, size)
    assert got == (DATA * (size // len(DATA) + 1))[:size]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_redirect_to_another_host_is_not_followed_through_the_users_proxy(scheme, user, store):
    store.redirects = {"range": (307, f"{scheme}://other.invalid/x?X-Amz-Signature=c0ffee")}
    done = CliRunner().invoke(app, ["inspect", URL, "--debug"])
    assert done.exit_code == 3 and "redirects to another host, other.invalid; that is not followed" in done.stderr
    assert "c0ffee" not in done.stderr and not any("other.invalid" in line for line in user.asked)


def test_hosts_that_the_user_excludes_are_asked_without_the_proxy(user, store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert ckptools.open(URL).model and not user.asked


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, "the proxy 127.0.0.1 cannot be reached"),
        ({"HTTP_PROXY": "http://me:guess@PROXY"}, "the proxy 127.0.0.1 lets nothing through: 407"),
        ({"HTTP_PROXY": "", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "127.0.0.1:9: it refuses the connection"),
    ],
)
def test_what_stands_between_us_and_a_bucket_is_named(environment, reason, user, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("PROXY", user.address))
    done = CliRunner().invoke(app, ["inspect", URL])
    assert done.exit_code == 3 and done.stderr.count("\n") == 1 and reason in done.stderr


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""

    def serve() -> None:
        client, _ = server.accept()
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=serve, daemon=True).start()
        yield server.getsockname()


def tunnel(proxy: LocalProxy, host: str, password: str) -> socket.socket:
    """A connection to a host through the local proxy."""
    connection = HTTPConnection("127.0.0.1", urlsplit(proxy.url).port, timeout=20)
    connection.set_tunnel(host, 443, {"Proxy-Authorization": f"Basic {b64encode(password.encode()).decode()}"})
    connection.connect()
    return connection.sock


def own_password(proxy: LocalProxy) -> str:
    return urlsplit(proxy.url).netloc.rpartition("@")[0]


def echoed(through: socket.socket) -> bytes:
    """What comes back of `DATA`."""
    Thread(target=through.sendall, args=(DATA,), daemon=True).start()
    with through, through.makefile("rb") as file:
        return file.read(len(DATA))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_goes_through_a_tunnel_comes_out_the_same(scheme, echo, tmp_path, monkeypatch):
    tls = trusted(tmp_path, monkeypatch) if scheme == "https" else None
    with user_proxy(echo, tls) as user:
        proxy = LocalProxy({"host": urlsplit(f"{scheme}://{PASSWORD}@{user.address}")})
        assert echoed(tunnel(proxy, "host", own_password(proxy))) == DATA
    assert user.asked == ["CONNECT host:443 HTTP/1.0"] or user.asked == ["CONNECT host:443 HTTP/1.1"]


@pytest.mark.parametrize("host", ["host.evil.org", "evil.host", "127.0.0.1"])
def test_no_tunnel_leads_to_another_host(host):
    proxy = LocalProxy({"host": urlsplit("http://127.0.0.1:9")})
    with pytest.raises(OSError, match="421 Misdirected Request"):
        tunnel(proxy, host, own_password(proxy))
    assert proxy.refused == urlsplit(f"https://{host}")


def test_nobody_else_on_this_machine_uses_the_users_password(echo):
    with user_proxy(echo) as user:
        proxy = LocalProxy({"host": urlsplit(f"http://{PASSWORD}@{user.address}")})
        with pytest.raises(OSError, match="407 Proxy Authentication Required"):
            tunnel(proxy, "host", "ckptools:guess")
    assert not user.asked


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"x" * 200_000])
def test_what_is_no_request_ends_its_connection_alone(sent):
    proxy = LocalProxy({})
    address = "127.0.0.1", urlsplit(proxy.url).port or 0
    with suppress(OSError), socket.create_connection(address, timeout=20) as client:  # it may hang up before the end
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="421"):
        tunnel(proxy, "host", "")
