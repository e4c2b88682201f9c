"""The state that a run needs to go on, from a checkpoint of any layout; nothing that the files name is run.

ckptools finds model, optimizer, scheduler and random states by what they look like, and gives whole tensors under
fqns, which are read when a rank wants its part of them. What only says how far a run was is looked for here, by its
keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptools import api
from ckptools.model.tree import nodes_in
from ckptools.model.values import NumpyArray
from ckptools.training import data, random_states
from ckptools.training.data import Position
from ckptools.training.model import TIED
from ckptools.training.random_states import RandomState
from ckptools.training.resuming.storage_reader import Saved

if TYPE_CHECKING:
    from ckptools.training_state.optimizers import Optimizer

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
    prefix = _prefix(model, names)
    fqns: dict[Any, str] = {f"?{number}": name for number, name in enumerate(names)} | dict(enumerate(names))
    fqns |= {prefix + name: name for name in names}
    plain_names = {name.removeprefix(prefix): value for name, value in model.items()}
    # safetensors do not have the second names of tensors.
    tied = {name: plain_names[tied_to] for name, tied_to in TIED.items() if tied_to in plain_names}
    optimizer_name, optimizer = next(iter(ck.optimizers.items()), ("", None))
    moments = _moments(optimizer, fqns) if optimizer else {}
    random = [state for tree in _by_rank(ck) if (state := random_states.find(_plain(tree)))]
    # As the checkpoint says, else as the optimizer has counted.
    counted = (int(_plain(state["step"])) for state in moments.values() if "step" in state)
    step = max(counted, default=0) if ck.step.value is None else int(ck.step.value)
    return SavedRun(
        path=ck.path,
        folder=Path(os.path.commonpath([file.path.parent for file in ck.files])) if ck.files else ck.path,
        step=step,
        position=_position(ck, step, len(random_states.first_of_shares(random)) or _world_size(ck), batch),
        model=tied | plain_names,
        moments=moments,
        param_groups=_param_groups(optimizer, fqns) if optimizer else [],
        optimizer_name=optimizer_name,
        scheduler=next((_plain(value) for value in ck.schedulers.values()), {}),
        random=random,
    )


def _world_size(ck: api.Checkpoint) -> int | None:
    """Ranks that saved it; None for one file that one rank wrote for all."""
    size: int | None = ck.world_size.value
    return None if len(ck.files) == 1 and size == 1 else size


def _prefix(model: Mapping[str, Saved], names: list[str]) -> str:
    """The prefix of every fqn where a module around the model was saved: Lightning's `model.`."""
    ends = (name.removesuffix(names[0]) for name in model if name == names[0] or name.endswith("." + names[0]))
    return next((prefix for prefix in ends if all(prefix + name in model for name in names)), "")


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
        return data.position_after(step, shares, batch)
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
