"""The store at which nodes and ranks meet: hosted here, or reached where another process hosts it.

It is torch's `TCPStore`, a small server for keys and values. Whatever else has its port is told apart from it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptools.cluster.waiting import Say, Wait, say_nothing
from ckptools.errors import RendezvousError
from ckptools.text import first_line

# How long to wait for an answer from something that may not be a store.
_ANSWER = 10.0

_MARK = "ckptools"


@dataclass(frozen=True)
class MeetingPlace:
    """A store, and whether this process hosts it."""

    store: TCPStore
    hosted: bool


def open_store(address: str, port: int, hosts: bool | None, timeout: float, say: Say = say_nothing) -> MeetingPlace:
    """Host the store at an address, or reach it there.

    Args:
        address: where it is.
        port: 0 takes a free one, where this process hosts it.
        hosts: whether this process does; None: whoever is first of those at that address.
        timeout: seconds.
        say: is told that nobody hosts it yet.

    Raises:
        RendezvousError: the port is taken by something else, or nobody can be reached there in time.
    """
    if not hosts and not (hosts is None and _is_here(address)):
        _reach(address, port, timeout, say)
        return MeetingPlace(_join(address, port, timeout), hosted=False)
    try:
        store = _store(address, port, timeout, hosts=True)
    except RuntimeError as error:
        if "listen" in str(error):
            return MeetingPlace(_join_other(address, port, timeout), hosted=False)
        text = (
            f"cannot host the rendezvous at {address}:{port}; is that an address of this machine? {first_line(error)}"
        )
        raise RendezvousError(None, text) from error
    store.set(_MARK, "")
    return MeetingPlace(store, hosted=True)


def _client(address: str, port: int, timeout: float) -> TCPStore:
    """Open a store that another process hosts.

    Raises:
        RuntimeError: what is there is no store.
    """
    made: list[TCPStore] = []

    def make() -> None:
        with suppress(RuntimeError):
            made.append(_store(address, port, timeout, hosts=False))

    # torch waits without end for the first answer. The thread stays behind if there is none.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(timeout)
    if not made:
        raise RuntimeError(f"no store answers at {address}:{port}")
    return made[0]


def _store(address: str, port: int, timeout: float, hosts: bool) -> TCPStore:
    # Several stores of one process may share the server: torch's own launcher opens one more at this port.
    return TCPStore(
        address, port, is_master=hosts, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=timeout)
    )


def _is_here(address: str) -> bool:
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True


def _join_other(address: str, port: int, timeout: float) -> TCPStore:
    """Find out who has the port that was to be ours; if it is another node of a run, the numbers will tell."""
    with suppress(RuntimeError):
        store = _client(address, port, min(timeout, _ANSWER))
        if store.check([_MARK]):
            return store
    raise RendezvousError(None, f"port {port} of {address} is taken by something else; choose another")


def _reach(address: str, port: int, timeout: float, say: Say) -> None:
    """Wait until somebody listens there. Not left to torch, which cannot be interrupted meanwhile."""
    wait = Wait(timeout, say)
    while True:
        try:
            socket.create_connection((address, port), timeout=min(timeout, 5)).close()
        except OSError as error:
            if wait.is_over():
                why = (error.strerror or str(error)).lower()
                text = f"{address}:{port} was not reachable within {timeout:g} s ({why}); is number 0 started there?"
                raise RendezvousError(None, text) from error
            wait.pause(lambda: f"number 0, which nobody is yet at {address}:{port}")
        else:
            return


def _join(address: str, port: int, timeout: float) -> TCPStore:
    try:
        return _client(address, port, timeout)
    except RuntimeError as error:
        text = f"{address}:{port} answers, but not as torch's rendezvous does: something else has that port"
        raise RendezvousError(None, text) from error
