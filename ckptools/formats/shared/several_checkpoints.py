"""Several checkpoints in a folder: order them by age, read the tracker (`latest`) of the newest, word the error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path, PurePath
from typing import Literal

from ckptools.errors import ReadError, SeveralError, TrackerError
from ckptools.files.opening import (
    check_stays_inside,
    common_folder,
    head_at,
    is_plain_name,
    is_there,
    reading,
    real_path,
)
from ckptools.formats.rank_search.rank_names import parse
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows
from ckptools.model.tree import describe_for_error
from ckptools.text import few
from ckptools.training_state.steps import step_in

By = Literal["step", "name", "optimizer steps", "file time", "nothing"]
"""The criterion that orders checkpoints; `nothing` if none applies."""

NUMBER = re.compile(r"\d+(?:\.\d+)+|\d+")
COUNTED = re.compile(
    r"(?<![A-Za-z])(?:ep|epoch|ba|batch|global_step|step|it|iter|iteration|checkpoint|ckpt)[-_=.]?\Z", re.IGNORECASE
)
DATES = re.compile(r"(?:19|20)\d{2}(?:\d{4})?")


@dataclass(frozen=True)
class Save:
    """The facts of a checkpoint that concern its age.

    Attributes:
        path: the path to open, below the folder of the run.
        step: its training step; None if unknown.
        time: time of the last write to its files; None if unknown.
    """

    path: PurePath
    step: int | None = None
    time: float | None = None

    @cached_property
    def _spelled(self) -> str:
        """The checkpoint's path, without the number of a rank, which differs between the rank files."""
        ranked = parse(Path(self.path))
        return str(self.path if ranked is None else self.path.with_name(f"{ranked.head}rank{ranked.tail}"))

    @cached_property
    def pattern(self) -> str:
        """The path with `#` for each number; checkpoints with equal patterns differ only in numbers."""
        return NUMBER.sub("#", self._spelled)

    @cached_property
    def numbers(self) -> tuple[int | None, ...]:
        """The numbers in a checkpoint's path; None for a decimal one, such as a loss."""
        return tuple(None if "." in found else int(found) for found in NUMBER.findall(self._spelled))

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """Positions of the numbers behind a word that counts steps or epochs."""
        found = enumerate(NUMBER.finditer(self._spelled))
        return tuple(n for n, one in found if COUNTED.search(self._spelled[: one.start()]))


Key = tuple[int, ...]


def by_name(saves: Sequence[Save]) -> list[dict[int, Key]]:
    """For each pattern of names that numbers order: the ordering numbers, by the index of the checkpoint.

    Numbers behind a word such as `step` count; else a single number that differs, or several that rise together, or
    dates. An order that contradicts known steps is discarded.
    """
    groups: dict[str, list[int]] = {}
    for index, save in enumerate(saves):
        groups.setdefault(save.pattern, []).append(index)
    found = []
    for keys in (_keys({index: saves[index] for index in group}) for group in groups.values() if len(group) > 1):
        steps = [saves[index].step for index in sorted(keys, key=keys.__getitem__)]
        known = [step for step in steps if step is not None]
        if keys and all(a <= b for a, b in pairwise(known)):
            found.append(keys)
    return found


def _keys(group: Mapping[int, Save]) -> dict[int, Key]:
    first = next(iter(group.values()))
    rows = [save.numbers for save in group.values()]
    varying = [n for n, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1 and None not in column]
    counted = [n for n in varying if n in first.counted]
    chosen = counted or varying
    found = {index: tuple(save.numbers[n] or 0 for n in chosen) for index, save in group.items()}
    rise_together = all(a <= b for column in zip(*sorted(found.values()), strict=True) for a, b in pairwise(column))
    sure = len(chosen) == 1 or bool(counted) or rise_together
    dates = bool(chosen) and DATES.fullmatch(str(first.numbers[chosen[0]])) is not None
    return found if chosen and (sure or dates) else {}


def steps_by_name(saves: Sequence[Save]) -> dict[int, int]:
    """Steps of checkpoints that do not state theirs, from their names, by index.

    The number in a name is the step if that holds for every checkpoint whose name differs in this number alone: a cut
    `ckpt-3000.pt` is of step 3000 if `ckpt-1000.pt` and `ckpt-2000.pt` state steps 1000 and 2000.
    """
    found: dict[int, int] = {}
    for keys in by_name(saves):
        stated = [(key[-1], step) for index, key in keys.items() if (step := saves[index].step) is not None]
        if stated and all(number == step for number, step in stated):
            found |= {index: key[-1] for index, key in keys.items() if saves[index].step is None}
    return found


def newest_first(saves: Sequence[Save], counted: Callable[[int], int | None] = lambda _: None) -> tuple[list[int], By]:
    """The indices of checkpoints from the newest to the oldest, and the criterion.

    A checkpoint without a step comes last beside others that have one, unless its name gives its place. `counted`
    returns the steps that a checkpoint's optimizer counts; it is called only if neither steps nor numbers in names
    decide.
    """
    steps: dict[int, int | None] = {n: save.step for n, save in enumerate(saves)}
    named = by_name(saves)
    by: By = "step"
    if all(step is None for step in steps.values()):
        # Names order all checkpoints: of one pattern, or of several patterns with the same numbers.
        every = sum(map(len, named)) == len(saves) and len({frozenset(keys.values()) for keys in named}) == 1
        by = "name" if every else "nothing"
    if by == "nothing":
        steps = {n: counted(n) for n in steps}
        by = "nothing" if None in steps.values() or len(set(steps.values())) < len(saves) else "optimizer steps"
    times = {n: save.time for n, save in enumerate(saves)}
    order = sorted(steps, key=lambda n: (-(times[n] or 0.0), str(saves[n].path)))
    timed = len(saves) < 2 or times_count(saves, named)
    by = "file time" if by == "nothing" and timed else by
    if by == "name":
        numbers = {index: key for keys in named for index, key in keys.items()}
        order.sort(key=numbers.__getitem__, reverse=True)
    else:
        order.sort(key=lambda n: (steps[n] is None, -(steps[n] or 0)))
        for keys in named if by != "optimizer steps" else ():
            # Distribute checkpoints in the order of their numbers over their common places.
            places = [place for place, index in enumerate(order) if index in keys]
            newest = sorted((order[place] for place in places), key=lambda index: keys[index], reverse=True)
            for place, index in zip(places, newest, strict=True):
                order[place] = index
    return order, by


def times_count(saves: Sequence[Save], named: Sequence[Mapping[int, Key]]) -> bool:
    """Whether file times prove an order: they differ, and contradict neither steps nor numbers in names."""
    known = (_stepped(saves), *named)
    return len({save.time for save in saves}) > 1 and not any(_against(saves, keys) for keys in known)


def written_in_another_order(saves: Sequence[Save]) -> tuple[int, int] | None:
    """Find the newest checkpoint that was written before an older one: `(older, newer)`, or None.

    Its age is given by its step or by the number in its name.
    """
    pairs = (_against(saves, keys) for keys in (_stepped(saves), *by_name(saves)))
    return next((pair for pair in pairs if pair is not None), None)


def _stepped(saves: Sequence[Save]) -> dict[int, Key]:
    return {n: (save.step,) for n, save in enumerate(saves) if save.step is not None}


def _against(saves: Sequence[Save], keys: Mapping[int, Key]) -> tuple[int, int] | None:
    """The newest checkpoint that was written a second or more before an older one, with the newest such older one."""
    timed = sorted((key, index, time) for index, key in keys.items() if (time := saves[index].time) is not None)
    latest, last_write = list[float](), float("-inf")
    for *_, time in timed:
        latest.append(last_write)
        last_write = max(last_write, time)
    for place in reversed(range(len(timed))):
        key, index, time = timed[place]
        if latest[place] >= time + 1:
            older = (one for older_key, one, written in reversed(timed[:place]) if older_key < key and written > time)
            pair = next((one for one in older if (saves[one].time or 0) >= time + 1), None)
            if pair is not None:
                return pair, index
    return None


def older_than(saves: Sequence[Save], newest: int) -> set[int]:
    """The checkpoints that are proven to be older than `newest`: by step, else by name, else by file time."""
    one, named = saves[newest], by_name(saves)
    keys = next((keys for keys in named if newest in keys), {})
    timed = times_count(saves, named)

    def is_older(index: int, save: Save) -> bool:
        if save.step is not None and one.step is not None:
            return save.step <= one.step
        if index in keys:
            return keys[index] <= keys[newest]
        return timed and save.time is not None and one.time is not None and save.time < one.time

    return {index for index, save in enumerate(saves) if is_older(index, save)}


# -- a folder with several checkpoints: the error or note that names them, and the tracker that names the newest -------
# A tracker is a small file or link in a run's folder:
#
#     latest                              DeepSpeed: the name of a folder; OLMo, torchtitan runs: a link to one
#     latest_checkpointed_iteration.txt   Megatron, verl: a number, or the word `release`
#     dlrover_latest.txt                  DLRover: a number
#     last_checkpoint                     detectron2, mmengine: the name of a file
#     latest-rank0.pt                     Composer: a link to a file of the newest
#     latest-rank0.pt.symlink             Composer in a store: the path of that file as a text
#     LATEST, LATEST.txt                  NeMo Automodel: a link to a folder; where links are not possible, its name
#
# Its content is untrusted: only a plain name of an entry in the same folder is followed. Source:
# deepspeed/runtime/engine.py (`_save_checkpoint`), megatron/training/checkpointing.py, verl's `checkpoint_manager.py`,
# detectron2's `checkpoint/detection_checkpoint.py` (fvcore), composer's `checkpoint_saver.py` and utils/file_helpers.py
# (`create_symlink_file`), nemo_automodel's components/checkpoint/lifecycle.py,
# dlrover/python/elastic_agent/torch/ckpt_saver.py.

MAX_ENTRIES = 1 << 18
"""At most this many entries of a folder are listed: 1,024 rank files of 256 checkpoints."""


def several(folder: Path, found: Sequence[Path], why: str = "") -> SeveralError:
    """The error for a folder with several checkpoints; `why` is the reason why none can be chosen."""
    import shlex

    which = f"which are whole: ckptools ls {shlex.quote(str(folder))}"
    return SeveralError(folder, f"holds {len(found)} checkpoints{why} ({which}); {listed(folder, found)}")


def with_others(checkpoint: Checkpoint, folder: Path, others: Sequence[Path]) -> Checkpoint:
    """Add a note that names other checkpoints in the folder, unless a problem names them already."""
    known = {name for problem in checkpoint.problems for name in problem.files}
    unnamed = [path for path in others if path.name not in known]
    text = f"also here, and not read: {names(folder, unnamed)}; open it by its name"
    return _with_note(checkpoint, text) if unnamed else checkpoint


def with_links(checkpoint: Checkpoint, folder: Path, links: str) -> Checkpoint:
    """Add a note of the links that were not followed, if any."""
    return _with_note(checkpoint, f"also in {folder}: {links}") if links else checkpoint


def _with_note(checkpoint: Checkpoint, text: str) -> Checkpoint:
    return replace(checkpoint, problems=Rows((*checkpoint.problems, Problem(Code.NOT_READ, text))))


def listed(folder: Path, found: Sequence[Path]) -> str:
    """List the paths to open instead, for a message; empty for none.

    If numbers in names order them, the highest come first. The message does not call the first one the newest: no file
    was opened, and `ls` uses the steps in them.
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
    """A name as the user would type it behind the folder; a name that would forge a line is quoted."""
    name = str(path.relative_to(folder))
    return name if name.isprintable() and len(name) < 200 else describe_for_error(name)


FILES = ("latest", "latest_checkpointed_iteration.txt", "last_checkpoint", "LATEST.txt", "dlrover_latest.txt")
LINK = re.compile(r"(?:latest|last|LATEST)(?![A-Za-z]).*", re.DOTALL)
ASTRAY = Code.TRACKER_ASTRAY.code
MAX_TRACKER = 4096
"""Bytes; a longer file names no checkpoint."""


@dataclass(frozen=True)
class Tracker:
    """A tracker file or link, and the checkpoint that it names, or why that is missing.

    Attributes:
        named: the name of a missing checkpoint.
    """

    path: Path
    target: Path | None
    why: str = ""
    named: tuple[str, ...] = ()


def tracker_in(folder: Path, follow_symlinks: bool = False) -> Tracker | None:
    """The tracker of a folder; None without one.

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
    found = [*_links(folder), *_link_texts(folder)]
    links = {link.target: link for link in found if link.target and link.target.parent == folder}
    return links.popitem()[1] if len(links) == 1 else None


def check_not_astray(folder: Path, opened: Checkpoint) -> None:
    """Refuse the only checkpoint in the folder of a run whose tracker names another one.

    A tracker beside the files of a checkpoint counts only if it names a file that differs from theirs in numbers.

    Raises:
        TrackerError: no tracker names the opened checkpoint, and one names a missing path, or one without a checkpoint.
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
    """Every tracker of a folder: files, and links with the names of trackers; a broken one states why.

    With `follow_symlinks` a tracker file may be a link too, and links out of the folder are not a fault.
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
    return (_of_link(entry) for entry in _called_so(folder) if entry.is_symlink())


def _read(path: Path) -> Tracker:
    try:
        return _named(path, text_of(path))
    except ReadError as error:
        return Tracker(path, None, error.reason)


def _of_link(link: Path) -> Tracker:
    """The target of a link, as a path in its folder; a rank's link is followed to that rank's file."""
    folder, target = real_path(link.parent), real_path(link)
    named = describe_for_error(os.readlink(link))  # noqa: PTH115 - as text, unresolved
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
        why = f"names {describe_for_error(text)}, which is not the plain name of something beside it"
        return Tracker(tracker, None, why)
    entry = tracker.parent / text
    if entry != tracker and is_there(entry):
        return Tracker(tracker, entry)
    if re.fullmatch(r"[0-9]{1,12}", text):
        with reading(tracker.parent):
            entries = sorted(islice(tracker.parent.iterdir(), MAX_ENTRIES))
        numbered = [p for p in entries if step_in(p.name) == int(text)]
        if len(numbered) == 1:
            return Tracker(tracker, numbered[0])
    return Tracker(tracker, None, f"names {describe_for_error(text)}, which is not here", (text,))


def _called_so(folder: Path) -> list[Path]:
    """The entries that have names of links to the newest checkpoint."""
    with reading(folder):
        return sorted(entry for entry in islice(folder.iterdir(), MAX_ENTRIES) if LINK.fullmatch(entry.name))
