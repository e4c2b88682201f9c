"""The store at which nodes and ranks meet: hosted here, or reached where another process hosts it.

It is torch's `TCPStore`, a small server for keys and values. Another program on its port is recognised.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ckptools.cluster.waiting import PAUSE, Say, Wait, say_nothing
from ckptools.errors import RendezvousError
from ckptools.text import first_line

# Seconds to wait for an answer from something that may not be a store.
_ANSWER = 10.0

_MARK = "ckptools"


class MeetingPlace(NamedTuple):
    """A store, and whether this process hosts it."""

    store: TCPStore
    hosted: bool


def open_store(address: str, port: int, hosts: bool | None, timeout: float, say: Say = say_nothing) -> MeetingPlace:
    """Host the store at an address, or reach it there.

    Where this process hosts it, port 0 takes a free one. With `hosts` None the first process at that address does.

    Raises:
        RendezvousError: the port is taken by something else, or no host can be reached there in time.
    """
    if not hosts and not (hosts is None and _is_here(address)):
        _reach(address, port, timeout, say)
        try:
            return MeetingPlace(_open(address, port, timeout, hosts=False), hosted=False)
        except RuntimeError as error:
            text = f"{address}:{port} answers, but not as torch's rendezvous does: something else has that port"
            raise RendezvousError(None, text) from error
    try:
        store = _open(address, port, timeout, hosts=True, say=say)
    except RuntimeError as error:
        if "listen" in str(error):
            return MeetingPlace(_join_other(address, port, timeout), hosted=False)
        why = _obstacle(address, port) or first_line(error)
        text = f"cannot host the rendezvous at {address}:{port} ({why}); is that an address of this machine?"
        raise RendezvousError(None, text) from error
    store.set(_MARK, "")
    return MeetingPlace(store, hosted=True)


def _open(address: str, port: int, timeout: float, hosts: bool, say: Say = say_nothing) -> TCPStore:
    """Open a store in a thread: torch cannot be interrupted, and waits forever for an answer from what is no store.

    Raises:
        RuntimeError: torch could not, or there was no answer in time; then the thread stays behind.
    """
    opened: Future[TCPStore] = Future()

    def make() -> None:
        # Several stores of one process may share the server: torch's own launcher opens one more at this port.
        seconds = timedelta(seconds=timeout)
        try:
            opened.set_result(TCPStore(address, port, None, hosts, seconds, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            opened.set_exception(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(PAUSE)
    wait = Wait(timeout, say)
    while thread.is_alive():
        if wait.is_over():
            raise RuntimeError(f"no store answers within {timeout:g} s")
        wait.pause(lambda: _with_obstacle("an answer from", address, port))
    return opened.result()


def _obstacle(address: str, port: int) -> str:
    """Why nothing answers at an address, in some words; "" where something does."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _with_obstacle(what: str, address: str, port: int) -> str:
    why = _obstacle(address, port)
    return f"{what} {address}:{port}" + (f" ({why})" if why else "")


def _is_here(address: str) -> bool:
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True


def _join_other(address: str, port: int, timeout: float) -> TCPStore:
    """Join the store that has the port already, which another node of the run may host; numbers are checked later."""
    with suppress(RuntimeError):
        store = _open(address, port, min(timeout, _ANSWER), hosts=False)
        if store.check([_MARK]):
            return store
    raise RendezvousError(None, f"port {port} of {address} is taken by something else; choose another")


def _reach(address: str, port: int, timeout: float, say: Say) -> None:
    """Wait until something listens there. Not left to torch, which cannot be interrupted meanwhile."""
    wait = Wait(timeout, say)
    while why := _obstacle(address, port):
        if wait.is_over():
            text = f"{address}:{port} was not reachable within {timeout:g} s ({why}); is number 0 started there?"
            raise RendezvousError(None, text)
        wait.pause(lambda: _with_obstacle("number 0, which is not yet at", address, port))
