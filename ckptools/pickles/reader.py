"""One torch.save file, read inertly: its tree of plain values and lazy tensors, and what it says of itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files import File, Window
from ckptools.pickles.budgets import PickleError
from ckptools.pickles.container import Container
from ckptools.pickles.machine import Locate, Machine
from ckptools.pickles.rebuild import Storage
from ckptools.pickles.told import told

MAX_LEAVES = 20_000_000
MAX_SHARED = 1_000_000
MAX_UNFOLDING = 8
"""A tree may have many leaves, or share some of its containers; not have many because it shares."""

MAX_DEPTH = 200


@dataclass(frozen=True)
class Saved:
    """What one torch.save file holds.

    Attributes:
        path: the file.
        tree: plain values, lazy tensors and opaque objects.
        claims: `(rank, world size)` as its sharded tensors say; more than one when they contradict each other.
        names: dotted names of everything that the pickle mentions, in order.
        nbytes: size of the file.
        modified: file time, seconds since 1970.
        bytes_read: how much of it was read.
    """

    path: Path
    tree: Any
    claims: frozenset[tuple[int | None, int]]
    names: tuple[str, ...]
    nbytes: int
    modified: float
    bytes_read: int


def read(path: Path) -> Saved:
    """Read the structure of a torch.save file: the zip directory, the headers and the pickle, no tensor bytes.

    Raises:
        ReadError: it is cut, damaged, or no torch.save file.
    """
    with File(path) as file:
        machine, tree = read_archive(file)
        names = tuple(g.dotted for g in machine.globals.values())
        claims = frozenset(machine.claims)
        return Saved(path, tree, claims, names, file.size, file.modified, file.bytes_read)


def read_archive(file: File | Window) -> tuple[Machine, Any]:
    """Read the torch.save archive that a file, or a part of one, is; return the machine that read it, and its tree.

    Raises:
        ReadError: it is cut, damaged, or no torch.save archive.
    """
    container = Container(file)
    check_byte_order(container)
    machine = Machine(container.read("data.pkl"), _locator(container))
    return machine, load_checked(machine, file.path, "data.pkl")


def load_checked(machine: Machine, path: Path, what: str) -> Any:
    """Run a pickle and hold its tree against the budgets; `what` names it in errors.

    Raises:
        ReadError: it is damaged, or beyond the budgets.
    """
    try:
        with _no_collections():
            tree = machine.load()
        check_budget(tree)
    except PickleError as error:
        raise ReadError(path, f"{what}: {error}") from error
    return tree


@contextmanager
def _no_collections() -> Iterator[None]:
    """Hold Python's search for cycles back while many objects are made and none becomes garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def check_byte_order(container: Container) -> None:
    """Refuse a file from a big-endian machine.

    Raises:
        ReadError: it is one.
    """
    if "byteorder" in container.records and container.read("byteorder", 16) != b"little":
        raise ReadError(container.file.path, "was written on a big-endian machine; its numbers are reversed")


def _locator(container: Container) -> Locate:
    """Tell where storages lie, checking that each record is as long as the pickle says."""
    known: dict[str, int] = {}

    def locate(storage: Storage) -> tuple[Path, int, str, int]:
        record = f"data/{storage.key}"
        if storage.key not in known:
            offset, size = container.payload(record)
            expected = storage.numel * ITEMSIZE[storage.dtype]
            if size != expected:
                raise ReadError(
                    container.file.path,
                    f"record {told(record)} has {size} bytes, its tensors expect {told(expected)}; damaged",
                )
            known[storage.key] = container.file.start + offset
        return container.file.path, known[storage.key], record, container.records[record].crc

    return locate


def check_budget(tree: Any) -> None:
    """Refuse a tree that unfolds to more leaves, or deeper, than any checkpoint does.

    Containers may be shared, so that a few kilobytes of pickle can stand for 10^9 leaves; each is counted once
    and its count multiplied. Iterative, so that depth costs nothing.

    Raises:
        PickleError: the tree is beyond the budgets or contains itself.
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
                raise PickleError("a container that contains itself")
            values = [v for v in (node.values() if isinstance(node, dict) else node) if isinstance(v, _CONTAINERS)]
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
            raise PickleError(f"a tree of more than {MAX_DEPTH} levels")
        if leaves[id(node)] > MAX_LEAVES:
            raise PickleError(f"a tree of more than {MAX_LEAVES} values")
    if leaves.get(id(tree), 1) > MAX_SHARED + MAX_UNFOLDING * own:
        raise PickleError(f"a tree whose {own} values unfold to {leaves[id(tree)]}")


_CONTAINERS = (dict, list, tuple)
"""What `walk` enters."""
