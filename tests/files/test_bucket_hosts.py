"""Servers that give credentials for a bucket are asked for them, and nothing else of it leads to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ckptools.files.bucket import Bucket
from ckptools.files.bucket_hosts import only_named_hosts
from ckptools.files.remote_store import RemoteError
from tests.files.nasty_server import nasty_server
from tests.object_store import BUCKET, Bucketful

SECRET = "sv=2026&sig=c0ffee"
KEYS = {"AccessKeyId": "role", "SecretAccessKey": "secret", "Token": "c0ffee", "Expiration": "2099-01-01T00:00:00Z"}


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
    assert Bucket(f"s3://{BUCKET}").status("role/file").size == 5 and asked


def hosts(scheme: str = "s3", asks_role: bool = False) -> list[str]:
    """Those that are asked straight away."""
    return only_named_hosts(f"{scheme}://{BUCKET}", asks_role)[1]["proxy_excludes"].split(",")


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({}, "s3.us-east-1.amazonaws.com"),
        ({"AWS_REGION": "eu-west-1"}, "s3.eu-west-1.amazonaws.com"),
        (
            {"AWS_REGION": "eu-west-1", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            f"{BUCKET}.s3.eu-west-1.amazonaws.com",
        ),
        ({"AWS_ENDPOINT_URL": "https://Store.Example:9000/below"}, "store.example"),
        ({"AWS_ENDPOINT_URL": "http://[::1]:9000", "AWS_SKIP_SIGNATURE": "true"}, "::1"),
    ],
)
def test_of_a_bucket_whose_keys_are_told_its_own_host_alone_is_asked(environment, host, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hosts() == [host]


def test_a_role_is_asked_for_where_the_environment_says(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "https://sts.corp.example")
    assert "sts.corp.example" in hosts("s3", True)


def test_a_role_is_asked_for_of_its_region_and_of_the_machine(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path))
    assert hosts("s3", True) == ["s3.eu-west-1.amazonaws.com", "sts.eu-west-1.amazonaws.com", "169.254.169.254"]


@pytest.mark.parametrize(
    ("scheme", "environment", "host"),
    [
        ("gs", {}, "storage.googleapis.com"),
        ("gs", {"GOOGLE_BASE_URL": "https://store.example"}, "store.example"),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "account"}, "account.blob.core.windows.net"),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ENDPOINT": "http://10.0.0.5:1"}, "10.0.0.5"),
    ],
)
def test_of_other_clouds_their_own_hosts_are_asked(scheme, environment, host, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hosts(scheme) == [host]
    assert hosts(scheme, True)[:2] == [host, "169.254.169.254"]


@pytest.mark.parametrize(
    ("scheme", "environment"),
    [
        ("gs", {"GOOGLE_BASE_URL": "SERVER", "GOOGLE_SKIP_SIGNATURE": "true"}),
        (
            "az",
            {"AZURE_STORAGE_ENDPOINT": "SERVER", "AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_KEY": SECRET},
        ),
    ],
)
def test_redirects_of_other_clouds_are_refused(scheme, environment, monkeypatch):
    with nasty_server() as server:
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("SERVER", f"http://127.0.0.1:{server.port}"))
        server.always, server.location = "redirects", f"http://127.0.0.2:9/?{SECRET}"
        with pytest.raises(RemoteError, match=r"redirects to another host, 127\.0\.0\.2:9; ") as error:
            Bucket(f"{scheme}://{BUCKET}")._fetch("key", "", 5, 9)
    assert server.asked[0][0].startswith(f"/{BUCKET}/key") and "c0ffee" not in str(error.value)
