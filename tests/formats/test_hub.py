"""Checkpoints on the Hub, by a server that does as the Hub does: pages, commits, and redirects to its storage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import ckptools
from ckptools.files.opening import location
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
        url = url._replace(path=url.path.replace("%2Fckpt", "/ckpt"))
        api, files = "/api/models/org/name", f"/org/name/resolve/{COMMIT}/"
        if url.path in (api, *(f"{api}/revision/{one}" for one in ("main", "refs%2Fpr%2F1", COMMIT))):
            self.answer(200, json.dumps({"id": "org/name", "sha": COMMIT}).encode())
        elif url.path.startswith(f"{api}/tree/{COMMIT}"):
            self._list(
                url.path.removeprefix(f"{api}/tree/{COMMIT}").strip("/"), int(parse_qs(url.query).get("p", "0")[0])
            )
        elif url.path.startswith(files):
            signed = f"{url.path.removeprefix(files)}?Signature=c0ffee{len(self.hub.asked)}"
            self.answer(302, b"", {"Location": f"{self.hub.storage}/{signed}"})
        else:
            why = "RevisionNotFound" if "/revision/" in url.path else "EntryNotFound"
            self.answer(401 if "/private" in url.path else 404, b"{}", {"X-Error-Code": why})

    def _list(self, folder: str, page: int) -> None:
        found = sorted((FIXTURES / folder).iterdir()) if (FIXTURES / folder).is_dir() else []
        told = [self._entry(path) for path in found[3 * page : 3 * page + 3]]
        more = f'<{self.hub.endpoint}{self.path.partition("?")[0]}?p={page + 1}>; rel="next"'
        headers = {"Link": more} if found[3 * page + 3 :] else {} if found else {"X-Error-Code": "EntryNotFound"}
        self.answer(200 if found else 404, json.dumps(told).encode() if found else b"{}", headers)

    def _entry(self, path: Path) -> dict[str, object]:
        kind = "directory" if path.is_dir() else "file"
        return {"path": str(path.relative_to(FIXTURES)), "type": kind, "oid": "a" * 40, "size": path.stat().st_size}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    made = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # whatever the machine says
    with range_server(FIXTURES, made.stored) as made.storage, serving(partial(HubHandler, made)) as made.endpoint:
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        yield made


@pytest.mark.slow
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
    assert len([path for path in asked if COMMIT not in path]) <= 2
    assert all(COMMIT in path for path in hub.asked if "/tree/" in path or "/resolve/" in path)


def test_the_hub_gets_the_token_and_its_storage_does_not(hub, monkeypatch):
    seen: list[str | None] = []
    good = RangeHandler.send_file
    monkeypatch.setattr(
        RangeHandler, "send_file", lambda self, file: (seen.append(self.headers["Authorization"]), good(self, file))[1]
    )
    ckptools.open(f"hf://org/name/{MODEL}/ckpt")
    assert hub.tokens == {"Bearer hf_secret"} and set(seen) == {None}
