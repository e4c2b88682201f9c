"""Several ranks as a team: they meet by torch's process group, exchange values by gloo, and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ckptools._version import __version__
from ckptools.cluster.environment import NEEDED, ProcessInfo, missing_variables, restarts, use_loopback
from ckptools.cluster.team import Team, working_in
from ckptools.errors import CkptoolsError, RendezvousError, UsageError, remade
from ckptools.text import first_line

T = TypeVar("T")

MEETING_SECONDS = 300.0
"""Seconds to wait until all ranks have joined."""

PATIENCE = 5.0
"""Seconds after which a line says that a rank waits for the others: silence looks like a hang."""

SILENCE_SECONDS = 30.0
"""Seconds after which a silent rank counts as gone; the variable `SILENCE_VARIABLE` sets others."""

SILENCE_VARIABLE = "CKPTOOLS_RANK_TIMEOUT"

BEAT = 1.0
"""Seconds between two looks at the other ranks."""

GRACE = 1.0
"""Seconds in which a rank may find by itself what is wrong: often all ranks find the same."""

FAREWELL_SECONDS = 5.0
"""Seconds that a rank waits after a failure until the others have cleaned up."""

READING_SECONDS = 0.5
"""Seconds that one rank has to print before the others end: their launcher may kill it as soon as one of them ends."""

ALONE = "to run it in one process where a training has set them: env -u RANK -u WORLD_SIZE ckptools ..."

INTERRUPTED_EXIT = 130

FOREVER = timedelta(days=30)
"""A limit for gloo that is never reached: ranks may work for hours between two exchanges."""


@contextmanager
def joined(place: ProcessInfo, what: str, say: Callable[[str], None]) -> Iterator[Ranks]:
    """Share the work inside this context, the command `what`, with all ranks that were started with this one.

    Raises:
        UsageError: the environment lacks what ranks need to meet, or they run different things.
        RendezvousError: not all ranks have come, or one is gone.
        SystemExit: another rank prints the error.
    """
    if place.missing:
        raise UsageError(None, f"{missing_variables(place.missing)}; {ALONE}")
    place.export(os.environ)
    use_loopback()
    silence = silence_seconds()
    store, hosts = _meet([socket.gethostname(), __version__, what], say)
    ranks = Ranks(store, [host for host, *_ in hosts], dist.get_rank(), silence)
    ended: SystemExit | None = None
    try:
        for other, (_, *said) in enumerate(hosts):
            for thing, first, found in zip(("ckptools", "command"), hosts[0][1:], said, strict=True):
                if first != found:
                    text = f"{ranks.name(other)} has another {thing} than rank 0: {found!r}, not {first!r}"
                    raise UsageError(None, f"{text}; start the same on every node")
        with working_in(ranks):
            try:
                yield ranks
            except SystemExit as done:
                ended = done
        ranks.end()
    except BaseException as error:
        cause = ranks.failed(error)
        if not ranks.speaks and isinstance(cause, (CkptoolsError, KeyboardInterrupt)):
            raise SystemExit(getattr(cause, "exit_code", INTERRUPTED_EXIT)) from None
        raise cause from None
    if ended:
        raise ended


def _meet(own: list[str], say: Callable[[str], None]) -> tuple[Store, list[list[str]]]:
    """Join the process group; return a store of this start's own, and what each rank says of itself."""
    rank, world_size, address, port = (os.environ[name] for name in NEEDED)
    stores: list[Store] = []

    def join() -> list[list[str]]:
        stores.append(next(rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS)))[0])
        # torch's launcher may keep its store when it starts all ranks again.
        store = PrefixStore(f"start-{restarts()}", stores[0])
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=FOREVER)
        said = [own] * int(world_size)
        dist.all_gather_object(said, own)
        return said

    def remind() -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"waiting for the other ranks at {address}:{port}; gives up after {MEETING_SECONDS:g} s")

    try:
        said = interruptible(join, remind)
    except RuntimeError as error:
        if stores and rank != "0":  # Rank 0 has come, and finds the same.
            time.sleep(READING_SECONDS)
            raise SystemExit(RendezvousError.exit_code) from None
        text = f"the {world_size} ranks did not meet at {address}:{port}: {first_line(error)}; {ALONE}"
        raise RendezvousError(None, text) from error
    return PrefixStore(f"ckptools-{restarts()}", stores[0]), said


def interruptible(call: Callable[[], T], remind: Callable[[], None]) -> T:
    """Call torch in a thread, since no signal interrupts it while it waits; `remind` after some seconds."""
    called: Future[T] = Future()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as error:
            called.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if wait([called], PATIENCE).not_done:
        remind()
    return called.result()


def silence_seconds() -> float:
    """After how many seconds without a sign a rank counts as gone.

    Raises:
        UsageError: the environment has something else than a number.
    """
    text = os.environ.get(SILENCE_VARIABLE, str(SILENCE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds >= 2:
        raise UsageError(None, f"{SILENCE_VARIABLE} is {text!r}, must be a number of seconds, at least 2")
    return seconds


class Ranks(Team):
    """One of several ranks, in a process group of gloo.

    gloo notices a lost connection only while it exchanges something, and a machine without power never. So a thread
    watches the others at torch's store. Every rank counts its own beats there and looks at those of the next rank: of
    several dead ranks at least one follows a living one, which reports it to all others.

    Attributes:
        failure: of another rank; None while all is well. The main thread gets a SIGTERM then.
        speaks: whether this rank prints the result, or the error.
    """

    def __init__(self, store: Store, hosts: list[str], rank: int, silence: float) -> None:
        self.rank, self.world_size = rank, len(hosts)
        self.failure: CkptoolsError | None = None
        self.speaks = rank == 0
        self._store, self._hosts, self._silence = store, hosts, silence
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_others, name="ckptools-watch", daemon=True)
        self._watch.start()

    def name(self, rank: int) -> str:
        """The name of a rank in a message: `rank 3 on node7`."""
        return f"rank {rank} on {self._hosts[rank]}"

    def gather(self, value: T) -> list[T]:
        """Exchange a value with all ranks, each of which calls this as often; returns those of all, by rank.

        torch pickles it. What ranks exchange are numbers, texts and records of our own making, and text from a file
        stays text: no file has a say in what a pickle between two of our processes calls.

        Raises:
            CkptoolsError: another rank failed, and this is its error.
        """
        found: list[T] = [value] * self.world_size
        try:
            all_here = dist.barrier(async_op=True)
            while not all_here.is_completed():  # not `wait`, which no signal interrupts
                if self.failure:
                    raise self.failure
                time.sleep(0.002)
            all_here.wait()
            dist.all_gather_object(found, value)
        except RuntimeError as error:
            deadline = time.monotonic() + self._silence + 5
            while not self.failure and time.monotonic() < deadline:
                time.sleep(0.1)  # The watch finds whose connection it was.
            raise self.failure or RendezvousError(None, f"lost the other ranks: {first_line(error)}") from error
        return found

    def end(self) -> None:
        """End well, together with all others."""
        self.gather(None)
        self._ended.set()
        self._watch.join()
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> BaseException:
        """End by an error: report it, let the others clean up, and return the error that counts.

        It names this rank, unless all ranks have found the same.
        """
        self._ended.set()
        cause = (self.failure if isinstance(error, KeyboardInterrupt) else None) or error
        named = cause
        if isinstance(cause, CkptoolsError) and cause is not self.failure:
            named = cause.__class__.__new__(cause.__class__, f"{self.name(self.rank)}: {cause}")
            named.__dict__.update(cause.__dict__)
        try:
            first = self._report(named)
            self._store.set(f"cleaned/{self.rank}", str(cause))
            alike = self._have_all("cleaned") and len(set(map(self._store.get, self._keys("cleaned")))) == 1
            # Where rank 0 is gone, the rank that failed first speaks.
            self.speaks = self.rank == (0 if self._store.check(["cleaned/0"]) else first)
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:  # which may host the store
                self._have_all("left")
        except RuntimeError:
            # The store is gone, and most likely rank 0 with it.
            alike, self.speaks = False, self.rank <= 1
        if not self.speaks:
            time.sleep(READING_SECONDS)
        return cause if alike else named

    def _keys(self, step: str) -> list[str]:
        return [f"{step}/{rank}" for rank in range(self.world_size)]

    def _have_all(self, step: str) -> bool:
        """Wait until all ranks have set a key, or the time is over."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while not (found := self._store.check(self._keys(step))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _report(self, error: BaseException) -> int:
        """Report an error to all ranks, unless one has reported another; return the rank that was the first."""
        if not isinstance(error, CkptoolsError):
            how = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {first_line(error)}"
            error = RendezvousError(None, f"{self.name(self.rank)} {how}")
        own = json.dumps([self.rank, type(error).__name__, str(error)])
        return int(json.loads(self._store.compare_set("failure", "", own))[0])

    def _watch_others(self) -> None:
        neighbour = (self.rank + 1) % self.world_size
        seen, heard = 0, time.monotonic()
        while not (self.failure or self._ended.wait(BEAT)):
            try:
                self._store.add(f"beats/{self.rank}", 1)
                beats = self._store.add(f"beats/{neighbour}", 0)
                if beats != seen:
                    seen, heard = beats, time.monotonic()
                if self._store.check(["failure"]):
                    _, kind, text = json.loads(self._store.get("failure"))
                    self.failure = remade(kind, text) or RendezvousError(None, text)
                elif time.monotonic() > heard + self._silence:
                    text = f"no sign of it for {self._silence:g} s; was it killed?"
                    self.failure = RendezvousError(None, f"{self.name(neighbour)} is gone: {text}")
            except RuntimeError:
                text = f"{self.name(0)}, or what started it, has ended: its store does not answer"
                self.failure = RendezvousError(None, text)
        if self.failure and not self._ended.wait(GRACE):
            # As if the process was asked to end, which every part of it handles well.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
