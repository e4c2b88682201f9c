"""Which hosts the requests for a bucket go to: its own, and those that give credentials for it; and no others.

Source of the servers and of the environment variables: object_store's `builder.rs` and `credential.rs` of each store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ckptools.files.local_proxy import LocalProxy
from ckptools.files.proxies import proxy_of
from ckptools.files.remote_store import RemoteError

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Environment variables that name a server in place of the cloud's own, by what a URL begins with."""

CREDENTIALS = {
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "http://169.254.170.2",
    "AWS_ENDPOINT_URL_STS": "",
    "AWS_METADATA_ENDPOINT": "",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "https://sts.{region}.amazonaws.com",
    "AZURE_AUTHORITY_HOST": "",
    "AZURE_FABRIC_TOKEN_SERVICE_URL": "",
    "AZURE_IDENTITY_ENDPOINT": "",
    "AZURE_MSI_ENDPOINT": "",
    "AZURE_STORAGE_AUTHORITY_HOST": "",
    "GCE_METADATA_HOST": "",
    "GCE_METADATA_IP": "",
    "GCE_METADATA_ROOT": "",
    "IDENTITY_ENDPOINT": "",
}
"""Environment variables by which credentials are asked for, with the server where the variable itself does not say."""

MACHINE = "http://169.254.169.254"
"""Where a machine in a cloud is told its role."""

GIVERS = {
    "s3": (MACHINE,),
    "gs": (MACHINE, "http://metadata.google.internal", "https://accounts.google.com", "https://oauth2.googleapis.com"),
    "az": (MACHINE, "https://login.microsoftonline.com"),
}
"""Where credentials are asked for if the environment names no other place."""


def only_named_hosts(url: str, asks_role: bool) -> tuple[LocalProxy, Mapping[str, Any]]:
    """What keeps obstore from every host but those of a bucket: a proxy, and the settings by which it is used.

    Args:
        url: of the bucket.
        asks_role: whether its credentials are asked for from a server.

    Raises:
        RemoteError: the environment names no host that can be used.
    """
    scheme = url.partition(":")[0]
    if any("@" in _server(os.environ.get(name, "")).netloc for name in ENDPOINTS[scheme]):
        raise RemoteError("the endpoint is a URL with a user's name or password; those are not read")
    servers = [_own_server(url), *(_credential_servers(scheme) if asks_role else ())]
    ways = {server.hostname or "": proxy_of(server) for server in servers}
    proxy = LocalProxy({host: way for host, way in ways.items() if way is not None})
    straight = [host for host, way in ways.items() if way is None]
    return proxy, {"proxy_url": proxy.url, "proxy_excludes": ",".join(straight)}


def _own_server(url: str) -> SplitResult:
    """Where the objects of a bucket are: whom obstore asks for one, of a proxy that lets nothing through."""
    import obstore
    from obstore.store import from_url

    with LocalProxy({}) as proxy:
        options: Any = {"allow_http": True, "proxy_url": proxy.url}
        how: Any = {"client_options": options, "retry_config": {"max_retries": 0}, "skip_signature": True}
        store = from_url(url, **how)
        with suppress(Exception):  # of obstore: it is refused
            obstore.head(store, "key")
    if proxy.refused is None:
        raise RemoteError("obstore asks no proxy, so that its redirects cannot be refused; is there a newer version?")
    return proxy.refused


def _credential_servers(scheme: str) -> list[SplitResult]:
    named = {name: os.environ.get(name, "") for name in CREDENTIALS}
    told = [CREDENTIALS[name] or value for name, value in named.items() if value]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return [_server(server.format(region=region)) for server in (*told, *GIVERS[scheme])]


def _server(told: str) -> SplitResult:
    return urlsplit(told if "://" in told else f"http://{told}")
