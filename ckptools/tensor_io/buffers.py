"""Buffers that each thread keeps: to get memory anew for every region takes as long as to read it."""

from __future__ import annotations

from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt


class _OfThread(local):
    """Bytes by what they are used for."""

    def __init__(self) -> None:
        self.rooms: dict[str, npt.NDArray[np.uint8]] = {}


_OF_THREAD = _OfThread()


def buffer(use: str, count: int, dtype: str) -> npt.NDArray[Any]:
    """Room for some elements, with anything in it, that is the calling thread's own until it asks for the same use.

    Args:
        use: what for; a thread has one buffer for each, as large as the largest that it asked for.
        count: elements.
        dtype: as numpy names it.
    """
    nbytes = count * np.dtype(dtype).itemsize
    room = _OF_THREAD.rooms.get(use)
    if room is None or len(room) < nbytes:
        room = _OF_THREAD.rooms[use] = np.empty(nbytes, "u1")
    return room[:nbytes].view(dtype)
