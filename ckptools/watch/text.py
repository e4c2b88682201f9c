"""The record of `watch` as text: a line for each event."""

from __future__ import annotations

from ckptools.display.tables import PIPE, Screen
from ckptools.ls.text import change_line
from ckptools.text import clip, duration, few, moment, number, plural, printable
from ckptools.watch.record import Watched, WatchEvent

MAX_WHY = 300
"""Characters of what is wrong, in a line."""


def event_line(event: WatchEvent) -> str:
    """One line: `2026-11-20 01:42:07  proven         step 4  2/2 ranks  2.3 MiB  whole  ep0-ba4  norm 12.3`."""
    from ckptools.ls.record import seconds_of

    row = event.row
    parts = [change_line(event.event, row)]
    parts += [f"norm {number(event.norm)}"] if event.norm is not None else []
    parts += [f"x {event.drift:.3g}"] if event.drift is not None else []
    judged = event.event in ("proven", "problem")
    said = [row.why if event.event == "problem" else "", event.detail, few(event.drifted)]
    why = "; ".join(filter(None, [*said, *(row.notes if judged else ())]))
    parts += [clip(printable(why), MAX_WHY)] if why else []
    return f"{moment(seconds_of(event.time))}  {'  '.join(parts)}"


def watched_text(watched: Watched, _: Screen = PIPE) -> str:
    """The events of one look, then what is here."""
    newest = f"newest proven: {printable(watched.newest_proven)}" if watched.newest_proven else "NONE IS PROVEN"
    parts = [f"{plural(watched.checkpoints, 'checkpoint')} in {printable(str(watched.path))}; {newest}"]
    parts += [f"{plural(len(watched.problems), 'problem')}: {few(watched.problems)}"] if watched.problems else []
    parts += [f"still being written: {few(watched.waiting)}"] if watched.waiting else []
    parts += [duration(watched.seconds)]
    return "\n".join([*map(event_line, watched.rows), printable("; ".join(parts))])
