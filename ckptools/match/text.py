"""The record of `match` as text and as HTML: whether it loads, the rename that fixes most, what differs then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptools.display.next_command import quoted
from ckptools.display.palette import mark_of, painted
from ckptools.display.tables import PIPE, Column, Screen, table, wrapped
from ckptools.keys.rename_rules import Rename, rename_words
from ckptools.match.record import Match, MatchGroup
from ckptools.text import clip_middle, plural, printable

COLUMNS = (
    Column("what", "verdict"),
    Column("names", "name"),
    Column("keys", "number"),
    Column("checkpoint"),
    Column("model"),
    Column("note"),
)
RESUME_COLUMNS = (Column("will it resume?"), Column("verdict", "verdict"), Column("detail"))
FINE = ("same", "converted", "ignored")
"""Statuses of names that load as they are."""

LABEL = 22
"""Width of the column of labels."""


def match_text(found: Match, screen: Screen = PIPE) -> str:
    """Render a match as text, cut to a screen."""
    lines = [
        line
        for label, text in match_facts(found)
        for line in wrapped(label.ljust(LABEL), printable(text), screen, label=mark_of(label) or "heading")
    ]
    if found.resume:
        lines += ["", *table(RESUME_COLUMNS, [list(row[:3]) for row in found.resume], screen)]
    rows = [group_cells(group) for group in found.groups]
    left = [painted("what is left then:", "heading", screen.color)] if found.renames else []
    title = ["", *left] if rows else []
    return "\n".join([*lines, *title, *table(COLUMNS, rows, screen)])


def match_facts(found: Match) -> Iterator[tuple[str, str]]:
    """A few lines with labels: whether it loads, and the renames that make it load."""
    yield "checkpoint", found.path
    yield "model", found.to
    if found.whole is False:
        yield "NOT WHOLE", "ckptools verify says what is wrong; names that only missing files have are not known here"
    yield _verdict_label(found), _verdict(found)
    if found.not_compared:
        yield "not compared", "; ".join(found.not_compared)
    for n, rename in enumerate(found.renames):
        yield ("after this rename" if n == 0 else "and after this one"), _fixed(found, n, rename)
    for rename in found.alternatives:
        yield "not chosen", f"{rename_words(rename)} would fix {rename.fixes}, and another rename as many"


def _verdict_label(found: Match) -> str:
    if found.loads:
        return "loads"
    return "DOES NOT LOAD" if found.apart or any(row.status not in FINE for row in found.rows) else "names fit"


def _verdict(found: Match) -> str:
    facts = [found.found]
    absent = found.model_names - found.same - found.converted
    if found.loads and absent:
        facts.append(f"{plural(absent, 'name')} tied to another one")
    if more := sum(row.status == "unexpected" for row in found.rows) if not absent else 0:
        facts.append(f"{plural(more, 'name')} of the checkpoint too many")
    return "; ".join(facts)


def _fixed(found: Match, n: int, rename: Rename) -> str:
    old, new = rename.example
    left = any(group.status not in ("dtype", *FINE) for group in found.groups)
    then = "" if left or found.whole is False or n + 1 < len(found.renames) else "; then it loads"
    assumed = ": assumed" if rename.assumed else ""
    return f"{rename.fit} of {found.model_names}: {rename_words(rename)} ({old} becomes {new}){assumed}{then}"


def group_cells(group: MatchGroup) -> list[str]:
    """The cells of a group under `COLUMNS`."""
    return [group.status, group.names, str(group.keys), group.checkpoint, group.model, group.note]


def next_lines(found: Match, arguments: str, written: Path | None) -> Iterator[str]:
    """The command that writes the checkpoint under the names of the model.

    `arguments` open the checkpoint again; the map was `written` into a file, or not.
    """
    if found.apart:
        if found.like:
            yield f"use it: ckptools consolidate {arguments} -o converted/ --like {quoted([found.like])}"
        else:
            yield "load it with from_pretrained, and save that model's state_dict()"
    if found.fix:
        options = _options(found.renames) or ["--map", str(written or "map.json")]
        if options[0] == "--map" and written is None:
            yield "keep the names: --write-map map.json"
        yield f"use it: ckptools consolidate {arguments} -o renamed.pt --only model {quoted(options)}"
    for command in dict.fromkeys(row.next for row in found.resume if row.next):
        verb, _, rest = command.partition(" ")
        yield f"try: ckptools {verb} {arguments} {rest}" if verb == "consolidate" else f"try: {command}"
    if found.assumed:
        old, new = next(iter(found.assumed.items()))
        pair = f"{printable(clip_middle(old, 60))} becomes {printable(clip_middle(new, 60))}"
        yield f"assumed, and in no map: {plural(len(found.assumed), 'name')} ({pair}); --json lists them"
    for rename in found.alternatives:
        if option := _options((rename,)):
            yield f"one of several: ckptools consolidate {arguments} -o renamed.pt --only model {quoted(option)}"


def _options(renames: Sequence[Rename]) -> list[str]:
    """The options for the same renames; none if only a map can express them."""
    if any(one.kind != "prefix" or not (one.old + one.new).isprintable() or "=" in one.old for one in renames):
        return []
    if len(renames) == 1 and renames[0].old and not renames[0].new:
        return ["--strip-prefix", renames[0].old]
    return [word for rename in renames for word in ("--rename", f"{rename.old}={rename.new}")]


def match_html(found: Match) -> str:
    """Render whether a model loads into another, the rename that fixes most, and the remaining differences."""
    from ckptools.display.page import DICTS, Page
    from ckptools.display.record_html import value_table

    page = Page(DICTS)
    for label, text in match_facts(found):
        page.verdict(f"{label}: {text}")
    rows = [group_cells(group) for group in found.groups]
    if rows:
        title = "what is left then" if found.renames else plural(len(rows), "group of names", "groups of names")
        page.table(title, COLUMNS, rows, opened=True)
    if found.resume:
        page.table("will it resume?", RESUME_COLUMNS, [list(row[:3]) for row in found.resume], opened=True)
    if found.fix:
        value_table(page, f"{plural(len(found.fix), 'name')} that the renames change", found.fix, opened=False)
    return page.html()
