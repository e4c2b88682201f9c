"""A folder that holds several checkpoints: the error that names them, the newest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ckptools.errors import SeveralError
from ckptools.model.values import describe_for_error
from ckptools.text import few
from ckptools.training_state.steps import step_in

MAX_FILES = 1000
"""Files of a folder whose times are looked at."""


def several(folder: Path, found: Sequence[Path], why: str = "") -> SeveralError:
    """The error for a folder with several checkpoints.

    Args:
        folder: where they are.
        found: a file or folder of each.
        why: what would have told which one is meant, such as ` and no file latest`.
    """
    import shlex

    which = f"which are whole: ckptools ls {shlex.quote(str(folder))}"
    return SeveralError(folder, f"holds {len(found)} checkpoints{why} ({which}); {listed(folder, found)}")


def listed(folder: Path, found: Sequence[Path]) -> str:
    """Which paths to open instead, the newest first, for a message; empty where there is none."""
    ordered, how = newest_first(found) if len(found) > 1 else (found, "")
    return f"name the one you mean{how}: {names(folder, ordered)}" if found else ""


def names(folder: Path, found: Sequence[Path]) -> str:
    """Names of checkpoints relative to the folder, cut after eight."""
    return few([_shown(path, folder) for path in found])


def newest_first(found: Sequence[Path]) -> tuple[list[Path], str]:
    """Checkpoints from the newest to the oldest and what says so: the steps in their names, else their file times."""
    steps = {path: _step(path) for path in found}
    numbers = [n for n in steps.values() if n is not None]
    if len(set(numbers)) == len(found):
        return sorted(found, key=lambda p: -(steps[p] or 0)), " (the newest first, by the step in the name)"
    times = {path: _time(path) for path in found}
    if len({round(t) for t in times.values()}) == len(found):
        return sorted(found, key=lambda p: -times[p]), " (the newest first, by file time)"
    return sorted(found), ""


def _step(path: Path) -> int | None:
    """The step that the name tells, else that of the folder it is in: `global_step_3/actor`."""
    own = step_in(path.name)
    return step_in(path.parent.name) if own is None else own


def _time(path: Path) -> float:
    """When a file, or the newest file of a folder, was written; 0 where nothing tells."""
    return max(_times(path), default=0.0)


def _times(path: Path) -> Iterator[float]:
    with suppress(OSError):
        for one in islice(path.iterdir(), MAX_FILES) if path.is_dir() else [path]:
            yield one.lstat().st_mtime


def _shown(path: Path, folder: Path) -> str:
    """A name as it is typed behind the folder; one that would forge a line is quoted."""
    name = str(path.relative_to(folder))
    return name if name.isprintable() and len(name) < 200 else describe_for_error(name)
