"""Several ranks as a team: they meet by torch's process group, exchange values by gloo, and end together."""

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
"""Seconds after which a line says that a rank waits for the others: silence looks like a hang."""

SILENCE = "CKPTOOLS_RANK_TIMEOUT"
"""The variable with the seconds after which a silent rank counts as gone, 30 by default."""

BEAT = 1.0
"""Seconds between two looks at the other ranks."""

GRACE = 1.0
"""Seconds in which a rank may find by itself what is wrong: often all ranks find the same."""

FAREWELL_SECONDS = 5.0
"""Seconds that a rank waits after a failure until the others have noticed it, or cleaned up."""

READING_SECONDS = 0.5
"""Seconds that one rank has to print before the others end."""

INTERRUPTED_EXIT = 130

ALONE = "to run it in one process where a training has set them: env -u RANK -u WORLD_SIZE ckptools ..."


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
        # torch's launcher may keep its store when it starts all ranks again.
        store = PrefixStore(f"start-{restarts()}", stores[0])
        # Ranks may work for hours between two exchanges; the watch notices a dead one.
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
        if stores and rank != "0":  # Rank 0 has come, and finds the same.
            _let_another_print()
            raise SystemExit(RendezvousError.exit_code) from None
        reason = f"the {world_size} ranks did not meet at {address}:{port}: {_of_torch(error)}; {ALONE}"
        raise RendezvousError(None, reason) from error


def _in_thread(call: Callable[[], T]) -> Future[T]:
    """Call torch in a thread: no signal interrupts it while it waits for other ranks."""
    called: Future[T] = Future()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as error:
            called.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return called


def _let_another_print() -> None:
    """Wait until another rank has printed the error; its launcher ends this one as soon as that has ended."""
    with suppress(KeyboardInterrupt):
        time.sleep(READING_SECONDS)


def _of_torch(error: RuntimeError) -> str:
    """An error of torch's or gloo's, without the place in gloo's source before it, and its guesses after it."""
    return re.sub(r"^\[\S+\] |\. This is typically .*", "", first_line(error)).rstrip(".")


class End(NamedTuple):
    """How a rank has ended: well, if `error`, the name of a class, is empty; `text` goes after the rank's name."""

    error: str = ""
    text: str = ""


class Ranks(Team):
    """One of several ranks, in a process group of gloo.

    A thread asks all others, again and again, how they have ended, in a group of its own. So every rank soon has an
    error of any other, also while it copies; and gloo fails there at once if a rank is killed, and after some time if
    it is silent.

    Attributes:
        failure: of another rank; None while all is well. The main thread gets a SIGTERM then.
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
        """Exchange a value with all ranks, each of which calls this as often; returns those of all, by rank.

        torch pickles it. What ranks exchange are numbers, texts and records of our own making, and text from a file
        stays text: no file has a say in what a pickle between two of our processes calls.

        Raises:
            CkptoolsError: another rank failed, and this is its error.
        """
        found: list[T] = [value] * self.world_size
        exchange = _in_thread(lambda: dist.all_gather_object(found, value))
        while wait([exchange], 0.1).not_done and not self.failure:
            pass
        if not self.failure and exchange.exception():
            # Where a connection was lost, the watch soon finds to which rank.
            self._noticed.wait(2 * FAREWELL_SECONDS)
        if self.failure:
            raise self.failure
        exchange.result()
        return found

    def end(self) -> None:
        """End well, together with all others."""
        self.gather(None)
        self._end_by(End(), None)
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> BaseException:
        """End by an error: tell the others, let them clean up, and return the error that counts.

        It names this rank, unless all ranks have found the same.
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
        """Say how this rank has ended, and wait until all others have ended too."""
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
                # The connections close when nothing holds the group, as the error does: so others notice it too.
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
        """Why an exchange failed: the ranks that do not notice it too are gone."""
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
        """End this rank by another one's failure, unless it soon ends by itself."""
        self.failure = failure
        self._noticed.set()
        if not self._ended.wait(GRACE):
            # As if the process was asked to end, which every part of it handles well.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
