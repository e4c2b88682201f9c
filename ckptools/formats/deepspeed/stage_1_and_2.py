"""ZeRO stages 1 and 2, and BF16_Optimizer: one flat buffer per param group, cut into equal partitions.

A group's parameters lie behind each other in the order of `param_shapes`, which is that of the buffer itself, also
under `round_robin_gradients`. The buffer is padded at its end to a multiple of 2 x W and cut into W partitions of P
elements, so that rank d holds elements d·P to (d + 1)·P. Since 0.19.8 padding may lie behind each parameter too
(`param_alignment_paddings`). Source: runtime/zero/stage_1_and_2.py (`__init__`, `state_dict`), bf16_optimizer.py,
utils/zero_to_fp32.py, versions 0.8 to 0.19.8; checked on real files of 0.19.8.

What is stored of a partition: the fp32 copy without the padding that `group_paddings` counts (up to 0.16.3 on the last
rank only, so that others may keep some; BF16_Optimizer keeps all), the optimizer's state with all P elements, or cut
like the fp32 copy in an elastic checkpoint. Only elements that belong to a parameter are taken.

`param_slice_mappings` says where a rank's pieces begin. It must say the same. Only under `round_robin_gradients` it
does not: it is then made from the order before the shuffle (utils/mixed_precision_linkage.py is given
`bit16_groups`, not `round_robin_bit16_groups`), unless there is padding between the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ckptools.formats.deepspeed.runs import Run
from ckptools.model.regions import Ints
from ckptools.model.values import Opaque

ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a buffer has a multiple of this many elements per rank."""


@dataclass(frozen=True)
class Group:
    """One param group's flat buffer.

    Attributes:
        mp: model-parallel rank that it belongs to.
        index: number of the group.
        shapes: the parameters in their order.
        paddings: elements behind each parameter that belong to none.
        world: ranks that it is cut over.
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

    def held(self, rank: int, partition: int) -> int:
        """How many elements of rank's partition lie before the end of the last parameter."""
        return min(max(self.numel - rank * partition, 0), partition)

    def runs(self, partition: int) -> Iterator[Run]:
        """The runs of every parameter, one for each partition that it lies in."""
        for fqn, start, n in self.places():
            done = 0
            while done < n:
                rank, at = divmod(start + done, partition)
                length = min(n - done, partition - at)
                yield Run(fqn, done, length, (self.mp, rank, self.index), at)
                done += length


@dataclass(frozen=True)
class Refusal:
    """Why a group cannot be put together.

    Attributes:
        rank: in whose file it shows.
        why: one line.
    """

    rank: int
    why: str


def partition_length(group: Group, master: Mapping[int, int], state: Mapping[int, set[int]]) -> int | Refusal:
    """The length of a partition, proven by the lengths of what is stored; or why there is none.

    Args:
        group: the group.
        master: length of the fp32 copy, by rank.
        state: lengths of the optimizer's 1-D tensors, by rank.
    """
    n, world = group.numel, group.world
    # Before 0.5 the buffer was a multiple of W only.
    candidates = dict.fromkeys([ALIGNMENT * -(-n // (ALIGNMENT * world)), -(-n // world)])
    fitting = [p for p in candidates if all(group.held(r, p) <= length <= p for r, length in master.items())]
    fitting.sort(key=lambda p: -sum(p in lengths for lengths in state.values()))
    if fitting:
        return fitting[0]
    p = next(iter(candidates))
    rank, length = next((r, k) for r, k in sorted(master.items()) if not group.held(r, p) <= k <= p)
    text = (
        f"group {group.index}, rank {rank}: {length} elements are stored, expected {group.held(rank, p)} to {p} of "
        f"{n} in {len(group.shapes)} parameters over {world} ranks; the files are not of one run, or damaged"
    )
    return Refusal(rank, text)


def mapped(mapping: Any) -> dict[str, tuple[int, int]] | None:
    """`{fqn: (start, elements)}` of one rank and group as `param_slice_mappings` says; None when it says nothing."""
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
    """How `param_slice_mappings` of the ranks contradicts the layout; None when they agree."""
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

    Only the mappings of all ranks together tell that order.
    """
    order = dict.fromkeys(fqn for _, addresses in sorted(mappings.items()) for fqn in addresses)
    left = {fqn for fqn, shape in group.shapes.items() if prod(shape)}
    if any(group.paddings) or len(mappings) != group.world or left != set(order):
        return False
    before = Group(group.mp, group.index, {f: group.shapes[f] for f in order}, [0] * len(order), group.world)
    return contradiction(before, partition, mappings) is None
