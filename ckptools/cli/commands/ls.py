"""`ckptools ls`: the checkpoints of a run, and which of them is the newest whole one."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptools.cli.answers import answered_in_json, arranged, show_answer
from ckptools.cli.printing import remark, say
from ckptools.cli.shared_options import AnswerOptions, OpeningOptions, RowOptions
from ckptools.errors import UsageError
from ckptools.model.records import to_dict
from ckptools.text import encodable, moment

if TYPE_CHECKING:
    from ckptools.cli.arguments import DeepOfNewest, Every, RunFolderPath, Watched
    from ckptools.ls.listing import Listing
    from ckptools.ls.record import CheckpointRow, RunFolder


def ls(
    folder: RunFolderPath,
    deep: DeepOfNewest = False,
    watch: Watched = False,
    every: Every = 5.0,
    *,
    rows: RowOptions,
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """List a run's checkpoints, and the newest that is whole.

    Each is looked into as inspect does. Every rank of the newest is read, and of older ones until one is whole.

    Exit code: 0 no checkpoint was found not to be whole, 1 one was, or a tracker such as `latest` leads to none that
    is whole, 2 usage, 3 no checkpoint here, or none can be opened. --watch that is interrupted ends with 0.
    """
    if watch:
        _watch(folder, deep, every, form, opening)
        return
    from ckptools.cli.progress import CountLine
    from ckptools.ls.listing import checkpoints_in

    with answered_in_json(form.json, "ckptools/ls/1", "ok", [folder]), CountLine("looked into", "checkpoint") as line:
        found = checkpoints_in(folder, deep=deep, on_found=line, **_how(opening))
    if not found.readable:
        say(f"error: {folder}: none of its checkpoints can be opened; the answer says why")
    _show(found, rows, form)
    if not found.ok:
        raise SystemExit(1 if found.readable else 3)


def _how(opening: OpeningOptions) -> dict[str, Any]:
    """How each checkpoint is opened; options that go with one checkpoint alone are refused."""
    for word, given in (("--ranks", opening.ranks is not None), ("--only-this-file", opening.only_this_file)):
        if given:
            raise UsageError(None, f"{word} goes with one checkpoint; ls looks for those of a run by itself")
    return {name: value for name, value in vars(opening).items() if name not in ("ranks", "only_this_file")}


def _watch(folder: str, deep: bool, every: float, form: AnswerOptions, opening: OpeningOptions) -> None:
    """Print changes until an interrupt, which is the end and no failure."""
    from ckptools.files.location import location
    from ckptools.ls.listing import Listing

    if form.json or form.table_format:
        raise UsageError(None, "--watch prints a line for each change: as text, or with --jsonl")
    with suppress(KeyboardInterrupt):
        print_changes(Listing(location(folder), deep, may_be_empty=True, how=_how(opening)), form.jsonl, every)


def _show(found: RunFolder, rows: RowOptions, form: AnswerOptions) -> None:
    from ckptools.ls.text import cost_line, run_folder_text

    shown = replace(found, rows=arranged(found.rows, rows))
    show_answer(form, "ls", shown, shown.rows, run_folder_text)
    if form.is_text:
        remark(f"\n{cost_line(found)}")
        if found.newest_whole is not None:
            from ckptools.display.next_command import quoted

            remark(f"next: ckptools inspect {quoted([found.newest_whole])}")


def print_changes(listing: Listing, jsonl: bool, seconds: float) -> None:
    """Print the checkpoints of a run, and from then on each that appears, grows, changes or goes.

    It ends by an interrupt, or when the reader of its output is gone. With `jsonl` each line is a JSON object: a row,
    with `event` before its fields.
    """
    known: dict[str, CheckpointRow] = {}
    while True:
        found = listing.look()
        now = {row.name: row for row in _with_growing(found, known)}
        for event, row in changes(known, now):
            # A reader that is gone ends the watch, as `BrokenPipeError`.
            sys.stdout.write(encodable(_line(event, row, jsonl), sys.stdout.encoding) + "\n")
            sys.stdout.flush()
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
    """The changes between two looks: `new`, `being written`, `changed`, `newest whole` or `gone`.

    A checkpoint that is still being written is reported once.
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


def _line(event: str, row: CheckpointRow, jsonl: bool) -> str:
    from ckptools.display.record_json import to_json
    from ckptools.ls.text import change_line

    if jsonl:
        return to_json({"event": event, **to_dict(row)})
    return f"{moment(time.time())}  {change_line(event, row)}"


def _sleep(seconds: float) -> None:
    """Wait, but not after the reader of a pipe is gone, which nothing else would show while nothing changes."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no such thing on this system, or no file behind it
        time.sleep(seconds)
        return
    if poll.poll(seconds * 1000):
        raise BrokenPipeError
