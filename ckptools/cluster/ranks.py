"""Several ranks as a team: they meet at torch's store, exchange values by gloo, watch each other and end together.

All wait for all at the store, where a failure is seen at once, before gloo moves the values.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ckptools._version import __version__
from ckptools.cluster.environment import ProcessInfo, missing_variables, use_loopback
from ckptools.cluster.rendezvous import Meeting, meet_ranks
from ckptools.cluster.team import Team, is_named, named, working_in
from ckptools.cluster.waiting import Say
from ckptools.errors import CkptoolsError, RendezvousError, UsageError
from ckptools.text import first_line

T = TypeVar("T")

MEETING_SECONDS = 300.0
"""Seconds to wait until all ranks have joined."""

SILENCE_SECONDS = 30.0
"""Seconds after which a silent rank counts as gone; the variable `SILENCE_VARIABLE` sets others."""

SILENCE_VARIABLE = "CKPTOOLS_RANK_TIMEOUT"

FAREWELL_SECONDS = 5.0
"""Seconds that a rank waits after a failure until the others have cleaned up."""

READING_SECONDS = 0.5
"""Seconds that rank 0 has to print before the others end: their launcher may kill it as soon as one of them ends."""

ALONE = "to run it in one process where a training has set them: env -u RANK -u WORLD_SIZE ckptools ..."

FOREVER = timedelta(days=30)
"""A limit for gloo that is never reached: the watch notices dead ranks."""


class Ranks(Team):
    """One of several ranks.

    Attributes:
        speaks: whether this rank prints the result.
    """

    def __init__(self, meeting: Meeting, hosts: list[str], silence: float) -> None:
        self.rank, self.world_size = meeting.number, meeting.count
        self.speaks = self.rank == 0
        self._meeting, self._hosts, self._steps = meeting, hosts, 0
        meeting.call = self.name
        self._watch = Watch(meeting, silence)
        self._watch.start()

    def name(self, rank: int) -> str:
        """The name of a rank in a message: `rank 3 on node7`."""
        return f"rank {rank} on {self._hosts[rank]}"

    def gather(self, value: T) -> list[T]:
        """Exchange a value with all ranks, each of which calls this as often; returns those of all, by rank.

        Raises:
            CkptoolsError: another rank failed, and this is its error.
        """
        self._wait_for_all()
        found: list[T] = [value] * self.world_size
        try:
            dist.all_gather_object(found, value)
        except RuntimeError as error:
            raise self._cause(error) from error
        return found

    def _wait_for_all(self) -> None:
        self._steps += 1
        key, pause = f"steps/{self._steps}", 0.002
        try:
            self._meeting.add(key, 1)
            while self._meeting.add(key, 0) < self.world_size:
                if self._watch.failure is not None:
                    raise self._watch.failure
                time.sleep(pause)
                pause = min(0.2, pause * 1.2)
        except RuntimeError as error:
            raise self._cause(error) from error

    def _cause(self, error: RuntimeError) -> CkptoolsError:
        """Why a connection was lost, as the watch finds it."""
        deadline = time.monotonic() + self._watch.silence + 5
        while self._watch.failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._watch.failure or RendezvousError(None, f"lost the other ranks: {first_line(error)}")

    def end(self) -> None:
        """End well, together with all others."""
        self._wait_for_all()
        self._watch.stop()
        self._watch.join()
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> BaseException:
        """End by an error: report it, let the others clean up, and return the error that counts."""
        self._watch.stop()
        cause = (self._watch.failure if isinstance(error, KeyboardInterrupt) else None) or error
        reported = cause
        if isinstance(cause, CkptoolsError) and cause is not self._watch.failure and not is_named(cause):
            reported = named(cause, self.name(self.rank))
        try:
            self._meeting.fail(reported)
            self._meeting.add("cleaned", 1)
            if self.rank == 0:
                self._meeting.add("spoken", 1)
            self._farewell()
        except (RuntimeError, CkptoolsError):
            # The store is gone, and most likely rank 0 with it.
            self.speaks = self.rank <= 1
        return cause

    def _farewell(self) -> None:
        """Wait until all have cleaned up; where rank 0 is gone, the one that failed first speaks."""
        self.speaks = self.speaks or not self._meeting.reported
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._meeting.add("cleaned", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._meeting.add("spoken", 0):
            self.speaks = self.rank == 0
        if not self.speaks:
            time.sleep(READING_SECONDS)


@contextmanager
def joined(place: ProcessInfo, what: str, say: Say) -> Iterator[Ranks]:
    """Share the work inside this context, the command `what`, with all ranks that were started with this one.

    Raises:
        UsageError: the environment lacks what ranks need to meet, or they run different things.
        RendezvousError: not all ranks have come, or one is gone.
    """
    if place.missing:
        raise UsageError(None, f"{missing_variables(place.missing)}; {ALONE}")
    place.export(os.environ)
    use_loopback()
    ended: list[BaseException] = []
    silence = silence_seconds()
    with meet_ranks(MEETING_SECONDS, say=say) as meeting:
        ranks = Ranks(meeting, _hosts(meeting, what), silence)
        try:
            _connect(meeting)
            with working_in(ranks):
                yield ranks
            ranks.end()
        except SystemExit as done:
            ranks.end()
            ended.append(done)
        except BaseException as error:
            ended.append(ranks.failed(error))
    if ended:
        raise ended[0]


def _hosts(meeting: Meeting, what: str) -> list[str]:
    """The host of every rank, once all have come.

    Raises:
        UsageError: they are to do different things.
        SystemExit: a rank did not come, which another one reports.
    """
    own = json.dumps([socket.gethostname(), __version__, what])
    try:
        all_said = [json.loads(text) for text in meeting.gather("hello", own)]
    except CkptoolsError as error:
        if meeting.reported:
            raise SystemExit(error.exit_code) from None
        if isinstance(error, RendezvousError):
            raise RendezvousError(None, f"{error}; {ALONE}") from None
        raise
    for rank, (host, *said) in enumerate(all_said):
        for thing, first, other in zip(("ckptools", "command"), all_said[0][1:], said, strict=True):
            if first != other:
                text = f"rank {rank} on {host} has another {thing} than rank 0: {other!r}, not {first!r}"
                raise UsageError(None, f"{text}; start the same on every node")
    return [host for host, *_ in all_said]


def _connect(meeting: Meeting) -> None:
    try:
        dist.init_process_group(
            "gloo", store=meeting.store("gloo"), rank=meeting.number, world_size=meeting.count, timeout=FOREVER
        )
    except RuntimeError as error:
        text = f"{meeting.call(meeting.number)} cannot connect to the others by gloo: {first_line(error)}"
        raise RendezvousError(None, text) from error


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


# -- watch -------------------------------------------------------------------------------------------------------------


BEAT = 1.0
"""Seconds between two looks at the others."""

GRACE = 1.0
"""Seconds in which this rank may find by itself what is wrong: often all ranks find the same."""


class Watch(threading.Thread):
    """Watches the other ranks until `stop`. The main thread gets a KeyboardInterrupt when one of them has failed.

    Every rank counts its own beats at the store and watches the count of the next rank. Of several dead ranks at least
    one follows a living one, which reports it to all others.

    Attributes:
        failure: of another rank; None while all is well. A rank fails that is silent for `silence` seconds.
    """

    def __init__(self, meeting: Meeting, silence: float) -> None:
        super().__init__(name="ckptools-watch", daemon=True)
        self.failure: CkptoolsError | None = None
        self._meeting, self.silence = meeting, silence
        self._next = (meeting.number + 1) % meeting.count
        self._ended = threading.Event()
        self._beats, self._heard = 0, time.monotonic()

    def run(self) -> None:
        """Look at the others every `BEAT` seconds."""
        while not self._ended.wait(BEAT):
            failure = self._look()
            if failure is None:
                continue
            self.failure = failure
            if not self._ended.wait(GRACE):
                # As if the process was asked to end, which every part of it handles well.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            return

    def _look(self) -> CkptoolsError | None:
        meeting = self._meeting
        try:
            meeting.add(f"beats/{meeting.number}", 1)
            beats = meeting.add(f"beats/{self._next}", 0)
            if beats != self._beats:
                self._beats, self._heard = beats, time.monotonic()
            elif time.monotonic() > self._heard + self.silence:
                who = meeting.call(self._next)
                text = f"{who} is gone: no sign of it for {self.silence:g} s; was it killed?"
                meeting.report(RendezvousError(None, text))
            return meeting.failure()
        except RuntimeError:
            return RendezvousError(None, f"{meeting.call(0)}, or what started it, has ended: its store does not answer")
        except CkptoolsError as error:
            return error

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
