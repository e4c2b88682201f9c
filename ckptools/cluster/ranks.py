"""Several ranks as a team: they meet at torch's store, exchange values by gloo, and end together.

Everybody waits for everybody at the store, where a failure is seen at once, and only then gloo moves the values.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ckptools._version import __version__
from ckptools.cluster.environment import Place, missing_variables
from ckptools.cluster.process import use_loopback
from ckptools.cluster.rendezvous import Meeting, meet_ranks
from ckptools.cluster.team import Team, is_named, named, working_in
from ckptools.cluster.waiting import Say
from ckptools.cluster.watch import Watch
from ckptools.errors import CkptoolsError, RendezvousError, UsageError
from ckptools.text import first_line

T = TypeVar("T")

MEETING_SECONDS = 300.0
"""In which all ranks must have come."""

SILENCE_SECONDS = 30.0
"""After which a rank of which nothing is heard counts as gone; `SILENCE_VARIABLE` says otherwise."""

SILENCE_VARIABLE = "CKPTOOLS_RANK_TIMEOUT"

FAREWELL_SECONDS = 5.0
"""How long a rank waits at the end of a failure until the others have cleaned up."""

READING_SECONDS = 0.5
"""How long the others let rank 0 speak before they end: what started them may end it as soon as one of them does."""

ALONE = "to run it in one process where a training has set them: env -u RANK -u WORLD_SIZE ckptools ..."

FOREVER = timedelta(days=30)
"""A limit for gloo, which nothing comes near: who is gone is noticed otherwise."""


class Ranks(Team):
    """One of several ranks.

    Attributes:
        speaks: whether this rank tells the user what comes of it all.
    """

    def __init__(self, meeting: Meeting, hosts: list[str], silence: float) -> None:
        """Begin to watch over the others, all of whom have come."""
        self.rank, self.world_size = meeting.number, meeting.count
        self.speaks = self.rank == 0
        self._meeting, self._hosts, self._steps = meeting, hosts, 0
        meeting.call = self.name
        self._watch = Watch(meeting, silence)
        self._silence = silence
        self._watch.start()

    def name(self, rank: int) -> str:
        """What a rank is called in a message: `rank 3 on node7`."""
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
        """What the watch finds out of why a connection was lost."""
        deadline = time.monotonic() + self._silence + 5
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
        """End by an error: tell the others, let them clean up, and return the error that counts."""
        self._watch.stop()
        cause = self._watch.failure if isinstance(error, KeyboardInterrupt) else error
        try:
            self._meeting.fail(self._with_name(cause or error))
            self._meeting.add("cleaned", 1)
            if self.rank == 0:
                self._meeting.add("spoken", 1)
            self._farewell()
        except (RuntimeError, CkptoolsError):
            # The store is gone, and most likely rank 0 with it.
            self.speaks = self.rank <= 1
        return cause or error

    def _with_name(self, error: BaseException) -> BaseException:
        """The error as others need it: with the name of the rank that it comes from."""
        if not isinstance(error, CkptoolsError) or error is self._watch.failure or is_named(error):
            return error
        return named(error, self.name(self.rank))

    def _farewell(self) -> None:
        """Wait until all have cleaned up; where rank 0 is gone, the one that failed first speaks."""
        self.speaks = self.speaks or not self._meeting.told
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._meeting.add("cleaned", 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._meeting.add("spoken", 0):
            self.speaks = self.rank == 0
        if not self.speaks:
            time.sleep(READING_SECONDS)


@contextmanager
def joined(place: Place, what: str, say: Say) -> Iterator[Ranks]:
    """Share what is done within with all ranks that were started with this one.

    Args:
        place: who this process is.
        what: is done: the command, the same on every rank.
        say: is told for whom this rank waits.

    Raises:
        UsageError: the environment lacks what ranks need to meet, or they run different things.
        RendezvousError: not all have come, or one is gone.
    """
    if place.missing:
        raise UsageError(None, f"{missing_variables(place.missing)}; {ALONE}")
    place.export(os.environ)
    use_loopback()
    ended: list[BaseException] = []
    silence = silence_seconds()
    with meet_ranks(MEETING_SECONDS, place.counts, say=say) as meeting:
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
        SystemExit: somebody did not come, which another rank says.
    """
    own = json.dumps([socket.gethostname(), __version__, what])
    try:
        all_said = [json.loads(text) for text in meeting.gather("hello", own)]
    except CkptoolsError as error:
        if meeting.told:
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
