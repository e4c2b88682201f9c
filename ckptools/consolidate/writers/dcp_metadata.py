"""`.metadata` of a torch.distributed.checkpoint folder: the items and their places.

A pickle of the dataclasses of torch/distributed/checkpoint/{metadata,filesystem}.py, with their attributes as of torch
2.4, under the names of every version since; an older reader ignores unknown ones (`storage_meta`, `version`), and
`_StorageInfo.transform_descriptors` of newer versions keeps its default None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptools.consolidate.writers.pickle_emitter import Call, Emitter, Instance
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.values import Global, Size, TorchName

FILE_NAME = ".metadata"
VERSION = "1.0.0"
"""torch/distributed/checkpoint/filesystem.py, `CURRENT_DCP_VERSION`."""

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"

ObjectPath = tuple[str | int, ...]
"""Path of a value in the state dict; a number is an index of a list, a text a key of a dict."""


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The place of an item.

    Attributes:
        file: name of the file.
        offset: its first byte there.
        nbytes: length.
    """

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FlatValue:
    """One value of the flattened state dict.

    Attributes:
        path: its path before flattening.
        tensor: the tensor, with its dtype in the output; None for a plain value.
        items: the pieces of a tensor, or the one item of a plain value, whose box is None.
    """

    path: ObjectPath
    tensor: Tensor | None
    items: list[tuple[Box | None, ItemPlace]] = field(default_factory=list)

    @property
    def fqn(self) -> str:
        """Its name; torch joins keys with dots."""
        return ".".join(map(str, self.path))


def metadata(entries: Iterable[FlatValue]) -> bytes:
    """The bytes of the `.metadata` of some entries with different fqns."""
    by_fqn = {entry.fqn: entry for entry in entries}
    state = {
        "state_dict_metadata": {fqn: _described(entry) for fqn, entry in by_fqn.items()},
        "planner_data": {fqn: entry.path for fqn, entry in by_fqn.items()},
        "storage_data": {
            _index(fqn, box, number): _storage_info(place)
            for fqn, entry in by_fqn.items()
            for number, (box, place) in enumerate(entry.items)
        },
        "storage_meta": None,
        "version": VERSION,
    }
    return Emitter().dump(Instance(METADATA, "Metadata", state))


def _described(entry: FlatValue) -> Instance:
    if entry.tensor is None:
        return Instance(METADATA, "BytesStorageMetadata", {})
    chunks = [
        Instance(METADATA, "ChunkStorageMetadata", {"offsets": Size(box.offsets), "sizes": Size(box.sizes)})
        for box, _ in entry.items
        if box is not None
    ]
    state = {"properties": _properties(entry.tensor), "size": Size(entry.tensor.shape), "chunks": chunks}
    return Instance(METADATA, "TensorStorageMetadata", state)


def _properties(tensor: Tensor) -> Instance:
    """`TensorProperties`: its `__setstate__` takes dtype, layout, requires_grad, memory format and pin_memory."""
    contiguous = Call(METADATA, "_MEM_FORMAT_ENCODING", (0,))
    dtype = Global("torch", tensor.dtype)
    state: Any = (dtype, TorchName("strided"), tensor.requires_grad, contiguous, False)
    return Instance(METADATA, "TensorProperties", state)


def _index(fqn: str, box: Box | None, number: int) -> Instance:
    state = {"fqn": fqn, "index": None if box is None else number}
    return Instance(METADATA, "MetadataIndex", state if box is None else {**state, "offset": Size(box.offsets)})


def _storage_info(place: ItemPlace) -> Instance:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.nbytes}
    return Instance(FILESYSTEM, "_StorageInfo", state)
