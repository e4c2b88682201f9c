"""`.pt`: a torch.save zip archive that `torch.load(weights_only=True, mmap=True)` accepts.

Members are stored uncompressed and begin at multiples of 64 bytes, padded through the local header's extra field
(tag `FB`), as torch's own writer does; sizes and CRC-32s are in both headers, so no data descriptor is needed.
Source: caffe2/serialize/inline_container.cc; zip64 by APPNOTE.TXT 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.consolidate.choose import Selection
from ckptools.consolidate.output import write_at
from ckptools.consolidate.plan import Job
from ckptools.consolidate.writers.emit import Emitter
from ckptools.consolidate.writers.layout import Layout, WriteOptions, identity, output_dtype
from ckptools.dtypes import ITEMSIZE
from ckptools.formats.merge import like
from ckptools.model import KeyPath, Tensor, fqn_of
from ckptools.pickles.container import CENTRAL, EOCD, EOCD64, EOCD64_LOCATOR, LOCAL, MAX_32

NAME = "pt"
WRITES = "one torch.save file that torch.load(weights_only=True, mmap=True) accepts; the same tree with full tensors"
SUFFIXES: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")
ONLY = "all"

ALIGNMENT = 64
ROOT = "archive"
UTF8 = 1 << 11
DOS_DATE = (1 << 5) | 1
"""1980-01-01, the earliest a zip can say: the same input gives the same bytes."""


@dataclass(frozen=True)
class _Member:
    """A record of the archive: its name, where its header is, where its payload begins, and its bytes.

    `data` is None for a tensor, whose bytes are copied and whose CRC-32 is known only then.
    """

    name: bytes
    header: int
    start: int
    size: int
    data: bytes | None

    @property
    def end(self) -> int:
        return self.start + self.size


def lay_out(selection: Selection, out: Path, options: WriteOptions) -> Layout:
    """Plan a `.pt` with the selection's tree; tied weights share one storage."""
    storages = _Storages(selection, options)
    emitter = Emitter(storages.key)
    pickle = emitter.dump(storages.tree)
    members = _place([("data.pkl", pickle), ("byteorder", b"little")], storages.sizes)
    tensors = [m for m in members if m.data is None]
    jobs = [
        Job(fqn, tensor, dtype, 0, member.start)
        for (fqn, tensor, dtype), member in zip(storages.stored, tensors, strict=True)
    ]
    directory = _directory_size(members)

    def finish(targets: Sequence[int], crcs: Sequence[int]) -> None:
        _write_members(targets[0], members, crcs)

    return Layout(
        files=((out, members[-1].end + directory),),
        jobs=tuple(jobs),
        finish=finish,
        checksums=True,
        needs=tuple(emitter.needs),
        tied={fqn_of(path): first for path, first in storages.tied.items() if path in selection.model_paths},
    )


class _Storages:
    """Gives every distinct tensor of a tree a storage, in tree order; tied ones share it."""

    def __init__(self, selection: Selection, options: WriteOptions) -> None:
        self.stored: list[tuple[str, Tensor, str]] = []
        self.sizes: list[int] = []
        self.tied: dict[KeyPath, str] = {}
        self._keys: dict[Any, tuple[str, str]] = {}
        self._by_object: dict[int, str] = {}
        self.tree = self._typed(selection.tree, (), selection, options)

    def _typed(self, node: Any, path: KeyPath, selection: Selection, options: WriteOptions) -> Any:
        """Copy the tree with the tensors that will be in it: output dtype, own storage."""
        if isinstance(node, Tensor):
            return self._store(node, path, output_dtype(path, node, selection, options.dtype))
        if isinstance(node, dict):
            copied = like(node)
            for key, value in node.items():
                copied[key] = self._typed(value, (*path, key), selection, options)
            return copied
        if type(node) in (list, tuple):
            return type(node)(self._typed(v, (*path, i), selection, options) for i, v in enumerate(node))
        return node

    def _store(self, tensor: Tensor, path: KeyPath, dtype: str) -> Tensor:
        written = replace(tensor, dtype=dtype)
        same = identity(tensor)
        key, first = self._keys.get((same, dtype), ("", "")) if same is not None else ("", "")
        if key:
            self.tied[path] = first
        else:
            key = str(len(self.stored))
            self._keys[same, dtype] = (key, fqn_of(path))
            self.stored.append((fqn_of(path), tensor, dtype))
            self.sizes.append(tensor.numel * ITEMSIZE[dtype])
        self._by_object[id(written)] = key
        return written

    def key(self, tensor: Tensor) -> str:
        """The storage key of a tensor of `tree`."""
        return self._by_object[id(tensor)]


def _place(small: Sequence[tuple[str, bytes]], sizes: Sequence[int]) -> list[_Member]:
    """Lay the records behind each other, every payload at a multiple of `ALIGNMENT`."""
    records: list[tuple[str, int, bytes | None]] = [(n, len(d), d) for n, d in small]
    records += [(f"data/{i}", size, None) for i, size in enumerate(sizes)]
    records.append(("version", 2, b"3\n"))
    members: list[_Member] = []
    at = 0
    for name, size, data in records:
        full = f"{ROOT}/{name}".encode()
        # The extra field holds at least its own tag and length, and the zip64 sizes of a large record.
        least = at + LOCAL.size + len(full) + 4 + (20 if size >= MAX_32 else 0)
        start = -(-least // ALIGNMENT) * ALIGNMENT
        members.append(_Member(full, at, start, size, data))
        at = start + size
    return members


def _local_header(member: _Member, crc: int) -> bytes:
    big = member.size >= MAX_32
    size = MAX_32 if big else member.size
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.size) if big else b""
    room = member.start - member.header - LOCAL.size - len(member.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", room) + b"Z" * room
    fixed = LOCAL.pack(
        b"PK\3\4", 45 if big else 20, UTF8, 0, 0, DOS_DATE, crc, size, size, len(member.name), len(extra)
    )
    return fixed + member.name + extra


def _central_header(member: _Member, crc: int) -> bytes:
    wide = [v for v in (member.size, member.size, member.header) if v >= MAX_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, header = min(member.size, MAX_32), min(member.header, MAX_32)
    fixed = CENTRAL.pack(
        b"PK\1\2", 45, 45 if wide else 20, UTF8, 0, 0, DOS_DATE, crc, size, size,
        len(member.name), len(extra), 0, 0, 0, 0, header,
    )  # fmt: skip
    return fixed + member.name + extra


def _directory(members: Sequence[_Member], crcs: Sequence[int]) -> bytes:
    central = b"".join(map(_central_header, members, crcs))
    at, count = members[-1].end, len(members)
    end64 = EOCD64.pack(b"PK\6\6", EOCD64.size - 12, 45, 45, 0, 0, count, count, len(central), at)
    locator = EOCD64_LOCATOR.pack(b"PK\6\7", 0, at + len(central), 1)
    few = min(count, 0xFFFF)
    end = EOCD.pack(b"PK\5\6", 0, 0, few, few, min(len(central), MAX_32), min(at, MAX_32), 0)
    return central + end64 + locator + end


def _directory_size(members: Sequence[_Member]) -> int:
    return len(_directory(members, [0] * len(members)))


def _write_members(target: int, members: Sequence[_Member], tensor_crcs: Sequence[int]) -> None:
    """Write headers, small records and the directory around the tensors' bytes."""
    pending = iter(tensor_crcs)
    crcs = [next(pending) if m.data is None else zlib.crc32(m.data) for m in members]
    for member, crc in zip(members, crcs, strict=True):
        write_at(target, member.header, _local_header(member, crc) + (member.data or b""))
    write_at(target, members[-1].end, _directory(members, crcs))
