"""Subclasses of `torch.Tensor`: what they store, found from the attributes that are pickled with them.

Wrappers hold the plain value, and are that tensor here. Quantized classes hold codes and scales; `codings` has how
these make values. Of any other class the inner tensors are listed and not used.

Source: torchao 0.18.0 (float8/fsdp_utils.py, prototype/quantized_training, prototype/moe_training/tensor.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.source import Encoded, Source
from ckptools.model.tensor import Tensor
from ckptools.model.values import Opaque
from ckptools.pickles.classes.codings import Attributes, coding_of, sizes_in
from ckptools.pickles.objects import MAX_NDIM
from ckptools.text import clip, clip_middle, first_few
from ckptools.text import shape as shape_text

LIBRARY = "torchao."
"""The package of the known classes; their modules have moved from version to version."""

WRAPPERS = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "ScaledGroupedMMTensor": "_data",
    "LinearActivationQuantizedTensor": "original_weight_tensor",
}
"""Classes that change what is computed with a tensor, not its values: the attribute that holds it."""

WITHOUT_RULE = (
    "Int4Tensor", "Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4OpaqueTensor",
    "IntxOpaqueTensor", "Float8OpaqueTensor",
)  # fmt: skip
"""Classes of torchao that have no `dequantize()`: only kernels for one kind of processor know how they are packed."""

MAX_PARTS = 32
"""Inner tensors that are listed."""

MAX_VISITED = 10_000
"""Values in an object's state that are looked at for tensors."""

MAX_NAME = 80
"""Characters of a name."""


def of_class(name: str, shape: Ints, dtype: str, state: Attributes) -> Tensor:
    """Describe a tensor by its class and what is stored in it.

    Args:
        name: dotted name of the class.
        shape: sizes that it shows.
        dtype: dtype that it shows.
        state: its attributes; inner tensors are described already.
    """
    last = name.rpartition(".")[2]
    known = name.startswith(LIBRARY)
    inside = state.get(WRAPPERS[last]) if known and last in WRAPPERS else None
    if isinstance(inside, Tensor) and (inside.shape, inside.dtype) == (shape, dtype):
        return replace(inside, attributes={"class": name})
    parts = tuple(_parts(state))
    found = coding_of(name, shape, dtype, state)
    if not parts:
        return Tensor(shape, dtype, (), "unreadable", note=_unknown(name, ()))
    stated = () if found else sizes_in(state.get("block_size")) or ()
    encoded = Encoded(name, parts, found, shape, Box.whole(shape), stated)
    tensor = Tensor(shape, dtype, (Shard(encoded.box, None, None, None, encoded),), "quantized", note=note_on(encoded))
    return tensor if found else replace(tensor, kind="unreadable")


def note_on(encoded: Encoded) -> str:
    """Why a tensor of a class is not written as it is, and what to do if there is a way."""
    names = [name for name, _ in encoded.parts]
    if encoded.coding is None:
        return _unknown(encoded.name, names, encoded.stated)
    library, _, rest = encoded.name.partition(".")
    coding = f"{library} {rest.rpartition('.')[2]} ({', '.join(names)})"
    return f"quantized as {coding}: consolidate --dequantize writes its values"


def _unknown(name: str, parts: Any, blocks: Ints = ()) -> str:
    inside = f", which holds {first_few(parts)}" if parts else ""
    inside += f" for blocks of {shape_text(blocks[:MAX_NDIM])}" if parts and blocks else ""
    silent = name.startswith(LIBRARY) and name.rpartition(".")[2] in WITHOUT_RULE
    why = "torchao has no dequantize() for it" if silent else "ckptools does not know how its values are made"
    return f"a tensor of class {clip_middle(name, MAX_NAME)}{inside}; {why}"


def _parts(state: Attributes) -> Iterator[tuple[str, Source]]:
    """The inner tensors by the names that lead to them, at most `MAX_PARTS`; of each where it lies."""
    stack = [(clip(str(name), MAX_NAME), value) for name, value in reversed(list(state.items()))]
    seen: set[int] = set()
    given = 0
    while stack and given < MAX_PARTS and len(seen) < MAX_VISITED:
        name, node = stack.pop()
        if isinstance(node, Tensor):
            for part in _places(name, node):
                given += 1
                yield part
        elif isinstance(node, (dict, list, tuple, Opaque)) and id(node) not in seen:
            seen.add(id(node))
            inner = node.fields if isinstance(node, Opaque) else node
            items = inner.items() if isinstance(inner, dict) else enumerate(inner)
            stack += reversed([(clip(f"{name}.{key}", MAX_NAME), child) for key, child in items])


def _places(name: str, tensor: Tensor) -> Iterator[tuple[str, Source]]:
    for shard in tensor.found[:MAX_PARTS]:
        if shard.source is not None:
            yield name, shard.source
        elif shard.encoded is not None:
            yield from ((f"{name}.{inner}", source) for inner, source in shard.encoded.parts)
