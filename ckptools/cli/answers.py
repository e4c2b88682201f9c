"""How a command opens what it was given, and prints the record that it found in the form that was asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckptools.cli.printing import screen, show
from ckptools.cli.progress import CountLine
from ckptools.errors import CkptoolsError, ReadError, UsageError
from ckptools.model.records import Rows, record_fields
from ckptools.text import encodable

if TYPE_CHECKING:
    from ckptools.cli.shared_options import OpeningOptions, RowOptions, TableOptions
    from ckptools.display.tables import Screen
    from ckptools.formats.options import Reader
    from ckptools.model.checkpoint import Checkpoint

Row = TypeVar("Row")


def opened(
    paths: Sequence[str],
    how: OpeningOptions,
    all_ranks: bool = True,
    read: Reader | None = None,
    every_item: bool = True,
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, and say how far it is; `read` replaces the inert reader."""
    from ckptools.formats.open import open_checkpoint
    from ckptools.training_state import modules

    with CountLine("read the structure of", "file") as line:
        reader = read or modules.read_file
        try:
            found = open_checkpoint(
                paths, all_ranks=all_ranks, read_file=reader, on_file=line, every_item=every_item, **vars(how)
            )
        except ReadError as error:
            if error.kind == "unfinished" and error.path is not None:
                from ckptools.files.last_write import just_written, last_write

                if recent := just_written(last_write(error.path)):
                    raise ReadError(error.path, f"{error.reason}; {recent}", error.kind) from error
            if error.kind != "cut":
                raise
            from ckptools.display.next_command import quoted

            # The other ranks' files may be sound, and an earlier checkpoint whole.
            around = f"what else is here: ckptools doctor {quoted(paths)}"
            raise ReadError(
                error.path, f"{error.reason}; copy it again, unless its save died; {around}", error.kind
            ) from error
    # What opens it again, such as for another rank, has no line to draw on: this one has been erased.
    return replace(found, options=found.options and replace(found.options, on_file=None))


def arranged(rows: Rows[Row], how: RowOptions) -> Rows[Row]:
    """The rows that are shown, in the order that was asked for: by names from a to z, by numbers from the largest.

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
    text: Callable[[Any, Screen], str],
    limit: int | None = None,
) -> None:
    """Print an answer in the form that was asked for.

    `command` is also the name of its schema; of its `rows` there are `--jsonl` and
    `--table-format`; `text` makes the answer a text that is cut to a screen, of which `limit` replaces the rows.
    """
    if form.json:
        from ckptools.display.record_json import answer_json

        show(answer_json(command, answer))
    elif form.is_text:
        cut = screen() if limit is None else screen()._replace(rows=limit or None, limited=True)
        show(encodable(text(answer, cut), sys.stdout.encoding))
    elif form.table_format:
        from ckptools.display.row_table import rows_text

        if rows:
            show(encodable(rows_text(rows, form.table_format), sys.stdout.encoding))
    elif rows:
        from ckptools.display.record_json import json_lines

        show("\n".join(json_lines(rows)))


@contextmanager
def answered_in_json(wanted: bool, schema: str, verdict: str, paths: Sequence[str]) -> Iterator[None]:
    """Print an object also when nothing can be opened, if JSON is wanted; the error goes on to its line on stderr.

    `verdict` is the key that says whether all is well: false for what cannot be read, null where nothing was looked at;
    "" where the object of this schema has none.
    """
    try:
        yield
    except CkptoolsError as error:
        if wanted:
            from ckptools.display.record_json import to_json

            answer = False if error.exit_code == CkptoolsError.exit_code else None
            judged = {verdict: answer} if verdict else {}
            what = {"schema": schema, "path": " ".join(paths)}
            show(to_json({**what, **judged, "error": str(error), "exit_code": error.exit_code}, indent=1))
        raise
