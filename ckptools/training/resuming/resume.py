"""Going on from a checkpoint, as if the run had never stopped.

`dcp.load` fills the state dict of this run from the checkpoint, each rank its own part, and `set_model_state_dict` and
`set_optimizer_state_dict` put that into the run. So the run may be spread by another strategy than the one that saved,
over another number of ranks, and the checkpoint may have any layout.

Of several checkpoints it is the newest that is whole, by the search and the checks of `ls --deep`. What differs is the
question: a run may also name one checkpoint, or remember which it saved itself; its own `full.pt` is none to go on
from; and links are followed, for they are the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial as given
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptools import api
from ckptools.cluster.variables import restarts
from ckptools.cluster.waiting import Say
from ckptools.errors import CkptoolsError, NotWholeError, ReadError, UsageError
from ckptools.files.location import path_of
from ckptools.formats.open import open_checkpoint
from ckptools.ls import rows as run_rows
from ckptools.ls.rows import NO_MODEL, row_of
from ckptools.ls.search import Opened, RunSearch
from ckptools.model.checkpoint import Checkpoint
from ckptools.text import plural
from ckptools.training import optimizers, output, random_states
from ckptools.training.data import Position
from ckptools.training.model import Transformer
from ckptools.training.options import OPTIMIZERS, CreateOptions
from ckptools.training.output import FULL_STATE, opened_by
from ckptools.training.resuming import saved_run
from ckptools.training.resuming.saved_run import SavedRun
from ckptools.training.resuming.storage_reader import OpenedReader, fill, here, sent_by_rank_0
from ckptools.training.run import Run

T = TypeVar("T")

# What the state of each schedule has and no other's.
SCHEDULERS = {"cosine": "T_max", "lambda": "lr_lambdas"}

# How `--load` brings a tensor to every rank.
FETCH = {"each": here, "broadcast": sent_by_rank_0}


def resume(run: Run, paths: list[Path], report: Say) -> None:
    """Bring a prepared run to where a saved one was, by the newest whole one of some checkpoints; a collective.

    Raises:
        NotWholeError: none of them is whole.
        UsageError: the checkpoint is of another model, optimizer or scheduler, or has all the steps already.
        ReadError: a file that was whole a moment ago cannot be read.
    """
    # The model before it was spread, without values: what it is called, how large it is and in which order.
    with torch.device("meta"):
        model = Transformer(run.options.size)
    path = _made_by_rank_0(lambda: _chosen(paths, model, report))
    each = run.options.resuming.load == "each"
    saved = _open(run, model, path) if each else _made_by_rank_0(lambda: _open(run, model, path))
    _refuse_another(run, model, saved)
    _restore(run, saved)
    for line in _summary(run, saved):
        report(line)


def _made_by_rank_0(make: Callable[[], T]) -> T:
    """Let rank 0 make something for all ranks."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return cast("T", made[0])


def _chosen(paths: list[Path], model: Transformer, report: Say) -> Path:
    found = newest_whole(paths, report, model)
    if found is None:
        raise NotWholeError(paths[-1], "is not whole, and no other checkpoint is there to go on from")
    return found


def _open(run: Run, model: Transformer, path: Path) -> SavedRun:
    """Open it; tensors are not read yet."""
    names = optimizers.trained_names(run.options.optimizer, model)
    return saved_run.read(api.open(path, all_ranks=True, shapes=model), names, run.options.batch)


def _refuse_another(run: Run, model: Transformer, saved: SavedRun) -> None:
    """Refuse a checkpoint that this run cannot go on from, before anything of the run has changed."""
    for name, value in model.state_dict().items():
        expected = tuple(value.shape)
        found = tuple(saved.model[name].shape) if name in saved.model else "not there"
        if found != expected:
            raise UsageError(saved.path, f"is of another model: {name} is {found}, expected {expected}")
    if saved.optimizer_name in OPTIMIZERS and saved.optimizer_name != run.options.optimizer:
        raise UsageError(saved.path, f"was trained with --optimizer {saved.optimizer_name}; give it here too")
    for name, key in SCHEDULERS.items():
        if key in saved.scheduler and name != run.options.scheduler:
            raise UsageError(saved.path, f"was trained with --scheduler {name}; give it here too")
    if saved.step >= run.options.steps:
        raise UsageError(saved.path, f"is at step {saved.step} already; give --steps that is more")
    stateless = set(optimizers.trained_names(run.options.optimizer, model)) - saved.moments.keys()
    if saved.moments and stateless:
        raise UsageError(saved.path, f"holds no optimizer state of {min(stateless)}, which is trained here")


def _restore(run: Run, saved: SavedRun) -> None:
    _restore_tensors(run, saved)
    _restore_scheduler(run, saved)
    share, shares = run.strategy.data_share(run.options)
    run.step = saved.step
    run.position = (saved.position or Position()).aligned(shares)
    run.losses = output.read_losses(saved.folder, saved.step)
    # Last, for building and loading a model draw random numbers too.
    own = random_states.own(saved.random, share, shares, dist.get_rank() if _draws_apart(run, saved) else None)
    if own is not None:
        random_states.restore(own, run.device)


def _restore_tensors(run: Run, saved: SavedRun) -> None:
    """Read this rank's part of model and optimizer.

    Asked for its state dict, an optimizer that has not moved yet makes moments of zero, which are then filled.
    """
    model = dict(get_model_state_dict(run.model))
    optimizer: dict[str, Any] = {"state": {}}
    if saved.moments:
        optimizer |= get_optimizer_state_dict(run.model, run.optimizer)
    reader = OpenedReader(by_key(saved.model, saved.moments), FETCH[run.options.resuming.load])
    fill(by_key(model, optimizer["state"]), reader, saved.path)
    set_model_state_dict(run.model, model)
    if saved.moments:
        optimizer["param_groups"] = [_as_saved(group, saved) for group in optimizer["param_groups"]]
        set_optimizer_state_dict(run.model, run.optimizer, optimizer)


def by_key(model: dict[str, Any], moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Put model and optimizer into one flat dict, as DCP takes it."""
    keys = {f"model.{fqn}": value for fqn, value in model.items()}
    return keys | {f"optimizer.{fqn}.{name}": value for fqn, state in moments.items() for name, value in state.items()}


def _as_saved(group: dict[str, Any], saved: SavedRun) -> dict[str, Any]:
    """A param group with the hyperparameters that were saved; `betas`, which may have become a list, is a tuple again.

    Groups are recognised by their parameters: a stage of a pipeline has some of them, and others may be cut anew.
    """
    found = next((other for other in saved.param_groups if set(group["params"]) & set(other["params"])), {})
    known = {key: value for key, value in found.items() if key in group and key != "params"}
    return {**group, **{key: tuple(v) if isinstance(group[key], tuple) else v for key, v in known.items()}}


def _restore_scheduler(run: Run, saved: SavedRun) -> None:
    """Put the scheduler where it was; it follows from the steps where the layout does not keep it."""
    if saved.scheduler:
        known = run.scheduler.state_dict().keys()
        run.scheduler.load_state_dict({key: value for key, value in saved.scheduler.items() if key in known})
        return
    for group, lr in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    for _ in range(saved.step):
        run.scheduler.step()


def _summary(run: Run, saved: SavedRun) -> Iterator[str]:
    """Say where the run goes on, and what does not go on as it was."""
    yield f"resumed from {saved.path}: step {run.step}, epoch {run.epoch}, sample {run.position.samples}"
    missing = [name for name, value in {"optimizer": saved.moments, "random states": saved.random}.items() if not value]
    if saved.position is None or not saved.position.exact:
        missing.append("position in the data" if saved.position is None else "position in the epoch")
    if missing:
        yield f"not in this layout: {', '.join(missing)}; starts anew"
    _, shares = run.strategy.data_share(run.options)
    before = len(random_states.first_of_shares(saved.random))
    if saved.random and before != shares:
        new = f"; shares from {before} on draw new random numbers" if shares > before else ""
        yield f"saved with {plural(before, 'share')} of the data, goes on with {shares}{new}"
    drew_apart = len(set(map(random_states.fingerprint, saved.random))) > before
    if drew_apart and not (_draws_apart(run, saved) and before == shares):
        yield "stages of a pipeline had random states of their own; all ranks of a share go on with those of its first"


def _draws_apart(run: Run, saved: SavedRun) -> bool:
    """Whether ranks of a share draw numbers of their own here, and as many ranks saved."""
    return run.strategy.in_parts and len(saved.random) == dist.get_world_size()


# -- which checkpoint -------------------------------------------------------------------------------------------------


# File in the hidden folder of a run, with a line for each checkpoint that it has saved.
SAVED = "saved"


def to_go_on_from(options: CreateOptions, partial: Path) -> list[Path]:
    """List the checkpoints that a run may begin with: its own if it was started again, else those of `--resume`.

    An outer torchrun starts the ranks again without what was remembered; then everything in OUT is this run's, unless
    something else was there already.
    """
    if restarts() > 0:
        if (partial / SAVED).exists():
            return [Path(line) for line in (partial / SAVED).read_text().splitlines()]
        with suppress(ReadError):
            return [] if options.force else found_at(options.out)
    path = options.resuming.resume
    return [] if path is None else found_at(Path(path))


def remember(partial: Path, files: tuple[Path, ...]) -> None:
    """Write down that a checkpoint was saved, in the hidden folder, which lasts as long as the launcher."""
    with (partial / SAVED).open("a") as file:
        file.write(f"{opened_by(files)}\n")


def newest_whole(paths: Iterable[Path], report: Say, model: nn.Module | None = None) -> Path | None:
    """The path that opens the newest whole one of several checkpoints; None where none is.

    Every byte is read and compared with its checksum: a run that goes on from damaged weights would not notice. Each
    checkpoint that is passed over is reported. The model, not wrapped, gives the shapes that FSDP1's local state dicts
    lack.
    """
    opened = given(open_checkpoint, shapes=model)
    rows = [row_of(path.name, path, _looked_into(path, opened), [path]) for path in paths]
    ordered, _ = run_rows.newest_first(rows)
    every_rank = given(opened, all_ranks=True)
    for row in run_rows.newest_whole(ordered, lambda row: run_rows.verified(row, every_rank, deep=True, jobs=None)):
        if row.newest_whole:
            return path_of(row.path)
        report(f"skipped {row.path}: {row.why or NO_MODEL}")
    return None


def _looked_into(path: Path, opened: Callable[[Path], Checkpoint]) -> Opened | CkptoolsError:
    try:
        return Opened.of(opened(path))
    except CkptoolsError as error:
        return error


def found_at(path: Path) -> list[Path]:
    """List the checkpoints that a path leads to, a file or folder of each: itself, or those in a folder.

    Raises:
        ReadError: there is none.
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
