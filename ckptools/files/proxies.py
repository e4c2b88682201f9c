"""The proxy that the environment names for a server: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, and `NO_PROXY`.

They are read as by reqwest, the library below obstore, but for a `*` in `NO_PROXY`, which means addresses too. Source:
reqwest's documentation, and `hyper_util::client::proxy::matcher`.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, unquote, urlsplit

SPOKEN = ("http", "https")
"""Schemes of proxies; one of another kind, such as `socks5`, is not used."""


def proxy_of(url: SplitResult) -> SplitResult | None:
    """The URL of the proxy that requests for a URL go through; None where they go straight to its host."""
    named = _variable(f"{url.scheme}_proxy") or _variable("all_proxy")
    found = urlsplit(named if "://" in named else f"http://{named}")
    if found.scheme not in SPOKEN or not found.hostname or is_excluded(url.hostname or ""):
        return None
    return found


def host_and_port(url: SplitResult) -> tuple[str, int]:
    """Where a server of HTTP, or a proxy, listens.

    Raises:
        ValueError: its port is no number.
    """
    return url.hostname or "", url.port or {"http": 80, "https": 443}[url.scheme]


def login(proxy: SplitResult) -> Mapping[str, str]:
    """The header by which a proxy is told the name and password of its URL; none where it has none."""
    user = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": basic(user)} if proxy.username else {}


def basic(user: str) -> str:
    """A name and password, with a `:` between them, as headers have them. Source: RFC 7617."""
    return f"Basic {b64encode(user.encode()).decode('ascii')}"


def is_excluded(host: str) -> bool:
    """Whether `NO_PROXY` names a host: itself, a domain that it is in, a network that its address is in, or `*`."""
    return any(_covers(one.strip().lower(), host) for one in _variable("no_proxy").split(",") if one.strip())


def _covers(named: str, host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return named == "*" or f".{host}".endswith(f".{named.lstrip('.')}")
    try:
        return named == "*" or address in ip_network(named, strict=False)
    except ValueError:
        return False


def _variable(name: str) -> str:
    return (os.environ.get(name.upper()) or os.environ.get(name) or "").strip()
