"""Repositories of the Hugging Face Hub: `hf://org/model[@revision]/path`, `hf://datasets/org/name/path`.

A revision is resolved to its commit once, so that all that is read is of one commit. Files are asked for at
`/resolve/<commit>/<path>`, which redirects to the Hub's own storage: hosts at or below hf.co and huggingface.co by TLS,
or at or below the host that `HF_ENDPOINT` names, on any port. No other is followed; only the Hub itself gets the token.
Where a redirect led is remembered, so that further ranges of the file are one request each.
Source: the Hub's API reference (tree and revision), and `huggingface_hub` for the variables of the environment.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from ckptools.files.http_connection import Answer, TransportError
from ckptools.files.remote_store import DeniedError, RemoteError
from ckptools.files.retries import Tries
from ckptools.files.storage import FOLDER, Status
from ckptools.files.web import HttpStore, authority

ENDPOINT = "https://huggingface.co"
STORAGE = ("hf.co", "huggingface.co")
"""Hosts below which the Hub keeps large files."""

KEPT = 300.0
"""Seconds for which it is remembered where a file is stored; an address that expires sooner is asked for again."""

MAX_PAGES = 1000
_NEXT = re.compile(r'<([^<>]*)>\s*;\s*rel="?next"?')
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Hub(HttpStore):
    """A repository at a revision.

    Args:
        name: `org/model@revision`, with `datasets/` or `spaces/` before it where it is one.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        named, _, revision = name.partition("@")
        first, _, rest = named.partition("/")
        self.kind, self.repository = (first, rest) if first in ("datasets", "spaces") else ("models", named)
        if self.repository.count("/") != 1:
            raise RemoteError("names no repository: hf://organization/name/path is expected", errno.EINVAL)
        self.revision = unquote(revision) or "main"
        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT
        self._commit = ""
        self._stored: dict[str, tuple[str, float]] = {}

    def anew(self) -> Hub:
        """The same repository, whose revision is resolved again."""
        return Hub(self.name)

    @property
    def commit(self) -> str:
        """The commit that the revision was when it was first asked for."""
        if not self._commit:
            found, _ = self._json(f"{self._api}/revision/{quote(self.revision, safe='')}")
            told = found.get("sha") if isinstance(found, dict) else None
            if not isinstance(told, str) or not _COMMIT.fullmatch(told):
                raise RemoteError(f"the Hub does not tell which commit {self.revision!r} is")
            self._commit = told
        return self._commit

    @property
    def _api(self) -> str:
        return f"{self.endpoint}/api/{self.kind}/{quote(self.repository)}"

    def _url(self, key: str) -> str:
        kind = "" if self.kind == "models" else f"/{self.kind}"
        return f"{self.endpoint}{kind}/{quote(self.repository)}/resolve/{self.commit}/{quote(key)}"

    def _list(self, folder: str) -> Mapping[str, Status]:
        found = [_entry(one, folder) for page in self._pages(folder) for one in page]
        return dict(found)

    def _pages(self, folder: str) -> Iterator[list[Any]]:
        """The pages of the list of a folder; none where there is no such folder."""
        url = f"{self._api}/tree/{self.commit}" + (f"/{quote(folder)}" if folder else "")
        for _ in range(MAX_PAGES):
            page, answer = self._json(url, may_be_absent=True)
            if not isinstance(page, list):
                raise RemoteError("the Hub's list of a folder is no list")
            yield page
            more = _NEXT.search(answer.headers.get("link", ""))
            if more is None:
                return
            url = urljoin(url, more[1])
            if authority(urlsplit(url)) != authority(urlsplit(self.endpoint)):
                raise RemoteError(f"the Hub's list goes on at {urlsplit(url).hostname}; that is not followed")
        raise RemoteError(f"the Hub's list of a folder has more than {MAX_PAGES} pages")

    def _look(self, key: str) -> Status | None:
        folder, _, name = key.rpartition("/")
        return self._entries(folder).get(name)

    def _fetch(self, key: str, version: str, start: int, end: int) -> bytes:
        # No condition: the commit in the URL is the version, and its storage has ETags of its own.
        return super()._fetch(key, "", start, end)

    def _followed(self, url: str, headers: Mapping[str, str], most: int) -> tuple[str, Answer]:
        place, until = self._stored.get(url, (url, 0.0))
        if time.monotonic() < until:
            with suppress(TransportError):
                found = super()._followed(place, headers, most)
                if found[1].status in (200, 206):
                    return found
            self._stored.pop(url, None)  # the address has expired, or its server has gone: the Hub names another
        asked = time.monotonic()
        found = super()._followed(url, headers, most)
        if found[0] != url and found[1].status in (200, 206):
            self._stored[url] = found[0], asked + KEPT
        return found

    def _json(self, url: str, may_be_absent: bool = False) -> tuple[Any, Answer]:
        """What the API answers; an empty list where there is nothing and that may be."""
        tries = Tries()
        while (answer := self._get(url, {}, tries)).fault:
            tries.failed(answer.fault)
        if answer.status == 404 and may_be_absent:
            return [], answer
        if answer.status != 200:
            raise RemoteError(f"the Hub answers {answer.status}: no such repository or revision?")
        try:
            return json.loads(answer.body), answer
        except ValueError as error:
            raise RemoteError("the Hub's answer is no JSON") from error

    def _get(self, url: str, headers: Mapping[str, str], tries: Tries, length: int = 0) -> Answer:
        answer = super()._get(url, headers, tries, length)
        if answer.status in (401, 403):
            text = "no such repository, or it needs a token in HF_TOKEN, or its terms to be accepted"
            raise DeniedError(f"access denied by the Hub ({answer.status}): {text}", errno.EACCES)
        return answer

    def _credentials(self, url: SplitResult) -> Mapping[str, str]:
        found = token() if authority(url) == authority(urlsplit(self.endpoint)) else ""
        return {"Authorization": f"Bearer {found}"} if found else {}

    def _check_redirect(self, origin: SplitResult, target: SplitResult) -> None:
        host, own = target.hostname or "", urlsplit(self.endpoint)
        of_hub = target.scheme == "https" and any(_is_below(host, one) for one in STORAGE)
        of_endpoint = target.scheme in ("https", own.scheme) and _is_below(host, own.hostname or "")
        if not (of_hub or of_endpoint):
            raise RemoteError(
                f"the Hub redirects to {target.scheme}://{host}, not to its storage; that is not followed"
            )


def token() -> str:
    """The token of the environment: `HF_TOKEN`, else the file that `hf auth login` writes; "" where there is none."""
    told = os.environ.get("HF_TOKEN", "").strip()
    if told:
        return told
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    try:
        return Path(os.environ.get("HF_TOKEN_PATH", home / "token")).expanduser().read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _entry(told: Any, folder: str) -> tuple[str, Status]:
    """Name and status of what the list of a folder tells."""
    told = told if isinstance(told, dict) else {}
    above, _, name = str(told.get("path", "")).rpartition("/")
    kind, size = told.get("type"), told.get("size")
    if above != folder or not name or not isinstance(size, int) or size < 0:
        raise RemoteError("the Hub's list of a folder has an entry that is none")
    return name, FOLDER if kind == "directory" else Status(size, 0.0, str(told.get("oid", "")))


def _is_below(host: str, domain: str) -> bool:
    return host == domain or (bool(domain) and host.endswith(f".{domain}"))
