"""One torch.save file, also compressed or in a tar, read inertly: its tree, and what it says of itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptools.errors import CkptoolsError, ReadError
from ckptools.files import zip_directory
from ckptools.files.file_type import COMPRESSIONS, content_of, head_of
from ckptools.files.opening import File, Window
from ckptools.files.remote.path import RemotePath
from ckptools.model.provenance import Said
from ckptools.model.tree import TreeLimitError
from ckptools.model.values import describe_for_error
from ckptools.pickles.alike import Alike
from ckptools.pickles.archive import read_archive
from ckptools.pickles.classes.device_mesh import Claim, claims_of, note_mesh
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError
from ckptools.pickles.repeated import RepeatedRecords

if TYPE_CHECKING:
    from ckptools.pickles.patterns import Pattern

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
        claims: `(rank, world size)` as its sharded tensors say; more than one when they contradict each other.
        names: dotted names of everything that the pickle mentions, in order.
        nbytes: size of the file.
        modified: file time, seconds since 1970.
        bytes_read: how much of it was read.
        form: what it is beside a zip archive, in words: `gzip`, `tar`, `pickle stream`; "" for nothing else.
        at_least: whether the world sizes in `claims` are only what the world has at least, by a slice of its mesh.
        modules: whether an object in it has the state of an `nn.Module`.
        provenance: what it says of where it comes from, if `consolidate` wrote it.
        cut: whether it is cut short, and the tree has tensors without bytes where these are behind the cut.
        root: the root folder of its archive, which torch calls as it called the file.
    """

    __slots__ = ()

    @property
    def content(self) -> Any:
        """The tree, or what is known of a file that is like another, whose tree is made when it is asked for."""
        return self[1]

    @property
    def tree(self) -> Any:
        """Plain values, lazy tensors and opaque objects."""
        content = self.content
        return content.tree() if isinstance(content, Alike) else content


def read(path: Path, repeated: RepeatedRecords | None = None, salvage: bool = False) -> Saved:
    """Read the structure of a torch.save file: the zip directory, the headers and the pickle, no tensor bytes.

    A compressed file is unpacked into a temporary one; of a tar the torch.save file in it is read.

    Args:
        path: the file.
        repeated: what the pickles of other ranks' files have spelled; None for a file that is read alone.
        salvage: read a zip archive that is cut short as far as it is here.

    Raises:
        ReadError: it is cut, damaged, or no torch.save file.
    """
    with File(path) as file, decompressed(file) as (opened, forms):
        if forms[-1:] == ("tar",):
            machine, tree = read_tar(opened)
        else:
            machine, tree = read_archive(opened, repeated, salvage)
        names = tuple(g.dotted for g in machine.globals.values())
        nread = min(opened.bytes_read, file.size) if opened is file else file.bytes_read + opened.bytes_read
        form = ", ".join(filter(None, map(FORMS.get, forms, forms)))
        claims, at_least = claims_in(machine)
        size, modified, origin, modules = file.size, file.modified, machine.provenance, machine.modules
        found = Saved(path, tree, claims, names, size, modified, nread, form, at_least, modules, origin, machine.cut)
        return found._replace(root=zip_directory.root_of(head_of(file)))


def claims_in(machine: Machine) -> tuple[frozenset[Claim], bool]:
    """The claims of the pickle that a machine has read; see `claims_of`."""
    claims, meshes = set(machine.claims), set(machine.meshes)
    for _, mesh in machine.read_meshes.values():
        note_mesh(mesh, claims, meshes)
    return claims_of(claims, meshes)


def probe(path: Path) -> None:
    """Check what is cheap to check of a file: a zip's or tar's directory, the header of an older file.

    Raises:
        ReadError: it is cut short or no torch.save file. Of a compressed file only its first bytes are known.
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
            zip_directory.probe(file)


# -- files of which most are like others ------------------------------------------------------------------------------


MAX_MISSES = 8
"""Files that may be unlike those before, beyond as many as are like one, before no other is compared."""

MAX_PATTERNS = 4
"""Files that others are compared with; each is interpreted several times, by every process that reads."""

FILES_PER_PATTERN = 64
"""Files for each of these but the first: that many repay it."""

MIN_HITS = 4
"""Files that must be like another, for each of these beyond two: where each file is another, none repays it."""

MIN_ALIKE = 8
"""Files whose names differ in numbers alone, from which on they are compared."""


def first_of_many(paths: Sequence[Path]) -> Path | None:
    """The first local file that others can be like, by their names; None where these are few."""
    local = {path: re.sub(r"\d+", "#", str(path)) for path in paths if not isinstance(path, RemotePath)}
    counted = Counter(local.values())
    return next((path for path, name in local.items() if counted[name] >= MIN_ALIKE), None)


class AlikeFiles:
    """Reads files that are like others of their checkpoint: the first one, or the first of another kind.

    Args:
        first: the file that others are compared with; None to compare none.
        files: how many files there are.

    Attributes:
        firsts: all files that others are compared with.
    """

    def __init__(self, first: Path | None, files: int = 0) -> None:
        self.firsts = [] if first is None else [first]
        self._most = min(max(files // FILES_PER_PATTERN, 1), MAX_PATTERNS)
        self._patterns: list[Pattern | None] = []
        self._hits = self._misses = self._last = 0
        self._unlike: Path | None = None

    def read(self, path: Path) -> Saved | None:
        """Read a file as `read` does; None for one that is like no other, or cannot be read."""
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

    def missed(self, path: Path) -> Path | None:
        """Take note of a file that is like no other; return the one before, if others are compared with that now."""
        before, self._unlike = self._unlike, path
        repaid = self._hits >= MIN_HITS * (len(self.firsts) - 1)
        if before is None or len(self.firsts) >= self._most or not repaid or self.pattern(0) is None:
            return None
        self.firsts.append(before)
        return before

    def received(self, saved: Saved) -> Saved:
        """The content of a file that another process has read, with `Own` in the place of its tree.

        Raises:
            ValueError: the other process cannot have found this.
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
        """One of those that files are compared with; None where its file cannot be compared."""
        while len(self._patterns) <= number < len(self.firsts):
            self._patterns.append(_pattern(self.firsts[len(self._patterns)]))
        return self._patterns[number] if 0 <= number < len(self._patterns) else None


def _pattern(path: Path) -> Pattern | None:
    from ckptools.pickles.patterns import Pattern

    with suppress(CkptoolsError, PickleError, TreeLimitError, ValueError, OSError, MemoryError, RecursionError):
        return Pattern(path)
    return None


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


# -- a checkpoint in a tar, of which nothing is extracted -------------------------------------------------------------


# Composer writes `ep0-ba5-rank0.tar` (or `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`) where a file name asks for it. The
# state is the member `composer_states.pt`; in DeepSpeed runs a folder `deepspeed` lies beside it, in the tar of every
# rank. Source: composer/utils/checkpoint.py of Composer 0.7 to 0.28 (`tarball.add(tmpdir, arcname="")`, so the folder
# itself is a member called `/`).

# NeMo's `.nemo` is a tar, compressed or not, of `model_config.yaml`, `model_weights.ckpt`, and others (a tokenizer's),
# which are not read. Under model parallelism the weights lie in `mp_rank_XX` of each rank. Source:
# nemo/core/connectors/save_restore_connector.py.

STATES = "composer_states.pt"
NEMO_CONFIG, NEMO_WEIGHTS = "model_config.yaml", "model_weights.ckpt"
DEEPSPEED = "deepspeed"
TORCH_0_1 = frozenset({"sys_info", "pickle", "tensors", "storages"})
"""Members of a file of torch 0.1, which ckptools does not read. Source: torch/serialization.py (`legacy_load`)."""


def read_tar(file: File) -> tuple[Machine, Any]:
    """Read the torch.save file in a tar; return the machine that read it, and its tree.

    Raises:
        ReadError: it holds none, several, or a DeepSpeed run's, or torch 0.1 wrote it.
    """
    from ckptools.files.tar_archive import members

    name, part = _checkpoint_of(file, members(file))
    if content_of(head_of(part)) not in ("zip", "legacy"):
        raise ReadError(file.path, f"its member {describe_for_error(name)} is no torch.save file; unpack the tar first")
    return read_archive(part)


def _checkpoint_of(file: File, found: dict[str, Window]) -> tuple[str, Window]:
    """The name and the bytes of the torch.save file among the members of a tar."""
    if any(name.startswith(f"{DEEPSPEED}/") for name in found):
        text = "a Composer tar of a DeepSpeed run: unpack the tars of all ranks into one folder and open that"
        raise ReadError(file.path, text)
    if found.keys() >= TORCH_0_1:
        way = "if you trust it, convert it: torch.save(torch.load(OLD, weights_only=False), NEW)"
        raise ReadError(file.path, f"is a tar of torch 0.1, which ckptools does not read; {way}")
    states = STATES if STATES in found else _weights_of_nemo(found)
    if states is not None:
        return states, found[states]
    if len(found) == 1:
        return next(iter(found.items()))
    if NEMO_CONFIG in found and any(name.endswith(f"/{NEMO_WEIGHTS}") for name in found):
        text = "a .nemo of several model-parallel ranks: unpack it with tar, and open the folder (with --rules FILE)"
        raise ReadError(file.path, text)
    listed = (
        f" ({', '.join(describe_for_error(name) for name in list(found)[:4])}{' …' if len(found) > 4 else ''})"
        if found
        else ""
    )
    raise ReadError(file.path, f"a tar of {len(found)} files{listed}: unpack it, and open what is inside")


def _weights_of_nemo(found: dict[str, Window]) -> str | None:
    """The member with the weights of a `.nemo` of one rank."""
    weights = [name for name in found if name.rpartition("/")[2] == NEMO_WEIGHTS]
    return weights[0] if NEMO_CONFIG in found and len(weights) == 1 else None
