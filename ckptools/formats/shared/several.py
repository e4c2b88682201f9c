"""A folder that holds several checkpoints: the error or note that names them, and the tracker that names the newest.

A tracker is a small file or link in a run's folder:

    latest                              DeepSpeed: the name of a folder; OLMo, torchtitan runs: a link to one
    latest_checkpointed_iteration.txt   Megatron, verl: a number, or the word `release`
    dlrover_latest.txt                  DLRover: a number
    last_checkpoint                     detectron2, mmengine: the name of a file
    latest-rank0.pt                     Composer: a link to a file of the newest
    latest-rank0.pt.symlink             Composer in a store: the path of that file as a text
    LATEST, LATEST.txt                  NeMo Automodel: a link to a folder; where links are not possible, its name

What it holds is data from a stranger: only a plain name of something in the same folder is followed.
Source: deepspeed/runtime/engine.py (`_save_checkpoint`), megatron/training/checkpointing.py, verl's
`checkpoint_manager.py`, detectron2's `checkpoint/detection_checkpoint.py` (fvcore), composer's `checkpoint_saver.py`
and utils/file_helpers.py (`create_symlink_file`),
nemo_automodel's components/checkpoint/lifecycle.py, dlrover/python/elastic_agent/torch/ckpt_saver.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ckptools.errors import ReadError, SeveralError, TrackerError
from ckptools.files.file_type import head_at
from ckptools.files.location import check_stays_inside, common_folder, is_plain_name, is_there, real_path
from ckptools.files.opening import reading
from ckptools.formats.shared.save_order import Save, newest_first
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.values import describe_for_error
from ckptools.text import few
from ckptools.training_state.steps import step_in

MAX_ENTRIES = 1 << 18
"""Most entries of a folder that are looked at: 1,024 rank files of 256 checkpoints."""


def several(folder: Path, found: Sequence[Path], why: str = "") -> SeveralError:
    """The error for a folder with several checkpoints; `why` is what is missing to choose one."""
    import shlex

    which = f"which are whole: ckptools ls {shlex.quote(str(folder))}"
    return SeveralError(folder, f"holds {len(found)} checkpoints{why} ({which}); {listed(folder, found)}")


def with_others(checkpoint: Checkpoint, folder: Path, others: Sequence[Path]) -> Checkpoint:
    """The checkpoint with a note that names others in its folder, unless a problem of it names them already."""
    known = {name for problem in checkpoint.problems for name in problem.files}
    unnamed = [path for path in others if path.name not in known]
    text = f"also here, and not read: {names(folder, unnamed)}; open it by its name"
    return _with_note(checkpoint, text) if unnamed else checkpoint


def with_links(checkpoint: Checkpoint, folder: Path, links: str) -> Checkpoint:
    """The checkpoint with a note of the links that were not followed, if any."""
    return _with_note(checkpoint, f"also in {folder}: {links}") if links else checkpoint


def _with_note(checkpoint: Checkpoint, text: str) -> Checkpoint:
    return replace(checkpoint, problems=(*checkpoint.problems, Problem(Code.NOT_READ, text)))


def listed(folder: Path, found: Sequence[Path]) -> str:
    """List the paths to open instead, for a message; empty for none.

    The highest numbers come first where names have numbers that order them. That the first is the newest is not said:
    no file was opened, and `ls` goes by the steps in them.
    """
    ordered, by = newest_first([Save(path.relative_to(folder), _step(path)) for path in found])
    below = "".join(str(path.relative_to(folder)) for path in found)
    numbered = by in ("step", "name") and any(map(str.isdigit, below))
    how = " (the highest number in the name first)" if numbered and len(found) > 1 else ""
    return f"name the one you mean{how}: {names(folder, [found[n] for n in ordered])}" if found else ""


def names(folder: Path, found: Sequence[Path]) -> str:
    """Names of checkpoints relative to the folder, cut after eight."""
    return few([_shown(path, folder) for path in found])


def _step(path: Path) -> int | None:
    """The step in the name, else in the folder's name: `global_step_3/actor`."""
    own = step_in(path.name)
    return step_in(path.parent.name) if own is None else own


def _shown(path: Path, folder: Path) -> str:
    """A name as it is typed behind the folder; one that would forge a line is quoted."""
    name = str(path.relative_to(folder))
    return name if name.isprintable() and len(name) < 200 else describe_for_error(name)


# -- trackers ---------------------------------------------------------------------------------------------------------


FILES = ("latest", "latest_checkpointed_iteration.txt", "last_checkpoint", "LATEST.txt", "dlrover_latest.txt")
LINK = re.compile(r"(?:latest|last|LATEST)(?![A-Za-z]).*", re.DOTALL)
ASTRAY = Code.TRACKER_ASTRAY.code
MAX_TRACKER = 4096
"""Bytes; what is longer names no file."""


@dataclass(frozen=True)
class Tracker:
    """A tracker file or link, and the checkpoint that it names, or why that is not here.

    Attributes:
        named: the name of what is not here, if it is one.
    """

    path: Path
    target: Path | None
    why: str = ""
    named: tuple[str, ...] = ()


def tracker_in(folder: Path, follow_symlinks: bool = False) -> Tracker | None:
    """The tracker of a folder; None where there is none.

    Raises:
        UnsafePathError: it is a link out of the folder.
        ReadError: it cannot be read.
    """
    for name in FILES:
        path = folder / name
        if path.is_file():
            if not follow_symlinks:
                check_stays_inside(path, folder)
            if not path.is_symlink():
                return _named(path, text_of(path))
    links = {link.target: link for link in [*_links(folder), *_link_texts(folder)] if _is_beside(link)}
    return links.popitem()[1] if len(links) == 1 else None


def _is_beside(link: Tracker) -> bool:
    return link.target is not None and link.target.parent == link.path.parent


def check_not_astray(folder: Path, opened: Checkpoint) -> None:
    """Refuse the only checkpoint in the folder of a run whose tracker names another one.

    A tracker beside the files of a checkpoint counts only where it names a file that differs in numbers from theirs.

    Raises:
        TrackerError: none of the trackers leads to what was opened, and one names what is not here, or no checkpoint.
    """
    follow = bool(getattr(opened.options, "follow_symlinks", False))
    trackers = trackers_in(folder, follow)
    files = [file.path for file in opened.files if file.path.is_relative_to(folder)] if trackers else []
    if not files or any(t.target and _leads_to(t.target, files) for t in trackers):
        return
    below = common_folder([file.parent for file in files]) != folder
    mine = {Save(path).pattern for file in files for path in (file, *file.parents) if path != folder}
    for tracker in trackers:
        if tracker.target is None and (below or any(Save(folder / name).pattern in mine for name in tracker.named)):
            why = tracker.why
        elif tracker.target is not None and below:
            why = f"names {describe_for_error(tracker.target.name)}, which holds no checkpoint"
        else:
            continue
        here = common_folder([file.parent for file in files]) if below else files[0]
        raise TrackerError(tracker.path, f"{why} ({ASTRAY}); name the one you mean: {names(folder, [here])}")


def _leads_to(target: Path, files: Sequence[Path]) -> bool:
    real = real_path(target)
    return any(file.is_relative_to(target) or real_path(file).is_relative_to(real) for file in files)


def trackers_in(folder: Path, follow_symlinks: bool = False) -> list[Tracker]:
    """Every tracker of a folder: files, and links by the names of trackers; one that leads nowhere says why.

    With `follow_symlinks` a tracker file may be a link too, and links out of the folder are no fault.
    """
    files = [folder / name for name in FILES]
    found = [_read(path) for path in files if path.is_file() and (follow_symlinks or not path.is_symlink())]
    links = [link for link in _links(folder) if not (follow_symlinks and link.target is None and link.path.exists())]
    return [*found, *links, *_link_texts(folder)]


def _link_texts(folder: Path) -> Iterator[Tracker]:
    """Files such as `latest-rank0.pt.symlink`, whose text is the path of a file of the newest checkpoint."""
    for entry in _called_so(folder):
        if entry.suffix == ".symlink" and entry.is_file() and not entry.is_symlink():
            with suppress(ReadError):
                yield _named(entry, text_of(entry).rpartition("/")[2])


def _links(folder: Path) -> Iterator[Tracker]:
    """Links such as `latest`, each with its target."""
    return (_of_link(entry) for entry in _called_so(folder) if entry.is_symlink())


def _read(path: Path) -> Tracker:
    try:
        return _named(path, text_of(path))
    except ReadError as error:
        return Tracker(path, None, error.reason)


def _of_link(link: Path) -> Tracker:
    """The target of a link, as a path in its folder; a rank's link is followed to that rank's file."""
    folder, target = real_path(link.parent), real_path(link)
    named = describe_for_error(os.readlink(link))  # noqa: PTH115 - a text, as it was written
    if not target.is_relative_to(folder):
        return Tracker(link, None, f"is a link to {named}, out of the folder")
    if not target.exists():
        return Tracker(link, None, f"is a link to {named}, which is not here", (target.name,))
    return Tracker(link, link.parent / target.relative_to(folder))


def text_of(path: Path) -> str:
    """The text of a tracker file.

    Raises:
        ReadError: it cannot be read.
    """
    return head_at(path, MAX_TRACKER).decode("utf-8", "replace").strip()


def _named(tracker: Path, text: str) -> Tracker:
    """The target of a tracker's text: an entry beside it of that name, or of that step if it is a number."""
    if not is_plain_name(text):
        return Tracker(
            tracker, None, f"names {describe_for_error(text)}, which is not the plain name of something beside it"
        )
    entry = tracker.parent / text
    if entry != tracker and is_there(entry):
        return Tracker(tracker, entry)
    if re.fullmatch(r"[0-9]{1,12}", text):
        numbered = [p for p in _entries(tracker.parent) if step_in(p.name) == int(text)]
        if len(numbered) == 1:
            return Tracker(tracker, numbered[0])
    return Tracker(tracker, None, f"names {describe_for_error(text)}, which is not here", (text,))


def _called_so(folder: Path) -> list[Path]:
    """The entries that are called as links to the newest are."""
    with reading(folder):
        return sorted(entry for entry in islice(folder.iterdir(), MAX_ENTRIES) if LINK.fullmatch(entry.name))


def _entries(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(islice(folder.iterdir(), MAX_ENTRIES))
