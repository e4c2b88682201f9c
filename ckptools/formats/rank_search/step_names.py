"""Names of files that share a step and differ in the word of their part: `model_000010.pt`, `optim_000010_rank0.pt`.

A number in a name may count something else than steps, such as a rank or an epoch. So files are taken for one
checkpoint only if their number has five digits or more, if another number in a name is a rank, if a JSON or YAML of
them states the number as the step, or if they are alone in a folder that is named after the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import reading, tells_others
from ckptools.files.values import SUFFIXES as TEXTS
from ckptools.files.values import read_values
from ckptools.model.records import grouped
from ckptools.training_state.steps import COUNTERS, step_in

MODEL = "model"
PARTS = {
    **dict.fromkeys(("model", "weights"), MODEL),
    **dict.fromkeys(("optim", "optimizer", "opt"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "sched"), "scheduler"),
    **dict.fromkeys(("meta", "metadata", "info"), "meta"),
    **dict.fromkeys(("args", "train_args", "training_args"), "args"),
    **{
        word: word
        for word in (
            *("train", "trainer", "training", "state", "rng", "ema", "scaler", "dataloader", "config", "hparams"),
        )
    },
}
"""Words in names of files, each with the part that it names."""

WORDS = "|".join(sorted(PARTS, key=len, reverse=True))
WORD = re.compile(rf"(?<![A-Za-z])({WORDS})(?:_(?:states?|param_groups|step))?(?![A-Za-z])", re.IGNORECASE)
COUNTING = re.compile(r"(?<![A-Za-z])(?:step|iter|iteration|ckpt|checkpoint)(?![A-Za-z])", re.IGNORECASE)
"""Words beside a step, which the name of one part may have and that of another may not."""

EPOCH = re.compile(r"(?<![A-Za-z])(?:epoch|ep)[._=-]?\d+(?!\d)", re.IGNORECASE)
"""An epoch beside a step."""

RANK = re.compile(r"[._-]rank[._-]?(\d{1,6})(?!\d)")
OTHER_NUMBERS = re.compile(r"-of-|world")
"""Signs of numbers that count files or ranks."""

SUFFIXES = (".pt", ".pth", ".safetensors", *TEXTS)
STEP_DIGITS = 5
"""A number with as many digits counts steps: fewer may count ranks or epochs."""

MAX_ENTRIES = 1 << 16


class StepFile(NamedTuple):
    """A file of a part.

    Attributes:
        part: its part; "" if its name has no word of one.
        shared: the rest of its name, which all parts of a step share.
        number: the number in its name, as written; "" without one.
        rank: the rank whose state it holds; None if it is not one of several.
    """

    path: Path
    part: str
    shared: str
    number: str
    rank: int | None

    @property
    def is_text(self) -> bool:
        """Whether it is JSON or YAML."""
        return self.path.suffix in TEXTS

    @property
    def is_model(self) -> bool:
        """Whether it may be the model's file: by its word, or by no word at all."""
        return self.part in ("", MODEL) and not self.is_text and self.rank is None


def parse(path: Path) -> StepFile | None:
    """Split a name into part, step and rank; None if it has no such form."""
    if path.suffix not in SUFFIXES or OTHER_NUMBERS.search(path.name):
        return None
    ranks, stem = RANK.findall(path.stem), RANK.sub("", path.stem)
    stem = without if re.search(r"\d", without := EPOCH.sub("", stem)) else stem
    words, numbers = WORD.findall(stem), re.findall(r"\d+", stem)
    if len(words) > 1 or len(numbers) > 1 or len(ranks) > 1:
        return None
    rest = re.split(r"[\d._-]+", COUNTING.sub("", WORD.sub("", stem)))
    part = PARTS[words[0].lower()] if words else ""
    rank = int(ranks[0]) if ranks else None
    return StepFile(path, part, "_".join(filter(None, rest)), numbers[0] if numbers else "", rank)


def files_of_step(path: Path) -> list[StepFile]:
    """The files of one step: of a file's step, or those in a folder with one step alone; the model first.

    Empty if nothing proves that they are of one step.
    """
    if not tells_others(path):
        return []
    if path.is_dir():
        entries = _entries(path)
        steps = steps_in(entries)
        others = {one.path for one in map(parse, entries) if one and one.part and one.number}
        return steps[0] if len(steps) == 1 and others <= {one.path for one in steps[0]} else []
    mine = parse(path)
    if mine is None or not (mine.number or is_of_step(path.parent)):
        return []
    beside = [entry for entry in _entries(path.parent) if mine.number in entry.name]
    return next((step for step in steps_in(beside) if mine in step), [])


def steps_in(entries: Sequence[Path]) -> list[list[StepFile]]:
    """The files of each step among the entries of a folder, the model of a step first."""
    named = [one for one in map(parse, entries) if one is not None]
    groups = grouped(named, lambda one: (one.shared, one.number))
    return [step for group in groups.values() if (step := _step(group, entries))]


def _step(group: Sequence[StepFile], entries: Sequence[Path]) -> list[StepFile]:
    """The files of a step, which share the rest of their names; empty if nothing proves that they are of one."""
    models = [one for one in group if one.is_model]
    others = [one for one in group if not one.is_model]
    if len(models) != 1 or not any(one.part for one in others) or not all(one.path.is_file() for one in group):
        return []
    if models[0].number:
        is_one = _is_step(models[0].number, others)
    else:
        is_one = is_of_step(models[0].path.parent) and not any(entry.is_dir() for entry in entries)
    return [*models, *others] if is_one else []


def _entries(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(folder.iterdir())[:MAX_ENTRIES]


def is_of_step(folder: Path) -> bool:
    """Whether the name of a folder, or of the one that a link such as `latest` points to, states a step."""
    names = {folder.absolute().name, folder.resolve().name}
    return any(step_in(name) is not None or (name.isdigit() and len(name) >= STEP_DIGITS) for name in names)


def _is_step(number: str, others: Iterable[StepFile]) -> bool:
    if len(number) >= STEP_DIGITS or any(one.rank is not None for one in others):
        return True
    return any(int(number) in _counters(one.path) for one in others if one.is_text)


def _counters(path: Path) -> list[object]:
    """The numbers of steps that a JSON or YAML states."""
    with suppress(ReadError):
        content = read_values(path)
        return [content.get(name) for name in COUNTERS] if isinstance(content, dict) else []
    return []


def files_of_state(folder: Path) -> list[StepFile]:
    """The files in a folder with the optimizer and other states of a training, without the model; else empty."""
    named = [one for one in map(parse, _entries(folder)) if one is not None]
    parts = {one.part for one in named}
    plain = not any(one.is_model or one.number or one.rank is not None for one in named)
    return named if plain and "optimizer" in parts and len(parts) > 1 else []


def texts_of_parts(entries: Iterable[Path]) -> dict[str, Path]:
    """The JSON and YAML files among the entries of a step's folder that have the name of a part: `config`, `meta`.

    By the key of each in the tree; a second file of a part is keyed by its name.
    """
    found: dict[str, Path] = {}
    for one in filter(None, map(parse, sorted(entries))):
        if one.is_text and one.part and not one.shared and not one.number and one.path.is_file():
            found[one.path.name if one.part in found else one.part] = one.path
    return found


def other_parts(entries: Sequence[Path]) -> set[Path]:
    """The files in a folder whose checkpoint has the name of another file: all of a step but its model."""
    return {one.path for step in steps_in(entries) if step[0].number for one in step[1:]}
