"""Pipelines: the weights lie in one file per layer, under the layer's own bare names.

`module` of the model states is None; `layer_LL-model_states.pt` holds the state dict of layer LL, with keys such as
`weight`. In the pipeline's own state dict, and so in `param_shapes`, they are called `<layer>.<key>`, and those of a
layer that is used more than once `tied_modules.<name>.<key>`. A tied layer has one file, that of its first place,
while its parameters are in the flat groups of every stage that uses it. Layers without a state have no file.
Source: runtime/pipe/module.py (`_build`, `save_state_dict`, `ckpt_layer_path`), versions 0.8 to 0.19.8; checked on
real files of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptools.formats.shared.copied_files import Checksum, proves_a_copy, stated_checksum
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Shard, Tensor
from ckptools.text import few

TIED = "tied_modules."

MAX_NAMED = 2
"""Parameters that a line names."""

Layers = Mapping[int, Mapping[str, Any]]
"""State dict of each layer, by its index."""


def layer_names(layers: Layers, shapes: Mapping[str, Ints]) -> dict[tuple[int, str], str]:
    """Map `(layer, key)` of every layer file to the name in the pipeline's state dict.

    A tied layer's file does not say that it is one. It is known as such when none of its keys is a parameter of
    its own place, and it alone has the keys and shapes of a tied module that no other such layer has.
    """
    known = {f"{n}.{key}" for n, state in layers.items() for key in state} & set(shapes)
    strange = {n: state for n, state in layers.items() if not any(f"{n}.{key}" in known for key in state)}
    owners = {name: [n for n, state in strange.items() if _holds(state, of)] for name, of in _tied(shapes).items()}
    tied = {found[0]: name for name, found in owners.items() if len(found) == 1}
    tied = {n: name for n, name in tied.items() if sum(n in found for found in owners.values()) == 1}
    named = {}
    for n, state in layers.items():
        for key in state:
            whole = f"{TIED}{tied.get(n)}.{key}"
            named[n, key] = whole if n in tied else f"{n}.{key}"
    return named


def ambiguous_tied_modules(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Tied modules of which it is not sure which layer's file is theirs."""
    named = set(layer_names(layers, shapes).values())
    for name, parameters in _tied(shapes).items():
        if not any(f"{TIED}{name}.{key}" in named for key in parameters):
            fitting = [str(n) for n, state in layers.items() if _holds(state, parameters)]
            which = f"layers {', '.join(fitting[:8])} all fit it" if fitting else "none fits it"
            text = f"it is not sure which layer's file holds it: {which}; the files keep their layers' names"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"{TIED}{name}", severity="warning")


def missing_layers(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Layers with parameters of their own, as the optimizer was told, that have no file."""
    held: dict[int, list[str]] = {}
    for fqn in shapes:
        number = fqn.partition(".")[0]
        if number.isdecimal() and int(number) not in layers:
            held.setdefault(int(number), []).append(fqn)
    for n, names in sorted(held.items()):
        text = f"no file layer_{n:02d}-model_states.pt, which held {few(names, MAX_NAMED)} as the module had it"
        yield Problem(Code.FILE_MISSING, f"{text}; what else was in it is not known")
    for name, parameters in _tied(shapes).items():
        if not any(_holds(state, parameters) for state in layers.values()):
            yield Problem(Code.FILE_MISSING, f"no file of a layer here holds {TIED}{name}, which several layers share")


def misplaced_layers(layers: Layers, shapes: Mapping[str, Ints]) -> Iterator[Problem]:
    """Layers whose file cannot be theirs: another shape than the optimizer was told, or the bytes of another layer.

    Layers of one kind have the same shapes, but no two that are trained hold the same values in all of them.
    """
    seen: dict[tuple[tuple[str, Checksum], ...], int] = {}
    for n, state in sorted(layers.items()):
        tensors = {key: t for key, t in state.items() if isinstance(t, Tensor)}
        for key, tensor in tensors.items():
            expected = shapes.get(f"{n}.{key}", tensor.shape)
            if tensor.shape != expected:
                text = f"shape {list(tensor.shape)} in the file of layer {n}, {list(expected)} in param_shapes"
                yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{n}.{key}")
        records = tuple((key, stated) for key, t in tensors.items() if (stated := stated_checksum(t)) is not None)
        other = seen.setdefault(records, n) if proves_a_copy(stated for _, stated in records) else n
        if other != n and any(f"{m}.{key}" in shapes for m in (n, other) for key in tensors):
            text = f"the file of layer {n} holds what that of layer {other} holds; one is a copy"
            yield Problem(Code.STRAY_FILE, text)


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
    """The optimizer's fp32 copy, and from the layers' files what the optimizer does not know."""
    named = layer_names(layers, {fqn: t.shape for fqn, t in masters.items()})
    found: dict[str, Any] = {}
    for (n, key), fqn in named.items():
        found[fqn] = masters.get(fqn, layers[n][key])
    return found | {fqn: tensor for fqn, tensor in masters.items() if fqn not in found}


def module_pipeline(layers: Layers, shapes: Mapping[str, Ints]) -> dict[str, Any]:
    """The layers' files; a parameter whose layer has no file is named without values."""
    named = layer_names(layers, shapes)
    found = {fqn: layers[n][key] for (n, key), fqn in named.items()}
    dtype = next((t.dtype for t in found.values() if isinstance(t, Tensor)), "float32")
    absent = {fqn: shape for fqn, shape in shapes.items() if fqn not in found}
    return found | {fqn: Tensor(s, dtype, (Shard(Box.whole(s), None, None),)) for fqn, s in absent.items()}
