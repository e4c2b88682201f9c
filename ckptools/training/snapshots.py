"""Which of several checkpoints to go on from: the newest that is whole, by the search and the checks of `ls --deep`.

What differs is the question: a run may also name one checkpoint, or remember which it saved itself; its own `full.pt`
is none to go on from; and links are followed, for they are the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial as given
from pathlib import Path

from torch import nn

from ckptools.checks.run_folder import newest
from ckptools.checks.run_folder.rows import row_of
from ckptools.checks.run_folder.search import Opened, Search
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.location import path_of
from ckptools.formats.opening import open_checkpoint
from ckptools.model.checkpoint import Checkpoint
from ckptools.training.options import FULL_STATE, CreateOptions, opened_by
from ckptools.training.resume_options import restarts

SAVED = "saved"

Report = Callable[[str], None]


def to_go_on_from(options: CreateOptions, partial: Path) -> list[Path]:
    """List the checkpoints that a run may begin with: its own if it was started again, else those of `--resume`.

    An outer torchrun starts the ranks again without what was remembered; then everything in OUT is this run's, unless
    something else was there already.
    """
    if restarts() > 0:
        if (partial / SAVED).exists():
            return [Path(line) for line in (partial / SAVED).read_text().splitlines()]
        with suppress(ReadError):
            return [] if options.force else found_at(options.out)
    resume = options.resuming.resume
    return [] if resume is None else found_at(Path(resume))


def remember(partial: Path, files: tuple[Path, ...]) -> None:
    """Write down that a checkpoint was saved, in the hidden folder, which lasts as long as the launcher."""
    with (partial / SAVED).open("a") as file:
        file.write(f"{opened_by(files)}\n")


def newest_whole(paths: Iterable[Path], report: Report, model: nn.Module | None = None) -> Path | None:
    """What opens the newest whole one of several checkpoints; None where none is.

    Every byte is read and compared with its checksum: a run that goes on from damaged weights would not notice.

    Args:
        paths: a file or folder of each.
        report: takes a line per checkpoint that is passed over, which says why.
        model: not wrapped; tells shapes, which FSDP1's local state dicts lack.
    """
    opened = given(open_checkpoint, shapes=model)
    rows = [row_of(path.name, path, _looked_into(path, opened), [path]) for path in paths]
    ordered, _ = newest.newest_first(rows)
    every_rank = given(opened, all_ranks=True)
    for row in newest.newest_whole(ordered, lambda row: newest.verified(row, every_rank, deep=True, jobs=None)):
        if row.newest_whole:
            return path_of(row.path)
        report(f"skipped {row.path}: {row.why or newest.NO_MODEL}")
    return None


def _looked_into(path: Path, opened: Callable[[Path], Checkpoint]) -> Opened | CkptoolsError:
    try:
        return Opened.of(opened(path))
    except CkptoolsError as error:
        return error


def found_at(path: Path) -> list[Path]:
    """List the checkpoints that a path leads to, a file or folder of each: itself, or those in a folder.

    Raises:
        ReadError: there is none.
    """
    if not path.exists():
        raise ReadError(path, "no such file or folder", "absent")
    if not path.is_dir():
        return [path]
    found: list[Path] = []

    def take(one: Path, _opened: Opened | CkptoolsError, _files: Sequence[Path]) -> None:
        found.extend([] if one.name == FULL_STATE else [one])

    Search(path, lambda one, _: Opened.of(open_checkpoint(one)), take, follow_symlinks=True).run()
    if not found:
        raise ReadError(path, "holds no checkpoint")
    return found
