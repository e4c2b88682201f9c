"""Opening what a command is about, with a line that says how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cli.printing import show
from ckptools.errors import CkptoolsError

if TYPE_CHECKING:
    from ckptools.cli.choices import Weights
    from ckptools.formats.options import Reader
    from ckptools.model.checkpoint import Checkpoint


def opened(
    paths: Sequence[str],
    ranks: str | None,
    only_this_file: bool,
    follow_symlinks: bool,
    weights: Weights,
    rules: Path | None,
    shapes: Path | None,
    names: Path | None,
    all_ranks: bool = True,
    read: Reader | None = None,
    jobs: int | None = None,
) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint` does; `read` reads one file, by default the inert reader."""
    from ckptools.cli.progress import ReadingLine
    from ckptools.formats.opening import open_checkpoint
    from ckptools.training_state import modules

    with ReadingLine() as line:
        return open_checkpoint(
            paths,
            all_ranks=all_ranks,
            only_this_file=only_this_file,
            follow_symlinks=follow_symlinks,
            read_file=read or modules.read_file,
            jobs=jobs,
            on_file=line,
            weights=weights.value,
            rules=rules,
            shapes=shapes,
            ranks=ranks,
            names=names,
        )


@contextmanager
def answered_in_json(wanted: bool, schema: str, verdict: str, paths: Sequence[str]) -> Iterator[None]:
    """Where JSON is wanted, print an object also when nothing can be opened; the error goes on to its line on stderr.

    Args:
        wanted: whether the caller asked for JSON.
        schema: of the object that would have been printed.
        verdict: its key that says whether all is well: false for what cannot be read, null where nothing was looked at.
        paths: what was to be opened.
    """
    try:
        yield
    except CkptoolsError as error:
        if wanted:
            import json

            answer = False if error.exit_code == CkptoolsError.exit_code else None
            told = {"schema": schema, "path": " ".join(paths), verdict: answer, "error": str(error)}
            show(json.dumps({**told, "exit_code": error.exit_code}, indent=1))
        raise
