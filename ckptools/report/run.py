"""The page of a run: a timeline of its checkpoints, their sizes and recorded losses, and a part about each."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.display.drawing import Picture
from ckptools.display.html import Limits, Page, document, how_made, safe, short_title
from ckptools.display.next_command import quoted
from ckptools.display.record_json import answer_json
from ckptools.display.screen import MARKS, PIPE, Mark, Screen
from ckptools.display.tables import Column, wrapped
from ckptools.errors import CkptoolsError, OutputExistsError, ReadError
from ckptools.files.opening import location, real_path
from ckptools.files.partial_files import write_text
from ckptools.formats.open import open_checkpoint
from ckptools.inspect.record import FACT_COLUMNS, SECTION_COLUMNS, facts, inspect_report, section_cells
from ckptools.ls.record import COLUMNS, CheckpointRow, RunFolder, all_cells, called, headline, seconds_of
from ckptools.ls.rows import LOOKED_INTO, Listing, judged, verdict_in_run
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import causes_of, consequences_of, incidents_of
from ckptools.model.problems import Problem
from ckptools.model.tree import leaf_at, scalar, walk
from ckptools.model.verdict import Level, Verdict
from ckptools.pictures.run_steps import run_steps, values_by_step
from ckptools.report.html import check_place
from ckptools.report.parts import add_meanings, contents_html, incidents_html, tiles_html
from ckptools.text import few, moment, moment_utc, number, plural, size
from ckptools.verify.record import summary
from ckptools.verify.run import unreadable, verify

# -- what is on the page ----------------------------------------------------------------------------------------------


class CheckpointPart(NamedTuple):
    """What the page says of one checkpoint.

    Attributes:
        error: why it cannot be opened; "" if it was.
        unfinished: whether the file is missing that its writer writes last.
        checks: how many checks failed, in words.
        values: losses and norms of gradients that it records, by name.
        next: the command that `inspect` proposes; "" for none.
        files: its files, as far as they are known.
    """

    verdict: Verdict
    problems: Sequence[Problem]
    error: str = ""
    unfinished: bool = False
    checks: str = ""
    failed: bool = True
    facts: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[Sequence[str]] = ()
    values: Mapping[str, float] = {}
    next: str = ""
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class RunContents:
    """A run, every checkpoint of which was verified.

    Attributes:
        parts: what the page says of each checkpoint, by its name.
        made: when, in seconds since 1970.
        options: of the command that makes the page.
    """

    run: RunFolder
    parts: Mapping[str, CheckpointPart]
    made: float
    options: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check failed, and no tracker names a wrong checkpoint."""
        return self.run.ok and not any(part.failed for part in self.parts.values())


RECORDED = re.compile(
    r"(?:(?:train|training|eval|val|valid|validation|test|best|last|current|avg|mean|running|epoch|total|global)_)*"
    r"(?:loss|grad_norm|perplexity)"
)
"""Names of numbers that a training measures; a setting such as `max_grad_norm` is none."""

MAX_VALUES = 4
"""At most this many recorded numbers of a run have a column and a picture."""


def recorded_values(checkpoint: Checkpoint) -> dict[str, float]:
    """Find the losses and norms of gradients among the plain values of a checkpoint, by name.

    Of a list whose items state a step, as `log_history` of transformers' Trainer, only an item of the checkpoint's step
    counts. A number that differs between ranks is named after the rank that it is of.
    """
    found: dict[str, float] = {}
    for path, leaf in walk(checkpoint.tree):
        value = scalar(leaf)
        if not (path and isinstance(path[-1], str) and RECORDED.fullmatch(path[-1].lower())):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        around = leaf_at(checkpoint.tree, path[:-1])
        step = scalar(around.get("step")) if len(path) > 1 and isinstance(around, Mapping) else None
        if isinstance(path[-2] if len(path) > 1 else "", int) and step != checkpoint.step.value:
            continue
        ranks = checkpoint.per_rank.get(path, {})
        of_rank = f" of rank {min(ranks)}" if ranks else ""
        name = ".".join(key for key in path if isinstance(key, str)) + of_rank
        found[name] = float(value)
    return found


def findings(
    folder: str | Path,
    how: Mapping[str, Any],
    *,
    deep: bool = False,
    values: bool = False,
    ignore: Sequence[str] = (),
    on_found: Callable[[Path], None] | None = None,
    on_verified: Callable[[Path], None] | None = None,
) -> RunContents:
    """Verify every checkpoint of a run; `how` are options of `open_checkpoint`.

    Raises:
        UnknownFormatError: no checkpoint is in the folder.
        ReadError: the folder cannot be listed.
        UsageError: the path is not a folder.
    """
    parts: dict[str, CheckpointPart] = {}

    def judge(row: CheckpointRow) -> CheckpointRow:
        found, made = _verified(row, how, deep, values, ignore)
        parts[row.name] = made
        if on_verified is not None:
            on_verified(Path(row.name))
        return found

    run = Listing(location(folder), on_found=on_found, how=how, judge=judge).look()
    most = max(row.ranks for row in run.rows)
    for row in run.rows:
        parts[row.name] = parts[row.name]._replace(verdict=verdict_in_run(parts[row.name].verdict, row, most))
    ignored = ["--ignore", ",".join(ignore)] if ignore else []
    return RunContents(run, parts, time.time(), (*["--deep"] * deep, *["--values"] * values, *ignored))


def _verified(
    row: CheckpointRow, how: Mapping[str, Any], deep: bool, values: bool, ignore: Sequence[str]
) -> tuple[CheckpointRow, CheckpointPart]:
    try:
        ck = open_checkpoint(row.path, **{**how, "all_ranks": True})
        found = verify(ck, deep=deep, values=values, ignore=ignore, jobs=how.get("jobs"))
    except CkptoolsError as error:
        problems = [unreadable(error)]
        verdict = Verdict(False, None, None, "nothing", "", causes_of(problems))
        opened = bool(row.format)
        made = judged(row, verdict, problems, LOOKED_INTO[deep, values]) if opened else row
        unfinished = isinstance(error, ReadError) and error.kind == "unfinished"
        return made, CheckpointPart(verdict, problems, str(error), unfinished)
    report = inspect_report(ck)
    part = CheckpointPart(
        found.verdict,
        found.problems,
        checks=summary(found),
        failed=not found.ok,
        facts=list(facts(report)),
        sections=section_cells(report.sections),
        values=recorded_values(ck),
        next=report.next,
        files=[file.path for file in ck.files],
    )
    return judged(row, found.verdict, found.problems, LOOKED_INTO[deep, values]), part


# -- the page ---------------------------------------------------------------------------------------------------------


LIMITS = Limits(rows=5000, nbytes=2_000_000)
"""Limits of the page without its pictures; the JSON in it is never cut."""

MANY = 60
"""With more checkpoints than this, the cells of the timeline are small, and the table of all is folded."""

MOST = 3
"""At most this many checkpoints with errors are named."""

MAX_PARTS = 200
"""Of the checkpoints without errors, at most this many, the newest, have a part of their own."""

STYLE = """<style>
body .ckpt .steps{display:grid;grid-template-columns:repeat(auto-fill,minmax(124px,1fr));gap:8px;margin:6px 0 0}
body .ckpt .step{display:block;border:1px solid var(--line);border-top:5px solid var(--ckpt-rule);border-radius:6px;
padding:6px 10px;background:var(--card);text-decoration:none}
body .ckpt .step b,body .ckpt .step span,body .ckpt .step i{display:block;font-style:normal}
body .ckpt .step b{font-size:16px;white-space:nowrap}
body .ckpt .steps.dense{grid-template-columns:repeat(auto-fill,minmax(92px,1fr));gap:4px;
align-items:start}
body .ckpt .dense .step{padding:2px 6px}
body .ckpt .dense .step b{font-size:12px}
body .ckpt .dense .step .good,body .ckpt .dense .step i{display:none}
body .ckpt .step i{font-size:12px;color:var(--ckpt-dim)}
body .ckpt .step.is-bad{background:var(--badbg);border-top-color:var(--ckpt-bad)}
body .ckpt .step.is-warn{background:var(--warnbg);border-top-color:var(--ckpt-warn)}
body .ckpt .step.is-good{border-top-color:var(--ckpt-good)}
body .ckpt .step.is-left{border-style:dashed}
body .ckpt a.step:hover,body .ckpt a.step:focus{outline:2px solid}
body .ckpt .step .bad,body .ckpt .step .warn,body .ckpt .step .good{font-size:13px}
body .ckpt .of-one{border-top:1px solid var(--line);padding-top:8px}
body .ckpt .of-one>summary h2{margin-right:10px}
body .ckpt .of-one details{margin-left:0}
@media print{body .ckpt .step{break-inside:avoid;print-color-adjust:exact}}
</style>"""


class RunPage(Page):
    """A page whose titles within the part of one checkpoint are headings of a lower level, not in the contents."""

    within = False

    def heading(self, title: str, *link: str) -> str:
        """Make the heading of a part of the page; a smaller one within the part of a checkpoint."""
        return f"<h3>{safe(title)}</h3>" if self.within else super().heading(title, *link)

    @contextmanager
    def part(self, name: str, summary: str, opened: bool) -> Iterator[None]:
        """Fold everything added within the block, with an id."""
        self.drawing(f'<details class="of-one" id="{name}"{" open" if opened else ""}><summary>{summary}</summary>')
        self.within = True
        yield
        self.within = False
        self.drawing("</details>")


def write_run_report(
    folder: str | Path, out: str | Path, how: Mapping[str, Any], *, force: bool = False, **options: Any
) -> RunContents:
    """Write the page of a run to a file, which appears whole or not at all; `options` are those of `findings`.

    Raises:
        OutputExistsError: the file exists, or is a file of a checkpoint.
        UsageError: its name does not end with `.html`, or its folder does not exist.
    """
    check_place(Path(out), force)
    found = findings(folder, how, **options)
    own = (file for part in found.parts.values() for file in part.files)
    if Path(out).exists() and real_path(Path(out)) in map(real_path, own):
        raise OutputExistsError(out, "is a file of a checkpoint of this run; give the page another name")
    write_text(Path(out), run_page(found, Path(out).name), force)
    return found


def run_page(found: RunContents, out: str = "report.html") -> str:
    """Render the page of a run as one document that includes the JSON of `ls`.

    `out` is the name of the page in the command that makes it again.
    """
    run = found.run
    name = run.path.absolute().name or str(run.path)
    page = RunPage(f"ckptools ls {quoted([str(run.path)])} --limit 0", LIMITS, headed=True)
    page.drawing(STYLE)
    contents = len(page.blocks)
    _band(page, found)
    _tiles(page, run)
    oldest_first = list(reversed(run.rows))
    newest = {row.name for row in run.rows[:MAX_PARTS]}
    kept = [row for row in oldest_first if row.name in newest or found.parts[row.name].failed]
    links = {row.name: f"checkpoint-{n}" for n, row in enumerate(kept, 1)}
    _timeline(page, found, oldest_first, links)
    drawn = "".join(f"<div>{picture.html()}</div>" for picture in _pictures(found))
    if drawn:
        page.drawing(f'<section>{page.heading("over the steps")}<div class="two">{drawn}</div></section>')
    _table(page, found)
    title = page.heading("each checkpoint")
    left = len(oldest_first) - len(kept)
    others = f"the newest {MAX_PARTS}, and those with errors; {plural(left, 'other')} in the table"
    more = f'<div class="dim">{safe(others)}</div>' if left else ""
    page.drawing(f"<section>{title}{more}</section>")
    for row in reversed(kept):
        _part(page, row, found.parts[row.name], links[row.name])
    shown = (part.problems for part in (found.parts[row.name] for row in kept) if not part.error)
    add_meanings(page, (problem.kind for problems in shown for problem in problems), opened=False)
    page.blocks.insert(contents, contents_html(page))
    command = f"ckptools report {quoted([str(run.path), '-o', out, *found.options])}"
    return document(
        short_title(name, f"{plural(run.checkpoints, 'checkpoint')}, {_newest(run)}"),
        name,
        page.html(),
        {"ls": answer_json("ls", run)},
        str(run.path) if str(run.path) != name else "",
        made=how_made(command, f"written {moment_utc(found.made)}"),
    )


def outcome_lines(found: RunContents, screen: Screen = PIPE) -> list[str]:
    """State the newest whole checkpoint, and which others are wrong."""
    lines = wrapped("", headline(found.run), screen, mark=_level_mark(found))
    return lines + wrapped("", _wrong(found) or "no check failed", screen, mark="dim")


def _wrong(found: RunContents) -> str:
    """Count the checkpoints with errors, and name the newest; "" if there are none."""
    wrong = [called(row) for row in found.run.rows if found.parts[row.name].failed]
    more = f"; {len(wrong) - MOST} more" if len(wrong) > MOST else ""
    return f"{plural(len(wrong), 'checkpoint')} with errors: {'; '.join(wrong[:MOST])}{more}" if wrong else ""


def _newest(run: RunFolder) -> str:
    newest = run.newest
    if newest is None:
        return "NONE IS WHOLE"
    return "newest whole: " + (newest.name if newest.step is None else f"step {newest.step}")


def _level_mark(found: RunContents) -> Mark:
    level: Level = "bad" if found.run.newest_whole is None else "good" if found.ok else "doubtful"
    return MARKS[level]


def _status(part: CheckpointPart) -> tuple[str, Level]:
    """State in a few words whether a checkpoint is whole, and how bad that is."""
    verdict = part.verdict
    if part.error:
        return "unfinished" if part.unfinished else "cannot be opened", "bad"
    if verdict.whole is False:
        return "NOT WHOLE", "bad"
    word = "whole" if verdict.whole else "not proven whole"
    if part.failed or verdict.level == "bad":
        return f"{word}, with errors", "bad"
    return word, verdict.level


def _band(page: Page, found: RunContents) -> None:
    """Add the headline in its colour, what is wrong beside the checkpoints, and the commands to type next."""
    run, mark = found.run, _level_mark(found)
    below = [_wrong(found)] if _wrong(found) else []
    below += [f"{tracker.name}: {tracker.problem}" for tracker in run.trackers if tracker.problem]
    below += [f"left over from a write, or still being written: {few([one.name for one in run.left_over])}"] * bool(
        run.left_over
    )
    below += run.notes
    newest = run.newest
    commands = _commands(newest, found.parts[newest.name]) if newest else [f"ckptools doctor {quoted([str(run.path)])}"]
    lines = "".join(f"<div>{safe(line)}</div>" for line in below)
    following = "".join(f"<div>next: <code>{safe(command)}</code></div>" for command in commands)
    page.drawing(f'<div class="band is-{mark}"><b class="{mark}">{safe(headline(run))}</b>{lines}{following}</div>')


def _commands(row: CheckpointRow, part: CheckpointPart) -> list[str]:
    """The command that inspects a checkpoint, and the one that `inspect` proposes, which consolidates a whole one."""
    inspect = f"ckptools inspect {quoted([row.path])}"
    return list(dict.fromkeys([inspect, *([part.next] if part.next else [])]))


def _tiles(page: Page, run: RunFolder) -> None:
    steps = [row.step for row in run.rows if row.step is not None]
    times = [seconds_of(row.saved) for row in run.rows if row.saved is not None]
    newest = run.newest
    saves = plural(len(run.left_over), "unfinished write") if run.left_over else ""
    facts = [
        ("checkpoints", str(run.checkpoints), saves),
        ("steps", f"{min(steps)} to {max(steps)}" if steps else "-", "" if len(steps) == len(run.rows) else "not all"),
        ("newest whole", _step(newest) if newest else "none", newest.name if newest else ""),
        ("size", size(sum(row.bytes for row in run.rows)), "of all checkpoints"),
        ("last saved", moment(max(times)) if times else "-", f"the first {moment(min(times))}" if times else ""),
    ]
    page.drawing(tiles_html(facts))


def _step(row: CheckpointRow) -> str:
    return "no step" if row.step is None else f"step {row.step}"


def _timeline(page: Page, found: RunContents, rows: Sequence[CheckpointRow], links: Mapping[str, str]) -> None:
    """Add a cell for each checkpoint, in the order of their steps, that leads to its part; then unfinished writes."""
    cells = []
    for row in rows:
        word, level = _status(found.parts[row.name])
        mark = MARKS[level]
        newest = " · newest" if row.newest_whole else ""
        shown = (
            f'<b>{safe(_step(row))}</b><span class="{mark}">{safe(word)}{newest}</span><i>{safe(size(row.bytes))}</i>'
        )
        name = safe(row.name)
        cells.append(
            f'<a class="step is-{mark}" href="#{links[row.name]}" title="{name}">{shown}</a>'
            if row.name in links
            else f'<div class="step is-{mark}" title="{name}">{shown}</div>'
        )
    for one in found.run.left_over:
        shown = f'<b>unfinished</b><span class="warn">{safe(one.name, 40)}</span><i>{safe(size(one.bytes))}</i>'
        cells.append(f'<div class="step is-left">{shown}</div>')
    dense = " dense" if len(rows) > MANY else ""
    title = page.heading("timeline")
    page.drawing(f'<section>{title}<div class="steps{dense}">{"".join(cells)}</div></section>')


def _measured(found: RunContents) -> list[str]:
    """Name the numbers that the most checkpoints record."""
    names = [name for part in found.parts.values() for name in part.values]
    often = sorted(dict.fromkeys(names), key=lambda name: (-names.count(name), name))
    return often[:MAX_VALUES]


def _pictures(found: RunContents) -> Iterator[Picture]:
    """Draw learning rate and time by step, and each recorded number of several checkpoints."""
    if any(row.step is not None for row in found.run.rows):
        yield run_steps(found.run)
    for name in _measured(found):
        values = {row: part.values[name] for row, part in found.parts.items() if name in part.values}
        if len([value for value in values.values() if math.isfinite(value)]) > 1:
            yield values_by_step(name, values, found.run)


def _table(page: Page, found: RunContents) -> None:
    """Add a row for each checkpoint, as `ls` has it, with the numbers that it records."""
    names = _measured(found)
    columns = [*COLUMNS[:-1], *(Column(name, "number") for name in names), COLUMNS[-1]]
    rows = []
    for row, cells in zip(found.run.rows, all_cells(found.run), strict=True):
        values = found.parts[row.name].values
        own = [number(values[name]) if name in values else "-" for name in names]
        rows.append([*cells[:-1], *own, cells[-1]])
    page.table("all checkpoints", columns, rows, opened=len(rows) <= MANY)


def _part(page: RunPage, row: CheckpointRow, part: CheckpointPart, name: str) -> None:
    """Add what is wrong with a checkpoint, what is in it, and the commands to inspect and to consolidate it."""
    word, level = _status(part)
    mark = MARKS[level]
    title = f'<h2>{safe(called(row))}</h2><span class="{mark}">{safe(word)}</span>'
    with page.part(name, title, opened=level != "good" or row.newest_whole):
        page.line(f"cannot be opened: {part.error}" if part.error else part.verdict.headline, mark)
        if part.verdict.remark:
            page.line(part.verdict.remark)
        if not part.error:
            incidents = incidents_of(causes_of(part.problems))
            following = "".join(f"<div>{safe(one.text)}</div>" for one in consequences_of(part.problems))
            page.drawing(incidents_html(incidents) + (f'<div class="cause">{following}</div>' if following else ""))
        for note in row.notes:
            page.line(note, "dim")
        page.lines(_commands(row, part) if not part.error else [f"ckptools doctor {quoted([row.path])}"])
        if part.facts:
            recorded = [(key, number(value), "as the checkpoint records it") for key, value in part.values.items()]
            page.table("what it is", FACT_COLUMNS, [*part.facts, *recorded], opened=True)
        if part.sections:
            page.table("what is in it", SECTION_COLUMNS, part.sections, opened=True)
        if part.checks:
            page.line(part.checks, "dim")
