"""Layout of every trainable parameter of one model-parallel rank in the flat tensors of its ZeRO ranks.

The stored lengths must be those that names, shapes and the number of ranks give. Where they are not, the
parameters are refused, with the rank, the group and the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckptools.formats.deepspeed import zero_stages
from ckptools.formats.deepspeed.experts import ExpertError, ExpertLayout, global_shapes, globally, local_counts
from ckptools.formats.deepspeed.states import ModelStates, OptimStates, Shapes, joined_groups
from ckptools.formats.deepspeed.zero_stages import Group, PartitionRun, Refusal
from ckptools.formats.flat_parameters.flat_runs import flat_source
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor

MAX_WORLD = 1 << 16
"""Most ranks that a group may be cut over; no cluster has more."""

NO_OPTIMIZER = "its fp32 copy is in optimizer states files that are not here; --weights module takes the module's copy"
EXPERTS = "expert parameters of ZeRO-3 are cut over fewer ranks than the others, and are not joined"
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


@dataclass
class PartitionLayout:
    """Layout of the trainable parameters of one model-parallel rank in the flat tensors of its ZeRO ranks.

    Attributes:
        groups: names of the parameters by flat tensor: param group, or sub-group in ZeRO-3.
        lengths: elements of each flat tensor, padding included.
        world: ranks that it is cut over; 0 when unknown.
        refused: why a parameter has no place.
        problems: what is wrong with the layout; their ranks are those in the ZeRO group.
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


def plan_partitions(
    mp: int,
    model: ModelStates | None,
    optims: Mapping[int, OptimStates],
    ranks: Iterable[int],
    experts: ExpertLayout | None,
) -> PartitionLayout:
    """Compute where every trainable parameter of a model-parallel rank lies.

    Its optimizer states are by rank in the ZeRO group. Only the runs of `ranks` are listed; ZeRO-3 may have very many.
    Without `experts` those that are spread over ranks are refused.
    """
    layout = PartitionLayout(mp)
    groups = _groups(model, optims)
    layout.groups = [list(shapes) for shapes in groups]
    layout.shapes = {fqn: shape for shapes in groups for fqn, shape in shapes.items()}
    if not optims:
        layout.refused = dict.fromkeys(layout.shapes, NO_OPTIMIZER)
    elif not _worlds(layout, model, optims):
        layout.refused = dict.fromkeys(layout.shapes, "the files disagree on the number of ranks")
    elif next(iter(optims.values())).sharded:
        _plan_stage3(layout, groups, optims, ranks)
    else:
        _plan_groups(layout, groups, model, optims, experts)
    return layout


def element_counts(layouts: Iterable[PartitionLayout]) -> Counter[tuple[int, int]]:
    """Elements of parameters that each rank holds, by `(mp, dp)`; padding is left out."""
    counts: Counter[tuple[int, int]] = Counter()
    for layout in layouts:
        for run in (run for runs in layout.runs.values() for run in runs):
            counts[run.where[:2]] += run.length
    return counts


def _groups(model: ModelStates | None, optims: Mapping[int, OptimStates]) -> list[Shapes]:
    """`param_shapes`; without them (BF16_Optimizer without ZeRO), the mappings of all ranks in their order."""
    stated = model.groups if model is not None else None
    if stated is not None:
        return stated
    module = (model.module if model is not None else None) or {}
    shapes = {fqn: t.shape for fqn, t in module.items() if isinstance(t, Tensor)}
    mappings = (optim.mappings() for _, optim in sorted(optims.items()))
    return joined_groups([{f: shapes[f] for f in group or () if f in shapes} for group in one] for one in mappings)


def _worlds(layout: PartitionLayout, model: ModelStates | None, optims: Mapping[int, OptimStates]) -> bool:
    """Whether all files state the same number of ranks."""
    first = min(optims)
    counts = optims[first].counts
    # A model whose trainable parameters all are experts' has no group that is cut over all ranks.
    spread = model is not None and model.tree.get("num_experts") is not None
    layout.world = max(*counts, model.number("dp_world_size") or 0) if model is not None and spread else max(counts)
    odd = tuple(dp for dp, optim in sorted(optims.items()) if optim.counts != counts)
    if odd:
        text = f"partition_count {optims[odd[0]].counts}, rank {first} has {counts}; the files are not of one run"
        layout.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text, odd[0], ranks=odd))
    if layout.world > MAX_WORLD:
        text = f"partition_count {layout.world} is more than any cluster has"
        layout.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, text, first))
        layout.world = 0
    return not layout.problems


def _plan_stage3(
    layout: PartitionLayout, groups: list[Shapes], optims: Mapping[int, OptimStates], ranks: Iterable[int]
) -> None:
    """ZeRO-3: one row of pieces per rank, in its sub-groups."""
    first = min(optims)
    lengths = _lengths(optims[first])
    wanted = zero_stages.stage3_row_length(layout.shapes, layout.world)
    for dp, optim in sorted(optims.items()):
        here = _lengths(optim)
        if sum(here) != wanted or here != lengths:
            text = (
                f"rank {dp}: {sum(here)} elements in {len(here)} sub-groups ({', '.join(map(str, here[:8]))}), "
                f"expected {wanted} for pieces of {len(layout.shapes)} parameters over {layout.world} ranks"
            )
            swapped = (optim.path.parent / "offloaded_tensors").is_dir()
            why = "swapped out to offloaded_tensors" if swapped else "the files are not of one run, or damaged"
            layout.refuse(layout.shapes, f"{text}; {why}", dp)
            return
    if _other_state(layout, optims, len(lengths)) or not lengths:
        return
    layout.lengths = lengths
    names: list[dict[str, None]] = [dict.fromkeys(g) for g in layout.groups] if len(groups) == len(lengths) else []
    names = names or [{} for _ in lengths]
    for run in zero_stages.stage3_runs(layout.mp, layout.shapes, layout.world, lengths, ranks):
        layout.add([run])
        names[run.where[2]][run.fqn] = None
    layout.groups = [list(group) for group in names]
    _refuse_other_partitions(layout, optims[first])


def _other_state(layout: PartitionLayout, optims: Mapping[int, OptimStates], groups: int) -> bool:
    """Refuse when the optimizer numbers other things than the flat tensors."""
    for dp, optim in sorted(optims.items()):
        if (found := len(optim.slots)) not in (0, groups):
            text = f"rank {dp}: the optimizer's state is of {found} tensors, expected {groups} flat ones"
            layout.refuse(layout.shapes, text, dp)
            return True
    return False


def _lengths(optim: OptimStates) -> list[int]:
    """Lengths of the flat tensors; 0 for anything else."""
    return [source.shape[0] if source is not None else 0 for source in map(flat_source, optim.masters)]


def _refuse_other_partitions(layout: PartitionLayout, optim: OptimStates) -> None:
    """Expert parameters of AutoEP are cut over their own ranks, which differ from expert to expert."""
    cuts = optim.tree.get("ds_zero_partition_groups")
    for k, cut in enumerate(cuts if isinstance(cuts, (list, tuple)) else ()):
        count = cut.get("partition_count") if isinstance(cut, dict) else None
        if count not in (None, layout.world) and k < len(layout.groups):
            layout.refused |= dict.fromkeys(layout.groups[k], EXPERTS)


def _plan_groups(
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
    if _other_state(layout, optims, len(groups)):
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
