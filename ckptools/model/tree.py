"""The tree of a checkpoint: nested dicts, lists and tuples, walked without recursion, and the key paths in it."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from copy import copy
from itertools import chain
from typing import Any, NamedTuple

from ckptools.model.records import MAX_LINE, as_html, to_plain
from ckptools.model.tensor import Tensor
from ckptools.text import Key, KeyPath, clip, clip_middle, printable


def walk(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(key path, leaf)` of a tree of dicts, lists and tuples, in order, without recursion.

    Empty containers are leaves too, so that every value of a file is seen. A container that contains itself is
    walked once along each path and not entered again.
    """
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        children = None if id(node) in above else children_of(node)
        if not children:
            yield path, node
            continue
        inside = above | {id(node)}
        stack += [((*path, key), child, inside) for key, child in reversed(children)]


def children_of(node: Any) -> list[tuple[Key, Any]] | None:
    """The `(key, value)` pairs of a dict, list or tuple; None for anything else."""
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    return None


def of_kinds(values: Collection[Any], kinds: tuple[type, ...]) -> list[Any]:
    """The values that are instances of some classes, in order.

    With many values, each distinct class is checked once: the RNG states of 256 ranks are 160,000 ints.
    """
    if len(values) > MANY and not any(issubclass(kind, kinds) for kind in set(map(type, values))):
        return []
    return [value for value in values if isinstance(value, kinds)]


MANY = 32


def nodes_in(tree: Any, kinds: tuple[type, ...]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(key path, node)` of every node of some classes, containers included if asked for, in order.

    Other nodes get no key path, which saves time: the RNG states of 256 ranks are 300,000 ints.
    """
    entered = (dict, list, tuple, *kinds)
    stack: list[tuple[KeyPath, Any, frozenset[int]]] = [((), tree, frozenset())]
    while stack:
        path, node, above = stack.pop()
        if isinstance(node, kinds):
            yield path, node
        children = None if id(node) in above else children_of(node)
        if children:
            inside = above | {id(node)}
            deeper = ((key, child) for key, child in reversed(children) if isinstance(child, entered))
            stack += [((*path, key), child, inside) for key, child in deeper]


def tensors_in(tree: Any) -> Iterator[tuple[KeyPath, Tensor]]:
    """Yield `(key path, tensor)` of every tensor in the tree."""
    return nodes_in(tree, (Tensor,))


GONE = object()
"""Marks a key that a rebuilt dict leaves out."""


class Renamed(NamedTuple):
    """A value that a rebuilt dict has under another key, in the place of the former key."""

    key: Any
    value: Any


def rebuilt(tree: Any, changed: Callable[[dict[Any, Any]], Mapping[Any, Any]]) -> Any:
    """Copy a tree; for each of its dicts, `changed` returns the keys to replace, with their new values.

    A new value may be `GONE`, or `Renamed` for a value under another key.
    """
    if type(tree) in (list, tuple):
        return type(tree)(rebuilt(value, changed) for value in tree)
    if not isinstance(tree, dict):
        return tree
    made, new = copy(tree), changed(tree)
    made.clear()
    for key, value in tree.items():
        if key not in new:
            made[key] = rebuilt(value, changed) if isinstance(value, (dict, list, tuple)) else value
        elif isinstance(new[key], Renamed):
            made[new[key].key] = new[key].value
        elif new[key] is not GONE:
            made[key] = new[key]
    return made


def empty_like(container: dict[Any, Any]) -> dict[Any, Any]:
    """An empty dict of the same type, with a state dict's `_metadata` and other attributes kept."""
    if isinstance(container, defaultdict):
        return defaultdict(container.default_factory)
    if isinstance(container, Counter):
        return Counter()
    if isinstance(container, OrderedDict):
        empty: OrderedDict[Any, Any] = OrderedDict()
        for name in ("_metadata", "_other_attributes"):
            if hasattr(container, name):
                setattr(empty, name, getattr(container, name))
        return empty
    return {}


def with_leaves(tree: Any, leaves: Mapping[KeyPath, Any]) -> Any:
    """Copy a tree with other values at some of its key paths; branches without a change are shared."""
    if () in leaves:
        return leaves[()]
    below: dict[Any, dict[KeyPath, Any]] = {}
    for (first, *rest), value in leaves.items():
        below.setdefault(first, {})[tuple(rest)] = value
    if isinstance(tree, dict):
        made = empty_like(tree)
        made.update((k, with_leaves(v, below[k]) if k in below else v) for k, v in tree.items())
        return made
    return type(tree)(with_leaves(v, below[i]) if i in below else v for i, v in enumerate(tree))


def leaf_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a key path; None when there is none."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and type(key) is int and 0 <= key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


# -- tree limits -------------------------------------------------------------------------------------------------------


MAX_LEAVES = 20_000_000
MAX_SHARED = 1_000_000
MAX_UNFOLDING = 8
"""Leaves that a tree may have per value of its own, beyond `MAX_SHARED`: sharing containers multiplies leaves."""

MAX_DEPTH = 200


class TreeLimitError(ValueError):
    """A tree has more values, or more levels, than any checkpoint has."""


class CycleError(TreeLimitError):
    """A container lies inside of itself."""


def check_tree_limits(tree: Any, flat: Container[int] = ()) -> None:
    """Refuse a tree that unfolds to more leaves, or deeper, than any checkpoint does.

    Containers may be shared, so that a few kilobytes of pickle can stand for 10^9 leaves; each is counted once
    and its count multiplied. Iterative, so that deep trees need no stack.

    Args:
        tree: of dicts, lists and tuples.
        flat: the `id`s of tuples that are known to contain no container.

    Raises:
        TreeLimitError: the tree has too many leaves or levels.
        CycleError: it contains itself.
    """
    leaves: dict[int, int] = {}
    depth: dict[int, int] = {}
    own = 0
    stack: list[tuple[Any, list[Any] | None]] = [(tree, None)]
    while stack:
        node, values = stack.pop()
        if values is None:
            if leaves.get(id(node), 0) or not isinstance(node, (dict, list, tuple)):
                continue
            if id(node) in leaves:
                raise CycleError("a container that contains itself")
            values = (
                [] if id(node) in flat else of_kinds(node.values() if isinstance(node, dict) else node, _CONTAINERS)
            )
            if hasattr(node, "_metadata"):
                values.append(node._metadata)
            leaves[id(node)] = 0
            own += len(node)
            stack.append((node, values))
            stack += [(value, None) for value in values]
            continue
        leaves[id(node)] = 1 + len(node) - len(values) + sum(leaves[id(v)] for v in values)
        depth[id(node)] = 1 + max((depth[id(v)] for v in values), default=0)
        if depth[id(node)] > MAX_DEPTH:
            raise TreeLimitError(f"a tree of more than {MAX_DEPTH} levels")
        if leaves[id(node)] > MAX_LEAVES:
            raise TreeLimitError(f"a tree of more than {MAX_LEAVES} values")
    if leaves.get(id(tree), 1) > MAX_SHARED + MAX_UNFOLDING * own:
        raise TreeLimitError(f"a tree whose {own} values unfold to {leaves[id(tree)]}")


_CONTAINERS = (dict, list, tuple)
"""Containers that `walk` enters."""


# -- pickled values that JSON lacks: torch's and numpy's small types, described without importing either ---------------
# A name in a file is data here: a class is a dotted name, never an object. None of these objects can be called,
# and none compares or hashes by content that an attacker chose.


class Global:
    """A module-level name that a pickle refers to, such as `torch.float32`. Never imported.

    Attributes:
        module: as written in the file, which may be anything.
        name: likewise; it may hold dots.
        dotted: `module.name`.
    """

    __slots__ = ("dotted", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.dotted = f"{module}.{name}"

    def __repr__(self) -> str:
        return f"Global({self.dotted!r})"


class Opaque:
    """An object of a class that ckptools does not rebuild: the class's name, and its data from the file.

    Attributes:
        name: dotted name of the class or function that the file would have called.
        args: positional arguments of the call, unpickled.
        state: the argument that `__setstate__` would have received, or None.
        items: list items that would have been appended to the object.
        pairs: keys and values that would have been set on it.
        keywords: keyword arguments, for the rare protocol-4 call that has them.
    """

    __slots__ = ("args", "items", "keywords", "name", "pairs", "state")

    def __init__(self, name: str, args: Any = (), keywords: Any = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []
        self.keywords = keywords

    @property
    def fields(self) -> dict[Any, Any]:
        """The object's data: attributes by name, items by key or index, arguments by index.

        A container of OmegaConf is shown by the user's own values, each passed through `plain`. Arguments whose indices
        are taken by items stand under `args`: `maxlen` of a deque is `args.1` beside the items 0, 1 and so on.
        """
        state = _attributes(self.state)
        if self.name.startswith(OMEGACONF) and "_content" in state:
            content = state["_content"]
            parts = content if isinstance(content, dict) else _by_place(content)
            return {key: plain(value) for key, value in parts.items()}
        keywords = self.keywords if isinstance(self.keywords, dict) else {}
        args, inside = _by_place(self.args), [keywords, _by_place(self.items), dict(self.pairs), state]
        found: dict[Any, Any] = {key: value for part in inside for key, value in part.items()}
        if args and not args.keys().isdisjoint(found):
            args = {"args": self.args}
        if len(found) + len(args) < sum(map(len, [args, *inside])) or not args.keys().isdisjoint(found):
            named = zip(("args", "keywords", "items", "pairs", "state"), [self.args, *inside], strict=True)
            return {name: part for name, part in named if part}
        return {key: plain(value) for key, value in {**args, **found}.items()}

    def __repr__(self) -> str:
        inside = list(self.fields.items())
        shown = [_brief(v) if type(k) is int else f"{_word(k)}={_brief(v)}" for k, v in inside[:MAX_FIELDS]]
        more = [f"… {len(inside) - MAX_FIELDS} more"] if len(inside) > MAX_FIELDS else []
        name = repr(clip_middle(self.name, MAX_NAME))
        return printable(clip(f"Opaque({', '.join([name, *shown, *more])})", MAX_LINE))

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The object's fields as texts, numbers, and lists and dicts of these; a nested object by its class."""
        return {str(key): to_plain(value) for key, value in self.fields.items()}

    def parts(self) -> Iterator[Any]:
        """Every value that the file put into the object, for walks that look for tensors and names."""
        yield self.args
        yield self.state
        yield from self.items
        yield from (part for pair in self.pairs for part in pair)
        yield self.keywords


OMEGACONF = "omegaconf."
"""Prefix of OmegaConf's classes: containers keep values in `_content`, nodes one in `_val`. Source: omegaconf/base.py
and nodes.py of 2.4.
"""

MAX_FIELDS = 6
"""At most this many fields are shown in a line."""

MAX_NAME = 80
"""Characters of a class name in a line."""

MAX_BRIEF = 40
"""Characters of a text, and bits of a number, in a line."""

MAX_ERROR_TEXT = 60
MAX_ERROR_ITEMS = 8
MAX_ERROR_BITS = 64


def plain(value: Any) -> Any:
    """Unwrap a node of OmegaConf; return any other value unchanged."""
    state = value.state if isinstance(value, Opaque) and value.name.startswith(OMEGACONF) else None
    return state["_val"] if isinstance(state, dict) and "_val" in state else value


def _attributes(state: Any) -> dict[Any, Any]:
    """The attributes in an object's state: a dict, or `(dict, dict of slots)`; a nameless state by index."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    if all(isinstance(part, dict) or part is None for part in parts):
        return {key: value for part in parts if part for key, value in part.items()}
    return _by_place(state if isinstance(state, (list, tuple)) else [state])


def _by_place(values: Any) -> dict[Any, Any]:
    return dict(enumerate(values)) if isinstance(values, (list, tuple)) else {}


def _brief(value: Any) -> str:
    """Render a value in a few characters, in time that the file cannot inflate."""
    if isinstance(value, (Opaque, Global)):
        return f"<{(value.name if isinstance(value, Opaque) else value.dotted)[:MAX_BRIEF]}>"
    if isinstance(value, (str, bytes)):
        return repr(value[:MAX_BRIEF]) + ("…" if len(value) > MAX_BRIEF else "")
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() < MAX_BRIEF):
        return repr(value)
    return f"<{type(value).__name__}>"


def _word(key: Any) -> str:
    return key if isinstance(key, str) and len(key) < MAX_BRIEF and key.isidentifier() else _brief(key)


class Lost(Opaque):
    """Stands in for a value that could not be read; a problem of the checkpoint says why.

    Attributes:
        name: `lost`, or `not read` if it was too large for a first look.
    """

    __slots__ = ()


class Cycle(Lost):
    """Stands in for a container that contains itself, directly or through other containers.

    Attributes:
        levels: number of containers between the two.
    """

    __slots__ = ("levels",)

    def __init__(self, name: str, args: Any = (), levels: int = 0) -> None:
        super().__init__(name, args)
        self.levels = levels


class Absent:
    """Marks a rank that lacks a value that other ranks have."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Absent()"


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class TorchName:
    """A value that torch names: a dtype, a layout, a memory format.

    Attributes:
        name: `float32`, `strided`, `contiguous_format`: without the leading `torch.`.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Device:
    """A `torch.device`.

    Attributes:
        type: `cpu`, `cuda`, `meta` …
        index: ordinal, or None.
    """

    __slots__ = ("index", "type")

    def __init__(self, type: str, index: int | None = None) -> None:
        self.type = type
        self.index = index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device({str(self)!r})"


class NumpyArray:
    """A numpy array, described: numpy is needed only for its values.

    Attributes:
        dtype: numpy's array-protocol string, such as `<u4`, byte order included.
        shape: sizes per dimension.
        fortran_order: whether `data` is column-major.
        data: the raw bytes; empty for an array of Python objects.
        objects: the elements of an array of Python objects, in the order of the file; for a structured array, its
            dtype and its bytes.
        cls: dotted name of its class, such as `numpy.matrix`; empty for a plain array.
    """

    __slots__ = ("cls", "data", "dtype", "fortran_order", "objects", "shape")

    def __init__(
        self, dtype: str, shape: tuple[int, ...], fortran_order: bool, data: bytes, cls: str = "", objects: Any = ()
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.fortran_order = fortran_order
        self.data = data
        self.objects = objects
        self.cls = cls

    def __repr__(self) -> str:
        return f"NumpyArray({self.dtype!r}, {list(self.shape)})"


NUMBERS = {
    "f2": "e", "f4": "f", "f8": "d", "b1": "?",
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
}  # fmt: skip
"""numpy's scalar dtypes and their `struct` codes."""


class NumpyScalar:
    """A numpy scalar, described.

    Attributes:
        dtype: as in `NumpyArray`.
        data: the raw bytes of the one element.
        record: the fields of its dtype, as in `NumpyDtype`.
    """

    __slots__ = ("data", "dtype", "record")

    def __init__(self, dtype: str, data: bytes, record: Any = None) -> None:
        self.dtype = dtype
        self.data = data
        self.record = record

    @property
    def number(self) -> int | float | bool | None:
        """The scalar as a Python number; None for other dtypes."""
        form = NUMBERS.get(self.dtype.lstrip("<>|="))
        if form is None or len(self.data) != struct.calcsize(form):
            return None
        order = ">" if self.dtype.startswith(">") else "<"
        found: int | float | bool = struct.unpack(order + form, self.data)[0]
        return found

    def __repr__(self) -> str:
        return f"NumpyScalar({self.dtype!r})"


class NumpyDtype:
    """A numpy dtype that was saved as a value.

    Attributes:
        dtype: array-protocol string with byte order.
        record: for a dtype with fields or a subarray, its state as in the file; else None.
    """

    __slots__ = ("dtype", "record")

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.record: Any = None

    def __repr__(self) -> str:
        return f"NumpyDtype({self.dtype!r})"


NUMPY_CODES = {
    "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
    "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?",
}  # fmt: skip
"""`struct`'s codes of the numpy scalars that are commonly saved."""


def scalar(value: Any) -> Any:
    """Convert a numpy scalar or a node of OmegaConf to a Python number or text; return any other value unchanged."""
    value = plain(value)
    if not isinstance(value, NumpyScalar):
        return value
    if value.dtype[:2] in ("<U", ">U"):
        return value.data.decode(f"utf-32-{'le' if value.dtype[0] == '<' else 'be'}", "replace").rstrip("\0")
    code = NUMPY_CODES.get(value.dtype.lstrip("<>|="))
    order = ">" if value.dtype.startswith(">") else "<"
    fits = code is not None and struct.calcsize(order + code) == len(value.data)
    return struct.unpack(f"{order}{code}", value.data)[0] if fits else value


def describe_for_error(value: Any) -> str:
    """Describe a value of a pickle in an error: one line of bounded length, in time that the file cannot inflate.

    Containers are described one level deep, at most eight items of them; text is cut at 60 characters.
    """
    if isinstance(value, (list, tuple)):
        more = ", …" if len(value) > MAX_ERROR_ITEMS else ""
        return f"[{', '.join(map(_scalar_for_error, value[:MAX_ERROR_ITEMS]))}{more}]"
    return _scalar_for_error(value)


def _scalar_for_error(value: Any) -> str:
    if isinstance(value, Global):
        value = value.dotted
    if isinstance(value, (str, bytes)):
        return repr(value[:MAX_ERROR_TEXT]) + ("…" if len(value) > MAX_ERROR_TEXT else "")
    if type(value) is int and value.bit_length() > MAX_ERROR_BITS:
        return f"an int of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"


# -- the first difference of two values, searched in everything that they contain --------------------------------------


MAX_LOOKED_AT = 4_000_000
"""At most this many pairs of values are compared."""

Found = tuple[KeyPath, Any, Any]


def first_difference(a: Any, b: Any, same: Callable[[Any, Any], bool]) -> Found | None:
    """Find the key path of the first difference, and both values there; None where none was found.

    Two containers with other lengths or keys are themselves the difference, if their common values are equal.

    Args:
        a: a value.
        b: another.
        same: whether two values are equal; not called for two containers of one class.
    """
    seen: set[tuple[int, int]] = set()
    stack: list[Iterator[tuple[KeyPath, Any, Any, bool]]] = [iter([((), a, b, False)])]
    for _ in range(MAX_LOOKED_AT):
        while stack and (found := next(stack[-1], None)) is None:
            stack.pop()
        if not stack or found is None:
            return None
        path, x, y, looked_into = found
        inside = None if looked_into or x is y else _inside(x, y, path)
        if looked_into or (inside is None and x is not y and not same(x, y)):
            return path, x, y
        if inside is not None and (id(x), id(y)) not in seen:
            seen.add((id(x), id(y)))
            pairs, alike = inside
            stack.append(chain(((p, v, w, False) for p, v, w in pairs), [] if alike else [(path, x, y, True)]))
    return None


def _inside(x: Any, y: Any, path: KeyPath) -> tuple[Iterable[Found], bool] | None:
    """The pairs that two containers of one class share, and whether the keys are equal; None for other values."""
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return (((*path, n), v, w) for n, (v, w) in enumerate(zip(x, y, strict=False))), len(x) == len(y)
    if isinstance(x, dict) and isinstance(y, dict):
        return (((*path, key), x[key], y[key]) for key in x if key in y), list(x) == list(y)
    if isinstance(x, Opaque) and isinstance(y, Opaque) and x.name == y.name:
        return _inside(x.fields, y.fields, path)
    if isinstance(x, NumpyArray) and isinstance(y, NumpyArray) and x.objects and y.objects:
        return _inside(x.objects, y.objects, path) if x.shape == y.shape else None
    return None
