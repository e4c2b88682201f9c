"""The one in-memory model of all formats: a checkpoint is a tree of plain values with lazy tensors as leaves.

Readers make it, views and checks read it, consolidate plans from it. Everything here is data: it can be
printed, compared, pickled. Nothing here opens a file, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from ckptools.dtypes import ITEMSIZE, short
from ckptools.regions import Box, Ints, contiguous_strides

Key = Any
"""One step of a key path: usually a str, an int for optimizer ids and list positions."""

KeyPath = tuple[Key, ...]

TensorKind = Literal[
    "plain", "sharded_tensor", "dtensor", "chunks", "tensor_parallel", "flat_pieces", "meta", "sparse", "quantized",
    "unreadable",
]  # fmt: skip


def fqn_of(path: KeyPath) -> str:
    """Join a key path for people. Inside ckptools pass the tuple: keys may hold dots."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True)
class Source:
    """Where the elements of one strided array lie.

    Attributes:
        path: the file.
        offset: byte offset of element [0, …, 0] in the file.
        dtype: torch's name, which gives the bytes per element. Always little-endian.
        shape: sizes per dimension.
        strides: in elements; 0 where a dimension is expanded.
        record: name of the container's record, which is also the identity of the storage.
        record_span: `(offset, length)` in bytes of that record in the file.
        crc: CRC-32 of the whole record as the container states it; 0 when it states none.
    """

    path: Path
    offset: int
    dtype: str
    shape: Ints
    strides: Ints
    record: str
    record_span: tuple[int, int]
    crc: int = 0

    def part(self, box: Box) -> Source:
        """The source of a box of this array."""
        first = sum(o * s for o, s in zip(box.offsets, self.strides, strict=True))
        return replace(self, offset=self.offset + first * ITEMSIZE[self.dtype], shape=box.sizes)

    def reshaped(self, shape: Ints) -> Source:
        """The same consecutive bytes as an array of another `shape`; only for a contiguous source."""
        return replace(self, shape=shape, strides=contiguous_strides(shape))

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        pairs = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return not prod(self.shape) or all(n == 1 or s == c for n, s, c in pairs)


Seen = Callable[[Source, bytes], None]
"""Called with bytes that were read, and a source that begins with the first of them."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a file that is a torch.save archive of one tensor: where its bytes lie is told by its own directory.

    Attributes:
        path: the file.
        offset: byte offset of the archive in the file.
        length: bytes of the archive.
        dtype: torch's name for what it must hold.
        shape: sizes that it must have.
        zstd: whether the archive was compressed by zstd before it was written there.
    """

    path: Path
    offset: int
    length: int
    dtype: str
    shape: Ints
    zstd: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's piece of a tensor.

    Attributes:
        box: its place in the global tensor.
        rank: the global rank that holds it; None when the file does not tell (HSDP names group-local ranks).
        source: where its bytes are; None when they are in a file that was not read.
        item: what to read to learn the source, where a format packs each piece (DCP); None otherwise.
    """

    box: Box
    rank: int | None
    source: Source | None
    item: Item | None = None


def in_rank_order(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """Shards sorted by rank, those of one rank by their place; nobody's come first."""
    return tuple(sorted(shards, key=lambda s: (-1 if s.rank is None else s.rank, s.box.offsets)))


@dataclass(frozen=True, slots=True)
class Home:
    """Where a tensor of one rank's file was found.

    Attributes:
        path: what was opened: a rank file, or a folder of them.
        key: key path of the tensor in the checkpoint's tree.
        options: how it was opened.
    """

    path: Path
    key: KeyPath
    options: Any = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor known by shape, dtype and where its pieces lie. Its values stay on disk.

    A whole tensor is the case "one shard covering everything"; a replica is a shard with an equal box.

    Attributes:
        shape: global sizes.
        dtype: torch's name, such as `bfloat16`.
        shards: its pieces, in rank order; empty when no bytes exist (meta) or they cannot be placed.
        kind: how the file describes it.
        placements: DTensor's placements in its own words, such as `Shard(0)`; None for other kinds.
        mesh: sizes of the device mesh, for DTensor.
        requires_grad: as saved.
        parameter: whether it was saved as an `nn.Parameter`.
        world_size: number of ranks that share it; None when the file does not tell.
        fill: in an output, what stands where no shard is: `nan` or `zero`; empty where nothing may be missing.
        note: why it cannot be loaded, when it cannot: what is in the way and what to do.
        home: where it was read from, so that shards in other ranks' files can be
            looked up when they are needed; None when every shard has its source.
        detail: for kinds whose bytes are not a dense array, the parts as the file has them.
    """

    shape: Ints
    dtype: str
    shards: tuple[Shard, ...]
    kind: TensorKind = "plain"
    placements: tuple[str, ...] | None = None
    mesh: Ints | None = None
    requires_grad: bool = False
    parameter: bool = False
    world_size: int | None = None
    fill: str = ""
    note: str = ""
    home: Home | None = field(default=None, compare=False, repr=False)
    detail: Any = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor, packed; storages on disk may be larger or shared."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def found(self) -> tuple[Shard, ...]:
        """The pieces whose bytes are in files that were read."""
        return tuple(s for s in self.shards if s.source is not None)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different pieces of it."""
        return self.kind in ("sharded_tensor", "dtensor", "chunks", "tensor_parallel", "flat_pieces")

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """The pieces that `rank` holds; empty for a rank that owns nothing."""
        return tuple(s for s in self.shards if s.rank == rank)

    def load(self, rank: int | None = None) -> Any:
        """Read the values as a `torch.Tensor`; with `rank`, only what that rank holds, as it held it."""
        from ckptools import arrays

        return arrays.load(self, rank)

    def numpy(self) -> Any:
        """Read the values as a numpy array; bfloat16 and fp8, which numpy lacks, become float32 exactly."""
        from ckptools import arrays

        return arrays.to_numpy(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Read the values for `np.asarray(tensor)`, as `numpy()` does.

        Raises:
            ValueError: the values were asked for without a copy; they are on disk.
        """
        if copy is False:
            raise ValueError("the values are in a file: an array of them is always a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        """Read a slice as a `torch.Tensor`: only the shards, and only the bytes, that it needs."""
        from ckptools import arrays

        return arrays.load_slice(self, index)

    def __repr__(self) -> str:
        pieces = "1 shard" if len(self.shards) == 1 else f"{len(self.shards)} shards"
        return f"<Tensor {short(self.dtype)} {list(self.shape)}, {self.nbytes:,} bytes, {pieces}, not loaded>"


@dataclass(frozen=True, slots=True)
class Rounded:
    """A half-precision weight and its fp32 copy, whose place was found and not stated.

    Attributes:
        fqn: the weight's name.
        copy: what must round to it, if the place is right.
        weight: the weight.
    """

    fqn: str
    copy: Tensor
    weight: Tensor


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a checkpoint, or that its user should know.

    Attributes:
        code: stable, such as `CK001`; see `PROBLEM_CODES`.
        severity: an error makes the checkpoint not whole; a warning may; a note is for information.
        message: one line: expected, found, what to do.
        rank: the rank it is about.
        tensor: fqn of the tensor it is about.
    """

    code: str
    severity: Severity
    message: str
    rank: int | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [self.tensor] if self.tensor is not None else []
        return "  ".join([self.code, *where, self.message])


def worst_first(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Errors, then warnings, then notes, each in the order in which they were found."""
    return tuple(sorted(problems, key=lambda p: ("error", "warning", "note").index(p.severity)))


PROBLEM_CODES: dict[str, str] = {
    "CK001": "rank file missing",
    "CK002": "rank file cut short",
    "CK003": "rank file of an odd size",
    "CK004": "bad CRC-32",
    "CK005": "value lost or damaged inside a file",
    "CK006": "files of different steps or saves",
    "CK007": "metadata that contradicts itself",
    "CK008": "left over from an interrupted write",
    "CK009": "stray or duplicate rank file",
    "CK010": "file name and content disagree",
    "CK011": "one file of several",
    "CK012": "kept as the framework has it",
    "CK013": "file beside it that is not read",
    "CK014": "differs from the manifest",
    "CK015": "file that may not be read, or whose disk fails",
    "CK101": "gap in a tensor",
    "CK102": "overlap in a tensor",
    "CK103": "world sizes disagree",
    "CK104": "ranks disagree on layout, shape or dtype",
    "CK105": "copies that should be equal differ",
    "CK106": "tensor that cannot be put together",
    "CK107": "part of the model missing",
    "CK108": "layout that the files do not state, found as the only one that fits",
    "CK201": "NaN or infinity",
    "CK203": "no optimizer state for a parameter",
    "CK204": "step counters disagree",
    "CK205": "scheduler and param groups have different learning rates",
    "CK206": "RNG states equal on several ranks",
    "CK207": "parameter in no param group, or in two",
    "CK209": "optimizer state of another shape than its parameter",
    "CK210": "optimizer state without a sure name",
    "CK301": "foreign classes, kept as data",
    "CK302": "name that could run code",
    "CK303": "whole module instead of a state dict",
}


CONTRADICTIONS = ("CK006", "CK007", "CK009", "CK103", "CK104", "CK105")
"""Problems that no option talks away: the files are not of one checkpoint, or contradict each other."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it comes from.

    Attributes:
        value: the value, or None when nothing tells.
        sources: what says so, such as `("file name", "state.timestamp.batch")`.
        agree: False when the sources contradict each other.
    """

    value: Any
    sources: tuple[str, ...] = ()
    agree: bool = True


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of the checkpoint.

    Attributes:
        path: the file, as found.
        rank: its rank, from the content where that tells, else from the name; None for a monolithic file.
        part: what of the checkpoint it holds when a rank has several files (`model`, `optim`), else "".
        status: `read` in full, `seen` (directory checked only), `cut`, `missing`, or `bad`.
        nbytes: size in bytes, 0 when missing.
        modified: file time, seconds since 1970; None when missing.
    """

    path: Path
    rank: int | None
    part: str
    status: Literal["read", "seen", "cut", "missing", "bad"]
    nbytes: int
    modified: float | None


def walk(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(key path, leaf)` of a tree of dicts, lists and tuples, in order, without recursion.

    Empty containers are leaves too, so that nothing that a file holds goes unseen. A container that contains
    itself is walked once along each path and not entered again.
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


def nodes_in(tree: Any, kinds: tuple[type, ...]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(key path, node)` of every node of some classes, containers too if asked for, in order.

    Everything else is stepped over without a path of its own: the RNG states of 256 ranks are 300,000 ints.
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
