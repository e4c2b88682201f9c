"""Values that a pickle holds and JSON does not: torch's and numpy's small types, described without either.

What a file names is data here: a class is a dotted name, never an object. None of these can be called, and
none compares or hashes by content that a stranger chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Global:
    """A module-level name that a pickle refers to, such as `torch.float32`. Never imported.

    Attributes:
        module: as written in the file, which may be anything.
        name: likewise; it may hold dots.
    """

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def dotted(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"Global({self.dotted!r})"


class Opaque:
    """An object of a class that ckptools does not rebuild: its name and what the file says of it.

    Attributes:
        name: dotted name of the class or function that the file would have called.
        args: positional arguments of the call, unpickled.
        state: what `__setstate__` would have got, or None.
        items: list items, or `(key, value)` pairs, that would have been put into the object.
        keywords: keyword arguments, for the rare protocol-4 call that has them.
    """

    __slots__ = ("args", "items", "keywords", "name", "state")

    def __init__(self, name: str, args: Any = (), keywords: Any = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.keywords = keywords

    def __repr__(self) -> str:
        return f"Opaque({self.name!r})"

    def parts(self) -> Iterator[Any]:
        """Everything the file put into the object, for walks that look for tensors and names."""
        yield self.args
        yield self.state
        yield from self.items
        yield self.keywords


class Lost(Opaque):
    """Stands where a value was that could not be read; a problem of the checkpoint says why.

    Attributes:
        name: `lost`, or `not read` where it was too large for a first look.
    """

    __slots__ = ()


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class TorchName:
    """A value that torch spells as a name: a dtype, a layout, a memory format.

    Attributes:
        name: `float32`, `strided`, `contiguous_format`: without the leading `torch.`.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Device:
    """A `torch.device`.

    Attributes:
        type: `cpu`, `cuda`, `meta` …
        index: ordinal, or None.
    """

    __slots__ = ("index", "type")

    def __init__(self, type: str, index: int | None = None) -> None:
        self.type = type
        self.index = index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device({str(self)!r})"


class NumpyArray:
    """A numpy array, described: no numpy needed until somebody wants its values.

    Attributes:
        dtype: numpy's array-protocol spelling, such as `<u4`, byte order included.
        shape: sizes per dimension.
        fortran_order: whether `data` is column-major.
        data: the raw bytes.
    """

    __slots__ = ("data", "dtype", "fortran_order", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], fortran_order: bool, data: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.fortran_order = fortran_order
        self.data = data

    def __repr__(self) -> str:
        return f"NumpyArray({self.dtype!r}, {list(self.shape)})"


class NumpyScalar:
    """A numpy scalar, described.

    Attributes:
        dtype: as in `NumpyArray`.
        data: the raw bytes of the one element.
    """

    __slots__ = ("data", "dtype")

    def __init__(self, dtype: str, data: bytes) -> None:
        self.dtype = dtype
        self.data = data

    def __repr__(self) -> str:
        return f"NumpyScalar({self.dtype!r})"


class NumpyDtype:
    """A numpy dtype as a value of its own.

    Attributes:
        dtype: array-protocol spelling with byte order.
    """

    __slots__ = ("dtype",)

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"NumpyDtype({self.dtype!r})"
