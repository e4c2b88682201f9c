"""The methods that make an array of a tensor in a file for numpy, torch and loops; its values are read when asked for.

Each makes one copy, from the file. torch takes tensors by DLPack, which has dtypes that numpy lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ckptools.dtypes import ITEMSIZE, short
from ckptools.model.problems import as_html, line_of
from ckptools.model.regions import Ints
from ckptools.text import shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

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
