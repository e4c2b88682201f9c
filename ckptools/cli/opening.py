"""Opening what a command is about, with a line that says how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptools.cli.printing import show
from ckptools.errors import CkptoolsError
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.formats.options import Reader
    from ckptools.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class OpeningOptions:
    """How a checkpoint is opened, by any command."""

    ranks: str | None = option(
        None,
        "What the rank files in the folder PATH are called, such as 'model-{rank}-of-{world}.pt'.",
        metavar="PATTERN",
    )
    only_this_file: bool = option(False, "Do not look for the other ranks' files.")
    follow_symlinks: bool = option(False, "Accept links that lead out of the folder.")
    weights: Literal["fp32", "module"] = option(
        "fp32", "Where the model is held twice (DeepSpeed, Megatron): fp32 master copy, or module."
    )
    rules: Path | None = option(None, "JSON that says how tensor-parallel weights are joined (Megatron, Meta Llama).")
    shapes: Path | None = option(
        None,
        "For FSDP1 flat parameters: what tells their shapes, another checkpoint or a JSON of name to shape.",
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
"""How a checkpoint is opened where nothing else was asked for."""


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
    from ckptools.formats.opening import open_checkpoint
    from ckptools.training_state import modules

    with ReadingLine() as line:
        return open_checkpoint(
            paths,
            all_ranks=all_ranks,
            read_file=read or modules.read_file,
            on_file=line,
            **how.keywords(),
        )


@contextmanager
def answered_in_json(wanted: bool, schema: str, verdict: str, paths: Sequence[str]) -> Iterator[None]:
    """Where JSON is wanted, print an object also when nothing can be opened; the error goes on to its line on stderr.

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
            import json

            answer = False if error.exit_code == CkptoolsError.exit_code else None
            judged = {verdict: answer} if verdict else {}
            told = {"schema": schema, "path": " ".join(paths), **judged, "error": str(error)}
            show(json.dumps({**told, "exit_code": error.exit_code}, indent=1))
        raise
