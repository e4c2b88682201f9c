"""How the ZeRO stages cut parameters over ranks: partitions of one flat buffer, or in stage 3 pieces of each parameter.

Stages 1 and 2, and BF16_Optimizer, have one flat buffer per param group, cut into equal partitions.
A group's parameters follow each other in the order of `param_shapes`, which is that of the buffer itself, also
under `round_robin_gradients`. The buffer is padded at its end to a multiple of 2 x W and cut into W partitions of P
elements, so that rank d holds elements d·P to (d + 1)·P. Since 0.19.8 padding may follow each parameter too
(`param_alignment_paddings`). Source: runtime/zero/stage_1_and_2.py (`__init__`, `state_dict`), bf16_optimizer.py,
utils/zero_to_fp32.py, versions 0.8 to 0.19.8; checked on real files of 0.19.8.

Each partition is stored as the fp32 copy without the padding that `group_paddings` counts (up to 0.16.3 on the last
rank only, so that others may keep some; BF16_Optimizer keeps all), and the optimizer's state with all P elements, or
cut like the fp32 copy in an elastic checkpoint. Only elements that belong to a parameter are used.

`param_slice_mappings` states the start of each of a rank's pieces, and must agree. It disagrees only under
`round_robin_gradients`: it is then made from the order before the shuffle (utils/mixed_precision_linkage.py receives
`bit16_groups`, not `round_robin_bit16_groups`), unless there is padding between the parameters.

Stage 3 cuts every parameter into W equal pieces, and a rank's pieces follow each other.
A piece has ceil(numel / W) elements; the last ones of a parameter are padding. A rank's pieces fill its sub-groups in
the order of `param_shapes`, which counts sub-groups too. Their borders need not be those of the parameters: a piece
may straddle two. Frozen parameters are cut alike, one tensor each, in `frozen_param_fragments` of the model files.
Source: runtime/zero/stage3.py (`_rigid_state_dict`), partition_parameters.py, utils/zero_to_fp32.py, versions 0.8 to
0.19.8; checked on real files of 0.19.8.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.formats.flat_parameters.units import RunBox, boxes_of
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints, chunk, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, leaf_at

Where = tuple[int, int, int]
"""`(mp, dp, group)`: the rank that holds a flat tensor, and the tensor's number."""

RankOf = Callable[[Where], int]
"""The global rank of a flat tensor."""


class PartitionRun(NamedTuple):
    """Consecutive elements of one parameter, from its element `start`, which is element `at` of a flat tensor."""

    fqn: str
    start: int
    length: int
    where: Where
    at: int


def _cut(run: PartitionRun, borders: Sequence[int]) -> Iterator[PartitionRun]:
    """Cut a run at borders given in flat elements (`at`); an empty run is kept."""
    end = run.at + run.length
    for a, b in pairwise([run.at, *borders[bisect_right(borders, run.at) : bisect_left(borders, end)], end]):
        yield run._replace(start=run.start + a - run.at, length=b - a, at=a)


ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a buffer has a multiple of this many elements per rank."""


@dataclass(frozen=True)
class Group:
    """One param group's flat buffer of a model-parallel rank, which is cut over `world` ranks.

    The parameters are in order; `paddings` has the number of padding elements behind each.
    """

    mp: int
    index: int
    shapes: Mapping[str, Ints]
    paddings: Sequence[int]
    world: int

    @cached_property
    def numel(self) -> int:
        """Elements of the group up to the end of its last parameter, without the padding at the end."""
        return max((start + n for _, start, n in self.places()), default=0)

    def places(self) -> Iterator[tuple[str, int, int]]:
        """`(fqn, first element in the buffer, elements)` of every parameter."""
        start = 0
        for (fqn, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            yield fqn, start, prod(shape)
            start += prod(shape) + padding

    def elements_of(self, rank: int, partition: int) -> int:
        """Elements in a rank's partition before the end of the last parameter."""
        return min(max(self.numel - rank * partition, 0), partition)

    def runs(self, partition: int) -> Iterator[PartitionRun]:
        """The runs of every parameter, one for each partition that it lies in."""
        borders = range(0, self.numel + 1, max(partition, 1))
        for fqn, start, n in self.places():
            for run in _cut(PartitionRun(fqn, 0, n, (self.mp, 0, self.index), start), borders) if n else ():
                rank, at = divmod(run.at, partition)
                yield run._replace(where=(self.mp, rank, self.index), at=at)


class Refusal(NamedTuple):
    """Why a group cannot be joined, and the rank of the file that shows it."""

    rank: int
    why: str


def partition_length(group: Group, master: Mapping[int, int], state: Mapping[int, set[int]]) -> int | Refusal:
    """The length of a partition, proven by the lengths of the fp32 copy by rank; or why it is unknown.

    If two lengths fit, the lengths of the optimizer's 1-D tensors, by rank, decide.
    """
    n, world = group.numel, group.world
    # Before 0.5 the buffer was padded to a multiple of W only.
    candidates = dict.fromkeys([ALIGNMENT * -(-n // (ALIGNMENT * world)), -(-n // world)])
    fitting = [p for p in candidates if all(group.elements_of(r, p) <= length <= p for r, length in master.items())]
    fitting.sort(key=lambda p: -sum(p in lengths for lengths in state.values()))
    if fitting:
        return fitting[0]
    p = next(iter(candidates))
    rank, length = next((r, k) for r, k in sorted(master.items()) if not group.elements_of(r, p) <= k <= p)
    least = group.elements_of(rank, p)
    text = (
        f"group {group.index}, rank {rank}: {length} elements are stored, expected {least} to {p} of "
        f"{n} in {len(group.shapes)} parameters over {world} ranks; the files are not of one run, or damaged"
    )
    return Refusal(rank, text)


def mapped(mapping: Any) -> dict[str, tuple[int, int]] | None:
    """`{fqn: (start, elements)}` of one rank and group in `param_slice_mappings`; None when it has none."""
    if not isinstance(mapping, Mapping):
        return None
    found: dict[str, tuple[int, int]] = {}
    for fqn, address in mapping.items():
        state = address.state if isinstance(address, Opaque) else None
        start, numel = (state.get("start"), state.get("numel")) if isinstance(state, Mapping) else (None, None)
        if not isinstance(fqn, str) or type(start) is not int or type(numel) is not int:
            return None
        if numel:
            found[fqn] = start, numel
    return found


def contradiction(
    group: Group, partition: int, mappings: Mapping[int, Mapping[str, tuple[int, int]]]
) -> Refusal | None:
    """Describe how the ranks' `param_slice_mappings` contradict the layout; None when they agree."""
    expected: dict[int, dict[str, tuple[int, int]]] = {}
    for run in group.runs(partition):
        expected.setdefault(run.where[1], {})[run.fqn] = run.at, run.length
    for rank, addresses in sorted(mappings.items()):
        here = expected.get(rank, {})
        odd = next((f for f in (*addresses, *here) if addresses.get(f) != here.get(f)), None)
        if odd is not None:
            text = (
                f"group {group.index}, rank {rank}: param_slice_mappings has {_describe(addresses.get(odd))} of {odd}, "
                f"expected {_describe(here.get(odd))}; the file is another rank's or of another run"
            )
            return Refusal(rank, text)
    return None


def _describe(address: tuple[int, int] | None) -> str:
    return "no element" if address is None else f"{address[1]} elements at {address[0]}"


def shuffled(group: Group, partition: int, mappings: Mapping[int, Mapping[str, tuple[int, int]]]) -> bool:
    """Whether the mappings fit the same parameters in another order, the order before a round-robin shuffle.

    Only the mappings of all ranks together show that order.
    """
    order = dict.fromkeys(fqn for _, addresses in sorted(mappings.items()) for fqn in addresses)
    left = {fqn for fqn, shape in group.shapes.items() if prod(shape)}
    if any(group.paddings) or len(mappings) != group.world or left != set(order):
        return False
    before = Group(group.mp, group.index, {f: group.shapes[f] for f in order}, [0] * len(order), group.world)
    return contradiction(before, partition, mappings) is None


def stage3_runs(
    mp: int, shapes: Mapping[str, Ints], world: int, groups: Sequence[int], ranks: Iterable[int]
) -> Iterator[PartitionRun]:
    """Yield the runs of every parameter on some of the `world` ranks.

    `groups` are the lengths of a rank's sub-groups, which together are as long as the row of pieces.
    """
    borders, listed, row = [0, *accumulate(groups)], list(ranks), 0
    for fqn, shape in shapes.items():
        for rank in listed:
            start, length = chunk(prod(shape), world, rank)
            for run in _cut(PartitionRun(fqn, start, length, (mp, rank, 0), row), borders):
                group = min(bisect_right(borders, run.at), len(groups)) - 1
                yield run._replace(where=(mp, rank, group), at=run.at - borders[group] if length else 0)
        row += -(-prod(shape) // world)


class PlacedBox(NamedTuple):
    """A box of a parameter, and the flat tensor that has its elements."""

    where: Where
    box: RunBox


def places(shape: Ints, runs: Sequence[PartitionRun], rank_of: RankOf) -> list[PlacedBox]:
    """The boxes of all runs of a parameter.

    Runs of a tied parameter in several pipeline stages are cut at the same places, so that they are replicas. An empty
    parameter is placed in the first flat tensor, for its dtype.
    """
    if not prod(shape):
        first = runs[0].where if runs else (0, 0, 0)
        return [PlacedBox(first, RunBox(Shard(Box.whole(shape), rank_of(first), None), 0, contiguous_strides(shape)))]
    if len({run.where[0] for run in runs}) > 1:
        cuts = sorted({at for run in runs for at in (run.start, run.start + run.length)})
        runs = [piece for run in runs for piece in _cut(run, [cut + run.at - run.start for cut in cuts])]
    found = []
    for run in runs:
        rank = rank_of(run.where)
        found += [PlacedBox(run.where, box) for box in boxes_of(shape, run.start, run.length, rank, run.at)]
    return found


def shards_at(placed: Iterable[PlacedBox], flats: Mapping[Where, Source]) -> tuple[Shard, ...]:
    """The shards of a parameter, or of one slot of its state; without a source if the flat tensor was not read."""
    return tuple(place.box.shard_in(flats.get(place.where)) for place in placed)


# -- model states and optimizer states, the two kinds of files of a DeepSpeed tag folder -------------------------------
# `*_model_states.pt` is a dict: `module` (the weights; None in a pipeline, placeholders in ZeRO-3), `buffer_names`,
# `param_shapes` (one OrderedDict of name to shape per param group, per sub-group in ZeRO-3, in flat order),
# `frozen_param_shapes`, `frozen_param_fragments`, `shared_params` (alias to stored name, on rank 0 only), `optimizer`
# (without ZeRO), scheduler, counters, `ds_config`, and the client's own keys. `*_optim_states.pt` contains
# `optimizer_state_dict`. Source: runtime/engine.py (`_save_checkpoint`, `_common_checkpoint_state`) of 0.6 to 0.19.

LAYOUT = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments")
"""Keys of the model states that describe the storage of weights; the tree has the weights instead."""

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
"""Keys of the optimizer states that describe their partitions, or repeat the model states."""

Shapes = dict[str, Ints]


@dataclass(frozen=True)
class ModelStates:
    """One model states file, of a model-parallel rank and a rank in its ZeRO group (0 if one file serves the group)."""

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
        """Shapes of the frozen parameters, if stated."""
        shapes = self.tree.get("frozen_param_shapes")
        return {} if shapes is None else self._shapes(shapes, "frozen_param_shapes")

    @property
    def fragments(self) -> dict[str, Tensor]:
        """`frozen_param_fragments`: this rank's pieces of the frozen parameters."""
        found = self.tree.get("frozen_param_fragments")
        items = found.items() if isinstance(found, dict) else ()
        return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}

    @property
    def shared(self) -> dict[str, str]:
        """`shared_params`: second names of stored parameters, by the stored name that each refers to."""
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
        """The ZeRO stage; None if the file does not state it (BF16_Optimizer)."""
        return stage_of(self.tree)

    @property
    def sharded(self) -> bool:
        """Whether the parameters are cut one by one: ZeRO-3."""
        return "fp32_flat_groups" in self.tree

    @property
    def counts(self) -> list[int]:
        """The number of partitions of each group; a single number may stand for all groups."""
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
        """The name of every param group, with the number of earlier groups of the same name."""
        names = [group.get("name") if isinstance(group.get("name"), str) else None for group in self.param_groups]
        return [(name, names[:k].count(name)) for k, name in enumerate(names)]

    def with_groups(self, order: list[int]) -> OptimStates:
        """The same states with reordered param groups, which are renumbered in the optimizer's state too."""
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
        """`param_slice_mappings`, group by group; None for a group without one."""
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
"""Lists in the optimizer states of ZeRO-1 and 2 with an entry for every param group."""


def in_order_of_first(optims: Mapping[tuple[int, int], OptimStates]) -> dict[tuple[int, int], OptimStates]:
    """Reorder the param groups of optimizer states as in the first rank of each model-parallel rank.

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
    """Join the groups of each number; some lists may be shorter."""
    numbered = zip_longest(*listed, fillvalue=Shapes())
    return [{fqn: shape for shapes in same for fqn, shape in shapes.items()} for same in numbered]


def group_of_ids(param_groups: list[dict[str, Any]]) -> list[int]:
    """The param group of each flat tensor."""
    return [number for number, group in enumerate(param_groups) for _ in _ids(group)]


def _ids(group: Mapping[str, Any]) -> list[Any]:
    return [i for i in _listed(group.get("params")) if isinstance(i, (int, str))]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


# -- layout of every trainable parameter of one model-parallel rank in the flat tensors of its ZeRO ranks --------------

MAX_WORLD = 1 << 16
"""A group may be cut over at most this many ranks; no cluster has more."""


@dataclass
class PartitionLayout:
    """Layout of the trainable parameters of one model-parallel rank in the flat tensors of its ZeRO ranks.

    Attributes:
        groups: names of the parameters by flat tensor: param group, or sub-group in ZeRO-3.
        lengths: elements of each flat tensor, padding included.
        world: number of ranks over which it is cut; 0 when unknown.
        refused: why a parameter has no place.
        problems: problems of the layout; their ranks are ranks in the ZeRO group.
    """

    mp: int
    shapes: Shapes = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    runs: dict[str, list[PartitionRun]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    world: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, names: Iterable[str], why: str, rank: int) -> None:
        """Refuse parameters for one reason, which becomes one problem."""
        self.refused |= dict.fromkeys(names, why)
        self.problems.append(Problem(Code.LAYOUT_DISAGREES, why, rank))

    def add(self, runs: Iterable[PartitionRun]) -> None:
        """Add runs of parameters."""
        for run in runs:
            self.runs.setdefault(run.fqn, []).append(run)

    def refuses_other_state(self, optims: Mapping[int, OptimStates], groups: int) -> bool:
        """Refuse all parameters if the optimizer's state does not have one entry per flat tensor."""
        for dp, optim in sorted(optims.items()):
            if (found := len(optim.slots)) not in (0, groups):
                text = f"rank {dp}: the optimizer's state is of {found} tensors, expected {groups} flat ones"
                self.refuse(self.shapes, text, dp)
                return True
        return False
