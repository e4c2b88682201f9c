"""Checkpoints on the Hub, by a server that does as the Hub does: pages, commits, and redirects to its storage."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import ckptools
from ckptools.errors import ReadError
from ckptools.files import hub as hub_files
from ckptools.files.location import location
from tests.files.range_server import RangeHandler, range_server, serving
from tests.truth import FIXTURES

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "hf-llama-safetensors-bf16"


class Hub:
    """What the server does, and what it and its storage were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stored: list[str] = []
        self.tokens: set[str | None] = set()
        self.endpoint = self.storage = ""


class HubHandler(RangeHandler):
    """The Hub of one repository, `org/name`, whose branch `main` and pull request `refs/pr/1` are one commit."""

    def __init__(self, hub: Hub, *rest: Any) -> None:
        self.hub = hub
        super().__init__(FIXTURES, hub.asked, *rest)

    def reply(self) -> None:
        self.hub.tokens.add(self.headers["Authorization"])
        url = urlsplit(self.path)
        api, files = "/api/models/org/name", f"/org/name/resolve/{COMMIT}/"
        if url.path in (f"{api}/revision/main", f"{api}/revision/refs%2Fpr%2F1"):
            self.answer(200, json.dumps({"sha": COMMIT}).encode())
        elif url.path.startswith(f"{api}/tree/{COMMIT}"):
            self._list(
                url.path.removeprefix(f"{api}/tree/{COMMIT}").strip("/"), int(parse_qs(url.query).get("p", "0")[0])
            )
        elif url.path.startswith(files):
            signed = f"{url.path.removeprefix(files)}?Signature=c0ffee{len(self.hub.asked)}"
            self.answer(302, b"", {"Location": f"{self.hub.storage}/{signed}"})
        else:
            self.answer(401 if "/private" in url.path else 404, b"{}")

    def _list(self, folder: str, page: int) -> None:
        found = sorted((FIXTURES / folder).iterdir()) if (FIXTURES / folder).is_dir() else []
        told = [self._entry(path) for path in found[3 * page : 3 * page + 3]]
        more = f'<{self.hub.endpoint}{self.path.partition("?")[0]}?p={page + 1}>; rel="next"'
        self.answer(200 if found else 404, json.dumps(told).encode(), {"Link": more} if found[3 * page + 3 :] else {})

    def _entry(self, path: Path) -> dict[str, object]:
        kind = "directory" if path.is_dir() else "file"
        return {"path": str(path.relative_to(FIXTURES)), "type": kind, "oid": "a" * 40, "size": path.stat().st_size}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    made = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with range_server(FIXTURES, made.stored) as made.storage, serving(partial(HubHandler, made)) as made.endpoint:
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        yield made


@pytest.mark.parametrize("name", ["org/name", "org/name@main", "org/name@refs/pr/1", "org/name@refs%2Fpr%2F1"])
@pytest.mark.parametrize("path", ["", "/model.safetensors.index.json"])
def test_a_model_of_a_repository_is_opened_as_on_disk(hub, name, path):
    there = ckptools.open(f"hf://{name}/{MODEL}/ckpt{path}")
    here = ckptools.open(FIXTURES / MODEL / f"ckpt{path}")
    assert there.format == here.format and there.whole is True and list(there.model) == list(here.model)
    key = next(iter(here.model))
    assert there.model[key].numpy().tobytes() == here.model[key].numpy().tobytes()


def test_a_list_of_several_pages_is_read_to_its_end(hub):
    folder = location("hf://org/name/torch2.13.0-fsdp1-sharded-w4")
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        p.name for p in (FIXTURES / "torch2.13.0-fsdp1-sharded-w4").iterdir()
    )


def test_a_revision_is_resolved_to_its_commit_once(hub):
    _ = ckptools.open(f"hf://org/name/{MODEL}/ckpt").model["lm_head.weight"].numpy()
    asked = [path for path in hub.asked if "/revision/" in path]
    assert len(asked) <= 2 and all(COMMIT in path for path in hub.asked if path not in asked)


def test_the_hub_gets_the_token_and_its_storage_does_not(hub, monkeypatch):
    seen: list[str | None] = []
    good = RangeHandler.send_file
    monkeypatch.setattr(
        RangeHandler, "send_file", lambda self, file: (seen.append(self.headers["Authorization"]), good(self, file))[1]
    )
    ckptools.open(f"hf://org/name/{MODEL}/ckpt")
    assert hub.tokens == {"Bearer hf_secret"} and set(seen) == {None}


def values(folder: str | Path) -> bytes:
    """The bytes of all tensors."""
    found = ckptools.open(folder).model
    return b"".join(found[key].numpy().tobytes() for key in found)


def test_the_hub_is_asked_once_where_a_file_is_stored(hub):
    values(f"hf://org/name/{MODEL}/ckpt")
    resolved = [path for path in hub.asked if "/resolve/" in path]
    assert len(resolved) == len(set(resolved)) < len(hub.stored)


def test_the_hub_is_asked_again_after_a_while(hub, monkeypatch):
    monkeypatch.setattr(hub_files, "KEPT", 0.0)
    values(f"hf://org/name/{MODEL}/ckpt")
    assert len([path for path in hub.asked if "/resolve/" in path]) == len(hub.stored)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_the_hub_is_asked_again_where_an_address_is_no_longer_good(status, hub, monkeypatch):
    good, served = RangeHandler.send_file, Counter()

    def once(self: RangeHandler, file: Path) -> None:
        served[self.path] += 1
        good(self, file) if served[self.path] == 1 else self.answer(status, b"")

    monkeypatch.setattr(RangeHandler, "send_file", once)
    assert values(f"hf://org/name/{MODEL}/ckpt") == values(FIXTURES / MODEL / "ckpt")
    assert max(served.values()) == 2


def test_a_redirect_to_what_is_not_its_storage_is_refused_and_named(hub):
    hub.storage = "http://localhost:9"
    with pytest.raises(ReadError, match="the Hub redirects to http://localhost, not to its storage") as error:
        ckptools.open(f"hf://org/name/{MODEL}/ckpt/model.safetensors.index.json")
    assert "c0ffee" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("hf://org/private/model.pt", r"access denied by the Hub \(401\)"),
        ("hf://org/name@other/model.pt", "the Hub answers 404: no such repository or revision"),
        ("hf://org/name/nothing.pt", "no such file or folder"),
        ("hf://org", "names no repository"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(hub, url, reason):
    with pytest.raises(ReadError, match=reason) as error:
        ckptools.open(url)
    assert str(error.value).startswith(url) and "\n" not in str(error.value) and "hf_secret" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "followed"),
    [
        ("https://cdn-lfs.hf.co/x", True),
        ("https://huggingface.co/x", True),
        ("http://cdn-lfs.hf.co/x", False),
        ("https://evilhf.co/x", False),
        ("https://hf.co.evil.org/x", False),
    ],
)
def test_the_hubs_storage_is_below_its_own_domains_by_tls(monkeypatch, target, followed):
    from ckptools.files.hub import Hub as Repository
    from ckptools.files.remote_store import RemoteError

    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    try:
        Repository("org/name")._check_redirect(urlsplit("https://huggingface.co/y"), urlsplit(target))
    except RemoteError:
        assert not followed
    else:
        assert followed
