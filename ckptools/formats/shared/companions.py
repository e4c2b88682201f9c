"""Companion files that transformers' Trainer and Accelerate write beside a model.

    optimizer.pt | optimizer.bin | optimizer_1.bin      optimizer (Trainer | Accelerate and FSDP | its second)
    scheduler.pt | scheduler.bin | scheduler_1.bin      learning rate scheduler
    scaler.pt                                           gradient scaler
    rng_state.pth | rng_state_{R}.pth                   RNG (Trainer: one process | each)
    random_states_{R}.pkl                               RNG and step counter of each process (Accelerate)
    trainer_state.json                                  counters, log
    sampler.bin, dl_state_dict.bin, sampler_1.bin       data loaders
    custom_checkpoint_{N}.pkl                           registered objects
    training_args.bin                                   an object of the Trainer's class: named, never made
    training_args.yaml | config.yaml | hparams.yaml     settings, of programs around the Trainer

With automatic naming Accelerate calls its folders `checkpoints/checkpoint_{N}`; N counts saves, not steps.
An `AcceleratedScheduler` is stepped once for every process, unless batches are split, which no file records. Its
count divided by the number of processes is taken as the training step. `step` beside Accelerate's random states counts
how often `accumulate` was entered since the data loader began.

All but JSON and YAML are torch.save files, `.pkl` too. Source: accelerate/checkpointing.py, utils/constants.py and
accelerator.py (`save_state`, `save_iteration`), transformers/trainer.py; read on files of Accelerate 1.15.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File, content_of, head_of, reading
from ckptools.files.values import SUFFIXES, YAML, read_values
from ckptools.files.zip_archive import MAX_PICKLE
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import FileSet, archive_claims, file_now
from ckptools.model.facts import FILES_FOUND, Fact
from ckptools.model.problems import Code, Problem
from ckptools.pickles.machine import Machine, load_checked
from ckptools.rules.files import FileClaims, misplaced, missing
from ckptools.text import few, first_few
from ckptools.training_state.sections import is_optimizer

OF_A_RANK = re.compile(r"(?:rng_state_(\d{1,5})\.pth|random_states_(\d{1,5})\.pkl)")
OF_ALL = re.compile(
    r"((?:optimizer|scheduler|scaler|sampler|dl_state_dict)(?:_\d{1,4})?)\.(?:pt|bin)"
    r"|(custom_checkpoint_\d{1,4})\.pkl|(training_args)\.bin|(trainer_state)\.json|(rng)_state\.pth"
    r"|(config|hparams|training_args)\.ya?ml"
)
NUMBERED = re.compile(r"(optimizer|scheduler|custom_checkpoint)(?:_(\d{1,4}))?")
"""Keys of files that Accelerate numbers from 0 without a gap; the first of most kinds has no number."""

PROTOCOL = b"\x80"
"""The first byte of a pickle of protocol 2 or later."""

NTH_SAVE = re.compile(r"checkpoint_\d+")
ORDER = ("optimizer", "scheduler", "scaler", "rng", "trainer_state", "sampler", "dl_state_dict", "custom_checkpoint")


@dataclass(frozen=True)
class Companion:
    """A companion file, with its key in the tree and, if each rank has one, its rank."""

    path: Path
    key: str
    rank: int | None


class CompanionFiles(FileSet):
    """The content of the companion files in a folder; `files` are the companions, found or missing.

    Attributes:
        tree: by name, such as `optimizer`; `rng` by rank if ranks have their own.
        names: dotted names that their pickles mention.
        world_size: number of ranks with RNG states; no value if there are none by rank.
        claims: of their torch.save files that were read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tree: dict[str, Any] = {}
        self.names: list[str] = []
        self.world_size = Fact(None)
        self.bytes_read = 0
        self.claims: list[FileClaims] = []

    @property
    def from_accelerate(self) -> bool:
        """Whether Accelerate wrote the file, whose scheduler counts for every process."""
        return any(file.path.name.startswith("random_states_") for file in self.files)

    def swapped(self) -> Iterator[Problem]:
        """Find files that were saved under the name of another companion, with its key and rank."""
        return misplaced(self.claims, sure=False)

    def read(self, companion: Companion, options: Options, name: str = "") -> Any:
        """Read one companion and count its cost; None, and a problem that calls it `name`, if it is unreadable.

        YAML that is not read is no fault: it may hold objects, and its reader may not be installed.
        """
        path, key, rank = companion.path, companion.key, companion.rank
        try:
            if path.suffix in SUFFIXES:
                self.bytes_read += path.stat().st_size
                tree = read_values(path)
            elif path.suffix == ".pkl" and (machine := _plain_pickle(path)) is not None:
                self.bytes_read += len(machine.data)
                tree = load_checked(machine, path, "pickle")
                self.names += (named.dotted for named in machine.globals.values())
            else:
                saved = options.read_file(path)
                self.claims.append(archive_claims(saved, rank, key))
                self.names += saved.names
                self.bytes_read += saved.bytes_read
                tree = saved.tree
        except ReadError as error:
            if path.suffix in YAML:
                text = f"{name or path.name} {error.reason}"
                self.problems.append(Problem(Code.NOT_READ, text, files=(path.name,)))
                self.files.append(file_now(path, rank, key, "seen"))
            else:
                self.add_fault(path, error, rank, key, name=name, tensor=key)
            return None
        self.add_file(path, rank, key)
        return tree


def _plain_pickle(path: Path) -> Machine | None:
    """Read a file of `pickle.dump`, in which tensors are foreign objects; None for a torch.save file.

    Raises:
        ReadError: it is too large to be read.
    """
    with File(path) as file:
        if file.size == 0 or file.read(0, 1) != PROTOCOL or content_of(head_of(file)):
            return None
        if file.size > MAX_PICKLE:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_PICKLE} are read")
        return Machine(file.read(0, file.size))


def lacks_its_model(folder: Path) -> bool:
    """Whether a folder without weights or folders has files that the Trainer or Accelerate saves beside a model."""
    with reading(folder):
        names = {entry.name for entry in folder.iterdir() if entry.is_file()}
        plain = not any(entry.is_dir() for entry in folder.iterdir())
    trainer = "trainer_state.json" in names and not names.isdisjoint(("optimizer.pt", "scheduler.pt"))
    accelerate = "random_states_0.pkl" in names and not names.isdisjoint(("optimizer.bin", "scheduler.bin"))
    return plain and (trainer or accelerate)


def companions_in(folder: Path) -> list[Companion]:
    """The companions in a folder, in the order of the tree. Two files of one key are keyed by their names.

    Settings in YAML alone make no folder of a model one of a training.
    """
    with reading(folder):
        named = [c for c in map(_companion, sorted(folder.iterdir())) if c is not None and c.path.is_file()]
    if all(c.path.suffix in YAML for c in named):
        return []
    times = Counter((c.key, c.rank) for c in named)
    by_rank = {c.key for c in named if c.rank is not None}
    clear = [
        replace(c, key=c.path.name, rank=None)
        if times[c.key, c.rank] > 1 or (c.rank is None and c.key in by_rank)
        else c
        for c in named
    ]
    return sorted(clear, key=lambda c: (_order(c.key), c.key, -1 if c.rank is None else c.rank))


def _companion(path: Path) -> Companion | None:
    ranked, one = OF_A_RANK.fullmatch(path.name), OF_ALL.fullmatch(path.name)
    if ranked:
        return Companion(path, "rng", int(ranked[ranked.lastindex or 0]))
    return Companion(path, one[one.lastindex or 0], None) if one else None


def is_companion(path: Path) -> bool:
    """Whether a file has the name of a companion, so that it is not a checkpoint of its own."""
    return path.suffix not in YAML and _companion(path) is not None


def _order(key: str) -> int:
    return next((n for n, name in enumerate(ORDER) if key.startswith(name)), len(ORDER))


def read_companions(folder: Path, options: Options, ranks: int = 0) -> CompanionFiles:
    """Read the companions in a folder; unreadable ones become problems.

    If ranks saved RNG states, at least `ranks` of them did: each rank that wrote the rest of the checkpoint.

    Raises:
        UnsafePathError: one of them is a link out of the folder.
    """
    found = CompanionFiles(folder)
    here = companions_in(folder)
    for companion in here:
        options.check_link(companion.path, folder)
    for companion in here:
        value = found.read(companion, options)
        if found.files[-1].status != "read":
            continue
        if companion.rank is None:
            found.tree[companion.key] = value
        else:
            found.tree.setdefault(companion.key, {})[companion.rank] = value
    _count_ranks(found, here, ranks)
    if found.world_size.value is not None:
        found.problems += unlike_states("rng", found.tree.get("rng", {}))
    found.problems += _gaps(here)
    names = {companion.path.name for companion in here}
    if "scheduler.pt" in names and any(n.startswith("rng_state") for n in names) and "trainer_state.json" not in names:
        more = ", which the Trainer writes last; the save may have been interrupted"
        found.problems.append(missing("trainer_state.json", None, "trainer_state", more=more, severity="warning"))
    # An optimizer under the name of a scheduler, or the opposite: swapped with it, or a copy of it.
    for key, value in found.tree.items():
        steps = isinstance(value, Mapping) and "last_epoch" in value
        kind = "an optimizer" if is_optimizer(value) else "a scheduler" if steps else ""
        if kind and key.startswith(("optimizer", "scheduler")) and not key.startswith(kind.split()[1]):
            text = f"holds the state of {kind}"
            found.problems.append(Problem(Code.NAME_CONTRADICTS, text, None, key, severity="error"))
    return found


def path_that_states_a_step(folder: Path) -> Path:
    """The folder, or a path without a name if Accelerate's number of saves, which is not a step, is in its name."""
    own = folder.absolute()
    return Path("-") if own.parent.name == "checkpoints" and NTH_SAVE.fullmatch(own.name) else folder


def step_of_accelerate(tree: Any, world_size: Fact) -> Fact:
    """The training step from Accelerate's scheduler, else from the counter beside the random states."""
    tree, world = tree if isinstance(tree, dict) else {}, world_size.value
    states, scheduler = tree.get("rng"), tree.get("scheduler")
    counted = {s.get("step") for s in states.values() if isinstance(s, dict)} if isinstance(states, dict) else set()
    own = next(iter(counted)) if len(counted) == 1 else None
    total = scheduler.get("last_epoch") if isinstance(scheduler, dict) else None
    if type(total) is int and type(world) is int and 0 < world <= total and total % world == 0:
        step = total // world
        confirmed = ("rng.0.step",) if own == step else ()
        return Fact(step, (f"scheduler.last_epoch / {world} process{'es' if world > 1 else ''}, assumed", *confirmed))
    if type(own) is int and own > 0:
        return Fact(own, ("rng.0.step, assumed to count from the start",))
    return Fact(None)


def _count_ranks(found: CompanionFiles, here: list[Companion], ranks: int) -> None:
    """Set the world size from the ranks' files, at least `ranks`, and find missing ones."""
    ranked = {c.rank: c for c in here if c.rank is not None}
    if not ranked:
        return
    counted, first = max(ranked) + 1, next(iter(ranked.values()))
    # The Trainer numbers them only if there are several.
    alone = counted == 1 and first.path.name.startswith("rng_state_")
    counted += alone
    named = Fact(counted, ("RNG files",), at_least=alone)
    found.world_size = named if counted >= ranks else Fact(ranks, (FILES_FOUND,))
    for rank in sorted(set(range(max(counted, ranks))) - set(ranked)):
        path = first.path.with_name(re.sub(r"_\d+\.", f"_{rank}.", first.path.name))
        found.add_missing(path, rank, "rng", tensor="rng")


def unlike_states(key: str, states: Mapping[Any, Any]) -> Iterator[Problem]:
    """Warn if the states of ranks, in one part, have different keys: one may be of another part."""
    having: dict[tuple[str, ...], list[str]] = {}
    for rank, state in states.items():
        keys = sorted(map(str, state)) if isinstance(state, Mapping) else [type(state).__name__]
        having.setdefault(tuple(keys), []).append(str(rank))
    if len(having) > 1:
        said = "; ".join(
            f"{few(keys, 3) or 'nothing'} of rank{'s' * (len(ranks) > 1)} {first_few(ranks, 3)}"
            for keys, ranks in having.items()
        )
        yield Problem(Code.NAME_CONTRADICTS, f"files of one part hold different things: {said}", None, key)


def without_optimizer(folder: Path, tree: Mapping[str, Any], models: Collection[str] = ()) -> Iterator[Problem]:
    """Warn if a folder has a scheduler but no optimizer for it: they are saved together.

    A folder in it, other than those of `models` and of FSDP's model, may have the optimizer: DeepSpeed's.
    """
    with reading(folder):
        entries = list(folder.iterdir()) if "scheduler" in tree else []
    may_have = (p for p in entries if p.is_dir() and not p.name.startswith("pytorch_model_") and p.name not in models)
    if entries and not any(p.name.startswith("optimizer") for p in entries) and not any(may_have):
        text = "file or folder of an optimizer, though that of its scheduler is here"
        yield missing(text, None, "optimizer", kind="", severity="warning")


def _gaps(here: list[Companion]) -> Iterator[Problem]:
    """Find gaps in the numbers of Accelerate's files: an optimizer, a scheduler, a registered object."""
    kinds: dict[str, dict[int, Companion]] = {}
    for companion in here:
        if numbered := NUMBERED.fullmatch(companion.key):
            kinds.setdefault(numbered[1], {})[int(numbered[2] or 0)] = companion
    for kind, have in kinds.items():
        suffix = next(iter(have.values())).path.suffix
        lacking = sorted(set(range(max(have))) - set(have))
        names = [f"{kind}_{n}{suffix}" if n or kind == "custom_checkpoint" else f"{kind}{suffix}" for n in lacking]
        if names:
            yield missing(names, None, kind, more=", and later ones are here")
