"""The state in a Megatron torch_dist folder, by its stored names; see `megatron_dist`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ckptools.formats.megatron.folders import arguments, setting
from ckptools.formats.megatron.model import HALF, MASTER, choose_weights, notes_on_model
from ckptools.formats.megatron.optimizer import dotted_path
from ckptools.formats.megatron_dist.buckets import UnjoinedError, in_true_shape, join_buckets
from ckptools.formats.options import Weights
from ckptools.formats.shared.merge import MIN_COLUMNS
from ckptools.model.extents import Extents
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Rounded, Tensor
from ckptools.model.tree import tensors_in
from ckptools.option import spelled

# -- weights that Megatron stores stacked or in parts: layers and experts as one tensor, a fused weight as several -----
#     decoder.layers.mlp.linear_fc1.weight                   [layers, …]: the layers of a block that are all alike
#     decoder.layers.1.mlp.experts.experts.linear_fc1.weight [experts, …]: one layer's experts, by their global number
#     decoder.layers.0.mlp.linear_fc1.weight_w, …weight_v    the gates and the ups of a gated layer
#     decoder.layers.0.self_attention.in_proj.weight.query   a fused projection of a gated delta net
#
# With `singleton_local_shards` layers and experts have keys of their own (`experts.experts.3.linear_fc1.weight`), the
# names that stacked ones get here. Parts are joined along dimension 0, in the order of the module. Source:
# megatron/core/transformer/transformer_block.py, moe/experts.py, mlp.py (`apply_swiglu_sharded_factory`),
# fsdp_dtensor_checkpoint.py, ssm/gated_delta_net.py (core 0.16.1 and 0.20).

LAYERS = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<rest>(?!\d+\.).+)", re.DOTALL)
EXPERTS = re.compile(r"(?P<block>(?P<mlp>.+\.mlp)\.experts\.experts)\.(?P<rest>linear_fc[12]\..+)", re.DOTALL)

PART = re.compile(
    r"(?P<whole>.+\.linear_fc1\.(?:weight|bias)\d*)_(?P<of_mlp>[wv])"
    r"|(?P<projection>.+\.in_proj\.weight|.+\.conv1d\.(?:weight|bias))\.(?P<of_projection>\w+)",
    re.DOTALL,
)
GATED = ("w", "v")
DELTA_NET = {"in_proj": ("query", "key", "value", "z", "beta", "alpha"), "conv1d": ("query", "key", "value")}

MAX_STACKED = 1 << 16
MAX_MADE = 1_000_000
"""Stacked tensors are split into at most this many; a forged first dimension would need more."""

Stacks = Mapping[str, int]
"""Number of layers or experts of each stacked block."""


def count_stacks(
    pattern: re.Pattern[str], tensors: Mapping[str, Tensor], stated: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """Count the layers or experts of each stacked block; list the blocks whose first dimensions do not agree.

    `stated` has numbers that are known from other sources.
    """
    found: dict[str, set[int]] = {}
    for name, tensor in tensors.items():
        stacked = pattern.fullmatch(name)
        if stacked:
            found.setdefault(stacked["block"], set()).add(tensor.shape[0] if tensor.shape else 0)
    sure = {block: n for block, (n, *more) in found.items() if not more and stated.get(block, n) == n}
    counts = {block: n for block, n in sure.items() if 0 < n < MAX_STACKED}
    blocks = (stacked["block"] for name in tensors if (stacked := pattern.fullmatch(name)))
    if sum(counts.get(block, 0) for block in blocks) > MAX_MADE:
        counts = {}
    return counts, [block for block in found if block not in counts]


def split_stacks(pattern: re.Pattern[str], tensors: Mapping[str, Tensor], counts: Stacks) -> dict[str, Tensor]:
    """Split stacked tensors into one tensor per layer or expert, each with its own name."""
    named: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stacked = pattern.fullmatch(name)
        if stacked and stacked["block"] in counts:
            named.setdefault(stacked["block"], {})[stacked["rest"]] = tensor
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = pattern.fullmatch(name)
        if not stacked or stacked["block"] not in counts:
            whole[name] = tensor
        elif stacked["block"] in named:
            whole |= dict(_block(stacked["block"], counts[stacked["block"]], named.pop(stacked["block"])))
    return whole


def _block(block: str, number: int, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    # State whose first dimension is another number stays as stored.
    rows = {rest: _rows_of(t) for rest, t in named.items() if t.shape[:1] == (number,)}
    yield from ((f"{block}.{rest}", t) for rest, t in named.items() if rest not in rows)
    for n in range(number):
        yield from ((f"{block}.{n}.{rest}", every[n]) for rest, every in rows.items())


def _rows_of(tensor: Tensor) -> list[Tensor]:
    """The rows of a tensor whose first dimension counts layers or experts."""
    shards: list[list[Shard]] = [[] for _ in range(tensor.shape[0])]
    for shard in tensor.shards:
        first, box = shard.box.offsets[0], Box(shard.box.offsets[1:], shard.box.sizes[1:])
        for n in range(first, min(first + shard.box.sizes[0], len(shards))):
            shards[n].append(Shard(box, shard.rank, _row(shard.source, n - first) if shard.source else None))
    rows, whole = [], Box.whole(tensor.shape[1:])
    for mine in shards:
        plain = tensor.kind == "chunks" and all(s.box == whole for s in mine)
        kind = "plain" if plain else tensor.kind
        kept = Extents.of(mine, tensor.dtype) if len(mine) >= MIN_COLUMNS else tuple(mine)
        rows.append(replace(tensor, shape=whole.sizes, shards=kept, kind=kind))
    return rows


def _row(source: Source, at: int) -> Source:
    first = source.part(Box((at, *(0,) * (len(source.shape) - 1)), (1, *source.shape[1:])))
    return first._replace(shape=source.shape[1:], strides=source.strides[1:])


# -- parts of a fused weight -------------------------------------------------------------------------------------------


class FusedPart(NamedTuple):
    """The parsed key of a part: the fused weight's name, the word of this part, and the words of all parts in order."""

    whole: str
    word: str
    words: tuple[str, ...]


def part_of(name: str) -> FusedPart | None:
    """Parse the key of a part of a fused weight; None for a whole weight."""
    found = PART.fullmatch(name)
    if found is None:
        return None
    if found["whole"]:
        return FusedPart(found["whole"], found["of_mlp"], GATED)
    words = DELTA_NET["in_proj" if ".in_proj." in found["projection"] else "conv1d"]
    return FusedPart(found["projection"], found["of_projection"], words) if found["of_projection"] in words else None


def join_parts(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Join the parts of fused weights at the place of the first part; return also the absent parts, by weight.

    A number that each part has (`step`) becomes one value with copies; a value other than a tensor must be equal in
    all.
    """
    parts = {name: part for name in values if isinstance(name, str) and (part := part_of(name)) is not None}
    named = {(part.whole, part.word): name for name, part in parts.items()}
    joined: dict[str, Any] = {}
    lacking: dict[str, list[str]] = {}
    for name, value in values.items():
        part = parts.get(name)
        if part is None:
            joined[name] = value
            continue
        keys = [named.get((part.whole, word)) for word in part.words]
        whole = None if None in keys else _joined([values[key] for key in keys if key is not None])
        if whole is None or part.whole in values:
            absent = [word for word, key in zip(part.words, keys, strict=True) if key is None]
            lacking |= {part.whole: absent} if absent else {}
            joined[name] = value
        else:
            joined.setdefault(part.whole, whole)
    return joined, lacking


def _joined(parts: list[Any]) -> Any:
    """Join the parts' values; None if they do not fit together."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) != len(parts):
        return parts[0] if all(type(p) is type(parts[0]) and p == parts[0] for p in parts) else None
    if len({(t.dtype, len(t.shape), t.shape[1:], t.note) for t in tensors}) != 1 or any(t.placements for t in tensors):
        return None
    if not tensors[0].shape:  # copies of one number, compared like copies on several ranks
        return replace(tensors[0], shards=in_rank_order(s for t in tensors for s in t.shards))
    shards: list[Shard] = []
    at = 0
    for tensor in tensors:
        for shard in tensor.shards:
            box = Box((shard.box.offsets[0] + at, *shard.box.offsets[1:]), shard.box.sizes)
            shards.append(shard._replace(box=box))
        at += tensor.shape[0]
    return replace(tensors[0], shape=(at, *tensors[0].shape[1:]), shards=in_rank_order(shards), kind="chunks")


def notes_on_stacks(blocks: list[str], what: str) -> Iterator[Problem]:
    """Note blocks whose weights stay as stored."""
    for block in blocks:
        text = f"{block}: their first dimension does not show the number of {what}; names are as stored"
        yield Problem(Code.KEPT_AS_SAVED, text)


def missing_parts(lacking: Mapping[str, list[str]]) -> Iterator[Problem]:
    """Find fused weights that lack a part."""
    for name, absent in lacking.items():
        text = f"stored in parts, of which {', '.join(absent)} has no key in the metadata"
        yield Problem(Code.MODEL_PART_MISSING, text, None, f"model.{name}")


def join_in_tree(tree: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Problem]]:
    """Join fused weights in the nested state of `--ckpt-format fsdp_dtensor`: in the models and the optimizer.

    Names are not stacked there, and experts already have their global number (`weight3_w`).
    """
    found = dict(tree)
    problems: list[Problem] = []
    for key, value in tree.items():
        if re.fullmatch(r"model\d*", str(key)) and isinstance(value, Mapping):
            found[key], lacking = join_parts(value)
            problems += missing_parts(lacking)
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, Mapping):
        state = optimizer.get("state")
        if isinstance(state, Mapping) and any(part_of(str(name)) for name in state):
            found["optimizer"] = {**optimizer, "state": _by_name(state)}
    return found, problems


def _by_name(state: Mapping[Any, Any]) -> dict[Any, Any]:
    slots = dict.fromkeys(slot for entry in state.values() if isinstance(entry, Mapping) for slot in entry)
    found = {name: entry for name, entry in state.items() if not isinstance(entry, Mapping)}
    for slot in slots:
        entries = {name: entry[slot] for name, entry in state.items() if isinstance(entry, Mapping) and slot in entry}
        for name, value in join_parts(entries)[0].items():
            found.setdefault(name, {})[slot] = value
    return found


# -- the state by name -------------------------------------------------------------------------------------------------


OBJECT = re.compile(
    r"(?P<key>[^/]+)/shard_(?P<offset>\d{1,9}(?:\.\d{1,9})*)_(?P<shape>\d{1,9}(?:\.\d{1,9})*)", re.DOTALL
)
OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?P<rest>.+)", re.DOTALL)
SIZES = re.compile(r".*\.per_bucket_numel(?:_unpadded)?(?:/shard_0_1)?", re.DOTALL)
"""Matches a key with the length of each bucket; irrelevant without buckets."""

ROUTER = ".router.weight"
COMMON_KEY = "common_state/shard_0_1"

MASTERS = (MASTER, "param")
"""Slots of the master copy: for Float16Optimizer and older distributed optimizers, and for `fully_reshardable`."""

SHAPES = "its stored form is not its weight's shape: flat runs that nothing places"
UNJOINED = "distributed optimizer: flat buffers without names, not joined"
JOINED = (
    "saved as flat buckets without names; joined in Megatron's order of parameters, the only one in which starts, "
    "lengths and the edges of the ranks' pieces fit (assumed: parameters of one size stand in that order); the "
    "sizes of buckets (per_bucket_numel) are left out with them"
)


class StoredState:
    """The state of a torch_dist folder, sorted into weights, optimizer state, buckets and objects.

    `flat` has the values by stored name, `mcore_data` Megatron's own part of the metadata, and `common` the values
    common to all ranks; None if these have no file of their own.
    """

    def __init__(self, flat: Mapping[str, Any], mcore_data: Any, common: Any) -> None:
        common = common if common is not None else _only_item(flat.get(COMMON_KEY))
        self.common: Mapping[Any, Any] = common if isinstance(common, Mapping) else {}
        self.runs: Mapping[Any, Any] = mcore_data if isinstance(mcore_data, Mapping) else {}
        self.problems: list[Problem] = []
        self.masters_whole = True  # whether every half-precision weight has an fp32 master copy
        self.by_order: frozenset[str] = frozenset()  # weights whose state is named by their order
        self.rounded: tuple[Rounded, ...] = ()  # the fp32 copies among them, which must round to the weights
        self.unjoined = "beside state by name"
        self.weights: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Tensor]] = {}
        self.buffers: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        for name, value in flat.items():
            of_optimizer = OPTIMIZER.fullmatch(name)
            rest = of_optimizer["rest"] if of_optimizer else ""
            if rest.startswith("state.") and isinstance(value, Tensor):
                slot, _, weight = rest.removeprefix("state.").partition(".")
                self.state.setdefault(weight, {})[slot] = self._placed(name, value)
            elif rest.startswith("distributed."):
                self.buffers[name] = _only_item(value)
            elif isinstance(value, Tensor):
                self.weights[name] = self._placed(name, value)
            elif name != COMMON_KEY:
                self.objects[name] = _only_item(value)
        self.layers = self._number_of_layers()
        self.experts = self._number_of_experts()

    def _number_of_layers(self) -> dict[str, int]:
        """Number of layers of each block whose layers are stored as one tensor, if all tensors agree on it."""
        layers, odd = count_stacks(LAYERS, self.weights, {})
        stated = setting(arguments(self.common), "num_layers")
        if len(layers) == 1 and not odd and stated is not None and stated not in layers.values():
            layers, odd = {}, list(layers)
        self.problems += notes_on_stacks(odd, "layers")
        return layers

    def _number_of_experts(self) -> dict[str, int]:
        """Number of experts of each layer whose experts are stored as one tensor; its router has a row for each."""
        weights = split_stacks(LAYERS, self.weights, self.layers)
        routers = {n.removesuffix(ROUTER): t.shape[0] for n, t in weights.items() if n.endswith(ROUTER) and t.shape}
        experts, odd = count_stacks(EXPERTS, weights, {f"{mlp}.experts.experts": n for mlp, n in routers.items()})
        self.problems += notes_on_stacks(odd, "experts")
        return experts

    def tree(self, weights: Weights) -> dict[Any, Any]:
        """The nested state: `model`, `optimizer`, and the common values."""
        model, lacking = self._unstacked(self.weights)
        self.problems += missing_parts(lacking)
        state = self._optimizer_state(model)
        state |= self._joined(model) if self.buffers and not state else {}
        extra = dict(self._extra_states(model))
        optimizer = self._optimizer(state)
        masters = {n: t for n in model for slot in MASTERS if (t := state.get(n, {}).get(slot)) is not None}
        chosen = choose_weights(model, masters, weights)
        self.masters_whole = chosen.masters_whole
        self.rounded = self.rounded or tuple(self._copies(model, masters))
        self.problems += chosen.problems
        tree: dict[Any, Any] = {"model": {**chosen.weights, **extra}}
        tree |= {"optimizer": optimizer} if optimizer is not None else {}
        tree |= {k: v for k, v in self.common.items() if k != "optimizer"}
        tree |= self._other_objects()
        self.problems += notes_on_model(arguments(self.common), model, version=2)
        return tree

    def _copies(self, model: Mapping[str, Any], masters: Mapping[str, Tensor]) -> Iterator[Rounded]:
        """Yield the master copies, which must round to the module's weights; none if weights are kept in fp8.

        core 0.16.1 can shift the state of `fully_reshardable` if buckets are padded ("issue #504" in its source).
        """
        args = arguments(self.common)
        if any(args.get(name) for name in ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")):
            return
        yield from (pair for pair in Rounded.pairs(masters, model) if pair.weight.dtype in HALF)

    def _unstacked(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Split stacked tensors and join fused weights; return also the absent parts."""
        by_layer = split_stacks(LAYERS, tensors, self.layers)
        return join_parts(split_stacks(EXPERTS, by_layer, self.experts))

    def _extra_states(self, model: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """Take the extra states of single layers and experts out of the objects."""
        for name in list(self.objects):
            found = OBJECT.fullmatch(name)
            if found and found["key"].endswith("_extra_state"):
                own = self._own_name(found["key"], found["offset"].split("."), found["shape"].split("."))
                if own is not None and own not in model:
                    yield own, self.objects.pop(name)

    def _own_name(self, key: str, offset: list[str], shape: list[str]) -> str | None:
        """The name of one layer's or expert's object in a stack; None if the stack has another number of them."""
        for pattern, counts in ((LAYERS, self.layers), (EXPERTS, self.experts)):
            stacked = pattern.fullmatch(key)
            if stacked and stacked["block"] in counts:
                if not offset or int(shape.pop(0)) != counts[stacked["block"]]:
                    return None
                key = f"{stacked['block']}.{offset.pop(0)}.{stacked['rest']}"
        return key if (offset, shape) in (([], []), (["0"], ["1"])) else None

    def _other_objects(self) -> dict[str, Any]:
        """Objects of single ranks, grouped by name."""
        found: dict[str, Any] = {}
        for name, value in self.objects.items():
            match = OBJECT.fullmatch(name)
            if match is None or match["key"] in self.common:
                found[name] = value
            else:
                shard = f"shard_{match['offset']}_{match['shape']}"
                found.setdefault(match["key"], {})[shard] = value
        return {k: v["shard_0_1"] if isinstance(v, dict) and list(v) == ["shard_0_1"] else v for k, v in found.items()}

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in its true shape, if it is stored as flat runs."""
        run = self.runs.get(name)
        shape = run.get("nd_reformulated_orig_global_shape") if isinstance(run, Mapping) else None
        return tensor if shape is None or tensor.note else in_true_shape(tensor, shape)

    def _optimizer_state(self, model: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The state of each weight, in the model's order; state with neither its shape nor one element gets a note."""
        slots = dict.fromkeys(slot for entry in self.state.values() for slot in entry)
        by_slot = {slot: self._unstacked({n: e[slot] for n, e in self.state.items() if slot in e})[0] for slot in slots}
        names = dict.fromkeys([*model, *(n for tensors in by_slot.values() for n in tensors)])
        found: dict[str, dict[str, Any]] = {}
        note = f"{SHAPES}; {spelled('only', 'model')} writes the model"
        for name, (slot, tensors) in product(names, by_slot.items()):
            if name in tensors:
                tensor, weight = tensors[name], model.get(name)
                odd = weight is not None and tensor.shape != weight.shape and tensor.numel != 1 and not tensor.note
                found.setdefault(name, {})[slot] = replace(tensor, note=note) if odd else tensor
        return found

    def _optimizer(self, state: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        """The optimizer with its param groups; a distributed one's flat buffers stand in place of the state."""
        saved = self.common.get("optimizer")
        if saved is None and not state and not self.buffers:
            return None
        inner = list(_inner(saved)) or list(self._groups_of_ranks())
        steps = {k: v for one in inner for k, v in (one.get("state") or {}).items() if isinstance(k, str)}
        more = saved.items() if isinstance(saved, Mapping) else ()
        flat: dict[str, dict[str, Tensor]] = {}
        objects: dict[str, Any] = {}
        note = f"{UNJOINED} ({self.unjoined}); {spelled('only', 'model')} writes the model"
        for name, value in self.buffers.items():
            tensors = list(tensors_in(value))
            objects |= {} if tensors else {name: value}
            for path, tensor in tensors:
                buffer, _, slot = dotted_path((name, *path)).rpartition(".")
                flat.setdefault(buffer, {})[slot] = replace(tensor, note=note)
        optimizer = {
            "state": {**state, **flat},
            "param_groups": [group for one in inner for group in one["param_groups"]],
            **steps,
            **{k: v for k, v in more if isinstance(k, str) and k not in ("optimizer", "state", "param_groups")},
        }
        return {**optimizer, "distributed": objects} if objects else optimizer

    def _groups_of_ranks(self) -> Iterator[Mapping[str, Any]]:
        """Yield the param groups of the first model-parallel rank's distributed optimizer; every rank has the same."""
        seen: set[str] = set()
        for name, value in self.buffers.items():
            chained = name.partition("optimizer.")[0]
            if isinstance(value, Mapping) and isinstance(value.get("param_groups"), list) and chained not in seen:
                seen.add(chained)
                yield value

    def _joined(self, model: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The state of each weight from the distributed optimizer's buckets, if its layout is certain."""
        try:
            joined = join_buckets(self.buffers, model)
        except UnjoinedError as error:
            self.unjoined = str(error)
            return {}
        self.buffers = {n: v for n, v in self.buffers.items() if not any(tensors_in(v)) and not SIZES.fullmatch(n)}
        self.by_order = frozenset(joined)
        self.rounded = tuple(Rounded.pairs({n: entry.get("param") for n, entry in joined.items()}, model))
        self.problems.append(Problem(Code.LAYOUT_INFERRED, JOINED, None, "optimizer"))
        return dict(joined)


def _only_item(value: Any) -> Any:
    """The object of one rank, stored in a list of its own."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _inner(saved: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the torch-like state dicts of a common optimizer: itself, under `optimizer`, or of chained ones."""
    if not isinstance(saved, Mapping):
        return
    if isinstance(saved.get("param_groups"), list):
        yield saved
    elif isinstance(saved.get("optimizer"), Mapping):
        yield from _inner(saved["optimizer"])
    else:
        for key, one in saved.items():
            if type(key) is int:
                yield from _inner(one)
