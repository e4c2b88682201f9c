"""The training step of a checkpoint: from the counters it holds, the schedulers, and the file name; do they agree?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import eq
from pathlib import Path
from typing import Any

from ckptools.model.checkpoint import Fact
from ckptools.model.rank_vote import vote
from ckptools.model.tree import KeyPath, fqn_of, walk
from ckptools.training_state.sections import Section

COUNTERS = (
    "batch", "global_step", "global_steps", "step", "steps", "train_step", "iteration", "iter", "num_steps"
)  # fmt: skip
"""Keys of plain counters outside model and optimizer, the surest first."""

RANKS_DIFFER = "not on every rank"
"""The source of a step that other ranks contradict."""

EPOCH_COUNTERS = ("EPOCHS_RUN", "epoch", "epochs")
NAMES = re.compile(r"(?<![A-Za-z])(?:ba|global_step|step|iter|iteration|checkpoint)[-_=]?(\d{1,12})(?!\d)")


def find_step(path: Path, sections: tuple[Section, ...]) -> Fact:
    """Collect what tells the step of the checkpoint at `path`.

    Counters in the content decide, then the file or folder name, then a scheduler. `agree` is False when name and
    content tell different steps; a scheduler may count epochs, so it only confirms.
    """
    content = dict(_counters(sections))
    named = _from_name(path)
    schedulers = {f"{s.name}.last_epoch": s.value["last_epoch"] for s in sections if _counts(s)}
    surest = sorted(content.items(), key=lambda item: _rank_of(item[0]))
    candidates = [v for _, v in surest] or [v for _, v in named.items()] or list(schedulers.values())
    if not candidates:
        return Fact(None)
    value = candidates[0]
    everything = {**named, **dict(surest), **schedulers}
    sources = tuple(name for name, found in everything.items() if found == value)
    contradicts = any(v != value for v in named.values()) if content else False
    return Fact(value, sources, agree=not contradicts)


def step_in(name: str) -> int | None:
    """The step that a file or folder name tells; None when it tells none."""
    found = NAMES.findall(name)
    return int(found[-1]) if found else None


def by_majority(step: Fact, differing: Mapping[KeyPath, Mapping[int, Any]]) -> Fact:
    """The step that most ranks tell, where they tell different ones.

    Args:
        step: as one rank's counters tell it.
        differing: what each rank has, by key path, where they have not the same.
    """
    for path, ranked in differing.items():
        values = list(ranked.values())
        if path and path[-1] in COUNTERS and step.value in values and all(type(v) is int for v in values):
            usual = vote(list(ranked.items()), eq).majority
            value = step.value if usual is None else usual[0]
            sources = step.sources if value == step.value else (fqn_of(path),)
            return Fact(value, (*sources, RANKS_DIFFER), agree=False)
    return step


def contradiction(step: Fact) -> str:
    """What to say of a step whose sources do not agree."""
    if RANKS_DIFFER in step.sources:
        return f"ranks tell different steps; {step.value} is that of most, or of the lowest"
    return f"the name of the file or folder tells another step than {step.sources[0]} ({step.value})"


def _counts(section: Section) -> bool:
    return (
        section.kind == "scheduler"
        and isinstance(section.value, Mapping)
        and type(section.value.get("last_epoch")) is int
    )


def _counters(sections: tuple[Section, ...]) -> Iterator[tuple[str, int]]:
    for section in sections:
        if section.kind != "other":
            continue
        for path, leaf in walk(section.value):
            key = (*section.path, *path)
            if type(leaf) is int and key and key[-1] in COUNTERS and len(key) <= 5 and not _is_setting(key):
                yield fqn_of(key), leaf


def _is_setting(key: KeyPath) -> bool:
    """Whether the path leads through arguments or callbacks, whose `step` is something else."""
    return any(str(k) in ("args", "config", "hparams", "hyper_parameters", "callbacks", "loops") for k in key)


def _rank_of(name: str) -> tuple[int, int]:
    return COUNTERS.index(name.rpartition(".")[2]), name.count(".")


def _from_name(path: Path) -> dict[str, int]:
    """The step in the file's name, else in one of the two folders above it."""
    for part, what in (
        (path.name, "file name"),
        (path.parent.name, "folder name"),
        (path.parent.parent.name, "folder"),
    ):
        found = NAMES.findall(part)
        if found:
            return {what: int(found[-1])}
    return {}
