"""State that transformers' Trainer and Accelerate leave beside a tag folder: scheduler, RNG of every rank, counters.

    checkpoint-500/global_step500/      the Trainer: `latest`, scheduler.pt, rng_state_{R}.pth, trainer_state.json, …
    OUT/pytorch_model/                  Accelerate: `latest`, scheduler.bin, random_states_{R}.pkl, …

`companions` has their names. Beside several tag folders they are not read: nothing says to which of them they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptools.formats.deepspeed.names import tags_in
from ckptools.formats.options import Options
from ckptools.formats.shared.companions import CompanionFiles, companions_in, path_that_states_a_step, read_companions
from ckptools.model.checkpoint import Checkpoint, Fact
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.text import few, plural
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step


def with_state_beside(made: Checkpoint, path: Path, tag: Path, options: Options) -> Checkpoint:
    """Add the companions in `path`, the folder that has the tag folder, to the checkpoint of that.

    Raises:
        UnsafePathError: one of them is a link out of the folder.
    """
    if not path.is_dir() or path == tag or not companions_in(path):
        return made
    tags = tags_in(path)
    if len(tags) > 1:
        names = tuple(companion.path.name for companion in companions_in(path))
        text = (
            f"also here, and not read: {few(names)}; nothing says to which of {few([t.name for t in tags])} they belong"
        )
        return replace(made, problems=worst_first([*made.problems, Problem(Code.NOT_READ, text, files=names)]))
    return _joined(made, read_companions(path, options, made.world_size.value or 0), tag)


def _joined(made: Checkpoint, found: CompanionFiles, tag: Path) -> Checkpoint:
    own = made.tree if isinstance(made.tree, Mapping) else {}
    both = found.tree.keys() & own.keys()
    tree = {**own, **{key: value for key, value in found.tree.items() if key not in both}}
    problems = [*made.problems, *found.problems, *found.swapped()]
    problems += (
        Problem(Code.METADATA_CONTRADICTS, f"{key} is here twice; the tag folder is read", severity="warning")
        for key in sorted(both)
    )
    problems += [*_of_too_many(made, found), *_of_another_step(made, found)]
    nbytes = None if made.bytes_expected is None else made.bytes_expected + sum(f.nbytes for f in found.files)
    read = sum(file.status == "read" for file in found.files)
    cost = made.cost._replace(files=made.cost.files + read, nbytes=made.cost.nbytes + found.bytes_read)
    return replace(
        made,
        tree=tree,
        files=(*made.files, *found.files),
        problems=worst_first(problems),
        names=tuple(dict.fromkeys([*made.names, *found.names])),
        world_size=made.world_size._replace(sources=(*made.world_size.sources, *found.world_size.sources)),
        step=_step(made.step, found, tag),
        bytes_expected=nbytes,
        cost=cost,
    )


def _of_too_many(made: Checkpoint, found: CompanionFiles) -> Iterator[Problem]:
    """Random states of ranks that the tag folder does not have, left from another save."""
    world = made.world_size.exact
    for file in found.files if isinstance(world, int) else ():
        if file.rank is not None and file.rank >= world:
            text = f"{file.path.name} is of rank {file.rank}, and {plural(world, 'rank')} saved {made.name}"
            yield Problem(Code.STRAY_FILE, text, file.rank, file.part, severity="warning")


def _of_another_step(made: Checkpoint, found: CompanionFiles) -> Iterator[Problem]:
    """The Trainer's counter, where it is not DeepSpeed's."""
    counters = found.tree.get("trainer_state")
    stated = counters.get("global_step") if isinstance(counters, Mapping) else None
    if type(stated) is int and made.step.value not in (None, stated):
        text = f"trainer_state.json is of step {stated}, and {made.name} of step {made.step.value}"
        yield Problem(Code.STEPS_DISAGREE, text, None, "trainer_state")


def _step(own: Fact, found: CompanionFiles, tag: Path) -> Fact:
    """The step of the tag folder, and what beside it confirms that; Accelerate's scheduler counts every process."""
    counting = ("other",) if found.from_accelerate else ("other", "scheduler")
    beside = find_step(path_of_step(tag), tuple(s for s in find_sections(found.tree) if s.kind in counting))
    if own.value is None:
        return beside
    confirmed = (s for s in beside.sources if beside.value == own.value and s not in own.sources)
    return own._replace(sources=(*own.sources, *confirmed))


def path_of_step(tag: Path) -> Path:
    """The tag folder as a path whose names may state the step; the number of Accelerate's saves does not."""
    return tag if path_that_states_a_step(tag.parent) == tag.parent else Path("-") / tag.name
