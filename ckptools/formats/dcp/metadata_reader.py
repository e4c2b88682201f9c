"""`.metadata` of a DCP folder: one pickle that says which tensors and objects there are, and where each piece lies.

`Metadata` has three dicts: `state_dict_metadata` (fqn to `TensorStorageMetadata` or `BytesStorageMetadata`),
`storage_data` (`MetadataIndex(fqn, offset)` to `_StorageInfo(relative_path, offset, length)`; the index's own `index`
is a hint that its equality leaves out), and `planner_data` (fqn to the path in the nested state; None when the state
was saved flat).

The classes have moved: `torch.distributed._shard.checkpoint.*` in torch 1.13, `torch.distributed.checkpoint.*` since
2.0; `TensorProperties` came from `torch.distributed._shard.sharded_tensor.metadata` before 2.4. So they are known by
their last name. `storage_meta` and `version` are absent from older files, `transform_descriptors` from most;
Megatron adds `mcore_data`. Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13, and files
of torch 1.13.1, 2.0.1 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.location import is_plain_path
from ckptools.files.opening import File
from ckptools.formats.dcp.metadata import Metadata, StoredItem, TensorMetadata
from ckptools.model.regions import Box, Ints
from ckptools.model.tree import KeyPath
from ckptools.model.values import Global, Opaque, TorchName, describe_for_error
from ckptools.pickles.chunk_runs import ChunkReader
from ckptools.pickles.loading import load_checked
from ckptools.pickles.machine import Machine
from ckptools.pickles.objects import attributes
from ckptools.pickles.rebuild import dtype_of
from ckptools.pickles.run_records import ChunkRecord, IndexRecord, PlaceRecord

MAX_METADATA = 2 << 30
"""Bytes of a `.metadata`; the largest runs write some hundred megabytes."""

FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


def read_metadata(path: Path, rank: int | None = None) -> Metadata:
    """Read a `.metadata` file; runs nothing that it names.

    Raises:
        ReadError: it is cut, damaged, or something else.
        UnsafePathError: it names a file outside of its folder.
    """
    with File(path) as file:
        if file.size > MAX_METADATA:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_METADATA} are read")
        machine = Machine(file.read(0, file.size), reader=ChunkReader)
        tree = load_checked(machine, path, "DCP metadata")
        names = tuple(g.dotted for g in machine.globals.values())
        return _Reading(path, tree).metadata(rank, names, file)


class _Reading:
    """The steps of making sense of the pickle."""

    def __init__(self, path: Path, tree: Any) -> None:
        self.path = path
        if class_of(tree) != "Metadata":
            what = tree.name if isinstance(tree, Opaque) else f"a {type(tree).__name__}"
            raise ReadError(path, f"holds {describe_for_error(what)}; expected torch.distributed.checkpoint's Metadata")
        self.fields = attributes(tree)
        self.twice: set[tuple[str, Ints | None]] = set()
        self.files: dict[str, str] = {}

    def metadata(self, rank: int | None, names: tuple[str, ...], file: File) -> Metadata:
        """Put everything together."""
        entries = self._dict("state_dict_metadata")
        tensors = {fqn: self._tensor(fqn, e) for fqn, e in entries.items() if class_of(e) == "TensorStorageMetadata"}
        objects = tuple(fqn for fqn, e in entries.items() if class_of(e) == "BytesStorageMetadata")
        unknown = next((fqn for fqn in entries if fqn not in tensors and class_of(entries[fqn]) != BYTES), None)
        if unknown is not None:
            raise self._bad(
                f"{describe_for_error(unknown)} is {describe_class(entries[unknown])}; "
                f"expected a tensor's or bytes' metadata"
            )
        return Metadata(
            path=self.path,
            rank=rank,
            tensors=tensors,
            objects=objects,
            order=tuple(entries),
            stored=dict(self._stored()),
            twice=frozenset(self.twice),
            paths=self._paths(),
            extra={k: v for k, v in self.fields.items() if isinstance(k, str) and k not in FIELDS},
            names=names,
            writer=_writer(names),
            nbytes=file.size,
            modified=file.modified,
        )

    def _bad(self, what: str) -> ReadError:
        return ReadError(self.path, f"DCP metadata: {what}; the file is damaged or forged")

    def _dict(self, name: str) -> dict[str, Any]:
        value = self.fields.get(name)
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise self._bad(f"{name} is {describe_class(value)}; expected a dict of names")
        return value

    def _tensor(self, fqn: str, entry: Any) -> TensorMetadata:
        fields = attributes(entry)
        properties = fields.get("properties")
        state = properties.state if isinstance(properties, Opaque) else None
        dtype, layout, grad = _properties(state)
        shape = self._ints(fields.get("size"), fqn, "size")
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self._bad(f"{describe_for_error(fqn)} has {describe_class(chunks)} for its list of chunks")
        boxes = dict.fromkeys(self._box(fqn, chunk, len(shape)) for chunk in chunks)
        stated = dtype.dotted if isinstance(dtype, Global) else describe_class(dtype)
        return TensorMetadata(dtype_of(dtype), stated, layout, shape, tuple(boxes), grad)

    def _box(self, fqn: str, chunk: Any, ndim: int) -> Box:
        if isinstance(chunk, ChunkRecord):
            box = chunk.box
            if len(box.offsets) == len(box.sizes) == ndim and min(box.offsets + box.sizes, default=0) >= 0:
                return box
            given: tuple[Any, Any] = box.offsets, box.sizes
        else:
            fields = attributes(chunk)
            given = fields.get("offsets"), fields.get("sizes")
        offsets = self._ints(given[0], fqn, "offsets of a chunk")
        sizes = self._ints(given[1], fqn, "sizes of a chunk")
        if not len(offsets) == len(sizes) == ndim:
            raise self._bad(
                f"{describe_for_error(fqn)} has {ndim} dimensions and a chunk at "
                f"{describe_for_error(offsets)} of {describe_for_error(sizes)}"
            )
        return Box(offsets, sizes)

    def _ints(self, value: Any, fqn: str, what: str) -> Ints:
        if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
            raise self._bad(f"{describe_for_error(fqn)}: {what} {describe_for_error(value)}")
        return tuple(value)

    def _stored(self) -> Iterator[tuple[tuple[str, Ints | None], StoredItem]]:
        listed = self.fields.get("storage_data")
        if not isinstance(listed, dict):
            raise self._bad(f"storage_data is {describe_class(listed)}; expected a dict")
        seen: dict[tuple[str, Ints | None], StoredItem] = {}
        for index, info in listed.items():
            fqn, offset = _index(index)
            if not isinstance(fqn, str):
                raise self._bad(f"an item's name is {describe_for_error(fqn)}")
            key = (fqn, None if offset is None else self._ints(offset, fqn, "offset of a chunk"))
            stored = self._where(fqn, info)
            if seen.setdefault(key, stored) != stored:
                self.twice.add(key)
            yield key, stored

    def _where(self, fqn: str, info: Any) -> StoredItem:
        if isinstance(info, PlaceRecord) and info.offset >= 0 and info.length >= 0:
            return StoredItem(self._inside(fqn, info.file), info.offset, info.length)
        if isinstance(info, PlaceRecord):
            raise self._bad(
                f"{describe_for_error(fqn)}: offset and length of an item "
                f"{describe_for_error((info.offset, info.length))}"
            )
        fields = attributes(info)
        file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        offset, length = self._ints((offset, length), fqn, "offset and length of an item")
        transforms = fields.get("transform_descriptors") or ()
        if not isinstance(transforms, (list, tuple)) or not all(isinstance(t, str) for t in transforms):
            raise self._bad(f"{describe_for_error(fqn)}: transform descriptors {describe_for_error(transforms)}")
        return StoredItem(self._inside(fqn, file), offset, length, tuple(transforms))

    def _inside(self, fqn: str, file: Any) -> str:
        known = self.files.get(file) if isinstance(file, str) else None
        if known is not None:
            return known
        if not isinstance(file, str) or not is_plain_path(file):
            raise UnsafePathError(
                self.path,
                f"{describe_for_error(fqn)} lies in {describe_for_error(file)}, which names no file in this folder",
            )
        return self.files.setdefault(file, file)

    def _paths(self) -> dict[str, KeyPath] | None:
        data = self.fields.get("planner_data")
        if not isinstance(data, dict) or not data or not all(isinstance(k, str) for k in data):
            return None
        for fqn, path in data.items():
            if not isinstance(path, (tuple, list)) or not path or not all(type(k) in (str, int) for k in path):
                raise self._bad(
                    f"planner data of {describe_for_error(fqn)}: {describe_for_error(path)}; "
                    f"expected a path of names and indices"
                )
        return {fqn: tuple(path) for fqn, path in data.items()}


BYTES = "BytesStorageMetadata"


def _index(index: Any) -> tuple[Any, Any]:
    """Fqn and offset of a `MetadataIndex`."""
    if isinstance(index, IndexRecord):
        return index.fqn, index.offset
    fields = attributes(index)
    return fields.get("fqn"), fields.get("offset")


def class_of(value: Any) -> str:
    """Last name of the class of an object that was not rebuilt; empty for anything else."""
    return value.name.rpartition(".")[2] if isinstance(value, Opaque) else ""


def describe_class(value: Any) -> str:
    """The class of an object that was not rebuilt, or a value, for an error message."""
    return describe_for_error(value.name) if isinstance(value, Opaque) else describe_for_error(value)


def _properties(state: Any) -> tuple[Any, str, bool]:
    """dtype, layout and requires_grad: `(dtype, layout, requires_grad, memory format, pin_memory)`, or a dict."""
    if isinstance(state, tuple) and len(state) >= 3:
        dtype, layout, grad = state[:3]
    else:
        fields = state if isinstance(state, dict) else {}
        dtype, layout, grad = fields.get("dtype"), fields.get("layout"), fields.get("requires_grad")
    name = layout.name if isinstance(layout, (TorchName, Global)) else "strided"
    return dtype, name, grad is True


def _writer(names: tuple[str, ...]) -> str:
    """Which torch wrote it, by the places where its classes were then."""
    if any(n.startswith("torch.distributed._shard.checkpoint.") for n in names):
        return "torch 1.13"
    if "torch.distributed._shard.sharded_tensor.metadata.TensorProperties" in names:
        return "torch 2.0 to 2.3"
    return "torch 2.4 or later" if "torch.distributed.checkpoint.metadata.TensorProperties" in names else "torch"
