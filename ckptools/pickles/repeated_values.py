"""Large values that the pickles of one checkpoint's ranks repeat, each held once.

Where ranks gather their random states, every file has those of all: of 256 ranks 65,536 states of 625 ints and as many
arrays of 2.5 kB, of which 256 differ. Only what nobody can change is shared: tuples of ints, and bytes.
"""

from __future__ import annotations

from ckptools.pickles.int_runs import ints_of_run

MAX_KEPT = 64 << 20
"""Bytes of pickle whose values are remembered of one checkpoint; what goes beyond is made anew."""

MIN_BYTES = 256
"""Shorter bytes cost more to remember than to hold again."""


class RepeatedValues:
    """What is shared; one is handed from file to file.

    Args:
        limit: bytes of pickle that are remembered; 0 for a file that is read alone.
    """

    def __init__(self, limit: int = MAX_KEPT) -> None:
        self._left = limit
        self._ints: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self._bytes: dict[bytes, bytes] = {}

    def ints(self, spelled: bytes, times: int) -> tuple[int, ...]:
        """The ints of a run that a file spells for the so-manieth time: no two places in one file share them.

        Trees are judged by how much of them is shared (`model.tree_limits`), and here the pickle shares nothing.
        """
        known = self._ints.get((spelled, times))
        if known is None:
            known = ints_of_run(spelled)
            if self._room(spelled):
                self._ints[spelled, times] = known
        return known

    def of_bytes(self, data: bytes) -> bytes:
        """The one object for these bytes."""
        known = self._bytes.get(data, data) if len(data) >= MIN_BYTES else data
        if known is data and len(data) >= MIN_BYTES and self._room(data):
            self._bytes[data] = data
        return known

    def _room(self, spelled: bytes) -> bool:
        self._left -= len(spelled)
        return self._left >= 0
