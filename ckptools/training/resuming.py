"""Going on from a checkpoint: which one, what a run needs of it, and its options."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from ckptools import api
from ckptools.cluster.environment import restarts
from ckptools.errors import CkptoolsError, NotWholeError, ReadError, UsageError
from ckptools.files.opening import path_of
from ckptools.formats.open import open_checkpoint
from ckptools.ls import rows
from ckptools.ls.record import CheckpointRow
from ckptools.ls.rows import NO_MODEL, row_of
from ckptools.ls.search import Opened, RunSearch
from ckptools.model.tree import NumpyArray, nodes_in
from ckptools.text import first_line, plural
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
from ckptools.training.run import Run, Say, made_by_rank_0

if TYPE_CHECKING:
    from ckptools.training_state.optimizers import Optimizer


# -- a checkpoint that ckptools has opened, as a storage that `dcp.load` fills a run from ------------------------------
# `dcp.load` asks for the box of each tensor that this rank's state dict holds, so a rank reads only what it keeps, and
# nothing here knows how the run is spread, or how the one that saved was.


Saved = api.Tensor | Tensor
"""A whole tensor of a checkpoint: one that is read when it is sliced, or one that is here already."""


class OpenedReader(FileSystemReader):
    """Reads boxes of whole tensors, the same on every rank, by their key; one tensor at a time is in memory.

    Every rank reads what it asks for, or with `broadcast` rank 0 reads whole tensors and sends them to all.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Saved], broadcast: bool) -> None:
        super().__init__(path)
        self.tensors, self.broadcast = tensors, broadcast

    def read_metadata(self, *_: Any, **_more: Any) -> Metadata:
        """Describe every tensor as one chunk: how it lies in the files is for ckptools to know."""
        described: dict[str, Any] = {}
        for key, saved in self.tensors.items():
            dtype = saved.dtype if isinstance(saved, Tensor) else getattr(torch, saved.dtype)
            size = torch.Size(saved.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            described[key] = TensorStorageMetadata(TensorProperties(dtype), size, [whole])
        return Metadata(described, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes that this rank asks for, tensor by tensor, on all ranks in the same order."""
        wanted: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[item.storage_index.fqn].append(item)
        for key, saved in self.tensors.items():
            whole = saved if isinstance(saved, Tensor) or not self.broadcast else made_by_rank_0(saved.load)
            for item in wanted[key]:
                box = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                target.copy_(whole[tuple(slice(offset, offset + length) for offset, length in box)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def fill(state: dict[str, Any], reader: OpenedReader) -> None:
    """Read this rank's part of every tensor of a flat state dict into it; a collective.

    Raises:
        CkptoolsError: what a rank could not read, on all of them.
        ReadError: the checkpoint does not have what the state dict has.
    """
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, CkptoolsError):
            raise failure from None
        raise ReadError(Path(reader.path), f"cannot be read into this run: {first_line(failure)}") from error


# -- the state that a run needs to go on, from a checkpoint of any layout; nothing that the files name is run ----------
# ckptools finds model, optimizer, scheduler and random states; what says how far a run was is looked for here, by keys.


# Counters of whole passes over the data, where nothing finer is known; the second is from torch's tutorials.
EPOCHS = ("epoch", "EPOCHS_RUN")


@dataclass
class SavedRun:
    """The part of a checkpoint that resuming needs.

    Attributes:
        folder: that its files are in, which may be below `path`.
        step: optimizer steps that were taken.
        position: where the run was in its data; None when unknown.
        model: whole tensors by fqn.
        moments: the optimizer's state: whole tensors, of numbers too, by name, by fqn; empty for none.
        param_groups: the optimizer's, their `params` by fqn.
        optimizer_name: what the optimizer is called, which may be its class; empty for none.
        scheduler: its state dict; empty for none.
        random: the states of all ranks, in their order; those of one rank where only that has saved any.
    """

    path: Path
    folder: Path
    step: int
    position: Position | None
    model: dict[str, Saved]
    moments: dict[str, dict[str, Saved]]
    param_groups: list[dict[str, Any]]
    optimizer_name: str
    scheduler: dict[str, Any]
    random: list[RandomState]


def read(ck: api.Checkpoint, names: list[str], batch: int) -> SavedRun:
    """Find everything in a checkpoint that was opened with all ranks.

    What a layout calls by number is named by `names`, fqns of the optimizer's parameters in its order. Layouts that
    count steps only need `batch`, sequences per share and step.

    Raises:
        ReadError: it cannot be read.
    """
    model: dict[str, Saved] = {name: value for name, value in ck.model.items() if isinstance(value, api.Tensor)}
    # A module around the model puts its name before every fqn, such as Lightning's `model.`.
    ends = (name.removesuffix(names[0]) for name in model if name == names[0] or name.endswith("." + names[0]))
    prefix = next((prefix for prefix in ends if all(prefix + name in model for name in names)), "")
    fqns: dict[Any, str] = {f"?{number}": name for number, name in enumerate(names)} | dict(enumerate(names))
    fqns |= {prefix + name: name for name in names}
    plain_names = {name.removeprefix(prefix): value for name, value in model.items()}
    # safetensors do not have the second names of tensors.
    tied = {name: plain_names[tied_to] for name, tied_to in TIED.items() if tied_to in plain_names}
    optimizer_name, optimizer = next(iter(ck.optimizers.items()), ("", None))
    moments = _moments(optimizer, fqns) if optimizer else {}
    random = [state for tree in _by_rank(ck) if (state := find_random_states(_plain(tree)))]
    # As the checkpoint says, else as the optimizer has counted.
    counted = (int(_plain(state["step"])) for state in moments.values() if "step" in state)
    step = max(counted, default=0) if ck.step.value is None else int(ck.step.value)
    # One file is what one rank wrote for all, however many they were.
    ranks = None if len(ck.files) == 1 and ck.world_size.value == 1 else ck.world_size.value
    return SavedRun(
        path=ck.path,
        folder=Path(os.path.commonpath([file.path.parent for file in ck.files])) if ck.files else ck.path,
        step=step,
        position=_position(ck, step, len(first_of_shares(random)) or ranks, batch),
        model=tied | plain_names,
        moments=moments,
        param_groups=_param_groups(optimizer, fqns) if optimizer else [],
        optimizer_name=optimizer_name,
        scheduler=next((_plain(value) for value in ck.schedulers.values()), {}),
        random=random,
    )


def _moments(optimizer: Optimizer, fqns: Mapping[Any, str]) -> dict[str, dict[str, Saved]]:
    # A number of the optimizer's, such as `step`, is a 0-d tensor in some layouts and a plain one in others.
    return {
        fqns.get(key, key): {n: v if isinstance(v, api.Tensor) else torch.tensor(v) for n, v in state.items()}
        for key, state in optimizer.state.items()
    }


def _param_groups(optimizer: Optimizer, fqns: Mapping[Any, str]) -> list[dict[str, Any]]:
    groups = ((_plain(dict(group)), group.names) for group in optimizer.param_groups)
    return [{**values, "params": [fqns.get(name, name) for name in names]} for values, names in groups]


def _position(ck: api.Checkpoint, step: int, shares: int | None, batch: int) -> Position | None:
    """The position of the run in its data: as stated, else where its steps lead to, else at the start of an epoch."""
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
    """Yield what each rank has saved of random states: in files of its own, or gathered in one tree."""
    for section in ck.of_kind("rng"):
        if section.path in ck.per_rank:
            yield from (tree for _, tree in sorted(ck.per_rank[section.path].items()))
        elif isinstance(section.value, Mapping) and all(str(key).isdecimal() for key in section.value):
            yield from (section.value[key] for key in sorted(section.value, key=int))
        else:
            yield from section.value if isinstance(section.value, list) else [section.value]


def _plain(value: Any) -> Any:
    """The value that torch and NumPy take: tensors are loaded, arrays made, containers copied."""
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
# `dcp.load` fills this run's state dict, and `set_model_state_dict` and `set_optimizer_state_dict` put it into the run:
# strategy, number of ranks and layout may be others than those that saved.
#
# Of several checkpoints it is the newest that is whole, by the search and the checks of `ls --deep`. What differs is
# the question: a run may also name one checkpoint, or remember which it saved itself; its own `full.pt` is none to go
# on from; and links are followed, for they are the user's own.


# What the state of each schedule has and no other's.
SCHEDULERS = {"cosine": "T_max", "lambda": "lr_lambdas"}


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
    path = made_by_rank_0(lambda: newest_whole(paths, report, model))
    if path is None:
        raise NotWholeError(paths[-1], "is not whole, and no other checkpoint is there to go on from")
    each = run.options.resuming.load == "each"
    saved = _open(run, model, path) if each else made_by_rank_0(lambda: _open(run, model, path))
    _refuse_another(run, model, saved)
    _restore(run, saved)
    for line in _summary(run, saved):
        report(line)


def _open(run: Run, model: Transformer, path: Path) -> SavedRun:
    """Open it; tensors are not read yet."""
    names = trained_names(run.options.optimizer, model)
    return read(api.open(path, all_ranks=True, shapes=model), names, run.options.batch)


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
    stateless = set(trained_names(run.options.optimizer, model)) - saved.moments.keys()
    if saved.moments and stateless:
        raise UsageError(saved.path, f"holds no optimizer state of {min(stateless)}, which is trained here")


def _restore(run: Run, saved: SavedRun) -> None:
    # Asked for its state dict, an optimizer that has not moved yet makes moments of zero, which are then filled.
    model = dict(get_model_state_dict(run.model))
    optimizer: dict[str, Any] = {"state": {}}
    if saved.moments:
        optimizer |= get_optimizer_state_dict(run.model, run.optimizer)
    reader = OpenedReader(saved.path, by_key(saved.model, saved.moments), run.options.resuming.load == "broadcast")
    fill(by_key(model, optimizer["state"]), reader)
    set_model_state_dict(run.model, model)
    if saved.moments:
        optimizer["param_groups"] = [_as_saved(group, saved) for group in optimizer["param_groups"]]
        set_optimizer_state_dict(run.model, run.optimizer, optimizer)
    _restore_scheduler(run, saved)
    share, shares = run.strategy.data_share(run.options)
    run.step = saved.step
    run.position = (saved.position or Position()).aligned(shares)
    run.losses = output.read_losses(saved.folder, saved.step)
    # Last, for building and loading a model draw random numbers too.
    own = own_random_states(saved.random, share, shares, dist.get_rank() if _draws_apart(run, saved) else None)
    if own is not None:
        restore_random_states(own, run.device)


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
    before = len(first_of_shares(saved.random))
    if saved.random and before != shares:
        new = f"; shares from {before} on draw new random numbers" if shares > before else ""
        yield f"saved with {plural(before, 'share')} of the data, goes on with {shares}{new}"
    drew_apart = len(set(map(random_fingerprint, saved.random))) > before
    if drew_apart and not (_draws_apart(run, saved) and before == shares):
        yield "stages of a pipeline had random states of their own; all ranks of a share go on with those of its first"


def _draws_apart(run: Run, saved: SavedRun) -> bool:
    """Whether ranks of a share draw numbers of their own here, and as many ranks saved."""
    return run.strategy.in_parts and len(saved.random) == dist.get_world_size()


# -- which checkpoint --------------------------------------------------------------------------------------------------


# File in the hidden folder of a run, with a line for each checkpoint that it has saved.
SAVED = "saved"


def to_go_on_from(options: CreateOptions, partial: Path) -> list[Path]:
    """List the checkpoints that a run may begin with: its own if it was started again, else those of `--resume`.

    An outer torchrun starts the ranks again without what was remembered; then everything in OUT is this run's, unless
    something else was there already.
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
    """The path that opens the newest whole one of several checkpoints; None where none is.

    Every byte is read and compared with its checksum: a run that goes on from damaged weights would not notice. Each
    checkpoint that is passed over is reported. The model, not wrapped, gives the shapes that FSDP1's local state dicts
    lack.
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
