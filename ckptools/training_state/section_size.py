"""Count the tensors of a section: elements, bytes and dtypes, tied weights once."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ckptools.dtypes import short
from ckptools.model.item_shards import ItemShards
from ckptools.model.tensor import Tensor
from ckptools.model.tree import nodes_in
from ckptools.model.values import Lost, Opaque


class SectionSize(NamedTuple):
    """Counts of the tensors and foreign objects in a section.

    Attributes:
        params: elements of them, global; of quantized weights how many there are, as far as that is known.
        dtypes: number of tensors by dtype.
        nbytes: bytes of the global tensors, packed.
        opaque: dotted names of objects of foreign classes in it.
        bytes_of: those bytes by dtype.
        quantized: number of tensors whose codes are here, by how they are quantized.
        uncounted: how many of these are not in `params`, since nothing says how many elements they have.
    """

    tensors: int
    params: int
    dtypes: dict[str, int]
    nbytes: int
    opaque: tuple[str, ...]
    bytes_of: dict[str, int]
    quantized: dict[str, int]
    uncounted: int

    @property
    def dtype_words(self) -> str:
        """The dtypes, the most frequent first: `fp8e4m3, fp32, bf16; quantized`."""
        dtypes = ", ".join(short(dtype) for dtype, _ in Counter(self.dtypes).most_common())
        return f"{dtypes}; quantized" if self.quantized else dtypes


def measure(value: Any) -> SectionSize:
    """Count the tensors of a subtree; a tied weight counts once."""
    seen: set[Any] = set()
    dtypes: dict[str, int] = {}
    bytes_of: dict[str, int] = {}
    quantized: dict[str, int] = {}
    tensors = params = uncounted = 0
    opaque: dict[str, None] = {}
    for _, leaf in nodes_in(value, (Tensor, Opaque)):
        if isinstance(leaf, Opaque) and not isinstance(leaf, Lost):
            opaque[leaf.name] = None
        if not isinstance(leaf, Tensor):
            continue
        tensors += 1
        dtypes[leaf.dtype] = dtypes.get(leaf.dtype, 0) + 1
        if leaf.coded is not None and leaf.are_codes:
            quantized[leaf.coded.scheme] = quantized.get(leaf.coded.scheme, 0) + 1
            uncounted += leaf.coded.numel is None
        elif leaf.kind == "quantized":
            words = _class_words(leaf)
            quantized[words] = quantized.get(words, 0) + 1
        identity = storage_identity(leaf)
        if identity is None or identity not in seen:
            params += leaf.numel if leaf.coded is None else leaf.coded.numel or 0
            bytes_of[leaf.dtype] = bytes_of.get(leaf.dtype, 0) + leaf.nbytes
        seen.add(identity)
    return SectionSize(tensors, params, dtypes, sum(bytes_of.values()), tuple(opaque), bytes_of, quantized, uncounted)


def _class_words(tensor: Tensor) -> str:
    """How a tensor is quantized that holds its own scales: its class, such as `torchao Int8Tensor`, or its dtype."""
    if not tensor.encoded_as:
        return short(tensor.dtype)
    library, _, rest = tensor.encoded_as[0].name.partition(".")
    return f"{library} {rest.rpartition('.')[2]}"


def storage_identity(tensor: Tensor) -> Any:
    """An identity that two tied tensors share: the same bytes seen in the same way; None when there are none."""
    every_item = isinstance(tensor.shards, ItemShards) and tensor.shards.all_read
    found = tensor.shards[:1] if every_item else tensor.found
    first = next((source for s in found for source in s.sources), None)
    if first is None or not tensor.numel:
        return None
    return (first.path, first.record, first.offset, first.strides, tensor.shape, tensor.dtype)
