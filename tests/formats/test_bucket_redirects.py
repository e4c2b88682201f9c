"""A store that redirects: that is followed, or one line says why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

import ckptools
from ckptools.cli import app
from ckptools.files.remote import path as remote_path
from ckptools.files.remote import store
from tests.files.certificates import trusted
from tests.object_store import BUCKET, Bucketful
from tests.truth import FIXTURES
from tests.unreliable_store import SEEN, Proxy, proxy_of

NAME = "torch2.13.0-fsdp1-sharded-w4"
KEY = f"{NAME}/rank0.pt"
URL = f"s3://{BUCKET}/{KEY}"
SIGNED = f"{{target}}{SEEN}&X-Amz-Signature=c0ffee"
"""Where a redirect leads to: the same path, with what nobody else may see."""

STATUSES = (301, 302, 303, 307, 308)


@pytest.fixture
def proxy(bucket: Bucketful, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    bucket.put(FIXTURES / NAME)
    monkeypatch.setattr(remote_path, "_stores", {})
    monkeypatch.setattr(store, "BUCKET_RETRIES", 1)
    with proxy_of(bucket.address) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.address)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c0ffee")
        yield found


@pytest.fixture
def elsewhere(bucket: Bucketful) -> Iterator[Proxy]:
    """Another host, which would give the same objects."""
    with proxy_of(bucket.address, "127.0.0.2") as found:
        yield found


def run(*words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--debug"])


def test_credentials_do_not_follow_a_redirect_to_another_host(proxy, elsewhere):
    proxy.redirects = {"range": (307, f"{elsewhere.address}{SIGNED}")}
    done = run("inspect", URL)
    assert done.exit_code == 3 and "access denied by the store (403 Forbidden)" in done.stderr
    assert elsewhere.requests and "c0ffee" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("status", STATUSES)
def test_a_redirect_within_the_host_is_followed(status, proxy):
    here = ckptools.open(FIXTURES / KEY).model
    proxy.redirects = {"list": (status, SIGNED), "range": (status, SIGNED)}
    there = ckptools.open(URL).model
    key = next(iter(here))
    assert there[key].numpy().tobytes() == here[key].numpy().tobytes()


@pytest.mark.parametrize("kind", ["range", "list"])
def test_a_redirect_without_a_place_is_told(kind, proxy):
    proxy.redirects = {kind: (301, "")}
    done = run("inspect", URL)
    assert done.exit_code == 3 and done.stderr.endswith(
        "it redirects without saying where to; is AWS_REGION the bucket's?\n"
    )


def test_redirects_in_a_circle_are_told(proxy):
    proxy.redirects = {"range": (307, "{target}")}
    done = run("inspect", URL)
    assert done.exit_code == 3 and done.stderr.endswith(": it redirects more than 10 times\n")


def test_by_tls_a_bucket_is_read(bucket, tmp_path, monkeypatch):
    bucket.put(FIXTURES / NAME)
    monkeypatch.setattr(remote_path, "_stores", {})
    with proxy_of(bucket.address, tls=trusted(tmp_path, monkeypatch)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        assert run("inspect", URL).exit_code == 0


def test_a_password_of_the_endpoint_is_not_shown(proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:c0ffee@127.0.0.1:9")
    done = run("inspect", URL)
    assert done.exit_code == 3 and "it refuses the connection" in done.stderr and "c0ffee" not in done.stderr
