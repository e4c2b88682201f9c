"""The model of a DeepSpeed checkpoint by name, from the parts that hold each tensor, or a pipeline's layer files.

By default trainable parameters are the optimizer's fp32 copy, and all other tensors are taken from `module` unchanged:
buffers, frozen parameters of ZeRO-1 and 2, integers. ZeRO-3 keeps only placeholders of 0 elements (formerly 1) in
`module`; frozen parameters are then in `frozen_param_fragments`. A name in `shared_params` is another name of a stored
tensor, and gets that tensor. Buffers are rank 0's, as in `zero_to_fp32.py`: stages 0 to 2 save no others, and only
ZeRO-3 shows whether ranks had different ones. With `--weights module` every tensor is from `module`.

In a pipeline, `module` of the model states is None; `layer_LL-model_states.pt` holds the state dict of layer LL, with
keys such as `weight`. In the pipeline's own state dict, and so in `param_shapes`, they are called `<layer>.<key>`, and
those of a layer that is used more than once `tied_modules.<name>.<key>`. A tied layer has one file, that of its first
place, while its parameters are in the flat groups of every stage that uses it. Layers without a state have no file.
Source: runtime/pipe/module.py (`_build`, `save_state_dict`, `ckpt_layer_path`), versions 0.8 to 0.19.8; checked on
real files of 0.19.8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptools.formats.deepspeed.files import StateName
from ckptools.formats.deepspeed.zero_stages import ModelStates, PartitionRun, Shapes
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.rules.files import FileClaims, missing
from ckptools.tensor_io.copies import Checksum, may_be_a_copy, perhaps_copied, stated_checksum, stated_sources
from ckptools.text import few
from ckptools.training_state.sections import storage_identity

UNKNOWN_VALUES = "module has a placeholder, and neither param_shapes nor frozen_param_shapes show where its values are"

TIED = "tied_modules."

MAX_NAMED = 2
"""At most this many parameters are named in a line."""

Layers = Mapping[int, Mapping[str, Any]]
"""State dict of each layer of a pipeline, by its index."""


def _aliases(model: ModelStates, stored: Mapping[str, Any]) -> dict[str, str]:
    """Second names of stored parameters, by `shared_params`, or else by shared bytes.

    Only rank 0's model states have `shared_params` filled in.
    """
    found = {alias: name for alias, name in model.shared.items() if name in stored and alias not in stored}
    module = model.module or {}
    owners = {storage_identity(t): fqn for fqn, t in module.items() if isinstance(t, Tensor) and fqn in stored}
    for fqn, tensor in module.items():
        identity = storage_identity(tensor) if isinstance(tensor, Tensor) and fqn not in stored else None
        if identity is not None and identity in owners:
            found.setdefault(fqn, owners[identity])
    return found


def fp32_model(
    model: ModelStates, masters: Mapping[str, Tensor], frozen: Mapping[str, Tensor], sharded: bool
) -> dict[str, Any]:
    """The model with the optimizer's fp32 copy (`masters`) if it has one, and frozen parameters from their pieces.

    The `module` of the lowest rank gives the order of names; if `sharded` (ZeRO-3), it may hold placeholders.
    """
    stored = {**frozen, **masters}
    other_names = _aliases(model, stored)
    found: dict[str, Any] = {}
    for fqn, value in (model.module or {}).items():
        name = other_names.get(fqn, fqn)
        found[fqn] = stored.get(name, value)
        if name not in stored and sharded and _is_placeholder(fqn, value, model):
            found[fqn] = replace(value, shards=(), note=UNKNOWN_VALUES)
    rest = {**stored, **{alias: stored[name] for alias, name in other_names.items()}}
    return found | {fqn: tensor for fqn, tensor in rest.items() if fqn not in found}


def module_model(model: ModelStates, shapes: Mapping[str, Ints], sharded: bool) -> dict[str, Any]:
    """The model as the forward pass used it; parameters that ZeRO-3 left out of it have a note instead of values."""
    found: dict[str, Any] = {}
    way = f"without {spelled('weights', 'module')} the optimizer's fp32 copy is taken"
    placeholder = f"ZeRO-3 keeps no copy of it in module, only a placeholder; {way}"
    for fqn, value in (model.module or {}).items():
        found[fqn] = value
        shape = shapes.get(fqn, shapes.get(model.shared.get(fqn, "")))
        if sharded and isinstance(value, Tensor) and shape is not None and value.numel != prod(shape):
            found[fqn] = replace(value, shape=shape, shards=(), note=placeholder)
        elif sharded and shape is None and _is_placeholder(fqn, value, model):
            found[fqn] = replace(value, shards=(), note=placeholder)
    return found


def differing_buffers(modules: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[Problem]:
    """Find buffers that differ between the ranks of ZeRO-3, the only stage that saves every rank's, by checksums."""
    first, module = modules[0]
    for fqn, value in module.items():
        mine = stated_checksum(value, whole=True)
        others = ((rank, stated_checksum(other.get(fqn), whole=True)) for rank, other in modules[1:])
        odd = tuple(rank for rank, crc in others if mine and crc and crc != mine)
        if odd:
            text = f"differs between ranks; rank {first}'s copy is taken, the only one that stages 0 to 2 save"
            yield Problem(Code.COPIES_DIFFER, text, odd[0], f"model.{fqn}", severity="warning", ranks=odd)


def mismatched_shapes(model: ModelStates, shapes: Mapping[str, Ints], sharded: bool) -> Iterator[Problem]:
    """Find parameters whose shapes in `module` and in `param_shapes` differ."""
    for fqn, value in (model.module or {}).items() if not sharded else ():
        if isinstance(value, Tensor) and value.shape != shapes.get(fqn, value.shape):
            text = f"shape {list(value.shape)} in module, {list(shapes[fqn])} in param_shapes"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{fqn}")


def _is_placeholder(fqn: str, value: Any, model: ModelStates) -> bool:
    return isinstance(value, Tensor) and fqn not in model.buffers and value.shape in ((0,), (1,))


def layer_names(layers: Layers, shapes: Mapping[str, Ints]) -> dict[tuple[int, str], str]:
    """Map `(layer, key)` of every layer file to the name in the pipeline's state dict.

    A tied layer's file does not state that it is tied. It is recognised when none of its keys is a parameter of its own
    place, and no other such layer has the keys and shapes of the same tied module.
    """
    known = {f"{n}.{key}" for n, state in layers.items() for key in state} & set(shapes)
    strange = {n: state for n, state in layers.items() if not any(f"{n}.{key}" in known for key in state)}
    owners = {name: [n for n, state in strange.items() if _holds(state, of)] for name, of in _tied(shapes).items()}
    tied = {found[0]: name for name, found in owners.items() if len(found) == 1}
    tied = {n: name for n, name in tied.items() if sum(n in found for found in owners.values()) == 1}
    prefixes = {n: f"{TIED}{tied[n]}" if n in tied else n for n in layers}
    return {(n, key): f"{prefixes[n]}.{key}" for n, state in layers.items() for key in state}


def ambiguous_tied_modules(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Find tied modules that match no file, or several."""
    named = set(layer_names(layers, shapes).values())
    for name, parameters in _tied(shapes).items():
        if not any(f"{TIED}{name}.{key}" in named for key in parameters):
            fitting = [str(n) for n, state in layers.items() if _holds(state, parameters)]
            which = f"layers {', '.join(fitting[:8])} all fit it" if fitting else "none fits it"
            text = f"it is not sure which layer's file holds it: {which}; the files keep their layers' names"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"{TIED}{name}", severity="warning")


def ahead_of_fp32(base: ModelStates) -> Iterator[Problem]:
    """Note a module whose own weights ZenFlow stepped ahead of their fp32 copy.

    Source: deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py of 0.19.8, `_selective_optimizer_step`.
    """
    if isinstance(base.config("zero_optimization", "zenflow"), dict):
        text = (
            "ZenFlow steps some columns of the module's own weights ahead of their fp32 copy, so the two may differ: "
            f"the fp32 copy is read, as DeepSpeed does to resume; {spelled('weights', 'module')} gives the others"
        )
        yield Problem(Code.KEPT_AS_SAVED, text, None, "model")


def without_frozen(base: ModelStates, stage: int) -> Iterator[Problem]:
    """Note model states that were saved without the frozen parameters, if there were any.

    From stage 2 on, `frozen_param_shapes` is a dict, empty if nothing was frozen; it is None if they were excluded.
    Source: deepspeed/runtime/engine.py of 0.19.8, `_save_checkpoint`; checked on its own files.
    """
    if stage > 1 and base.module and "frozen_param_shapes" in base.tree and base.tree["frozen_param_shapes"] is None:
        text = "saved with exclude_frozen_parameters=True: parameters that were frozen, if any, are not in it"
        yield Problem(Code.MODEL_PART_MISSING, text, None, "model", severity="note")


def missing_layers(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Find layers without a file that have parameters of their own in `param_shapes`."""
    lost: dict[int, list[str]] = {}
    for number, fqn in ((fqn.partition(".")[0], fqn) for fqn in shapes):
        if number.isdecimal() and int(number) not in layers:
            lost.setdefault(int(number), []).append(fqn)
    for n, names in sorted(lost.items()):
        more = f", which had {few(names, MAX_NAMED)} as the module had it; what else was in it is not known"
        yield missing(f"layer_{n:02d}-model_states.pt", more=more)
    for name, parameters in _tied(shapes).items():
        if not any(_holds(state, parameters) for state in layers.values()):
            yield missing(f"file of a layer here holds {TIED}{name}, which several layers share", kind="")


def misplaced_layers(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Find layers whose file must belong to another layer, by shapes; or may belong to it, by equal bytes."""
    seen: dict[tuple[tuple[str, Checksum], ...], int] = {}
    for n, state in sorted(layers.items()):
        tensors = {key: t for key, t in state.items() if isinstance(t, Tensor)}
        for key, tensor in tensors.items():
            expected = shapes.get(f"{n}.{key}", tensor.shape)
            if tensor.shape != expected:
                text = f"shape {list(tensor.shape)} in the file of layer {n}, {list(expected)} in param_shapes"
                yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{n}.{key}")
        records = tuple((key, stated) for key, t in tensors.items() if (stated := stated_checksum(t)) is not None)
        other = seen.setdefault(records, n) if may_be_a_copy(stated for _, stated in records) else n
        if other != n and any(f"{m}.{key}" in shapes for m in (n, other) for key in tensors):
            own, others = stated_sources(tensors.values()), stated_sources(layers[other].values())
            yield from perhaps_copied(own[0].path, others[0].path, None, own)


def _tied(shapes: Mapping[str, Ints]) -> dict[str, dict[str, Ints]]:
    """Keys and shapes of the parameters of each tied module."""
    found: dict[str, dict[str, Ints]] = {}
    for fqn, shape in shapes.items():
        if fqn.startswith(TIED):
            name, _, key = fqn[len(TIED) :].partition(".")
            found.setdefault(name, {})[key] = shape
    return found


def _holds(state: Mapping[str, Any], parameters: Mapping[str, Ints]) -> bool:
    pairs = ((state.get(key), shape) for key, shape in parameters.items())
    return all(isinstance(t, Tensor) and t.shape == shape for t, shape in pairs)


def fp32_pipeline(layers: Layers, masters: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimizer's fp32 copy, and all other tensors from the layers' files."""
    named = layer_names(layers, {fqn: t.shape for fqn, t in masters.items()})
    found = {fqn: masters.get(fqn, layers[n][key]) for (n, key), fqn in named.items()}
    return found | {fqn: tensor for fqn, tensor in masters.items() if fqn not in found}


def module_pipeline(layers: Layers, shapes: Mapping[str, Ints]) -> dict[str, Any]:
    """The tensors of the layers' files; a parameter whose layer has no file has a name and no values."""
    named = layer_names(layers, shapes)
    found = {fqn: layers[n][key] for (n, key), fqn in named.items()}
    dtype = next((t.dtype for t in found.values() if isinstance(t, Tensor)), "float32")
    return found | {fqn: absent(shape, dtype) for fqn, shape in shapes.items() if fqn not in found}


def absent(shape: Ints, dtype: str = "float32") -> Tensor:
    """A parameter whose values are in no file."""
    return Tensor(shape, dtype, (Shard(Box.whole(shape), None, None),))


# -- parameters of experts: which ranks hold which experts, and their names in the whole model -------------------------
# Expert parameters have param groups of their own, with `moe: True`. Ranks that share the same experts cut them over
# their expert-data-parallel group alone, so `partition_count` of such a group is smaller: data-parallel size / expert-
# parallel size. Expert-parallel rank e of rank r is r modulo the expert-parallel size, and its partition the quotient;
# with `use_data_before_expert_parallelism` the other way round. `param_shapes` and `param_slice_mappings` count the
# experts of one rank only: local expert i of expert-parallel rank e is expert e x local + i of the model. The experts'
# own files have the model's numbers in their names and keys, one expert a file, as the module had them.
#
# AutoEP (0.18 on) fuses the experts of a rank into one tensor, `<prefix>.experts.w1` with a leading dimension;
# `ds_autoep_layers` names the prefix, and since 0.19.8 `expert_placement` says which experts each rank has. Its
# experts' files have `<prefix>.experts.w1.<expert>`. Source: runtime/engine.py (`_save_moe_checkpoint`),
# utils/groups.py (`_create_expert_and_data_parallel`), moe/utils.py, checkpoint/autoep_universal.py,
# runtime/zero/stage_1_and_2.py of 0.19.6 and 0.19.8; checked on real files of 0.19.8.

NATIVE = re.compile(
    r"(?P<prefix>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d{1,7})(?P<rest>\..*)"
)
FUSED = re.compile(r"(?P<name>.*\.w[123])\.(?P<number>\d{1,7})")

EP_SIZE = re.compile(r"ep_size_(\d{1,5})")
"""The name of a param group of experts that are spread over this many groups of ranks."""

MAX_EXPERTS = 1 << 16
"""At most this many experts per layer are accepted; no model has more."""

UNKNOWN_EXPERTS = (
    "a parameter of experts that are spread over {ep} groups of ranks, and no file says how many experts its layer has"
)


class ExpertError(Exception):
    """Why expert parameters cannot be joined."""


@dataclass
class ExpertLayout:
    """The experts of a checkpoint, from its model states and the experts' own files.

    Attributes:
        counts: number of experts by layer prefix of DeepSpeed's own MoE layers.
        stated: `num_experts` of every layer of experts, in order; empty if not stated.
        layers: layers of AutoEP, by prefix.
        data_first: whether the ranks of one expert-data-parallel group are consecutive.
    """

    counts: dict[str, int] = field(default_factory=dict)
    stated: tuple[int, ...] = ()
    layers: dict[str, dict[Any, Any]] = field(default_factory=dict)
    data_first: bool = False

    @classmethod
    def of(cls, model: ModelStates, files: Iterable[tuple[StateName, Mapping[Any, Any]]]) -> ExpertLayout:
        """Gather the layout of experts from model states and the experts' own files."""
        found = model.tree.get("num_experts")
        listed = found if isinstance(found, (list, tuple)) else [found]
        stated = tuple(n for n in listed if type(n) is int and 0 < n <= MAX_EXPERTS)
        autoep = model.tree.get("ds_autoep_layers")
        layers = [layer for layer in (autoep if isinstance(autoep, (list, tuple)) else ()) if isinstance(layer, dict)]
        prefixes = {str(layer.get("expert_key_prefix")): layer for layer in layers}
        first = model.config("use_data_before_expert_parallelism") is True
        one = cls({}, stated if len(stated) == len(listed) else (), prefixes, first)
        for name, tree in files:
            for native in (NATIVE.fullmatch(key) for key in tree if isinstance(key, str)):
                number = name.layer if name.layer is not None else 0
                if native and number < len(one.stated):
                    one.counts.setdefault(native["prefix"], one.stated[number])
        return one

    def ranks(self, dp: int, count: int) -> list[list[int]]:
        """Data-parallel ranks of each expert-parallel rank, in the order of their partitions.

        Raises:
            ExpertError: the ranks cannot be divided into `count` partitions.
        """
        if count <= 0 or dp % count:
            raise ExpertError(f"partition_count {count} of a param group does not divide {dp} data-parallel ranks")
        size = dp // count
        if self.data_first:
            return [list(range(e * count, (e + 1) * count)) for e in range(size)]
        return [list(range(e, dp, size)) for e in range(size)]

    def placed(self, fqn: str, shape: Ints, size: int, locally: Mapping[str, int]) -> list[list[int]]:
        """The experts of every expert-parallel rank, by their number in the model, in local order.

        `size` is the number of expert-parallel ranks, `locally` the minimal number of experts per rank of each layer.

        Raises:
            ExpertError: the files do not state it, or contradict each other.
        """
        native = NATIVE.fullmatch(fqn)
        if native:
            local = locally[native["prefix"]]
            total = self.counts.get(native["prefix"]) or next((n for n in self.stated if n == local * size), 0)
            if not total:
                raise ExpertError(f"{fqn}: {UNKNOWN_EXPERTS.format(ep=size)}")
            if total % size or total // size < local:
                known = f"{total} experts over {size} ranks with {local} each"
                raise ExpertError(f"{fqn}: {known}; the files are not of one run")
            each = total // size
            return [list(range(e * each, (e + 1) * each)) for e in range(size)]
        layer = self.layers.get(fqn.rpartition(".")[0])
        if layer is None:
            raise ExpertError(f"{fqn}: cut over fewer ranks than others, and no expert of DeepSpeed's by its name")
        return _autoep_placement(fqn, layer, shape, size)


def _autoep_placement(fqn: str, layer: Mapping[Any, Any], shape: Ints, size: int) -> list[list[int]]:
    """The experts of each expert-parallel rank of an AutoEP layer."""
    total, local, ep = (layer.get(key) for key in ("num_experts", "num_local_experts", "ep_size"))
    if type(total) is not int or ep != size or not shape or shape[0] != local or not 0 < total <= MAX_EXPERTS:
        raise ExpertError(f"{fqn}: ds_autoep_layers has {local} of {total} experts over {ep} ranks, not {list(shape)}")
    placement = layer.get("expert_placement")
    if placement is None:
        placed = [list(range(e * local, (e + 1) * local)) for e in range(size)]
    else:
        entries = placement.get("ranks") if isinstance(placement, dict) else None
        by_rank = {entry.get("rank"): entry.get("experts") for entry in entries or () if isinstance(entry, dict)}
        placed = [list(by_rank.get(e) or ()) for e in range(size)]
    if {len(own) for own in placed} != {local} or sorted(n for own in placed for n in own) != list(range(total)):
        raise ExpertError(f"{fqn}: experts are not spread evenly over the ranks, each on one; not joined")
    return placed


def globally(run: PartitionRun, numbers: Sequence[int], shape: Ints) -> Iterator[PartitionRun]:
    """Map a run of one rank's parameter to parameters of the whole model; `numbers` are the rank's experts.

    A separate expert gets the model's number in its name. In a fused tensor of `shape`, whose first dimension counts
    experts, the elements of each expert move to its place.
    """
    native = NATIVE.fullmatch(run.fqn)
    if native:
        yield run._replace(fqn=f"{native['prefix']}{numbers[int(native['number'])]}{native['rest']}")
        return
    each, end = prod(shape[1:]), run.start + run.length
    for i in range(run.start // each if each else 0, -(-end // each) if each else 0):
        low, high = max(run.start, i * each), min(end, (i + 1) * each)
        start = low - i * each + numbers[i] * each
        yield run._replace(start=start, length=high - low, at=run.at + low - run.start)


def global_shapes(shapes: Shapes, placed: Mapping[str, Sequence[Sequence[int]]]) -> Shapes:
    """Names and shapes in the whole model, from each rank's names and shapes of its own experts."""
    found: Shapes = {}
    for e in range(max(map(len, placed.values()), default=0)):
        for fqn, shape in shapes.items():
            native = NATIVE.fullmatch(fqn)
            if native:
                found[f"{native['prefix']}{placed[fqn][e][int(native['number'])]}{native['rest']}"] = shape
            else:
                found[fqn] = (sum(map(len, placed[fqn])), *shape[1:])
    return found


def local_counts(names: Iterable[str]) -> dict[str, int]:
    """The minimal number of experts per rank of each layer, by the layer's prefix, from the names of one rank."""
    counts: dict[str, int] = {}
    for native in filter(None, map(NATIVE.fullmatch, names)):
        counts[native["prefix"]] = max(counts.get(native["prefix"], 0), int(native["number"]) + 1)
    return counts


def own_weights(files: Iterable[tuple[StateName, Mapping[Any, Any]]]) -> dict[str, Any]:
    """The module's weights of all experts, from their own files; a fused tensor has one expert per row."""
    found: dict[str, Any] = {}
    rows: dict[str, dict[int, Tensor]] = {}
    for _, tree in files:
        for key, tensor in tree.items():
            fused = FUSED.fullmatch(key) if isinstance(key, str) and isinstance(tensor, Tensor) else None
            if fused and not NATIVE.fullmatch(key):
                rows.setdefault(fused["name"], {})[int(fused["number"])] = tensor
            elif isinstance(key, str) and isinstance(tensor, Tensor):
                found[key] = tensor
    return found | {fqn: _stacked(experts) for fqn, experts in rows.items()}


def _stacked(experts: Mapping[int, Tensor]) -> Tensor:
    """Stack the experts' weights into one tensor, in the order of their numbers."""
    first = experts[min(experts)]
    odd = next((n for n, t in experts.items() if (t.shape, t.dtype) != (first.shape, first.dtype)), None)
    shape = (max(experts) + 1, *first.shape)
    if odd is not None or first.note:
        return Tensor(shape, first.dtype, (), note=first.note or f"expert {odd} has another shape or dtype than others")
    shards: list[Shard] = []
    for number in range(shape[0]):
        box = Box((number, *(0 for _ in first.shape)), (1, *first.shape))
        tensor = experts.get(number)
        source = tensor.shards[0].source if tensor is not None and len(tensor.shards) == 1 else None
        row = source and source.reshaped(box.sizes) if source is not None and source.contiguous else None
        shards.append(Shard(box, None, row))
    return Tensor(shape, first.dtype, tuple(shards), "chunks")


def claims_of(files: Iterable[tuple[StateName, Mapping[Any, Any]]]) -> Iterator[FileClaims]:
    """The claims of experts' files: by their names, and by the module and number in the key of their first weight.

    A module's layer is the layer that most files with its weights name.
    """
    layers: dict[str, Counter[int]] = {}
    found: list[tuple[StateName, str, int]] = []
    for name, tree in files:
        keys = (NATIVE.fullmatch(key) or FUSED.fullmatch(key) for key in tree if isinstance(key, str))
        first = next(filter(None, keys), None)
        if first is not None and name.layer is not None:
            prefix = first.groupdict().get("prefix") or first["name"].rpartition(".")[0]
            layers.setdefault(prefix, Counter())[name.layer] += 1
            found.append((name, prefix, int(first["number"])))
    for name, prefix, number in found:
        named = {"layer": name.layer or 0, "expert": name.expert or 0, "model-parallel rank": name.mp or 0}
        inside = {"layer": layers[prefix].most_common(1)[0][0], "expert": number}
        yield FileClaims(name.path, None, named, inside)


def missing_files(names: Iterable[StateName], experts: ExpertLayout) -> Iterator[str]:
    """Names of experts' files that are missing."""
    here = {(name.layer, name.expert) for name in names}
    for layer, count in enumerate(experts.stated):
        for expert in range(count):
            if (layer, expert) not in here and (None, expert) not in here:
                yield f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def missing_optimizers(names: Iterable[StateName], optimizer: Any) -> Iterator[str]:
    """Names of missing optimizer states of experts; the groups of the largest size determine their number."""
    here = {name.expert for name in names if name.expert is not None}
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    sizes = (
        EP_SIZE.fullmatch(str(g.get("name"))) for g in groups or () if isinstance(g, dict) and g.get("moe") is True
    )
    stated = max((int(size[1]) for size in sizes if size), default=0)
    for expert in range(min(max([stated, *(n + 1 for n in here)]), MAX_EXPERTS)):
        if expert not in here:
            yield f"expp_rank_{expert}_mp_rank_00_optim_states.pt"
