"""Files of one step whose names differ in the word of their part: one checkpoint for each step.

    model_000010.pt                          in a folder with all steps: the model, whole
    optim_000010_rank0.pt, …_rank1.pt        the optimizer, whole or of each rank
    meta_000010.json                         step, configuration, state of the data loader

    step_10/model.pt                         in a folder of one step
    step_10/optimizer.safetensors            moments as `state/0/exp_avg`
    step_10/optimizer.json                   param groups
    step_10/train_state.json

Many scripts save so. The word may be missing from the name of one file: `ckpt_1000.pt` beside `ckpt_1000_optim.pt`. A
number in a name may count something else than steps, such as a rank or an epoch. So files are taken for one checkpoint
only if their number has five digits or more, if another number in a name is a rank, if a JSON of them states the number
as the step, or if they are alone in a folder that is named after a step.

Source of the first example: nanochat, nanochat/checkpoint_manager.py (`save_checkpoint`), whose optimizer has on each
rank the state of the parameters that the rank updates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import read_json, reading, tells_others
from ckptools.formats import hugging_face, rank_files, torch_file
from ckptools.formats.options import Options
from ckptools.formats.recipe import Part, PartsBuilder, flattened_optimizer
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows
from ckptools.training_state.sections import is_optimizer
from ckptools.training_state.steps import COUNTERS, step_in

NAME = "step_files"
READS = "files of one step, such as model_000010.pt, optim_000010.pt (or of each rank) and meta_000010.json"
KNOWN_BY = "names that differ in model, optim, meta and the like; the number or the folder is proven to be of a step"
BY_HAND = ("nanochat",)
JOINS = ("model", "optimizer", "rest")

MODEL, JSON = "model", ".json"
PARTS = {
    **dict.fromkeys(("model", "weights"), MODEL),
    **dict.fromkeys(("optim", "optimizer", "opt"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "sched"), "scheduler"),
    **dict.fromkeys(("meta", "metadata"), "meta"),
    **{
        word: word for word in ("train", "trainer", "training", "state", "rng", "ema", "scaler", "dataloader", "config")
    },
}
"""Words in names of files, each with the part that it names."""

WORDS = "|".join(sorted(PARTS, key=len, reverse=True))
WORD = re.compile(rf"(?<![A-Za-z])({WORDS})(?:_(?:states?|param_groups|step))?(?![A-Za-z])", re.IGNORECASE)
COUNTING = re.compile(r"(?<![A-Za-z])(?:step|iter|iteration|ckpt|checkpoint)(?![A-Za-z])", re.IGNORECASE)
"""Words beside a step, which the name of one part may have and that of another may not."""

RANK = re.compile(r"[._-]rank[._-]?(\d{1,6})(?!\d)")
OTHER_NUMBERS = re.compile(r"-of-|world")
"""Signs of numbers that count files or ranks."""

SUFFIXES = (".pt", ".pth", ".safetensors", JSON)
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
    def is_model(self) -> bool:
        """Whether it may be the model's file: by its word, or by no word at all."""
        return self.part in ("", MODEL) and self.path.suffix != JSON and self.rank is None


def parse(path: Path) -> StepFile | None:
    """Split a name into part, step and rank; None if it has no such form."""
    if path.suffix not in SUFFIXES or OTHER_NUMBERS.search(path.name):
        return None
    ranks, stem = RANK.findall(path.stem), RANK.sub("", path.stem)
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
    folder = path if path.is_dir() else path.parent
    mine = None if path.is_dir() else parse(path)
    if not tells_others(path) or not (path.is_dir() or mine) or (mine and not (mine.number or _is_of_step(folder))):
        return []
    with reading(folder):
        entries = sorted(folder.iterdir())[:MAX_ENTRIES]
    found = [one for one in map(parse, entries) if one is not None and one.path.is_file()]
    if mine is None:
        models = [one for one in found if one.is_model and (one.number or _is_of_step(folder))]
        if len(models) != 1:
            return []
        mine = models[0]
    group = [one for one in found if (one.shared, one.number) == (mine.shared, mine.number)]
    models = [one for one in group if one.is_model]
    others = [one for one in group if not one.is_model]
    if len(models) != 1 or not any(one.part for one in others):
        return []
    if mine.number:
        return [*models, *others] if _is_step(mine.number, others) else []
    return [] if any(entry.is_dir() for entry in entries) else [*models, *others]


def _is_of_step(folder: Path) -> bool:
    name = folder.absolute().name
    return step_in(name) is not None or (name.isdigit() and len(name) >= STEP_DIGITS)


def _is_step(number: str, others: Iterable[StepFile]) -> bool:
    if len(number) >= STEP_DIGITS or any(one.rank is not None for one in others):
        return True
    return any(int(number) in _counters(one.path) for one in others if one.path.suffix == JSON)


def _counters(path: Path) -> list[object]:
    """The numbers of steps that a JSON states."""
    with suppress(ReadError):
        content = read_json(path)
        return [content.get(name) for name in COUNTERS] if isinstance(content, dict) else []
    return []


def detect(path: Path) -> bool:
    """Whether a path is a file of a step with several, or the folder of one step with nothing else in it."""
    found = files_of_step(path)
    if not found or found[0].number or path.is_file():
        return bool(found) and found[0].number != ""
    # Hugging Face's folders have no other part in safetensors beside the model.
    parts = any(one.path.suffix == ".safetensors" for one in found[1:])
    return parts or not hugging_face.detect(path)


def is_another_part(path: Path) -> bool:
    """Whether a file is of a step whose checkpoint has the name of another file."""
    found = files_of_step(path)
    return bool(found) and found[0].number != "" and found[0].path != path


def read(path: Path, options: Options) -> Checkpoint:
    """Open all files of a step.

    Raises:
        ReadError: no file can be read.
        UnsafePathError: a file is a link out of the folder.
    """
    if not options.looks_around and not path.is_dir():
        alone: Checkpoint = _format_of(path).read(path, options)
        return alone
    found = files_of_step(path)
    parts = PartsBuilder(NAME, path if path.is_dir() else path.parent, options)
    for key in dict.fromkeys(one.part or _key_of(one) for one in found):
        mine = [one for one in found if (one.part or _key_of(one)) == key]
        listed = [one.path for one in mine if one.path.suffix == JSON]
        stored = [one.path for one in mine if one.path.suffix != JSON]
        for one in stored[:1]:
            parts.add(Part((one.name,), key, _read_part))
        for one in listed:
            _add_json(parts, one, key)
        _miss_ranks(parts, mine)
    parts.check_tree()
    model, number = found[0].path, found[0].number
    names = ", ".join(dict.fromkeys(one.part or _key_of(one) for one in found))
    ck = parts.checkpoint(
        f"files of one step: {names}", parts.world, named=model.with_name(f"step-{int(number)}") if number else path
    )
    if not ck.step.agree:  # nothing says which file is of another step
        text = f"the names say step {number or path.name}, {ck.step.sources[0]} says {ck.step.value}"
        problem = Problem(Code.NAME_CONTRADICTS, f"{text}; a file may be of another step")
        ck = replace(ck, step=Fact(None), problems=Rows((*ck.problems, problem)))
    return ck if path.is_dir() else replace(ck, name=model.stem, path=model)


def _key_of(one: StepFile) -> str:
    """The key of a file whose name says no part."""
    return "meta" if one.path.suffix == JSON else MODEL


def _read_part(parts: PartsBuilder, path: Path, key: str) -> None:
    """Add a part: a file, or those of all ranks. A file that has more than the part keeps its own keys."""
    by_rank = RANK.search(path.name) is not None
    options = replace(parts.options, only_this_file=not by_rank, all_ranks=parts.options.all_ranks or by_rank)
    made = _format_of(path).read(path, options)
    whole = key == MODEL and isinstance(made.tree, dict) and isinstance(made.tree.get(MODEL), dict)
    parts.add_checkpoint(made, "" if whole else key)


def _add_json(parts: PartsBuilder, path: Path, key: str) -> None:
    """Add a JSON: the param groups of a flattened optimizer, or a part of its own."""
    present = parts.tree.get(key)
    if present is None:
        parts.add(Part((path.name,), key, PartsBuilder.add_file))
        return
    content: Any = parts.read_file(path, key)
    groups = content.get("param_groups", content) if isinstance(content, dict) else content
    made = flattened_optimizer(present, groups) if isinstance(present, dict) else {}
    if isinstance(groups, list) and made["state"] and is_optimizer(made):
        parts.tree[key] = made
    elif content is not None:
        parts.tree[f"{key}{JSON}"] = content


def _miss_ranks(parts: PartsBuilder, mine: Sequence[StepFile]) -> None:
    """Note the ranks that have a file of another step, and none of this one: it may be lost, or the run shrank."""
    here = {one.rank for one in mine if one.rank is not None}
    if not here:
        return
    first = next(one for one in mine if one.rank is not None)
    with reading(parts.path):
        known = [parse(entry) for entry in sorted(parts.path.iterdir())[:MAX_ENTRIES]]
    alike = [one for one in known if one is not None and (one.part, one.shared) == (first.part, first.shared)]
    lost = sorted({one.rank for one in alike if one.rank is not None} - here)
    name = RANK.sub(lambda found: found[0].replace(found[1], "{rank}"), first.path.name)
    parts.miss_files(first.part, first.path.with_name(name), lost, "error", ", which another step here has")


def _format_of(path: Path) -> Any:
    if RANK.search(path.name):
        return rank_files
    return torch_file if torch_file.detect(path) else hugging_face
