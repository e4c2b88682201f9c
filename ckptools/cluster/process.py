"""What a process sets up before it imports torch, to be one of several: threads, what is logged, which network."""

from __future__ import annotations

import ipaddress
import os
import socket


def calm_torch() -> None:
    """Prepare the environment of this process and its children before torch is imported: threads, C++ warnings."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What goes wrong there is raised too; the text that is logged has a stack of C++ frames with it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def use_loopback() -> None:
    """Let gloo stay on this machine where all ranks are: its name may lead nowhere, or behind a firewall."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and is_loopback(os.environ.get("MASTER_ADDR", "localhost")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def is_loopback(address: str) -> bool:
    """Tell whether an address is this machine's own: then all ranks are on it, and need no other network."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address) if ":" not in address else address).is_loopback
    except (OSError, ValueError):
        return False
