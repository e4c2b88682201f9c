"""Large values that the pickles of one checkpoint's ranks repeat, each held once.

Where ranks gather their random states, every file has those of all: of 256 ranks 65,536 states of 625 ints and as many
arrays of 2.5 kB, of which 256 differ. Only what nobody can change is shared: tuples of ints, and bytes.
"""

from __future__ import annotations

from ckptools.pickles.int_runs import ints_of_run

MAX_KEPT = 64 << 20
"""Bytes of pickle whose values are remembered of one checkpoint; what goes beyond is made anew."""

HEAD = 32
"""Bytes by which a tuple is found before it is compared."""

MIN_BYTES = 256
"""Shorter bytes cost more to remember than to hold again."""


class RepeatedValues:
    """What is shared; one is handed from file to file.

    Args:
        limit: bytes of pickle that are remembered; 0 for a file that is read alone.
    """

    def __init__(self, limit: int = MAX_KEPT) -> None:
        self._left = limit
        self._tuples: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self._by_head: dict[bytes, bytes] = {}
        self._bytes: dict[bytes, bytes] = {}

    def tuple_at(self, data: bytes, at: int) -> bytes | None:
        """How a known tuple is spelled that a pickle spells from `at` to its TUPLE; None where there is none."""
        spelled = self._by_head.get(data[at : at + HEAD])
        return spelled if spelled is not None and data.startswith(spelled, at) else None

    def of_tuple(self, spelled: bytes, times: int) -> tuple[int, ...]:
        """The tuple of ints that a run and its TUPLE spell, for the so-manieth time in one file.

        No two places in one file share one: trees are judged by how much of them is shared (`model.tree_limits`), and
        the pickle shares nothing here.
        """
        known = self._tuples.get((spelled, times))
        if known is None:
            known = ints_of_run(spelled[:-1])
            if self._room(spelled):
                self._tuples[spelled, times] = known
                self._by_head[spelled[:HEAD]] = spelled
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
