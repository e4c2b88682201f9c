"""Options that several commands have, as records, with what each of them does.

Opening a checkpoint, choosing among its keys and rows, and the form of the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckptools.cli.printing import screen, show
from ckptools.errors import CkptoolsError, UsageError
from ckptools.model.records import Rows, record_fields
from ckptools.option import option
from ckptools.text import encodable

if TYPE_CHECKING:
    from ckptools.display.tables import Screen
    from ckptools.formats.options import Reader
    from ckptools.keys.entries import Selection
    from ckptools.model.checkpoint import Checkpoint

Row = TypeVar("Row")


# -- opening ----------------------------------------------------------------------------------------------------------


class Engine(str, Enum):
    """The engine that reads the files."""

    inert = "inert"
    torch = "torch"


@dataclass(frozen=True)
class OpeningOptions:
    """Options of opening a checkpoint, by any command."""

    ranks: str | None = option(
        None,
        "What the rank files in the folder PATH are called, such as 'model-{rank}-of-{world}.pt'.",
        metavar="PATTERN",
    )
    only_this_file: bool = option(False, "Do not look for the other ranks' files.")
    follow_symlinks: bool = option(False, "Accept links that lead out of the folder.")
    weights: Literal["fp32", "module"] = option(
        "fp32", "Where the model is stored twice (DeepSpeed, Megatron): fp32 master copy, or module."
    )
    rules: Path | None = option(None, "JSON that says how tensor-parallel weights are joined (Megatron, Meta Llama).")
    shapes: Path | None = option(
        None,
        "For FSDP1 flat parameters: where their shapes are stated, another checkpoint or a JSON of name to shape.",
        metavar="FROM",
    )
    names: Path | None = option(
        None,
        "For an optimizer keyed by number: what names its parameters, a checkpoint that keeps the module's order or a "
        "JSON list in the optimizer's order.",
        metavar="FROM",
    )
    jobs: int | None = option(None, "Threads, and processes that open many rank files.", flag="--jobs -j")

    def keywords(self) -> dict[str, Any]:
        """The options as keyword arguments of whatever opens a checkpoint."""
        return {known.name: getattr(self, known.name) for known in fields(self)}


AS_A_USER_WOULD = OpeningOptions()
"""The options where nothing else was asked for."""


def opened(
    paths: Sequence[str], how: OpeningOptions = AS_A_USER_WOULD, all_ranks: bool = True, read: Reader | None = None
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does, and say how far it is.

    Args:
        paths: a path, or those of several rank files.
        how: what the user asked for.
        all_ranks: read every rank's structure, not only that of the file that was named.
        read: reads one file; None for the inert reader.
    """
    from ckptools.cli.progress import ReadingLine
    from ckptools.formats.open import open_checkpoint
    from ckptools.training_state import modules

    with ReadingLine() as line:
        return open_checkpoint(
            paths,
            all_ranks=all_ranks,
            read_file=read or modules.read_file,
            on_file=line,
            **how.keywords(),
        )


# -- keys and rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivateOption:
    """Whether values that are private to the class that wrote them are shown."""

    private: bool = option(False, "Show also values whose names begin with '_'.")


WITHOUT_PRIVATE = PrivateOption()


@dataclass(frozen=True)
class SelectionOptions:
    """Which keys of a checkpoint are looked at."""

    filter: list[str] | None = option(
        None,
        "Only keys that match, such as 'blocks.*.weight' (* matches dots too); may be repeated.",
        metavar="GLOB",
        completed="keys",
    )
    exclude: list[str] | None = option(None, "No keys that match; may be repeated.", metavar="GLOB", completed="keys")
    section: str | None = option(
        None,
        "Only one section: model, optimizer, scheduler, rng, other, a section's own name; or all.",
        completed="sections",
    )

    @property
    def selection(self) -> Selection:
        """The selection in the form that the rooms below take."""
        from ckptools.keys.entries import Selection

        return Selection(tuple(self.filter or ()), tuple(self.exclude or ()), self.section or "")


ALL_KEYS = SelectionOptions()


@dataclass(frozen=True)
class RowOptions:
    """Which rows of a table are shown, and in which order."""

    sort: str | None = option(
        None,
        "Sort by this column: names from a to z, numbers from the largest; -COLUMN the other way.",
        metavar="COLUMN",
    )
    limit: int | None = option(None, "Show this many rows; 0 for all. [default: what fits a terminal, all when piped]")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise UsageError(None, f"--limit {self.limit}: 0 is for all")


IN_ORDER = RowOptions()


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


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableOptions:
    """The form in which an answer is printed that is more than its rows."""

    json: bool = option(False, "Print one JSON object for other programs.")
    jsonl = False
    table_format: str | None = option(
        None, "Print the rows alone, as a github, tsv, latex, html or other table of tabulate.", metavar="FORMAT"
    )

    def __post_init__(self) -> None:
        """Refuse two forms, and a table that nothing makes, before anything is read."""
        if self.json + self.jsonl + (self.table_format is not None) > 1:
            raise UsageError(None, "--json, --jsonl and --table-format are forms of one answer: give one of them")
        if self.table_format is not None:
            from ckptools.display.row_table import check_table_format

            check_table_format(self.table_format)

    @property
    def is_text(self) -> bool:
        """Whether the answer is printed in full, as text that is cut to the screen."""
        return not (self.json or self.jsonl or self.table_format)


@dataclass(frozen=True)
class AnswerOptions(TableOptions):
    """The form in which an answer of rows is printed."""

    jsonl: bool = option(False, "Print one JSON object per row, each on its line.")


NOT_ONLY_ROWS = TableOptions()
AS_TEXT = AnswerOptions()


def show_answer(
    form: TableOptions,
    command: str,
    answer: Any,
    rows: Rows[Any],
    text: Callable[[Any, Screen], str],
) -> None:
    """Print an answer in the form that was asked for.

    Args:
        form: which one.
        command: name of the command, which is also that of its schema and of the words that have a colour.
        answer: a record.
        rows: those of its rows that `--jsonl` and `--table-format` print.
        text: the answer as text, cut to a screen.
    """
    if form.json:
        from ckptools.display.record_json import answer_json

        show(answer_json(command, answer))
    elif form.is_text:
        show(encodable(text(answer, screen()), sys.stdout.encoding), command)
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

    Args:
        wanted: whether the caller asked for JSON.
        schema: of the object that would have been printed.
        verdict: its key that says whether all is well: false for what cannot be read, null where nothing was looked at;
            empty where it has none.
        paths: what was to be opened.
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
