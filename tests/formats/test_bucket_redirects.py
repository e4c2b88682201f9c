"""A store that redirects: to its own host that is followed, to any other one line says where it would have led."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

import ckptools
from ckptools.cli import app
from ckptools.files import bucket as buckets
from ckptools.files import remote_path
from ckptools.files.remote_store import RemoteError
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
    monkeypatch.setattr(buckets, "RETRIES", 1)
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


def assert_refused(done: Result, url: str, elsewhere: Proxy) -> None:
    host = elsewhere.address.removeprefix("http://")
    assert done.exit_code == 3 and not elsewhere.requests and not done.stdout
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {url}: ")
    assert f"the store redirects to another host, {host}; that is not followed" in done.stderr
    assert "c0ffee" not in done.stderr


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("kind", ["range", "list"])
def test_a_redirect_to_another_host_is_refused_and_named(kind, status, proxy, elsewhere):
    proxy.redirects = {kind: (status, f"{elsewhere.address}{SIGNED}")}
    assert_refused(run("inspect", URL), URL, elsewhere)


def test_a_redirect_to_another_host_by_tls_is_refused_and_named(proxy, elsewhere):
    proxy.redirects = {"range": (307, f"{elsewhere.address}{SIGNED}".replace("http:", "https:"))}
    assert_refused(run("inspect", URL), URL, elsewhere)


def test_a_redirect_of_a_question_about_one_file_is_refused(proxy, elsewhere):
    proxy.redirects = {"head": (307, f"{elsewhere.address}{SIGNED}")}
    with pytest.raises(RemoteError, match=r"redirects to another host, 127\.0\.0\.2"):
        buckets.Bucket(f"s3://{BUCKET}")._look(KEY)
    assert not elsewhere.requests


@pytest.mark.parametrize("status", STATUSES)
def test_nothing_is_written_to_where_a_redirect_leads(status, proxy, elsewhere, tmp_path):
    proxy.redirects = {"write": (status, f"{elsewhere.address}{SIGNED}")}
    out = f"s3://{BUCKET}/redirected.safetensors"
    assert_refused(run("consolidate", URL.replace("rank0.pt", ""), "-o", out), out, elsewhere)


def test_a_small_file_is_not_written_to_where_a_redirect_leads(proxy, elsewhere):
    proxy.redirects = {"write": (307, f"{elsewhere.address}{SIGNED}")}
    with pytest.raises(RemoteError, match="307 Temporary Redirect"):
        buckets.Bucket(f"s3://{BUCKET}").put("small", b"bytes", replace=True)
    assert not elsewhere.requests


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
        "the store redirects without saying where to; is AWS_REGION the bucket's?\n"
    )


def test_redirects_in_a_circle_are_told(proxy):
    proxy.redirects = {"range": (307, "{target}")}
    done = run("inspect", URL)
    assert done.exit_code == 3 and done.stderr.endswith(": the store redirects more than 10 times\n")


def test_by_tls_a_bucket_is_read_and_a_redirect_to_what_has_none_refused(bucket, tmp_path, monkeypatch):
    bucket.put(FIXTURES / NAME)
    monkeypatch.setattr(remote_path, "_stores", {})
    with proxy_of(bucket.address, tls=trusted(tmp_path, monkeypatch)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        assert run("inspect", URL).exit_code == 0
        proxy.redirects = {"range": (307, f"{proxy.address}{SIGNED}".replace("https:", "http:"))}
        done = run("inspect", URL)
    assert done.exit_code == 3 and "the store redirects to a place without TLS; that is not followed" in done.stderr
    assert "c0ffee" not in done.stderr


def test_an_endpoint_with_a_password_is_not_read_and_not_shown(proxy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address.replace("//", "//me:c0ffee@"))
    done = run("inspect", URL)
    assert done.exit_code == 3 and "the endpoint is a URL with a user's name or password" in done.stderr
    assert "c0ffee" not in done.stderr
