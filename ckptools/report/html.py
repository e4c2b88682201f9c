"""The HTML page of `report`: the verdict, the records of `inspect` and `verify`, and pictures.

All its text comes from the functions that make lines and cells for the terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ckptools.consolidate import output_place
from ckptools.contents.text import TreeForm, tree_text
from ckptools.contents.tree import keys_of
from ckptools.display.drawing import Picture
from ckptools.display.html import Limits, Page, document, how_made, safe, short_title
from ckptools.display.next_command import after_verify, quoted
from ckptools.display.record_json import answer_json, to_json
from ckptools.display.screen import MARKS, PIPE, Screen
from ckptools.display.tables import Column, verdict_lines, wrapped
from ckptools.doctor.answers import Diagnosis
from ckptools.doctor.way_out import way_out
from ckptools.dtypes import short
from ckptools.errors import UsageError
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
from ckptools.keys.entries import Entry, Selection, tensor_entries
from ckptools.keys.sharding import placement
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.incidents import Consequence, causes_of, consequences_of, incidents_of
from ckptools.model.problems import Problem, worst_first
from ckptools.model.records import grouped
from ckptools.model.verdict import Verdict
from ckptools.pictures.heat_map import heat_map, rms_cells
from ckptools.pictures.rank_map import State, bytes_by_section, rank_cells, rank_map
from ckptools.pictures.tensor_layout import tensor_layout
from ckptools.pictures.value_bars import norm_bars
from ckptools.report.file_sizes import file_sizes
from ckptools.report.parts import add_meanings, contents_html, incidents_html, tiles_html
from ckptools.stats.figures import statistics
from ckptools.stats.passes import parts_of_models
from ckptools.stats.record import Statistics, Stats, fill_rows, fill_suspects
from ckptools.tensor_io.fetch_ahead import begin_stage
from ckptools.text import count, few, moment, period, plural, runs_of, size
from ckptools.training_state.models import trained_or_all
from ckptools.training_state.sections import sections_of_kind
from ckptools.verify import record as verification
from ckptools.verify.record import Check, Result, Verification
from ckptools.verify.run import verify

# -- the first screen: the verdict in its colour, six facts, the worst causes and the ranks ---------------------------


MOST = 3
"""At most this many incidents on the first screen."""


def verdict_band(
    page: Page,
    verdict: Verdict,
    below: Sequence[str],
    commands: Sequence[str],
    causes: str = "",
    picture: Picture | None = None,
) -> None:
    """Add the verdict in its colour; below it the causes (HTML), commands to type next and lines, beside a picture."""
    mark = MARKS[verdict.level]
    remark = f"<div>{safe(verdict.remark)}</div>" if verdict.remark else ""
    following = "".join(f"<div>next: <code>{safe(command)}</code></div>" for command in commands)
    lines = "".join(f'<div class="dim">{safe(line)}</div>' for line in below)
    said = f'<div class="said">{causes}<div class="next">{following}{lines}</div></div>'
    page.drawing(
        f'<div class="band is-{mark}"><b class="{mark}">{safe(verdict.headline)}</b>{remark}'
        f'<div class="two">{said}{picture.html() if picture else ""}</div></div>'
    )


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
    paths = {section.path for section in trained_or_all(report.checkpoint)}
    models = [section.size for section in report.sections if section.kind == "model" and section.path in paths]
    dtypes = Counter[str]()
    for one in models:
        dtypes.update(one.dtypes)
    words = [short(d) for d, _ in dtypes.most_common(3)] + ["quantized"] * any(one.quantized for one in models)
    yield "parameters", " + ".join(count(one.params) for one in models) or "0", ", ".join(words)
    yield "size", size(report.bytes_found), size_expected(report)
    first, _, more = report.saved_as.partition(", ")
    yield "format", first, more
    if report.saved:
        day, _, time = moment(report.saved[0]).partition(" ")
        lasted = moment(report.saved[0]) != moment(report.saved[1])
        yield "saved", time, period(*report.saved) if lasted else day
    else:
        yield "saved", "-", "no file times"


def incident_list(page: Page, problems: Sequence[Problem]) -> str:
    """Render the worst incidents, the consequences of missing files, and further incidents, folded."""
    incidents, following = incidents_of(causes_of(problems)), consequences_of(problems)
    shown, others = incidents[:MOST], incidents[MOST:]
    made = incidents_html(shown) + _following(problems, following)
    if others:
        title = plural(len(others), "more problem")
        made += f"<details><summary>{title}</summary>{incidents_html(others)}</details>"
    counted = f"causes: {len(shown)} of {len(incidents)}" if incidents else "no problem was found"
    return page.heading(counted, "causes" if incidents else "problems") + made


FIRST = 20
"""At most this many consequences of a missing file are listed by name."""


def _following(problems: Sequence[Problem], following: Sequence[Consequence]) -> str:
    """Render the consequences of missing files with their causes; the first ones by name, folded."""
    made = ""
    for one in following:
        named = [p for p in dict.fromkeys(problems) if p.code == one.code][:FIRST]
        lines = "".join(f"<div>{safe(' '.join(filter(None, (p.tensor, p.message))))}</div>" for p in named)
        left = one.problems - len(named)
        more = f"{left:,} more are in the JSON of this page" if left > 0 else ""
        title = f"{one.text} ({' and '.join(one.causes)})"
        made += f"<details><summary>{safe(title)}</summary><code>{lines}</code>{more}</details>"
    return f'<div class="cause follows">{made}</div>' if made else ""


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
    """Contents of the page: a checkpoint with all ranks read, its records, and further options of the command."""

    checkpoint: Checkpoint
    report: Report
    verification: Verification
    deep: bool
    values: bool
    statistics: Statistics[Stats] | None
    options: tuple[str, ...] = ()


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

    An `interactive` page has a script: it sorts and filters tables, marks everything about one rank or key, and shows
    only what is about a rank that the reader pins.
    """
    check_place(Path(out), force, checkpoint)
    found = findings(checkpoint, **how)
    write_text(Path(out), report_page(found, interactive, Path(out).name), force)
    return found


def findings(checkpoint: Checkpoint, *, deep: bool = False, values: bool = False, **how: Any) -> PageContents:
    """Verify a checkpoint opened with all ranks, and compute statistics if `values`.

    The arguments are those of `Checkpoint.verify`.
    """
    verified = verify(checkpoint, deep=deep, values=values, **how)
    figures = None
    if values:
        parts = parts_of_models(checkpoint, trained_or_all(checkpoint))
        begin_stage(how.get("progress"), "statistics", sum(part.nbytes for part in parts))
        figures = statistics(checkpoint.path, parts, False, how.get("jobs"), how.get("progress"))
    ignored = ["--ignore", ",".join(how["ignore"])] if how.get("ignore") else []
    manifest = ["--manifest", str(how["manifest"])] if how.get("manifest") else []
    options = (*["--deep"] * deep, *["--values"] * values, *manifest, *ignored)
    return PageContents(checkpoint, inspect_report(checkpoint), verified, deep, values, figures, options)


def report_page(found: PageContents, interactive: bool = False, out: str = "report.html") -> str:
    """Render the report on a checkpoint as one document that includes the JSON of `inspect` and `verify`.

    `out` is the name of the page in the command that makes it again.
    """
    report, problems = found.report, list(all_problems(found))
    page = Page(lambda title: _command(report, title), LIMITS, headed=True)
    contents = len(page.blocks)
    cells = rank_cells(found.checkpoint, found.verification.problems)
    _first_screen(page, found, problems)
    if found.statistics is not None and found.statistics.suspects:
        with page.folded("worth a look", opened=True):
            fill_suspects(page, found.statistics.suspects)
    states = {cell.rank: cell.state for cell in cells if cell.rank is not None}
    drawn = "".join(picture.html() for picture in pictures_of(found, states))
    if drawn:
        page.drawing(f'<section>{page.heading("pictures")}<div class="two">{drawn}</div></section>')
    _checks(page, found)
    page.table("what it is", FACT_COLUMNS, list(facts(report)), opened=True)
    page.table("sections", SECTION_COLUMNS, section_cells(report.sections), opened=True)
    _sizes(page, found.checkpoint)
    _training(page, report)
    _keys(page, found.checkpoint)
    if found.statistics is not None:
        fill_rows(page, found.statistics)
    for cause in causes_of(problems, ("note",)):
        page.line(f"{cause.code} {cause.where}: {cause.what}", "dim")
    add_meanings(page, (problem.kind for problem in problems), opened=True)
    page.line(verification.summary(found.verification), "dim")
    page.blocks.insert(contents, contents_html(page))
    answers = {"inspect": report_json(report), "verify": verification.verification_json(found.verification)}
    if interactive:
        listed = [problem for check in found.verification.checks for problem in check.problems]
        ranks = [", ".join(chain.from_iterable(runs_of(problem.all_ranks))) for problem in listed]
        answers["ranks"] = to_json({"of_problems": ranks})
    script = SCRIPT.read_text() if interactive else ""
    options = (*found.options, *["--interactive"] * interactive)
    saved = [f"checkpoint saved {moment(report.saved[1])}"] if report.saved else []
    return document(
        short_title(report.name, outcome_lines(found)[0]),
        report.name,
        page.html(),
        answers,
        f"{found.checkpoint.path} · {report.saved_as}",
        script,
        how_made(f"ckptools report {report.arguments or 'FILES'} -o {quoted([out, *options])}", *saved),
    )


def _command(report: Report, title: str) -> str:
    """Return the command that shows every row of a table; for "", every labelled line, which statistics alone have."""
    files = report.arguments or "FILES"
    valued = not title or title.startswith("values of ")
    return f"ckptools stats {files} --limit 0" if valued else f"ckptools inspect {files}"


def unreadable_page(found: Diagnosis, why: str, out: str = "report.html") -> str:
    """Render the report on a path that cannot be opened: the error in one line, and the answers of `doctor`."""
    page = Page("")
    page.drawing(f'<div class="band is-bad"><b class="bad">cannot be opened: {safe(why)}</b></div>')
    page.line("what doctor says of it:", "dim")
    found._fill(page)
    answers = {"doctor": answer_json("doctor", found)}
    name, command = Path(found.path).name or str(found.path), f"ckptools report {quoted([str(found.path), '-o', out])}"
    title = short_title(name, "cannot be opened")
    return document(title, name, page.html(), answers, str(found.path), made=how_made(command))


def outcome_lines(found: PageContents, screen: Screen = PIPE) -> list[str]:
    """State whether the checkpoint is whole and every check passed; the worse of the two comes first."""
    verdict = found.verification.verdict
    return verdict_lines(verdict, screen) + wrapped("", verification.summary(found.verification), screen, mark="dim")


def _first_screen(page: Page, found: PageContents, problems: Sequence[Problem]) -> None:
    report, verified = found.report, found.verification
    below = [counted_checks(verified.checks)]
    for result in ("partly", "not judged"):
        names = [check.title for check in verified.checks if check.result == result]
        below += [f"{result}: {', '.join(names)}"] if names else []
    out = way_out(found.checkpoint, {}, verified.verdict, verified.to_fetch, found.deep)
    after = after_verify(report.arguments, report.next, verified.ok, found.deep and found.values, problems)
    commands = after if out is None else [out.line]
    several = len(found.checkpoint.files) > 1
    picture = rank_map(found.checkpoint, verified.problems) if several else None
    verdict_band(page, verified.verdict, below, commands, incident_list(page, problems), picture)
    page.drawing(tiles_html(tiles(report)))


def counted_checks(checks: Sequence[Check]) -> str:
    """Count checks by result: `2 failed, 8 ok, 2 not judged`."""
    words: dict[Result, str] = {"FAIL": "failed", "warn": "with a warning"}
    counts = Counter(check.result for check in checks)
    results = get_args(Result)
    return "checks: " + ", ".join(f"{counts[one]} {words.get(one, one)}" for one in results if counts[one])


def _checks(page: Page, found: PageContents) -> None:
    """Add a table of the checks that failed or warned, then the others, folded."""
    rows = dict(zip(found.verification.checks, verification.check_rows(found.verification.checks), strict=True))
    other = ""
    for wrong in (True, False):
        own = {check: cells for check, cells in rows.items() if (check.result in ("FAIL", "warn")) is wrong}
        if own:
            page.table(other + counted_checks(list(own)), verification.COLUMNS, list(own.values()), opened=wrong)
            other = "other "


def all_problems(found: PageContents) -> Iterator[Problem]:
    """Yield the problems of `verify`, the worst first, then the notes and codes that only `inspect` found."""
    known = set(found.verification.problems)
    codes = {problem.code for problem in known}
    yield from worst_first(found.verification.problems)
    for problem in found.report.problems:
        if problem not in known and (problem.severity == "note" or problem.code not in codes):
            yield problem


MAX_FILES = 200
"""At most this many files have a row in the table of files."""

FILE_COLUMNS = (
    Column("rank", "number"), Column("file", "name"), Column("status", "verdict"), Column("size", "number"),
    Column("bytes", "number"), Column("of tensors", "number"), Column("overhead", "number"),
)  # fmt: skip
SIZE_COLUMNS = (Column("what"), Column("bytes", "number"), Column("size", "number"))


def _sizes(page: Page, checkpoint: Checkpoint) -> None:
    """Add a table whose lines add up to the size of the files, and a row for each file."""
    found = file_sizes(checkpoint)
    if found is None:
        why = "of compressed files, and of files of unknown size, the bytes of tensors are not known"
        page.line(f"{why}, so sizes are not added up here", "dim")
        own = {}
    else:
        lines = [
            (
                f"= {line.name}" if line.total else line.name,
                f"{line.nbytes:,}",
                f"{'-' if line.nbytes < 0 else ''}{size(abs(line.nbytes))}",
            )
            for line in found.lines
        ]
        page.table(f"sizes: {found.words}", SIZE_COLUMNS, lines, opened=True)
        own = {one.file.path: one for one in found.files}
    rows = []
    for file in checkpoint.files[:MAX_FILES]:
        one = own.get(file.path)
        tensors, overhead = (one.tensors, one.overhead) if one else (None, None)
        parts = ("-" if nbytes is None else f"{nbytes:,}" for nbytes in (tensors, overhead))
        rank = "-" if file.rank is None else str(file.rank)
        rows.append((rank, file.path.name, file.status, size(file.nbytes), f"{file.nbytes:,}", *parts))
    page.table(f"files: {len(checkpoint.files)}", FILE_COLUMNS, rows, len(checkpoint.files))


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


def pictures_of(found: PageContents, states: Mapping[int, State]) -> Iterator[Picture]:
    """Draw bytes by section, statistics, and the layout of the largest tensor of each kind of sharding.

    `states` of ranks colour the layouts as they colour the map of ranks.
    """
    checkpoint, figures = found.checkpoint, found.statistics
    if any(section.size.tensors for section in found.report.sections):
        yield bytes_by_section(checkpoint)
    if figures is not None and (cells := rms_cells(figures)):
        yield heat_map(f"rms of weights of {checkpoint.name}", cells)
        yield norm_bars(f"l2 norms of tensors of {checkpoint.name}", figures)
    for entry in islice(_largest(checkpoint), MAX_LAYOUTS):
        yield tensor_layout(entry.value, entry.name, states=states)


def _largest(checkpoint: Checkpoint) -> Iterator[Entry]:
    """Yield the largest model tensor of each kind of sharding; the kind with the most tensors first."""
    sharded = (entry for entry in tensor_entries(checkpoint) if entry.kind == "model" and entry.value.sharded)
    ways = grouped(sharded, lambda entry: placement(entry.value))
    for entries in sorted(ways.values(), key=len, reverse=True):
        yield max(entries, key=lambda entry: entry.value.numel)
