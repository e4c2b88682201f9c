"""`Tensor`: a lazy tensor with shape, dtype and the location of its shards; values are read on request."""

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
from ckptools.model.records import Rows, as_html, displayed, line_of, to_dict
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
"""Kinds of tensors of which ranks hold different shards."""

UNLISTED = ("checkpointable",)
"""Sharded kinds of which a rank's file lists its own shards only."""


CODES = "codes"


class Coded(NamedTuple):
    """The role of a tensor in a quantized weight that is stored as several tensors.

    Attributes:
        part: `codes`, or the role of another part: `scale_inv`, `zero_point`.
        scheme: how the weight is quantized, in words: `fp8, block scales 16 x 16`.
        weight: the key that the weight itself would have in the same state dict.
        numel: for codes, the number of weights they stand for, None if unknown; 0 for other parts.
    """

    part: str
    scheme: str
    weight: str
    numel: int | None

    @property
    def words(self) -> str:
        """A description of the encoding for people: `codes of fp8, block scales 16 x 16`."""
        return f"{self.part if self.part == CODES else f'a part ({self.part})'} of {self.scheme}"


# -- numpy's and torch's protocols for arrays, on values that are read when needed -------------------------------------
# Each makes one copy, from the file. torch takes tensors by DLPack, which has dtypes that numpy lacks.


BAND = 32 << 20
"""Bytes of rows that iteration over a tensor reads at once."""


class _TensorLike(Protocol):
    """The tensor that `ArrayMethods` extends."""

    @property
    def shape(self) -> Ints: ...
    @property
    def dtype(self) -> str: ...
    def load(self) -> torch.Tensor: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...


class ArrayMethods:
    """Adds `np.asarray(tensor)`, `torch.as_tensor(tensor)`, `len(tensor)` and `for row in tensor`."""

    __slots__ = ()

    def __array__(self: _TensorLike, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Read the values for `np.asarray(tensor)`, as `numpy()` does.

        Raises:
            UsageError: numpy has no equivalent of its dtype.
            ValueError: `copy=False` was asked for; the values are on disk.
        """
        if copy is False:
            raise ValueError("the values are in a file: an array of them is always a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __dlpack__(self: _TensorLike, **how: Any) -> Any:
        """Read the values for `torch.as_tensor(tensor)` and `torch.from_dlpack(tensor)`, in their own dtype.

        Raises:
            BufferError: DLPack has no equivalent of its dtype, or `copy=False` was asked for.
        """
        if how.pop("copy", None) is False:
            raise BufferError("the values are in a file: a tensor of them is always a copy")
        try:
            return self.load().__dlpack__(**how)
        except (BufferError, RuntimeError) as error:
            raise BufferError(f"{short(self.dtype)} cannot be handed over by DLPack; use .load()") from error

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device of the values that are read: the CPU's memory."""
        return 1, 0  # `kDLCPU`. Source: dlpack.h, `DLDeviceType`

    def __len__(self: _TensorLike) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no len()")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("whether values are zero is not known before they are read: use .load(), or `is not None`")

    def __iter__(self: _TensorLike) -> Iterator[torch.Tensor]:
        """Yield each row, reading many rows at once."""
        if not self.shape:
            raise TypeError("a tensor without dimensions has no rows; use .load()")
        return _rows(self)


def _rows(tensor: _TensorLike) -> Iterator[torch.Tensor]:
    nbytes = prod(tensor.shape[1:]) * ITEMSIZE[tensor.dtype]
    step = max(1, BAND // max(nbytes, 1))
    for first in range(0, tensor.shape[0], step):
        yield from tensor[first : first + step]


class Transposed(ArrayMethods):
    """A lazy tensor with its dimensions in reverse order; its `T` is the original. Values stay on disk until `load`."""

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
    """Finds shards in files of a checkpoint that were not read yet."""

    def with_sources(self, tensor: Tensor, key: KeyPath, box: Box) -> Tensor:
        """Add the sources of the shards that meet `box`."""

    def with_rank(self, tensor: Tensor, key: KeyPath, rank: int) -> Tensor:
        """Add the shards of one rank."""

    def lost(self, key: KeyPath) -> Mapping[int, str]:
        """The ranks whose file of a tensor is `missing`, `cut` or `bad`."""


class TensorOrigin(NamedTuple):
    """The place of a tensor in an opened checkpoint.

    Attributes:
        key: its key path in the checkpoint's tree.
        name: its name in every command; empty for a tensor taken from the raw tree.
        other_files: finds its shards in unread files; None if the bytes of every shard are located.
        files_lost: files of the checkpoint that were missing, cut or bad when it was opened.
    """

    key: KeyPath = ()
    name: str = ""
    other_files: OtherFiles | None = None
    files_lost: tuple[RankFile, ...] = ()


NOWHERE = TensorOrigin()

FATES = {"missing": "missing", "cut": "cut short or damaged", "bad": "not readable"}
"""A lost file's state in words, by its status."""


@displayed
@dataclass(frozen=True, slots=True, repr=False)
class Tensor(ArrayMethods):
    """A tensor of a checkpoint: its shape, its dtype and its shards. Its values stay on disk until `load`.

    A whole tensor is one shard that covers everything; a replica is a shard with an equal box.

    Attributes:
        shape: global sizes.
        dtype: torch's name, such as `bfloat16`.
        shards: in rank order; empty when no bytes exist (meta) or the bytes cannot be placed.
        kind: how the file describes it.
        placements: DTensor's placements in its own words, such as `Shard(0)`; None for other kinds.
        mesh: sizes of the device mesh, for DTensor.
        requires_grad: as saved.
        parameter: whether it was saved as an `nn.Parameter`.
        world_size: number of ranks that share it; None when the file does not say.
        fill: in an output, the value of elements without a shard: `nan` or `zero`; empty if none may be missing.
        note: why it cannot be loaded, and what to do; empty if it can.
        coded: its role in a quantized weight; None for an ordinary tensor.
        contradictions: why some shards do not fit, each with its rank; such shards are not in `shards`.
        detail: for kinds whose bytes are not a dense array, the parts as the file has them.
        attributes: attributes that were saved with it, and its class if that only wraps the values.
        origin: its place in an opened checkpoint.
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
        """The location of the shards, by column; for a rank's list of all ranks' shards, only that rank's."""
        if self._extents is None:
            object.__setattr__(self, "_extents", Extents.of(self.shards, self.dtype))
        assert self._extents is not None
        return self._extents

    @property
    def every_shard(self) -> ShardSequence:
        """All shards, also those without a file here: for their boxes and ranks."""
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
        """Whether the tensor's elements are the codes of a quantized weight, not values."""
        return self.coded is not None and self.coded.part == CODES

    @property
    def found(self) -> tuple[Shard, ...]:
        """The shards whose files were read."""
        return tuple([shard for shard in self._seen if shard.was_read])

    @property
    def first_source(self) -> Source | None:
        """The first source of the shards, or of their encoded parts; None where none was read."""
        return next((source for shard in self._seen for source in shard.sources), None)

    @property
    def _seen(self) -> Iterable[Shard]:
        return self.shards.seen if isinstance(self.shards, ShardSequence) else self.shards

    @property
    def lies_in_a_row(self) -> bool:
        """Whether the shards, or slabs of them, follow each other through the tensor and cover it once."""
        if len(self.shards) == 1:  # most tensors of most checkpoints: no columns needed
            (only,) = self.shards
            return only.was_read and only.box.sizes == self.shape and not any(only.box.offsets)
        return self.extents.all_read and self.extents.lie_in_a_row(self.shape)

    @property
    def has_copies(self) -> bool:
        """Whether several shards have one box."""
        return len(self.shards) > 1 and not self.lies_in_a_row and self.extents.has_copies

    @property
    def unread(self) -> bool:
        """Whether files that were not read yet may have further shards."""
        return self.origin.other_files is not None

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose file with the tensor is `missing`, `cut` or `bad`, if some files were not read yet."""
        others = self.origin.other_files
        return {} if others is None else others.lost(self.origin.key)

    @property
    def key(self) -> KeyPath:
        """The tensor's key path in the tree of the opened checkpoint."""
        return self.origin.key

    @property
    def name(self) -> str:
        """The tensor's name in every command; for a tensor taken from the raw tree, its path there."""
        return self.origin.name or fqn_of(self.origin.key)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different shards of the tensor."""
        return self.kind in SHARDED

    @property
    def encoded_as(self) -> tuple[Encoded, ...]:
        """The encoded forms in which it is stored, one of each class."""
        shards = self.shards.perhaps_encoded if isinstance(self.shards, ShardSequence) else self.shards
        found = {s.encoded.name: s.encoded for s in shards if s.encoded is not None}
        return tuple(found.values())

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """The shards that `rank` holds; empty for a rank that owns nothing."""
        return tuple(s for s in self.shards if s.rank == rank)

    def __dir__(self) -> list[str]:
        """The names for users, without facts that only ckptools itself uses."""
        return sorted(set(object.__dir__(self)) - INSIDE)

    def found_at(self, origin: TensorOrigin) -> None:
        """Record the tensor's place in an opened checkpoint, and make a few shards rows that a notebook shows."""
        object.__setattr__(self, "origin", origin)
        if isinstance(self.shards, tuple):
            object.__setattr__(self, "shards", Rows(self.shards))

    def called(self, name: str) -> Tensor:
        """The same tensor under the name that a command uses for it."""
        return replace(self, origin=self.origin._replace(name=name))

    def __bool__(self) -> bool:
        # Internal code tests any value for presence; `bool` of a tensor would mean its elements.
        return self.origin is NOWHERE or ArrayMethods.__bool__(self)

    def load(self, rank: int | None = None) -> torch.Tensor:
        """Read the values as a `torch.Tensor` of the global shape.

        Args:
            rank: read only the local tensor of this rank.

        Raises:
            NotWholeError: some of its elements are in no file.
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
            UsageError: numpy has no equivalent of its dtype.
        """
        from ckptools.tensor_io import read

        with self._naming_files():
            return read.to_numpy(self._with_box(Box.whole(self.shape)))

    def item(self) -> bool | int | float | complex:
        """Read the value of a tensor of one element, of any dimensionality, as a Python number.

        Raises:
            NotWholeError, ReadError: as `load`.
            UsageError: it does not have exactly one element.
        """
        if self.numel != 1:
            reason = f"item() is for a tensor of one element, and this one is {shape(self.shape)}; use .load()"
            raise UsageError(self.name or "tensor", reason)
        value: bool | int | float | complex = self.load().item()
        return value

    def dequantize(self) -> torch.Tensor:
        """Read the values of a quantized tensor as its class computes them; of any other tensor, as `load` does.

        Raises:
            NotWholeError, ReadError: as `load`; also if ckptools does not know how the class computes them.
            RefusedError: it holds the codes of a quantized weight, and its scales are other tensors.
        """
        if self.coded is not None and self.are_codes:
            text = f"holds {self.coded.words}, and this tensor alone makes no values"
            way = "the checkpoint's dequantized() the values"
            raise RefusedError(None, f"{self.name or 'the tensor'} {text}; .load() has the codes, {way}")
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
            index: ints, slices (with any step) and `...`, as in numpy.

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
        """The tensor with its dimensions in reverse order; no values are read."""
        return Transposed(self)

    def stats(self, rank: int | None = None, histogram: bool = False) -> Stats:
        """Compute rms, norm, extremes, mean, standard deviation, zeros, NaN and infinities of the values, in float64.

        `problem` states what could not be read; the figures then cover `elements` of its `numel` elements.

        Args:
            rank: only the part that this rank holds.
            histogram: also count the elements in equal parts of their range, which reads them twice.
        """
        from ckptools.stats.figures import tensor_stats

        found = self._with_box(Box.whole(self.shape)) if rank is None else self._with_rank(rank)
        return tensor_stats(found, self.name, histogram, rank)

    def to_dict(self) -> dict[str, Any]:
        """The tensor's dtype, shape, elements, bytes, sharding, and why it cannot be loaded."""
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
        """Name the tensor in errors about missing elements, and the lost files that may have had them."""
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
"""dtypes of weights whose fp32 copy can be recognised: it rounds to the weight, or equals it."""


class Rounded(NamedTuple):
    """A weight and its fp32 copy: they lie in different files, or the place of the copy is inferred.

    Attributes:
        fqn: the weight's name.
        copy: the tensor that rounds to the weight, if its place is right.
        weight: the weight.
    """

    fqn: str
    copy: Tensor
    weight: Tensor

    @classmethod
    def pairs(cls, copies: Mapping[str, Any], weights: Mapping[str, Any], prefix: str = "") -> Iterator[Rounded]:
        """Yield each fp32 copy with the weight of its name, where both can be read and have the same size.

        `prefix` comes before the names.
        """
        for name, copy in copies.items():
            weight = weights.get(name)
            if not isinstance(copy, Tensor) or not isinstance(weight, Tensor) or copy.note or weight.note:
                continue
            if copy.dtype == "float32" and weight.dtype in ROUNDED_TO and copy.shape == weight.shape:
                yield cls(f"{prefix}{name}", copy, weight)
