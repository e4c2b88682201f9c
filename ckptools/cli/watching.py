"""`ckptools ls --watch`: what changes in the folder of a run that is going on, a line for each change."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptools.text import encodable

if TYPE_CHECKING:
    from ckptools.checks.run_folder.listing import Listing
    from ckptools.model.run_folder import CheckpointRow, RunFolder


def watch(listing: Listing, jsonl: bool, seconds: float) -> None:
    """Print the checkpoints of a run, and from then on each that appears, grows, changes or goes.

    It ends by an interrupt, or when nobody reads what it prints.

    Args:
        listing: what looks at the folder.
        jsonl: print a JSON object per line: a row, with `event` before its fields.
        seconds: between two looks.
    """
    known: dict[str, CheckpointRow] = {}
    while True:
        found = listing.look()
        now = {row.name: row for row in _with_growing(found, known)}
        for event, row in changes(known, now):
            _print(_json_line(event, row) if jsonl else _text_line(event, row))
        known = now
        _sleep(seconds)


def _with_growing(found: RunFolder, known: Mapping[str, CheckpointRow]) -> Iterator[CheckpointRow]:
    """The rows, oldest first; what has other bytes than before, and is not whole, is being written."""
    for row in reversed(found.rows):
        before = known.get(row.name)
        grows = before is not None and (row.bytes, row.files, row.saved) != (before.bytes, before.files, before.saved)
        yield replace(row, being_written=grows and not row.whole)


def changes(
    known: Mapping[str, CheckpointRow], now: Mapping[str, CheckpointRow]
) -> Iterator[tuple[str, CheckpointRow]]:
    """What became of each checkpoint between two looks: `new`, `being written`, `changed`, `newest whole` or `gone`.

    What is still being written is told once.
    """
    for name, row in now.items():
        before = known.get(name)
        if before is None:
            yield "new", row
        elif row.being_written:
            if not before.being_written:
                yield "being written", row
        elif (row.whole, row.verdict, row.step) != (before.whole, before.verdict, before.step) or before.being_written:
            yield "changed", row
        elif row.newest_whole and not before.newest_whole:
            yield "newest whole", row
    yield from (("gone", row) for name, row in known.items() if name not in now)


def _text_line(event: str, row: CheckpointRow) -> str:
    from ckptools.text import moment
    from ckptools.views.run_folder import change_line

    return f"{moment(time.time())}  {change_line(event, row)}"


def _json_line(event: str, row: CheckpointRow) -> str:
    import json

    from ckptools.model.records import to_dict

    return json.dumps({"event": event, **to_dict(row)}, allow_nan=False)


def _print(line: str) -> None:
    """Print a line; a reader that is gone ends the watch, as `BrokenPipeError`."""
    sys.stdout.write(encodable(line, sys.stdout.encoding) + "\n")
    sys.stdout.flush()


def _sleep(seconds: float) -> None:
    """Wait; shorter where the reader of a pipe goes away, which nothing else would tell as long as nothing changes.

    Raises:
        BrokenPipeError: it did.
    """
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no such thing on this system, or no file behind it
        time.sleep(seconds)
        return
    if poll.poll(seconds * 1000):
        raise BrokenPipeError
