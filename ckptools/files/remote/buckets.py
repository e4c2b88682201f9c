"""Buckets of S3, Google Cloud Storage and Azure: obstore's file system, with what it leaves out.

That is file times in lists, ranges of one version only (`If-Match`), and uploads of which nothing stays when they fail.
Credentials are those of the environment's usual chain: environment variables, then the machine's or container's role;
for S3 also the profiles of `~/.aws`, where boto3 is installed.
Source of the settings: object_store's and obstore's documentation.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import PreconditionError
from obstore.fsspec import FsspecStore

from ckptools.files.remote import timeout
from ckptools.files.storage import DeniedError, RemoteError, in_one_line, replaced
from ckptools.text import first_line

PART = 8 << 20
"""Bytes of a part of an upload, at least; those of a store are at least 5 MiB, but for the last."""

MAX_PARTS = 9_999
"""Parts of an upload, less the last; S3 and Google Cloud Storage allow 10,000."""

IN_FLIGHT = 32 << 20
"""Bytes of one upload that are under way, where that is two parts or more."""

PARTS_LEFT = "the parts that were uploaded could not be removed: abort the upload, or let a rule of the bucket do so"

RETRIES = 6
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT")
"""Environment variables that name a server in place of the cloud's own."""

_CODE = re.compile(r"<Code>(\w+)</Code>|Server returned non-2xx status code: (\d+ [A-Za-z ]+)")
_REQUEST = re.compile(
    r"(Error performing list request: )?Error performing \w+ (?P<url>\S+) in [^\s,]+"
    r"(, after (?P<retries>\d+) retries, max_retries: \d+, retry_timeout: \w+)?\s+- "
)
"""What obstore's errors begin with: the request, with its address."""

CAUSES = {
    "kind: ConnectionRefused": "it refuses the connection",
    "dns error": "there is no such host",
    "invalid peer certificate": "its certificate is not trusted",
    "407 Proxy": "the proxy wants another name and password (407)",
    "TooManyRedirects": "it redirects more than 10 times",
    "redirect without LOCATION": "it redirects without saying where to; is AWS_REGION the bucket's?",
}
"""Why a request failed, by what obstore says for its developers."""


class BucketFileSystem(FsspecStore):
    """The buckets of one cloud, by its scheme: `s3`, `gs` or `az`."""

    cachable = False  # the environment may have changed

    def __init__(self, scheme: str) -> None:
        # A server without TLS is only one that the user has named as the endpoint.
        plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
        seconds = timedelta(seconds=timeout())
        how: Any = {
            "client_options": {"timeout": seconds, "connect_timeout": timedelta(seconds=5), "allow_http": plain},
            "retry_config": {"max_retries": RETRIES, "retry_timeout": 4 * seconds},
            "credential_provider": _profile() if scheme == "s3" else None,
        }
        super().__init__(scheme, **how)  # type: ignore[call-overload] # one overload for each literal

    # Called from threads, obstore itself is a tenth faster than through fsspec's event loop.

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What lies in a folder."""
        bucket, folder = self._split_path(path)
        found = obstore.list_with_delimiter(self._construct_store(bucket), folder or None)
        folders: list[Any] = [{"path": name, "type": "directory"} for name in found["common_prefixes"]]
        listed = [{"name": f"{bucket}/{one['path']}", "type": "file", **one} for one in (*folders, *found["objects"])]
        return listed if detail else [one["name"] for one in listed]

    def cat_file(self, path: str, start: int, end: int, version: str = "", **_: Any) -> bytes:
        """The bytes from `start` to before `end`; of a version, if one is given."""
        bucket, key = self._split_path(path)
        wanted: Any = {"range": (start, end)} | ({"if_match": version} if version else {})
        try:
            found = obstore.get(self._construct_store(bucket), key, options=wanted)
            data = found.buffer()
        except PreconditionError as error:
            raise replaced() from error
        if version and found.meta["e_tag"] != version:
            raise replaced()
        return bytes(data)

    def write_parts(self, path: str, size: int, pieces: Iterator[bytes]) -> None:
        """Write a large file in parts of at least `PART` bytes. A store knows no condition for that."""
        bucket, key = self._split_path(path)
        count = min(max(1, size // PART), MAX_PARTS)
        # The last part has less than `count` bytes: what waits in memory for the end of the others is next to nothing.
        part = max(1, size // count)
        at_once = max(2, min(8, IN_FLIGHT // part))
        how: Any = {"use_multipart": True, "chunk_size": part, "max_concurrency": at_once}
        ended: list[Exception] = []

        def noting() -> Iterator[bytes]:
            try:
                yield from pieces
            except Exception as error:  # obstore would make another of it
                ended.append(error)
                raise

        try:
            obstore.put(self._construct_store(bucket), key, noting(), **how)
        except Exception as error:
            if "Error performing DELETE" in str(error):
                said = bucket_error(ended[0] if ended else error).strerror
                raise RemoteError(f"{said}; {PARTS_LEFT}") from error
            raise ended[0] if ended else bucket_error(error) from None


def _profile() -> Any:
    """What reads the profiles in `~/.aws`, where these are used and boto3 is there; None elsewhere."""
    if "AWS_ACCESS_KEY_ID" in os.environ or os.environ.get("AWS_SKIP_SIGNATURE"):
        return None
    named = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    files = (Path(named), Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")))
    if "AWS_PROFILE" not in os.environ and not any(file.expanduser().is_file() for file in files):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    return Boto3CredentialProvider()


def bucket_error(error: Exception) -> OSError:
    """An error of obstore as one line; the request's address, and what follows, are for its developers."""
    if isinstance(error, (RemoteError, FileNotFoundError)):
        return in_one_line(error)
    text = str(error)
    code = ", ".join({one[0] or one[1].strip(): None for one in _CODE.findall(text)})
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or "403 Forbidden" in text:
        return DeniedError(f"access denied by the store ({code}); check the credentials", errno.EACCES)
    line = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", first_line(error))  # Azure's signatures are in the query
    line = _REQUEST.sub(_retries, re.sub(r"^Generic \w+ error: ", "", line))
    cause = next((cause for sign, cause in CAUSES.items() if sign in text), "")
    line = (
        line.replace("HTTP error: error sending request", cause) if cause and "error sending" in line else cause or line
    )
    return RemoteError(f"the store does not answer as it should: {line if cause else code or line}")


def _retries(request: re.Match[str]) -> str:
    host = urlsplit(request["url"]).netloc.rpartition("@")[2]
    return f"no answer after {request['retries']} retries from {host}: " if request["retries"] else ""
