"""A look at the other ranks once a second: has one failed, or is one gone without a word?

Every rank counts its own beats at the store where all have met, and listens to those of the next. Of ranks that are
gone, one at least has a living one before it, which tells all others.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from ckptools.errors import CkptoolsError, RendezvousError

if TYPE_CHECKING:
    from ckptools.cluster.rendezvous import Meeting

BEAT = 1.0
"""Seconds between two looks."""

GRACE = 1.0
"""Seconds in which this rank may find by itself what is wrong: often all ranks find the same."""


class Watch(threading.Thread):
    """Watches until `stop`. The main thread gets a KeyboardInterrupt when another rank has failed.

    Attributes:
        failure: of another rank; None while all is well.
    """

    def __init__(self, meeting: Meeting, silence: float) -> None:
        """Watch over a meeting to which all have come; a rank that is silent for `silence` seconds counts as gone."""
        super().__init__(name="ckptools-watch", daemon=True)
        self.failure: CkptoolsError | None = None
        self._meeting, self._silence = meeting, silence
        self._next = (meeting.number + 1) % meeting.count
        self._ended = threading.Event()
        self._beats, self._heard = 0, time.monotonic()

    def run(self) -> None:
        """Look once a second."""
        while not self._ended.wait(BEAT):
            failure = self._look()
            if failure is None:
                continue
            self.failure = failure
            if not self._ended.wait(GRACE):
                # As if the process was told to end, which every part of it takes well.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            return

    def _look(self) -> CkptoolsError | None:
        meeting = self._meeting
        try:
            meeting.add(f"beats/{meeting.number}", 1)
            beats = meeting.add(f"beats/{self._next}", 0)
            if beats != self._beats:
                self._beats, self._heard = beats, time.monotonic()
            elif time.monotonic() > self._heard + self._silence:
                meeting.tell(RendezvousError(None, _gone(meeting.call(self._next), self._silence)))
            return meeting.failure()
        except RuntimeError:
            return RendezvousError(None, f"{meeting.call(0)}, or what started it, has ended: its store does not answer")
        except CkptoolsError as error:
            return error

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()


def _gone(who: str, silence: float) -> str:
    return f"{who} is gone: no sign of it for {silence:g} s; was it killed?"
