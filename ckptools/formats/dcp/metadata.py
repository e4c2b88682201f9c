"""Records of the `.metadata` of a DCP folder, and the nested state that its paths make of flat names.

The records are of tensors, objects, and where each of their items lies. DCP says chunk for shard. An item is a chunk of
a tensor, or a pickled object.

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

from ckptools.files.compressed import has_zstd, is_zstd
from ckptools.model.columns import by_value
from ckptools.model.regions import Ints
from ckptools.model.tree import KeyPath
from ckptools.model.values import describe_for_error
from ckptools.training_state.sections import is_optimizer


@dataclass(frozen=True, slots=True)
class StoredItem:
    """The extent of an item in a data file.

    Attributes:
        file: relative path, checked to stay in the folder.
        offset: byte offset of the item.
        length: bytes of the item.
        transforms: what was done to its bytes, such as `stream.zstd/1`; empty when nothing was.
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
        """Whether the item was compressed by zstd, which ckptools unpacks."""
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
    """The extents of all items in a `.metadata`, by column; item `i` has element `i` of each.

    Attributes:
        fqns: of the tensors and objects.
        offsets: of the chunks; None for an object.
        files: relative paths, checked to stay in the folder.
        starts: byte offsets.
        lengths: in bytes.
        transforms: by item, for those whose bytes went through any.
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
        """The items of a tensor or object by the offsets of their chunks, and the offsets with two places."""
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
        offsets: of its chunks, in file order; equal chunks once.
        sizes: of these.
        requires_grad: as saved.
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
    """One `.metadata` file.

    Attributes:
        path: the file.
        rank: the writer of `__3.metadata`; None for the metadata of all ranks.
        tensors: by fqn.
        objects: fqns of pickled values.
        order: every fqn, in the order of the file.
        stored: where items lie.
        paths: path in the nested state by fqn; None when the state is flat.
        bare: by fqn and offsets of a chunk, ByteCheckpoint's pickle of a tensor whose item is nothing but its bytes;
            empty where they are in the order of its elements.
        longer: whether files may go on behind their last item, as shared memory that holds less than it did.
        extra: attributes that torch does not have, such as `mcore_data`.
        names: dotted names of everything that the pickle mentions.
        writer: the torch version that wrote it, by the names of its classes.
        nbytes: size of the file.
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


# -- the nested state -------------------------------------------------------------------------------------------------


MAX_PATH = 100
MAX_HOLES = 100_000
"""Most empty places in lists; a forged index of 2^40 asks for more."""


class ContradictionError(ValueError):
    """The paths describe no tree."""


class _Node(dict[Any, Any]):
    """A container of the unfinished tree; a leaf may be a plain dict."""


def nest(leaves: Iterable[tuple[str, Any]], paths: Mapping[str, KeyPath]) -> tuple[dict[str, Any], int]:
    """Rebuild a nested state from leaves and key paths; return it, and how many places of its lists are empty.

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
        return _list(children, holes)
    if any(type(key) is int for key in children):
        raise ContradictionError(f"{describe_for_error(next(iter(children)))} and an index are keys of one container")
    return _state_dict(children)


def _state_dict(children: dict[str, Any]) -> dict[str, Any]:
    """The dict, with what flattening lost where it is an optimizer's state."""
    children = _with_empty_state(children)
    return _numbered(children) if is_optimizer(children) else children


def _with_empty_state(children: dict[str, Any]) -> dict[str, Any]:
    """Give an optimizer that had no state yet its empty `state` back: DCP saves no empty containers.

    Source: torch/distributed/checkpoint/_traverse.py, `traverse_state_dict`; torch/optim/optimizer.py, `state_dict`.
    """
    groups = children.get("param_groups")
    if children.keys() != {"param_groups"} or not isinstance(groups, list):
        return children
    list_parameters = all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    return {"state": {}, **children} if list_parameters else children


def _list(children: dict[int, Any], holes: list[int]) -> list[Any]:
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
