"""Rank files that are alike: the first is interpreted, of others only what they have for themselves is kept.

That is where their records lie, the CRC-32s of these, and the values in which their pickles differ. `slots` proves that
these values do no more than stand in the tree, or say which rank of a mesh this is. Of a file that differs in more,
and of one in which anything is odd, nothing is concluded: it is read opcode by opcode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container
from ckptools.files.zip_directory import root_of
from ckptools.model.provenance import FILE_NAME
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import TreeLimitError, check_tree_limits, tensors_in
from ckptools.pickles.alike import Alike, Own
from ckptools.pickles.archive import check_byte_order, locator
from ckptools.pickles.classes import dtensor
from ckptools.pickles.classes.device_mesh import Claim, Mesh, claims_of, mesh_of
from ckptools.pickles.machine import gc_paused
from ckptools.pickles.machine_state import FREE_WORK, WORK_PER_BYTE, PickleError
from ckptools.pickles.objects import Storage
from ckptools.pickles.slot_trees import check_plain, varying_paths
from ckptools.pickles.slots import Placing, SlotMachine, filled, slots_in
from ckptools.pickles.spelling import Spelling, values_at

MAX_INTERPRETED = 8
"""Times that the pattern is interpreted, each with more slots: a value that happened to be the same before is one."""

UNLIMITED = 1 << 62

SHARD_LISTS = b"ShardedTensor"
"""In a pickle, the name of a class that a slot must not be handed to: found early, before all of it is interpreted."""


class Pattern:
    """A rank file that was interpreted, with slots where others have other values.

    Attributes:
        path: the file.
        records: names of the records that its tensors lie in.
        machine: the machine that interpreted it last.
        tree: its tree, with slots.
        varying: key paths of slots, and those above them.
    """

    def __init__(self, path: Path) -> None:
        """Read a rank file.

        Raises:
            ReadError: it cannot be read.
            ValueError: it is none that others can be like.
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
            assert located is not None  # of an archive with a directory
            found = self._located[storage.key] = located
            self.records[found[2]] = len(self.records)
        return found

    def _interpret(self, numbers: frozenset[int]) -> None:
        """Interpret the pickle with slots for these values.

        Raises:
            ValueError: they do more than stand in the tree, or no other file can be like this one.
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
        """The claims of a file that has this for itself; None where more than its place in the mesh would differ.

        The values that differ become slots, if they were none before.
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
        """Whether a local tensor has the sizes of its rank."""
        if mesh.coordinate is None:
            return True
        expected, _ = dtensor.local_pieces(kind.shape, mesh.sizes, mesh.coordinate, kind.placements)
        return kind.local == expected

    def pieces(self, kind: CutKind, tensor: Tensor, mesh: Mesh) -> Sequence[tuple[Box, Box]]:
        """The places of a rank's pieces of a DTensor: in the tensor, and in the local one."""
        if tensor.kind != "dtensor" or mesh.coordinate is None or not tensor.detail.local.shards:
            return []
        expected, found = dtensor.local_pieces(kind.shape, mesh.sizes, mesh.coordinate, kind.placements)
        return found if prod(expected) else []

    def meshes_of(self, values: Mapping[int, Any]) -> dict[int, Mesh]:
        """The meshes of a file with these values.

        Raises:
            ValueError: a mesh contradicts itself.
        """
        return {key: mesh_of(filled(state, values)) for key, (state, _) in self.meshes.items()}

    def placed(self, tensor: Tensor, alike: Alike, meshes: Mapping[int, Mesh]) -> Tensor:
        """A tensor of the pattern as another file has it."""
        if not isinstance(tensor.detail, Placing):
            return replace(tensor, shards=tuple(self._moved(shard, alike) for shard in tensor.shards))
        local, mesh, placements = tensor.detail
        local = replace(local, shards=tuple(self._moved(shard, alike) for shard in local.shards))
        made = dtensor.placed(self.machine, tensor.shape, tensor.dtype, local, meshes[id(mesh)], placements)
        return replace(made, requires_grad=tensor.requires_grad, parameter=tensor.parameter)

    def _moved(self, shard: Shard, alike: Alike) -> Shard:
        source = shard.source
        assert source is not None
        at = self.records[source.record]
        return shard._replace(source=moved(source, alike.path, alike.starts[at], alike.crcs[at]))

    def read(self, path: Path) -> Read | None:
        """What a file has for itself that is like this one; None where it is not, or where it cannot be read."""
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
        """Dotted names of everything that its pickle mentions."""
        return tuple(name.dotted for name in self.machine.globals.values())


class Read(NamedTuple):
    """A file that is like the pattern; as `reader.Saved` has it."""

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
        placements: on it.
    """

    shape: Ints
    local: Ints
    mesh: int
    placements: tuple[Any, ...]


def kind_of(tensor: Tensor) -> CutKind | None:
    """How a DTensor is cut; None for others."""
    if not isinstance(tensor.detail, Placing):
        return None
    local, mesh, placements = tensor.detail
    return CutKind(tensor.shape, local.shape, id(mesh), placements)


def moved(source: Source, path: Path, start: int, crc: int) -> Source:
    """The source of the same array in another file, where its record begins at another byte."""
    at, nbytes = source.record_span
    return source._replace(path=path, offset=source.offset - at + start, record_span=(start, nbytes), crc=crc)
