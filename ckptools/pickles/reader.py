"""One torch.save file, read inertly: its tree of plain values and lazy tensors, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.files import zip_directory
from ckptools.files.file_type import COMPRESSIONS, content_of, head_of
from ckptools.files.opening import File
from ckptools.model.provenance import Said
from ckptools.pickles.archive import read_archive
from ckptools.pickles.device_mesh import claims_of
from ckptools.pickles.repeated_records import RepeatedRecords

FORMS = {"zip": "", "legacy": "pickle stream of before torch 1.6"}
"""What people are told of a content; others go by their own name."""


class Saved(NamedTuple):
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
        provenance: what it says of where it comes from, if `consolidate` wrote it.
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
    provenance: Said | None = None


def read(path: Path, repeated: RepeatedRecords | None = None) -> Saved:
    """Read the structure of a torch.save file: the zip directory, the headers and the pickle, no tensor bytes.

    A compressed file is unpacked into a temporary one; of a tar the torch.save file in it is read.

    Args:
        path: the file.
        repeated: what the pickles of other ranks' files have spelled; None for a file that is read alone.

    Raises:
        ReadError: it is cut, damaged, or no torch.save file.
    """
    with File(path) as file, decompressed(file) as (opened, forms):
        if forms[-1:] == ("tar",):
            from ckptools.pickles.tar_checkpoint import read_tar

            machine, tree = read_tar(opened)
        else:
            machine, tree = read_archive(opened, repeated)
        names = tuple(g.dotted for g in machine.globals.values())
        nread = min(opened.bytes_read, file.size) if opened is file else file.bytes_read + opened.bytes_read
        form = ", ".join(filter(None, map(FORMS.get, forms, forms)))
        claims, at_least = claims_of(machine.claims, machine.meshes)
        size, modified, told = file.size, file.modified, machine.provenance
        return Saved(path, tree, claims, names, size, modified, nread, form, at_least, machine.modules, told)


def probe(path: Path) -> None:
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
            from ckptools.files.tar_archive import members

            members(file)
        elif content not in COMPRESSIONS.values():
            zip_directory.probe(file)


@contextmanager
def decompressed(file: File) -> Iterator[tuple[File, tuple[str, ...]]]:
    """Yield the file, or a temporary one with what it unpacks to, and its contents, such as `("gzip", "zip")`.

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
