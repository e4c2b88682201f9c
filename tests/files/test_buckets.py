"""What the environment says of buckets: credentials, and the user's own proxy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.files.opening import location
from ckptools.files.remote import path as remote_path
from ckptools.files.remote.store import PART
from ckptools.tensor_io.fetch_ahead import in_threads
from tests.files.user_proxy import PASSWORD, UserProxy, user_proxy
from tests.object_store import BUCKET, Bucketful
from tests.truth import FIXTURES
from tests.unreliable_store import Proxy, proxy_of

KEYS = {"AccessKeyId": "role", "SecretAccessKey": "secret", "Token": "c0ffee", "Expiration": "2099-01-01T00:00:00Z"}
NAME = "torch2.13.0-fsdp1-sharded-w4"
URL = f"s3://{BUCKET}/{NAME}/rank0.pt"
STORE = "http://store.invalid:9000"
"""An endpoint that only the user's proxy finds."""

DATA = bytes(range(251)) * 8_000


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(remote_path, "_stores", {})
    monkeypatch.setattr("ckptools.files.remote.store.BUCKET_RETRIES", 1)


@pytest.fixture
def role() -> Iterator[tuple[str, list[str]]]:
    """A server that gives the credentials of a role in each of the ways that there are, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            asked.append(self.path)
            body = "name" if self.path.endswith(("token", "security-credentials/")) else json.dumps(KEYS)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = _do  # noqa: N815 - names that the base class looks for

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.3", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.3:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    "environment",
    [
        {"AWS_METADATA_ENDPOINT": "SERVER"},
        {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "SERVER/role", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "TOKEN"},
    ],
    ids=["machine", "container"],
)
def test_credentials_of_a_role_come_from_its_server(environment, role, bucket: Bucketful, tmp_path, monkeypatch):
    address, asked = role
    (tmp_path / "token").write_text("token")
    bucket.put_bytes("role/file", b"bytes")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("SERVER", address).replace("TOKEN", str(tmp_path / "token")))
    assert location(f"s3://{BUCKET}/role/file").stat().st_size == 5 and asked


@pytest.fixture
def store(bucket: Bucketful) -> Iterator[Proxy]:
    bucket.put(FIXTURES / NAME)
    with proxy_of(bucket.address) as found:
        yield found


@pytest.fixture
def user(store: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserProxy]:
    """The user's proxy, in whose environment the next commands run."""
    parts = urlsplit(store.address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", STORE)
    with user_proxy((parts.hostname or "", parts.port or 0)) as found:
        monkeypatch.setenv("HTTP_PROXY", f"http://{PASSWORD}@{found.address}")
        yield found


@pytest.mark.slow
def test_a_bucket_is_read_through_the_users_proxy(user):
    here, there = ckptools.open(FIXTURES / NAME / "rank0.pt").model, ckptools.open(URL).model
    key = next(iter(here))
    assert there[key].numpy().tobytes() == here[key].numpy().tobytes()
    assert user.asked and all(f" {STORE}/" in line for line in user.asked)


def test_large_files_go_through_the_users_proxy_both_ways(user):
    store, size = location(f"s3://{BUCKET}/x").store, 2 * PART
    store.upload("proxied", size, iter([DATA[:size]] * (size // len(DATA)) + [DATA[: size % len(DATA)]]))
    assert store._fetch("proxied", "", 0, size) == (DATA * (size // len(DATA) + 1))[:size]


def test_hosts_that_the_user_excludes_are_asked_without_the_proxy(user, store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert ckptools.open(URL).model and not user.asked


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, "it refuses the connection"),
        ({"HTTP_PROXY": "http://me:guess@PROXY"}, "the proxy wants another name and password (407)"),
        ({"HTTP_PROXY": "", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "127.0.0.1:9: it refuses the connection"),
    ],
)
def test_what_stands_between_us_and_a_bucket_is_named(environment, reason, user, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("PROXY", user.address))
    done = CliRunner().invoke(app, ["inspect", URL])
    assert done.exit_code == 3 and done.stderr.count("\n") == 1 and reason in done.stderr


def test_connections_that_the_store_has_closed_meanwhile_are_no_failures(bucket, monkeypatch):
    monkeypatch.setattr("ckptools.files.remote.store.BUCKET_RETRIES", 0)
    bucket.put_bytes("idle/file", DATA[:100_000])
    with proxy_of(bucket.address, idle=0.1) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        path = location(f"s3://{BUCKET}/idle/file")
        in_threads(lambda at: path.store._fetch(path.key, "", at, at + 10), range(0, 80_000, 10_000), 8)
        time.sleep(0.5)
        in_threads(lambda at: path.store._fetch(path.key, "", at, at + 10), range(0, 80_000, 10_000), 8)
        assert proxy.requests == 16
