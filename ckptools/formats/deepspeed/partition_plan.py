"""Where every trainable parameter lies: what the names, shapes and number of ranks give for the stored lengths.

The stored lengths must be those. Where they are not, the parameters are refused, with the rank, the group and the
numbers. ZeRO-1 and 2 are in `group_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptools.formats.deepspeed import zero_stages
from ckptools.formats.deepspeed.experts import ExpertLayout
from ckptools.formats.deepspeed.group_plan import plan_groups
from ckptools.formats.deepspeed.partition_layout import MAX_WORLD, PartitionLayout
from ckptools.formats.deepspeed.states import ModelStates, OptimStates, Shapes, joined_groups
from ckptools.formats.flat_parameters.flat_runs import flat_source
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor

NO_OPTIMIZER = "its fp32 copy is in optimizer states files that are not here; --weights module takes the module's copy"
EXPERTS = "expert parameters of ZeRO-3 are cut over fewer ranks than the others, and are not joined"


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
    elif model is None and not layout.shapes:
        pass  # nothing shows what the partitions hold; that the model states are missing has its own problem
    elif next(iter(optims.values())).sharded:
        _plan_stage3(layout, groups, optims, ranks)
    else:
        plan_groups(layout, groups, model, optims, experts)
    return layout


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
    if layout.refuses_other_state(optims, len(lengths)) or not lengths:
        return
    layout.lengths = lengths
    names: list[dict[str, None]] = [dict.fromkeys(g) for g in layout.groups] if len(groups) == len(lengths) else []
    names = names or [{} for _ in lengths]
    for run in zero_stages.stage3_runs(layout.mp, layout.shapes, layout.world, lengths, ranks):
        layout.add([run])
        names[run.where[2]][run.fqn] = None
    layout.groups = [list(group) for group in names]
    _refuse_other_partitions(layout, optims[first])


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
