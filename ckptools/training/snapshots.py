"""Which of several checkpoints to go on from: the newest that is whole, by ckptools' own checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch import nn

from ckptools import api
from ckptools.errors import CkptoolsError, ReadError, SeveralError
from ckptools.training.options import FULL_STATE, CreateOptions, opened_by
from ckptools.training.output import METADATA, is_checkpoint
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


def newest_whole(paths: Iterable[Path], report: Report, model: nn.Module | None = None) -> api.Checkpoint | None:
    """Open the newest whole one of several checkpoints; None where none is.

    Every byte is read and compared with its checksum: a run that goes on from damaged weights would not notice.

    Args:
        paths: a file or folder of each.
        report: takes a line per checkpoint that is passed over, which says why.
        model: not wrapped; tells shapes, which FSDP1's local state dicts lack.
    """
    opened = [ck for ck in (_opened(path, report, model) for path in paths) if ck is not None]
    for ck in sorted(opened, key=lambda ck: ck.step.value or 0, reverse=True):
        wrong = [p.message for p in ck.verify(deep=True).problems if p.severity == "error"]
        wrong += [] if ck.model else ["holds no model"]
        if not wrong:
            return ck
        report(f"skipped {ck.path}: {wrong[0]}{f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''}")
    return None


def _opened(path: Path, report: Report, model: nn.Module | None) -> api.Checkpoint | None:
    try:
        return api.open(path, all_ranks=True, shapes=model)
    except CkptoolsError as error:
        report(f"skipped {error}")
        return None


def found_at(path: Path) -> list[Path]:
    """List the checkpoints that a path leads to, a file or folder of each: itself, or those in a folder.

    Raises:
        ReadError: there is none.
    """
    if not path.exists():
        raise ReadError(path, "no such file or folder", "absent")
    if not path.is_dir() or _is_one(path):
        return [path]
    found: list[Path] = []
    known: set[Path] = set()
    for entry in sorted(path.iterdir()):
        if entry not in known and entry.name != FULL_STATE and _looks_like_one(entry):
            found.append(entry)
            known |= _files(entry)
    if not found:
        raise ReadError(path, "holds no checkpoint")
    return found


def _is_one(folder: Path) -> bool:
    """Say whether a folder is a checkpoint itself, and not one that holds others."""
    try:
        return api.open(folder).path == folder
    except SeveralError:
        return False
    except CkptoolsError:
        return (folder / METADATA).exists()


def _looks_like_one(path: Path) -> bool:
    """Say whether there are files of a checkpoint at a path, be it whole or not."""
    if path.name.startswith("."):
        return False
    files = path.rglob("*") if path.is_dir() else [path]
    return any(is_checkpoint(file) for file in files)


def _files(path: Path) -> set[Path]:
    """List the files that belong to the same checkpoint; what cannot be opened is alone."""
    try:
        return {file.path for file in api.open(path).files}
    except CkptoolsError:
        return {path}
