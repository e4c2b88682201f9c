"""Files of web servers that misbehave: the right bytes, or one line that says why not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.errors import ReadError
from ckptools.files.opening import File, is_there, location
from ckptools.files.remote import store, web
from tests.files.certificates import trusted
from tests.files.nasty_server import DATA, NastyServer, nasty_server

SECRET = "X-Amz-Signature=c0ffee"


SLOW = ("sleeps", "drips")
"""Faults that are told by the time they take."""


@pytest.fixture
def server(monkeypatch, request) -> Iterator[NastyServer]:
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*PASSING, "fewer", "knows_no_ranges"])
@pytest.mark.parametrize("before", [0, 1])
def test_what_passes_is_tried_again_and_gives_the_files_bytes(server, fault, before):
    server.faults = ["good"] * before + [fault] * 2
    assert read(server.url) == DATA[20_000:50_000]


def test_tries_are_not_counted_while_each_brings_bytes(server, monkeypatch):
    monkeypatch.setattr(web, "PROGRESS", 1)
    server.faults = ["good"] + ["breaks_off"] * 2 * store.RETRIES
    assert read(server.url) == DATA[20_000:50_000]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "answers 500 Internal Server Error, 6 times; try again later"),
        ("hangs_up", "broke off the connection, 6 times"),
        ("sleeps", "does not answer within 0.5 seconds, 6 times"),
        ("drips", "does not answer within 0.5 seconds, 6 times"),
        ("no_http", "does not speak HTTP, 6 times"),
        ("400", "answers 400 Bad Request"),
        ("401", "access denied by the server (401 Unauthorized)"),
        ("403", "access denied by the server (403 Forbidden); is the URL whole, and not expired?"),
        ("404", "no such file or folder"),
        ("416", "answers 416"),
        ("announces_terabytes", "knows no ranges and sends whole files only; copy it to this machine first"),
        ("whole_without_length", "does not tell how long its answer is"),
        ("other_range", "answers with 4095 bytes as bytes 1-4095/100400; bytes 0-4095 were asked for"),
        ("announces_more", "answers with 4095 bytes as bytes 0-4095/100400; bytes 0-4095 were asked for"),
        ("no_content_range", "answers with 4096 bytes as no range; bytes 0-4095 were asked for"),
        ("untold_size", "does not tell how large it is"),
        ("compressed", "sends it compressed"),
        ("much_later", "429 Too Many Requests, 6 times; try again later"),
    ],
)
def test_what_stays_wrong_is_told_in_one_line(server, fault, reason):
    server.always = fault
    assert reason in refused(f"{server.url}?{SECRET}")


@pytest.mark.parametrize("fault", ["other_range", "announces_more", "other_size", "404", "412", "416"])
def test_an_answer_that_is_wrong_once_the_file_is_open_is_no_data(server, fault):
    server.faults = ["good", fault]
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


def test_a_redirect_to_less_tls_is_told_as_that(server, tmp_path, monkeypatch):
    with nasty_server(trusted(tmp_path, monkeypatch)) as secure:
        secure.always, secure.location = "redirects", server.url
        assert "redirects to http://127.0.0.1, without TLS; that is not followed" in refused(url_by_tls(secure))


def url_by_tls(server: NastyServer) -> str:
    return server.url.replace("http:", "https:")


def test_the_version_is_asked_for_and_bytes_as_they_are_stored(server):
    read(server.url)
    assert [asked["if-match"] for _, _, asked in server.asked[1:]] == ['"one"']
    assert {asked["accept-encoding"] for _, _, asked in server.asked} == {"identity"}


def test_a_file_is_opened_by_a_request_for_its_first_bytes(server):
    with File(location(server.url)) as file:
        assert file.size == len(DATA) and file.read(0, 4096) == DATA[:4096]
    assert [asked for _, asked, _ in server.asked] == ["bytes=0-4095"]


def test_nothing_is_written_to_a_web_server(server):
    with pytest.raises(OSError, match="is in a store that is only read"):
        location(server.url).store.upload("x", 3, iter([b"abc"]))
    assert not server.asked


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


def test_a_redirect_to_another_server_is_followed(server):
    with nasty_server() as other:
        server.always, server.location = "redirects", f"{other.url}?{SECRET}"
        assert read(server.url) == DATA[20_000:50_000]
        assert {path for path, _, _ in other.asked} == {f"/run7/rank0.pt?{SECRET}"}


def test_connections_that_the_server_has_closed_meanwhile_are_no_failures(monkeypatch):
    monkeypatch.setattr(store, "RETRIES", 0)
    with nasty_server(idle=0.1) as server, File(location(server.url)) as file:
        places = range(0, 80_000, 10_000)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda at: file.prefetch([(at, at + 10)], 5_000), places))
        time.sleep(0.5)
        assert file.read(20_000, 50_000) == DATA[20_000:70_000]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://somebody:c0ffee@host/rank0.pt", "https://host/rank0.pt: a URL with a user's name or password"),
        ("https:///rank0.pt", "a name before or between two slashes is empty"),
        ("http://127.0.0.1:nowhere/rank0.pt?c0ffee", "is no URL: its host and port are none"),
        ("s4://host/rank0.pt", "is not read"),
    ],
)
def test_a_url_that_names_no_file_is_told_in_one_line(url, reason):
    with pytest.raises(ReadError) as error:
        read(url)
    assert reason in str(error.value) and "c0ffee" not in str(error.value)


def test_a_server_that_speaks_no_tls_is_told_in_one_line(server):
    assert "does not speak TLS" in refused(url_by_tls(server))


def test_certificates_are_checked(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        tls = trusted(tmp_path, patch)
    with nasty_server(tls) as server:
        assert "its certificate is not trusted" in refused(url_by_tls(server))


@pytest.fixture(scope="module")
def steady() -> Iterator[NastyServer]:
    with nasty_server() as told:
        yield told


parts = st.lists(st.sampled_from(["fewer", "good", "knows_no_ranges"]), max_size=9)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 50_000), parts)
def test_any_range_is_the_files_however_it_comes_in_parts(steady, offset, length, faults):
    length, steady.faults = min(length, len(DATA) - offset), faults
    assert read(steady.url, offset, length) == DATA[offset : offset + length]
