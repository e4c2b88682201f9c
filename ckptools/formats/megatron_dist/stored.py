"""The state in a Megatron torch_dist folder, by the names that it is stored under; see `megatron_dist`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ckptools.formats.megatron.folders import arguments, setting
from ckptools.formats.megatron.model import HALF, MASTER, choose_weights, notes_on_model
from ckptools.formats.megatron.optimizer import dotted_path
from ckptools.formats.megatron_dist.buckets import UnjoinedError, in_true_shape, join_buckets
from ckptools.formats.options import Weights
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Rounded, Shard, Source, Tensor
from ckptools.model.tree import tensors_in

STACKED = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<rest>(?!\d+\.).+)", re.DOTALL)
OBJECT = re.compile(
    r"(?P<key>[^/]+)/shard_(?P<offset>\d{1,9}(?:\.\d{1,9})*)_(?P<shape>\d{1,9}(?:\.\d{1,9})*)", re.DOTALL
)
OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?P<rest>.+)", re.DOTALL)
SIZES = re.compile(r".*\.per_bucket_numel(?:_unpadded)?(?:/shard_0_1)?", re.DOTALL)
"""Key with the length of each bucket; irrelevant without buckets."""

COMMON_KEY = "common_state/shard_0_1"
MASTERS = (MASTER, "param")
"""Slots of the master copy: of Float16Optimizer and older distributed optimizers, of `fully_reshardable`."""

SHAPES = "its stored form is not its weight's shape: flat runs that nothing places; --only model writes the model"
UNJOINED = "distributed optimizer: flat buffers without names, not joined ({why}); --only model writes the model"
JOINED = (
    "saved as flat buckets without names; joined in Megatron's order of parameters, the only one in which starts, "
    "lengths and the edges of the ranks' pieces fit (assumed: parameters of one size stand in that order); the "
    "sizes of buckets (per_bucket_numel) are left out with them"
)
MAX_LAYERS = 1 << 16
MAX_MADE = 1_000_000
"""Most tensors that stacked ones are split into; a forged first dimension asks for more."""


class StoredState:
    """The state of a torch_dist folder, sorted into weights, optimizer state, buckets and objects.

    It is made of what lies under each stored name, Megatron's own part of the metadata, and the values common to all
    ranks; None where these have no file of their own.
    """

    def __init__(self, flat: Mapping[str, Any], mcore_data: Any, common: Any) -> None:
        common = common if common is not None else _only_item(flat.get(COMMON_KEY))
        self.common: Mapping[Any, Any] = common if isinstance(common, Mapping) else {}
        self.runs: Mapping[Any, Any] = mcore_data if isinstance(mcore_data, Mapping) else {}
        self.problems: list[Problem] = []
        self.masters_whole = True  # whether every half-precision weight has an fp32 master copy
        self.by_order: frozenset[str] = frozenset()  # weights whose state is named by their order
        self.rounded: tuple[Rounded, ...] = ()  # the fp32 copies among these, which must round to the weights
        self.unjoined = "beside state by name"
        self.weights: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Tensor]] = {}
        self.buffers: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        for name, value in flat.items():
            self._sort(name, value)
        self.layers = self._layers()

    def _sort(self, name: str, value: Any) -> None:
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

    def _layers(self) -> dict[str, int]:
        """Number of layers of each block whose layers are stored as one tensor, where all agree on it."""
        found: dict[str, set[int]] = {}
        for name, tensor in self.weights.items():
            stacked = STACKED.fullmatch(name)
            if stacked:
                found.setdefault(stacked["block"], set()).add(tensor.shape[0] if tensor.shape else 0)
        stated = setting(arguments(self.common), "num_layers")
        layers = {block: n for block, (n, *more) in found.items() if not more and 0 < n < MAX_LAYERS}
        too_many = sum(layers.values()) * len(self.weights) > MAX_MADE
        if too_many or (len(found) == 1 and stated is not None and stated not in layers.values()):
            layers = {}
        for block in (block for block in found if block not in layers):
            text = f"{block}: their first dimension does not show the number of layers; names are as stored"
            self.problems.append(Problem(Code.KEPT_AS_SAVED, text))
        return layers

    def tree(self, weights: Weights) -> dict[Any, Any]:
        """The nested state: `model`, `optimizer`, and the common values."""
        model = self._unstacked(self.weights)
        state = self._optimizer_state(model)
        state |= self._joined(model) if self.buffers and not state else {}
        extra = dict(self._extra_states(model))
        optimizer = self._optimizer(state)
        masters = {n: t for n in model for slot in MASTERS if (t := state.get(n, {}).get(slot)) is not None}
        chosen = choose_weights(model, masters, weights)
        self.masters_whole = chosen.masters_whole
        self.problems += chosen.problems
        tree: dict[Any, Any] = {"model": {**chosen.weights, **extra}}
        tree |= {"optimizer": optimizer} if optimizer is not None else {}
        tree |= {k: v for k, v in self.common.items() if k != "optimizer"}
        tree |= self._other_objects()
        self.problems += notes_on_model(arguments(self.common), model, version=2)
        return tree

    def _unstacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Split stacked tensors by layer, with names layer by layer from where a block begins."""
        whole: dict[str, Tensor] = {}
        done: set[str] = set()
        for name, tensor in tensors.items():
            stacked = STACKED.fullmatch(name)
            if not stacked or stacked["block"] not in self.layers:
                whole[name] = tensor
            elif stacked["block"] not in done:
                done.add(stacked["block"])
                whole |= dict(self._block(stacked["block"], tensors))
        return whole

    def _block(self, block: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        named = {m["rest"]: t for n, t in tensors.items() if (m := STACKED.fullmatch(n)) and m["block"] == block}
        number = self.layers[block]
        # State that does not count the same layers stays as stored.
        layers = {rest: _layers_of(t) for rest, t in named.items() if t.shape[:1] == (number,)}
        yield from ((f"{block}.{rest}", t) for rest, t in named.items() if rest not in layers)
        for n in range(number):
            yield from ((f"{block}.{n}.{rest}", every[n]) for rest, every in layers.items())

    def _extra_states(self, model: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """Extra states of single layers, taken out of the objects."""
        for name in list(self.objects):
            found = OBJECT.fullmatch(name)
            if not found or not found["key"].endswith("_extra_state"):
                continue
            stacked = STACKED.fullmatch(found["key"])
            if stacked and "." not in found["offset"] and int(found["shape"]) == self.layers.get(stacked["block"]):
                yield f"{stacked['block']}.{found['offset']}.{stacked['rest']}", self.objects.pop(name)
            elif not stacked and (found["offset"], found["shape"]) == ("0", "1") and found["key"] not in model:
                yield found["key"], self.objects.pop(name)

    def _other_objects(self) -> dict[str, Any]:
        """Objects of single ranks, those of one name together."""
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
        """The tensor in its true shape, where it is stored as flat runs."""
        run = self.runs.get(name)
        shape = run.get("nd_reformulated_orig_global_shape") if isinstance(run, Mapping) else None
        return tensor if shape is None or tensor.note else in_true_shape(tensor, shape)

    def _optimizer_state(self, model: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The state of each weight, in the model's order; marked where it has neither its shape nor one element."""
        slots = dict.fromkeys(slot for entry in self.state.values() for slot in entry)
        by_slot = {slot: self._unstacked({n: e[slot] for n, e in self.state.items() if slot in e}) for slot in slots}
        names = dict.fromkeys([*model, *(n for tensors in by_slot.values() for n in tensors)])
        found: dict[str, dict[str, Any]] = {}
        for name, (slot, tensors) in product(names, by_slot.items()):
            if name in tensors:
                tensor, weight = tensors[name], model.get(name)
                odd = weight is not None and tensor.shape != weight.shape and tensor.numel != 1 and not tensor.note
                found.setdefault(name, {})[slot] = replace(tensor, note=SHAPES) if odd else tensor
        return found

    def _optimizer(self, state: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        """The optimizer with its param groups, and the distributed one's flat buffers in place of its state."""
        saved = self.common.get("optimizer")
        if saved is None and not state and not self.buffers:
            return None
        inner = list(_inner(saved)) or list(self._groups_of_ranks())
        steps = {k: v for one in inner for k, v in (one.get("state") or {}).items() if isinstance(k, str)}
        more = saved.items() if isinstance(saved, Mapping) else ()
        flat: dict[str, dict[str, Tensor]] = {}
        objects: dict[str, Any] = {}
        for name, value in self.buffers.items():
            tensors = list(tensors_in(value))
            objects |= {} if tensors else {name: value}
            for path, tensor in tensors:
                buffer, _, slot = dotted_path((name, *path)).rpartition(".")
                flat.setdefault(buffer, {})[slot] = replace(tensor, note=UNJOINED.format(why=self.unjoined))
        optimizer = {
            "state": {**state, **flat},
            "param_groups": [group for one in inner for group in one["param_groups"]],
            **steps,
            **{k: v for k, v in more if isinstance(k, str) and k not in ("optimizer", "state", "param_groups")},
        }
        return {**optimizer, "distributed": objects} if objects else optimizer

    def _groups_of_ranks(self) -> Iterator[Mapping[str, Any]]:
        """The first model-parallel rank's distributed optimizer; every rank has the same groups."""
        seen: set[str] = set()
        for name, value in self.buffers.items():
            chained = name.partition("optimizer.")[0]
            if isinstance(value, Mapping) and isinstance(value.get("param_groups"), list) and chained not in seen:
                seen.add(chained)
                yield value

    def _joined(self, model: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The state of each weight, taken from the distributed optimizer's buckets where that is certain."""
        try:
            joined = join_buckets(self.buffers, model)
        except UnjoinedError as error:
            self.unjoined = str(error)
            return {}
        self.buffers = {n: v for n, v in self.buffers.items() if not any(tensors_in(v)) and not SIZES.fullmatch(n)}
        self.by_order = frozenset(joined)
        pairs = ((n, entry.get("param"), model[n]) for n, entry in joined.items())
        self.rounded = tuple(Rounded(n, t, w) for n, t, w in pairs if t and t.dtype == "float32" and w.dtype in HALF)
        self.problems.append(Problem(Code.LAYOUT_INFERRED, JOINED, None, "optimizer"))
        return dict(joined)


def _only_item(value: Any) -> Any:
    """The object of one rank: each is stored in a list of its own."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _inner(saved: Any) -> Iterator[Mapping[str, Any]]:
    """The torch-like state dicts of a common optimizer: itself, under `optimizer`, or of chained ones."""
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


def _layers_of(tensor: Tensor) -> list[Tensor]:
    """The layers of a tensor whose first dimension counts them."""
    shards: list[list[Shard]] = [[] for _ in range(tensor.shape[0])]
    for shard in tensor.shards:
        first, box = shard.box.offsets[0], Box(shard.box.offsets[1:], shard.box.sizes[1:])
        for n in range(first, min(first + shard.box.sizes[0], len(shards))):
            shards[n].append(Shard(box, shard.rank, _row(shard.source, n - first) if shard.source else None))
    layers, whole = [], Box.whole(tensor.shape[1:])
    for mine in shards:
        plain = tensor.kind == "chunks" and all(s.box == whole for s in mine)
        kind = "plain" if plain else tensor.kind
        layers.append(replace(tensor, shape=whole.sizes, shards=tuple(mine), kind=kind))
    return layers


def _row(source: Source, at: int) -> Source:
    first = source.part(Box((at, *(0,) * (len(source.shape) - 1)), (1, *source.shape[1:])))
    return first._replace(shape=source.shape[1:], strides=source.strides[1:])
