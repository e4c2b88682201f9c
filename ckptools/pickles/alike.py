"""Detect rank files whose pickles differ from an earlier file's only in some values, and store the differences."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import File, content_of, head_of
from ckptools.files.zip_archive import Container, root_of
from ckptools.model.provenance import FILE_NAME
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Global, Opaque, TreeLimitError, check_tree_limits, of_kinds, tensors_in
from ckptools.pickles.archive import check_byte_order, locator
from ckptools.pickles.batches import ONE_INT, next_opcode
from ckptools.pickles.classes import sharded
from ckptools.pickles.classes.tensors import REBUILD
from ckptools.pickles.machine import Handler, Machine, Stack, gc_paused
from ckptools.pickles.machine_state import BEGIN_RUNS, FREE_WORK, RUN, WORK_PER_BYTE, Locate, PickleError
from ckptools.pickles.objects import Claim, Mesh, Storage, attributes, attributes_in, claims_of, mesh_of
from ckptools.text import KeyPath

# -- compare a pickle's opcodes with those of another pickle that may differ in values only ----------------------------
# Rank files of one run differ in a few numbers and texts: the rank, its place in a mesh, random states. All bytes
# between these are equal, and comparing bytes costs a thousandth of interpreting them.


VALUES = b"NKMJGX\x88\x89\x8a"
"""Opcodes that only push a number, a text, a bool or None. Source: Lib/pickletools.py."""

MAX_DIFFERING = 1 << 17
"""At most this many values may differ between two pickles."""

STRETCH = 256
"""Bytes that are compared at once near a differing value; the number grows while bytes are equal."""

MAX_STRETCH = 1 << 20


class Spelling:
    """The opcodes of a pickle that was interpreted in full, and the places of its values.

    Attributes:
        data: the pickle.
        starts: offsets of the opcodes of its values, in order.

    Raises:
        ValueError: it has opcodes that torch.save does not write.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.starts = array("Q")
        at, end = 0, data.rindex(b".") + 1
        while at < end:
            if data[at] in BEGIN_RUNS and (run := RUN.match(data, at)) is not None:
                self.starts.extend(one.start() for one in ONE_INT.finditer(data, at, run.end()))
                at = run.end()
                continue
            if data[at] in VALUES:
                self.starts.append(at)
            at = next_opcode(data, at)
        if at != end or end != len(data):
            raise ValueError("bytes behind the pickle")

    def differing(self, data: bytes) -> list[tuple[int, int]] | None:
        """The values in which another pickle differs: `(number of the value here, offset of its opcode there)`.

        None if it differs in other bytes, or in too many values.
        """
        mine, found = self.data, list[tuple[int, int]]()
        at = other = 0
        while True:
            same = equal_bytes(mine, at, data, other)
            if at + same == len(mine) and other + same == len(data):
                return found
            number = bisect_right(self.starts, at + same) - 1
            start = self.starts[number] if number >= 0 else -1
            if start < at or len(found) >= MAX_DIFFERING:
                return None
            end, place = next_opcode(mine, start), other + start - at
            if at + same >= end or place >= len(data) or data[place] not in VALUES:
                return None
            found.append((number, place))
            at, other = end, next_opcode(data, place)


def equal_bytes(a: bytes, at: int, b: bytes, other: int) -> int:
    """The number of equal bytes from an offset in `a` and an offset in `b` on."""
    count, stretch = 0, STRETCH
    while True:
        mine, theirs = a[at + count : at + count + stretch], b[other + count : other + count + stretch]
        if mine == theirs:
            if len(mine) < stretch:
                return count + len(mine)
            count, stretch = count + stretch, min(stretch * 4, MAX_STRETCH)
        elif stretch > STRETCH:
            stretch = STRETCH if stretch <= 4 * STRETCH else stretch // 16
        else:
            most = min(len(mine), len(theirs))
            bits = int.from_bytes(mine[:most], "little") ^ int.from_bytes(theirs[:most], "little")
            return count + (((bits & -bits).bit_length() - 1) // 8 if bits else most)


def values_at(data: bytes, places: Mapping[int, int]) -> dict[int, Any] | None:
    """The values that the opcodes at some offsets of a pickle push; None if an opcode is malformed."""
    table, stack = Machine(data, fast=False).handlers()
    found: dict[int, Any] = {}
    try:
        for number, place in places.items():
            table[data[place]](place + 1)
            found[number] = stack().pop()
    except (PickleError, ValueError, ArithmeticError, LookupError):
        return None
    return found


# -- interpret a pickle with slots in place of some values, to prove where in the tree those values go -----------------
# A slot is neither number nor text, so that nothing can be computed from it. It may be put into containers and objects
# and appear in the tree; if a call that ckptools answers, a dict key or a class would use its value, the pickle is
# refused. Then any pickle with the same opcodes has the same tree except for the slots, which its own values fill.
#  Two uses are allowed. The device of a storage is dropped. The mesh of a DTensor contains the rank, so it is filled
# with the values of the interpreted pickle, and the DTensor records its mesh and placements, so that it can be placed
# anew.


REBUILDS_DTENSOR = ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
REBUILDS_PARAMETER = "torch._utils._rebuild_parameter"
WRAPPER = "_rebuild_wrapper_subclass"

MAX_LOOKED_AT = 50_000_000
"""At most this many values are searched for slots."""

DEVICE = 3
"""Index of the device in a persistent id of a storage: `('storage', class, key, device, numel)`."""


class ValueSlot:
    """Stands in for a value; `number` is its index among the values of the pickle."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Placing(NamedTuple):
    """The mesh and placements of a DTensor, kept as its `detail`.

    Attributes:
        local: the local tensor.
        mesh: the state of its mesh, with slots.
        placements: as `classes.dtensor` reads them.
    """

    local: Tensor
    mesh: Any
    placements: tuple[Any, ...]


class SlotMachine(Machine):
    """Interprets a pickle with slots in place of the values with some numbers.

    Raises:
        PickleError: a slot's value would be used, or the pickle cannot be interpreted.
    """

    def __init__(self, spelling: Spelling, numbers: Collection[int], locate: Locate) -> None:
        places = {number: spelling.starts[number] for number in numbers}
        values = values_at(spelling.data, places)
        if values is None:
            raise PickleError("malformed values")
        self.values: Mapping[int, Any] = values
        self.slots = {place: ValueSlot(number) for number, place in places.items()}
        self.left = MAX_LOOKED_AT
        self.breaks = sorted(self.slots)
        super().__init__(spelling.data, locate, by_column=())

    def handlers(self) -> tuple[list[Handler], Stack]:
        """Make handlers that push slots in place of values, and refuse uses of a slot's value."""
        table, stack = super().handlers()
        for code in VALUES:
            table[code] = self._pushing_slots(table[code], stack)
        for code in b"R\x81":
            table[code] = self._calling(table[code], stack)
        table[b"b"[0]] = self._building(table[b"b"[0]], stack)
        return table, stack

    def _pushing_slots(self, single: Handler, stack: Stack) -> Handler:
        def handler(at: int) -> int:
            slot = self.slots.get(at - 1)
            end = single(at)
            if slot is not None:
                stack()[-1] = slot
            return end

        return handler

    def _calling(self, single: Handler, stack: Stack) -> Handler:
        def handler(at: int) -> int:
            args, function = stack()[-1], stack()[-2]
            if not isinstance(function, Global) or function.dotted in REBUILD:
                self.refuse((function, args), _may_differ(function, args))
            return single(at)

        return handler

    def _building(self, single: Handler, stack: Stack) -> Handler:
        def handler(at: int) -> int:
            if not isinstance(stack()[-2], Opaque):
                self.refuse(stack()[-1])
            return single(at)

        return handler

    def key(self, key: Any) -> Any:
        """Return `key`, in which there is no slot."""
        self.refuse(key)
        return super().key(key)

    def persistent(self, pid: Any) -> Any:
        """Return the storage that a persistent id describes, whose device may be a slot."""
        if isinstance(pid, tuple) and len(pid) > DEVICE and isinstance(pid[DEVICE], ValueSlot):
            pid = (*pid[:DEVICE], self.values[pid[DEVICE].number], *pid[DEVICE + 1 :])
        self.refuse(pid)
        return super().persistent(pid)

    def without_slots(self, value: Any) -> Any:
        """Fill a value's slots with the values of the interpreted pickle."""
        made = filled(value, self.values)
        self.refuse(made)
        return made

    def placed(self, tensor: Tensor, local: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
        """The DTensor, with its mesh and placements as `detail`."""
        return replace(tensor, detail=Placing(local, mesh, placements))

    def refuse(self, value: Any, but: object = None) -> None:
        """Refuse a value from which a slot, or a DTensor, can be reached other than through `but`."""
        stack, seen = [value], {id(but)}
        while stack:
            node = stack.pop()
            if isinstance(node, ValueSlot) or (
                isinstance(node, Tensor) and id(node) not in seen and node.detail is not None
            ):
                raise PickleError("a value that differs is looked at")
            if id(node) in seen or not isinstance(node, _ENTERED):
                continue
            seen.add(id(node))
            inside = node.parts() if isinstance(node, Opaque) else node.values() if isinstance(node, dict) else node
            found = of_kinds([*inside], (*_ENTERED, ValueSlot, Tensor))
            self.left -= 1 + len(found)
            if self.left < 0:
                raise PickleError("too much to look at")
            stack += found


_ENTERED = (dict, list, tuple, set, frozenset, Opaque)


def _may_differ(function: Any, args: Any) -> object:
    """The argument of a call that may contain slots: the mesh of a DTensor, or the DTensor of a parameter."""
    if isinstance(function, Global) and function.dotted == REBUILDS_PARAMETER and isinstance(args, tuple) and args:
        return args[0] if isinstance(args[0], Tensor) else None
    if not isinstance(function, Global) or function.dotted not in REBUILDS_DTENSOR:
        return None
    made_by, cls, _, state = args if isinstance(args, tuple) and len(args) == 4 else (None,) * 4
    is_dtensor = isinstance(cls, Global) and cls.name == "DTensor"
    if not is_dtensor or not isinstance(made_by, Global) or made_by.name != WRAPPER:
        return None
    return attributes(attributes_in(state).get("_spec")).get("mesh")


def slots_in(values: Iterable[Any]) -> Iterator[int]:
    """Yield the numbers of the slots that can be reached from values, also through DTensors' meshes."""
    stack, seen = [*values], set[int]()
    while stack:
        node = stack.pop()
        if isinstance(node, ValueSlot):
            yield node.number
        elif id(node) not in seen and isinstance(node, _ENTERED):
            seen.add(id(node))
            inside = node.parts() if isinstance(node, Opaque) else node.values() if isinstance(node, dict) else node
            stack += of_kinds([*inside], (*_ENTERED, ValueSlot))


def filled(node: Any, values: Mapping[int, Any]) -> Any:
    """Fill the slots of a value; a value without slots is shared, not copied. Recursion is bounded."""
    return _filled(node, values, {})


def _filled(node: Any, values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, ValueSlot):
        return values[node.number]
    if not isinstance(node, _ENTERED):
        return node
    if id(node) not in done:
        done[id(node)] = node  # a value that contains itself is left unchanged
        done[id(node)] = _remade(node, values, done)
    return done[id(node)]


def _remade(node: Any, values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, Opaque):
        fields = node.args, node.state, node.items, node.pairs, node.keywords
        parts = [_filled(part, values, done) for part in fields]
        if all(a is b for a, b in zip(parts, fields, strict=True)):
            return node
        made = copy(node)
        made.args, made.state, made.items, made.pairs, made.keywords = parts
        return made
    if isinstance(node, dict):
        return _with_children(node, {key: _filled(child, values, done) for key, child in node.items()})
    if not of_kinds(node, (*_ENTERED, ValueSlot)):
        return node
    children = [_filled(child, values, done) for child in node]
    if all(a is b for a, b in zip(children, node, strict=True)):
        return node
    return type(node)(children) if type(node) in (list, tuple) else node


def _with_children(node: dict[Any, Any], children: Mapping[Any, Any]) -> dict[Any, Any]:
    if all(child is node[key] for key, child in children.items()):
        return node
    made = copy(node)
    for key, child in children.items():
        made[key] = child
    return made


# -- trees with slots: find the slots, and fill them in a copy of the tree ---------------------------------------------


_CONTAINERS = (dict, list, tuple)


def remade(node: Any, tensor: Callable[[Tensor], Tensor], values: Mapping[int, Any]) -> Any:
    """Copy a part of a pattern's tree with other tensors and filled slots; unchanged nodes are shared."""
    return _remade_tree(node, tensor, values, {})


def _remade_tree(node: Any, tensor: Callable[[Tensor], Tensor], values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, (ValueSlot, Opaque)):
        return filled(node, values)
    if not isinstance(node, (Tensor, *_CONTAINERS)):
        return node
    if id(node) not in done:
        done[id(node)] = tensor(node) if isinstance(node, Tensor) else _container(node, tensor, values, done)
    return done[id(node)]


def _container(node: Any, tensor: Callable[[Tensor], Tensor], values: Mapping[int, Any], done: dict[int, Any]) -> Any:
    if isinstance(node, dict):
        made = copy(node)
        for key, child in node.items():
            made[key] = _remade_tree(child, tensor, values, done)
        return made
    if not of_kinds(node, (ValueSlot, Tensor, Opaque, *_CONTAINERS)):
        return node
    children = [_remade_tree(child, tensor, values, done) for child in node]
    return children if isinstance(node, list) else tuple(children)


def varying_paths(node: Any, path: KeyPath) -> Sequence[KeyPath]:
    """The key paths of slots, and of the containers around them."""
    if isinstance(node, ValueSlot):
        return [path]
    if isinstance(node, Opaque):
        return [path] if filled(node, _Nothing()) is not node else []
    if not isinstance(node, _CONTAINERS):
        return []
    if not isinstance(node, dict) and not of_kinds(node, (ValueSlot, Opaque, *_CONTAINERS)):
        return []
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    inside = [found for key, child in entries for found in varying_paths(child, (*path, key))]
    return [*inside, path] if inside else []


class _Nothing(dict[int, Any]):
    def __missing__(self, number: int) -> Any:
        return None


def check_plain(tree: Any) -> None:
    """Refuse a tree with byte locations outside of plain tensors.

    Raises:
        ValueError: it has a storage, or a tensor of several parts.
    """
    stack, seen = [(tree, False)], set[int]()
    while stack:
        node, inside = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Storage) or (isinstance(node, Tensor) and (inside or not _is_plain(node))):
            raise ValueError("a storage, or a tensor of several parts")
        if isinstance(node, dict):
            of = [*node.values(), getattr(node, "_metadata", None)]
        else:
            of = [*node.parts()] if isinstance(node, Opaque) else [*node] if isinstance(node, _SEVERAL) else []
        within = inside or isinstance(node, Opaque)
        stack += [(child, within) for child in of_kinds(of, (Opaque, Tensor, *_SEVERAL))]


_SEVERAL = (*_CONTAINERS, set, frozenset)


def _is_plain(tensor: Tensor) -> bool:
    if tensor.contradictions:
        return False
    if isinstance(tensor.detail, Placing):
        return tensor.kind in ("dtensor", "meta") and all(s.source is not None for s in tensor.detail.local.shards)
    return tensor.detail is None and tensor.kind == "plain" and all(s.source is not None for s in tensor.shards)


# -- the stored differences of a file from its pattern -----------------------------------------------------------------


class Own(NamedTuple):
    """The differences of a file from its pattern.

    Attributes:
        values: the values in which its pickle differs, by number.
        starts: byte offsets of its zip entries, 8 bytes each, in the order of the pattern's.
        crcs: their CRC-32s, 4 bytes each.
        like: the number of the pattern among those of its checkpoint.
    """

    values: dict[int, Any]
    starts: bytearray
    crcs: bytearray
    like: int = 0


class Alike:
    """A file that matches a pattern: its tree is built on demand from the pattern and the differences.

    Attributes:
        pattern: its `Pattern`.
        path: the file.
        values: the values in which it differs, and the pattern's for other slots.
        starts: byte offsets of its zip entries, in the order of the pattern's.
        crcs: their CRC-32s.
    """

    __slots__ = ("crcs", "own", "path", "pattern", "starts")

    def __init__(self, pattern: Any, path: Path, own: Own) -> None:
        self.pattern, self.path, self.own = pattern, path, own
        self.starts, self.crcs = array("Q", own.starts), array("I", own.crcs)

    @property
    def values(self) -> Mapping[int, Any]:
        """The value of each slot."""
        return {**self.pattern.machine.values, **self.own.values}

    @property
    def meshes(self) -> dict[int, Mesh]:
        """The file's device meshes, by their keys in `CutKind`."""
        meshes: dict[int, Mesh] = self.pattern.meshes_of(self.values)
        return meshes

    def tree(self) -> Any:
        """The file's tree, built anew."""
        return self.at(self.pattern.tree)

    def at(self, node: Any) -> Any:
        """The file's value at a node of the pattern's tree."""
        values, meshes = self.values, self.meshes

        def own(tensor: Tensor) -> Tensor:
            placed: Tensor = self.pattern.placed(tensor, self, meshes)
            return placed

        return remade(node, own, values)


# -- rank files that are alike: the first is interpreted, and of the others only the differences are stored ------------
# The differences are the offsets of zip entries, their CRC-32s, and the differing values of the pickle. The slots prove
# that these values only stand in the tree, or give the rank's place in a mesh. A file that differs in other bytes, or
# is unusual in any way, is read opcode by opcode.


MAX_INTERPRETED = 8
"""The pattern is interpreted at most this often, each time with more slots: a later file may differ in new values."""

UNLIMITED = 1 << 62

SHARD_LISTS = b"ShardedTensor"
"""The name of a class, in a pickle, that cannot take slots: searched first, before the whole pickle is interpreted."""


class Pattern:
    """A rank file that was interpreted, with slots for the values in which other files differ.

    Attributes:
        path: the file.
        records: names of the zip entries of its tensors.
        machine: the machine that interpreted it last.
        tree: its tree, with slots.
        varying: key paths of slots, and of the containers around them.
    """

    def __init__(self, path: Path) -> None:
        """Read a rank file.

        Raises:
            ReadError: it cannot be read.
            ValueError: it is of a kind that cannot be a pattern.
        """
        self.path = path
        self.interpreted = 0
        self.refused: set[int] = set()
        with File(path) as file:
            if file.descriptor is None or content_of(head_of(file)) != "zip":
                raise ValueError("no archive on the local disk")
            archive = Container(file)
            if FILE_NAME in archive.records:
                raise ValueError("written by consolidate")
            check_byte_order(archive)
            data = archive.read("data.pkl")
            if SHARD_LISTS in data:
                raise ValueError("tensors that list the shards of all ranks")
            self.spelling = Spelling(data)
            self._locate, self.records = locator(archive), dict[str, int]()
            self._located: dict[str, tuple[Path, int, str, int]] = {}
            self._interpret(frozenset())
            from ckptools.files.zip_columns import Directory

            self.directory = Directory(archive, list(self.records))

    def _locator(self, storage: Storage) -> tuple[Path, int, str, int]:
        found = self._located.get(storage.key)
        if found is None:
            located = self._locate(storage)
            assert located is not None  # true for an archive with a directory
            found = self._located[storage.key] = located
            self.records[found[2]] = len(self.records)
        return found

    def _interpret(self, numbers: frozenset[int]) -> None:
        """Interpret the pickle with slots for these values.

        Raises:
            ValueError: the values do more than stand in the tree, or the file is of a kind that cannot be a pattern.
        """
        with gc_paused():
            machine = SlotMachine(self.spelling, numbers, self._locator)
            tree = machine.load()
        check_tree_limits(tree)
        if machine.modules:
            raise ValueError("whole modules")
        check_plain(tree)
        spent = FREE_WORK + WORK_PER_BYTE * len(self.spelling.data) - machine.work
        machine.work = UNLIMITED
        self.machine, self.tree, self.spent, self.numbers = machine, tree, spent, numbers
        self.varying = set(varying_paths(tree, ()))
        self.meshes = {id(state): (state, mesh) for state, mesh in machine.read_meshes.values()}
        self.visible = set(slots_in([tree, *(state for state, _ in machine.read_meshes.values())]))
        self.kinds = {kind: None for _, tensor in tensors_in(tree) if (kind := kind_of(tensor)) is not None}

    def of(self, own: Own) -> tuple[frozenset[Claim], bool] | None:
        """The claims of a file with these differences; None if more than its place in the mesh would differ.

        Differing values that are not slots yet become slots.
        """
        new = own.values.keys() - self.numbers
        if new & self.refused or (new and self.interpreted >= MAX_INTERPRETED):
            return None
        try:
            if new:
                self.interpreted += 1
                self._interpret(self.numbers | new)
        except (PickleError, TreeLimitError, ValueError):
            self.refused |= new
            return None
        known = self.machine.values
        if any(type(value) is not type(known[number]) for number, value in own.values.items()):
            return None
        return self._claims({**known, **own.values})

    def _claims(self, values: Mapping[int, Any]) -> tuple[frozenset[Claim], bool] | None:
        try:
            meshes = self.meshes_of(values)
            fits = all(self._fits(kind, meshes[kind.mesh]) for kind in self.kinds)
        except ValueError:
            return None
        same = (a._replace(coordinate=None, rank=None) == b._replace(coordinate=None, rank=None) for a, b in (
            (meshes[key], mesh) for key, (_, mesh) in self.meshes.items()
        ))  # fmt: skip
        if not fits or not all(same):
            return None
        return claims_of(self.machine.claims, {*self.machine.meshes, *meshes.values()})

    def _fits(self, kind: CutKind, mesh: Mesh) -> bool:
        """Whether a local tensor has the sizes that its rank's place implies."""
        if mesh.coordinate is None:
            return True
        expected, _ = sharded.local_pieces(kind.shape, mesh.sizes, mesh.coordinate, kind.placements)
        return kind.local == expected

    def pieces(self, kind: CutKind, tensor: Tensor, mesh: Mesh) -> Sequence[tuple[Box, Box]]:
        """The boxes of a rank's pieces of a DTensor: in the tensor, and in the local tensor."""
        if tensor.kind != "dtensor" or mesh.coordinate is None or not tensor.detail.local.shards:
            return []
        expected, found = sharded.local_pieces(kind.shape, mesh.sizes, mesh.coordinate, kind.placements)
        return found if prod(expected) else []

    def meshes_of(self, values: Mapping[int, Any]) -> dict[int, Mesh]:
        """The meshes of a file with these values.

        Raises:
            ValueError: a mesh contradicts itself.
        """
        return {key: mesh_of(filled(state, values)) for key, (state, _) in self.meshes.items()}

    def placed(self, tensor: Tensor, alike: Alike, meshes: Mapping[int, Mesh]) -> Tensor:
        """A tensor of the pattern, moved to another file."""
        if not isinstance(tensor.detail, Placing):
            return replace(tensor, shards=tuple(self._moved(shard, alike) for shard in tensor.shards))
        local, mesh, placements = tensor.detail
        local = replace(local, shards=tuple(self._moved(shard, alike) for shard in local.shards))
        made = sharded.placed_dtensor(self.machine, tensor.shape, tensor.dtype, local, meshes[id(mesh)], placements)
        return replace(made, requires_grad=tensor.requires_grad, parameter=tensor.parameter)

    def _moved(self, shard: Shard, alike: Alike) -> Shard:
        source = shard.source
        assert source is not None
        at = self.records[source.record]
        return shard._replace(source=moved(source, alike.path, alike.starts[at], alike.crcs[at]))

    def read(self, path: Path) -> Read | None:
        """Read the differences of a file; None if it does not match the pattern, or cannot be read."""
        try:
            with File(path) as file:
                head = head_of(file)
                if file.descriptor is None or content_of(head) != "zip":
                    return None
                columns = self.directory.read(file)
        except ReadError:
            return None
        found = self.spelling.differing(columns.pickle) if columns is not None else None
        values = values_at(columns.pickle, dict(found)) if columns is not None and found is not None else None
        if columns is None or values is None or self.spent > FREE_WORK + WORK_PER_BYTE * len(columns.pickle):
            return None
        starts, crcs = columns.starts.astype("<u8").tobytes(), columns.crcs.astype("<u4").tobytes()
        own = Own(values, bytearray(starts), bytearray(crcs))
        claims = self.of(own)
        if claims is None:
            return None
        own = own._replace(values={number: value for number, value in values.items() if number in self.visible})
        return Read(own, *claims, columns.nbytes, columns.modified, columns.bytes_read, root_of(head))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Dotted names of everything that the pickle mentions."""
        return tuple(name.dotted for name in self.machine.globals.values())


class Read(NamedTuple):
    """A file that matches the pattern; fields as in `reader.Saved`."""

    own: Own
    claims: frozenset[Claim]
    at_least: bool
    nbytes: int
    modified: float
    bytes_read: int
    root: str


class CutKind(NamedTuple):
    """Tensors that every rank cuts alike.

    Attributes:
        shape: of the tensor.
        local: sizes of the local tensor.
        mesh: key of the mesh.
        placements: on the mesh.
    """

    shape: Ints
    local: Ints
    mesh: int
    placements: tuple[Any, ...]


def kind_of(tensor: Tensor) -> CutKind | None:
    """How a DTensor is cut; None for other tensors."""
    if not isinstance(tensor.detail, Placing):
        return None
    local, mesh, placements = tensor.detail
    return CutKind(tensor.shape, local.shape, id(mesh), placements)


def moved(source: Source, path: Path, start: int, crc: int) -> Source:
    """The source of the same array in another file, whose zip entry begins at byte `start`."""
    at, nbytes = source.record_span
    return source._replace(path=path, offset=source.offset - at + start, record_span=(start, nbytes), crc=crc)
