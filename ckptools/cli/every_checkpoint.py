"""`--all`: do for every checkpoint of a run what a command does for one, in the order of their steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptools.cli.printing import answered_in_json, error_object, opened, remark, screen, show
from ckptools.cli.progress import Progress
from ckptools.display.record_json import to_json
from ckptools.display.screen import painted
from ckptools.display.tables import incident_lines, verdict_lines, wrapped
from ckptools.errors import CkptoolsError, UsageError
from ckptools.ls.record import called
from ckptools.ls.rows import unverified, verdict_in_run
from ckptools.model.incidents import causes_of, consequences_of
from ckptools.text import encodable, few, plural, printable

if TYPE_CHECKING:
    from ckptools.cli.options import OpeningOptions
    from ckptools.ls.record import CheckpointRow, RunFolder
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.model.verdict import Verdict

CANNOT = "cannot be opened"


@dataclass(frozen=True)
class OneOfRun:
    """What a command does for one checkpoint of a run.

    Attributes:
        command: its name, which also names the JSON schema.
        verdict: the key of the JSON object that says whether all is well.
        judged: makes the record of a checkpoint: a `Report` or a `Verification`.
        as_json: renders a record as one line.
        is_wrong: whether the command ends with exit code 1.
        with_verdict: replaces the verdict in a record.
        below: a line below verdict and incidents; "" for none.
        all_ranks: whether to read every rank.
    """

    command: str
    verdict: str
    judged: Callable[[Checkpoint], Any]
    as_json: Callable[[Any], str]
    is_wrong: Callable[[Any], bool]
    with_verdict: Callable[[Any, Verdict], Any]
    below: Callable[[Any], str] = lambda _: ""
    all_ranks: bool = True


def every_checkpoint(paths: Sequence[str], opening: OpeningOptions, json: bool, one: OneOfRun) -> None:
    """Print a block, or a JSON object on a line, for each checkpoint of a run, the oldest first, then a summary.

    Raises:
        SystemExit: with the highest exit code of all checkpoints, if it is not 0.
        UsageError: several paths were given, or an option for one checkpoint, or the path is not a folder.
        UnknownFormatError: no checkpoint is in the folder.
    """
    schema = f"ckptools/{one.command}/1"
    with answered_in_json(json, schema, one.verdict, paths):
        run = _run(paths, opening, one.command)
    most = max(row.ranks for row in run.rows)
    codes, counts = [0], Counter[str]()
    for row in reversed(run.rows):
        try:
            record = one.judged(opened([row.path], opening, one.all_ranks))
        except CkptoolsError as error:
            codes.append(error.exit_code)
            counts[CANNOT] += 1
            if json:
                show(to_json(error_object(schema, one.verdict, [row.path], error)))
            else:
                _show_block(row, wrapped("", printable(f"{CANNOT}: {error}"), screen(), mark="bad"))
            continue
        verdict = verdict_in_run(record.verdict, row, most)
        record = one.with_verdict(record, verdict)
        codes.append(int(one.is_wrong(record)))
        counts[_counted(verdict)] += 1
        if json:
            show(one.as_json(record))
        else:
            lines = incident_lines(causes_of(record.problems), consequences_of(record.problems), screen())
            below = one.below(record)
            more = wrapped("", below, screen(), mark="dim") if below else []
            _show_block(row, [*verdict_lines(verdict, screen()), *lines, *more])
    at = screen(sys.stderr) if json else screen()
    summed = "\n".join(wrapped("", _summary(run, counts), at))
    (remark if json else show)(encodable(summed, sys.stdout.encoding))
    for note in run.notes:
        remark(printable(f"note: {note}"))
    if max(codes):
        raise SystemExit(max(codes))


def _run(paths: Sequence[str], opening: OpeningOptions, command: str) -> RunFolder:
    from ckptools.cli.options import RunOptions
    from ckptools.files.opening import location

    if len(paths) != 1:
        raise UsageError(None, f"--all goes with the folder of a run, and {plural(len(paths), 'path')} were given")
    how = RunOptions(**vars(opening)).of_run(f"{command} --all")
    with Progress(stage="looking into the run", noun="checkpoint") as progress:
        return unverified(location(paths[0]), progress.item, how)


def _counted(verdict: Verdict) -> str:
    if verdict.whole is False:
        return "not whole"
    return ("whole" if verdict.whole else "not proven whole") + (" but with errors" if verdict.level == "bad" else "")


def _show_block(row: CheckpointRow, lines: Sequence[str]) -> None:
    heading = painted(called(row), "heading", screen().color)
    show(encodable("\n".join([heading, *lines, ""]), sys.stdout.encoding))


def _summary(run: RunFolder, counts: Counter[str]) -> str:
    found = ", ".join(f"{count} {words}" for words, count in counts.items())
    left = [f"left over from a write, or still being written: {few([one.name for one in run.left_over])}"]
    parts = [f"{plural(run.checkpoints, 'checkpoint')} in {run.path}: {found}", *(left if run.left_over else [])]
    return printable("; ".join(parts))
