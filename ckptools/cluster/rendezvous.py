"""The rendezvous before the work: all ranks have come and want the same, or one line says what is wrong.

Nodes and ranks meet at a store of torch's, a small server for keys and values that number 0 hosts (for ranks, the
launcher on its node). Each registers there and waits until all have.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ckptools.cluster.environment import NEEDED, restarts
from ckptools.cluster.waiting import PAUSE, Say, Wait, say_nothing
from ckptools.errors import CkptoolsError, RendezvousError, remade
from ckptools.text import few, first_line

# -- the store at which nodes and ranks meet: hosted here, or reached where another process hosts it -------------------
# It is torch's `TCPStore`, a small server for keys and values. Another program on its port is recognised.


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


# Seconds that the host of the store waits at the end until the others have read the error.
_FAREWELL = 5.0

# Seconds to wait for another member to report why it failed.
_EXPLANATION = 15.0


def meet_ranks(timeout: float, per_node: Sequence[int] = (), say: Say = say_nothing) -> Meeting:
    """Join the meeting of all ranks, at the address that torch will use too, which the environment has.

    Ranks are called by their nodes where `per_node`, how many ranks each has, is known. One rank of several that share
    a terminal says for whom it waits.

    Raises:
        RendezvousError: it cannot be reached, or this rank is there already.
    """
    rank, world_size, address, port = (os.environ[name] for name in NEEDED)
    launcher_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == "0" and not launcher_hosts
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    place = open_store(address, int(port), hosts, timeout, say if first else say_nothing)
    store = PrefixStore(f"ckptools-{restarts()}", place.store)
    call = functools.partial(name_rank, per_node=per_node)
    at = f"{address}:{port}"
    return Meeting(store, "rank", int(rank), int(world_size), timeout, hosts=place.hosted, name=call, at=at, say=say)


def name_rank(rank: int, per_node: Sequence[int]) -> str:
    """Call a rank by its number, and by that of its node where it is known: `rank 2 (node 1)`."""
    ends = list(itertools.accumulate(per_node))
    known = len(ends) > 1 and rank < ends[-1]
    return f"rank {rank} (node {bisect.bisect(ends, rank)})" if known else f"rank {rank}"


class Meeting:
    """All nodes, or all ranks, of one run at a store.

    Use it as a context: a member that leaves it by an error reports that, and the others fail with the same error.

    Attributes:
        number: of this member.
        count: of all.
        reported: whether another member raised this error first and prints it.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        number: int | None,
        count: int,
        timeout: float,
        *,
        hosts: bool = False,
        name: Callable[[int], str] | None = None,
        at: str = "",
        say: Say = say_nothing,
    ) -> None:
        """Come to a meeting of `count` members, who must come within `timeout` seconds.

        A member's `role` is `node` or `rank`; no `number` takes the next that is free. Keys of other meetings at the
        store have other prefixes. A process that hosts the store, at an address that messages name, leaves last.

        Raises:
            RendezvousError: the number is taken already, or all are.
        """
        self.role, self.count, self.timeout = role, count, timeout
        self.reported = False
        self._at, self._say = at, say
        self._store = PrefixStore(f"{role}s", store)
        self._hosts = hosts
        self.call = name or (lambda number: f"{role} {number}")
        self.number = self._store.add("arrivals", 1) - 1 if number is None else number
        try:
            self._claim()
        except CkptoolsError as error:
            # An extra member must not stop those that train already.
            if not self._has("begun"):
                self.fail(error)
            self._leave()
            raise

    def _claim(self) -> None:
        self._store.add("came", 1)
        if self.number >= self.count:
            raise RendezvousError(None, f"{self.number + 1} {self.role}s came, but there are to be {self.count}")
        here = socket.gethostname()
        if self._store.add(f"claims/{self.number}", 1) > 1:
            self._await("host", [self.number])
            other = self._store.get(f"host/{self.number}").decode()
            own = "node rank" if self.role == "node" else "rank"
            text = f"{own} {self.number} is used twice, on {other} and again on {here}; each {self.role} needs its own"
            raise RendezvousError(None, text)
        self._store.set(f"host/{self.number}", here)

    def gather(self, step: str, value: str = "") -> list[str]:
        """Exchange a text with all others; returns those of all, by number.

        Raises:
            RendezvousError: a member did not come in time.
            CkptoolsError: another member failed, and this is its error.
        """
        self._store.set(f"{step}/{self.number}", value)
        self._await(step, range(self.count))
        self._store.set("begun", "")
        return [self._store.get(f"{step}/{number}").decode() for number in range(self.count)]

    def add(self, key: str, number: int) -> int:
        """Add to a counter that all share; return what it is now."""
        return int(self._store.add(key, number))

    def store(self, name: str) -> Store:
        """A part of the store for something else that all members do together."""
        return PrefixStore(name, self._store)

    def failure(self) -> CkptoolsError | None:
        """The error of the member that failed first; None while all is well."""
        if not self._has("failure"):
            return None
        kind, message, number = json.loads(self._store.get("failure"))
        self.reported = number != self.number
        return remade(kind, message) or RendezvousError(None, message)

    def _await(self, step: str, numbers: range | list[int]) -> None:
        wait: Wait | None = None
        while missing := [number for number in numbers if not self._has(f"{step}/{number}")]:
            if failure := self.failure():
                raise failure
            wait = wait or Wait(self.timeout, self._say)
            if wait.is_over():
                who = ", ".join(map(self.call, missing))
                text = f"{self._came(missing)}; {who} did not within {self.timeout:g} s"
                raise self.report(RendezvousError(None, text))
            wait.pause(functools.partial(self._waited_for, missing))

    def _waited_for(self, missing: list[int]) -> str:
        """For whom this member waits; every node says so, and of ranks, which share a terminal, the first."""
        if self.role == "rank" and not set(missing).issuperset(range(self.number)):
            return ""
        who, at = few(list(map(self.call, missing))), f" at {self._at}" if self._at else ""
        return f"{who}{at} ({self._came(missing)})"

    def _came(self, missing: list[int]) -> str:
        return f"{self.count - len(missing)} of {self.count} {self.role}s came"

    def cause(self, error: Exception) -> Exception:
        """The error that another member reports within some seconds, or that it has left; else this one.

        For a member that only notices a lost connection.
        """
        deadline = time.monotonic() + _EXPLANATION
        try:
            while self.count > 1 and time.monotonic() < deadline:
                if failure := self.failure():
                    return failure
                time.sleep(PAUSE)
        except CkptoolsError as left:
            return left
        return error

    def _has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError as error:
            raise RendezvousError(None, f"{self.call(0)} has left: its rendezvous no longer answers") from error

    def report(self, error: CkptoolsError) -> CkptoolsError:
        """Report an error to all members; returns the one that another member reported first, if so."""
        own = json.dumps([type(error).__name__, str(error), self.number])
        first = self._store.compare_set("failure", "", own).decode()
        return error if first == own else self.failure() or error

    def fail(self, error: BaseException) -> None:
        """Report an error of any kind, unless another member has reported one already."""
        if not isinstance(error, CkptoolsError):
            how = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {first_line(error)}"
            error = RendezvousError(None, f"{self.call(self.number)} {how}")
        self.report(error)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Where the store is gone, no member is left to read the report.
        with suppress(RuntimeError, CkptoolsError):
            if error is not None:
                self.fail(error)
            self._leave()

    def _leave(self) -> None:
        """Leave; the host of the store waits until the others have read what was reported."""
        left = self._store.add("left", 1)
        deadline = time.monotonic() + _FAREWELL
        while self._hosts and left < self._store.add("came", 0) and time.monotonic() < deadline:
            time.sleep(PAUSE)
            left = self._store.add("left", 0)
