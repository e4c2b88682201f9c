"""A lazy tensor as users hold it: known by shape, dtype and where its pieces lie, and loaded when it is asked to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ckptools.dtypes import ITEMSIZE, short
from ckptools.errors import NotWholeError, RefusedError, UsageError
from ckptools.model import tensor as tensor_data
from ckptools.model.checkpoint import RankFile
from ckptools.model.extents import Extents
from ckptools.model.problems import Rows, as_html, displayed, line_of
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard
from ckptools.model.tensor import UNLISTED
from ckptools.model.tree import KeyPath, Opaque, fqn_of
from ckptools.text import clip_middle, few, shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ckptools.formats.shards_of_other_ranks import Resolver
    from ckptools.stats.record import Stats


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


FATES = {"missing": "missing", "cut": "cut short or damaged", "bad": "not readable"}
"""The fate of a file, by its status."""


@displayed
@dataclass(frozen=True, slots=True, repr=False)
class Tensor(ArrayMethods, tensor_data.Tensor):
    """A tensor of a checkpoint, known by shape, dtype and where its pieces lie. Its values stay on disk until `load`.

    Attributes:
        resolver: finds its shards in files that were not read yet; None where every shard has its bytes.
        key: its key path in the checkpoint's tree.
        name: what it is called, the same in every command; empty where it comes out of the raw tree.
        files_lost: files of its checkpoint that were missing, cut or bad when it was opened.
    """

    shards: Rows[Shard] | Extents
    resolver: Resolver | None = field(default=None, compare=False)
    key: KeyPath = field(default=(), compare=False)
    name: str = field(default="", compare=False)
    files_lost: tuple[RankFile, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shards, Extents):
            object.__setattr__(self, "shards", Rows(self.shards))

    @property
    def unread(self) -> bool:
        """Whether files that were not read yet may hold pieces whose bytes are not known here."""
        return self.resolver is not None

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose file of it is known to be `missing`, `cut` or `bad`, while others were not read yet."""
        return {} if self.resolver is None else self.resolver.lost(self.key)

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
            raise UsageError(self._called() or "tensor", reason)
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
            raise RefusedError(None, f"{self._called() or 'the tensor'} {text}; .load() has the codes")
        from ckptools.tensor_io import read
        from ckptools.tensor_io.read import dequantized

        box = Box.whole(self.shape)
        found = self if self.resolver is None else self.resolver.with_sources(self, self.key, box)
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
        return tensor_stats(found, self._called(), histogram, rank)

    def _record(self) -> dict[str, Any]:
        return {"name": self._called(), **tensor_data.Tensor._record(self)}

    def _summary(self) -> str:
        name = self._called()
        return f"{clip_middle(name, 60)}: " * bool(name) + tensor_data.Tensor._summary(self)

    def _called(self) -> str:
        return self.name or fqn_of(self.key)

    @contextmanager
    def _naming_files(self) -> Iterator[None]:
        """Name the tensor in errors about a hole, and the lost files that may have had the missing elements."""
        try:
            yield
        except NotWholeError as error:
            ranks = {s.rank for s in self.shards if not s.is_here} - {None}
            lost = [f for f in self.files_lost if f.rank in ranks] or self.files_lost
            which = few([f"{f.path.name} is {FATES[f.status]}" for f in lost])
            reason = error.reason + f"; {which}" * bool(lost)
            raise NotWholeError(self._called() or "tensor", reason, error.problems) from None

    def _with_box(self, box: Box) -> tensor_data.Tensor:
        if self.resolver is None or self.note:
            return self
        return self.resolver.with_sources(self, self.key, box)

    def _with_rank(self, rank: int) -> tensor_data.Tensor:
        return self if self.resolver is None else self.resolver.with_rank(self, self.key, rank)


def with_lazy_tensors(tree: Any, resolver: Resolver | None = None, files: Sequence[RankFile] = ()) -> Any:
    """The tree with tensors that load in the place of those that only say where they are.

    Containers are changed in place: a state dict keeps its class and what else is known of it. The resolver finds
    shards in files of the checkpoint that were not read yet.
    """
    return _Binding(resolver, tuple(f for f in files if not f.is_here)).bound(tree)


_Trail: TypeAlias = "tuple[_Trail, Any] | None"
"""A place in a tree: the trail of its holder, and its key there. Key paths of a deep tree would fill the memory."""


class _Binding:
    """Puts lazy tensors that load in the place of those that only say where they are."""

    def __init__(self, resolver: Resolver | None, files_lost: tuple[RankFile, ...]) -> None:
        self._resolver, self._files_lost = resolver, files_lost
        self._met: dict[int, tuple[Any, Any]] = {}

    def bound(self, tree: Any) -> Any:
        """The tree, or what stands in its place. Iterative: foreign objects may lie in each other without end."""
        stack: list[tuple[Any, _Trail, bool]] = [(tree, None, False)]
        while stack:
            value, trail, entered = stack.pop()
            if entered:
                self._met[id(value)] = value, self._with_bound_children(value, trail)
            elif isinstance(value, _HOLDERS) and id(value) not in self._met:
                self._met[id(value)] = value, value
                stack.append((value, trail, True))
                stack += [(child, at, False) for at, child in reversed(list(_children(value, trail)))]
        return self._now(tree, None)

    def _with_bound_children(self, value: Any, trail: _Trail) -> Any:
        """The holder whose children are bound; a tuple is made again where one of them is another now."""
        if isinstance(value, Opaque):
            for name in _OPAQUE_PARTS:
                setattr(value, name, self._now(getattr(value, name), trail))
            return value
        if isinstance(value, tuple):
            children = [self._now(child, (trail, n)) for n, child in enumerate(value)]
            return value if all(a is b for a, b in zip(children, value, strict=True)) else tuple(children)
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(child, _BOUND):
                value[key] = self._now(child, (trail, key))
        return value

    def _now(self, value: Any, trail: _Trail) -> Any:
        if isinstance(value, tensor_data.Tensor):
            return self._tensor(value, trail)
        return self._met[id(value)][1] if id(value) in self._met else value

    def _tensor(self, tensor: tensor_data.Tensor, trail: _Trail) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        known = {f.name: getattr(tensor, f.name) for f in fields(tensor) if f.init}
        complete = tensor.shards and tensor.kind not in UNLISTED and tensor.every_shard.is_here
        resolver, lost = (None, ()) if complete else (self._resolver, self._files_lost)
        keys: list[Any] = []
        while trail is not None:
            trail, key = trail
            keys.append(key)
        return Tensor(**known, resolver=resolver, key=tuple(reversed(keys)), files_lost=lost)


def _children(value: Any, trail: _Trail) -> Iterator[tuple[_Trail, Any]]:
    """What holds other things in a holder, with where it is; an object's parts have the object's own."""
    if isinstance(value, Opaque):
        yield from ((trail, getattr(value, name)) for name in _OPAQUE_PARTS)
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from (((trail, key), child) for key, child in items if isinstance(child, _HOLDERS))


_OPAQUE_PARTS = ("args", "state", "items", "keywords")
_HOLDERS = (dict, list, tuple, Opaque)
_BOUND = (*_HOLDERS, tensor_data.Tensor)
