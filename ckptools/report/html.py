"""The HTML page of `report`: the verdict, the records of `inspect` and `verify`, and pictures.

All its text comes from the functions that make lines and cells for the terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ckptools._version import __version__
from ckptools.consolidate import output_place
from ckptools.contents.text import TreeForm, tree_text
from ckptools.contents.tree import keys_of
from ckptools.display.drawing import Picture
from ckptools.display.html import Limits, Page, document, safe
from ckptools.display.next_command import after_verify
from ckptools.display.record_json import answer_json
from ckptools.display.screen import MARKS, PIPE, Screen
from ckptools.display.tables import verdict_lines, wrapped
from ckptools.doctor.answers import Diagnosis
from ckptools.dtypes import short
from ckptools.errors import UsageError
from ckptools.explain import Explanation, explanation
from ckptools.files.partial_files import check_place_of_file, write_text
from ckptools.inspect.record import (
    FACT_COLUMNS,
    SECTION_COLUMNS,
    Report,
    facts,
    group_table,
    inspect_report,
    scheduler_words,
    section_cells,
    size_expected,
)
from ckptools.inspect.sections import report_json
from ckptools.keys.entries import EVERYTHING, Entry, Selection, tensor_entries
from ckptools.keys.sharding import placement
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import Cause, Consequence, Incident, causes_of, consequences_of, incidents_of
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.records import grouped
from ckptools.model.verdict import Verdict
from ckptools.pictures.heat_map import heat_map, rms_cells
from ckptools.pictures.rank_map import bytes_by_section, rank_map
from ckptools.pictures.tensor_layout import tensor_layout
from ckptools.pictures.value_bars import norm_bars
from ckptools.stats.figures import statistics
from ckptools.stats.passes import parts_of
from ckptools.stats.record import Statistics, Stats, fill_rows, fill_suspects
from ckptools.tensor_io.fetch_ahead import begin_stage
from ckptools.text import count, few, moment, moment_utc, period, plural, size
from ckptools.training_state.sections import sections_of_kind
from ckptools.verify import record as verification
from ckptools.verify.record import Check, Result, Verification
from ckptools.verify.run import verify

# -- the first screen: the verdict in its colour, six facts, the worst causes and the ranks ---------------------------


MOST = 3
"""At most this many incidents on the first screen."""


def verdict_band(page: Page, verdict: Verdict, below: Sequence[str], commands: Sequence[str]) -> None:
    """Add the verdict in its colour, lines below it, and the commands to type next."""
    mark = MARKS[verdict.level]
    lines = "".join(f"<div>{safe(line)}</div>" for line in below)
    following = "".join(f"<div>next: <code>{safe(command)}</code></div>" for command in commands)
    page.drawing(f'<div class="band is-{mark}"><b class="{mark}">{safe(verdict.headline)}</b>{lines}{following}</div>')


def tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and remark of each fact."""
    step, ranks = report.checkpoint.step, report.ranks
    agree = f"{plural(len(step.sources), 'source')} agree" if step.agree else "SOURCES DISAGREE"
    yield (
        "step",
        "-" if step.value is None else str(step.value),
        agree if len(step.sources) > 1 else ", ".join(step.sources),
    )
    here = f"{ranks.here} of {ranks.expected}" if ranks.expected else plural(ranks.files, "file")
    yield "ranks here", here, plural(ranks.files, "file") if ranks.expected else ""
    models = [section.size for section in report.sections if section.kind == "model"]
    dtypes = Counter[str]()
    for one in models:
        dtypes.update(one.dtypes)
    words = [short(d) for d, _ in dtypes.most_common(3)] + ["quantized"] * any(one.quantized for one in models)
    yield "parameters", count(sum(one.params for one in models)), ", ".join(words)
    yield "size", size(report.bytes_found), size_expected(report)
    first, _, more = report.saved_as.partition(", ")
    yield "format", first, more
    if report.saved:
        day, _, time = moment(report.saved[0]).partition(" ")
        yield "saved", time, day if report.saved[0] == report.saved[1] else period(*report.saved)
    else:
        yield "saved", "-", "no file times"


def incident_list(page: Page, problems: Sequence[Problem]) -> None:
    """Add the worst incidents, the consequences of missing files, and further incidents, folded."""
    incidents, following = incidents_of(causes_of(problems)), consequences_of(problems)
    shown, others = incidents[:MOST], incidents[MOST:]
    made = "".join(map(_incident, shown)) + _following(problems, following)
    if others:
        rest = "".join(map(_incident, others))
        made += f"<details><summary>{plural(len(others), 'more problem')}</summary>{rest}</details>"
    title = page.heading(f"causes: {len(shown)} of {len(incidents)}" if incidents else "no problem was found")
    page.drawing(f"<section>{title}{made}</section>")


def _incident(one: Incident) -> str:
    culprit = f"<b>{safe(one.culprit)}</b>" if one.culprit else ""
    remedy = f'<div class="do">{safe(one.remedy)}</div>' if one.remedy else ""
    return f'<div class="cause">{culprit}{"".join(map(_evidence, one.causes))}{remedy}</div>'


def _evidence(cause: Cause) -> str:
    mark = "bad" if cause.severity == "error" else "warn"
    return f'<div><a class="{mark}" href="#{cause.code}">{cause.code}</a>{safe(cause.evidence)}</div>'


FIRST = 20
"""At most this many consequences of a missing file are listed by name."""


def _following(problems: Sequence[Problem], following: Sequence[Consequence]) -> str:
    """Render the consequences of missing files with their causes; the first ones by name, folded."""
    made = ""
    for one in following:
        named = [p for p in dict.fromkeys(problems) if p.code == one.code][:FIRST]
        lines = "<br>".join(safe(" ".join(filter(None, (p.tensor, p.message)))) for p in named)
        left = one.problems - len(named)
        more = f"<br>{left:,} more are in the JSON of this page" if left > 0 else ""
        title = f"{one.text} ({' and '.join(one.causes)})"
        made += f"<details><summary>{safe(title)}</summary><code>{lines}</code>{more}</details>"
    return f'<div class="cause">{made}</div>' if made else ""


def _explained(one: Explanation) -> str:
    """Render a problem code with its meaning, its causes and its remedies, as `ckptools explain` does."""
    parts = (("What causes it", one.causes), ("What to do", one.to_do))
    lists = "".join(f"<div>{title}:</div>{''.join(map(_step, items))}" for title, items in parts)
    title = f"<b>{one.code}</b> {safe(one.meaning)} <span class=dim>ckptools explain {one.code}</span>"
    return f'<div id="{one.code}" class="code">{title}<div>{safe(one.means)}</div>{lists}</div>'


def _step(text: str) -> str:
    return f'<div class="step">- {safe(text)}</div>'


# -- the page ----------------------------------------------------------------------------------------------------------


LIMITS = Limits(rows=1000, nbytes=400_000)
"""Limits of the page without its pictures; the JSON in it is never cut."""

MAX_TREE = 200
"""At most this many lines of the model's tree."""

MAX_LAYOUTS = 4
"""At most this many tensors get a picture of their layout."""


SCRIPT = Path(__file__).with_name("page.js")
"""The script of an interactive page."""


class PageContents(NamedTuple):
    """Contents of the page: a checkpoint with all ranks read, its records, and the time in seconds since 1970."""

    checkpoint: Checkpoint
    report: Report
    verification: Verification
    deep: bool
    values: bool
    statistics: Statistics[Stats] | None
    made: float


SUFFIXES = (".html", ".htm")


def check_place(out: Path, force: bool, checkpoint: Checkpoint | None = None) -> None:
    """Refuse to write a report over a file, before anything is read; `checkpoint` if it is already open.

    Raises:
        OutputExistsError: the report would overwrite a file.
        UsageError: the name does not end with `.html`, or its folder does not exist.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(out, "a report is a page of HTML: give it a name that ends in .html")
    if checkpoint is None:
        check_place_of_file(out, force)
    else:
        output_place.check_place(checkpoint, [out], force)


def write_report(
    checkpoint: Checkpoint, out: str | Path, *, force: bool = False, interactive: bool = False, **how: Any
) -> PageContents:
    """Write the report on a checkpoint to a file, which appears whole or not at all; `how` are options of `verify`.

    An `interactive` page has a script: it sorts and filters tables, and marks everything about one rank or key.
    """
    check_place(Path(out), force, checkpoint)
    found = findings(checkpoint, **how)
    write_text(Path(out), report_page(found, interactive), force)
    return found


def findings(checkpoint: Checkpoint, *, deep: bool = False, values: bool = False, **how: Any) -> PageContents:
    """Verify a checkpoint opened with all ranks, and compute statistics if `values`.

    The arguments are those of `Checkpoint.verify`.
    """
    verified = verify(checkpoint, deep=deep, values=values, **how)
    figures = None
    if values:
        parts = parts_of(checkpoint, EVERYTHING)
        begin_stage(how.get("progress"), "statistics", sum(part.nbytes for part in parts))
        figures = statistics(checkpoint.path, parts, False, how.get("jobs"), how.get("progress"))
    return PageContents(checkpoint, inspect_report(checkpoint), verified, deep, values, figures, time.time())


def report_page(found: PageContents, interactive: bool = False) -> str:
    """Render the report on a checkpoint as one document that includes the JSON of `inspect` and `verify`."""
    report, problems = found.report, list(all_problems(found))
    page = Page(lambda title: _command(report, title), LIMITS, headed=True)
    _first_screen(page, found, problems)
    contents = len(page.blocks)
    if found.statistics is not None and found.statistics.suspects:
        with page.folded("worth a look", opened=True):
            fill_suspects(page, found.statistics.suspects)
    drawn = "".join(picture.html() for picture in pictures_of(found))
    if drawn:
        page.drawing(f'<section>{page.heading("pictures")}<div class="two">{drawn}</div></section>')
    _checks(page, found)
    page.table("what it is", FACT_COLUMNS, list(facts(report)), opened=True)
    page.table("sections", SECTION_COLUMNS, section_cells(report.sections), opened=True)
    _training(page, report)
    _keys(page, found.checkpoint)
    if found.statistics is not None:
        fill_rows(page, found.statistics)
    for cause in causes_of(problems, ("note",)):
        page.line(f"{cause.code} {cause.where}: {cause.what}", "dim")
    kinds: dict[Code, None] = dict.fromkeys(problem.kind for problem in problems)
    if kinds:
        rows = "".join(_explained(explanation(kind.code)) for kind in kinds)
        page.drawing(f"<details open><summary>{page.heading('what the codes mean')}</summary>{rows}</details>")
    page.line(f"{verification.summary(found.verification)}; ckptools {__version__}, {moment_utc(found.made)}", "dim")
    links = "".join(f'<a href="#{name}">{safe(title)}</a>' for name, title in page.headings.items())
    page.blocks.insert(contents, f"<nav>{links}</nav>")
    answers = {"inspect": report_json(report), "verify": verification.verification_json(found.verification)}
    headline = f"{report.name}: {outcome_lines(found)[0]}"
    script = SCRIPT.read_text() if interactive else ""
    return document(headline, report.name, page.html(), answers, f"in {report.folder} · {report.saved_as}", script)


def _command(report: Report, title: str) -> str:
    """Return the command that shows every row of a table; for "", every labelled line, which statistics alone have."""
    files = report.arguments or "FILES"
    valued = not title or title.startswith("values of ")
    return f"ckptools stats {files} --limit 0" if valued else f"ckptools inspect {files}"


def unreadable_page(found: Diagnosis, why: str, made: float) -> str:
    """Render the report on a path that cannot be opened: the error in one line, and the answers of `doctor`."""
    page = Page("")
    page.drawing(f'<div class="band is-bad"><b class="bad">cannot be opened: {safe(why)}</b></div>')
    page.line(f"ckptools {__version__}, {moment_utc(made)}; what doctor says of it:", "dim")
    found._fill(page)
    answers = {"doctor": answer_json("doctor", found)}
    return document(f"cannot be opened: {found.path}", str(found.path), page.html(), answers)


def outcome_lines(found: PageContents, screen: Screen = PIPE) -> list[str]:
    """State whether the checkpoint is whole and every check passed; the worse of the two comes first."""
    verdict = found.verification.verdict
    return verdict_lines(verdict, screen) + wrapped("", verification.summary(found.verification), screen, mark="dim")


def _first_screen(page: Page, found: PageContents, problems: Sequence[Problem]) -> None:
    report, verified = found.report, found.verification
    below = [verified.verdict.remark] if verified.verdict.remark else []
    below.append(counted_checks(verified.checks))
    for result in ("partly", "not judged"):
        names = [check.name for check in verified.checks if check.result == result]
        below += [f"{result}: {', '.join(names)}"] if names else []
    commands = after_verify(report.arguments, report.next, verified.ok, found.deep and found.values, problems)
    verdict_band(page, verified.verdict, below, commands)
    made = "".join(
        f'<div class="tile"><span>{safe(name)}</span><b>{safe(value)}</b><i>{safe(more)}</i></div>'
        for name, value, more in tiles(report)
    )
    page.drawing(f'<div class="tiles">{made}</div>')
    page.drawing('<div class="two">')
    incident_list(page, problems)
    if len(found.checkpoint.files) > 1:
        page.drawing(
            f"<section>{page.heading('ranks')}{rank_map(found.checkpoint, verified.problems).html()}</section>"
        )
    page.drawing("</div>")


def counted_checks(checks: Sequence[Check]) -> str:
    """Count checks by result: `2 failed, 8 ok, 2 not judged`."""
    words: dict[Result, str] = {"FAIL": "failed", "warn": "with a warning"}
    counts = Counter(check.result for check in checks)
    results = get_args(Result)
    return "checks: " + ", ".join(f"{counts[one]} {words.get(one, one)}" for one in results if counts[one])


def _checks(page: Page, found: PageContents) -> None:
    """Add a table of the checks that failed or warned, then the others, folded."""
    rows = dict(zip(found.verification.checks, verification.check_rows(found.verification.checks), strict=True))
    for wrong in (True, False):
        own = {check: cells for check, cells in rows.items() if (check.result in ("FAIL", "warn")) is wrong}
        if own:
            title = counted_checks(list(own)) if wrong else counted_checks(list(own)).removeprefix("checks: ")
            page.table(title, verification.COLUMNS, list(own.values()), opened=wrong)


def all_problems(found: PageContents) -> Iterator[Problem]:
    """Yield the problems of `verify`, the worst first, then the notes and codes that only `inspect` found."""
    known = set(found.verification.problems)
    codes = {problem.code for problem in known}
    yield from worst_first(found.verification.problems)
    for problem in found.report.problems:
        if problem not in known and (problem.severity == "note" or problem.code not in codes):
            yield problem


def _training(page: Page, report: Report) -> None:
    for optimizer in report.optimizers:
        title = f"{optimizer.section}: {plural(len(optimizer.groups), 'param group')}"
        group_table(page, title, optimizer.groups, opened=True)
        if optimizer.note:
            page.line(optimizer.note, "warn" if optimizer.unnamed or optimizer.assumed else "dim")
    for scheduler in report.schedulers:
        page.line(f"{scheduler.section}: {scheduler_words(scheduler)}", "bad" if scheduler.agrees is False else "")
    if report.differing:
        page.line(f"differs between ranks, as it may: {few(report.differing, 20)}", "dim")


def _keys(page: Page, checkpoint: Checkpoint) -> None:
    if not sections_of_kind(checkpoint, "model"):
        return
    title = page.heading("the model's keys")
    page.drawing(f"<section>{title}</section>")
    page.lines(tree_text(keys_of(checkpoint, Selection(section="model")), TreeForm(limit=MAX_TREE)).splitlines())


def pictures_of(found: PageContents) -> Iterator[Picture]:
    """Draw bytes by section, statistics, and the layout of the largest tensor of each kind of sharding."""
    checkpoint, figures = found.checkpoint, found.statistics
    if any(section.size.tensors for section in found.report.sections):
        yield bytes_by_section(checkpoint)
    if figures is not None and (cells := rms_cells(figures)):
        yield heat_map(f"rms of weights of {checkpoint.name}", cells)
        yield norm_bars(f"l2 norms of tensors of {checkpoint.name}", figures)
    for entry in islice(_largest(checkpoint), MAX_LAYOUTS):
        yield tensor_layout(entry.value, entry.name)


def _largest(checkpoint: Checkpoint) -> Iterator[Entry]:
    """Yield the largest model tensor of each kind of sharding; the kind with the most tensors first."""
    sharded = (entry for entry in tensor_entries(checkpoint) if entry.kind == "model" and entry.value.sharded)
    ways = grouped(sharded, lambda entry: placement(entry.value))
    for entries in sorted(ways.values(), key=len, reverse=True):
        yield max(entries, key=lambda entry: entry.value.numel)
