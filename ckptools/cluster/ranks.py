"""Several ranks as a team: they meet in torch's process group, exchange values through gloo, and end together."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ckptools._version import __version__
from ckptools.cluster.environment import NEEDED, ProcessInfo, missing_variables, restarts, use_loopback
from ckptools.cluster.team import Team, working_in
from ckptools.errors import CkptoolsError, RendezvousError, UsageError, remade
from ckptools.text import few, first_line

T = TypeVar("T")

MEETING_SECONDS = 300.0
"""Seconds to wait until all ranks have joined."""

PATIENCE = 5.0
"""Seconds of waiting for the other ranks after which a line says so: silence looks like a hang."""

SILENCE = "CKPTOOLS_RANK_TIMEOUT"
"""The environment variable with the seconds after which a silent rank counts as gone, 30 by default."""

BEAT = 1.0
"""Seconds between two checks of the other ranks."""

GRACE = 1.0
"""Seconds that a rank has to fail by itself before another rank's error stops it; often all find the same."""

FAREWELL_SECONDS = 5.0
"""Seconds that a failed rank waits for the others to notice the failure and clean up."""

READING_SECONDS = 0.5
"""Seconds that one rank has to print the error before the others end."""

INTERRUPTED_EXIT = 130

ALONE = "to run it in one process where a training has set them: env -u RANK -u WORLD_SIZE ckptools ..."


@contextmanager
def joined(place: ProcessInfo, what: str, say: Callable[[str], None]) -> Iterator[Ranks]:
    """Share the work inside this context, the command `what`, with all ranks that were started with this one.

    Raises:
        UsageError: the environment lacks a variable that ranks need to meet, or ranks run different commands.
        RendezvousError: not all ranks have joined, or a rank is gone.
        SystemExit: the command failed, and another rank prints the error.
    """
    if place.missing:
        raise UsageError(None, f"{missing_variables(place.missing)}; {ALONE}")
    place.export(os.environ)
    use_loopback()
    ranks = _meet(say)
    ended: SystemExit | None = None
    try:
        all_said = ranks.gather((__version__, what))
        for rank, said in enumerate(all_said):
            for thing, first, found in zip(("ckptools", "command"), all_said[0], said, strict=True):
                if first != found:
                    text = f"{ranks.name(rank)} has another {thing} than rank 0: {found!r}, not {first!r}"
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


def _meet(say: Callable[[str], None]) -> Ranks:
    """Join the process group of all ranks."""
    text = os.environ.get(SILENCE, "30")
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) < 2:
        raise UsageError(None, f"{SILENCE} is {text!r}, must be a number of seconds, at least 2")
    rank, world_size, address, port = (os.environ[name] for name in NEEDED)
    stores: list[Store] = []

    def join() -> Ranks:
        stores.append(next(rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS)))[0])
        # torch's launcher may keep its store when it starts all ranks again, so each start has keys of its own.
        store = PrefixStore(f"start-{restarts()}", stores[0])
        # Ranks may work for hours between two exchanges; the watch thread notices a dead rank.
        forever = timedelta(days=30)
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size), timeout=forever)
        watch = dist.new_group(backend="gloo", timeout=timedelta(seconds=float(text)))
        hosts = [""] * int(world_size)
        dist.all_gather_object(hosts, socket.gethostname())
        return Ranks(store, hosts, int(rank), watch)

    joining = _in_thread(join)
    if wait([joining], PATIENCE).not_done and os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"waiting for the other ranks at {address}:{port}; gives up after {MEETING_SECONDS:g} s")
    try:
        return joining.result()
    except RuntimeError as error:
        if stores and rank != "0":  # The store is there, so rank 0 is too, and prints the same error.
            _let_another_print()
            raise SystemExit(RendezvousError.exit_code) from None
        reason = f"the {world_size} ranks did not meet at {address}:{port}: {_of_torch(error)}; {ALONE}"
        raise RendezvousError(None, reason) from error


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Call torch in another thread, because no signal can interrupt torch while it waits for other ranks."""
    called: Future[T] = Future()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as error:
            called.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return called


def _let_another_print() -> None:
    """Wait while another rank prints the error: a launcher may end all ranks as soon as the first one has ended."""
    with suppress(KeyboardInterrupt):
        time.sleep(READING_SECONDS)


def _of_torch(error: RuntimeError) -> str:
    """The message of an error of torch or gloo, without the source location before it and the guesses after it."""
    return re.sub(r"^\[\S+\] |\. This is typically .*", "", first_line(error)).rstrip(".")


class End(NamedTuple):
    """How a rank has ended: `error` is the class of its error, empty if all went well; `text` goes after its name."""

    error: str = ""
    text: str = ""


class Ranks(Team):
    """One of several ranks, in a process group of gloo.

    A thread exchanges with all other ranks, again and again, whether and how they have ended, in a process group of
    its own. So every rank soon learns of another rank's error, even while it copies. In this group gloo fails at once
    if a rank is killed, and after some time if a rank is silent.

    Attributes:
        failure: the error of another rank, for which the main thread gets a SIGTERM; None while all is well.
        speaks: whether this rank prints the result, or the error.
    """

    def __init__(self, store: Store, hosts: list[str], rank: int, watch: dist.ProcessGroup) -> None:
        self.rank, self.world_size = rank, len(hosts)
        self.failure: CkptoolsError | None = None
        self.speaks = rank == 0
        self._store, self._hosts = store, hosts
        self._ends: list[End | None] = [None] * len(hosts)
        self._end: End | None = None
        self._ended, self._noticed = threading.Event(), threading.Event()
        self._group: dist.ProcessGroup | None = watch
        self._watch = threading.Thread(target=self._watch_others, name="ckptools-watch", daemon=True)
        self._watch.start()

    def name(self, rank: int) -> str:
        """The name of a rank in a message: `rank 3 on node7`."""
        return f"rank {rank} on {self._hosts[rank]}"

    def gather(self, value: T) -> list[T]:
        """Exchange a value with all ranks, which must all call this; return the values of all, by rank.

        torch pickles the value. Ranks exchange only numbers, texts and ckptools' own records, and text from a file
        stays text: no file can decide which functions a pickle between two ranks calls.

        Raises:
            CkptoolsError: the error of another rank that failed.
        """
        found: list[T] = [value] * self.world_size
        exchange = _in_thread(lambda: dist.all_gather_object(found, value))
        while wait([exchange], 0.1).not_done and not self.failure:
            pass
        if not self.failure and exchange.exception():
            # If a connection was lost, the watch thread soon finds which rank is gone.
            self._noticed.wait(2 * FAREWELL_SECONDS)
        if self.failure:
            raise self.failure
        exchange.result()
        return found

    def end(self) -> None:
        """Wait until all ranks are done, and leave the process group."""
        self.gather(None)
        self._end_by(End(), None)
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> BaseException:
        """End with an error: tell the other ranks, let them clean up, and return the error to raise.

        Its message names this rank, unless all ranks have found the same error.
        """
        cause = (self.failure if isinstance(error, KeyboardInterrupt) else None) or error
        if isinstance(cause, CkptoolsError):
            self._end_by(End(type(cause).__name__, f": {cause}"), FAREWELL_SECONDS)
        else:
            how = "was interrupted" if isinstance(cause, KeyboardInterrupt) else f"failed: {first_line(cause)}"
            self._end_by(End(RendezvousError.__name__, f" {how}"), FAREWELL_SECONDS)
        if not self.speaks:
            _let_another_print()
        if cause is self.failure or not isinstance(cause, CkptoolsError) or len(set(self._ends)) == 1:
            return cause
        named = cause.__class__.__new__(cause.__class__, f"{self.name(self.rank)}: {cause}")
        named.__dict__.update(cause.__dict__)
        return named

    def _end_by(self, end: End, seconds: float | None) -> None:
        """Tell the others how this rank has ended, and wait at most `seconds` until they have ended too."""
        self._end = end
        self._ended.set()
        self._watch.join(seconds)

    def _watch_others(self) -> None:
        while None in self._ends and self._group:
            self._ended.wait(BEAT)
            try:
                dist.all_gather_object(self._ends, self._end, group=self._group)
            except RuntimeError as error:
                lost = _of_torch(error)
                # Other ranks notice once the connections close: when nothing refers to the group, as the error does.
                dist.destroy_process_group(self._group)
                self._group = None
            if not self._group and not self.failure and not self._end:
                self._stop(self._lost(lost))
            failures = [(rank, end) for rank, end in enumerate(self._ends) if end and end.error]
            if failures and not self.failure and not self._end:
                rank, (kind, text) = failures[0]
                text = f"{self.name(rank)}{text}"
                self._stop(remade(kind, text) or RendezvousError(None, text))

    def _lost(self, how: str) -> CkptoolsError:
        """Why an exchange failed: a rank that does not report the failure too is gone."""
        try:
            self._store.set(f"here/{self.rank}", "")
            time.sleep(FAREWELL_SECONDS)
            here = [self._store.check([f"here/{rank}"]) for rank in range(self.world_size)]
        except RuntimeError:
            self.speaks = self.rank == 1
            return RendezvousError(None, f"{self.name(0)}, or what started it, has ended: its store does not answer")
        self.speaks = self.rank == here.index(True)
        gone = [self.name(rank) for rank, is_here in enumerate(here) if not is_here]
        who = f"{few(gone) or 'a rank'} {'are' if len(gone) > 1 else 'is'} gone"
        return RendezvousError(None, f"{who}: {how}; was it killed?")

    def _stop(self, failure: CkptoolsError) -> None:
        """End this rank because another rank failed, unless it soon ends by itself."""
        self.failure = failure
        self._noticed.set()
        if not self._ended.wait(GRACE):
            # SIGTERM asks a process to end; every part of ckptools handles it well.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
