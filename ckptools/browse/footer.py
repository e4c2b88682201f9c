"""The last line of the screen: the keys of the pane that has the focus."""

from __future__ import annotations

from rich.text import Text

Hint = tuple[str, str]
"""A key, and its action in a word or two."""

HINTS: dict[str, tuple[Hint, ...]] = {
    "overview": (("Enter", "goes there"), ("y", "copy"), ("s", "save report"), ("w", "consolidate")),
    "keys": (("Enter", "shards"), ("f", "values"), ("e", "slice"), ("/", "find"), ("p", "problems"), ("o", "order")),
    "ranks": (("arrows", "choose"), ("p", "problems"), ("r", "read all"), ("y", "copy")),
    "optimizer": (("y", "copy"), ("s", "save report")),
    "values": (("Enter", "reads it"), ("y", "copy")),
    "files": (("p", "problems"), ("y", "copy")),
    "run": (("Enter", "opens it"), ("y", "copy")),
    "details": (("j k", "scroll"), ("l h", "sideways, back"), ("y", "copy")),
    "dialog": (("Enter", "takes it"), ("Esc", "closes it")),
    "filter": (("Enter", "to the keys found"), ("Esc", "all keys")),
}
"""Hints by pane, the most useful first: a tab's list, its details, a dialog, the line in which a filter is typed."""

LAST: tuple[Hint, ...] = (("?", "keys"), ("q", "quit"))

GAP = "  "


def footer(pane: str, has_details: bool, width: int) -> Text:
    """Render the hints of a pane in one line; on a narrow screen the least useful are left out."""
    other = "back" if pane == "details" else "details" if has_details else ""
    last = () if pane in TYPED else (*([("Tab", other)] if other else []), *LAST)
    kept = [*HINTS[pane]]
    while kept and len(_text([*kept, *last])) > width:
        kept.pop()
    return _text([*kept, *last])


TYPED = ("filter", "dialog")
"""Panes in which `?` and `q` may be letters of a text."""


def _text(hints: list[Hint]) -> Text:
    line = Text()
    for n, (key, words) in enumerate(hints):
        line.append(GAP if n else "").append(key, "bold").append(f" {words}")
    return line
