"""One tag folder of DeepSpeed, joined from its model states, optimizer states and experts' files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.deepspeed import experts, slices, weights
from ckptools.formats.deepspeed.assembler import ZeroAssembler, frozen_parameters
from ckptools.formats.deepspeed.beside import path_of_step
from ckptools.formats.deepspeed.experts import ExpertLayout
from ckptools.formats.deepspeed.files import (
    GROUPED,
    Files,
    RankLayout,
    expected_bytes,
    leftover_files,
    list_files,
    model_parallel,
)
from ckptools.formats.deepspeed.partition_layout import MAX_WORLD, PartitionLayout
from ckptools.formats.deepspeed.partition_plan import plan_partitions
from ckptools.formats.deepspeed.slices import CutRules
from ckptools.formats.deepspeed.states import LAYOUT, ModelStates, in_order_of_first
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault
from ckptools.formats.shared.merge import Merge
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Rounded, Tensor
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

TENSOR_PARALLEL = (
    "tensor-parallel over {} ranks, and nothing in the files says along which dimension it was cut (no "
    "universal_checkpoint_info, or a pipeline too); convert it with DeepSpeed's ds_to_universal.py and open that"
)

NOT_JOINED = (
    "without ZeRO each tensor-parallel rank saves an optimizer of its own, whose moments are of its slices and are not "
    "joined; --only model writes the model"
)

NO_MODEL = "holds no model states (*_model_states.pt), and only they have the names and shapes of the parameters"
MAX_ABSENT = 256
"""At most this many ranks without a file get lost pieces of their own; a forged count has no end."""


class TagFolder:
    """One tag folder, as it is opened."""

    def __init__(self, builder: CheckpointBuilder, files: Files) -> None:
        self.builder, self.problems, self.files = builder, builder.problems, files
        self.all_ranks = files.options.all_ranks
        self.merge = Merge()
        self._read()
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
        # How tensor-parallel ranks cut the parameters, where that is stated and there is no pipeline.
        info = self.base.tree.get("universal_checkpoint_info")
        self.cut = CutRules(info) if isinstance(info, dict) and 1 < self.ranks.tp == mps else None
        # How many ranks each model-parallel rank's parameters are cut over; a missing one's are like the others'.
        usual = next((p.world for p in self.layouts.values() if p.world), self.ranks.dp)
        self.worlds = {mp: layout.world or usual for mp, layout in self.layouts.items()}
        self.rounded: tuple[Rounded, ...] = ()

    def _read(self) -> None:
        """Read one file of each kind and model-parallel rank, or all of them; and every layer."""
        files = self.files
        files.read(n for n in files.names if n.path == files.must)
        files.read([*files.of("layer"), *files.of("expert"), *files.of("expert optim")])
        if self.all_ranks:
            files.read(files.names)
        files.read_one_of_each("model")
        files.read_one_of_each("optim")
        if any(m.groups is None for m in files.models().values()):
            # Without param_shapes only the mappings of all ranks together give the order of the parameters.
            files.read(files.of("optim"))

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
        """Assemble the checkpoint of what was read."""
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
        self.problems += experts.check_files(self.expert_trees)
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
        """Pipeline stages without model states: only these name the parameters of a rank's flat partitions.

        Tensor-parallel ranks have the same parameters; what one lacks is noted in each tensor.
        """
        here = {mp for mp, _ in self.models}
        for mp in sorted({*range(self.ranks.mps)} - here) if self.ranks.tp == 1 else ():
            text = f"no model states of stage {mp} can be read, which alone name what the stage had of the optimizer"
            yield Problem(Code.MODEL_PART_MISSING, text, self.ranks.of((mp, 0)))

    def _lost_experts(self) -> Iterator[RankFile]:
        """Files of experts that are not here; ZeRO-3 writes none, and of several stages no file says who has which."""
        if self.experts is None or self.sharded:
            return
        lost = [*experts.missing_files(self.files.of("expert"), self.experts)]
        if not self.optims:
            lost += experts.missing_optimizers(self.files.of("expert optim"), self.base.tree.get("optimizer"))
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
        """Other values of the model states; every file has the same but for a few keys."""
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
        # Without ZeRO every expert-parallel rank saves its optimizer; the model states have the first one's once more.
        rest |= {"optimizer": saved} if saved and not self.optims else {}
        return dict(rest)

    def _model(self, assembler: ZeroAssembler) -> dict[str, Any]:
        """The model, from the optimizer's fp32 copy or the module, with notes where it cannot be read."""
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
        own = experts.own_weights(self.expert_trees)
        model |= {fqn: t for fqn, t in own.items() if fqn not in model}
        if self.ranks.tp > 1 and self.cut is None:
            why = TENSOR_PARALLEL.format(self.ranks.tp)
            return {k: replace(v, shards=(), note=why) if isinstance(v, Tensor) else v for k, v in model.items()}
        return model

    def _joined_module(self) -> ModelStates:
        """The model states with the weights of all tensor-parallel ranks joined; buffers are those of the first."""
        assert self.cut is not None
        first = {mp: model for (mp, _), model in sorted(self.models.items(), reverse=True)}
        ranked = [(self.ranks.of((mp, 0)), first[mp].module or {}) for mp in sorted(first)]
        buffers = self.base.buffers
        self.problems += weights.differing_buffers([(r, {f: m[f] for f in buffers if f in m}) for r, m in ranked])
        whole = {
            f: t if f in buffers else slices.joined(f, ranked, self.cut, self.ranks.tp) for f, t in ranked[0][1].items()
        }
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
        """Frozen parameters that every rank's model states have a piece of."""
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
        return Fact(world, tuple(sources) or ("files found",), agree)


def _of_one_rank(node: Any) -> Any:
    """The optimizer of a tensor-parallel rank with a note on its tensors, but for single numbers."""
    if isinstance(node, Tensor):
        return replace(node, note=node.note or NOT_JOINED) if node.shape else node
    if isinstance(node, dict):
        return {key: _of_one_rank(value) for key, value in node.items()}
    return [_of_one_rank(value) for value in node] if type(node) is list else node
