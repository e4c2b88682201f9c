"""The zip container of torch.save, written: a place for every record, and the bytes around the tensors.

Members are stored uncompressed and begin at multiples of 64 bytes, padded through the local header's extra field
(tag `FB`), as torch's own writer does; sizes and CRC-32s are in both headers, so no data descriptor is needed. In an
archive that is streamed a tensor has one behind it, as all of torch's own have: its CRC-32 is known only then.
Source: caffe2/serialize/inline_container.cc; zip64 by APPNOTE.TXT 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from ckptools.consolidate.writers.layout import CrcOf, Framing
from ckptools.files.zip_directory import CENTRAL, DESCRIPTOR, EOCD, EOCD64, EOCD64_LOCATOR, LOCAL, MAX_32
from ckptools.tensor_io.checksums import crc32

ALIGNMENT = 64
ROOT = "archive"
UTF8 = 1 << 11
SMALL = 1 << 10
"""Bytes of a pickle whose archive is remembered."""
DOS_DATE = (1 << 5) | 1
"""1980-01-01, the earliest a zip can say: the same input gives the same bytes."""


Named = tuple[str, bytes]
"""An entry that is no tensor: its name without the root folder, and its bytes."""

Storage = int | bytes
"""The size of a storage whose bytes are copied, or the bytes themselves."""


@dataclass(frozen=True, slots=True)
class Record:
    """A member of the archive: its name, where its header is, where its payload begins, and its bytes.

    `data` is None for a tensor, whose bytes are copied and whose CRC-32 is known only then; it is the tensor with the
    number `copied`. `described` is the size of the data descriptor behind the payload; 0 for none.
    """

    name: bytes
    header: int
    start: int
    size: int
    data: bytes | None
    copied: int = 0
    described: int = 0

    @property
    def flags(self) -> int:
        """General purpose flags."""
        return UTF8 | (DESCRIPTOR if self.described else 0)

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
    def of(
        cls, pickle: bytes, storages: Sequence[Storage], streamed: bool = False, beside: Sequence[Named] = ()
    ) -> Archive:
        """Plan the archive of a pickle and its storages, whose keys are 0, 1, 2 and so on, and of what is beside them.

        In one that is `streamed` no byte depends on those behind it.
        """
        # The items of a DCP are many and alike.
        if len(pickle) < SMALL and not beside:
            return _planned(pickle, tuple(storages), streamed)
        return cls._plan(pickle, storages, streamed, beside)

    @classmethod
    def _plan(cls, pickle: bytes, storages: Sequence[Storage], streamed: bool, beside: Sequence[Named] = ()) -> Archive:
        records = tuple(_place([("data.pkl", pickle), ("byteorder", b"little"), *beside], storages, streamed))
        return cls(records, records[-1].end + len(_directory(records, lambda _: 0)))

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the bytes of each storage begin that are copied."""
        return tuple(r.start for r in self.records if r.data is None)

    def framing(self, at: int, first_job: int) -> Iterator[Framing]:
        """Headers, small records and the directory around the tensors' bytes, in as few pieces as these leave.

        Args:
            at: where the archive begins in its file.
            first_job: the number of the job that copies the first tensor.
        """
        begin, before = 0, 0
        for number, record in enumerate(self.records):
            if record.data is None:
                yield Framing(at + begin, partial(self._between, before, number + 1, first_job))
                begin, before = record.end, number + 1
        yield Framing(at + begin, partial(self._between, before, len(self.records), first_job))

    def _between(self, before: int, end: int, first_job: int, crc_of: CrcOf) -> bytes:
        """What lies before the payload of the record ahead of `end`, from the payload of that ahead of `before` on."""

        def crc(record: Record) -> int:
            return crc_of(first_job + record.copied) if record.data is None else crc32(record.data)

        data = bytearray(_descriptor(self.records[before - 1], crc) if before else b"")
        for record in self.records[before:end]:
            data += _local_header(record, crc) + (record.data or b"")
        if end == len(self.records):
            data += _directory(self.records, crc)
        return bytes(data)


CrcOfRecord = Callable[[Record], int]


@lru_cache(maxsize=256)
def _planned(pickle: bytes, storages: tuple[Storage, ...], streamed: bool) -> Archive:
    return Archive._plan(pickle, storages, streamed)


def _place(small: Sequence[tuple[str, bytes]], storages: Sequence[Storage], streamed: bool) -> list[Record]:
    """Lay the records behind each other, every payload at a multiple of `ALIGNMENT`."""
    named: list[tuple[str, int, bytes | None]] = [(n, len(d), d) for n, d in small]
    for i, one in enumerate(storages):
        named.append((f"data/{i}", one, None) if isinstance(one, int) else (f"data/{i}", len(one), one))
    named.append(("version", 2, b"3\n"))
    placed: list[Record] = []
    at = copied = 0
    for name, size, data in named:
        full = f"{ROOT}/{name}".encode()
        # The extra field holds at least its own tag and length, and the zip64 sizes of a large record.
        least = at + LOCAL.size + len(full) + 4 + (20 if size >= MAX_32 else 0)
        start = -(-least // ALIGNMENT) * ALIGNMENT
        described = (24 if size >= MAX_32 else 16) if streamed and data is None else 0
        placed.append(Record(full, at, start, size, data, copied, described))
        at = start + size + described
        copied += data is None
    return placed


def _local_header(record: Record, crc_of: CrcOfRecord) -> bytes:
    big = record.size >= MAX_32
    # With a data descriptor CRC-32 and sizes are 0 here (APPNOTE.TXT 4.4.4, bit 3).
    told, crc = (0, 0) if record.described else (record.size, crc_of(record))
    size = MAX_32 if big else told
    extra = struct.pack("<HHQQ", 1, 16, told, told) if big else b""
    room = record.start - record.header - LOCAL.size - len(record.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", room) + b"Z" * room
    fixed = LOCAL.pack(
        b"PK\3\4", 45 if big else 20, record.flags, 0, 0, DOS_DATE, crc, size, size, len(record.name), len(extra)
    )
    return fixed + record.name + extra


def _descriptor(record: Record, crc_of: CrcOfRecord) -> bytes:
    """The data descriptor behind a record's payload; nothing where it has none."""
    if not record.described:
        return b""
    return struct.pack(
        "<4sLQQ" if record.described == 24 else "<4sLLL", b"PK\7\x08", crc_of(record), *[record.size] * 2
    )


def _central_header(record: Record, crc: int) -> bytes:
    wide = [v for v in (record.size, record.size, record.header) if v >= MAX_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, header = min(record.size, MAX_32), min(record.header, MAX_32)
    fixed = CENTRAL.pack(
        b"PK\1\2", 45, 45 if wide else 20, record.flags, 0, 0, DOS_DATE, crc, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, header,
    )  # fmt: skip
    return fixed + record.name + extra


def _directory(records: Sequence[Record], crc_of: CrcOfRecord) -> bytes:
    central = b"".join(_central_header(record, crc_of(record)) for record in records)
    at, count = records[-1].end, len(records)
    end64 = EOCD64.pack(b"PK\6\6", EOCD64.size - 12, 45, 45, 0, 0, count, count, len(central), at)
    locator = EOCD64_LOCATOR.pack(b"PK\6\7", 0, at + len(central), 1)
    few = min(count, 0xFFFF)
    end = EOCD.pack(b"PK\5\6", 0, 0, few, few, min(len(central), MAX_32), min(at, MAX_32), 0)
    return central + end64 + locator + end
