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
from ckptools.formats.megatron_dist.bucket_order import UnjoinedError
from ckptools.formats.megatron_dist.buckets import join_buckets
from ckptools.formats.megatron_dist.runs import in_true_shape
from ckptools.formats.megatron_dist.stacked import (
    EXPERTS,
    LAYERS,
    count_stacks,
    join_parts,
    missing_parts,
    notes_on_stacks,
    split_stacks,
)
from ckptools.formats.options import Weights
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Rounded, Tensor
from ckptools.model.tree import tensors_in

OBJECT = re.compile(
    r"(?P<key>[^/]+)/shard_(?P<offset>\d{1,9}(?:\.\d{1,9})*)_(?P<shape>\d{1,9}(?:\.\d{1,9})*)", re.DOTALL
)
OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?P<rest>.+)", re.DOTALL)
SIZES = re.compile(r".*\.per_bucket_numel(?:_unpadded)?(?:/shard_0_1)?", re.DOTALL)
"""Key with the length of each bucket; irrelevant without buckets."""

ROUTER = ".router.weight"
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
        self.layers = self._number_of_layers()
        self.experts = self._number_of_experts()

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

    def _number_of_layers(self) -> dict[str, int]:
        """Number of layers of each block whose layers are stored as one tensor, where all agree on it."""
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
        """The master copies, which must round to the module's weights; none where weights are kept in fp8.

        core 0.16.1 can shift the state of `fully_reshardable` where buckets are padded ("issue #504" in its source).
        """
        args = arguments(self.common)
        if any(args.get(name) for name in ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")):
            return
        yield from (pair for pair in Rounded.pairs(masters, model) if pair.weight.dtype in HALF)

    def _unstacked(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Each layer's and each expert's tensors, and fused weights joined; and the absent parts of these."""
        by_layer = split_stacks(LAYERS, tensors, self.layers)
        return join_parts(split_stacks(EXPERTS, by_layer, self.experts))

    def _extra_states(self, model: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """Extra states of single layers and experts, taken out of the objects."""
        for name in list(self.objects):
            found = OBJECT.fullmatch(name)
            if found and found["key"].endswith("_extra_state"):
                own = self._own_name(found["key"], found["offset"].split("."), found["shape"].split("."))
                if own is not None and own not in model:
                    yield own, self.objects.pop(name)

    def _own_name(self, key: str, offset: list[str], shape: list[str]) -> str | None:
        """The name of one layer's or expert's object in a stack; None where the stack is not of the same number."""
        for pattern, counts in ((LAYERS, self.layers), (EXPERTS, self.experts)):
            stacked = pattern.fullmatch(key)
            if stacked and stacked["block"] in counts:
                if not offset or int(shape.pop(0)) != counts[stacked["block"]]:
                    return None
                key = f"{stacked['block']}.{offset.pop(0)}.{stacked['rest']}"
        return key if (offset, shape) in (([], []), (["0"], ["1"])) else None

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
        by_slot = {slot: self._unstacked({n: e[slot] for n, e in self.state.items() if slot in e})[0] for slot in slots}
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
        self.rounded = tuple(Rounded.pairs({n: entry.get("param") for n, entry in joined.items()}, model))
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
