"""A hollow DCP folder: the `.metadata` that torch would write, and files whose items are archives around holes.

A plan of all ranks is needed for it, which a fake process group cannot make; here it is made in one go, of torch's own
records. A tensor that all ranks hold, such as a step count, is written by one of them, in turn.
Source: torch/distributed/checkpoint/planner_helpers.py and filesystem.py, and what real ranks wrote.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptools.model.regions import chunk
from ckptools.training.simulated.hollow_rank_files import HollowRun, empty

LOCAL_HEADER, NAME_LENGTH_AT = 30, 26
"""Bytes of a zip entry before its name, and where it says how long name and extra field are. Source: APPNOTE, 4.3.7."""

BLOCK = 4096
"""Bytes; a hole that is smaller is written, as file systems have none of that size."""

Box = tuple[torch.Size, torch.Size]
"""Offsets and sizes of a shard in its tensor."""


@dataclass(frozen=True)
class HollowItem:
    """An item as it lies in a file: what is before its values, or all of it, how many bytes they have, and the rest."""

    head: bytes
    hole: int = 0
    tail: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self.head) + self.hole + len(self.tail)


class HollowDcp:
    """The plan of all ranks."""

    def __init__(self, run: HollowRun) -> None:
        self._run = run
        moments = run.moments(lambda shape: empty(shape, "meta"))
        model = {name: empty(shape, "meta") for name, shape in run.shapes.items()}
        optim = {"state": moments, "param_groups": run.param_groups()}
        self._flat, self._paths = flatten_state_dict({"model": model, "optim": optim, "step": 0, "run": run.facts()})

    @cached_property
    def _alone(self) -> dict[str, HollowItem]:
        """The items that one rank writes alone, by key: objects, and tensors without dimensions."""
        alone = {key: v for key, v in self._flat.items() if not isinstance(v, Tensor) or not v.ndim}
        return {key: HollowItem(_archive(value)) for key, value in alone.items()}

    def _written(self, rank: int) -> Iterator[tuple[str, Box | None, HollowItem]]:
        """The items that a rank writes, in the order of its file, with their keys as `.metadata` has them."""
        for key, item in islice(self._alone.items(), rank, None, self._run.world_size):
            yield key, (torch.Size(), torch.Size()) if isinstance(self._flat[key], Tensor) else None, item
        for key, value in self._flat.items():
            if key not in self._alone:
                first, rows = chunk(value.shape[0], self._run.world_size, rank)
                offsets, sizes = (first, *[0] * (value.ndim - 1)), (rows, *value.shape[1:])
                yield key, (torch.Size(offsets), torch.Size(sizes)), _hollow_item(sizes)

    def metadata(self) -> Metadata:
        """The content of `.metadata` for all ranks."""
        known: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [])
            if isinstance(value, Tensor)
            else BytesStorageMetadata()
            for key, value in self._flat.items()
        }
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for rank in range(self._run.world_size):
            offset, file = 0, _file_name(rank)
            for key, box, item in self._written(rank):
                name = "".join([*key])  # each rank sends the names as texts of its own, its file's as one
                index = MetadataIndex(name)
                if box is not None:
                    chunks = known[key].chunks
                    index = MetadataIndex(name, box[0], len(chunks))
                    chunks.append(ChunkStorageMetadata(*box))
                stored[index] = _StorageInfo(file, offset, item.nbytes)
                offset += item.nbytes
        metadata = Metadata(known, self._paths, stored, StorageMeta())
        if (version := getattr(filesystem, "CURRENT_DCP_VERSION", None)) is not None:
            metadata.version = version
        return metadata

    def write_metadata(self, folder: Path) -> None:
        """Write `.metadata`."""
        (folder / ".metadata").write_bytes(pickle.dumps(self.metadata()))

    def write_rank(self, rank: int, folder: Path) -> None:
        """Write the file of a rank."""
        with (folder / _file_name(rank)).open("wb") as file:
            for _, _, item in self._written(rank):
                file.write(item.head)
                if item.hole:
                    file.seek(item.hole, os.SEEK_CUR)
                    file.write(item.tail)


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


@cache
def _hollow_item(shape: tuple[int, ...]) -> HollowItem:
    """An item as torch saves a tensor of a shape, around a hole where its values would be."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # as torch calls what it saves into an open file
        with torch.serialization.skip_data():
            torch.save(empty(shape), path)
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            (values,) = (info for info in archive.infolist() if info.filename == "archive/data/0")
            file.seek(values.header_offset + NAME_LENGTH_AT)
            name, extra = struct.unpack("<HH", file.read(4))
            file.seek(0)
            head = file.read(values.header_offset + LOCAL_HEADER + name + extra)
            file.seek(values.file_size, os.SEEK_CUR)
            tail = file.read()
    if values.file_size < BLOCK:
        return HollowItem(head + bytes(values.file_size) + tail)
    return HollowItem(head, values.file_size, tail)


def _archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
