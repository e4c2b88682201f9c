"""Pieces of flattened parameters: FSDP1's local state, and its optimizer state under `use_orig_params`.

FSDP1 flattens the parameters of a unit and cuts the result over the ranks, so that a rank holds a run of consecutive
elements of some parameters and nothing of others. In a plain `optimizer.state_dict()` such runs are 1-D tensors
without a word about their place. They can be placed when the parameter's shape is known (from a DTensor model saved
beside it, as verl does): in rank order they follow each other and together have as many elements as the parameter.
Where nothing tells the shape, or where equal lengths leave open whether they are pieces or replicas, they stay
unplaced: never joined by guessing. Source: torch/distributed/fsdp/_flat_param.py; checked on verl 0.9.1 files.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptools.formats import spans
from ckptools.model import Shard, Tensor
from ckptools.optimizers import name_parameters
from ckptools.regions import Ints
from ckptools.sections import Section, find_sections, is_flat_optimizer

FLAT_NAMES = ("_flat_param", "flat_param")

LOCAL = (
    "FSDP1 local state: a piece of a flattened parameter, and the file holds no shapes to place it by; "
    "save with SHARDED_STATE_DICT; --only optimizer writes the optimizer where it is whole"
)
UNPLACED = (
    "a 1-D piece in a sharded checkpoint whose parameter's shape is not known, so it may be a replica or a part; "
    "consolidate the model with --only model"
)


def settle(tree: Any, all_ranks: bool) -> None:
    """Place the pieces of a merged tree that can be placed, and mark the others; changes the tree's dicts.

    Without all ranks a piece's place is not known yet; its tensor then has the parameter's shape and no shards.
    """
    sections = find_sections(tree)
    models = [s.value for s in sections if s.kind == "model"]
    for model in models:
        if any(str(key).rpartition(".")[2] in FLAT_NAMES for key in model):
            _mark_local(model)
    model = models[0] if len(models) == 1 else None
    for section in sections:
        if section.kind == "optimizer":
            _settle_optimizer(section, model, all_ranks)


def _mark_local(model: MutableMapping[str, Any]) -> None:
    flat = {k: t for k, t in model.items() if str(k).rpartition(".")[2] in FLAT_NAMES and isinstance(t, Tensor)}
    storages = {(s.source.path, s.source.record) for t in flat.values() for s in t.shards if s.source}
    for key, tensor in model.items():
        if not isinstance(tensor, Tensor):
            continue
        views = any(s.source and (s.source.path, s.source.record) in storages for s in tensor.shards)
        if key in flat or (tensor.kind == "plain" and len(tensor.shape) == 1 and (views or _ragged(tensor))):
            model[key] = replace(tensor, kind="flat_pieces", note=LOCAL)


def _ragged(tensor: Tensor) -> bool:
    """Whether ranks hold different lengths under one key, so that it cannot be one replicated value."""
    return len({s.box for s in tensor.shards}) > 1


def _settle_optimizer(section: Section, model: Mapping[str, Any] | None, all_ranks: bool) -> None:
    if is_flat_optimizer(section.value):
        return
    naming = name_parameters(section.value, model)
    sharded = model is None or any(isinstance(t, Tensor) and t.sharded for t in model.values())
    for key, entry in section.value["state"].items():
        parameter = model.get(naming.names[key]) if model is not None and key in naming.names else None
        shape = parameter.shape if isinstance(parameter, Tensor) and not parameter.note else None
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and tensor.kind == "plain" and tensor.shape:
                entry[slot] = _placed(tensor, shape, sharded, all_ranks)


def _placed(tensor: Tensor, shape: Ints | None, sharded: bool, all_ranks: bool) -> Tensor:
    if not _ragged(tensor) and (tensor.shape == shape or not sharded or len(tensor.shape) != 1):
        return tensor
    if shape is not None and not all_ranks and tensor.numel <= prod(shape):
        return replace(tensor, shape=shape, shards=(), kind="flat_pieces")
    pieces = _pieces(tensor.shards, shape) if shape is not None else None
    if pieces is None or shape is None:
        return replace(tensor, kind="flat_pieces", note=UNPLACED)
    return replace(tensor, shape=shape, shards=tuple(pieces), kind="flat_pieces")


def _pieces(shards: Sequence[Shard], shape: Ints) -> list[Shard] | None:
    """Lay the ranks' runs behind each other, starting over where the parameter is complete (replica groups)."""
    total = prod(shape)
    start, placed = 0, []
    for shard in sorted(shards, key=lambda s: -1 if s.rank is None else s.rank):
        source, length = shard.source, shard.box.numel
        if source is None or not source.contiguous or len(source.shape) != 1 or start + length > total:
            return None
        placed += spans.place(shape, start, source, shard.rank)
        start = (start + length) % total if total else 0
    return placed if start == 0 else None
