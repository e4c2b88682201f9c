"""A torch.distributed.checkpoint (DCP) folder, which `torch.distributed.checkpoint.load` reads at any world size.

`.distcp` files are items back to back. An item is a torch.save archive of one value; a tensor's item has only that
tensor, in a storage of its own. A loading rank reads each item with a needed row whole into memory, so large tensors
are cut into items of several rows. A tied weight is written under each of its names, as torch does: items that two
names share would load, but would look like a `.metadata` that points to the wrong bytes.
Source: torch/distributed/checkpoint/{filesystem,planner_helpers}.py of torch 2.13; class paths as of 2.6.

`.metadata` is a pickle of the dataclasses of torch/distributed/checkpoint/{metadata,filesystem}.py, with their
attributes as of torch 2.4, under the names of every version since; an older reader ignores unknown ones
(`storage_meta`, `version`), and `_StorageInfo.transform_descriptors` of newer versions keeps its default None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ckptools.consolidate.options import FLAT, naming_notes, naming_of
from ckptools.consolidate.provenance import record_of
from ckptools.consolidate.writers.layout import (
    Framing,
    Job,
    OutputContents,
    OutputLayout,
    ReadBack,
    ReadTensor,
    WriteOptions,
    files_of,
    output_dtype,
    quoted,
)
from ckptools.consolidate.writers.pickle_emitter import Call, Emitter, Instance
from ckptools.consolidate.writers.pt import Packed
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import RefusedError
from ckptools.model.provenance import FILE_NAME as RECORD
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Global, Size, TorchName
from ckptools.option import spelled
from ckptools.tensor_io.slicing import RowBlock, split_rows
from ckptools.text import KeyPath, first_few, fqn_of, plural
from ckptools.training_state.models import chosen_models
from ckptools.training_state.optimizers import Naming, give_names, group_ids
from ckptools.training_state.sections import Section, is_flat_optimizer

# -- the tree of a DCP folder, and its flattened names -----------------------------------------------------------------
# The tree is the source's, so that the script that saved it loads it. On request it is that of
# torch.distributed.checkpoint.state_dict: `model` for `set_model_state_dict`, `optimizer` for
# `set_optimizer_state_dict`; everything else keeps its own path. In both, an optimizer keyed by number gets names,
# which `set_optimizer_state_dict` takes; but in the source's tree the optimizer of a DCP keeps its numbers, by which
# its script loads it, unless the user gave names. The tree is flattened as by DCP's default planner: dicts always,
# lists that contain tensors, dicts or such lists; everything else is one value; keys become text; an empty dict is
# dropped. (Writing an empty dict would be worse: a loading planner that finds a key which only the rules of torch 2.3
# give takes the whole folder for one of that version.) The module versions of a state dict (`_metadata`) have no place
# there.
# Source: torch/distributed/checkpoint/{_traverse,_nested_dict,default_planner,state_dict}.py of torch 2.13.


ObjectPath = tuple[str | int, ...]
"""Path of a value in the state dict; a number is an index of a list, a text a key of a dict."""

OF_ADAM = ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Hyperparameters that torch/optim/adam.py gained over time; `dcp.load` fails if a folder lacks them."""


UNCHANGED = Naming({}, "fqn", (), (), "")
"""For an optimizer whose keys stay as they are in the source."""

NEEDS_NAMES = "torch's set_optimizer_state_dict takes names only; dcp.load takes numbers into optimizer.state_dict()"


@dataclass(frozen=True)
class Leaf:
    """One value of the flattened tree: a tensor, or a value without one.

    `source` is its key path in the selection's tree, `path` its key path in the state dict of the output.
    """

    source: KeyPath
    path: ObjectPath
    value: Any


@dataclass(frozen=True)
class _Move:
    """A section, at a key path of the selection's tree, that moves to the path `top` of the output.

    `naming` has the names of an optimizer's parameters.
    """

    section: Section
    at: KeyPath
    top: ObjectPath
    naming: Naming

    def holds(self, path: KeyPath) -> bool:
        n = len(self.at)
        return path[:n] == self.at and (len(path) == n or path[n] in self.section.value)

    def name(self, key: Any) -> Any:
        """The name of a parameter in the output."""
        return self.naming.names.get(key, key)

    def apply(self, leaf: Leaf) -> Leaf:
        rest = list(leaf.path[len(self.at) :])
        value = leaf.value
        if self.section.kind == "optimizer" and not is_flat_optimizer(self.section.value):
            if rest[0] == "state" and len(rest) > 1:
                rest[1] = str(self.name(leaf.source[len(self.at) + 1]))
            elif rest[0] == "param_groups" and rest[2:] == ["params"] and isinstance(value, (list, tuple)):
                value = [self.name(i) for i in value]
        return Leaf(leaf.source, (*self.top, *rest), value)


@dataclass(frozen=True)
class Arranged:
    """A tree arranged for loading, notes on changes to its values, and the sections that move to top-level keys."""

    leaves: Sequence[Leaf]
    notes: Sequence[str]
    moves: Sequence[_Move]

    def name(self, path: KeyPath) -> str:
        """The fqn in the output for a key path of the selection's tree."""
        move = next((m for m in self.moves if len(path) > len(m.at) and m.holds(path)), None)
        plain = Leaf(path, tuple(k if isinstance(k, int) else str(k) for k in path), None)
        return fqn_of((move.apply(plain) if move else plain).path)


def arrange(selection: OutputContents, out: Path, layout: str) -> Arranged:
    """Flatten a selection's tree in the `saved` or in the `flat` layout."""
    moves = _flat_moves(selection, out) if layout == FLAT else _saved_moves(selection, out)
    flat = _Flattening([m.at for m in moves])
    leaves: dict[str, Leaf] = {}
    for leaf in flat.leaves(selection.tree, (), ()):
        move = next((m for m in moves if m.holds(leaf.source)), None)
        named = move.apply(leaf) if move else leaf
        if not named.path or not isinstance(named.path[0], str):
            whole = selection.tree if layout == FLAT else selection.source.tree
            raise RefusedError(out, f"a DCP holds a dict, and this is a {type(whole).__name__}; write a .pt")
        fqn = fqn_of(named.path)
        if fqn in leaves:
            raise RefusedError(out, f"two values would be called {fqn}; write a .pt, which keeps the tree")
        leaves[fqn] = named
    placed = list(leaves.values())
    return Arranged(placed, [*_notes_on_moves(moves, placed, layout), *flat.notes(moves)], moves)


class _Flattening:
    """Flatten a tree by the planner's rules; a sequence on the path to a section, `entered`, is flattened too."""

    def __init__(self, entered: Iterable[KeyPath]) -> None:
        self.entered = list(entered)
        self._empty: list[KeyPath] = []
        self._odd: list[KeyPath] = []

    def leaves(self, node: Any, at: KeyPath, path: ObjectPath) -> Iterator[Leaf]:
        """Yield the leaves below a node."""
        if isinstance(node, dict):
            self._empty += [] if node else [at]
            self._odd += [(*at, key) for key in node if not isinstance(key, str)]
            for key, value in node.items():
                yield from self.leaves(value, (*at, key), (*path, str(key)))
        elif isinstance(node, (list, tuple)) and (
            _descended(node) or any(at == p[: len(at)] != p for p in self.entered)
        ):
            for i, value in enumerate(node):
                yield from self.leaves(value, (*at, i), (*path, i))
        else:
            yield Leaf(at, path, node)

    def notes(self, moves: Iterable[_Move]) -> Iterator[str]:
        """Notes on values that a DCP cannot keep as they were."""
        if self._empty:
            yield f"{plural(len(self._empty), 'empty dict')} left out, as DCP does ({_some(self._empty)})"
        ids = [(*m.at, "state") for m in moves if m.section.kind == "optimizer"]
        odd = [p for p in self._odd if p[:-1] not in ids]
        if odd:
            yield f"{plural(len(odd), 'key')} became text, as DCP does ({_some(odd)})"


def _some(paths: list[KeyPath]) -> str:
    return first_few(list(map(fqn_of, paths)), 3)


def _descended(node: list[Any] | tuple[Any, ...]) -> bool:
    if type(node) is not list:
        return False
    return any(isinstance(v, (dict, Tensor)) or (isinstance(v, list) and _descended(v)) for v in node)


def _saved_moves(selection: OutputContents, out: Path) -> list[_Move]:
    """Put each section where the source has it; a single optimizer is keyed by name."""
    places = [(s, at) for s, at in selection.places if s.kind in ("model", "optimizer")]
    single, moves = sum(s.kind == "optimizer" for s, _ in places) == 1, []
    for section, at in places:
        naming = naming_of(selection, section) if single else UNCHANGED
        by_number = selection.source.format == "dcp" and naming.by != "told"
        naming = UNCHANGED if by_number else _of_one_kind(naming, section, out)
        moves.append(_Move(section, at, _object_path(selection.source.tree, section.path), naming))
    return sorted(moves, key=lambda m: -len(m.at))


def _object_path(tree: Any, path: KeyPath) -> ObjectPath:
    """A key path as DCP's planner has it: numbers are indexes of lists, every other key is a text."""
    found: list[str | int] = []
    for key in path:
        found.append(key if isinstance(tree, (list, tuple)) else str(key))
        # The name of a model inside one state dict is only the beginning of keys.
        tree = tree[key] if isinstance(tree, (list, tuple)) or key in tree else {}
    return tuple(found)


def _flat_moves(selection: OutputContents, out: Path) -> list[_Move]:
    """The trained model and the optimizer to move; if there are several of a kind, each keeps its place."""
    moves, chosen = [], {section.path for section in chosen_models(selection.source)}
    for kind in ("model", "optimizer"):
        places = [(s, at) for s, at in selection.places if s.kind == kind]
        if kind == "model" and len(places) > 1:
            places = [(s, at) for s, at in places if s.path in chosen]
        if len(places) == 1:
            section, at = places[0]
            moves.append(_Move(section, at, (kind,), _of_one_kind(naming_of(selection, section), section, out)))
    # A model at the root of the tree comes last: it takes the keys that no other section has.
    return sorted(moves, key=lambda m: -len(m.at))


def _of_one_kind(naming: Naming, section: Section, out: Path) -> Naming:
    """Name all parameters or none: neither torch's API nor `dcp.load` accepts a mix."""
    if section.kind != "optimizer" or is_flat_optimizer(section.value) or not naming.unnamed:
        return naming
    keys = [*section.value["state"], *(i for ids in group_ids(section.value) for i in ids)]
    if all(isinstance(key, int) or str(key).isdecimal() for key in keys):
        return naming._replace(names={}, unnamed=tuple(dict.fromkeys(keys)))
    lacking = f"{len(naming.unnamed)} of {len(set(keys))} parameters of the optimizer have no name"
    ways = f"{give_names()}, or write a .pt, or {spelled('only', 'model')}"
    text = f"{lacking}, and nothing loads a mix of names and numbers; {ways}"
    raise RefusedError(out, text)


def _notes_on_moves(moves: Iterable[_Move], leaves: Iterable[Leaf], layout: str) -> Iterator[str]:
    moves = sorted(moves, key=lambda m: m.section.kind)
    moved = [f"{fqn_of(m.top)} is {fqn_of(m.section.path)}" for m in moves if m.section.path not in ((), m.top)]
    if layout == FLAT and moved:
        yield f"arranged for torch's state_dict API: {', '.join(moved)}"
    for move in (m for m in moves if m.section.kind == "optimizer" and m.naming is not UNCHANGED):
        yield from _notes_on_optimizer(move, [leaf for leaf in leaves if move.holds(leaf.source)])


def _notes_on_optimizer(move: _Move, leaves: Iterable[Leaf]) -> Iterator[str]:
    if is_flat_optimizer(move.section.value):
        yield "optimizer is flattened, as the source has it: load it with flatten_optimizer_state_dict=True"
        return
    yield from naming_notes(move.naming)
    if move.naming.unnamed and move.naming.by != "fqn":
        yield f"optimizer: {NEEDS_NAMES}"
    steps = [leaf for leaf in leaves if leaf.path[-1] == "step" and not isinstance(leaf.value, Tensor)]
    if steps:
        yield f"optimizer: step is a plain number for {plural(len(steps), 'parameter')}; torch makes tensors of them"
    adams = [group for group in move.section.value["param_groups"] if "betas" in group]
    lacking = [key for key in OF_ADAM if any(key not in group for group in adams)]
    if lacking:
        yield (
            f"optimizer: param groups lack {', '.join(lacking)}, which torch's Adam has by now: "
            "load with DefaultLoadPlanner(allow_partial_load=True)"
        )


# -- the folder --------------------------------------------------------------------------------------------------------


ITEM_BYTES = 8 << 20
"""Larger tensors are cut into items of about this size. Measured with 0.9 GB on 2 cores: 8 ranks that load
their rows took 9.0 s without cutting, 4.0 s with items of 64 MiB, 1.0 s with 16, 0.6 s with 4; writing is equally fast
down to 8, and slower below.
"""

MAX_KEYS = 6
"""Keys of the state dict that the loading line names."""

FILE_NAME = ".metadata"
VERSION = "1.0.0"
"""torch/distributed/checkpoint/filesystem.py, `CURRENT_DCP_VERSION`."""

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def lay_out(selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    """Plan a DCP folder."""
    arranged = arrange(selection, out, options.layout)
    items = [item for leaf in arranged.leaves for item in _items(leaf, selection, options)]
    groups = files_of([item.packed.archive.nbytes for item in items], options.max_shard_size)
    jobs: list[Job] = []
    sizes: list[int] = []
    for file, numbers in enumerate(groups):
        at = 0
        for number in numbers:
            item = items[number]
            item.file, item.at, item.first_job = file, at, len(jobs)
            jobs += item.packed.jobs(file, at)
            at += item.packed.archive.nbytes
        sizes.append(at)
    record = record_of(selection, name_of=arranged.name)
    # The metadata comes last: once it has its name, the folder can be loaded.
    others = [(RECORD, record.to_json().encode("ascii"))] if record else []
    values = [(first.fqn, [first, *more]) for _, (first, *more) in groupby(items, key=lambda item: id(item.leaf))]
    state = {
        "state_dict_metadata": {fqn: _described(own) for fqn, own in values},
        "planner_data": {fqn: first.leaf.path for fqn, (first, *_) in values},
        "storage_data": {_index(item): _storage_info(item) for item in items},
        "storage_meta": None,
        "version": VERSION,
    }
    others.append((FILE_NAME, Emitter().dump(Instance(METADATA, "Metadata", state))))

    def framing(file: int) -> Iterator[Framing]:
        if file >= len(groups):
            yield Framing(0, lambda _: others[file - len(groups)][1])
            return
        for number in groups[file]:
            item = items[number]
            yield from item.packed.archive.framing(item.at, item.first_job)

    tops = list(dict.fromkeys(str(leaf.path[0]) for leaf in arranged.leaves))
    keys = ", ".join(map(quoted, tops[:MAX_KEYS])) + (", …" if len(tops) > MAX_KEYS else "")
    what = f"  # state: a dict with what you want of {keys}" if tops else ""
    return OutputLayout(
        files=(
            *((out / _file_name(i), size) for i, size in enumerate(sizes)),
            *((out / name, len(data)) for name, data in others),
        ),
        jobs=tuple(jobs),
        framing=framing,
        read_back=partial(_read_back, items),
        checksums=True,
        folder=out,
        notes=tuple(arranged.notes),
        tensors=sum(isinstance(leaf.value, Tensor) for leaf in arranged.leaves),
        name_of=arranged.name,
        load=f"import torch.distributed.checkpoint as dcp; dcp.load(state, checkpoint_id={quoted(out)}){what}",
    )


@contextmanager
def _read_back(items: Sequence[_Item], paths: Sequence[Path]) -> Iterator[ReadBack]:
    """Let torch's reader read the `.metadata`, then each item."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(paths[-1].parent)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    tensors = [
        ReadTensor(item.fqn, item.value, item.dtype, partial(_read_item, reader, metadata, item, item.box))
        for item in items
        if item.box is not None
    ]
    yield ReadBack(f"torch.distributed.checkpoint {torch.__version__}", tensors)


def _read_item(reader: Any, metadata: Any, item: _Item, box: Box) -> Any:
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    target = torch.empty(box.sizes, dtype=getattr(torch, item.dtype))
    planner = DefaultLoadPlanner()
    planner.set_up_planner({item.fqn: target}, metadata, is_coordinator=True)
    index = MetadataIndex(item.fqn, torch.Size(box.offsets), item.number)
    begin, sizes = torch.Size([0] * len(box.sizes)), torch.Size(box.sizes)
    read = ReadItem(LoadItemType.TENSOR, MetadataIndex(item.fqn), begin, index, begin, sizes)
    reader.read_data(LoadPlan([read]), planner).wait()
    return target


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


@dataclass
class _Item:
    """An item: a plain value, or rows of a tensor.

    Attributes:
        leaf: the whole value, with its path in the state dict.
        number: number of the item among the items of the value.
        box: the rows; None for a plain value.
        value: the tensor of these rows, or the plain value.
        dtype: of the tensor in the output; empty for a plain value.
        packed: its archive, at byte `at` of file number `file`.
        first_job: number of the job that copies its tensor.
    """

    leaf: Leaf
    number: int
    box: Box | None
    value: Any
    dtype: str
    packed: Packed
    file: int = 0
    at: int = 0
    first_job: int = 0

    @property
    def fqn(self) -> str:
        return fqn_of(self.leaf.path)


def _items(leaf: Leaf, selection: OutputContents, options: WriteOptions) -> Iterator[_Item]:
    if not isinstance(leaf.value, Tensor):
        yield _Item(leaf, 0, None, leaf.value, "", Packed(leaf.value, leaf.source, selection, options))
        return
    dtype = output_dtype(leaf.source, leaf.value, selection, options.dtype)
    # A state dict of torch holds plain tensors: no parameters, and nothing of autograd.
    plain = replace(leaf.value, parameter=False, requires_grad=False)
    for number, (box, rows) in enumerate(_cut(plain, ITEMSIZE[dtype])):
        yield _Item(leaf, number, box, rows, dtype, Packed(rows, leaf.source, selection, options))


def _cut(tensor: Tensor, width: int) -> Iterator[tuple[Box, Tensor]]:
    """Cut a tensor into equal pieces of rows with about `ITEM_BYTES` each; a small one stays whole."""
    nbytes = tensor.numel * width
    if nbytes <= ITEM_BYTES or not tensor.shape:
        yield Box.whole(tensor.shape), tensor
        return
    pieces = min(tensor.shape[0], -(-nbytes // ITEM_BYTES))
    yield from row_pieces(tensor, -(-tensor.shape[0] // pieces))


def row_pieces(tensor: Tensor, count: int) -> Iterator[tuple[Box, Tensor]]:
    """Cut a tensor along its first dimension into pieces of `count` rows; yield the box and the tensor of each."""
    total, rest = tensor.shape[0], tensor.shape[1:]
    blocks = [RowBlock(at, min(count, total - at), number, 0) for number, at in enumerate(range(0, total, count))]
    for block, rows in zip(blocks, split_rows(tensor, blocks), strict=True):
        yield Box((block.start, *[0] * len(rest)), rows.shape), replace(rows, kind=tensor.kind)


# -- .metadata ---------------------------------------------------------------------------------------------------------


def _described(items: Sequence[_Item]) -> Instance:
    tensor = items[0].leaf.value
    if not isinstance(tensor, Tensor):
        return Instance(METADATA, "BytesStorageMetadata", {})
    boxes = [{"offsets": Size(item.box.offsets), "sizes": Size(item.box.sizes)} for item in items if item.box]
    chunks = [Instance(METADATA, "ChunkStorageMetadata", box) for box in boxes]
    # `TensorProperties.__setstate__` takes dtype, layout, requires_grad, memory format and pin_memory.
    contiguous = Call(METADATA, "_MEM_FORMAT_ENCODING", (0,))
    dtype = Global("torch", items[0].dtype)
    state: Any = (dtype, TorchName("strided"), tensor.requires_grad, contiguous, False)
    properties = Instance(METADATA, "TensorProperties", state)
    state = {"properties": properties, "size": Size(tensor.shape), "chunks": chunks}
    return Instance(METADATA, "TensorStorageMetadata", state)


def _index(item: _Item) -> Instance:
    state: dict[str, Any] = {"fqn": item.fqn, "index": None}
    if item.box is not None:
        state |= {"index": item.number, "offset": Size(item.box.offsets)}
    return Instance(METADATA, "MetadataIndex", state)


def _storage_info(item: _Item) -> Instance:
    state = {"relative_path": _file_name(item.file), "offset": item.at, "length": item.packed.archive.nbytes}
    return Instance(FILESYSTEM, "_StorageInfo", state)
