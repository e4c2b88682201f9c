"""Read the `.metadata` of a DCP folder, and rebuild the nested state from flat names and their paths.

It lists tensors, objects, and the place of each of their items. DCP says chunk for shard. An item is a chunk of a
tensor, or a pickled object.

torch flattens a state before it saves it: it enters every dict and turns its keys into text, and enters a list that
holds tensors or dicts (until torch 2.3 a dict without tensors was one pickled value). `planner_data` has the path of
every name: text for a key, an int for a list index. Paths do not record tuples (now lists), int keys (now text) and
empty containers. A list item that was an empty container is None here.
Source: torch/distributed/checkpoint/_nested_dict.py and _traverse.py.

One loss can be undone safely: an optimizer that numbers its parameters has the numbers in its param groups too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.errors import CkptoolsError, ReadError, UnsafePathError
from ckptools.files.compressed import has_zstd, is_zstd
from ckptools.files.opening import File, is_plain_path
from ckptools.model.extents import by_value
from ckptools.model.facts import RankFile
from ckptools.model.regions import Ints
from ckptools.model.tree import Global, Opaque, TorchName, describe_for_error
from ckptools.pickles.batches import Batch, gathered, holds_skipped
from ckptools.pickles.classes.tensors import dtype_of
from ckptools.pickles.machine import Machine, load_checked
from ckptools.pickles.machine_state import UnusualError
from ckptools.pickles.objects import attributes
from ckptools.text import KeyPath
from ckptools.training_state.sections import is_optimizer


@dataclass(frozen=True, slots=True)
class StoredItem:
    """The extent of an item in a data file.

    Attributes:
        file: relative path, checked to stay in the folder.
        offset: byte offset of the item.
        length: bytes of the item.
        transforms: the transformations of its bytes, such as `stream.zstd/1`; empty without any.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """Byte offset behind the item."""
        return self.offset + self.length

    @property
    def zstd(self) -> bool:
        """Whether zstd compressed the item, which ckptools can unpack."""
        return is_zstd(self.transforms)

    @property
    def unreadable(self) -> str:
        """Why the item's bytes cannot be read; empty when they can."""
        if not self.transforms or (self.zstd and has_zstd()):
            return ""
        if self.zstd:
            return "compressed by zstd when it was saved; to read it: pip install 'ckptools[compressed]'"
        how = ", ".join(describe_for_error(t).strip("'") for t in self.transforms[:4])
        return f"went through {how} when it was saved, which ckptools does not undo; save it again without"


@dataclass(slots=True)
class StoredItems:
    """The extents of all items in a `.metadata`, by column: row `i` of every column belongs to item `i`.

    Attributes:
        fqns: of the tensors and objects.
        offsets: of the chunks; None for an object.
        files: relative paths, checked to stay in the folder.
        starts: byte offsets.
        lengths: in bytes.
        transforms: transformations, by item, for items that have any.
    """

    fqns: list[str] = field(default_factory=list)
    offsets: list[Ints | None] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    transforms: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _of_fqn: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)
    _of_file: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.fqns)

    def __getitem__(self, item: int) -> StoredItem:
        return StoredItem(self.files[item], self.starts[item], self.lengths[item], self.transforms.get(item, ()))

    def items_of(self, fqn: str) -> Sequence[int]:
        """The items of a tensor or object."""
        if not self._of_fqn:
            self._of_fqn = by_value(self.fqns)
        return self._of_fqn.get(fqn, ())

    def of(self, fqn: str) -> tuple[dict[Ints | None, int], set[Ints | None]]:
        """The items of a tensor or object by the offsets of their chunks, and the offsets that occur twice."""
        items = self.items_of(fqn)
        found = {self.offsets[item]: item for item in items}
        if len(found) == len(items):
            return found, set()
        return found, {self.offsets[i] for i in items if self[i] != self[found[self.offsets[i]]]}

    def by_file(self) -> Mapping[str, Sequence[int]]:
        """The items of each file."""
        if not self._of_file:
            self._of_file = by_value(self.files)
        return self._of_file


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor as `.metadata` describes it.

    Attributes:
        dtype: torch's name; None for a dtype unknown to ckptools.
        stated_dtype: as in the file.
        layout: `strided`, or a sparse layout.
        shape: global sizes.
        offsets: of its distinct chunks, in file order.
        sizes: of its distinct chunks.
    """

    dtype: str | None
    stated_dtype: str
    layout: str
    shape: Ints
    offsets: tuple[Ints, ...]
    sizes: tuple[Ints, ...]
    requires_grad: bool


@dataclass(frozen=True)
class DcpMetadata:
    """The content of one `.metadata` file.

    Attributes:
        rank: the writer of `__3.metadata`; None for the metadata of all ranks.
        tensors: by fqn.
        objects: fqns of pickled values.
        order: every fqn, in the order of the file.
        paths: path in the nested state by fqn; None when the state is flat.
        bare: by fqn and offsets of a chunk, ByteCheckpoint's pickle of a tensor whose item is bare bytes; empty if
            the bytes are in the order of the tensor's elements.
        longer: whether bytes may follow a file's last item, as in shared memory that once held more.
        extra: attributes that torch does not have, such as `mcore_data`.
        names: dotted names of everything that the pickle mentions.
        writer: the torch version that wrote it, by the names of its classes.
        modified: file time, seconds since 1970.
    """

    path: Path
    rank: int | None
    tensors: Mapping[str, TensorMetadata] = field(repr=False)
    objects: tuple[str, ...] = field(repr=False)
    order: tuple[str, ...] = field(repr=False)
    stored: StoredItems = field(repr=False)
    paths: Mapping[str, KeyPath] | None = field(repr=False)
    extra: Mapping[str, Any] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    writer: str
    nbytes: int
    modified: float
    bare: Mapping[tuple[str, Ints], bytes] = field(default_factory=dict, repr=False)
    longer: bool = False

    @property
    def rank_file(self) -> RankFile:
        """The file as an entry of the checkpoint's list."""
        part = "" if self.rank is None else "metadata"
        return RankFile(self.path, self.rank, part, "read", self.nbytes, self.modified)


# -- the nested state --------------------------------------------------------------------------------------------------

MAX_PATH = 100
MAX_HOLES = 100_000
"""At most this many empty places in lists; a forged index of 2^40 would need more."""


class ContradictionError(ValueError):
    """The paths do not form a tree."""


class _Node(dict[Any, Any]):
    """A container of the unfinished tree; a leaf may be a plain dict."""


def nest(leaves: Iterable[tuple[str, Any]], paths: Mapping[str, KeyPath]) -> tuple[dict[str, Any], int]:
    """Rebuild a nested state from leaves and key paths; return it, and the number of empty places in its lists.

    Raises:
        ContradictionError: two names have one place, one lies inside another, or a list has an absurd index.
    """
    root = _Node()
    for fqn, leaf in leaves:
        path = paths.get(fqn, (fqn,))
        if len(path) > MAX_PATH:
            raise ContradictionError(f"{describe_for_error(fqn)} lies {len(path)} levels deep")
        *above, last = path
        node: Any = root
        for key in above:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise ContradictionError(
                    f"{describe_for_error(fqn)} lies inside of another value, at {describe_for_error(path)}"
                )
        if last in node:
            raise ContradictionError(
                f"{describe_for_error(fqn)} lies where another value is, at {describe_for_error(path)}"
            )
        node[last] = leaf
    holes = [0]
    return _state_dict({key: _container(value, holes) for key, value in root.items()}), holes[0]


def _container(node: Any, holes: list[int]) -> Any:
    """Turn a node into a dict or list. The recursion is as deep as the paths."""
    if not isinstance(node, _Node):
        return node
    children = {key: _container(child, holes) for key, child in node.items()}
    if all(type(key) is int for key in children):
        if min(children) < 0:
            raise ContradictionError(f"a place {describe_for_error(min(children))} in a list")
        size = max(children) + 1
        holes[0] += size - len(children)
        if holes[0] > MAX_HOLES:
            raise ContradictionError(f"a list of {describe_for_error(size)} places for {len(children)} values")
        values: list[Any] = [None] * size
        for index, child in children.items():
            values[index] = child
        return values
    if any(type(key) is int for key in children):
        raise ContradictionError(f"{describe_for_error(next(iter(children)))} and an index are keys of one container")
    return _state_dict(children)


def _state_dict(children: dict[str, Any]) -> dict[str, Any]:
    """The dict; in an optimizer's state, information that flattening lost is restored.

    An optimizer that had no state yet gets its empty `state` back: DCP saves no empty containers. Source: torch/
    distributed/checkpoint/_traverse.py, `traverse_state_dict`; torch/optim/optimizer.py, `state_dict`.
    """
    groups = children.get("param_groups")
    if children.keys() == {"param_groups"} and isinstance(groups, list):
        list_parameters = all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        children = {"state": {}, **children} if list_parameters else children
    return _numbered(children) if is_optimizer(children) else children


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Turn an optimizer's text keys back into the numbers of its param groups."""
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list):
        return optimizer
    numbers = {str(i): i for g in groups if isinstance(g.get("params"), list) for i in g["params"] if type(i) is int}
    state = optimizer["state"]
    if not numbers or not all(key in numbers for key in state):
        return optimizer
    return {**optimizer, "state": {numbers[key]: value for key, value in state.items()}}


# -- read a DCP folder's `.metadata`: one pickle of tensors, objects, and the place of each item -----------------------
# `Metadata` has three dicts: `state_dict_metadata` (fqn to `TensorStorageMetadata` or `BytesStorageMetadata`),
# `storage_data` (`MetadataIndex(fqn, offset)` to `_StorageInfo(relative_path, offset, length)`; the index's own `index`
# is a hint that its equality leaves out), and `planner_data` (fqn to the path in the nested state; None when the state
# was saved flat).
#
# The classes have moved: `torch.distributed._shard.checkpoint.*` in torch 1.13, `torch.distributed.checkpoint.*` since
# 2.0; `TensorProperties` came from `torch.distributed._shard.sharded_tensor.metadata` before 2.4. They are recognised
# by their last name. `storage_meta` and `version` are absent from older files, `transform_descriptors` from most;
# Megatron adds `mcore_data`. Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13, and
# files of torch 1.13.1, 2.0.1 and 2.13.0.
#
# ByteCheckpoint's class of the same name has also `all_tensor_metadata`: the same index to the pickle of each tensor,
# whose item is bare bytes. Source: bytecheckpoint/checkpointer/meta_type.py of 0.0.3; checked on its own files.
#  DLRover's `_StorageInfo` implies that every tensor is bare bytes, one element after the other: its file is a dump of
# the shared memory that the rank filled. Source: dlrover/trainer/torch/flash_checkpoint/fsdp_engine.py of 0.6.1,
# `_write_item` and `FileReader.read_data`; checked on files of its `SharedMemoryWriter`.

MAX_METADATA = 2 << 30
"""At most this many bytes of a `.metadata` are read; the largest runs write some hundred megabytes."""

BY_COLUMN = ("ChunkStorageMetadata", "MetadataIndex")
"""Classes that are read by column; `MetadataIndex` together with the `_StorageInfo` that follows each."""

FIELDS = (
    "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "all_tensor_metadata",
    "bytecheckpoint_version",
)  # fmt: skip


def read_metadata(path: Path, rank: int | None = None) -> DcpMetadata:
    """Read a `.metadata` file; runs none of its code.

    Raises:
        ReadError: it is cut, damaged, or not DCP metadata.
        UnsafePathError: it names a file outside of its folder.
    """
    with File(path) as file:
        if file.size > MAX_METADATA:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_METADATA} are read")
        data = file.read(0, file.size)
        machine = Machine(data, by_column=BY_COLUMN, stay=True)
        try:
            return _read(machine, rank, file)
        except (CkptoolsError, UnusualError):
            if not machine.batches.batches:
                raise
        # Something is wrong, or a batch of entries is in an unexpected place: read once more, opcode by opcode.
        return _read(Machine(data, by_column=()), rank, file)


def _read(machine: Machine, rank: int | None, file: File) -> DcpMetadata:
    tree = load_checked(machine, file.path, "DCP metadata")
    names = tuple(g.dotted for g in machine.globals.values())
    return _MetadataReading(file.path, tree).metadata(rank, names, file)


Columns = tuple[tuple[Ints, ...], tuple[Ints, ...]]


class _MetadataReading:
    def __init__(self, path: Path, tree: Any) -> None:
        self.path = path
        if class_of(tree) != "Metadata":
            what = tree.name if isinstance(tree, Opaque) else f"a {type(tree).__name__}"
            raise ReadError(path, f"holds {describe_for_error(what)}; expected torch.distributed.checkpoint's Metadata")
        self.fields = attributes(tree)
        self.files: dict[str, str] = {}
        self.checked: set[Ints] = set()
        self.columns: dict[tuple[object, ...], Columns] = {}

    def metadata(self, rank: int | None, names: tuple[str, ...], file: File) -> DcpMetadata:
        entries = self.fields.get("state_dict_metadata")
        if not isinstance(entries, dict) or not all(isinstance(k, str) for k in entries):
            raise self._bad(f"state_dict_metadata is {describe_class(entries)}; expected a dict of names")
        tensors = {fqn: self._tensor(fqn, e) for fqn, e in entries.items() if class_of(e) == "TensorStorageMetadata"}
        objects = tuple(fqn for fqn, e in entries.items() if class_of(e) == BYTES)
        unknown = next((fqn for fqn in entries if fqn not in tensors and class_of(entries[fqn]) != BYTES), None)
        if unknown is not None:
            raise self._bad(
                f"{describe_for_error(unknown)} is {describe_class(entries[unknown])}; "
                f"expected a tensor's or bytes' metadata"
            )
        stored = self._stored()
        if holds_skipped([value for key, value in self.fields.items() if key not in FIELDS[:3:2]], set()):
            raise UnusualError("a batch of entries elsewhere")
        chunks = zip(stored.fqns, stored.offsets, strict=True)
        return DcpMetadata(
            path=self.path,
            rank=rank,
            tensors=tensors,
            objects=objects,
            order=tuple(entries),
            stored=stored,
            paths=self._paths(),
            extra={k: v for k, v in self.fields.items() if isinstance(k, str) and k not in FIELDS},
            names=names,
            writer=_writer(names),
            nbytes=file.size,
            modified=file.modified,
            bare={(fqn, at): b"" for fqn, at in chunks if at is not None} if DLROVER in names else self._bare(),
            longer=DLROVER in names,
        )

    def _bare(self) -> dict[tuple[str, Ints], bytes]:
        """ByteCheckpoint's pickles of tensors, which lack the tensors' bytes."""
        listed, found = self.fields.get("all_tensor_metadata"), dict[tuple[str, Ints], bytes]()
        if listed is not None and not isinstance(listed, dict):
            raise self._bad(f"all_tensor_metadata is {describe_class(listed)}; expected a dict")
        for index, pickle in listed.items() if listed else ():
            fields = attributes(index)
            fqn, offset = fields.get("fqn"), fields.get("offset")
            if isinstance(fqn, str) and offset is not None and isinstance(pickle, bytes):
                found[fqn, self._ints(offset, fqn, "offset of a chunk")] = pickle
        return found

    def _bad(self, what: str) -> ReadError:
        return ReadError(self.path, f"DCP metadata: {what}; the file is damaged or forged")

    def _tensor(self, fqn: str, entry: Any) -> TensorMetadata:
        fields = attributes(entry)
        properties = fields.get("properties")
        # `(dtype, layout, requires_grad, memory format, pin_memory)`, or a dict of these.
        state = properties.state if isinstance(properties, Opaque) else None
        stated = state if isinstance(state, dict) else {}
        dtype, layout, grad = stated.get("dtype"), stated.get("layout"), stated.get("requires_grad")
        if isinstance(state, tuple) and len(state) >= 3:
            dtype, layout, grad = state[:3]
        shape = self._ints(fields.get("size"), fqn, "size")
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self._bad(f"{describe_for_error(fqn)} has {describe_class(chunks)} for its list of chunks")
        offsets, sizes = self._columns(fqn, list(gathered(chunks)), len(shape))
        return TensorMetadata(
            dtype=dtype_of(dtype),
            stated_dtype=dtype.dotted if isinstance(dtype, Global) else describe_class(dtype),
            layout=layout.name if isinstance(layout, (TorchName, Global)) else "strided",
            shape=shape,
            offsets=offsets,
            sizes=sizes,
            requires_grad=grad is True,
        )

    def _columns(self, fqn: str, chunks: list[Any], ndim: int) -> Columns:
        """Offsets and sizes of a tensor's distinct chunks; read once for tensors that are cut alike."""
        if not all(isinstance(chunk, Batch) for chunk in chunks):
            return self._read_columns(fqn, chunks, ndim)
        key = ndim, *[(id(chunk.rows), chunk.start, chunk.stop) for chunk in chunks]
        found = self.columns[key] = self.columns.get(key) or self._read_columns(fqn, chunks, ndim)
        return found

    def _read_columns(self, fqn: str, chunks: list[Any], ndim: int) -> Columns:
        offsets: list[Ints] = []
        sizes: list[Ints] = []
        for chunk in chunks:
            if isinstance(chunk, Batch):
                offsets += chunk.column("offsets", kind="tuple")
                sizes += chunk.column("sizes", kind="tuple")
                continue
            fields = attributes(chunk)
            offsets.append(self._ints(fields.get("offsets"), fqn, "offsets of a chunk"))
            sizes.append(self._ints(fields.get("sizes"), fqn, "sizes of a chunk"))
        if None in offsets or None in sizes:
            raise UnusualError("a batch of chunks without offsets or sizes")
        for column, what in ((offsets, "offsets"), (sizes, "sizes")):
            for value in {*column} - self.checked:  # each distinct value once in this file
                self.checked.add(self._ints(value, fqn, f"{what} of a chunk"))
            if {*map(len, column)} - {ndim}:
                value = next(value for value in column if len(value) != ndim)
                text = f"has {ndim} dimensions and a chunk with {what} {describe_for_error(value)}"
                raise self._bad(f"{describe_for_error(fqn)} {text}")
        if len({*offsets}) == len(offsets):
            return tuple(offsets), tuple(sizes)
        boxes = dict.fromkeys(zip(offsets, sizes, strict=True))
        return tuple(at for at, _ in boxes), tuple(extent for _, extent in boxes)

    def _ints(self, value: Any, fqn: str, what: str) -> Ints:
        if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
            raise self._bad(f"{describe_for_error(fqn)}: {what} {describe_for_error(value)}")
        return tuple(value)

    def _stored(self) -> StoredItems:
        listed = self.fields.get("storage_data")
        if not isinstance(listed, dict):
            raise self._bad(f"storage_data is {describe_class(listed)}; expected a dict")
        stored = StoredItems()
        for index, info in listed.items():
            if isinstance(index, Batch) and index is info:
                self._add_batch(stored, index)
            else:
                self._add(stored, index, info)
        return stored

    def _add(self, stored: StoredItems, index: Any, info: Any) -> None:
        fields = attributes(index)
        fqn, offset = fields.get("fqn"), fields.get("offset")
        if not isinstance(fqn, str):
            raise self._bad(f"an item's name is {describe_for_error(fqn)}")
        fields = attributes(info)
        start, length = self._ints((fields.get("offset"), fields.get("length")), fqn, "offset and length of an item")
        transforms = fields.get("transform_descriptors") or ()
        if not isinstance(transforms, (list, tuple)) or not all(isinstance(t, str) for t in transforms):
            raise self._bad(f"{describe_for_error(fqn)}: transform descriptors {describe_for_error(transforms)}")
        if transforms:
            stored.transforms[len(stored)] = tuple(transforms)
        stored.offsets.append(None if offset is None else self._ints(offset, fqn, "offset of a chunk"))
        stored.files.append(self._inside(fqn, fields.get("relative_path")))
        stored.starts.append(start)
        stored.lengths.append(length)
        stored.fqns.append(fqn)

    def _add_batch(self, stored: StoredItems, batch: Batch) -> None:
        """Add the items of a batch, checking each distinct value once; the hints in indices are ignored."""
        fqns, offsets = batch.column("fqn", kind="text"), batch.column("offset", kind="tuple")
        paths = batch.column("relative_path", kind="text", value=1)
        starts, lengths = (batch.column(name, kind="int", value=1) for name in ("offset", "length"))
        transforms = batch.column("transform_descriptors", kind="texts", value=1)
        if any(transforms):
            stored.transforms |= enumerate(transforms, len(stored))
        if None in (fqns[0], paths[0], starts[0], lengths[0]):
            raise UnusualError("a batch of items that lack something")
        for offset in {*offsets} - self.checked - {None}:
            self.checked.add(self._ints(offset, fqns[0], "offset of a chunk"))
        self._ints((min(starts), min(lengths)), fqns[0], "offset and length of an item")
        known = {file: self._inside(fqns[0], file) for file in set(paths)}
        stored.fqns += fqns
        stored.offsets += offsets
        stored.files += map(known.__getitem__, paths)
        stored.starts += starts
        stored.lengths += lengths

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
DLROVER = "dlrover.trainer.torch.flash_checkpoint.fsdp_engine._StorageInfo"


def class_of(value: Any) -> str:
    """Last name of the class of a foreign object; empty for any other value."""
    return value.name.rpartition(".")[2] if isinstance(value, Opaque) else ""


def describe_class(value: Any) -> str:
    """Describe a foreign object's class, or a value, for an error message."""
    return describe_for_error(value.name) if isinstance(value, Opaque) else describe_for_error(value)


def _writer(names: tuple[str, ...]) -> str:
    """The torch version that wrote it, by the module paths of its classes and their fields."""
    if any(n.startswith("bytecheckpoint.") for n in names):
        return "ByteCheckpoint"
    if DLROVER in names:
        return "DLRover"
    if any(n.startswith("torch.distributed._shard.checkpoint.") for n in names):
        return "torch 1.13"
    if "torch.distributed._shard.sharded_tensor.metadata.TensorProperties" in names:
        return "torch 2.0 to 2.3"
    if "torch.distributed.checkpoint.metadata.TensorProperties.strides" in names:
        return "torch 2.15 or later"
    return "torch 2.4 or later" if "torch.distributed.checkpoint.metadata.TensorProperties" in names else "torch"
