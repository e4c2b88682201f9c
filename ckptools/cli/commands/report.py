"""`ckptools report`: write one HTML page about a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.cli.options import CheckOptions, OpeningOptions
from ckptools.cli.printing import opened, say_rendered, screen, show
from ckptools.cli.progress import Progress
from ckptools.cli.terminal import Printing
from ckptools.errors import CkptoolsError, ReadError, UsageError
from ckptools.option import option
from ckptools.text import encodable, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptools.cli.arguments import ReportedPaths
    from ckptools.display.screen import Screen

STDOUT = "-"


@dataclass(frozen=True)
class ReportedChecks(CheckOptions):
    """Options for the checks that a report shows."""

    values: bool = option(False, "Read every tensor; look for NaN, and put figures of each on the page.", common=True)


def report(
    paths: ReportedPaths,
    *,
    out: str = option(
        MISSING, "The page to write, x.html; - for standard output.", flag="--out -o", common=True, metavar="FILE"
    ),
    checks: ReportedChecks,
    force: bool = option(False, "Overwrite an output that exists.", common=True),
    interactive: bool = option(
        False, "Let one script in the page sort and filter tables, and link what is related.", common=True
    ),
    opening: OpeningOptions,
) -> None:
    """Write a page of HTML about a checkpoint, to mail or keep.

    It shows what inspect and verify find, the verdict first; every rank is read. It is one file, without network or
    (but for --interactive) script, with the JSON of both in it. If the checkpoint cannot be opened, it shows why, and
    the answers of doctor. Of the folder of a run it is a page of all checkpoints; of two checkpoints, of what differs.

    Exit code: that of verify, or of diff. 0 no check failed, or nothing differs; 1 a check failed, a checkpoint of the
    run cannot be opened, or the two differ (the page is written); 2 usage, 3 unreadable, 4 the page would overwrite
    something.

    Examples:
        ckptools report PATH -o report.html
        ckptools report PATH -o report.html --values --interactive
    """
    from ckptools.report.html import check_place

    if out != STDOUT:
        check_place(Path(out), force)
    if len(paths) == 2 and not _of_one_save(paths):
        _report_difference(paths, out, checks, force, interactive, opening)
    elif _is_run(paths, opening):
        _report_run(paths[0], out, checks, force, interactive, opening)
    else:
        _report_one(paths, out, checks, force, interactive, opening)


def _of_one_save(paths: Sequence[str]) -> bool:
    """Whether two paths are rank files of one checkpoint by their names, as a shell's glob makes them."""
    from ckptools.files.opening import path_of
    from ckptools.formats.rank_search.rank_names import parse

    a, b = (parse(path_of(path)) for path in paths)
    return a is not None and b is not None and a.path.parent == b.path.parent and a.group == b.group


def _is_run(paths: Sequence[str], opening: OpeningOptions) -> bool:
    single = (opening.step, opening.ranks)
    if len(paths) != 1 or single != (None, None) or opening.only_this_file:
        return False
    from ckptools.ls.one_of_run import is_run

    with Progress(stage="looking into the run", noun="checkpoint") as progress:
        return is_run(paths[0], progress.item, **opening.arguments)


def _report_run(
    path: str, out: str, checks: ReportedChecks, force: bool, interactive: bool, opening: OpeningOptions
) -> None:
    from ckptools.display.next_command import quoted
    from ckptools.report.run import findings, outcome_lines, run_page, write_run_report

    if interactive or checks.manifest is not None:
        word = "--interactive" if interactive else "--manifest"
        raise UsageError(
            None, f"{word} goes with the page of one checkpoint: ckptools report {quoted([path])} --step N"
        )
    how = opening.arguments
    with Progress(stage="verifying", noun="checkpoint") as progress:
        options: dict[str, Any] = {
            "deep": checks.deep,
            "values": checks.values,
            "ignore": checks.ignore,
            "on_verified": progress.item,
        }
        if out == STDOUT:
            found = findings(path, how, **options)
        else:
            found = write_run_report(path, out, how, force=force, **options)
    _tell(out, run_page(found, out) if out == STDOUT else "", partial(outcome_lines, found))
    if not found.ok:
        raise SystemExit(1)


def _report_difference(
    paths: Sequence[str], out: str, checks: ReportedChecks, force: bool, interactive: bool, opening: OpeningOptions
) -> None:
    from ckptools.cli.commands.diff import ComparisonOptions, compared
    from ckptools.cli.options import SelectionOptions
    from ckptools.report.difference import difference_page, outcome_lines, write_difference_report

    given = {"--interactive": interactive, "--deep": checks.deep, "--manifest": checks.manifest is not None}
    given["--ignore"] = bool(checks.ignore)
    if words := [word for word, is_given in given.items() if is_given]:
        text = f"{words[0]} goes with the page of one checkpoint; two are compared"
        raise UsageError(None, f"{text} (rank files of one: the folder that they are in, or --ranks PATTERN)")
    found = compared(paths[0], paths[1], ComparisonOptions(values=checks.values), SelectionOptions(), opening)
    if out != STDOUT:
        write_difference_report(found, out, force=force)
    _tell(out, difference_page(found, out) if out == STDOUT else "", partial(outcome_lines, found))
    if found.same is False:
        raise SystemExit(1)


def _report_one(
    paths: Sequence[str], out: str, checks: ReportedChecks, force: bool, interactive: bool, opening: OpeningOptions
) -> None:
    from ckptools.report.html import findings, outcome_lines, report_page, write_report
    from ckptools.verify.run import bytes_to_verify

    try:
        checkpoint = opened(paths, opening)
    except ReadError as error:
        raise _reported(error, paths, out, force, opening) from error
    total = bytes_to_verify(checkpoint, checks.deep, checks.values, checks.manifest)
    with Progress(total) as progress:
        how = {**vars(checks), "jobs": opening.jobs, "progress": progress}
        if out == STDOUT:
            found = findings(checkpoint, **how)
        else:
            found = write_report(checkpoint, out, force=force, interactive=interactive, **how)
    _tell(out, report_page(found, interactive, out) if out == STDOUT else "", partial(outcome_lines, found))
    if not found.verification.ok:
        raise SystemExit(1)


def _tell(out: str, page: str, outcome: Callable[[Screen], list[str]]) -> None:
    """Print the page, and the outcome beside it; or the outcome, if the page was written to a file."""
    if out == STDOUT:
        show(page.rstrip("\n"))
        say_rendered([] if Printing.quiet else outcome(screen(sys.stderr)))
    else:
        show(encodable("\n".join([*outcome(screen()), f"wrote {printable(out)}"]), sys.stdout.encoding))


def _reported(error: ReadError, paths: Sequence[str], out: str, force: bool, opening: OpeningOptions) -> CkptoolsError:
    """Write a page about an unreadable checkpoint, so that no older page is taken for it; return the error to raise."""
    from ckptools.doctor.examination import examined
    from ckptools.files.partial_files import write_text
    from ckptools.report.html import unreadable_page

    try:
        page = unreadable_page(examined(paths, **vars(opening)), str(error), Path(out).name)
    except CkptoolsError:
        return error  # the path does not exist, or options contradict each other
    if out == STDOUT:
        show(page.rstrip("\n"))
    else:
        write_text(Path(out), page, force)
    return ReadError(error.path, error.reason if out == STDOUT else f"{error.reason}; {out} says so", error.kind)
