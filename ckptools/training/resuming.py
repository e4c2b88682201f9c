"""Resume a run from a checkpoint: choose the checkpoint, find the state that a run needs in it, and restore it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ckptools import api
from ckptools.cluster.environment import restarts
from ckptools.cluster.rank_0 import made_by_rank_0
from ckptools.errors import CkptoolsError, NotWholeError, ReadError, UsageError
from ckptools.files.opening import path_of
from ckptools.formats.open import open_checkpoint
from ckptools.loading.load import load
from ckptools.ls import rows
from ckptools.ls.record import CheckpointRow
from ckptools.ls.rows import NO_MODEL, row_of
from ckptools.ls.search import Opened, RunSearch
from ckptools.model.tree import NumpyArray, nodes_in
from ckptools.text import plural
from ckptools.training import output
from ckptools.training.model import (
    TIED,
    Position,
    RandomState,
    Transformer,
    find_random_states,
    first_of_shares,
    own_random_states,
    position_after,
    random_fingerprint,
    restore_random_states,
    trained_names,
)
from ckptools.training.options import FULL_STATE, OPTIMIZERS, CreateOptions
from ckptools.training.output import opened_by
from ckptools.training.run import Run, Say

if TYPE_CHECKING:
    from ckptools.loading.load_options import LoadOptions
    from ckptools.model.regions import Ints


# -- the state that a run needs beside model and optimizer, from a checkpoint of any layout ----------------------------
# ckptools finds model, optimizer, scheduler and random states; this code finds the counters of a run, by their keys.
# Nothing that the files name is run. Rank 0 reads all of it for the other ranks.


# Counters of whole passes over the data, where nothing finer is known; the second is from torch's tutorials.
EPOCHS = ("epoch", "EPOCHS_RUN")


@dataclass
class SavedRun:
    """The part of a checkpoint that resuming needs, without the values of model and optimizer.

    Attributes:
        step: optimizer steps that were taken.
        losses: the losses before each of these steps, from the file beside the checkpoint; empty if they are unknown.
        position: position of the run in its data; None if unknown.
        shapes: shapes of the model's tensors, by fqn.
        with_state: fqns of the parameters that have optimizer state; empty without an optimizer.
        names: names of the parameters in the order of the optimizer's numbers; None if the files have the names.
        optimizer_name: the optimizer's name in the checkpoint, which may be its class; empty without an optimizer.
        scheduler: the scheduler's state dict; empty without a scheduler.
        random: the random states of all ranks, in their order; of one rank if only that rank has saved its states.
    """

    path: Path
    step: int
    losses: list[float]
    position: Position | None
    shapes: dict[str, Ints]
    with_state: frozenset[str]
    names: list[str] | None
    optimizer_name: str
    scheduler: dict[str, Any]
    random: list[RandomState]


def read(ck: api.Checkpoint, names: list[str], batch: int) -> SavedRun:
    """Find what resuming needs in a checkpoint that was opened with all ranks.

    `names` are the fqns of the optimizer's parameters in its order, for layouts that number parameters. `batch` is the
    number of sequences per share and step, for layouts that count steps only.

    Raises:
        ReadError: the checkpoint cannot be read.
    """
    model = {name: value.shape for name, value in ck.model.items() if isinstance(value, api.Tensor)}
    # A module around the model puts its name before every fqn, such as Lightning's `model.`.
    ends = (name.removesuffix(names[0]) for name in model if name == names[0] or name.endswith("." + names[0]))
    prefix = next((prefix for prefix in ends if all(prefix + name in model for name in names)), "")
    shapes = {name.removeprefix(prefix): shape for name, shape in model.items()}
    # safetensors files do not have the second names of tied tensors.
    tied = {name: shapes[tied_to] for name, tied_to in TIED.items() if tied_to in shapes}
    optimizer_name, optimizer = next(iter(ck.optimizers.items()), ("", None))
    states: Mapping[Any, Any] = optimizer.state if optimizer else {}
    numbered = dict(enumerate(names))
    random = [state for tree in _by_rank(ck) if (state := find_random_states(_plain(tree)))]
    # The step as the checkpoint states it, else as the optimizer has counted.
    counted = (int(_plain(state["step"])) for state in states.values() if "step" in state)
    step = max(counted, default=0) if ck.step.value is None else int(ck.step.value)
    # A single file was written by one rank for all ranks, and does not say how many they were.
    ranks = None if len(ck.files) == 1 and ck.world_size.value == 1 else ck.world_size.value
    folder = Path(os.path.commonpath([file.path.parent for file in ck.files])) if ck.files else ck.path
    return SavedRun(
        path=ck.path,
        step=step,
        losses=output.read_losses(folder, step),
        position=_position(ck, step, len(first_of_shares(random)) or ranks, batch),
        shapes=tied | shapes,
        with_state=frozenset(numbered.get(key, str(key).removeprefix(prefix)) for key in states),
        names=[prefix + name for name in names] if optimizer and optimizer.naming.by != "fqn" else None,
        optimizer_name=optimizer_name,
        scheduler=next((_plain(value) for value in ck.schedulers.values()), {}),
        random=random,
    )


def _position(ck: api.Checkpoint, step: int, shares: int | None, batch: int) -> Position | None:
    """The position of the run in its data: as stated, else computed from its steps, else the start of its epoch."""
    trees = ({section.path[-1]: section.value} for section in ck.of_kind("other"))
    nodes = [node for tree in trees for _, node in nodes_in(tree, (dict,))]
    for node in nodes:
        if {"epoch", "sample_in_epoch"} <= node.keys():
            return Position(node["epoch"], node["sample_in_epoch"])
        if {"epoch", "tokens_processed", "sequence_length"} <= node.keys():  # OLMo-core
            return Position(node["epoch"], node["tokens_processed"] // node["sequence_length"])
    # torchtitan has a loader per share, and no random states to count them by.
    shares = next((node["world_size"] for node in nodes if "dp_rank_0" in node and "world_size" in node), shares)
    if shares is not None:
        return position_after(step, shares, batch)
    epochs = [node[key] for key in EPOCHS for node in nodes if isinstance(node.get(key), int)]
    return Position(epochs[0], exact=False) if epochs else None


def _by_rank(ck: api.Checkpoint) -> Iterator[Any]:
    """Yield the random states that each rank has saved: in files of its own, or gathered in one tree."""
    for section in ck.of_kind("rng"):
        if section.path in ck.per_rank:
            yield from (tree for _, tree in sorted(ck.per_rank[section.path].items()))
        elif isinstance(section.value, Mapping) and all(str(key).isdecimal() for key in section.value):
            yield from (section.value[key] for key in sorted(section.value, key=int))
        else:
            yield from section.value if isinstance(section.value, list) else [section.value]


def _plain(value: Any) -> Any:
    """Convert a saved value to one that torch and NumPy take: load tensors, make arrays, copy containers."""
    if isinstance(value, api.Tensor):
        return value.load()
    if isinstance(value, NumpyArray):
        return np.frombuffer(value.data, value.dtype).reshape(value.shape)
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(child) for child in value)
    return value


# -- going on from a checkpoint, as if the run had never stopped -------------------------------------------------------
# `ckptools.load` fills model and optimizer: strategy, number of ranks and layout may be others than those of the saved
# run.
#
# A run resumes from the newest whole checkpoint, by the search and the checks of `ls --deep`. Unlike `ls` it may also
# be given one checkpoint, or know the checkpoints that it has saved itself. It never resumes from its own `full.pt`,
# and it follows links, because they are the user's own.


# A key that only the state of this schedule has.
SCHEDULERS = {"cosine": "T_max", "lambda": "lr_lambdas"}


def resume(run: Run, paths: list[Path], report: Say) -> None:
    """Restore a prepared run from the newest whole checkpoint of some; a collective.

    Raises:
        NotWholeError: none of the checkpoints is whole.
        UsageError: the checkpoint is of another model, optimizer or scheduler, or has all the steps already.
        ReadError: a file that was whole a moment ago cannot be read.
    """
    # The model before it was spread, without values: it gives the names, shapes and order of parameters.
    with torch.device("meta"):
        model = Transformer(run.options.size)
    path = made_by_rank_0(lambda: newest_whole(paths, report, model))
    if path is None:
        raise NotWholeError(paths[-1], "is not whole, and no other checkpoint is there to go on from")
    saved = made_by_rank_0(lambda: _open(run, model, path))
    _refuse_another(run, model, saved)
    _restore(run, model, saved)
    for line in _summary(run, saved):
        report(line)


def _open(run: Run, model: Transformer, path: Path) -> SavedRun:
    """Open the checkpoint at `path`; no tensors are read yet."""
    names = trained_names(run.options.optimizer, model)
    return read(api.open(path, all_ranks=True, shapes=model), names, run.options.batch)


def _refuse_another(run: Run, model: Transformer, saved: SavedRun) -> None:
    """Refuse a checkpoint that this run cannot go on from, before anything of the run has changed."""
    for name, value in model.state_dict().items():
        expected = tuple(value.shape)
        found = saved.shapes.get(name, "not there")
        if found != expected:
            raise UsageError(saved.path, f"is of another model: {name} is {found}, expected {expected}")
    if saved.optimizer_name in OPTIMIZERS and saved.optimizer_name != run.options.optimizer:
        raise UsageError(saved.path, f"was trained with --optimizer {saved.optimizer_name}; give it here too")
    for name, key in SCHEDULERS.items():
        if key in saved.scheduler and name != run.options.scheduler:
            raise UsageError(saved.path, f"was trained with --scheduler {name}; give it here too")
    if saved.step >= run.options.steps:
        raise UsageError(saved.path, f"is at step {saved.step} already; add --steps {saved.step + 1} or more")
    stateless = set(trained_names(run.options.optimizer, model)) - saved.with_state
    if saved.with_state and stateless:
        raise UsageError(saved.path, f"holds no optimizer state of {min(stateless)}, which is trained here")


def _restore(run: Run, model: Transformer, saved: SavedRun) -> None:
    given: LoadOptions = {"shapes": model}
    if saved.names is not None:
        given["names"] = saved.names
    load(run.model, saved.path, run.optimizer if saved.with_state else None, **given)
    _restore_scheduler(run, saved)
    share, shares = run.strategy.data_share(run.options)
    run.step = saved.step
    run.position = (saved.position or Position()).aligned(shares)
    run.losses = list(saved.losses)
    # Last, for building and loading a model draw random numbers too.
    own = own_random_states(saved.random, share, shares, dist.get_rank() if _draws_apart(run, saved) else None)
    if own is not None:
        restore_random_states(own, run.device)


def _restore_scheduler(run: Run, saved: SavedRun) -> None:
    """Restore the scheduler, or compute its state from the steps if the layout does not keep it."""
    if saved.scheduler:
        known = run.scheduler.state_dict().keys()
        run.scheduler.load_state_dict({key: value for key, value in saved.scheduler.items() if key in known})
        return
    for group, lr in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    for _ in range(saved.step):
        run.scheduler.step()


def _summary(run: Run, saved: SavedRun) -> Iterator[str]:
    """Yield lines that say where the run resumes, and which state does not continue as it was."""
    yield f"resumed from {saved.path}: step {run.step}, epoch {run.epoch}, sample {run.position.samples}"
    found = {"optimizer": saved.with_state, "random states": saved.random}
    missing = [name for name, value in found.items() if not value]
    if saved.position is None or not saved.position.exact:
        missing.append("position in the data" if saved.position is None else "position in the epoch")
    if missing:
        yield f"not in this layout: {', '.join(missing)}; starts anew"
    _, shares = run.strategy.data_share(run.options)
    before = len(first_of_shares(saved.random))
    if saved.random and before != shares:
        new = f"; shares from {before} on draw new random numbers" if shares > before else ""
        yield f"saved with {plural(before, 'share')} of the data, goes on with {shares}{new}"
    drew_apart = len(set(map(random_fingerprint, saved.random))) > before
    if drew_apart and not (_draws_apart(run, saved) and before == shares):
        yield "stages of a pipeline had random states of their own; all ranks of a share go on with those of its first"


def _draws_apart(run: Run, saved: SavedRun) -> bool:
    """Whether ranks of a share draw random numbers of their own in this run, and as many ranks saved."""
    return run.strategy.in_parts and len(saved.random) == dist.get_world_size()


# -- which checkpoint --------------------------------------------------------------------------------------------------


# File in the hidden folder of a run, with a line for each checkpoint that it has saved.
SAVED = "saved"


def to_go_on_from(options: CreateOptions, partial: Path) -> list[Path]:
    """List the checkpoints that a run may begin with: its own if it was started again, else those of `--resume`.

    If an outer torchrun starts the ranks again, the run's list is lost. Then all checkpoints in OUT are taken for this
    run's, unless `force` allowed others to be there before.
    """
    if restarts() > 0:
        if saved := (partial / SAVED).read_text().splitlines():
            return list(map(Path, saved))
        with suppress(ReadError):
            return [] if options.force else found_at(options.out)
    path = options.resuming.resume
    return [] if path is None else found_at(Path(path))


def remember(partial: Path, files: tuple[Path, ...]) -> None:
    """Write down that a checkpoint was saved, in the hidden folder, which lasts as long as the launcher."""
    with (partial / SAVED).open("a") as file:
        file.write(f"{opened_by(files)}\n")


def newest_whole(paths: Iterable[Path], report: Say, model: nn.Module | None = None) -> Path | None:
    """The path that opens the newest whole checkpoint of several; None if no checkpoint is whole.

    Every byte is read and compared with its checksum: a run that resumes from damaged weights would not notice. Each
    skipped checkpoint is reported. The model, not wrapped, gives the shapes that FSDP1's local state dicts lack.
    """
    opened = partial(open_checkpoint, shapes=model)
    found: list[CheckpointRow] = []
    for path in paths:
        looked_into: Opened | CkptoolsError
        try:
            looked_into = Opened.of(opened(path))
        except CkptoolsError as error:
            looked_into = error
        found.append(row_of(path.name, path, looked_into, [path]))
    ordered, _ = rows.newest_first(found)
    every_rank = partial(opened, all_ranks=True)
    for row in rows.newest_whole(ordered, lambda row: rows.verified(row, every_rank, deep=True, jobs=None)):
        if row.newest_whole:
            return path_of(row.path)
        report(f"skipped {row.path}: {row.why or NO_MODEL}")
    return None


def found_at(path: Path) -> list[Path]:
    """List the checkpoints at a path, each by a file or folder: the path itself, or all checkpoints in the folder.

    Raises:
        ReadError: there is no checkpoint.
    """
    if not path.exists():
        raise ReadError(path, "no such file or folder", "absent")
    if not path.is_dir():
        return [path]
    found: list[Path] = []

    def take(one: Path, _opened: Opened | CkptoolsError, _files: Sequence[Path]) -> None:
        found.extend([] if one.name == FULL_STATE else [one])

    RunSearch(path, True, opened=lambda one, _: Opened.of(open_checkpoint(one)), on_checkpoint=take).run()
    if not found:
        raise ReadError(path, "holds no checkpoint")
    return found
