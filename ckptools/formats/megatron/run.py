"""Where a Megatron run keeps its checkpoints: the tracker file and the folders that it chooses from.

`<save>/latest_checkpointed_iteration.txt` holds a plain number or the word `release`; the checkpoint is then
`<save>/iter_{number:07d}` or `<save>/release`. Source: megatron/training/checkpointing.py (`get_checkpoint_name`,
`read_metadata`), the same since v1.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import reading
from ckptools.formats.shared.several import several
from ckptools.formats.shared.trackers import text_of
from ckptools.model.values import describe_for_error

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"iter_\d{1,12}")

Holds = Callable[[Path], bool]
"""Whether a folder holds one checkpoint of some format."""


def looks_like_run(path: Path, holds: Holds) -> bool:
    """Whether `path`, or the folder that its tracker names, or one of its iteration folders holds a checkpoint."""
    if not path.is_dir():
        return False
    named = _named(path) if (path / TRACKER).is_file() else None
    return holds(path) or any(map(holds, [named] if named and named.is_dir() else _iterations(path)))


def find_iteration(path: Path, holds: Holds, follow_symlinks: bool) -> Path:
    """The checkpoint's own folder, for the folder of a run or that folder itself.

    Raises:
        ReadError: the tracker names no iteration, or one that is not here.
        UsageError: there is no tracker and the run has several iterations.
        UnsafePathError: the folder is a link out of the run's.
    """
    if holds(path):
        return path
    tracked = (path / TRACKER).is_file()
    found = _tracked(path, follow_symlinks) if tracked else _only(path, [f for f in _iterations(path) if holds(f)])
    if not follow_symlinks:
        check_stays_inside(found, path)
    if not holds(found):
        raise ReadError(path, f"{TRACKER} names {found.name}, which holds no such checkpoint; open one of its folders")
    return found


def _only(path: Path, found: list[Path]) -> Path:
    if len(found) == 1:
        return found[0]
    raise several(path, found, f" and no {TRACKER}")


def _tracked(path: Path, follow_symlinks: bool) -> Path:
    text = _tracker_text(path, follow_symlinks)
    named = _folder(path, text)
    if named is None:
        raise ReadError(path / TRACKER, f"holds {describe_for_error(text)}; expected a plain number or release")
    if not named.is_dir():
        raise ReadError(path / TRACKER, f"names {named.name}, which is not here; open one of the folders beside it")
    return named


def _named(path: Path) -> Path | None:
    """The folder that the tracker names, if it can be read and names one."""
    try:
        return _folder(path, _tracker_text(path))
    except ReadError:
        return None


def _tracker_text(path: Path, follow_symlinks: bool = False) -> str:
    if not follow_symlinks:
        check_stays_inside(path / TRACKER, path)
    return text_of(path / TRACKER)


def _folder(path: Path, text: str) -> Path | None:
    if text == "release":
        return path / "release"
    return path / f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,12}", text) else None


def _iterations(path: Path) -> list[Path]:
    with reading(path):
        entries = sorted(path.iterdir())
    return [e for e in entries if (ITERATION.fullmatch(e.name) or e.name == "release") and e.is_dir()]
