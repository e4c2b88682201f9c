"""Files of a web server that only the user's proxy reaches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptools.errors import ReadError
from ckptools.files.opening import File, location
from ckptools.files.remote import store
from tests.files.certificates import NAME, trusted
from tests.files.nasty_server import DATA, nasty_server
from tests.files.user_proxy import PASSWORD, UserProxy, user_proxy

SCHEMES = ("http", "https")


@contextmanager
def far(scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, UserProxy]]:
    """The URL of a file, and the proxy that leads there, which the environment names."""
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    tls = trusted(folder, monkeypatch) if scheme == "https" else None
    with nasty_server(tls) as server, user_proxy(("127.0.0.1", server.port)) as proxy:
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://{PASSWORD}@{proxy.address}")
        yield f"{scheme}://{NAME}:{server.port}/run7/rank0.pt?X-Amz-Signature=c0ffee", proxy


def read(url: str) -> bytes:
    with File(location(url)) as file:
        return file.read(20_000, 30_000)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_is_read_through_the_users_proxy(scheme, tmp_path, monkeypatch):
    with far(scheme, tmp_path, monkeypatch) as (url, proxy):
        assert read(url) == DATA[20_000:50_000]
        verb = f"CONNECT {NAME}:" if scheme == "https" else f"GET http://{NAME}:"
        assert proxy.asked and all(line.startswith(verb) for line in proxy.asked)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_proxy_that_wants_a_password_is_told_in_one_line(scheme, tmp_path, monkeypatch):
    with far(scheme, tmp_path, monkeypatch) as (url, proxy):
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://me:c0ffee-guess@{proxy.address}")
        with pytest.raises(ReadError, match="407") as error:
            read(url)
    assert "\n" not in str(error.value) and "c0ffee" not in str(error.value) and not proxy.asked


@pytest.mark.parametrize(
    ("proxy", "reason"),
    [
        ("http://127.0.0.1:9", "the proxy does not answer"),
        ("http://proxy.invalid:9", "the proxy does not answer|there is no such host"),
    ],
)
def test_a_proxy_that_does_not_answer_is_told(proxy, reason, tmp_path, monkeypatch):
    with far("https", tmp_path, monkeypatch) as (url, _):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        with pytest.raises(ReadError, match=reason):
            read(url)


def test_hosts_that_the_user_excludes_are_asked_without_the_proxy(tmp_path, monkeypatch):
    with far("http", tmp_path, monkeypatch) as (url, proxy):
        read(url)
        monkeypatch.setenv("NO_PROXY", NAME)
        with pytest.raises(ReadError, match="there is no such host"):
            read(url.replace("rank0", "rank1"))
    assert proxy.asked
