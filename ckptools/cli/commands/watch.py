"""`ckptools watch`: verify each new checkpoint of a run, to notice a broken one before it is needed."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ckptools.cli.options import EventOptions, WatchedRunOptions
from ckptools.cli.printing import answered_in_json, remark, say, show_answer
from ckptools.errors import UsageError
from ckptools.files.opening import reading
from ckptools.text import encodable, printable
from ckptools.training_state.sections import ALL
from ckptools.watch.run import WatchOptions

if TYPE_CHECKING:
    from ckptools.cli.arguments import RunFolderPath
    from ckptools.watch.record import Watched, WatchEvent
    from ckptools.watch.run import Following


def watch(folder: RunFolderPath, how: WatchOptions, *, form: EventOptions, opening: WatchedRunOptions) -> None:
    """Verify each new checkpoint of a run, and report problems.

    Prints a line for each event. Verified checkpoints are remembered by size, time and digest of their files, and not
    read again unless they change. Nothing is deleted without --delete, and the newest proven checkpoint never. A folder
    that is not there yet is waited for, unless --once is given.

    Exit code: with --once 0 no checkpoint here has a problem, 1 one has, or a tracker names a wrong one; Ctrl-C 0 or 1,
    by whether there was a problem. 2 usage, 3 the folder cannot be listed, 4 another watch of this run is going on.

    Examples:
        ckptools watch DIR --values
        ckptools watch DIR --once --jsonl
    """
    from ckptools.watch.run import following

    if form.table_format or (form.json and not how.once):
        raise UsageError(None, "a watch prints a line for each event: as text or with --jsonl; --json goes with --once")
    if opening.model is not None and not how.values:
        raise UsageError(None, f"--model {opening.model} says whose norms are compared; add --values")
    if opening.model == ALL:
        raise UsageError(None, "--model all: norms of several models are never added; name one model")
    wrong = False
    answered = answered_in_json(form.json, "ckptools/watch/1", "ok", [folder])
    with answered, following(folder, how, opening.of_run("watch"), say) as watching:
        wrong = _once(watching, form) if how.once else _on(watching, form)
    if wrong:
        raise SystemExit(1)


def _once(watching: Following, form: EventOptions) -> bool:
    """Look once, and again if a checkpoint was still being written; return whether there is a problem."""
    from dataclasses import replace

    from ckptools.model.records import Rows

    found = _first(watching)
    if found.waiting:
        time.sleep(max(watching.watcher.waiting.values()) + 0.01)
        again = watching.look()
        found = replace(again, rows=Rows((*found.rows, *again.rows)))
    show_answer(form, "watch", found, found.rows)
    return not found.ok


def _on(watching: Following, form: EventOptions) -> bool:
    """Print events until an interrupt, or until the reader closes the pipe; return whether one was a problem."""
    wrong = False
    with suppress(KeyboardInterrupt):
        _wait_for_folder(watching)
        found = _first(watching)
        while True:
            wrong = wrong or any(event.is_problem for event in found.rows)
            _print(found, form.jsonl)
            _sleep(watching.options.every)
            found = watching.look_or_wait()
    return wrong


def _first(watching: Following) -> Watched:
    """Look for the first time, and name the state file; a missing folder is an error."""
    found = watching.look()
    if watching.remembers:
        remark(f"remembers what was verified in {watching.watcher.memory.path}")
    return found


def _wait_for_folder(watching: Following) -> None:
    """Return once something exists at the path of the run; say once that it is waited for."""
    folder, told = watching.watcher.folder, False
    while True:
        with reading(folder):
            if folder.exists():
                return
        if not told:
            remark(f"waits for {printable(str(folder))}, which is not there yet; Ctrl-C ends")
        told = True
        _sleep(watching.options.every)


def _print(found: Watched, jsonl: bool) -> None:
    from ckptools.display.record_json import to_json
    from ckptools.model.records import to_dict
    from ckptools.watch.record import event_line

    as_json: Callable[[WatchEvent], str] = lambda event: to_json(to_dict(event))  # noqa: E731
    for event in found.rows:
        line = (as_json if jsonl else event_line)(event)
        # If the reader has closed the pipe, this raises `BrokenPipeError`, which ends the watch.
        sys.stdout.write(encodable(line, sys.stdout.encoding) + "\n")
        sys.stdout.flush()


def _sleep(seconds: float) -> None:
    """Sleep, but end if the reader closes the pipe: without events to print, no write would fail."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no poll on this system, or stdout is not a file
        time.sleep(seconds)
        return
    if poll.poll(seconds * 1000):
        raise BrokenPipeError
