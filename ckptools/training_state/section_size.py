"""Count the tensors of a section: elements, bytes and dtypes, tied weights once."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptools.model.item_shards import ItemShards
from ckptools.model.tensor import Tensor
from ckptools.model.tree import nodes_in
from ckptools.model.values import Lost, Opaque


class SectionSize(NamedTuple):
    """Counts of the tensors and foreign objects in a section.

    Attributes:
        params: elements of them, global.
        dtypes: number of tensors by dtype.
        nbytes: bytes of the global tensors, packed.
        opaque: dotted names of objects of foreign classes in it.
        bytes_of: those bytes by dtype.
    """

    tensors: int
    params: int
    dtypes: dict[str, int]
    nbytes: int
    opaque: tuple[str, ...]
    bytes_of: dict[str, int]


def measure(value: Any) -> SectionSize:
    """Count the tensors of a subtree; a tied weight counts once."""
    seen: set[Any] = set()
    dtypes: dict[str, int] = {}
    bytes_of: dict[str, int] = {}
    tensors = params = 0
    opaque: dict[str, None] = {}
    for _, leaf in nodes_in(value, (Tensor, Opaque)):
        if isinstance(leaf, Opaque) and not isinstance(leaf, Lost):
            opaque[leaf.name] = None
        if not isinstance(leaf, Tensor):
            continue
        tensors += 1
        dtypes[leaf.dtype] = dtypes.get(leaf.dtype, 0) + 1
        identity = storage_identity(leaf)
        if identity is None or identity not in seen:
            params += leaf.numel
            bytes_of[leaf.dtype] = bytes_of.get(leaf.dtype, 0) + leaf.nbytes
        seen.add(identity)
    return SectionSize(tensors, params, dtypes, sum(bytes_of.values()), tuple(opaque), bytes_of)


def storage_identity(tensor: Tensor) -> Any:
    """An identity that two tied tensors share: the same bytes seen in the same way; None when there are none."""
    every_item = isinstance(tensor.shards, ItemShards) and tensor.shards.all_read
    found = tensor.shards[:1] if every_item else tensor.found
    first = next((source for s in found for source in s.sources), None)
    if first is None or not tensor.numel:
        return None
    return (first.path, first.record, first.offset, first.strides, tensor.shape, tensor.dtype)
