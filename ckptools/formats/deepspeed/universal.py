"""Universal checkpoints: every parameter and every slot of its state in a file of its own, for any number of ranks.

DeepSpeed's `ds_to_universal.py` writes `<tag>/zero/<fqn>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt`,
`zero/optimizer_state.pt` with the param groups, copies the model states beside them, and names the tag in
`latest_universal`. A file holds `{"param": tensor, "cat_dim": …}`, `step.pt` the value itself. Tensor-parallel slices
are already joined; a parameter from ZeRO-3 is flat, and gets its shape from `param_shapes`. Version 0.19.8 also writes
buffers and frozen parameters there, possibly without their original dtype: those are taken from the model states.
Source: checkpoint/ds_to_universal.py of 0.9 to 0.19.8; checked on real files of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.files.opening import reading
from ckptools.formats.deepspeed import weights
from ckptools.formats.deepspeed.assembler import frozen_parameters, names_by_param_group
from ckptools.formats.deepspeed.files import GROUPED, Files, StateName, names_in, path_of_step
from ckptools.formats.deepspeed.zero_stages import (
    FLAT,
    LAYOUT,
    MAX_WORLD,
    ModelStates,
    OptimStates,
    Shapes,
    joined_groups,
    stage_of,
)
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Rounded, Tensor
from ckptools.option import spelled
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

MASTER = "fp32"
NO_MODULE = "the module's own weights are not in a universal checkpoint of a pipeline"


class SlotFile(NamedTuple):
    """A file of one slot of one parameter; the slot is `fp32` for the parameter itself, else the optimizer's name."""

    fqn: str
    slot: str
    path: Path


def read(builder: CheckpointBuilder, folder: Path, options: Options) -> Checkpoint:
    """Open the universal checkpoint in a tag folder.

    Raises:
        ReadError: the file that the caller named cannot be read.
        UnsafePathError: a file is a link out of the folder.
    """
    files = Files(folder, names_in(folder, options), options, builder.path)
    found = []
    with reading(folder / "zero"):
        for parameter in sorted(p for p in (folder / "zero").iterdir() if p.is_dir()):
            found += [SlotFile(parameter.name, p.stem, p) for p in sorted(parameter.iterdir()) if p.suffix == ".pt"]
    for path in {p for file in found for p in (file.path, file.path.parent, folder / "zero")}:
        options.check_link(path, folder)
    return _UniversalFolder(builder, folder, files, found).checkpoint()


class _UniversalFolder:
    def __init__(self, builder: CheckpointBuilder, folder: Path, files: Files, slot_files: list[SlotFile]) -> None:
        self.builder, self.problems = builder, builder.problems
        self.folder, self.files, self.slot_files = folder, files, slot_files
        self.common = folder / "zero" / "optimizer_state.pt"
        # ZeRO-3 keeps frozen parameters in pieces, one in every rank's model states.
        files.read_all(files.of("model"))
        self.own_files = [*(file.path for file in slot_files), *([self.common] if self.common.is_file() else [])]
        files.read_all(StateName(p, "model", None) for p in self.own_files)
        read = files.models()
        self.models = [read[place] for place in sorted(read)]
        self.base = self.models[0] if self.models else ModelStates(folder, 0, 0, {})
        self.sharded = any(n.dp is not None for n in files.of("model"))
        # The shapes of all pipeline stages, group by group.
        self.groups = joined_groups(model.groups or () for model in self.models)
        self.shapes: Shapes = {fqn: shape for group in self.groups for fqn, shape in group.items()}

    def checkpoint(self) -> Checkpoint:
        tree = self._tree()
        self._add_files()
        sections = find_sections(tree)
        self.problems += (
            Problem(Code.FILE_CONTRADICTS, f"{path.relative_to(self.folder)} holds no {what}; it is another file")
            for path, what in self._of_another_kind()
        )
        self.builder.add_saved(self.files.saved.values())
        world = (self.base.number("dp_world_size") or 1) * (self.base.number("mp_world_size") or 1)
        return self.builder.checkpoint(
            name=self.folder.name,
            saved_as="DeepSpeed universal checkpoint, one file per parameter and slot",
            tree=tree,
            world_size=Fact(world, ("dp_world_size",) if "dp_world_size" in self.base.tree else ()),
            step=find_step(path_of_step(self.folder), tuple(s for s in sections if s.path == ("global_steps",))),
            module_order=GROUPED,
            bytes_expected=rank_checks.expected_bytes(self.builder.files),
            rounded=Rounded.pairs(self._masters, {} if self.sharded else self.base.module or {}, "model."),
        )

    def _of_another_kind(self) -> Iterator[tuple[Path, str]]:
        """Yield files whose content is not what their name promises, and the expected content."""
        read = {path: saved.tree for path, saved in self.files.saved.items()}
        for path in (model.path for model in self.models):
            if not isinstance(read.get(path), Mapping) or {"module", "param_shapes"}.isdisjoint(read[path]):
                yield path, "model states"
        if self.common in read and not (isinstance(read[self.common], Mapping) and "param_groups" in read[self.common]):
            yield self.common, "param groups"
        for file in self.slot_files:
            if file.path in read and not _is_of_slot(read[file.path], file.slot):
                yield file.path, "step" if file.slot == "step" else "tensor"

    def _tree(self) -> dict[Any, Any]:
        common = self._common()
        rest = {k: v for k, v in self.base.tree.items() if k not in (*LAYOUT, "optimizer", "model", "zero_optimizer")}
        kept = {k: v for k, v in common.items() if k not in (*FLAT, "param_groups")}
        kept |= {"zero_stage": stage_of(common)} if stage_of(common) is not None else {}
        state: dict[str, dict[str, Any]] = {fqn: {} for fqn in self.shapes}
        for slot in dict.fromkeys(file.slot for file in self.slot_files if file.slot != MASTER):
            for fqn, value in self._stored(slot).items():
                state.setdefault(fqn, {})[slot] = value
        listed = common.get("param_groups")
        groups = [g for g in listed if isinstance(g, dict)] if isinstance(listed, (list, tuple)) else []
        names = names_by_param_group(groups, self.groups)
        settings = groups or [{} for _ in names]
        optimizer = {
            "state": {fqn: entry for fqn, entry in state.items() if entry},
            "param_groups": [{**group, "params": params} for group, params in zip(settings, names, strict=True)],
        }
        return {"model": self._model(), "optimizer": optimizer, **rest, **({"zero_optimizer": kept} if kept else {})}

    def _common(self) -> dict[Any, Any]:
        tree = self.files.saved[self.common].tree if self.common in self.files.saved else {}
        return tree if isinstance(tree, dict) else {}

    def _model(self) -> dict[str, Any]:
        module = self.base.module
        if self.files.options.weights == "module":
            if module is not None:
                return weights.module_model(self.base, self.shapes, self.sharded)
            note = f"{NO_MODULE}; {spelled('weights', 'fp32')} takes the fp32 copy"
            return {fqn: replace(t, shards=(), note=note) for fqn, t in self._stored(MASTER).items()}
        stored, trained = self._stored(MASTER), self._masters
        others = self._frozen()
        others |= {fqn: t for fqn, t in stored.items() if fqn not in trained | others and self._only_here(fqn)}
        absent = {fqn: weights.absent(shape) for fqn, shape in self.shapes.items() if fqn not in stored}
        return weights.fp32_model(self.base, {**trained, **absent}, others, self.sharded)

    @cached_property
    def _masters(self) -> dict[str, Tensor]:
        stored, module = self._stored(MASTER), self.base.module
        return {fqn: t for fqn, t in stored.items() if fqn in self.shapes or module is None}

    def _frozen(self) -> dict[str, Tensor]:
        counts = [OptimStates(self.common, t).counts[0] for t in [self._common()] if "partition_count" in t]
        cut = min(counts[0] if counts else self.base.number("dp_world_size") or 1, MAX_WORLD)
        models = [m for m in self.models if m.mp == self.base.mp]
        return frozen_parameters(models, cut, lambda where: where[1], cut) if self.sharded and models else {}

    def _only_here(self, fqn: str) -> bool:
        """Whether a tensor is not a trained parameter, and the model states have no copy of it."""
        value = (self.base.module or {}).get(fqn)
        empty = isinstance(value, Tensor) and self.sharded and value.shape in ((0,), (1,))
        return fqn not in self.base.shared and (not isinstance(value, Tensor) or empty)

    def _stored(self, slot: str) -> dict[str, Any]:
        saved = self.files.saved
        files = (file for file in self.slot_files if file.slot == slot and file.path in saved)
        return {file.fqn: self._value(file.fqn, slot, saved[file.path].tree) for file in files}

    def _value(self, fqn: str, slot: str, tree: Any) -> Any:
        value = tree.get("param") if isinstance(tree, dict) and "param" in tree else tree
        shape = self.shapes.get(fqn)
        if not isinstance(value, Tensor) or slot == "step" or shape is None or value.shape == shape:
            return value
        if len(value.shape) == 1 and value.numel == prod(shape):
            source = value.shards[0].source if len(value.shards) == 1 else None
            if source is None or not source.contiguous:
                return replace(value, shards=(), note="a flat tensor that is not one row of consecutive elements")
            return replace(value, shape=shape, shards=(Shard(Box.whole(shape), None, source.reshaped(shape)),))
        sliced = any((m.number("mp_world_size") or 1) > 1 for m in self.models)
        if isinstance(tree, dict) and (tree.get("vocab_tensor") or sliced):
            return value
        note = f"{slot}.pt holds {list(value.shape)}, param_shapes has {list(shape)}; the files are not of one run"
        return replace(value, shards=(), note=note)

    def _add_files(self) -> None:
        """List every file by its path in the folder, since many have the same name."""
        parts = {file.path: f"{file.fqn}/{file.slot}" for file in self.slot_files}
        for path in (*(name.path for name in self.files.names), *self.own_files):
            file = self.files.status(path, None, parts.get(path, path.name.removesuffix(".pt")))
            self.builder.add_listed(file, self.files.faults, str(path.relative_to(self.folder)))
        lost = {
            f"{fqn}/{slot}": f"model.{fqn}" if slot == MASTER else f"optimizer.state.{fqn}"
            for fqn, slot in self._slots_not_here()
        }
        lost |= {} if self.common.is_file() else {self.common.stem: "optimizer.param_groups"}
        for part, key in lost.items():
            self.builder.add_missing(self.folder / f"zero/{part}.pt", None, part, name=f"zero/{part}.pt", tensor=key)

    def _slots_not_here(self) -> Iterator[tuple[str, str]]:
        """Yield missing fp32 copies, and slots that only other parameters have: all parameters have the same slots."""
        here = {(file.fqn, file.slot) for file in self.slot_files}
        yield from ((fqn, MASTER) for fqn in self.shapes if (fqn, MASTER) not in here)
        slots = dict.fromkeys(slot for fqn, slot in here if slot != MASTER and fqn in self.shapes)
        parameters = [fqn for fqn in self.shapes if (fqn, MASTER) in here]
        yield from ((fqn, slot) for fqn in parameters for slot in sorted(slots) if (fqn, slot) not in here)


def _is_of_slot(tree: Any, slot: str) -> bool:
    """Whether the file of a slot holds a tensor, or, for a step counter, one number."""
    if slot == "step":
        return isinstance(tree, (int, float)) or (isinstance(tree, Tensor) and tree.numel == 1)
    return isinstance(tree.get("param") if isinstance(tree, Mapping) else tree, Tensor)
