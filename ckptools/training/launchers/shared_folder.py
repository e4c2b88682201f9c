"""The hidden folder of a run on several nodes: one makes it, all others must see it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.errors import WriteError
from ckptools.training import output

if TYPE_CHECKING:
    from ckptools.cluster.rendezvous import Meeting

# Seconds after which a network file system shows everybody what one has made.
_SEEN_WITHIN = 5.0


@contextmanager
def shared_partial_folder(meeting: Meeting, out: Path, run_id: str) -> Iterator[Path]:
    """Let number 0 of a meeting make the folder and remove it at the end; the others check that theirs is the same.

    Raises:
        WriteError: the folder cannot be made, or is not the same for all.
    """
    if meeting.number == 0:
        with output.open_partial_folder(out, run_id) as partial:
            meeting.gather("folder made")
            meeting.gather("folder seen")
            yield partial
    else:
        meeting.gather("folder made")
        partial = output.partial_folder(out, run_id)
        _await(partial, meeting.call(meeting.number), out)
        meeting.gather("folder seen")
        yield partial


def _await(partial: Path, who: str, out: Path) -> None:
    deadline = time.monotonic() + _SEEN_WITHIN
    while not partial.is_dir():
        if time.monotonic() > deadline:
            text = f"on {who} is not the folder that number 0 writes to; give one that all nodes share"
            raise WriteError(out, text)
        time.sleep(0.05)
