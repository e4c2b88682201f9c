"""Files of web servers that misbehave: the right bytes, or one line that says why not."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.errors import ReadError
from ckptools.files import retries, web
from ckptools.files.location import is_there, location
from ckptools.files.opening import File
from tests.files.nasty_server import DATA, NastyServer, nasty_server

SECRET = "X-Amz-Signature=c0ffee"


SLOW = ("sleeps", "drips")
"""Faults that are told by the time they take."""


@pytest.fixture
def server(monkeypatch, request) -> Iterator[NastyServer]:
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("CKPTOOLS_TIMEOUT", "0.5" if any(fault in request.node.name for fault in SLOW) else "20")
    with nasty_server() as told:
        yield told


def read(url: str, offset: int = 20_000, length: int = 30_000) -> bytes:
    with File(location(url)) as file:
        return file.read(offset, length)


def refused(url: str) -> str:
    """The one line in place of its bytes, which must name the file and no secret."""
    with pytest.raises(ReadError) as error:
        read(url)
    text = str(error.value)
    assert text.startswith(url.partition("?")[0]) and "\n" not in text and "c0ffee" not in text
    return text


PASSING = ["500", "503", "408", "later", "hangs_up", "sleeps", "breaks_off", "drips", "no_http"]


@pytest.mark.parametrize("fault", [*PASSING, "fewer", "knows_no_ranges"])
@pytest.mark.parametrize("before", [0, 1])
def test_what_passes_is_tried_again_and_gives_the_files_bytes(server, fault, before):
    server.faults = ["good"] * before + [fault] * 2
    assert read(server.url) == DATA[20_000:50_000]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "answers 500 Internal Server Error, 6 times; try again later"),
        ("hangs_up", "broke off the connection, 6 times"),
        ("sleeps", "does not answer within 0.5 seconds, 6 times"),
        ("drips", "the rest does not come in time, 6 times"),
        ("no_http", "does not speak HTTP, 6 times"),
        ("400", "answers 400 Bad Request"),
        ("401", "access denied by the server (401 Unauthorized)"),
        ("403", "access denied by the server (403 Forbidden); is the URL whole, and not expired?"),
        ("404", "no such file or folder"),
        ("416", "answers 416"),
        ("announces_terabytes", "knows no ranges and sends whole files only; copy it to this machine first"),
        ("whole_without_length", "does not tell how long its answer is, 6 times"),
        ("other_range", "answers with bytes 1 to 4095; expected 0 to 4095"),
        ("announces_more", "announces 4096 bytes and sends 4095"),
        ("no_content_range", "answers with a part of the file and does not say which"),
        ("untold_size", "does not tell how large it is"),
        ("compressed", "sends it compressed"),
        ("much_later", "429 Too Many Requests and asks to wait 86400 seconds"),
    ],
)
def test_what_stays_wrong_is_told_in_one_line(server, fault, reason):
    server.always = fault
    assert reason in refused(f"{server.url}?{SECRET}")


@pytest.mark.parametrize("fault", ["other_range", "announces_more", "other_size", "404", "412", "416", "redirects"])
def test_an_answer_that_is_wrong_once_the_file_is_open_is_no_data(server, fault):
    server.faults, server.location = ["good", fault], "http://127.0.0.2:9/elsewhere"
    refused(server.url)


@pytest.mark.parametrize("behaviour", ["good", "ignores_if_match", "knows_no_ranges"])
def test_a_file_that_is_replaced_while_it_is_read_is_no_mixture(server, behaviour):
    server.always = behaviour
    with File(location(server.url)) as file:
        file.read(0, 10)
        server.data, server.etag = DATA[::-1], '"two"'
        with pytest.raises(ReadError, match="was replaced by another version"):
            file.read(50_000, 30_000)


@pytest.mark.parametrize("behaviour", ["good", "knows_no_ranges"])
def test_a_file_without_a_version_that_becomes_longer_is_no_mixture(server, behaviour):
    server.always, server.etag = behaviour, ""
    with File(location(server.url)) as file:
        server.data = DATA[::-1] + b"more"
        with pytest.raises(ReadError, match="was replaced by another version"):
            file.read(50_000, 30_000)


def test_a_redirect_to_less_tls_is_told_as_that():
    parts = [web.urlsplit(url) for url in ("https://host/a", "http://host/b?c0ffee")]
    with pytest.raises(web.RemoteError, match="redirects to http://host, without TLS; that is not followed"):
        web.Web("https://host", {})._check_redirect(*parts)


def test_the_version_is_asked_for_and_bytes_as_they_are_stored(server):
    read(server.url)
    assert [asked["if-match"] for _, _, asked in server.asked[1:]] == ['"one"']
    assert {asked["accept-encoding"] for _, _, asked in server.asked} == {"identity"}


def test_a_file_is_opened_by_a_request_for_its_first_bytes(server):
    with File(location(server.url)) as file:
        assert file.size == len(DATA) and file.read(0, 4096) == DATA[:4096]
    assert [asked for _, asked, _ in server.asked] == ["bytes=0-4095"]


def test_an_empty_file_is_empty(server):
    server.data = b""
    with File(location(server.url)) as file:
        assert file.size == 0


def test_a_query_is_sent_with_each_request_and_shown_nowhere(server):
    path = location(f"{server.url}?{SECRET}")
    assert str(path) == repr(path)[len("RemotePath('") : -2] == server.url
    assert read(f"{server.url}?{SECRET}") == DATA[20_000:50_000]
    assert {path for path, _, _ in server.asked} == {f"/run7/rank0.pt?{SECRET}"}


def test_files_that_differ_in_their_query_alone_are_not_taken_for_one(server):
    urls = [f"{server.url}?id=1", f"{server.url}?id=2", server.url]
    paths = [location(url) for url in urls]
    assert len(set(paths)) == 3 and len({str(path) for path in paths}) == 3
    for path in paths:
        with File(path) as file:
            file.read(50_000, 5)
    assert {path for path, _, _ in server.asked} == {"/run7/rank0.pt?id=1", "/run7/rank0.pt?id=2", "/run7/rank0.pt"}


def test_a_file_beside_it_is_asked_for_without_the_query(server):
    assert is_there(location(f"{server.url}?{SECRET}").with_name("rank 1.pt"))
    assert server.asked[-1][0] == "/run7/rank%201.pt"


def test_a_redirect_within_the_server_is_followed(server):
    server.faults, server.location = ["redirects"], "/moved?token=1"
    assert read(server.url) == DATA[20_000:50_000]
    assert server.asked[1][0] == "/moved?token=1"


def test_redirects_in_a_circle_end(server):
    server.always, server.location = "redirects", "/again"
    assert "redirects more than 5 times" in refused(server.url)


@pytest.mark.parametrize("place", ["http://127.0.0.2:9", "https://example.org", "//localhost:9"])
def test_a_redirect_to_another_server_is_refused_and_named(server, place):
    server.always, server.location = "redirects", f"{place}/rank0.pt?{SECRET}"
    assert f"redirects to another, {place.partition('//')[2]}; that is not followed" in refused(server.url)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("origin", "target", "followed"),
    [
        ("http://host/a", "https://host/b", True),
        ("https://host/a", "https://HOST:443/b", True),
        ("https://host/a", "http://host/b", False),
        ("https://host/a", "https://host:8443/b", False),
        ("http://host:8000/a", "https://host/b", False),
        ("https://host/a", "https://host.evil.org/b", False),
        ("https://host/a", "ftp://host/b", False),
    ],
)
def test_redirects_lead_to_the_same_host_and_port_or_to_tls(origin, target, followed):
    parts = [web.urlsplit(url) for url in (origin, target)]
    try:
        web.Web("https://host", {})._check_redirect(*parts)
    except web.RemoteError:
        assert not followed
    else:
        assert followed


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://somebody:c0ffee@host/rank0.pt", "https://host/rank0.pt: a URL with a user's name or password"),
        ("https:///rank0.pt", "a name between two slashes is empty"),
        ("http://127.0.0.1:nowhere/rank0.pt?c0ffee", "127.0.0.1:nowhere is no host and port"),
        ("ftp://host/rank0.pt", "ftp:// is not read"),
    ],
)
def test_a_url_that_names_no_file_is_told_in_one_line(url, reason):
    with pytest.raises(ReadError) as error:
        read(url)
    assert reason in str(error.value) and "c0ffee" not in str(error.value)


def test_a_server_that_speaks_no_tls_is_told_in_one_line(server):
    assert "SSLError" in refused(server.url.replace("http", "https"))


def test_certificates_are_checked():
    connection = web._connections._connection(web.urlsplit("https://host/"), None)
    assert connection._context.verify_mode is ssl.CERT_REQUIRED and connection._context.check_hostname


@pytest.fixture(scope="module")
def steady() -> Iterator[NastyServer]:
    with nasty_server() as told:
        yield told


parts = st.lists(st.sampled_from(["fewer", "good", "knows_no_ranges"]), max_size=9)


@settings(deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 50_000), parts)
def test_any_range_is_the_files_however_it_comes_in_parts(steady, offset, length, faults):
    length, steady.faults = min(length, len(DATA) - offset), faults
    assert read(steady.url, offset, length) == DATA[offset : offset + length]
