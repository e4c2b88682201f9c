"""The model of a DeepSpeed checkpoint by name, from the parts that hold each tensor, or a pipeline's layer files.

By default trainable parameters are the optimizer's fp32 copy, and everything that the optimizer does not know is taken
from `module` as it is: buffers, frozen parameters of ZeRO-1 and 2, integers. ZeRO-3 keeps nothing but placeholders of
0 elements (formerly 1) in `module`; frozen parameters are there in `frozen_param_fragments`. A name in `shared_params`
is another name of a stored tensor, and gets that one. Buffers are rank 0's, as in `zero_to_fp32.py`: stages 0 to 2
save no other, and only ZeRO-3 shows whether ranks had different ones. With `--weights module` everything is from
`module`.

In a pipeline, `module` of the model states is None; `layer_LL-model_states.pt` holds the state dict of layer LL, with
keys such as `weight`. In the pipeline's own state dict, and so in `param_shapes`, they are called `<layer>.<key>`, and
those of a layer that is used more than once `tied_modules.<name>.<key>`. A tied layer has one file, that of its first
place, while its parameters are in the flat groups of every stage that uses it. Layers without a state have no file.
Source: runtime/pipe/module.py (`_build`, `save_state_dict`, `ckpt_layer_path`), versions 0.8 to 0.19.8; checked on
real files of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptools.formats.deepspeed.states import ModelStates
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.copied_files import Checksum, may_be_a_copy, perhaps_copied, stated_checksum, stated_sources
from ckptools.text import few
from ckptools.training_state.section_size import storage_identity

PLACEHOLDER = (
    "ZeRO-3 keeps no copy of it in module, only a placeholder; without --weights module the optimizer's fp32 copy "
    "is taken"
)
UNKNOWN = "module has a placeholder, and neither param_shapes nor frozen_param_shapes show where its values are"

TIED = "tied_modules."

MAX_NAMED = 2
"""At most this many parameters are named in a line."""

Layers = Mapping[int, Mapping[str, Any]]
"""State dict of each layer of a pipeline, by its index."""


def _aliases(model: ModelStates, stored: Mapping[str, Any]) -> dict[str, str]:
    """Second names of stored parameters, with the stored one: as `shared_params` says, else those that share its bytes.

    Rank 0's model states are the only ones whose `shared_params` is filled in.
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
    """The model with the optimizer's fp32 copy (`masters`) where it has one, and frozen parameters from their pieces.

    The `module` of the lowest rank gives the order of names; if `sharded` (ZeRO-3), it may hold placeholders.
    """
    stored = {**frozen, **masters}
    other_names = _aliases(model, stored)
    found: dict[str, Any] = {}
    for fqn, value in (model.module or {}).items():
        name = other_names.get(fqn, fqn)
        found[fqn] = stored.get(name, value)
        if name not in stored and sharded and _is_placeholder(fqn, value, model):
            found[fqn] = replace(value, shards=(), note=UNKNOWN)
    rest = {**stored, **{alias: stored[name] for alias, name in other_names.items()}}
    return found | {fqn: tensor for fqn, tensor in rest.items() if fqn not in found}


def module_model(model: ModelStates, shapes: Mapping[str, Ints], sharded: bool) -> dict[str, Any]:
    """The model as the forward pass used it; what ZeRO-3 left out of it has a note instead of values."""
    found: dict[str, Any] = {}
    for fqn, value in (model.module or {}).items():
        found[fqn] = value
        shape = shapes.get(fqn, shapes.get(model.shared.get(fqn, "")))
        if sharded and isinstance(value, Tensor) and shape is not None and value.numel != prod(shape):
            found[fqn] = replace(value, shape=shape, shards=(), note=PLACEHOLDER)
        elif sharded and shape is None and _is_placeholder(fqn, value, model):
            found[fqn] = replace(value, shards=(), note=PLACEHOLDER)
    return found


def differing_buffers(modules: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[Problem]:
    """Buffers that differ between the ranks of ZeRO-3, which alone saves every rank's; by their checksums."""
    first, module = modules[0]
    for fqn, value in module.items():
        mine = stated_checksum(value, whole=True)
        others = ((rank, stated_checksum(other.get(fqn), whole=True)) for rank, other in modules[1:])
        odd = tuple(rank for rank, crc in others if mine and crc and crc != mine)
        if odd:
            text = f"differs between ranks; rank {first}'s copy is taken, the only one that stages 0 to 2 save"
            yield Problem(Code.COPIES_DIFFER, text, odd[0], f"model.{fqn}", severity="warning", ranks=odd)


def mismatched_shapes(model: ModelStates, shapes: Mapping[str, Ints], sharded: bool) -> Iterator[Problem]:
    """Parameters whose shape in `module` is not the one in `param_shapes`."""
    for fqn, value in (model.module or {}).items() if not sharded else ():
        if isinstance(value, Tensor) and value.shape != shapes.get(fqn, value.shape):
            text = f"shape {list(value.shape)} in module, {list(shapes[fqn])} in param_shapes"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{fqn}")


def _is_placeholder(fqn: str, value: Any, model: ModelStates) -> bool:
    return isinstance(value, Tensor) and fqn not in model.buffers and value.shape in ((0,), (1,))


def layer_names(layers: Layers, shapes: Mapping[str, Ints]) -> dict[tuple[int, str], str]:
    """Map `(layer, key)` of every layer file to the name in the pipeline's state dict.

    A tied layer's file does not say that it is one. It is recognised when none of its keys is a parameter of its own
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
    """Tied modules that match no file, or several."""
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
        )
        text += "the fp32 copy is read, as DeepSpeed does to resume; --weights module gives the others"
        yield Problem(Code.KEPT_AS_SAVED, text, None, "model")


def without_frozen(base: ModelStates, stage: int) -> Iterator[Problem]:
    """Note model states that were saved without the frozen parameters, if there were any.

    From stage 2 on, `frozen_param_shapes` is a dict, empty if nothing was frozen; it is None if they were excluded.
    Source: deepspeed/runtime/engine.py of 0.19.8, `_save_checkpoint`; checked on its own.
    """
    if stage > 1 and base.module and "frozen_param_shapes" in base.tree and base.tree["frozen_param_shapes"] is None:
        text = "saved with exclude_frozen_parameters=True: parameters that were frozen, if any, are not in it"
        yield Problem(Code.MODEL_PART_MISSING, text, None, "model", severity="note")


def missing_layers(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Layers without a file that have parameters of their own in `param_shapes`."""
    lost: dict[int, list[str]] = {}
    for number, fqn in ((fqn.partition(".")[0], fqn) for fqn in shapes):
        if number.isdecimal() and int(number) not in layers:
            lost.setdefault(int(number), []).append(fqn)
    for n, names in sorted(lost.items()):
        text = f"no file layer_{n:02d}-model_states.pt, which had {few(names, MAX_NAMED)} as the module had it"
        yield Problem(Code.FILE_MISSING, f"{text}; what else was in it is not known")
    for name, parameters in _tied(shapes).items():
        if not any(_holds(state, parameters) for state in layers.values()):
            yield Problem(Code.FILE_MISSING, f"no file of a layer here holds {TIED}{name}, which several layers share")


def misplaced_layers(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Layers whose file must be another's, by the shapes in `param_shapes`; or may be another's, by its bytes."""
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
    """The optimizer's fp32 copy; the other tensors come from the layers' files."""
    named = layer_names(layers, {fqn: t.shape for fqn, t in masters.items()})
    found = {fqn: masters.get(fqn, layers[n][key]) for (n, key), fqn in named.items()}
    return found | {fqn: tensor for fqn, tensor in masters.items() if fqn not in found}


def module_pipeline(layers: Layers, shapes: Mapping[str, Ints]) -> dict[str, Any]:
    """The layers' files; a parameter whose layer has no file has a name and no values."""
    named = layer_names(layers, shapes)
    found = {fqn: layers[n][key] for (n, key), fqn in named.items()}
    dtype = next((t.dtype for t in found.values() if isinstance(t, Tensor)), "float32")
    return found | {fqn: absent(shape, dtype) for fqn, shape in shapes.items() if fqn not in found}


def absent(shape: Ints, dtype: str = "float32") -> Tensor:
    """A parameter whose values are in no file."""
    return Tensor(shape, dtype, (Shard(Box.whole(shape), None, None),))
