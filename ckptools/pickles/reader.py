"""Read one torch.save file inertly, also compressed or in a tar: its tree, and its claims about rank and world size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.errors import CkptoolsError
from ckptools.files import zip_archive
from ckptools.files.opening import COMPRESSIONS, File, content_of, head_of
from ckptools.files.remote.path import RemotePath
from ckptools.model.provenance import Said
from ckptools.model.tree import TreeLimitError, tensors_in
from ckptools.pickles.alike import Alike
from ckptools.pickles.archive import read_archive
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError, RepeatedRecords
from ckptools.pickles.objects import Claim, claims_of

if TYPE_CHECKING:
    from ckptools.pickles.alike import Pattern

FORMS = {"zip": "", "legacy": "pickle stream of before torch 1.6"}
"""Names of contents for messages; other contents keep their own names."""


class _SavedFields(NamedTuple):
    path: Path
    tree: Any
    claims: frozenset[Claim]
    names: tuple[str, ...]
    nbytes: int
    modified: float
    bytes_read: int
    form: str = ""
    at_least: bool = False
    modules: bool = False
    provenance: Said | None = None
    cut: bool = False
    root: str = ""


class Saved(_SavedFields):
    """The content of one torch.save file.

    Attributes:
        path: the file.
        tree: plain values, lazy tensors and opaque objects.
        claims: `(rank, world size)` as stated by its sharded tensors; several if they contradict each other.
        names: dotted names of everything that the pickle mentions, in order.
        nbytes: size of the file.
        modified: file time, seconds since 1970.
        bytes_read: number of bytes read from it.
        form: its form, if not a plain zip archive, in words: `gzip`, `tar`, `pickle stream`; else "".
        at_least: whether the world sizes in `claims` are only lower bounds, because they come from a slice of a mesh.
        modules: whether an object in it has the state of an `nn.Module`.
        provenance: the provenance record, if `consolidate` wrote the file.
        cut: whether it is cut short; the tree then has tensors without bytes for those behind the cut.
        root: the root folder of its archive, which torch names after the file that it wrote.
    """

    __slots__ = ()

    @property
    def content(self) -> Any:
        """The tree; for a file that matches a pattern, an `Alike`, which builds its tree on demand."""
        return self[1]

    @property
    def tree(self) -> Any:
        """Plain values, lazy tensors and opaque objects."""
        content = self.content
        return content.tree() if isinstance(content, Alike) else content


def read(path: Path, repeated: RepeatedRecords | None = None, salvage: bool = False) -> Saved:
    """Read the structure of a torch.save file: the zip directory, the headers and the pickle, no tensor bytes.

    A compressed file is unpacked into a temporary one; in a tar, the torch.save file is read.

    Args:
        path: the file.
        repeated: values shared with the pickles of other ranks' files; None for a file that is read alone.
        salvage: read a zip archive that is cut short as far as it goes.

    Raises:
        ReadError: it is cut, damaged, or not a torch.save file.
    """
    with File(path) as file, decompressed(file) as (opened, forms):
        if forms[-1:] == ("tar",):
            from ckptools.pickles.tar_checkpoint import read_tar

            machine, tree = read_tar(opened)
        else:
            machine, tree = read_archive(opened, repeated, salvage)
        return _saved(file, opened, forms, machine, tree)


def holds_ranks(path: Path) -> bool:
    """Whether a file is a `.nemo` with the weights of model-parallel ranks, by the names of its members.

    Raises:
        ReadError: it cannot be read.
    """
    with File(path) as file, decompressed(file) as (opened, forms):
        if forms[-1:] != ("tar",):
            return False
        from ckptools.pickles import tar_checkpoint

        return tar_checkpoint.holds_ranks(opened)


def read_ranks(path: Path) -> tuple[dict[str, Saved], int | None]:
    """Read the weights of each model-parallel rank in a `.nemo`, by the name of the member.

    Returns:
        The weights, and the number of ranks, None if the file does not state it.

    Raises:
        ReadError: it is cut or damaged.
    """
    from ckptools.pickles import tar_checkpoint

    with File(path) as file, decompressed(file) as (opened, forms):
        ranks, stated = tar_checkpoint.read_ranks(opened)
        return {name: _saved(file, opened, forms, machine, tree) for name, (machine, tree) in ranks.items()}, stated


def _saved(file: File, opened: File, forms: tuple[str, ...], machine: Machine, tree: Any) -> Saved:
    names = tuple(g.dotted for g in machine.globals.values())
    nread = min(opened.bytes_read, file.size) if opened is file else file.bytes_read + opened.bytes_read
    form = ", ".join(filter(None, map(FORMS.get, forms, forms)))
    claims, at_least = claims_in(machine)
    size, modified, origin, modules = file.size, file.modified, machine.provenance, machine.modules
    found = Saved(file.path, tree, claims, names, size, modified, nread, form, at_least, modules, origin, machine.cut)
    return found._replace(root=zip_archive.root_of(head_of(file)))


def claims_in(machine: Machine) -> tuple[frozenset[Claim], bool]:
    """The claims of the pickle that a machine has read; see `claims_of`."""
    return claims_of(machine.claims, {*machine.meshes, *(mesh for _, mesh in machine.read_meshes.values())})


def probe(path: Path) -> None:
    """Make the cheap checks of a file: of a zip's or tar's directory, or the header of an older file.

    Raises:
        ReadError: it is cut short or not a torch.save file. Of a compressed file only its first bytes are checked.
    """
    with File(path) as file:
        content = content_of(head_of(file))
        if content == "legacy":
            from ckptools.pickles.legacy import LegacyStream, check_header

            check_header(LegacyStream(file))
        elif content == "tar":
            from ckptools.files.tar_archive import members

            members(file)
        elif content not in COMPRESSIONS.values():
            zip_archive.probe(file)


# -- many files that match a few patterns ------------------------------------------------------------------------------


MAX_MISSES = 8
"""Files without a match, beyond the number with one, after which no further file is compared."""

MAX_PATTERNS = 8
"""At most this many patterns; each is interpreted several times, by every reading process."""

FILES_PER_PATTERN = 16
"""Files per pattern after the first: this many repay its cost."""

MIN_HITS = 2
"""Matching files required for each pattern beyond two: if every file is different, no pattern repays its cost."""

MIN_ALIKE = 8
"""At least this many files, with names that differ only in numbers, are compared."""


def first_of_many(paths: Sequence[Path]) -> Path | None:
    """The first local file to compare the others with, by the files' names; None if there are few."""
    local = {path: re.sub(r"\d+", "#", str(path)) for path in paths if not isinstance(path, RemotePath)}
    counted = Counter(local.values())
    return next((path for path, name in local.items() if counted[name] >= MIN_ALIKE), None)


class AlikeFiles:
    """Reads files that differ little from a pattern: the checkpoint's first file, or the first of another kind.

    Args:
        first: the first pattern; None to compare no files.
        files: number of files.

    Attributes:
        firsts: the files of all patterns.
    """

    def __init__(self, first: Path | None, files: int = 0) -> None:
        self.firsts = [] if first is None else [first]
        self._most = min(max(files // FILES_PER_PATTERN, 1), MAX_PATTERNS)
        self._patterns: list[Pattern | None] = []
        self._hits = self._misses = self._last = 0
        self._unlike: dict[int, Path] = {}

    def read(self, path: Path) -> Saved | None:
        """Read a file as `read` does; None if it matches no pattern, or cannot be read."""
        numbers = range(len(self.firsts)) if self._misses < MAX_MISSES else ()
        for number in sorted(numbers, key=lambda number: number != self._last):
            pattern = self.pattern(number)
            found = pattern.read(path) if pattern is not None else None
            if pattern is not None and found is not None:
                own, claims, at_least, size, modified, nread, root = found
                alike = Alike(pattern, path, own._replace(like=number))
                self._last, self._misses, self._hits = number, self._misses - 1, self._hits + 1
                return Saved(path, alike, claims, pattern.names, size, modified, nread, "", at_least, root=root)
        self._misses += 1
        return None

    def missed(self, saved: Saved) -> Path | None:
        """Note a file without a match; return an earlier one if it now becomes a pattern.

        A file becomes a pattern once a second file has tensors of its names and sizes: ranks that hold the last rows of
        a tensor, or none of them, are fewer than those before.
        """
        repaid = self._hits >= MIN_HITS * (len(self.firsts) - 1)
        if len(self.firsts) >= self._most or not repaid or self.pattern(0) is None:
            return None
        earlier = self._unlike.setdefault(_local_sizes(saved), saved.path)
        if earlier == saved.path or earlier in self.firsts:
            return None
        self.firsts.append(earlier)
        return earlier

    def received(self, saved: Saved) -> Saved:
        """The content of a file that another process has read, with `Own` in place of its tree.

        Raises:
            ValueError: the other process cannot have produced this.
        """
        own = saved.content
        pattern = self.pattern(own.like)
        if pattern is None or pattern.of(own) != (saved.claims, saved.at_least):
            raise ValueError("a file that is not like another")
        if not len(own.starts) // 8 == len(own.crcs) // 4 == len(pattern.records):
            raise ValueError("another number of records")
        self._hits += 1
        return saved._replace(tree=Alike(pattern, saved.path, own), names=pattern.names)

    def pattern(self, number: int) -> Pattern | None:
        """A pattern by its number; None if its file cannot be one."""
        while len(self._patterns) <= number < len(self.firsts):
            self._patterns.append(_pattern(self.firsts[len(self._patterns)]))
        return self._patterns[number] if 0 <= number < len(self._patterns) else None


def _local_sizes(saved: Saved) -> int:
    """A hash that is equal for files whose tensors have the same names, dtypes and local sizes."""
    tensors = tensors_in(saved.tree)
    return hash(tuple((path, t.dtype, tuple(shard.box.sizes for shard in t.found)) for path, t in tensors))


def _pattern(path: Path) -> Pattern | None:
    from ckptools.pickles.alike import Pattern

    with suppress(CkptoolsError, PickleError, TreeLimitError, ValueError, OSError, MemoryError, RecursionError):
        return Pattern(path)
    return None


@contextmanager
def decompressed(file: File) -> Iterator[tuple[File, tuple[str, ...]]]:
    """Yield the file, or a temporary one with its unpacked content, and its contents, such as `("gzip", "zip")`.

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
