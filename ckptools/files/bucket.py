"""Buckets of S3, Google Cloud Storage and Azure, through `obstore`: `s3://`, `gs://`, `az://`.

Credentials are those of the environment's usual chain: environment variables, then the machine's or container's role;
for S3 also the profiles of `~/.aws`, where boto3 is installed. Ranges carry the ETag that was listed (`If-Match`), so
that the store itself refuses another version. A redirect to another host is not followed (`bucket_hosts`).
Source of the settings: object_store's and obstore's documentation.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckptools.files.bucket_hosts import ENDPOINTS, only_named_hosts
from ckptools.files.local_proxy import REFUSED as LOCAL_REFUSED
from ckptools.files.local_proxy import LocalProxy
from ckptools.files.remote_store import NoListError, RemoteError, RemoteStore, replaced
from ckptools.files.retries import timeout
from ckptools.files.storage import FOLDER, Status
from ckptools.text import printable

PART = 8 << 20
"""Bytes of a part of an upload, at least; those of a store are at least 5 MiB, but for the last."""

MAX_PARTS = 9_999
"""Parts of an upload, less the last; S3 and Google Cloud Storage allow 10,000."""

IN_FLIGHT = 32 << 20
"""Bytes of one upload that are under way, where that is two parts or more."""

PARTS_LEFT = "the parts that were uploaded could not be removed: abort the upload, or let a rule of the bucket do so"

RETRIES = 6
INSTALL = "needs the package obstore: pip install 'ckptools[remote]'"

_CODE = re.compile(r"<Code>(\w+)</Code>|Server returned non-2xx status code: (\d+ [A-Za-z ]+)")

_REFUSED = re.compile(f"{LOCAL_REFUSED}|TunnelUnsuccessful")
"""What obstore's errors have where `LocalProxy` did not let a request through."""

_NOT_SENT = "HTTP error: error sending request"
CAUSES = {
    "kind: ConnectionRefused": "it refuses the connection",
    "dns error": "there is no such host",
    "invalid peer certificate": "its certificate is not trusted",
}
"""Why a request was not sent, by what obstore tells its developers."""

_REQUEST = re.compile(
    r"(Error performing list request: )?Error performing \w+ (?P<url>\S+) in [^\s,]+"
    r"(, after (?P<retries>\d+) retries, max_retries: \d+, retry_timeout: \w+)?\s+- "
)
"""What obstore's errors begin with: the request, with its address."""


class Bucket(RemoteStore):
    """A bucket, or a container of Azure.

    Args:
        url: with its scheme: `s3://bucket`.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            import obstore
        except ImportError:
            raise RemoteError(INSTALL, errno.ENOTSUP) from None
        self.url, self._obstore = url, obstore
        self._scheme = url.partition(":")[0]
        try:
            self.store, self._proxy = _store(url)
        except RemoteError:
            raise
        except Exception as error:
            raise RemoteError(f"cannot be reached: {_first_line(error)}") from error

    def _list(self, folder: str) -> Mapping[str, Status]:
        try:
            found = self._obstore.list_with_delimiter(self.store, folder or None)
        except Exception as error:
            raise self._told(error, NoListError if _denied(error) else RemoteError) from error
        cut = len(folder) + 1 if folder else 0
        listed = {prefix[cut:]: FOLDER for prefix in found["common_prefixes"]}
        for one in found["objects"]:
            listed[one["path"][cut:]] = _status(one)
        return {name: status for name, status in listed.items() if name}

    def _look(self, key: str) -> Status | None:
        try:
            return _status(self._obstore.head(self.store, key))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._told(error) from error

    def _fetch(self, key: str, version: str, start: int, end: int) -> bytes:
        wanted: Any = {"range": (start, end)} | ({"if_match": version} if version else {})
        try:
            found = self._obstore.get(self.store, key, options=wanted)
            data = bytes(found.buffer())
        except self._obstore.exceptions.PreconditionError as error:
            raise replaced() from error
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "was removed meanwhile") from error
        except Exception as error:
            raise self._told(error) from error
        if version and found.meta["e_tag"] != version:
            raise replaced()
        if len(data) != end - start:
            raise RemoteError(f"the store gave {len(data)} bytes at {start}; expected {end - start}")
        return data

    def put(self, key: str, data: bytes, replace: bool) -> None:
        """Write a small file whole; the store itself refuses to replace one (`If-None-Match`), unless that is asked."""
        try:
            self._obstore.put(self.store, key, data, mode="overwrite" if replace else "create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError as error:
            raise FileExistsError(errno.EEXIST, "is already there") from error
        except Exception as error:
            raise self._told(error) from error

    def upload(self, key: str, size: int, pieces: Iterator[bytes]) -> None:
        """Write a large file in parts of at least `PART` bytes. A store knows no condition for that."""
        count = min(max(1, size // PART), MAX_PARTS)
        # The last part has less than `count` bytes: what waits in memory for the end of the others is next to nothing.
        part = max(1, size // count)
        at_once = max(2, min(8, IN_FLIGHT // part))
        ended: list[Exception] = []
        try:
            self._obstore.put(
                self.store, key, _noting(pieces, ended), use_multipart=True, chunk_size=part, max_concurrency=at_once
            )
        except Exception as error:
            if "Error performing DELETE" in str(error):
                raise RemoteError(f"{self._told(ended[0] if ended else error).strerror}; {PARTS_LEFT}") from error
            if ended:
                raise ended[0] from None
            raise self._told(error) from error

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files."""
        try:
            self._obstore.delete(self.store, list(keys))
        except Exception as error:
            raise self._told(error) from error

    def _told(self, error: Exception, kind: type[RemoteError] = RemoteError) -> RemoteError:
        """An error of the store in one line."""
        if reason := self._redirected(str(error)):
            return RemoteError(reason)
        if self._proxy.trouble and (_NOT_SENT in str(error) or "407 Proxy" in str(error)):
            return RemoteError(self._proxy.trouble)
        if _denied(error):
            return kind(f"access denied by the store ({_code(error)}); check the credentials", errno.EACCES)
        return kind(f"the store does not answer as it should: {_code(error) or _first_line(error)}")

    def _redirected(self, error: str) -> str:
        """Why a redirect was not followed; "" where that is not what an error says."""
        if self._proxy.refused and _REFUSED.search(error):
            there = printable(self._proxy.refused.netloc)
            hint = f"if the bucket is there, name it by {ENDPOINTS[self._scheme][0]}"
            return f"the store redirects to another host, {there}; that is not followed: {hint}"
        if "TooManyRedirects" in error:
            return "the store redirects more than 10 times"
        if "error following redirect" in error and "BadScheme" in error:
            return "the store redirects to a place without TLS; that is not followed"
        if "redirect without LOCATION" in error:
            hint = "; is AWS_REGION the bucket's?" if self._scheme == "s3" else ""
            return f"the store redirects without saying where to{hint}"
        return ""


def _noting(pieces: Iterator[bytes], ended: list[Exception]) -> Iterator[bytes]:
    """The same pieces; an error that ends them is noted."""
    try:
        yield from pieces
    except Exception as error:
        ended.append(error)
        raise


def _store(url: str) -> tuple[Any, LocalProxy]:
    """A store of obstore's, and what keeps it from other hosts."""
    from obstore.store import from_url

    scheme = url.partition(":")[0]
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout()), "connect_timeout": timedelta(seconds=5)}
    # A server without TLS is only one that the user has named as the endpoint.
    options["allow_http"] = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS[scheme])
    retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=4 * timeout())}
    how: dict[str, Any] = {"client_options": options, "retry_config": retry}
    if scheme == "s3" and (provider := _profile()) is not None:
        how["credential_provider"] = provider
    asks_role = not (scheme == "s3" and (_is_told() or "credential_provider" in how))
    proxy, settings = only_named_hosts(url, asks_role)
    options.update(settings)
    return from_url(url, **how), proxy


def _is_told() -> bool:
    """Whether the environment itself has the credentials for S3, or says that none are needed."""
    return "AWS_ACCESS_KEY_ID" in os.environ or bool(os.environ.get("AWS_SKIP_SIGNATURE"))


def _profile() -> Any:
    """What reads the profiles in `~/.aws`, where these are used and boto3 is there; None elsewhere."""
    if _is_told():
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


def _status(found: Any) -> Status:
    return Status(found["size"], found["last_modified"].timestamp(), found["e_tag"] or found["version"] or "")


def _denied(error: Exception) -> bool:
    kind = type(error).__name__
    return kind in ("PermissionDeniedError", "UnauthenticatedError") or "403 Forbidden" in str(error)


def _code(error: Exception) -> str:
    """The error code that the store gave; "" where there is none."""
    found = {one[0] or one[1].strip(): None for one in _CODE.findall(str(error))}
    return ", ".join(found)


def _first_line(error: Exception) -> str:
    """What an error of obstore begins with; the rest, and the request's address, are for its developers."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", line)  # Azure's signatures are in the query
    cause = next((cause for sign, cause in CAUSES.items() if sign in str(error)), _NOT_SENT)
    line = line.replace(_NOT_SENT, cause)
    return _REQUEST.sub(_retries, re.sub(r"^Generic \w+ error: ", "", line))[:300]


def _retries(request: re.Match[str]) -> str:
    host = urlsplit(request["url"]).netloc
    return f"no answer after {request['retries']} retries from {host}: " if request["retries"] else ""
