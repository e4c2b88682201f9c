"""The training step of a checkpoint, from its counters, schedulers and file name, and whether they agree."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.rank_vote import vote
from ckptools.model.tree import scalar, walk
from ckptools.text import KeyPath, fqn_of
from ckptools.training_state.optimizers import nested, optimizers_of
from ckptools.training_state.sections import Section, sections_of_kind

COUNTERS = (
    "batch", "global_step", "global_steps", "step", "steps", "train_step", "iteration", "iter", "num_steps"
)  # fmt: skip
"""Keys of plain counters outside model and optimizer, the most reliable first."""

RANKS_DIFFER = "not on every rank"
"""The source of a step that other ranks contradict."""

EPOCH_COUNTERS = ("EPOCHS_RUN", "epoch", "epochs")
NAMES = re.compile(r"(?<![A-Za-z])(?:ba|global_step|step|iter|iteration|checkpoint)[-_=]?(\d{1,12})(?!\d)")


def find_step(path: Path, sections: tuple[Section, ...]) -> Fact:
    """Find the step of the checkpoint at `path`, and all its sources.

    Counters in the content decide, then the file or folder name, then a scheduler. `agree` is False when name and
    content state different steps; a scheduler may count epochs, so it only confirms.
    """
    names = {"file name": path.name, "folder name": path.parent.name, "folder": path.parent.parent.name}
    steps = ((what, step) for what, name in names.items() if (step := step_in(name)) is not None)
    named = dict(islice(steps, 1))
    counting = [s for s in sections if s.kind == "scheduler" and type(s.value.get("last_epoch")) is int]
    schedulers = {f"{s.name}.last_epoch": s.value["last_epoch"] for s in counting}
    content = dict(sorted(_counters(sections), key=_surest_first))
    candidates = [*content.values(), *named.values(), *schedulers.values()]
    if not candidates:
        return Fact(None)
    value = candidates[0]
    sources = tuple(name for name, found in {**named, **content, **schedulers}.items() if found == value)
    return Fact(value, sources, agree=not content or all(step == value for step in named.values()))


def step_in(name: str) -> int | None:
    """The step in a file or folder name; None if it contains none."""
    found = NAMES.findall(name)
    return int(found[-1]) if found else None


def by_majority(step: Fact, differing: Mapping[KeyPath, Mapping[int, Any]]) -> Fact:
    """The step of most ranks, if ranks have different steps; `differing` has each rank's value, by key path."""
    for path, ranked in differing.items():
        values = list(ranked.values())
        if path and path[-1] in COUNTERS and step.value in values and all(type(v) is int for v in values):
            usual = vote(list(ranked.items()), eq).majority
            value = step.value if usual is None else usual[0]
            sources = step.sources if value == step.value else (fqn_of(path),)
            return Fact(value, (*sources, RANKS_DIFFER), agree=False)
    return step


def contradiction(step: Fact) -> str:
    """Describe a step whose sources do not agree."""
    if RANKS_DIFFER in step.sources:
        return f"ranks state different steps; {step.value} is that of most, or of the lowest"
    return f"the name of the file or folder states another step than {step.sources[0]} ({step.value})"


def _counters(sections: tuple[Section, ...]) -> Iterator[tuple[str, int]]:
    for section in (s for s in sections if s.kind == "other"):
        for path, leaf in walk(section.value):
            key = (*section.path, *path)
            if type(leaf) is int and key and key[-1] in COUNTERS and len(key) <= 5 and not _is_setting(key):
                yield fqn_of(key), leaf


def _is_setting(key: KeyPath) -> bool:
    """Whether the path leads through arguments or callbacks, whose `step` has another meaning."""
    return any(str(k) in ("args", "config", "hparams", "hyper_parameters", "callbacks", "loops") for k in key)


def _surest_first(counter: tuple[str, int]) -> tuple[int, int]:
    name, _ = counter
    return COUNTERS.index(name.rpartition(".")[2]), name.count(".")


# -- schedulers --------------------------------------------------------------------------------------------------------


WHY_OUT_OF_STEP = "was it stepped once per epoch, rebuilt on resume, or stepped once per process (x world size)?"
"""The usual reasons why a scheduler's count differs from the optimizer's steps."""


class SchedulerCount(NamedTuple):
    """A scheduler's count of steps, compared with the training's.

    Attributes:
        name: key of the count: `scheduler.last_epoch`.
        in_step: whether other counters explain it; None if it may count epochs or calls that have no other counter.
        per: the unit of the count, if it is not a step: `once per epoch`.
    """

    name: str
    value: int
    in_step: bool | None
    per: str = ""

    @property
    def words(self) -> str:
        """The count in a few words: `scheduler.last_epoch 3, once per epoch`."""
        return f"{self.name} {self.value}" + (f", {self.per}" if self.per else "")


def scheduler_counts(ck: Checkpoint, steps: Collection[int]) -> list[SchedulerCount]:
    """Explain each scheduler's count by the `steps` that the training and its optimizers count.

    A count may be one off: a save may come between a step of the optimizer and that of the scheduler, and DeepSpeed's
    schedulers begin at -1. Accelerate steps a scheduler once per process. Sources: torch/optim/lr_scheduler.py
    (`_initial_step`), deepspeed/runtime/lr_schedules.py (`WarmupLR`), accelerate/scheduler.py (`AcceleratedScheduler`).
    """
    counts = (one for section in sections_of_kind(ck, "scheduler") for one in _counts(section.name, section.value))
    epochs = set(_epochs(ck.tree))
    world = ck.world_size.value if type(ck.world_size.value) is int else 1
    return [SchedulerCount(name, count, *_explained(count, steps, epochs, world)) for name, count in counts if steps]


BATCHES = "last_batch_iteration"
"""DeepSpeed's key for the number of a scheduler's last step."""


def _counts(name: str, state: Any) -> Iterator[tuple[str, int]]:
    """Yield the key and the count of a scheduler, or of each scheduler in a chain.

    A chain has no count of its own. The schedulers of a sequence begin at its milestones, and the sequence counts all
    steps. Source: torch/optim/lr_scheduler.py (`ChainedScheduler.state_dict`, `SequentialLR`).
    """
    if not isinstance(state, Mapping):
        return
    own = [(f"{name}.{key}", scalar(state[key])) for key in ("last_epoch", BATCHES) if key in state]
    yield from ((where, count) for where, count in own if type(count) is int)
    inner = state.get("_schedulers")
    for n, one in enumerate(inner) if not own and isinstance(inner, (list, tuple)) else ():
        yield from _counts(f"{name}._schedulers.{n}", one)


def _explained(count: int, steps: Collection[int], epochs: Collection[int], world: int) -> tuple[bool | None, str]:
    if any(abs(count - step) <= 1 for step in steps):
        return True, ""
    if any(abs(count - epoch) <= 1 for epoch in epochs):
        return True, "once per epoch"
    if world > 1 and any(abs(count - step * world) <= world for step in steps):
        return True, f"once per each of {world} processes"
    # It may be stepped every n steps: then n is the same whole number for all counts of steps.
    rare = count <= 0 or any(step >= 2 * count and step // (step // count) == count for step in steps)
    return (None if rare else False), ""


def _epochs(tree: Any) -> Iterator[int]:
    """Yield plain counters of epochs outside of settings."""
    for path, leaf in walk(tree):
        if path and str(path[-1]).lower() in EPOCHS and len(path) <= 5 and not _is_setting(path):
            value = scalar(leaf)
            if type(value) in (int, float) and 0 <= value < 1 << 40:
                yield int(value)


EPOCHS = ("epochs_run", "epoch", "epochs", "current_epoch", "epoch_idx")
"""Keys of epoch counters, in lower case; a scheduler's own count is not among them."""


# -- learning rates ----------------------------------------------------------------------------------------------------


class LearningRates(NamedTuple):
    """The rates of one scheduler (`_last_lr`) and of its optimizer (the `lr` of each param group)."""

    scheduler: tuple[float, ...]
    groups: tuple[float, ...]

    @property
    def agree(self) -> bool:
        """Whether the scheduler and the param groups state the same rates."""
        return self.scheduler == self.groups


def learning_rates(ck: Checkpoint) -> list[LearningRates | None]:
    """The rates of each scheduler, in the order of the sections; None if they cannot be compared."""
    schedulers, optimizers = sections_of_kind(ck, "scheduler"), list(optimizers_of(ck).values())
    # With several schedulers it is unknown which optimizer each of them drives.
    if not len(schedulers) == len(optimizers) == 1:
        return [None] * len(schedulers)
    return [_compared(schedulers[0].value, [group.get("lr") for group in optimizers[0].param_groups])]


def group_rates(ck: Checkpoint) -> tuple[float, ...]:
    """The `lr` of each param group of each optimizer, in the order of the file; empty if a group has none."""
    groups = [nested(s.value).get("param_groups", ()) for s in sections_of_kind(ck, "optimizer")]
    listed = [one for of in groups if isinstance(of, (list, tuple)) for one in of]
    rates = _rates([group.get("lr") for group in listed if isinstance(group, Mapping)])
    return rates if len(rates) == len(listed) else ()


def _compared(state: Any, groups: Sequence[Any]) -> LearningRates | None:
    last = state.get("_last_lr") if isinstance(state, Mapping) else None
    if not isinstance(last, (list, tuple)):
        return None
    stated, known = _rates(last), _rates(groups)
    return LearningRates(stated, known) if len(stated) == len(known) == len(last) == len(groups) else None


def _rates(values: Sequence[Any]) -> tuple[float, ...]:
    """Values as floats, if they are floats, or integers that a float can hold."""
    found = map(scalar, values)
    return tuple(float(v) for v in found if isinstance(v, float) or (isinstance(v, int) and abs(v) < 1 << 64))
