"""Read one tag folder of DeepSpeed, joined from its model states, optimizer states and experts' files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.deepspeed import weights, zero_stages
from ckptools.formats.deepspeed.assembler import CutRules, ZeroAssembler, frozen_parameters, joined
from ckptools.formats.deepspeed.files import (
    GROUPED,
    Files,
    RankLayout,
    expected_bytes,
    leftover_files,
    list_files,
    model_parallel,
    path_of_step,
)
from ckptools.formats.deepspeed.weights import ExpertError, ExpertLayout, global_shapes, globally, local_counts
from ckptools.formats.deepspeed.zero_stages import (
    LAYOUT,
    MAX_WORLD,
    Group,
    ModelStates,
    OptimStates,
    PartitionLayout,
    PartitionRun,
    Refusal,
    Shapes,
    in_order_of_first,
    joined_groups,
)
from ckptools.formats.flat_parameters.units import flat_source
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault
from ckptools.formats.shared.merge import Merge
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Ints
from ckptools.model.tensor import Rounded, Tensor
from ckptools.option import spelled
from ckptools.rules.files import misplaced
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

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
    """Plan ZeRO-1 and 2: one partition per rank and group."""
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
            _plan_experts(layout, group, model, optims, experts, local)


@dataclass(frozen=True)
class _Holders:
    """A param group's flat buffer and the data-parallel ranks that hold it, in the order of its partitions.

    `runs_of` maps a run of the rank's parameters to runs of the whole model's parameters.
    """

    group: Group
    ranks: Sequence[int]
    runs_of: Callable[[PartitionRun], Iterable[PartitionRun]] = lambda run: [run]


def _plan_experts(
    layout: PartitionLayout,
    group: Group,
    model: ModelStates | None,
    optims: Mapping[int, OptimStates],
    experts: ExpertLayout | None,
    local: Mapping[str, int],
) -> None:
    """Plan parameters of experts: each expert-parallel rank has its own, cut over the ranks that share them.

    `local` is the minimal number of experts per rank of each layer.
    """
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
    """Compare the layout with `param_slice_mappings`, if there are any; return the contradiction."""
    group = holders.group
    found = {place: optims[dp].mappings() for place, dp in enumerate(holders.ranks) if dp in optims}
    mappings = {dp: m for dp, maps in found.items() if group.index < len(maps) and (m := maps[group.index]) is not None}
    odd = zero_stages.contradiction(group, partition, mappings)
    if odd is None:
        confirmed = mappings or not any(group.paddings)
        return None if confirmed else Refusal(min(found), "padding between parameters, and nothing that confirms it")
    if model is not None and model.config("zero_optimization", "round_robin_gradients") is True:
        if len(mappings) < group.world:
            # Only all mappings together show the order before the shuffle; without all of them nothing is wrong.
            return None
        if zero_stages.shuffled(group, partition, mappings):
            layout.problems += [SHUFFLED] if SHUFFLED not in layout.problems else []
            return None
    return odd


EXPERTS = "expert parameters of ZeRO-3 are cut over fewer ranks than the others, and are not joined"
MAX_ABSENT = 256
"""At most this many ranks without a file get lost pieces of their own; a forged count may be huge."""


def plan_partitions(
    mp: int,
    model: ModelStates | None,
    optims: Mapping[int, OptimStates],
    ranks: Iterable[int],
    experts: ExpertLayout | None,
) -> PartitionLayout:
    """Compute the place of every trainable parameter of a model-parallel rank from names, shapes and number of ranks.

    Parameters whose computed lengths contradict the stored ones are refused. `optims` are by rank in the ZeRO group.
    Only the runs of `ranks` are listed; ZeRO-3 may have very many. Without `experts`, parameters spread over expert
    ranks are refused.
    """
    layout = PartitionLayout(mp)
    groups = _groups(model, optims)
    layout.groups = [list(shapes) for shapes in groups]
    layout.shapes = {fqn: shape for shapes in groups for fqn, shape in shapes.items()}
    if not optims:
        way = f"{spelled('weights', 'module')} takes the module's copy"
        why = f"its fp32 copy is in optimizer states files that are not here; {way}"
        layout.refused = dict.fromkeys(layout.shapes, why)
    elif not _worlds(layout, model, optims):
        layout.refused = dict.fromkeys(layout.shapes, "the files disagree on the number of ranks")
    elif model is None and not layout.shapes:
        pass  # the content of the partitions is unknown; the missing model states have a problem of their own
    elif next(iter(optims.values())).sharded:
        _plan_stage3(layout, groups, optims, ranks)
    else:
        plan_groups(layout, groups, model, optims, experts)
    return layout


def _groups(model: ModelStates | None, optims: Mapping[int, OptimStates]) -> list[Shapes]:
    """`param_shapes`; without it (BF16_Optimizer without ZeRO), the mappings of all ranks in their order."""
    stated = model.groups if model is not None else None
    if stated is not None:
        return stated
    module = (model.module if model is not None else None) or {}
    shapes = {fqn: t.shape for fqn, t in module.items() if isinstance(t, Tensor)}
    mappings = (optim.mappings() for _, optim in sorted(optims.items()))
    return joined_groups([{f: shapes[f] for f in group or () if f in shapes} for group in one] for one in mappings)


def _worlds(layout: PartitionLayout, model: ModelStates | None, optims: Mapping[int, OptimStates]) -> bool:
    """Check that all files state the same number of ranks."""
    first = min(optims)
    counts = optims[first].counts
    # A model whose trainable parameters all belong to experts has no group that is cut over all ranks.
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
    """Plan ZeRO-3: one row of pieces per rank, in its sub-groups."""
    first = min(optims)
    lengths = _lengths(optims[first])
    wanted = sum(-(-prod(shape) // layout.world) for shape in layout.shapes.values())
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
    # Expert parameters of AutoEP are cut over their own ranks, which differ from expert to expert.
    cuts = optims[first].tree.get("ds_zero_partition_groups")
    for k, cut in enumerate(cuts if isinstance(cuts, (list, tuple)) else ()):
        count = cut.get("partition_count") if isinstance(cut, dict) else None
        if count not in (None, layout.world) and k < len(layout.groups):
            layout.refused |= dict.fromkeys(layout.groups[k], EXPERTS)


def _lengths(optim: OptimStates) -> list[int]:
    """Lengths of the flat tensors; 0 for any other value."""
    return [source.shape[0] if source is not None else 0 for source in map(flat_source, optim.masters)]


TENSOR_PARALLEL = (
    "tensor-parallel over {} ranks, and nothing in the files says along which dimension it was cut (no "
    "universal_checkpoint_info, or a pipeline too); convert it with DeepSpeed's ds_to_universal.py and open that"
)

NOT_JOINED = (
    "without ZeRO each tensor-parallel rank saves an optimizer of its own, whose moments are of its slices and are not "
    "joined"
)

NO_MODEL = "holds no model states (*_model_states.pt), and only they have the names and shapes of the parameters"


class TagFolder:
    """One tag folder while it is opened."""

    def __init__(self, builder: CheckpointBuilder, files: Files) -> None:
        self.builder, self.problems, self.files = builder, builder.problems, files
        self.all_ranks = files.options.all_ranks
        self.merge = Merge()
        # Read one file of each kind and model-parallel rank, or all files; and every layer.
        files.read_all(n for n in files.names if n.path == files.must)
        files.read_all([*files.of("layer"), *files.of("expert"), *files.of("expert optim")])
        if self.all_ranks:
            files.read_all(files.names)
        files.read_one_of_each("model")
        files.read_one_of_each("optim")
        if any(m.groups is None for m in files.models().values()):
            # Without param_shapes only the mappings of all ranks together give the order of the parameters.
            files.read_all(files.of("optim"))
        self.models, self.optims = files.models(), in_order_of_first(files.optims())
        if not self.models:
            first = next((n.path for n in files.of("model")), files.folder)
            fault = files.faults.get(first, Fault(NO_MODEL, "damaged"))
            raise ReadError(first, fault.reason, fault.kind)
        self.base = self.models[min(self.models)]
        self.sharded = any(o.sharded for o in self.optims.values()) or any(n.dp is not None for n in files.of("model"))
        mps, tp = model_parallel(files, self.models)
        trees = ((name, files.tree(name)) for name in files.of("expert"))
        self.expert_trees = [(name, tree) for name, tree in trees if tree is not None]
        self.experts = ExpertLayout.of(self.base, self.expert_trees) if mps == 1 else None
        self.layouts = {mp: self._layout(mp) for mp in range(mps)}
        dp = max([self.base.number("dp_world_size") or 1, *(p.world for p in self.layouts.values())])
        self.ranks = RankLayout(min(dp, MAX_WORLD), mps, tp)
        # How tensor-parallel ranks cut the parameters, if stated and without a pipeline.
        info = self.base.tree.get("universal_checkpoint_info")
        self.cut = CutRules(info) if isinstance(info, dict) and 1 < self.ranks.tp == mps else None
        # Number of ranks over which each model-parallel rank's parameters are cut; a missing one's equals the others'.
        usual = next((p.world for p in self.layouts.values() if p.world), self.ranks.dp)
        self.worlds = {mp: layout.world or usual for mp, layout in self.layouts.items()}
        self.rounded: tuple[Rounded, ...] = ()

    def _layout(self, mp: int) -> PartitionLayout:
        optims = {dp: o for (m, dp), o in self.optims.items() if m == mp}
        model = next((m for (of, _), m in sorted(self.models.items()) if of == mp), None)
        here = {n.dp or 0 for n in self.files.of("optim") if n.mp == mp}
        counts = next(iter(optims.values())).counts if optims else [1]
        absent = [dp for dp in range(min(max(counts), MAX_WORLD)) if dp not in here][:MAX_ABSENT]
        return plan_partitions(
            mp, model, optims, sorted({d for d in here if d < max(counts)} | set(absent)), self.experts
        )

    def checkpoint(self) -> Checkpoint:
        """Assemble the checkpoint from the files that were read."""
        assembler = ZeroAssembler(self.layouts, self.optims, self.ranks.of, self.ranks.world)
        if self.cut is not None:
            assembler.join_slices(self.cut, self.ranks.tp)
        elif self.ranks.tp > 1:
            assembler.refused = dict.fromkeys(assembler.shapes, TENSOR_PARALLEL.format(self.ranks.tp))
        else:
            assembler.check_shapes()
        tree = self._tree(assembler)
        files = (*list_files(self.files, self.ranks, self.worlds, self.sharded, self._prefix()), *self._lost_experts())
        found = rank_checks.compare_ranks(self.merge, tree, assembler.differing)
        self.builder.unequal |= assembler.unequal
        tree = found.tree
        sections = find_sections(tree)
        self.problems += rank_checks.check_files(files, self.files.faults, self.ranks.world, True)
        for mp, layout in self.layouts.items():
            self.problems += (
                p if p.rank is None else replace(p, rank=self.ranks.of((mp, p.rank))) for p in layout.problems
            )
        self.problems += assembler.problems
        self.problems += self._unnamed_parts()
        self.problems += weights.without_frozen(self.base, self.stage)
        self.builder.add_rank_values(found)
        self.problems += leftover_files(self.files, self.ranks, self.worlds, self.base)
        self.problems += misplaced(weights.claims_of(self.expert_trees))
        self.builder.add_saved(self.files.saved.values())
        return self.builder.checkpoint(
            name=self.files.folder.name,
            saved_as=self._saved_as(),
            tree=tree,
            files=files,
            world_size=self._world_size(),
            step=find_step(path_of_step(self.files.folder), tuple(s for s in sections if s.path == ("global_steps",))),
            module_order=GROUPED,
            all_ranks=self.all_ranks,
            bytes_expected=expected_bytes(files),
            rounded=self.rounded,
        )

    def _unnamed_parts(self) -> Iterator[Problem]:
        """Find pipeline stages without model states, which alone name the parameters in a rank's flat partitions.

        Tensor-parallel ranks have the same parameters; a missing rank is noted in each tensor.
        """
        here = {mp for mp, _ in self.models}
        for mp in sorted({*range(self.ranks.mps)} - here) if self.ranks.tp == 1 else ():
            text = f"no model states of stage {mp} can be read, which alone name what the stage had of the optimizer"
            yield Problem(Code.MODEL_PART_MISSING, text, self.ranks.of((mp, 0)))

    def _lost_experts(self) -> Iterator[RankFile]:
        """List missing files of experts; ZeRO-3 writes none, and with several stages no file states their owners."""
        if self.experts is None or self.sharded:
            return
        lost = [*weights.missing_files(self.files.of("expert"), self.experts)]
        if not self.optims:
            lost += weights.missing_optimizers(self.files.of("expert optim"), self.base.tree.get("optimizer"))
        for name in lost:
            yield RankFile(self.files.folder / name, None, name.removesuffix(".pt"), "missing", 0, None)

    def _tree(self, assembler: ZeroAssembler) -> dict[Any, Any]:
        rest = self._rest()
        tree: dict[Any, Any] = {"model": self._model(assembler)}
        if self.optims:
            rest.pop("optimizer", None)
            tree["optimizer"] = {"state": assembler.state(), "param_groups": assembler.param_groups()}
        clashing = {k: rest.pop(k) for k in ("model", "zero_optimizer") if k in rest}
        tree |= {k: v for k, v in rest.items() if k != "optimizer" or v is not None}
        if clashing:
            tree["client_state"] = clashing
        if self.optims:
            ranked = [(self.ranks.of(place), optim.others()) for place, optim in self.optims.items()]
            tree["zero_optimizer"] = self.merge.trees(sorted(ranked, key=lambda r: r[0]), ("zero_optimizer",))
        return tree

    def _rest(self) -> dict[Any, Any]:
        """Other values of the model states; they are equal in every file but for a few keys."""
        ranked = []
        optimizers = {mp: m.tree["optimizer"] for (mp, _), m in self.models.items() if m.tree.get("optimizer")}
        for place, model in sorted(self.models.items()):
            own = ("buffer_names", "shared_params") if model is not self.base else ()
            kept = {k: v for k, v in model.tree.items() if k not in (*LAYOUT, "optimizer", *own)}
            ranked.append((self.ranks.of(place), kept))
        rest = self.merge.trees(sorted(ranked, key=lambda r: r[0]))
        if optimizers:
            if self.ranks.tp > 1:
                optimizers = {mp: _of_one_rank(optimizer) for mp, optimizer in optimizers.items()}
            by_stage = {f"mp_rank_{mp:02d}": optimizer for mp, optimizer in sorted(optimizers.items())}
            rest["optimizer"] = optimizers[0] if list(optimizers) == [0] else by_stage
        of_experts = ((name.expert, self.files.tree(name)) for name in self.files.of("expert optim"))
        saved = {f"expp_rank_{e}": tree.get("optimizer") for e, tree in of_experts if tree is not None}
        # Without ZeRO every expert-parallel rank saves its optimizer; the model states repeat the first one's.
        rest |= {"optimizer": saved} if saved and not self.optims else {}
        return dict(rest)

    def _model(self, assembler: ZeroAssembler) -> dict[str, Any]:
        """The model, from the optimizer's fp32 copy or the module, with notes on parameters that cannot be read."""
        low = self.files.options.weights == "module"
        optimizer = self.base.tree.get("optimizer")
        if isinstance(optimizer, dict) and not low and {"fp32_groups_flat", "fp32_groups"} & set(optimizer):
            text = "the fp32 copy in optimizer has no names and is not used; the model is the module's own weights"
            self.problems.append(Problem(Code.TENSOR_NOT_JOINED, text, severity="note"))
        if self.base.module is None:
            model = self._pipeline(assembler, low)
        else:
            here = ((place, model) for place, model in sorted(self.models.items()) if place[0] == self.base.mp)
            self.problems += weights.differing_buffers([(self.ranks.of(place), m.module or {}) for place, m in here])
            base = self._joined_module() if self.cut is not None else self.base
            self.problems += weights.mismatched_shapes(base, assembler.shapes, self.sharded)
            shapes = {**assembler.shapes, **base.frozen}
            masters = assembler.masters_by_name() if not low else {}
            if low:
                model = weights.module_model(base, shapes, self.sharded)
            else:
                ahead = list(weights.ahead_of_fp32(base))
                self.problems += ahead
                self.rounded = () if ahead else tuple(Rounded.pairs(masters, base.module or {}, "model."))
                model = weights.fp32_model(base, masters, self.frozen, self.sharded)
        own = weights.own_weights(self.expert_trees)
        model |= {fqn: t for fqn, t in own.items() if fqn not in model}
        if self.ranks.tp > 1 and self.cut is None:
            why = TENSOR_PARALLEL.format(self.ranks.tp)
            return {k: replace(v, shards=(), note=why) if isinstance(v, Tensor) else v for k, v in model.items()}
        return model

    def _joined_module(self) -> ModelStates:
        """The model states with the weights of all tensor-parallel ranks joined; buffers are the first rank's."""
        assert self.cut is not None
        first = {mp: model for (mp, _), model in sorted(self.models.items(), reverse=True)}
        ranked = [(self.ranks.of((mp, 0)), first[mp].module or {}) for mp in sorted(first)]
        buffers = self.base.buffers
        self.problems += weights.differing_buffers([(r, {f: m[f] for f in buffers if f in m}) for r, m in ranked])
        whole = {f: t if f in buffers else joined(f, ranked, self.cut, self.ranks.tp) for f, t in ranked[0][1].items()}
        return replace(self.base, tree={**self.base.tree, "module": whole})

    def _pipeline(self, assembler: ZeroAssembler, low: bool) -> dict[str, Any]:
        layers: dict[int, dict[str, Any]] = {}
        for name in self.files.of("layer"):
            tree = self.files.tree(name) or {}
            layers.setdefault(name.layer or 0, {k: v for k, v in tree.items() if isinstance(k, str)})
        self.problems += weights.ambiguous_tied_modules(layers, assembler.shapes)
        if self.ranks.tp == 1:
            self.problems += weights.missing_layers(layers, assembler.shapes)
            self.problems += weights.misplaced_layers(layers, assembler.shapes)
        if low:
            return weights.module_pipeline(layers, assembler.shapes)
        masters = assembler.masters_by_name()
        self.rounded = tuple(Rounded.pairs(masters, weights.module_pipeline(layers, assembler.shapes), "model."))
        return weights.fp32_pipeline(layers, masters)

    @cached_property
    def frozen(self) -> dict[str, Tensor]:
        """Frozen parameters of which every rank's model states have a piece."""
        if not self.sharded:
            return {}
        models = [m for (mp, _), m in sorted(self.models.items()) if mp == self.base.mp]
        return frozen_parameters(models, min(self.worlds[0], MAX_WORLD), self.ranks.of, self.ranks.world)

    def _prefix(self) -> str | None:
        """Prefix of the names of optimizer states; None without ZeRO."""
        if not self.optims and all(m.groups is None for m in self.models.values()):
            return None
        named = next((n.path.name.partition("zero_pp")[0] for n in self.files.of("optim")), None)
        return named if named is not None else "bf16_" if self._precision() == "bf16" else ""

    def _precision(self) -> str:
        kinds = [kind for kind in ("bf16", "bfloat16", "fp16") if self.base.config(kind, "enabled") is True]
        return (kinds[0] if kinds else "fp32").replace("bfloat16", "bf16")

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 where no file states it."""
        stage = next((o.stage for o in self.optims.values() if o.stage is not None), None)
        stage = self.base.config("zero_optimization", "stage") if stage is None else stage
        return stage if type(stage) is int else 0

    def _saved_as(self) -> str:
        words = [f"DeepSpeed ZeRO-{self.stage}", self._precision()]
        words += [f"pipeline of {max(1, self.ranks.mps // self.ranks.tp)} stages"] if self.base.module is None else []
        words += [f"tensor parallel over {self.ranks.tp}"] if self.ranks.tp > 1 else []
        words += ["experts in files of their own"] if self.files.of("expert") else []
        return ", ".join(words)

    def _world_size(self) -> Fact:
        world = self.ranks.world
        cut = {p.world * self.ranks.mps for p in self.layouts.values() if p.world}
        stated = (self.base.number("dp_world_size") or 0) * self.ranks.mps
        sources = (["partition_count"] if world in cut else []) + (["dp_world_size"] if stated else [])
        agree = not stated or max(cut, default=0) <= stated
        return Fact(world, tuple(sources) or (FILES_FOUND,), agree)


def _of_one_rank(node: Any) -> Any:
    """The optimizer of a tensor-parallel rank, with a note on each tensor other than single numbers."""
    if isinstance(node, Tensor):
        way = f"{spelled('only', 'model')} writes the model"
        return replace(node, note=node.note or f"{NOT_JOINED}; {way}") if node.shape else node
    if isinstance(node, dict):
        return {key: _of_one_rank(value) for key, value in node.items()}
    return [_of_one_rank(value) for value in node] if type(node) is list else node
