"""What the `.metadata` of a DCP folder tells: which tensors and objects there are, and where each of their items lies.

DCP says chunk where others say shard. An item is a chunk of a tensor, or a pickled object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.files.compressed import has_zstd
from ckptools.files.compressed_items import is_zstd
from ckptools.model.regions import Box, Ints
from ckptools.model.tree import KeyPath
from ckptools.model.values import describe_for_error


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where an item lies: a chunk of a tensor, or a pickled object.

    Attributes:
        file: relative path, checked to stay in the folder.
        offset: byte offset of the item.
        length: bytes of the item.
        transforms: what was done to its bytes, such as `stream.zstd/1`; empty when nothing was.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """Byte offset behind the item."""
        return self.offset + self.length

    @property
    def zstd(self) -> bool:
        """Whether the item was compressed by zstd, which ckptools unpacks."""
        return is_zstd(self.transforms)

    @property
    def unreadable(self) -> str:
        """Why the item's bytes cannot be read; empty when they can."""
        if not self.transforms or (self.zstd and has_zstd()):
            return ""
        if self.zstd:
            return "compressed by zstd when it was saved; to read it: pip install 'ckptools[compressed]'"
        how = ", ".join(describe_for_error(t).strip("'") for t in self.transforms[:4])
        return f"went through {how} when it was saved, which ckptools does not undo; save it again without"


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor as `.metadata` describes it.

    Attributes:
        dtype: torch's name; None for a dtype that ckptools does not know.
        stated_dtype: what the file says.
        layout: `strided`, or a sparse layout.
        shape: global sizes.
        boxes: its chunks, in file order; equal ones once.
        requires_grad: as saved.
    """

    dtype: str | None
    stated_dtype: str
    layout: str
    shape: Ints
    boxes: tuple[Box, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Metadata:
    """One `.metadata` file.

    Attributes:
        path: the file.
        rank: whose it is, for `__3.metadata`; None for the one of all ranks.
        tensors: by fqn.
        objects: fqns of pickled values.
        order: every fqn, in the order of the file.
        stored: where items lie, by fqn and offset of the chunk; None instead of an offset for an object.
        twice: the keys of `stored` that the file gives two places.
        paths: path in the nested state by fqn; None when the state is flat.
        extra: attributes that torch does not have, such as `mcore_data`.
        names: dotted names of everything that the pickle mentions.
        writer: what wrote it, as the spelling of its classes tells.
        nbytes: size of the file.
        modified: file time, seconds since 1970.
    """

    path: Path
    rank: int | None
    tensors: Mapping[str, TensorMetadata] = field(repr=False)
    objects: tuple[str, ...] = field(repr=False)
    order: tuple[str, ...] = field(repr=False)
    stored: Mapping[tuple[str, Ints | None], StoredItem] = field(repr=False)
    twice: frozenset[tuple[str, Ints | None]] = field(repr=False)
    paths: Mapping[str, KeyPath] | None = field(repr=False)
    extra: Mapping[str, Any] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    writer: str
    nbytes: int
    modified: float
