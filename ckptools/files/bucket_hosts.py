"""Which hosts the requests for a bucket of S3 go to: its own, and those that give credentials for it.

Source of both: object_store's `aws/builder.rs`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from ckptools.files.local_proxy import LocalProxy
from ckptools.files.proxies import proxy_of
from ckptools.files.remote_store import RemoteError

CREDENTIALS = {
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "http://169.254.170.2",
    "AWS_ENDPOINT_URL_STS": "",
    "AWS_METADATA_ENDPOINT": "",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "https://sts.{region}.amazonaws.com",
}
"""Environment variables by which credentials are asked for, with the server where the variable itself does not say."""

MACHINE = "http://169.254.169.254"
"""Where a machine of Amazon's is told its role, if nothing else is."""


def only_named_hosts(url: str, asks_role: bool) -> tuple[LocalProxy, Mapping[str, Any]]:
    """What keeps obstore from every host but those of a bucket: a proxy, and the settings by which it is used.

    Args:
        url: of the bucket.
        asks_role: whether its credentials are asked for from a server.

    Raises:
        RemoteError: the environment names no host that can be used.
    """
    servers = _servers(url, asks_role)
    ways = {server.hostname or "": proxy_of(server) for server in servers}
    proxy = LocalProxy({host: way for host, way in ways.items() if way is not None})
    straight = [host for host, way in ways.items() if way is None]
    return proxy, {"proxy_url": proxy.url, "proxy_excludes": ",".join(straight)}


def _servers(url: str, asks_role: bool) -> list[SplitResult]:
    own, region = _server_and_region(url)
    if "@" in own.netloc:
        raise RemoteError("the endpoint is a URL with a user's name or password; those are not read")
    return [own, *(_credential_servers(region) if asks_role else ())]


def _server_and_region(url: str) -> tuple[SplitResult, str]:
    """Where a bucket's objects are asked for, and its region: obstore tells both when it signs a request, offline."""
    from obstore import sign
    from obstore.store import S3Store

    store = S3Store.from_url(url, access_key_id="nobody", secret_access_key="none", skip_signature=False)
    signed = urlsplit(sign(store, "GET", "key", timedelta(minutes=1)))
    return signed, parse_qs(signed.query)["X-Amz-Credential"][0].split("/")[2]


def _credential_servers(region: str) -> list[SplitResult]:
    named = {name: os.environ.get(name, "") for name in CREDENTIALS}
    told = [CREDENTIALS[name] or value for name, value in named.items() if value]
    return [urlsplit(server.format(region=region)) for server in (*told, MACHINE)]
