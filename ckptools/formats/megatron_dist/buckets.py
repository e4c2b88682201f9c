"""Split the buckets of Megatron's distributed optimizer (`dp_reshardable`) into boxes of the weights.

    [chained_1.]optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param

Each model-parallel rank is a group of its own (`dp_group_idx`), which holds its piece of every weight of its pipeline
stage and of one dtype, one after the other, in flat buckets:

- The parameters of the model in reverse order, each beginning at a multiple of 64 elements. A bucket ends with its last
  parameter; the next begins at 0 again. The size of a bucket is a setting.
- The ranks of the group have equal parts of the padded bucket. Each writes the run of each parameter in its part, and
  each gap between two, as a chunk of its own, so the edges of chunks are the edges of parameters, or of parts.

So lengths and edges show the order of the parameters, except for neighbours of one size. That order is Megatron's own
(`orders`). Names that are not in it are refused, and so is any state that does not leave exactly one layout.
The writer of a piece of a weight is its rank.

With expert parallelism there are two optimizers, `chained_0` and `chained_1`; the param groups state which of them
trains the experts (`is_expert_parallel`). Its groups are over the expert-data-parallel ranks: each has the experts of
which its ranks wrote a piece. Source: megatron/core/distributed/param_and_grad_buffer.py,
optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`), optimizer/optimizer.py
(`ChainedOptimizer.sharded_state_dict`), optimizer/ __init__.py (core 0.16.1 and 0.20; rules since 0.9).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from operator import mul
from typing import Any, NamedTuple

from ckptools.formats.flat_parameters.units import FlatRun, shards_in
from ckptools.formats.megatron.model import FC1
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error, tensors_in
from ckptools.option import spelled

# -- the order in which Megatron's modules create the parameters of a GPT model, for buckets without names -------------
# A gradient buffer holds its parameters in the reverse of this order. A layer creates its parameters in one of a few
# orders (`orders`), which depend on its modules: norms of their own or fused ones, experts one after the other
# (`SequentialMLP`) or all first layers before all second ones (`TEGroupedMLP`). Source: megatron/core/models/gpt/
# gpt_model.py, transformer/{transformer_layer,attention,mlp}.py, transformer/moe/{moe_layer,experts,shared_experts}.py
# (core 0.16.1; rules since 0.9).

EXPERT = re.compile(r"(?P<layer>.+)\.mlp\.experts\.experts\.(?P<expert>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
"""A weight of one expert, by its global number."""

NO_PARAMETER = re.compile(r".+\.mlp\.router\.(?:expert_bias|local_tokens_per_expert)", re.DOTALL)
"""Weights that no optimizer trains: buffers of the router."""

_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
_BEFORE = tuple(f"embedding.{what}_embeddings.weight" for what in ("word", "position", "tokentype"))
_AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight", "output_layer.bias")
_EXPERTS = "mlp.experts"


def _both(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}{last}" for module in modules for last in ("weight", "bias"))


_INPUT, _PROJ = _both("input_layernorm."), _both("self_attention.linear_proj.")
_QKV_NORM, _QKV = _both("self_attention.linear_qkv.layer_norm_"), _both("self_attention.linear_qkv.")
_QK_NORMS, _PRE_MLP = _both("self_attention.q_layernorm.", "self_attention.k_layernorm."), _both("pre_mlp_layernorm.")
_FC1_NORM, _FC1, _FC2 = _both("mlp.linear_fc1.layer_norm_"), _both("mlp.linear_fc1."), _both("mlp.linear_fc2.")
_SHARED = (*_both("mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2."), "mlp.shared_experts.gate_weight")
_MOE = (*_both("mlp.router."), _EXPERTS, *_SHARED)
_OF_EXPERT = _both("linear_fc1.", "linear_fc2.")

_LAYERS = (
    # Norms that are modules of their own, and are stored under the names of fused norms.
    (*_INPUT, *_QKV_NORM, *_PROJ, *_QKV, *_QK_NORMS, *_PRE_MLP, *_FC1_NORM, *_FC1, *_FC2, *_MOE),
    # Transformer Engine's fused layers, which create the norm's parameters first; and the opposite order.
    (*_INPUT, *_PROJ, *_QKV_NORM, *_QKV, *_QK_NORMS, *_PRE_MLP, *_FC1_NORM, *_FC1, *_FC2, *_MOE),
    (*_INPUT, *_PROJ, *_QKV, *_QKV_NORM, *_QK_NORMS, *_PRE_MLP, *_FC1, *_FC1_NORM, *_FC2, *_MOE),
)
"""Parameters of a layer in the order in which its modules create them."""

Rank = tuple[int, int, int, int, int]


class UnjoinedError(ValueError):
    """Buckets cannot be split into weights; the message says why."""


def orders(names: Iterable[str]) -> list[list[str]]:
    """The names in every order in which Megatron could have created them.

    Raises:
        UnjoinedError: a name has no place in the order.
    """
    every = list(names)
    grouped = (False, True) if any(map(EXPERT.fullmatch, every)) else (False,)
    return [sorted(every, key=partial(_rank_of, layer, of_all)) for layer in _LAYERS for of_all in grouped]


def _rank_of(of_layer: Sequence[str], grouped: bool, name: str) -> Rank:
    """Sort key of a weight; with `grouped`, the first layers of all experts come before their second layers."""
    layer = _LAYER.fullmatch(name)
    if name in _BEFORE:
        return 0, 0, _BEFORE.index(name), 0, 0
    if layer and layer["rest"] in of_layer:
        return 1, int(layer["layer"]), of_layer.index(layer["rest"]), 0, 0
    expert = EXPERT.fullmatch(name) if layer else None
    if layer and expert and expert["rest"] in _OF_EXPERT:
        number, part = int(expert["expert"]), _OF_EXPERT.index(expert["rest"])
        first, second = (part // 2, number * 2 + part % 2) if grouped else (number, part)
        return 1, int(layer["layer"]), of_layer.index(_EXPERTS), first, second
    if name in _AFTER:
        return 2, 0, _AFTER.index(name), 0, 0
    raise UnjoinedError(f"nothing says where {describe_for_error(name)} comes in the order of parameters")


# -- split buckets -----------------------------------------------------------------------------------------------------


KEY = re.compile(
    r"(?P<chain>(?:chained_\d{1,2}\.)?)optimizer\.distributed\."
    r"dp_group_idx_(?P<group>\d{1,6})\.gbuf_idx_(?P<buffer>\d{1,4})\."
    r"dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d{1,6})\.(?P<slot>\w+)"
)
GROUPS = re.compile(r"(?P<chain>(?:chained_\d{1,2}\.)?)optimizer\.distributed\.dp_group_idx_\d{1,6}\.optimizer(?:/.+)?")
"""Matches the key of a group's param groups."""

ALIGNMENT = 64
"""Parameters begin at multiples of this many elements (`_pad_start_of_param_if_needed`)."""

Bucket = Mapping[str, Tensor]
"""A bucket's slots, `param` and the moments, which share one layout."""

Group = tuple[int, str]
"""Number of a group, and the dtype of its buckets' weights."""

Pieces = Mapping[str, tuple[Box, ...]]
"""One tensor-parallel rank's boxes of each weight; two boxes, one after the other, for a gated layer."""


class Chain(NamedTuple):
    """The buckets of one of the chained optimizers, and whether its weights are experts spread over groups."""

    buckets: Mapping[Group, list[Bucket]]
    of_experts: bool


class BucketRange(NamedTuple):
    """The extent of a weight's piece in a bucket: its first element, and one past its last."""

    name: str
    bucket: int
    start: int
    end: int


def join_buckets(buffers: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by weight and slot, from the buckets of all groups; other objects in `buffers` are kept.

    Raises:
        UnjoinedError: there is not exactly one possible layout, or a part is missing.
    """
    trained = {name: t for name, t in weights.items() if not NO_PARAMETER.fullmatch(name)}
    state: dict[str, dict[str, list[Tensor]]] = {}
    for chain, own in _of_chains(buffers, trained):
        for name, slot, tensor in _of_chain(chain, own):
            state.setdefault(name, {}).setdefault(slot, []).append(tensor)
    absent = next((name for name in trained if name not in state), None)
    if absent is not None:
        dtype = describe_for_error(trained[absent].dtype)
        raise UnjoinedError(f"no bucket is for {dtype}, which {describe_for_error(absent)} has")
    return {name: {slot: _whole(trained[name], parts) for slot, parts in state[name].items()} for name in trained}


def _of_chains(buffers: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[tuple[Chain, dict[str, Tensor]]]:
    """Yield each chained optimizer with the weights that it trains; a single optimizer has all."""
    chains: dict[str, dict[str, Tensor]] = {}
    experts: dict[str, set[Any]] = {}
    for name, value in buffers.items():
        groups = GROUPS.fullmatch(name)
        key = KEY.fullmatch(name)
        if key is not None and isinstance(value, Tensor):
            chains.setdefault(key["chain"], {})[name] = value
        elif any(tensors_in(value)):
            raise UnjoinedError(f"{describe_for_error(name)} is no bucket of dp_reshardable")
        elif groups and isinstance(value, Mapping) and isinstance(value.get("param_groups"), list):
            marks = {g.get("is_expert_parallel") for g in value["param_groups"] if isinstance(g, Mapping)}
            experts.setdefault(groups["chain"], set()).update(mark for mark in marks if isinstance(mark, bool))
    of_experts = {chain: experts.get(chain) == {True} for chain in chains}
    if len(chains) == 1 and not {"", "chained_0."}.issuperset(chains):
        raise UnjoinedError(f"only {next(iter(chains)).removesuffix('.')} of its chained optimizers is there")
    if len(chains) > 1 and (sorted(of_experts.values()) != [False, True] or {False} not in experts.values()):
        raise UnjoinedError(f"nothing says which weights each of its {len(chains)} chained optimizers trains")
    for chain, its in chains.items():
        expert = of_experts[chain]
        mine = {n: t for n, t in weights.items() if len(chains) == 1 or bool(EXPERT.fullmatch(n)) is expert}
        yield Chain(_by_group(its), expert), mine


def _of_chain(chain: Chain, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Every group's part of each weight's slots."""
    found = chain.buckets
    ranks = {group: _writers(buckets) for group, buckets in found.items()}
    for dtype in dict.fromkeys(dtype for _, dtype in found):
        own = {name: t for name, t in weights.items() if t.dtype == dtype}
        writers = {at: ranks[at] for at in found if at[1] == dtype}
        its = _by_expert(own, writers) if chain.of_experts else _by_stage(own, writers)
        groups = [(found[at], _pieces(its[at], ranks, at)) for at in writers]
        order = _order(groups, own)
        for buckets, pieces in groups:
            yield from _taken(buckets, pieces, _laid(order, pieces, buckets))


def _by_group(buffers: Mapping[str, Tensor]) -> dict[Group, list[Bucket]]:
    """The buckets of each group and dtype, in order."""
    found: dict[Group, dict[int, dict[str, Tensor]]] = {}
    places: dict[Group, str] = {}
    for name, value in buffers.items():
        key = KEY.fullmatch(name)
        assert key is not None
        at = int(key["group"]), key["dtype"]
        if places.setdefault(at, key["buffer"]) != key["buffer"]:
            several = f"group {at[0]} has several buffers of {describe_for_error(at[1])}"
            raise UnjoinedError(f"{several}: several parts of a model")
        found.setdefault(at, {}).setdefault(int(key["bucket"]), {})[key["slot"]] = value
    if len({tuple(sorted(dtype for g, dtype in found if g == group)) for group, _ in found}) != 1:
        raise UnjoinedError("its groups do not have buckets of the same dtypes")
    return {at: _in_order(at[0], buckets) for at, buckets in found.items()}


def _in_order(group: int, buckets: Mapping[int, Bucket]) -> list[Bucket]:
    if sorted(buckets) != list(range(len(buckets))):
        raise UnjoinedError(f"group {group} lacks a bucket")
    slots = {tuple(sorted(bucket)) for bucket in buckets.values()}
    for bucket in buckets.values():
        layouts = {(t.shape, tuple(sorted(s.box.offsets + s.box.sizes for s in t.shards))) for t in bucket.values()}
        if len(layouts) != 1 or len(slots) != 1 or any(t.note or len(t.shape) != 1 for t in bucket.values()):
            raise UnjoinedError(f"the slots of a bucket of group {group} do not lie alike")
    return [buckets[n] for n in range(len(buckets))]


def _writers(buckets: Sequence[Bucket]) -> set[int]:
    ranks = {s.rank for bucket in buckets for t in bucket.values() for s in t.shards}
    if None in ranks:
        raise UnjoinedError("nothing says which rank wrote a bucket")
    return {rank for rank in ranks if rank is not None}


def _by_expert(weights: Mapping[str, Tensor], writers: Mapping[Group, set[int]]) -> dict[Group, dict[str, Tensor]]:
    """The weights of the experts of which each group wrote a piece."""
    found = {}
    for at, mine in writers.items():
        written = {_expert(name) for name, t in weights.items() if mine.intersection(s.rank for s in t.shards)}
        found[at] = {name: t for name, t in weights.items() if _expert(name) in written}
    return found


def _by_stage(weights: Mapping[str, Tensor], writers: Mapping[Group, set[int]]) -> dict[Group, dict[str, Tensor]]:
    """The weights of each group's pipeline stage.

    The groups of a stage wrote pieces of the same weights; an uncut weight was written by one of them.
    """
    stages: list[tuple[set[Group], set[str]]] = []
    for name, tensor in weights.items():
        groups = {at for at, ranks in writers.items() if ranks.intersection(s.rank for s in tensor.shards)}
        same = [stage for stage in stages if stage[0] & groups]
        stages = [stage for stage in stages if stage not in same]
        stages.append((groups.union(*(s[0] for s in same)), {name}.union(*(s[1] for s in same))))
    if sum(bool(groups) for groups, _ in stages) < 2:
        return {at: {**weights} for at in writers}
    unplaced = next((min(names) for groups, names in stages if not groups), None)
    if unplaced is not None or not all(any(at in groups for groups, _ in stages) for at in writers):
        raise UnjoinedError(f"nothing says which pipeline stage {describe_for_error(unplaced or 'a group')} is of")
    return {at: {n: t for n, t in weights.items() if n in names} for groups, names in stages for at in groups}


def _pieces(weights: Mapping[str, Tensor], ranks: Mapping[Group, set[int]], at: Group) -> dict[str, tuple[Box, ...]]:
    """The boxes of each weight that a group's ranks wrote, or all boxes of an uncut weight."""
    others = set().union(*(found for (group, _), found in ranks.items() if group != at[0]))
    if ranks[at] & others:
        raise UnjoinedError(f"rank {min(ranks[at] & others)} wrote buckets of several groups")
    return {name: _piece(name, tensor, ranks[at], ranks[at] | others) for name, tensor in weights.items()}


def _expert(name: str) -> tuple[str, str]:
    found = EXPERT.fullmatch(name)
    return (found["layer"], found["expert"]) if found else (name, "")


def _piece(name: str, tensor: Tensor, mine: set[int], everyone: set[int]) -> tuple[Box, ...]:
    boxes = {s.box: s.rank for s in tensor.shards}
    if set(boxes) == {Box.whole(tensor.shape)}:
        return tuple(boxes)
    if not set(boxes.values()) <= everyone:
        raise UnjoinedError(f"a piece of {describe_for_error(name)} was written by a rank that wrote no bucket")
    own = sorted((box for box, rank in boxes.items() if rank in mine), key=lambda b: b.offsets)
    # On every rank, a gated layer is two blocks of rows.
    gated = len(own) == 2 and FC1.fullmatch(name) is not None and own[0].sizes == own[1].sizes
    if len(own) != 1 and not gated:
        raise UnjoinedError(f"its ranks have {len(own)} pieces of {describe_for_error(name)}")
    return tuple(own)


def _order(groups: Sequence[tuple[list[Bucket], Pieces]], weights: Mapping[str, Tensor]) -> list[str]:
    """The only order of the weights, by module, that fits every group's buckets."""
    fitting: dict[tuple[BucketRange, ...], list[str]] = {}
    why = ""
    for order in orders(weights):
        try:
            laid = tuple(place for buckets, pieces in groups for place in _laid(order, pieces, buckets))
        except UnjoinedError as error:
            why = why or str(error)
            continue
        fitting.setdefault(laid, order)
    if len(fitting) != 1:
        raise UnjoinedError(why if not fitting else "its parameters fit in more than one order")
    return next(iter(fitting.values()))


def _laid(order: Sequence[str], pieces: Pieces, buckets: Sequence[Bucket]) -> list[BucketRange]:
    """Lay out the pieces of one group, the last weight first."""
    lengths = [next(iter(bucket.values())).numel for bucket in buckets]
    places: list[BucketRange] = []
    bucket = at = 0
    for name in (name for name in reversed(order) if name in pieces):
        start = -(-at // ALIGNMENT) * ALIGNMENT
        at = start + sum(box.numel for box in pieces[name])
        if bucket == len(lengths) or at > lengths[bucket]:
            unlike = "the lengths of its buckets are not those of its parameters"
            raise UnjoinedError(f"{unlike}, from {describe_for_error(name)} on")
        places.append(BucketRange(name, bucket, start, at))
        if at == lengths[bucket]:
            bucket, at = bucket + 1, 0
    if bucket != len(lengths):
        raise UnjoinedError("its buckets have more elements than its parameters")
    for number, one in enumerate(buckets):
        _check_edges([p for p in places if p.bucket == number], next(iter(one.values())))
    return places


def _check_edges(places: Sequence[BucketRange], bucket: Tensor) -> None:
    """Check that parameters begin and end at chunk edges, and that all other edges are edges of ranks' parts."""
    chunks = sorted(bucket.shards, key=lambda s: s.box.offsets)
    starts = [s.box.offsets[0] for s in chunks]
    ends = [0, *(s.box.ends[0] for s in chunks)]
    if starts != ends[:-1] or ends[-1] != bucket.numel:
        raise UnjoinedError("a part of a bucket is missing")
    edges = {edge for place in places for edge in (place.start, place.end)}
    parts = {b.box.offsets[0] for a, b in pairwise(chunks) if a.rank != b.rank}
    odd = edges - set(ends) or set(starts[1:]) - edges - parts
    if odd:
        raise UnjoinedError(
            f"no parameter begins or ends at {min(odd)} of a bucket, where a chunk does, or the reverse"
        )


def _taken(
    buckets: Sequence[Bucket], pieces: Pieces, places: Sequence[BucketRange]
) -> Iterator[tuple[str, str, Tensor]]:
    """One group's part of each weight's slots."""
    for number, bucket in enumerate(buckets):
        own = [p for p in places if p.bucket == number]
        for slot, tensor in bucket.items():
            shards: dict[str, list[Shard]] = {p.name: [] for p in own}
            for chunk in tensor.shards:
                place = own[bisect_right([p.start for p in own], chunk.box.offsets[0]) - 1]
                if chunk.box.offsets[0] < place.end:
                    run = chunk.box.offsets[0] - place.start
                    shards[place.name] += _boxes(pieces[place.name], run, chunk)
            yield from ((name, slot, replace(tensor, shards=tuple(found))) for name, found in shards.items())


def _boxes(piece: Sequence[Box], start: int, chunk: Shard) -> Iterator[Shard]:
    """The shards of a weight in a chunk, which is a run of the flattened piece from its element `start` on."""
    for box in piece:
        low, high = max(start, 0), min(start + chunk.box.numel, box.numel)
        if low < high:
            yield from shards_in(box, FlatRun(low, high - low, chunk.source, chunk.rank, low - start))
        start -= box.numel


def _whole(weight: Tensor, parts: Sequence[Tensor]) -> Tensor:
    shards = in_rank_order(s for part in parts for s in part.shards)
    return replace(parts[0], shape=weight.shape, shards=shards, kind="chunks")


# -- weights stored as flat runs of pieces (`fully_sharded_model_space`), as boxes of their true shape -----------------
# A tensor of shape [pieces along each dimension …, elements of a piece] with the true shape in the metadata's
# `mcore_data`. Source: megatron/core/dist_checkpointing/strategies/resharding.py (core 0.11).

UNPLACED = "flat runs whose pieces do not follow from the metadata"


def in_true_shape(tensor: Tensor, shape: Any) -> Tensor:
    """Give a tensor that is stored as flat runs its stated shape; a note says if they do not fit it."""
    whole = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    local = _local_shape(whole, tensor.shape)
    if local is None or not all(n == 1 for s in tensor.shards for n in s.box.sizes[:-1]):
        return replace(tensor, note=f"{UNPLACED}; {spelled('only', 'model')} writes the model")
    shards = tuple(piece for s in tensor.shards for piece in _run_boxes(s, local))
    return replace(tensor, shape=whole, shards=shards, kind="chunks")


def _local_shape(whole: Ints, stored: Ints) -> Ints | None:
    """Shape of the pieces from which flat runs are cut; None if the stored shape does not fit."""
    cuts = stored[:-1]
    if len(cuts) != len(whole) or not all(type(n) is int and n >= 0 for n in whole) or 0 in cuts:
        return None
    local = tuple(n // cut for n, cut in zip(whole, cuts, strict=True))
    return local if tuple(map(mul, local, cuts)) == whole and prod(local) == stored[-1] else None


def _run_boxes(shard: Shard, local: Ints) -> list[Shard]:
    """The shards of the whole tensor that a run of one flattened piece holds."""
    at = tuple(i * n for i, n in zip(shard.box.offsets[:-1], local, strict=True))
    start, length = shard.box.offsets[-1], shard.box.sizes[-1]
    flat = shard.source.reshaped((length,)) if shard.source is not None and shard.source.contiguous else None
    return shards_in(Box(at, local), FlatRun(start, length, flat, shard.rank))
