"""How the ZeRO stages cut parameters over ranks: partitions of one flat buffer, in stage 3 pieces of each parameter.

Stages 1 and 2, and BF16_Optimizer, have one flat buffer per param group, cut into equal partitions.
A group's parameters lie behind each other in the order of `param_shapes`, which is that of the buffer itself, also
under `round_robin_gradients`. The buffer is padded at its end to a multiple of 2 x W and cut into W partitions of P
elements, so that rank d holds elements d·P to (d + 1)·P. Since 0.19.8 padding may lie behind each parameter too
(`param_alignment_paddings`). Source: runtime/zero/stage_1_and_2.py (`__init__`, `state_dict`), bf16_optimizer.py,
utils/zero_to_fp32.py, versions 0.8 to 0.19.8; checked on real files of 0.19.8.

Stored of each partition: the fp32 copy without the padding that `group_paddings` counts (up to 0.16.3 on the last rank
only, so that others may keep some; BF16_Optimizer keeps all), and the optimizer's state with all P elements, or cut
like the fp32 copy in an elastic checkpoint. Only elements that belong to a parameter are taken.

`param_slice_mappings` says where a rank's pieces begin. It must say the same. Only under `round_robin_gradients` it
does not: it is then made from the order before the shuffle (utils/mixed_precision_linkage.py is given
`bit16_groups`, not `round_robin_bit16_groups`), unless there is padding between the parameters.

Stage 3 cuts every parameter into W equal pieces, and a rank's pieces lie behind each other.
A piece has ceil(numel / W) elements; the last ones of a parameter are padding. A rank's pieces fill its sub-groups in
the order of `param_shapes`, which counts sub-groups too. Their borders need not be those of the parameters: a piece
may straddle two. Frozen parameters are cut alike, one tensor each, in `frozen_param_fragments` of the model files.
Source: runtime/zero/stage3.py (`_rigid_state_dict`), partition_parameters.py, utils/zero_to_fp32.py, versions 0.8 to
0.19.8; checked on real files of 0.19.8.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from ckptools.formats.flat_parameters.flat_runs import RunBox, boxes_of
from ckptools.model.regions import Box, Ints, chunk, contiguous_strides
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.values import Opaque

Where = tuple[int, int, int]
"""`(mp, dp, group)`: the rank of a flat tensor, and its number."""

RankOf = Callable[[Where], int]
"""The global rank of a flat tensor."""


class PartitionRun(NamedTuple):
    """Consecutive elements of one parameter, from element `start` of it, which is element `at` of a flat tensor."""

    fqn: str
    start: int
    length: int
    where: Where
    at: int


def _cut(run: PartitionRun, borders: Sequence[int]) -> Iterator[PartitionRun]:
    """Cut a run at borders in what its `at` counts; one without elements stays one."""
    end = run.at + run.length
    for a, b in pairwise([run.at, *borders[bisect_right(borders, run.at) : bisect_left(borders, end)], end]):
        yield run._replace(start=run.start + a - run.at, length=b - a, at=a)


ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a buffer has a multiple of this many elements per rank."""


@dataclass(frozen=True)
class Group:
    """One param group's flat buffer of a model-parallel rank, which is cut over `world` ranks.

    The parameters are in order; `paddings` are the elements behind each that belong to none.
    """

    mp: int
    index: int
    shapes: Mapping[str, Ints]
    paddings: Sequence[int]
    world: int

    @cached_property
    def numel(self) -> int:
        """Elements of the group up to the end of its last parameter, the end padding left out."""
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
    """Why a group cannot be put together, and the rank of the file that shows it."""

    rank: int
    why: str


def partition_length(group: Group, master: Mapping[int, int], state: Mapping[int, set[int]]) -> int | Refusal:
    """Return the length of a partition, or why there is none: proven by the lengths of the fp32 copy, by rank.

    The lengths of the optimizer's 1-D tensors, by rank, choose between two that fit.
    """
    n, world = group.numel, group.world
    # Before 0.5 the buffer was a multiple of W only.
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
    """Whether the mappings are those of the same parameters in another order: before a round-robin shuffle.

    Only the mappings of all ranks together show that order.
    """
    order = dict.fromkeys(fqn for _, addresses in sorted(mappings.items()) for fqn in addresses)
    left = {fqn for fqn, shape in group.shapes.items() if prod(shape)}
    if any(group.paddings) or len(mappings) != group.world or left != set(order):
        return False
    before = Group(group.mp, group.index, {f: group.shapes[f] for f in order}, [0] * len(order), group.world)
    return contradiction(before, partition, mappings) is None


def stage3_row_length(shapes: Mapping[str, Ints], world: int) -> int:
    """Elements that every rank holds of these parameters, padding included."""
    return sum(-(-prod(shape) // world) for shape in shapes.values())


def stage3_runs(
    mp: int, shapes: Mapping[str, Ints], world: int, groups: Sequence[int], ranks: Iterable[int]
) -> Iterator[PartitionRun]:
    """The runs of every parameter that some of the `world` ranks hold.

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

    Runs of a tied parameter in several pipeline stages are cut at the same places, so that they are replicas. A
    parameter without elements is placed in the first flat tensor, whose dtype it has.
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
    """The shards of a parameter, or of one slot of its state; without a source where the flat tensor was not read."""
    return tuple(place.box.shard_in(flats.get(place.where)) for place in placed)
