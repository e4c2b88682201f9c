"""The zip container of torch.save, written: a place for every record, and the bytes around the tensors.

Members are stored uncompressed and begin at multiples of 64 bytes, padded through the local header's extra field
(tag `FB`), as torch's own writer does; sizes and CRC-32s are in both headers, so no data descriptor is needed.
Source: caffe2/serialize/inline_container.cc; zip64 by APPNOTE.TXT 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckptools.files.partial_files import write_at
from ckptools.files.zip_archive import CENTRAL, EOCD, EOCD64, EOCD64_LOCATOR, LOCAL, MAX_32
from ckptools.tensor_io.checksums import crc32

ALIGNMENT = 64
ROOT = "archive"
UTF8 = 1 << 11
SMALL = 1 << 10
"""Bytes of a pickle whose archive is remembered."""
DOS_DATE = (1 << 5) | 1
"""1980-01-01, the earliest a zip can say: the same input gives the same bytes."""


Storage = int | bytes
"""The size of a storage whose bytes are copied, or the bytes themselves."""


@dataclass(frozen=True, slots=True)
class Record:
    """A member of the archive: its name, where its header is, where its payload begins, and its bytes.

    `data` is None for a tensor, whose bytes are copied and whose CRC-32 is known only then.
    """

    name: bytes
    header: int
    start: int
    size: int
    data: bytes | None

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Archive:
    """A planned archive; offsets count from its own first byte.

    Attributes:
        records: in the order in which they lie.
        nbytes: bytes of it all.
    """

    records: tuple[Record, ...]
    nbytes: int

    @classmethod
    def of(cls, pickle: bytes, storages: Sequence[Storage]) -> Archive:
        """Plan the archive of a pickle and its storages, whose keys are 0, 1, 2 and so on."""
        # The items of a DCP are many and alike.
        return _planned(pickle, tuple(storages)) if len(pickle) < SMALL else cls._plan(pickle, storages)

    @classmethod
    def _plan(cls, pickle: bytes, storages: Sequence[Storage]) -> Archive:
        records = tuple(_place([("data.pkl", pickle), ("byteorder", b"little")], storages))
        return cls(records, records[-1].end + len(_directory(records, [0] * len(records))))

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the bytes of each storage begin that are copied."""
        return tuple(r.start for r in self.records if r.data is None)

    def write(self, target: int, at: int, storage_crcs: Sequence[int]) -> None:
        """Write headers, small records and the directory around the tensors' bytes, into a file at byte `at`."""
        pending = iter(storage_crcs)
        crcs = [next(pending) if r.data is None else crc32(r.data) for r in self.records]
        for start, data in _joined(self.records, crcs):
            write_at(target, at + start, memoryview(data))


@lru_cache(maxsize=256)
def _planned(pickle: bytes, storages: tuple[Storage, ...]) -> Archive:
    return Archive._plan(pickle, storages)


def _joined(records: Sequence[Record], crcs: Sequence[int]) -> list[tuple[int, bytearray]]:
    """Everything but the storages, in as few pieces as they leave."""
    pieces = [(0, bytearray())]
    for record, crc in zip(records, crcs, strict=True):
        pieces[-1][1].extend(_local_header(record, crc) + (record.data or b""))
        if record.data is None:
            pieces.append((record.end, bytearray()))
    pieces[-1][1].extend(_directory(records, crcs))
    return pieces


def _place(small: Sequence[tuple[str, bytes]], storages: Sequence[Storage]) -> list[Record]:
    """Lay the records behind each other, every payload at a multiple of `ALIGNMENT`."""
    named: list[tuple[str, int, bytes | None]] = [(n, len(d), d) for n, d in small]
    for i, one in enumerate(storages):
        named.append((f"data/{i}", one, None) if isinstance(one, int) else (f"data/{i}", len(one), one))
    named.append(("version", 2, b"3\n"))
    placed: list[Record] = []
    at = 0
    for name, size, data in named:
        full = f"{ROOT}/{name}".encode()
        # The extra field holds at least its own tag and length, and the zip64 sizes of a large record.
        least = at + LOCAL.size + len(full) + 4 + (20 if size >= MAX_32 else 0)
        start = -(-least // ALIGNMENT) * ALIGNMENT
        placed.append(Record(full, at, start, size, data))
        at = start + size
    return placed


def _local_header(record: Record, crc: int) -> bytes:
    big = record.size >= MAX_32
    size = MAX_32 if big else record.size
    extra = struct.pack("<HHQQ", 1, 16, record.size, record.size) if big else b""
    room = record.start - record.header - LOCAL.size - len(record.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", room) + b"Z" * room
    fixed = LOCAL.pack(
        b"PK\3\4", 45 if big else 20, UTF8, 0, 0, DOS_DATE, crc, size, size, len(record.name), len(extra)
    )
    return fixed + record.name + extra


def _central_header(record: Record, crc: int) -> bytes:
    wide = [v for v in (record.size, record.size, record.header) if v >= MAX_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, header = min(record.size, MAX_32), min(record.header, MAX_32)
    fixed = CENTRAL.pack(
        b"PK\1\2", 45, 45 if wide else 20, UTF8, 0, 0, DOS_DATE, crc, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, header,
    )  # fmt: skip
    return fixed + record.name + extra


def _directory(records: Sequence[Record], crcs: Sequence[int]) -> bytes:
    central = b"".join(map(_central_header, records, crcs))
    at, count = records[-1].end, len(records)
    end64 = EOCD64.pack(b"PK\6\6", EOCD64.size - 12, 45, 45, 0, 0, count, count, len(central), at)
    locator = EOCD64_LOCATOR.pack(b"PK\6\7", 0, at + len(central), 1)
    few = min(count, 0xFFFF)
    end = EOCD.pack(b"PK\5\6", 0, 0, few, few, min(len(central), MAX_32), min(at, MAX_32), 0)
    return central + end64 + locator + end
