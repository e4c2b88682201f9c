"""Which file system of fsspec serves a URL.

Buckets are read through obstore's, web servers through fsspec's own, both with what we add (`buckets`, `web`); the
Hugging Face Hub through that of `huggingface_hub`, at the commit that a revision is when it is first asked for. Any
other URL goes to the file system that fsspec knows for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from urllib.parse import quote, unquote

from ckptools.files.remote import HUB, WEB
from ckptools.files.remote.store import Place, Store
from ckptools.files.storage import DeniedError, RemoteError, in_one_line
from ckptools.text import first_line

BUCKETS = ("s3", "gs", "az")


def store_of(scheme: str, name: str, queries: Mapping[str, str]) -> Store:
    """The store of a bucket, host or repository called `name`; `queries` by key are sent, and never shown.

    Raises:
        RemoteError: a package that is needed for this is not installed, or nothing serves such a URL.
    """
    try:
        if scheme in BUCKETS:
            return Store(_bucket(scheme, name))
        if scheme in WEB:
            return Store(_web(f"{scheme}://{name.partition('#')[0]}", queries))
        if scheme == HUB:
            return Store(_hub(name), lambda: _hub(name))  # a branch moves
        return Store(_any(f"{scheme}://{name}"))
    except RemoteError:
        raise
    except ImportError as error:
        wanted = {**dict.fromkeys(BUCKETS, "obstore"), **dict.fromkeys(WEB, "aiohttp"), HUB: "huggingface_hub"}
        if scheme in wanted:
            text = f"needs the package {wanted[scheme]}: pip install 'ckptools[remote]'"
            raise RemoteError(text, errno.ENOTSUP) from error
        raise in_one_line(error) from error
    except Exception as error:
        raise RemoteError(f"cannot be reached: {first_line(error)}", errno.ENOTSUP) from error


def _bucket(scheme: str, name: str) -> Place:
    from ckptools.files.remote.buckets import BucketFileSystem, bucket_error

    fs = BucketFileSystem(scheme)
    return Place(fs, lambda key: f"{name}/{key}", "checked", in_one_line=bucket_error)


def _web(origin: str, queries: Mapping[str, str]) -> Place:
    from ckptools.files.remote.web import WebFileSystem, web_error

    def url(key: str) -> str:
        query = queries.get(key, "")
        # What is percent-encoded in a URL stays so; names that others give (an index its shards) are encoded here.
        return f"{origin}/{quote(key, safe='/%:@!$&()*+,;=~')}" + (f"?{query}" if query else "")

    return Place(WebFileSystem(), url, "checked", lists=False, in_one_line=web_error)


def _hub(name: str) -> Place:
    from huggingface_hub import HfApi, HfFileSystem

    endpoint = os.environ.get("HF_ENDPOINT") or None
    repository, _, revision = name.partition("@")
    kind, _, rest = repository.partition("/")
    typed = (rest, kind[:-1]) if kind in ("datasets", "spaces") else (repository, None)
    if typed[0].count("/") != 1:
        raise RemoteError("names no repository: hf://organization/name/path is expected", errno.EINVAL)
    try:
        commit = HfApi(endpoint).repo_info(typed[0], repo_type=typed[1], revision=unquote(revision) or None).sha
    except Exception as error:
        raise _hub_error(error) from error
    fs = HfFileSystem(endpoint=endpoint, skip_instance_cache=True)
    return Place(fs, lambda key: f"{repository}@{commit}/{key}", "fixed", in_one_line=_hub_error)


def _hub_error(error: Exception) -> OSError:
    cause = error if hasattr(error, "response") else error.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in (401, 403):
        text = "no such repository, or it needs a token in HF_TOKEN, or its terms to be accepted"
        return DeniedError(f"access denied by the Hub ({status}): {text}", errno.EACCES)
    if status == 404 and "Entry" not in type(cause).__name__:
        return RemoteError("the Hub answers 404: no such repository or revision?")
    return in_one_line(error)


def _any(url: str) -> Place:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        fs, root = url_to_fs(url, skip_instance_cache=True)
    except ValueError as error:
        known = ", ".join(f"{scheme}://" for scheme in (*BUCKETS, *WEB, HUB))
        raise RemoteError(
            f"is not read; {known} are, and what fsspec has a file system for: {first_line(error)}"
        ) from error
    return Place(fs, lambda key: f"{root.rstrip('/')}/{key}" if key else root)
