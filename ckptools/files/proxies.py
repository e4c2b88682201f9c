"""The proxy that the environment names for a server: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, and `NO_PROXY`.

They are read as by reqwest, the library below obstore, but for a `*` in `NO_PROXY`, which means addresses too. Source:
its documentation, and `hyper_util::client::proxy::matcher`.
"""

from __future__ import annotations

import os
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

SPOKEN = ("http", "https")
"""Schemes of proxies; one of another kind, such as `socks5`, is not used."""


def proxy_of(url: SplitResult) -> SplitResult | None:
    """The URL of the proxy that requests for a URL go through; None where they go straight to its host."""
    named = _variable(f"{url.scheme}_proxy") or _variable("all_proxy")
    found = urlsplit(named if "://" in named else f"http://{named}")
    if found.scheme not in SPOKEN or not found.hostname or is_excluded(url.hostname or ""):
        return None
    return found


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
