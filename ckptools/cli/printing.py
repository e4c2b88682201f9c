"""Print the output of a command on stdout, and errors, warnings and remarks on stderr; end the process quickly."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ckptools.cli.progress import Progress
from ckptools.cli.terminal import Printing, without_bar
from ckptools.display.screen import PIPE, Mark, Screen, in_roles, mark_of, painted
from ckptools.errors import CkptoolsError, ReadError, SeveralError, UsageError
from ckptools.model.records import Rows, record_fields
from ckptools.text import encodable, few, plural, printable

if TYPE_CHECKING:
    from ckptools.cli.options import OpeningOptions, RowOptions, TableOptions
    from ckptools.formats.options import Reader
    from ckptools.model.checkpoint import Checkpoint


def in_color(stream: TextIO) -> bool:
    """Whether to print colours on a stream: only on a terminal with colours, unless the user decides."""
    if Printing.color != "auto":
        return Printing.color == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def show(text: str) -> None:
    """Print to stdout.

    If the reader has closed the pipe, as `| head` does, the exit code still is the verdict.
    """
    if Printing.silent:
        return
    try:
        with without_bar():
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Discard everything that is still printed, so that Python does not complain while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_output_error(error: OSError) -> None:
    """Report that the output of the command cannot be written, and stop writing it."""
    say(f"error: {error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}")
    discard_stdout()


def open_closed_streams() -> None:
    """Open standard streams that the caller has closed (`>&-`) to the null device, before a file gets their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)  # for the ranks that `create` starts
            setattr(sys, name, os.fdopen(number, mode))


def remark_private(left_out: int) -> None:
    """Say how many values named `_...` were left out, and how to see them."""
    if left_out:
        remark(f"{plural(left_out, 'private value')} not shown: --private")


def remark(text: str) -> None:
    """Print lines on stderr that are not part of the output; nothing with `--quiet`."""
    if not Printing.quiet:
        lines = [piece for line in text.split("\n") for piece in _fitting(line)]
        _complain(in_roles("\n".join(lines), in_color(sys.stderr)))


def remark_next(command: str) -> None:
    """Propose the next command on stderr; a comment that does not fit behind it has a line of its own."""
    line, width = f"next: {command}", screen(sys.stderr).width
    if width is not None and len(line) > width:
        typed, _, comment = line.partition("     # ")
        line = f"{typed}\n      # {comment}" if comment else line
    remark(line)


def say_rendered(lines: Iterable[str]) -> None:
    """Print lines on stderr that are already printable and coloured."""
    for line in lines:
        with contextlib.suppress(OSError):
            _complain(line)


def _complain(text: str) -> None:
    if Printing.silent:
        return
    with without_bar():
        sys.stderr.write(f"{encodable(text, sys.stderr.encoding)}\n")
        sys.stderr.flush()


def _fitting(text: str, label: str = "") -> list[str]:
    """Break a line between words if the terminal of stderr is too narrow for it; further lines begin below the text."""
    width = screen(sys.stderr).width
    if width is None or len(label) + len(text) <= width:
        return [f"{label}{text}"]
    from ckptools.display.tables import wrapped

    return wrapped(label, text, Screen(width))


def say(message: str, mark: Mark = "") -> None:
    """Print one line on stderr, with control characters made visible.

    `mark` colours the line; without it, the first word of errors and warnings is coloured, and what a user can type.
    """
    # If stderr cannot be written, the exit code still tells the result.
    with contextlib.suppress(OSError):
        text, color = printable(message), in_color(sys.stderr)
        word, colon, rest = text.partition(": ")
        if mark:
            lines = [painted(line, mark, color) for line in _fitting(text)]
        elif word in ("error", "warning"):
            first, *others = _fitting(rest, f"{word}{colon}")
            own = painted(word, mark_of(word), color) + in_roles(first.removeprefix(word), color)
            lines = [own, *(in_roles(line, color) for line in others)]
        else:
            lines = [in_roles(line, color) for line in _fitting(text)]
        _complain("\n".join(lines))


ROWS = 40
"""Most rows of a table on a terminal."""


def screen(stream: TextIO | None = None) -> Screen:
    """Describe the terminal behind a stream, stdout by default; a pipe has no limits."""
    to = stream or sys.stdout
    if not to.isatty():
        return PIPE._replace(color=in_color(to))
    import shutil

    return Screen(shutil.get_terminal_size().columns, ROWS, in_color(to))


class Ending:
    """Ends the process at once, without destroying its objects, which would take a tenth of an `inspect`.

    Attributes:
        code: exit code, if known; None if Python still has to print, such as a traceback.
        with_torch: end at once even with torch imported, as gloo's threads and Python may wait for each other.
            Otherwise torch's threads, and open files of a user's code in `ckptools shell`, end as usual.
    """

    code: int | None = None
    with_torch = False

    @classmethod
    def leave(cls) -> None:
        """Flush the output, and end the process."""
        if cls.code is None or ("torch" in sys.modules and not cls.with_torch):
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(cls.code)


# -- how commands open checkpoints and print records -------------------------------------------------------------------


Row = TypeVar("Row")


def opened(
    paths: Sequence[str],
    how: OpeningOptions,
    all_ranks: bool = True,
    read: Reader | None = None,
    every_item: bool = True,
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, showing progress; `read` replaces the inert reader.

    Of a run's folder it opens the checkpoint of the given step, or else the newest whole one, and says so.
    """
    if how.step is not None:
        from ckptools.ls.one_of_run import check_step, paths_of_step

        with Progress(stage="looking into the run", noun="checkpoint") as progress:
            chosen = paths_of_step(paths, how.step, progress.item, **how.arguments)
        return check_step(_opened(chosen, how, all_ranks, read, every_item), how.step)
    try:
        return _opened(paths, how, all_ranks, read, every_item)
    except SeveralError:
        newest = _newest_whole(paths, how)
        if newest is None:
            raise
        return _opened([newest], how, all_ranks, read, every_item)


def remark_model(checkpoint: Checkpoint) -> None:
    """Say on stderr which of several models is looked at, and how to choose another."""
    from ckptools.training_state.models import note_on_choice

    if note := note_on_choice(checkpoint):
        remark(note)


def _newest_whole(paths: Sequence[str], how: OpeningOptions) -> str | None:
    """Find the newest whole checkpoint of a run, and say so; None if steps do not prove which one it is.

    If two checkpoints have one step, they may be two models; if steps and names or file times disagree, a file may be
    misplaced, or of an earlier attempt. Then the user has to choose.
    """
    from ckptools.display.next_command import quoted
    from ckptools.ls.folder_around import of_run
    from ckptools.ls.record import called
    from ckptools.ls.rows import checkpoints_in, order_notes

    if len(paths) != 1 or how.ranks is not None or how.only_this_file or how.salvage:
        return None
    with Progress(stage="looking into the run", noun="checkpoint") as progress:
        run = checkpoints_in(paths[0], on_found=progress.item, **of_run(how.arguments))
    steps = [row.step for row in run.rows]
    newest = run.newest
    if newest is None or run.ordered_by != "step" or None in steps or len(set(steps)) < len(steps):
        return None
    if not all(row.step_agrees for row in run.rows) or any(order_notes(run.rows, run.ordered_by)):
        return None
    newer = f"; NOT WHOLE and newer: {few(run.wrong_not_older, 3)}" if run.wrong_not_older else ""
    others = f"of {plural(run.checkpoints, 'checkpoint')} the newest whole one is opened: {called(newest)}{newer}"
    remark(printable(f"{others}; all of them: ckptools ls {quoted(paths)}"))
    return newest.path


def _opened(
    paths: Sequence[str | Path], how: OpeningOptions, all_ranks: bool, read: Reader | None, every_item: bool
) -> Checkpoint:
    from ckptools.formats.open import open_checkpoint
    from ckptools.training_state import modules

    with Progress(stage="reading the structure", noun="file") as progress:
        reader = read or modules.read_file
        try:
            found = open_checkpoint(
                paths,
                all_ranks=all_ranks,
                read_file=reader,
                on_file=progress.item,
                every_item=every_item,
                **how.arguments,
            )
        except ReadError as error:
            if error.kind == "unfinished" and error.path is not None:
                from ckptools.files.storage import just_written, last_write

                if recent := just_written(last_write(error.path)):
                    raise ReadError(error.path, f"{error.reason}; {recent}", error.kind) from error
            if error.kind != "cut":
                raise
            from ckptools.display.next_command import quoted

            # Other ranks' files may be undamaged, and an earlier checkpoint whole.
            around = f"what else is here: ckptools doctor {quoted(list(map(str, paths)))}"
            raise ReadError(
                error.path, f"{error.reason}; copy it again, unless its save died; {around}", error.kind
            ) from error
    # Remove the callback: the progress is over when the checkpoint is opened again, as for other ranks.
    return replace(found, options=found.options and replace(found.options, on_file=None))


def arranged(rows: Rows[Row], how: RowOptions) -> Rows[Row]:
    """Sort and limit rows as the options say: names from a to z, numbers from the largest.

    Raises:
        UsageError: the rows have no such column.
    """
    by = (how.sort or "").removeprefix("-").replace("-", "_")
    if by and rows:
        known = record_fields(rows[0]) or ()
        if by not in known:
            raise UsageError(None, f"--sort {how.sort}: there is no such column; they are {', '.join(known)}")
        numbers = any(isinstance(getattr(row, by), (int, float)) for row in rows)
        rows = rows.sort(by, reverse=numbers != str(how.sort).startswith("-"))
    return rows[: how.limit] if how.limit else rows


def show_answer(
    form: TableOptions,
    command: str,
    answer: Any,
    rows: Rows[Any],
    text: Callable[[Any, Screen], str] | None = None,
    limit: int | None = None,
) -> None:
    """Print a record in the form that the options ask for.

    `command` also names its JSON schema; `rows` are printed by `--jsonl` and `--table-format`; `text` renders the
    record for a screen if it has no page. Tables have at most `limit` rows if given.
    """
    if form.json:
        from ckptools.display.record_json import answer_json

        show(answer_json(command, answer))
    elif form.is_text:
        from ckptools.display.page import page_text

        cut = screen() if limit is None else screen()._replace(rows=limit or None, limited=True)
        show(encodable((text or page_text)(answer, cut), sys.stdout.encoding))
    elif form.table_format:
        from ckptools.display.tables import rows_text

        if rows:
            show(encodable(rows_text(rows, form.table_format), sys.stdout.encoding))
    elif rows:
        from ckptools.display.record_json import json_lines

        show("\n".join(json_lines(rows)))


@contextmanager
def answered_in_json(wanted: bool, schema: str, verdict: str, paths: Sequence[str]) -> Iterator[None]:
    """With `--json`, also print an object if nothing can be opened; the error still goes to stderr.

    `verdict` is the key that says whether all is well: false for an unreadable checkpoint, null if nothing was opened;
    "" if the schema has no such key.
    """
    try:
        yield
    except CkptoolsError as error:
        if wanted:
            from ckptools.display.record_json import to_json

            show(to_json(error_object(schema, verdict, paths, error), indent=1))
        raise


def error_object(schema: str, verdict: str, paths: Sequence[str], error: CkptoolsError) -> dict[str, Any]:
    """Make the JSON object of a path that cannot be opened; the arguments are those of `answered_in_json`."""
    answer = False if error.exit_code == CkptoolsError.exit_code else None
    judged = {verdict: answer} if verdict else {}
    what = {"schema": schema, "path": " ".join(paths)}
    return {**what, **judged, "error": str(error), "exit_code": error.exit_code}
