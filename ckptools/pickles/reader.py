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
from ckptools.files import zip_archive
from ckptools.files.file_type import COMPRESSIONS, content_of, head_of
from ckptools.files.opening import File, Window
from ckptools.files.zip_archive import Container
from ckptools.model.values import describe_for_error
from ckptools.pickles.cycles import without_cycles
from ckptools.pickles.dtensor import claims_of
from ckptools.pickles.limits import CycleError, PickleError
from ckptools.pickles.machine import Locate, Machine
from ckptools.pickles.rebuild import Storage

MAX_LEAVES = 20_000_000
MAX_SHARED = 1_000_000
MAX_UNFOLDING = 8
"""A tree may have many leaves, or share some of its containers; not have many because it shares."""

MAX_DEPTH = 200

FORMS = {"zip": "", "legacy": "pickle stream of before torch 1.6"}
"""What people are told of a content; others go by their own name."""


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
        form: what it is beside a zip archive, in words: `gzip`, `tar`, `pickle stream`; "" for nothing else.
        at_least: whether the world sizes in `claims` are only what the world has at least, by a slice of its mesh.
        modules: whether an object in it has the state of an `nn.Module`.
    """

    path: Path
    tree: Any
    claims: frozenset[tuple[int | None, int]]
    names: tuple[str, ...]
    nbytes: int
    modified: float
    bytes_read: int
    form: str = ""
    at_least: bool = False
    modules: bool = False


def read(path: Path) -> Saved:
    """Read the structure of a torch.save file: the zip directory, the headers and the pickle, no tensor bytes.

    A compressed file is unpacked into a temporary one; of a tar the torch.save file in it is read.

    Raises:
        ReadError: it is cut, damaged, or no torch.save file.
    """
    with File(path) as file, plain(file) as (opened, forms):
        if forms[-1:] == ("tar",):
            from ckptools.pickles.tars import read_tar

            machine, tree = read_tar(opened)
        else:
            machine, tree = read_archive(opened)
        names = tuple(g.dotted for g in machine.globals.values())
        nread = opened.bytes_read if opened is file else file.bytes_read + opened.bytes_read
        form = ", ".join(filter(None, map(FORMS.get, forms, forms)))
        claims, at_least = claims_of(machine.claims, machine.meshes)
        return Saved(path, tree, claims, names, file.size, file.modified, nread, form, at_least, machine.modules)


def glance(path: Path) -> None:
    """Look at a file as closely as costs little: a zip's or tar's directory, the header of an older file.

    Raises:
        ReadError: it is cut short or no torch.save file. Of a compressed file only its first bytes are known.
    """
    with File(path) as file:
        content = content_of(head_of(file))
        if content == "legacy":
            from ckptools.pickles.legacy import Stream, check_header

            check_header(Stream(file))
        elif content == "tar":
            from ckptools.pickles.tars import members

            members(file)
        elif content not in COMPRESSIONS.values():
            zip_archive.glance(file)


def look(path: Path) -> str:
    """Look at a file as `glance` does; return what is wrong with it, or nothing."""
    try:
        glance(path)
    except ReadError as error:
        return str(error)
    return ""


@contextmanager
def plain(file: File) -> Iterator[tuple[File, tuple[str, ...]]]:
    """The file itself, or where it is compressed a temporary file with what it holds; and what contents that makes.

    Raises:
        ReadError: it cannot be unpacked.
    """
    content = content_of(head_of(file))
    if content not in COMPRESSIONS.values():
        yield file, (content,)
        return
    from ckptools.files.compressed import unpacked

    with File(unpacked(file, content)) as inside:
        yield inside, (content, content_of(head_of(inside)))


def read_archive(file: File | Window) -> tuple[Machine, Any]:
    """Read the torch.save archive that a file, or a part of one, is; return the machine that read it, and its tree.

    Raises:
        ReadError: it is cut, damaged, or no torch.save archive.
    """
    if content_of(head_of(file)) == "legacy":
        from ckptools.pickles.legacy import read_stream

        return read_stream(file)
    return read_zip(file)


def read_zip(file: File | Window) -> tuple[Machine, Any]:
    """Read a torch.save archive as every torch since 1.6 writes it; see `read_archive`."""
    archive = Container(file)
    check_byte_order(archive)
    machine = Machine(archive.read("data.pkl"), _locator(archive))
    return machine, load_checked(machine, file.path, "data.pkl")


def load_checked(machine: Machine, path: Path, what: str) -> Any:
    """Run a pickle and hold its tree against the budgets; `what` names it in errors.

    Raises:
        ReadError: it is damaged, or beyond the budgets.
    """
    try:
        with no_collections():
            tree = machine.load()
        tree = _checked(tree)
    except PickleError as error:
        raise ReadError(path, f"{what}: {error}") from error
    return tree


def _checked(tree: Any) -> Any:
    """The tree, within the budgets; where containers lie inside of themselves, cut there."""
    try:
        check_budget(tree)
    except CycleError:
        tree = without_cycles(tree)
        check_budget(tree)
    return tree


@contextmanager
def no_collections() -> Iterator[None]:
    """Hold Python's search for cycles back while many objects are made and none becomes garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def check_byte_order(archive: Container) -> None:
    """Refuse a file from a big-endian machine.

    Raises:
        ReadError: it is one.
    """
    if "byteorder" in archive.records and archive.read("byteorder", 16) != b"little":
        raise ReadError(archive.file.path, "was written on a big-endian machine; its numbers are reversed")


def _locator(archive: Container) -> Locate:
    """Tell where storages lie, checking that each record is as long as the pickle says."""
    known: dict[str, int] = {}

    def locate(storage: Storage) -> tuple[Path, int, str, int]:
        record = f"data/{storage.key}"
        if storage.key not in known:
            offset, size = archive.payload(record)
            expected = storage.numel * ITEMSIZE[storage.dtype]
            if size != expected:
                raise ReadError(
                    archive.file.path,
                    f"record {describe_for_error(record)} has {size} bytes, "
                    f"its tensors expect {describe_for_error(expected)}; damaged",
                )
            known[storage.key] = archive.file.start + offset
        return archive.file.path, known[storage.key], record, archive.records[record].crc

    return locate


def check_budget(tree: Any) -> None:
    """Refuse a tree that unfolds to more leaves, or deeper, than any checkpoint does.

    Containers may be shared, so that a few kilobytes of pickle can stand for 10^9 leaves; each is counted once
    and its count multiplied. Iterative, so that depth costs nothing.

    Raises:
        PickleError: the tree is beyond the budgets.
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
