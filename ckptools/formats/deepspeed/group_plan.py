"""Layout of ZeRO-1 and 2: one flat partition per rank and param group; experts over the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckptools.formats.deepspeed import zero_stages
from ckptools.formats.deepspeed.experts import ExpertError, ExpertLayout, global_shapes, globally, local_counts
from ckptools.formats.deepspeed.partition_layout import PartitionLayout
from ckptools.formats.deepspeed.states import ModelStates, OptimStates, Shapes
from ckptools.formats.deepspeed.zero_stages import Group, PartitionRun, Refusal
from ckptools.formats.flat_parameters.flat_runs import flat_source
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Ints

BESIDE = (
    "expert parameters beside pipeline stages or tensor-parallel ranks, and nothing in the files says which ranks "
    "share an expert"
)
SHUFFLED = Problem(
    Code.LAYOUT_DISAGREES,
    "round_robin_gradients: param_slice_mappings has the order before the shuffle, param_shapes that of the buffer, "
    "which is taken",
    severity="note",
)


def plan_groups(
    layout: PartitionLayout,
    groups: list[Shapes],
    model: ModelStates | None,
    optims: Mapping[int, OptimStates],
    experts: ExpertLayout | None,
) -> None:
    """ZeRO-1 and 2: one partition per rank and group."""
    first = optims[min(optims)]
    for dp, optim in sorted(optims.items()):
        if (found := len(optim.masters)) != len(groups):
            text = f"rank {dp}: {found} flat groups, expected {len(groups)} as param_shapes has"
            layout.refuse(layout.shapes, text, dp)
            return
    if layout.refuses_other_state(optims, len(groups)):
        return
    counts = first.counts * (len(groups) if len(first.counts) == 1 else 1)
    local = local_counts(fqn for shapes in groups for fqn in shapes)
    for k, shapes in enumerate(groups):
        world = counts[k] if k < len(counts) else layout.world
        layout.lengths.append(0)
        group = Group(layout.mp, k, shapes, first.paddings(k, len(shapes)), world)
        if world == layout.world:
            _plan_group(layout, _Holders(group, range(world)), model, optims)
        else:
            _plan_experts(layout, group, model, optims, (experts, local))


@dataclass(frozen=True)
class _Holders:
    """A param group's flat buffer and the data-parallel ranks that hold it, in the order of its partitions.

    `runs_of` turns a run of the rank's parameters into runs of those of the whole model.
    """

    group: Group
    ranks: Sequence[int]
    runs_of: Callable[[PartitionRun], Iterable[PartitionRun]] = lambda run: [run]


def _plan_experts(
    layout: PartitionLayout,
    group: Group,
    model: ModelStates | None,
    optims: Mapping[int, OptimStates],
    known: tuple[ExpertLayout | None, Mapping[str, int]],
) -> None:
    """Parameters of experts: each expert-parallel rank has its own, cut over the ranks that share them.

    Known are the experts, and how many each layer's rank has at least.
    """
    experts, local = known
    try:
        if experts is None:
            raise ExpertError(BESIDE)
        ranks = experts.ranks(layout.world, group.world)
        placed = {f: experts.placed(f, shape, len(ranks), local) for f, shape in group.shapes.items()}
    except ExpertError as error:
        layout.refused |= dict.fromkeys(group.shapes, str(error))
        return
    shapes = global_shapes(dict(group.shapes), placed)
    layout.shapes = {f: shape for f, shape in layout.shapes.items() if f not in group.shapes} | shapes
    layout.groups[group.index] = list(shapes)
    for e, own in enumerate(ranks):
        numbers = {fqn: of_ranks[e] for fqn, of_ranks in placed.items()}
        holders = _Holders(group, own, partial(_spread, numbers, group.shapes))
        _plan_group(layout, holders, model, {dp: optims[dp] for dp in own if dp in optims})


def _spread(
    numbers: Mapping[str, Sequence[int]], shapes: Mapping[str, Ints], run: PartitionRun
) -> Iterable[PartitionRun]:
    return globally(run, numbers[run.fqn], shapes[run.fqn])


def _plan_group(
    layout: PartitionLayout, holders: _Holders, model: ModelStates | None, optims: Mapping[int, OptimStates]
) -> None:
    group, ranks = holders.group, holders.ranks
    names = layout.groups[group.index]
    lengths: dict[int, int] = {}
    for place, dp in enumerate(ranks):
        row = flat_source(optims[dp].masters[group.index]) if dp in optims else None
        if row is not None:
            lengths[place] = row.shape[0]
        elif dp in optims:
            text = f"group {group.index}, rank {dp}: no flat fp32 tensor in {optims[dp].path.name}"
            layout.refuse(names, text, dp)
            return
    state = {place: _state_lengths(optims[ranks[place]], group.index) for place in lengths}
    partition = zero_stages.partition_length(group, lengths, state)
    odd = partition if isinstance(partition, Refusal) else _unlike_mappings(layout, holders, partition, model, optims)
    if odd is not None:
        layout.refuse(names, odd.why, ranks[odd.rank])
    elif isinstance(partition, int):
        layout.lengths[group.index] = partition
        for run in group.runs(partition):
            here = run._replace(where=(layout.mp, ranks[run.where[1]], group.index))
            layout.add(holders.runs_of(here))


def _state_lengths(optim: OptimStates, group: int) -> set[int]:
    values = (value for entry in optim.slots[group : group + 1] for value in entry.values())
    return {source.shape[0] for source in map(flat_source, values) if source is not None}


def _unlike_mappings(
    layout: PartitionLayout,
    holders: _Holders,
    partition: int,
    model: ModelStates | None,
    optims: Mapping[int, OptimStates],
) -> Refusal | None:
    """Compare the layout with `param_slice_mappings`, where there are any; return how they disagree."""
    group = holders.group
    found = {place: optims[dp].mappings() for place, dp in enumerate(holders.ranks) if dp in optims}
    mappings = {dp: m for dp, maps in found.items() if group.index < len(maps) and (m := maps[group.index]) is not None}
    odd = zero_stages.contradiction(group, partition, mappings)
    if odd is None:
        confirmed = mappings or not any(group.paddings)
        return None if confirmed else Refusal(min(found), "padding between parameters, and nothing that confirms it")
    if model is not None and model.config("zero_optimization", "round_robin_gradients") is True:
        if len(mappings) < group.world:
            # Only all mappings together show the order before the shuffle; until then nothing is wrong.
            return None
        if zero_stages.shuffled(group, partition, mappings):
            layout.problems += [SHUFFLED] if SHUFFLED not in layout.problems else []
            return None
    return odd
