"""Model states and optimizer states, the two kinds of files of a DeepSpeed tag folder.

`*_model_states.pt` is a dict: `module` (the weights; None in a pipeline, placeholders in ZeRO-3), `buffer_names`,
`param_shapes` (one OrderedDict of name to shape per param group, per sub-group in ZeRO-3, in flat order),
`frozen_param_shapes`, `frozen_param_fragments`, `shared_params` (alias to stored name, on rank 0 only), `optimizer`
(without ZeRO), scheduler, counters, `ds_config`, and the client's own keys. `*_optim_states.pt` holds
`optimizer_state_dict`. Source: runtime/engine.py (`_save_checkpoint`, `_common_checkpoint_state`) of 0.6 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.deepspeed.zero_stages import mapped
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.tree import leaf_at
from ckptools.model.values import Opaque

LAYOUT = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments")
"""Keys of the model states on how the weights are stored; the tree has the weights instead."""

FLAT = (
    "base_optimizer_state",
    "base_optimizer_state_step",
    "optimizer_state_dict",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
    "group_paddings",
    "param_alignment_paddings",
    "param_slice_mappings",
    "partition_count",
    "ds_zero_partition_groups",
    "ds_version",
)
"""Keys of the optimizer states on how they are cut over the ranks, or that repeat the model states."""

Shapes = dict[str, Ints]


@dataclass(frozen=True)
class ModelStates:
    """One model states file: of a model-parallel rank and a rank in its ZeRO group, 0 where one file serves all."""

    path: Path
    mp: int
    dp: int
    tree: dict[Any, Any]

    @property
    def module(self) -> dict[str, Any] | None:
        """`module`, the weights as the forward pass used them; None in a pipeline."""
        module = self.tree.get("module")
        if module is None:
            return None
        if not isinstance(module, dict):
            raise ReadError(self.path, f"module is a {type(module).__name__}, expected a state dict")
        return {k: v for k, v in module.items() if isinstance(k, str)}

    @property
    def groups(self) -> list[Shapes] | None:
        """`param_shapes`; None when there is none."""
        groups = self.tree.get("param_shapes")
        if groups is None:
            return None
        if not isinstance(groups, (dict, list, tuple)):
            raise ReadError(self.path, "param_shapes is no list of names and shapes; damaged")
        return [self._shapes(group, "param_shapes") for group in ([groups] if isinstance(groups, dict) else groups)]

    @property
    def frozen(self) -> Shapes:
        """Shapes of the frozen parameters, where stated."""
        shapes = self.tree.get("frozen_param_shapes")
        return {} if shapes is None else self._shapes(shapes, "frozen_param_shapes")

    @property
    def fragments(self) -> dict[str, Tensor]:
        """`frozen_param_fragments`, this rank's pieces of the frozen parameters."""
        found = self.tree.get("frozen_param_fragments")
        items = found.items() if isinstance(found, dict) else ()
        return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}

    @property
    def shared(self) -> dict[str, str]:
        """`shared_params`: second names of stored parameters, with the stored one."""
        shared = self.tree.get("shared_params")
        pairs = shared.items() if isinstance(shared, Mapping) else shared if isinstance(shared, (list, tuple)) else ()
        texts = (pair for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) == 2)
        return {a: b for a, b in texts if isinstance(a, str) and isinstance(b, str)}

    @property
    def buffers(self) -> set[str]:
        """Names of the model's buffers."""
        found = self.tree.get("buffer_names")
        return {f for f in found if isinstance(f, str)} if isinstance(found, (list, tuple, set, frozenset)) else set()

    def number(self, key: str) -> int | None:
        """A count that the file states, or None."""
        value = self.tree.get(key)
        return value if type(value) is int and value >= 0 else None

    def config(self, *keys: str) -> Any:
        """A setting of `ds_config`."""
        return leaf_at(self.tree, ("ds_config", *keys))

    def _shapes(self, shapes: Any, what: str) -> Shapes:
        if not isinstance(shapes, dict):
            raise ReadError(self.path, f"{what} is no dict of names and shapes; damaged")
        found: Shapes = {}
        for fqn, shape in shapes.items():
            sizes = tuple(shape) if isinstance(shape, (list, tuple)) else None
            if not isinstance(fqn, str) or sizes is None or any(type(n) is not int or n < 0 for n in sizes):
                raise ReadError(self.path, f"{what} has an entry that is no name and shape; damaged")
            found[fqn] = sizes
        return found


@dataclass(frozen=True)
class OptimStates:
    """One optimizer states file, by its `optimizer_state_dict`."""

    path: Path
    tree: dict[Any, Any]

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None where the file does not say it (BF16_Optimizer)."""
        return stage_of(self.tree)

    @property
    def sharded(self) -> bool:
        """Whether it holds parameters cut one by one: ZeRO-3."""
        return "fp32_flat_groups" in self.tree

    @property
    def counts(self) -> list[int]:
        """The number of partitions of each group; one number may stand for all."""
        count = self.tree.get("partition_count")
        listed = list(count) if isinstance(count, (list, tuple)) else [count]
        counts = [n for n in listed if type(n) is int and n > 0]
        if not counts or len(counts) < len(listed):
            raise ReadError(self.path, "partition_count is no positive number; damaged, or not written by ZeRO")
        return counts

    @property
    def masters(self) -> list[Any]:
        """The flat fp32 tensors, one per group or sub-group."""
        key = "fp32_flat_groups" if self.sharded else "single_partition_of_fp32_groups"
        found = self.tree.get(key)
        if not isinstance(found, (list, tuple)):
            raise ReadError(self.path, f"has no {key}; DeepSpeed older than 0.5, or not written by ZeRO")
        return list(found)

    @property
    def base(self) -> Any:
        """The state of the optimizer that ZeRO wraps."""
        return self.tree.get("optimizer_state_dict" if self.sharded else "base_optimizer_state")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups; empty in an elastic checkpoint, which has none."""
        return [g for g in _listed(leaf_at(self.base, ("param_groups",))) if isinstance(g, dict)]

    def group_names(self) -> list[tuple[Any, int]]:
        """The name of every param group, with how many before it have the same."""
        names = [group.get("name") if isinstance(group.get("name"), str) else None for group in self.param_groups]
        return [(name, names[:k].count(name)) for k, name in enumerate(names)]

    def with_groups(self, order: list[int]) -> OptimStates:
        """The same states with the param groups in another order, renumbered in the optimizer's state too."""
        lists = {key: found for key in BY_GROUP if len(found := _listed(self.tree.get(key))) == len(order)}
        slots, groups = self.slots, self.param_groups
        if self.sharded or len(slots) != len(order) or any(len(_ids(group)) != 1 for group in groups):
            return self
        base = {
            "state": {k: slots[old] for k, old in enumerate(order)},
            "param_groups": [{**groups[old], "params": [k]} for k, old in enumerate(order)],
        }
        moved = {key: [found[old] for old in order] for key, found in lists.items()}
        return OptimStates(self.path, {**self.tree, **moved, "base_optimizer_state": {**self.base, **base}})

    @property
    def slots(self) -> list[dict[str, Any]]:
        """The slots of the optimizer state, of each flat tensor."""
        if isinstance(self.base, (list, tuple)):
            return [entry if isinstance(entry, dict) else {} for entry in self.base]
        state = self.base.get("state") if isinstance(self.base, dict) else None
        ids = [i for group in self.param_groups for i in _ids(group)]
        entries = (state.get(i) if isinstance(state, dict) else None for i in ids)
        return [entry if isinstance(entry, dict) else {} for entry in entries]

    def mappings(self) -> list[dict[str, tuple[int, int]] | None]:
        """`param_slice_mappings`, group by group; None where it says nothing."""
        return [mapped(group) for group in _listed(self.tree.get("param_slice_mappings"))]

    def paddings(self, group: int, count: int) -> list[int]:
        """Elements of padding behind each of `count` parameters of a group."""
        found = self.tree.get("param_alignment_paddings")
        if found is None:
            return [0] * count
        paddings = _listed(leaf_at(_listed(found), (group,)))
        if len(paddings) != count or any(type(n) is not int or n < 0 for n in paddings):
            raise ReadError(self.path, f"param_alignment_paddings of group {group} do not fit its {count} parameters")
        return paddings

    def others(self) -> dict[Any, Any]:
        """Values beside partitions and state: loss scaler, overflow, `clip_grad`."""
        kept = {k: v for k, v in self.tree.items() if k not in FLAT}
        return kept if self.stage is None else {**kept, "zero_stage": self.stage}


BY_GROUP = (
    "single_partition_of_fp32_groups",
    "group_paddings",
    "param_alignment_paddings",
    "param_slice_mappings",
    "partition_count",
)
"""Lists in the optimizer states of ZeRO-1 and 2 with an entry of every param group."""


def in_order_of_first(optims: Mapping[tuple[int, int], OptimStates]) -> dict[tuple[int, int], OptimStates]:
    """Optimizer states with their param groups in the order of the first rank of each model-parallel rank.

    Groups of experts are made from a set of their names, whose order differs from process to process. Source:
    moe/utils.py (`split_params_into_different_moe_groups_for_optimizer`); seen in files of 0.19.8.
    """
    first: dict[int, list[tuple[Any, int]]] = {}
    found = {}
    for (mp, dp), optim in sorted(optims.items()):
        names = optim.group_names()
        wanted = first.setdefault(mp, names)
        other = names != wanted and sorted(names, key=repr) == sorted(wanted, key=repr)
        found[mp, dp] = optim.with_groups([names.index(name) for name in wanted]) if other else optim
    return found


def stage_of(state: Mapping[Any, Any]) -> int | None:
    """The ZeRO stage in optimizer states, stored as a number or as DeepSpeed 0.7's enum."""
    stage = state.get("zero_stage")
    if isinstance(stage, Opaque) and isinstance(stage.args, (list, tuple)) and stage.args:
        stage = stage.args[0]
    return stage if type(stage) is int else None


def joined_groups(listed: Iterable[Iterable[Shapes]]) -> list[Shapes]:
    """Join the groups of each number; some of `listed` may have fewer of them."""
    numbered = zip_longest(*listed, fillvalue=Shapes())
    return [{fqn: shape for shapes in same for fqn, shape in shapes.items()} for same in numbered]


def group_of_ids(param_groups: list[dict[str, Any]]) -> list[int]:
    """The param group of each flat tensor."""
    return [number for number, group in enumerate(param_groups) for _ in _ids(group)]


def _ids(group: Mapping[str, Any]) -> list[Any]:
    return [i for i in _listed(group.get("params")) if isinstance(i, (int, str))]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
