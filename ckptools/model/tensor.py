"""A lazy tensor: known by shape, dtype and where its pieces lie, and loaded when its user asks for values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ckptools.dtypes import ITEMSIZE, short
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.model.extents import Extents
from ckptools.model.facts import RankFile
from ckptools.model.problems import Rows, as_html, displayed, line_of, to_dict
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Encoded, Shard, ShardSequence, Source
from ckptools.text import KeyPath, clip_middle, few, fqn_of, plural, shape, size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ckptools.stats.record import Stats

TensorKind = Literal[
    "plain", "sharded_tensor", "dtensor", "checkpointable", "chunks", "tensor_parallel", "flat_pieces", "meta",
    "sparse", "quantized", "unreadable", "storage",
]  # fmt: skip

SHARDED = ("sharded_tensor", "dtensor", "checkpointable", "chunks", "tensor_parallel", "flat_pieces")
"""Kinds of which ranks hold different pieces."""

UNLISTED = ("checkpointable",)
"""Sharded kinds of which a rank's file lists its own pieces only."""


CODES = "codes"


class Coded(NamedTuple):
    """What a tensor is of a weight that is quantized, and lies in several tensors beside each other.

    Attributes:
        part: `codes`, or what it is beside them: `scale_inv`, `zero_point`.
        scheme: how the weight is quantized, in words: `fp8, block scales 16 x 16`.
        weight: the key that the weight itself would have in the same state dict.
        numel: of codes, how many weights they stand for; None where that is not known; 0 of other parts.
    """

    part: str
    scheme: str
    weight: str
    numel: int | None

    @property
    def words(self) -> str:
        """What it is, for people: `codes of fp8, block scales 16 x 16`."""
        return f"{self.part if self.part == CODES else f'a part ({self.part})'} of {self.scheme}"


# -- what numpy, torch and loops ask of an array, for values that are read when asked for ------------------------------
# Each makes one copy, from the file. torch takes tensors by DLPack, which has dtypes that numpy lacks.


BAND = 32 << 20
"""Bytes of rows that a loop over a tensor reads at once."""


class _TensorLike(Protocol):
    """The tensor that these methods are mixed into."""

    @property
    def shape(self) -> Ints: ...
    @property
    def dtype(self) -> str: ...
    def load(self) -> torch.Tensor: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


class ArrayMethods:
    """`np.asarray(tensor)`, `torch.as_tensor(tensor)`, `len(tensor)` and `for row in tensor`."""

    __slots__ = ()

    def __array__(self: _TensorLike, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Read the values for `np.asarray(tensor)`, as `numpy()` does.

        Raises:
            UsageError: numpy has nothing like its dtype.
            ValueError: the values were asked for without a copy; they are on disk.
        """
        if copy is False:
            raise ValueError("the values are in a file: an array of them is always a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __dlpack__(self: _TensorLike, **how: Any) -> Any:
        """Read the values for `torch.as_tensor(tensor)` and `torch.from_dlpack(tensor)`, in their own dtype.

        Raises:
            BufferError: DLPack has nothing like its dtype, or the values were asked for without a copy.
        """
        if how.pop("copy", None) is False:
            raise BufferError("the values are in a file: a tensor of them is always a copy")
        try:
            return self.load().__dlpack__(**how)
        except (BufferError, RuntimeError) as error:
            raise BufferError(f"{short(self.dtype)} cannot be handed over by DLPack; use .load()") from error

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device of values that were read: the CPU's memory."""
        return 1, 0  # `kDLCPU`. Source: dlpack.h, `DLDeviceType`

    def __len__(self: _TensorLike) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no len()")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("whether values are zero is not known before they are read: use .load(), or `is not None`")

    def __iter__(self: _TensorLike) -> Iterator[torch.Tensor]:
        """Each row, many of them read at once."""
        if not self.shape:
            raise TypeError("a tensor without dimensions has no rows; use .load()")
        return _rows(self)


def _rows(tensor: _TensorLike) -> Iterator[torch.Tensor]:
    nbytes = prod(tensor.shape[1:]) * ITEMSIZE[tensor.dtype]
    step = max(1, BAND // max(nbytes, 1))
    for first in range(0, tensor.shape[0], step):
        yield from tensor[first : first + step]


class Transposed(ArrayMethods):
    """A lazy tensor with its dimensions in reverse order; `T` is that tensor. Its values stay on disk until `load`."""

    __slots__ = ("T",)

    def __init__(self, tensor: Any) -> None:
        self.T = tensor

    @property
    def shape(self) -> Ints:
        """Sizes per dimension."""
        sizes: Ints = self.T.shape[::-1]
        return sizes

    @property
    def dtype(self) -> str:
        """Torch's name, such as `bfloat16`."""
        name: str = self.T.dtype
        return name

    def load(self) -> torch.Tensor:
        """Read the values as a `torch.Tensor`; it raises what `Tensor.load` raises."""
        return _reversed(self.T.load())

    def numpy(self) -> npt.NDArray[Any]:
        """Read the values as a numpy array; it raises what `Tensor.numpy` raises."""
        values: npt.NDArray[Any] = self.T.numpy().T
        return values

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a slice as a `torch.Tensor`: only the bytes that it needs."""
        from ckptools.tensor_io.slicing import parts_of_index

        return _reversed(self.T[tuple(reversed(parts_of_index(self.shape, index)))])

    def __repr__(self) -> str:
        return line_of("Transposed", f"{shape(self.shape)} of {self.T!r}")

    def _repr_html_(self) -> str | None:
        return as_html(self.T)


def _reversed(values: torch.Tensor) -> torch.Tensor:
    return values.permute(tuple(range(values.ndim - 1, -1, -1)))


# -- the tensor --------------------------------------------------------------------------------------------------------


INSIDE = frozenset({
    "called", "coded", "contradictions", "detail", "encoded_as", "every_shard", "extents", "fill", "first_source",
    "found", "found_at", "has_copies", "lies_in_a_row", "origin",
})  # fmt: skip
"""Fields of a tensor for other rooms, which completion does not propose."""


class OtherFiles(Protocol):
    """What finds shards in files of a checkpoint that were not read yet."""

    def with_sources(self, tensor: Tensor, key: KeyPath, box: Box) -> Tensor:
        """Add the sources of the shards that meet `box`."""

    def with_rank(self, tensor: Tensor, key: KeyPath, rank: int) -> Tensor:
        """Add the shards of one rank."""

    def lost(self, key: KeyPath) -> Mapping[int, str]:
        """The ranks whose file of a tensor is `missing`, `cut` or `bad`."""


class TensorOrigin(NamedTuple):
    """Where in an opened checkpoint a tensor was found.

    Attributes:
        key: its key path in the checkpoint's tree.
        name: the name that every command has for it; empty where it comes out of the raw tree.
        other_files: finds its shards in files that were not read yet; None where every shard has its bytes.
        files_lost: files of the checkpoint that were missing, cut or bad when it was opened.
    """

    key: KeyPath = ()
    name: str = ""
    other_files: OtherFiles | None = None
    files_lost: tuple[RankFile, ...] = ()


NOWHERE = TensorOrigin()

FATES = {"missing": "missing", "cut": "cut short or damaged", "bad": "not readable"}
"""The fate of a file, by its status."""


@displayed
@dataclass(frozen=True, slots=True, repr=False)
class Tensor(ArrayMethods):
    """A tensor of a checkpoint, known by shape, dtype and where its pieces lie. Its values stay on disk until `load`.

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
        world_size: number of ranks that share it; None when the file does not say.
        fill: in an output, what stands where no shard is: `nan` or `zero`; empty where nothing may be missing.
        note: why it cannot be loaded, when it cannot: what is in the way and what to do.
        coded: of which quantized weight it is a part; None where its elements are what they look like.
        contradictions: why pieces of it do not fit, each with its rank; these are not among the shards that are here.
        detail: for kinds whose bytes are not a dense array, the parts as the file has them.
        attributes: attributes that were saved with it, and its class where that only wraps the values.
        origin: where in an opened checkpoint it was found.
    """

    shape: Ints
    dtype: str
    shards: Sequence[Shard]
    kind: TensorKind = "plain"
    placements: tuple[str, ...] | None = None
    mesh: Ints | None = None
    requires_grad: bool = False
    parameter: bool = False
    world_size: int | None = None
    fill: str = ""
    note: str = ""
    coded: Coded | None = None
    contradictions: tuple[tuple[int | None, str], ...] = ()
    detail: Any = field(default=None, compare=False, repr=False)
    attributes: Any = field(default=None, compare=False, repr=False)
    origin: TensorOrigin = field(default=NOWHERE, compare=False, repr=False)
    _extents: Extents | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def extents(self) -> Extents:
        """Where its pieces lie, by column; of a rank's list of the pieces of all ranks, those of that rank."""
        if self._extents is None:
            object.__setattr__(self, "_extents", Extents.of(self.shards, self.dtype))
        assert self._extents is not None
        return self._extents

    @property
    def every_shard(self) -> ShardSequence:
        """All its pieces, also those that no file here holds, to ask for their regions and ranks."""
        return self.shards if isinstance(self.shards, ShardSequence) else self.extents

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor, packed; storages on disk may be larger or shared."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def are_codes(self) -> bool:
        """Whether its elements are the codes of a quantized weight, and so no values."""
        return self.coded is not None and self.coded.part == CODES

    @property
    def found(self) -> tuple[Shard, ...]:
        """The pieces whose bytes are in files that were read."""
        return tuple([shard for shard in self._seen if shard.was_read])

    @property
    def first_source(self) -> Source | None:
        """Where the first of those pieces, or of what is stored in its place, begins; None where none was read."""
        return next((source for shard in self._seen for source in shard.sources), None)

    @property
    def _seen(self) -> Iterable[Shard]:
        return self.shards.seen if isinstance(self.shards, ShardSequence) else self.shards

    @property
    def lies_in_a_row(self) -> bool:
        """Whether those pieces, or slabs of them, follow each other through the tensor, and cover it once."""
        if len(self.shards) == 1:  # most tensors of most checkpoints, which need no columns for it
            (only,) = self.shards
            return only.was_read and only.box.sizes == self.shape and not any(only.box.offsets)
        return self.extents.all_read and self.extents.lie_in_a_row(self.shape)

    @property
    def has_copies(self) -> bool:
        """Whether a region is in several of those pieces."""
        return len(self.shards) > 1 and not self.lies_in_a_row and self.extents.has_copies

    @property
    def unread(self) -> bool:
        """Whether files that were not read yet may hold pieces whose bytes are not known here."""
        return self.origin.other_files is not None

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose file of it is known to be `missing`, `cut` or `bad`, while others were not read yet."""
        others = self.origin.other_files
        return {} if others is None else others.lost(self.origin.key)

    @property
    def key(self) -> KeyPath:
        """Its key path in the tree of the checkpoint that was opened."""
        return self.origin.key

    @property
    def name(self) -> str:
        """The name that every command has for it; that of its place in the raw tree where it comes out of that."""
        return self.origin.name or fqn_of(self.origin.key)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different pieces of it."""
        return self.kind in SHARDED

    @property
    def encoded_as(self) -> tuple[Encoded, ...]:
        """The encoded forms that are stored instead of values, one of each class."""
        shards = self.shards.perhaps_encoded if isinstance(self.shards, ShardSequence) else self.shards
        found = {s.encoded.name: s.encoded for s in shards if s.encoded is not None}
        return tuple(found.values())

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """The pieces that `rank` holds; empty for a rank that owns nothing."""
        return tuple(s for s in self.shards if s.rank == rank)

    def __dir__(self) -> list[str]:
        """What users call; the facts that only other rooms ask for are left out."""
        return sorted(set(object.__dir__(self)) - INSIDE)

    def found_at(self, origin: TensorOrigin) -> None:
        """Tell it where in an opened checkpoint it was found, and make its few shards rows that a notebook shows."""
        object.__setattr__(self, "origin", origin)
        if isinstance(self.shards, tuple):
            object.__setattr__(self, "shards", Rows(self.shards))

    def called(self, name: str) -> Tensor:
        """The same tensor under the name that a command has for it."""
        return replace(self, origin=self.origin._replace(name=name))

    def __bool__(self) -> bool:
        # What reads a checkpoint asks of any value whether there is one; whoever holds the tensor means its elements.
        return self.origin is NOWHERE or ArrayMethods.__bool__(self)

    def load(self, rank: int | None = None) -> torch.Tensor:
        """Read the values as a `torch.Tensor` of the global shape.

        Args:
            rank: read only the local tensor of this rank.

        Raises:
            NotWholeError: no file that is here holds some of it.
            ReadError: a file cannot be read, or the tensor cannot be put together; the message says why.
            UsageError: `rank` holds nothing of it.
        """
        from ckptools.tensor_io import read

        with self._naming_files():
            if rank is None:
                loaded: torch.Tensor = read.load(self._with_box(Box.whole(self.shape)))
            else:
                loaded = read.load(self._with_rank(rank), rank)
        return loaded

    def numpy(self) -> npt.NDArray[Any]:
        """Read the values as a numpy array; bfloat16 and fp8, which numpy lacks, become float32 exactly.

        Raises:
            NotWholeError, ReadError: as `load`.
            UsageError: numpy has nothing like its dtype.
        """
        from ckptools.tensor_io import read

        with self._naming_files():
            return read.to_numpy(self._with_box(Box.whole(self.shape)))

    def item(self) -> bool | int | float | complex:
        """Read the value of a tensor of one element, whatever its dimensions, as Python's number.

        Raises:
            NotWholeError, ReadError: as `load`.
            UsageError: it has several elements, or none.
        """
        if self.numel != 1:
            reason = f"item() is for a tensor of one element, and this one is {shape(self.shape)}; use .load()"
            raise UsageError(self.name or "tensor", reason)
        value: bool | int | float | complex = self.load().item()
        return value

    def dequantize(self) -> torch.Tensor:
        """Read the values of a quantized tensor as its class computes them; of any other, what `load` reads.

        Raises:
            NotWholeError, ReadError: as `load`; also where ckptools does not know how the class computes them.
            RefusedError: it holds the codes of a quantized weight, and its scales are tensors of their own.
        """
        if self.coded is not None and self.are_codes:
            text = f"holds {self.coded.words}, and this tensor alone makes no values"
            raise RefusedError(None, f"{self.name or 'the tensor'} {text}; .load() has the codes")
        from ckptools.tensor_io import read
        from ckptools.tensor_io.read import dequantized

        others, box = self.origin.other_files, Box.whole(self.shape)
        found = self if others is None else others.with_sources(self, self.origin.key, box)
        with self._naming_files():
            loaded: torch.Tensor = read.load(dequantized(found))
        return loaded

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a slice as a `torch.Tensor`: only the shards, and only the bytes, that it needs.

        Args:
            index: ints, slices (with any step) and `...`, as numpy means them.

        Raises:
            IndexError: an int is beyond the end.
            NotWholeError, ReadError: as `load`.
            UsageError: another kind of index.
        """
        from ckptools.tensor_io import read
        from ckptools.tensor_io.slicing import slicing_of

        cut = slicing_of(self.shape, index)
        with self._naming_files():
            loaded: torch.Tensor = read.load_slice(self._with_box(cut.box), cut)
        return loaded

    @property
    def T(self) -> Transposed:  # noqa: N802  # as numpy and torch call it
        """Its dimensions in reverse order; nothing is read before values are asked for."""
        return Transposed(self)

    def stats(self, rank: int | None = None, histogram: bool = False) -> Stats:
        """Take rms, norm, extremes, mean, standard deviation, zeros, NaN and infinities of the values, in float64.

        What cannot be read is said in `problem`; the figures are of `elements` of its `numel` elements then.

        Args:
            rank: only of what this rank holds.
            histogram: count also how many elements lie in each of equal parts of their range, which reads them twice.
        """
        from ckptools.stats.figures import tensor_stats

        found = self._with_box(Box.whole(self.shape)) if rank is None else self._with_rank(rank)
        return tensor_stats(found, self.name, histogram, rank)

    def to_dict(self) -> dict[str, Any]:
        """Its dtype, shape, elements, bytes, how it is cut, and why it cannot be loaded."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = (
            *("name", "dtype", "shape", "numel", "nbytes", "kind"),
            *("placements", "mesh", "world_size", "parameter", "note"),
        )
        return {**{name: getattr(self, name) for name in names}, "shards": len(self.shards)}

    def _summary(self) -> str:
        name = f"{clip_middle(self.name, 60)}: " if self.name else ""
        known = f"{short(self.dtype)} {shape(self.shape)}, {size(self.nbytes)}, {plural(len(self.shards), 'shard')}"
        gone = 0 if self.unread or self.every_shard.is_here else len(self.shards) - len(self.found)
        missing = f", {gone} NOT HERE" if gone and self.kind != "meta" else ""
        return f"{name}{known}{missing}, {'CANNOT BE LOADED' if self.note else 'not loaded'}"

    @contextmanager
    def _naming_files(self) -> Iterator[None]:
        """Name the tensor in errors about a hole, and the lost files that may have had the missing elements."""
        try:
            yield
        except NotWholeError as error:
            ranks = {s.rank for s in self.shards if not s.is_here} - {None}
            lost = [f for f in self.origin.files_lost if f.rank in ranks] or self.origin.files_lost
            which = few([f"{f.path.name} is {FATES[f.status]}" for f in lost])
            reason = error.reason + f"; {which}" * bool(lost)
            raise NotWholeError(self.name or "tensor", reason, error.problems) from None

    def _with_box(self, box: Box) -> Tensor:
        others = self.origin.other_files
        return self if others is None or self.note else others.with_sources(self, self.origin.key, box)

    def _with_rank(self, rank: int) -> Tensor:
        others = self.origin.other_files
        return self if others is None else others.with_rank(self, self.origin.key, rank)


ROUNDED_TO = ("bfloat16", "float16", "float32")
"""dtypes of weights that show whether an fp32 copy is theirs: it rounds to them, or equals them."""


class Rounded(NamedTuple):
    """A weight and its fp32 copy, which lie in different files or whose place was found and not stated.

    Attributes:
        fqn: the weight's name.
        copy: what must round to it, if the place is right.
        weight: the weight.
    """

    fqn: str
    copy: Tensor
    weight: Tensor

    @classmethod
    def pairs(cls, copies: Mapping[str, Any], weights: Mapping[str, Any], prefix: str = "") -> Iterator[Rounded]:
        """The fp32 copies that must round to the weights of their names, where both can be read and are as large.

        `prefix` comes before the names.
        """
        for name, copy in copies.items():
            weight = weights.get(name)
            if not isinstance(copy, Tensor) or not isinstance(weight, Tensor) or copy.note or weight.note:
                continue
            if copy.dtype == "float32" and weight.dtype in ROUNDED_TO and copy.shape == weight.shape:
                yield cls(f"{prefix}{name}", copy, weight)
