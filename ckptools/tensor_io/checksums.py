"""CRC-32 checksums: of bytes, of joined bytes from those of the pieces, and of records whose container states one.

`isal` takes a CRC-32 several times as fast as `zlib` and lets other threads run meanwhile. Where it is not to be had,
`zlib` serves, and `joined` does what Python's `zlib` lacks.

A record is what its container stores in one piece: a storage of a torch.save archive, so also the tensor in an item
of a DCP; a tensor of safetensors. Only archives state a CRC-32. torch never compares it, so a flipped bit loads in
silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ckptools.files.opening import File
from ckptools.model.shard import Shard
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.fetch_ahead import Part

try:
    from isal.isal_zlib import crc32
    from isal.isal_zlib import crc32_combine as combine
except ImportError:  # no wheel for this platform

    def combine(crc1: int, crc2: int, crc2_length: int, /) -> int:
        """CRC-32 of A + B, from those of A and B and the length of B."""
        return joined(crc1, crc2, crc2_length)


POLYNOMIAL = 0xEDB88320
"""The polynomial of zip, its highest power in the lowest bit."""

ONE = 1 << 31
"""The polynomial 1, its bits in the same order."""


def joined(first: int, second: int, length: int) -> int:
    """CRC-32 of A + B, where `first` is that of A, `second` that of B, and B has `length` bytes.

    `length` zero bytes behind A multiply its CRC, a polynomial over GF(2), by x to the power of 8 * `length`.
    """
    return _product(first, _zeros(length)) ^ second if length else first


def _product(a: int, b: int) -> int:
    """Product of two polynomials, modulo that of the CRC."""
    total, bit = 0, ONE
    while bit:
        if a & bit:
            total ^= b
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return total


@lru_cache(maxsize=1024)
def _zeros(length: int) -> int:
    """The polynomial x to the power of 8 * `length`."""
    result, power = ONE, ONE >> 8
    while length:
        if length & 1:
            result = _product(result, power)
        power = _product(power, power)
        length >>= 1
    return result


# -- records ----------------------------------------------------------------------------------------------------------


CHUNK = 1 << 20
"""Bytes read at a time, a multiple of every element's width; more would not stay in the processor's cache."""


class Record(NamedTuple):
    """Consecutive bytes with one checksum.

    Attributes:
        path: the file.
        name: the container's name for it.
        offset: byte offset of its first byte.
        nbytes: how long it is.
        crc: CRC-32 that the container states; 0 when it states none.
    """

    path: Path
    name: str
    offset: int
    nbytes: int
    crc: int = 0

    @classmethod
    def of(cls, source: Source) -> Record:
        """The record that a source lies in."""
        return cls(source.path, source.record, *source.record_span, source.crc)

    @property
    def part(self) -> Part:
        """Its range in its file."""
        return self.path, self.offset, self.end

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.nbytes

    def damage(self, found: int) -> str:
        """Describe the damage, when its bytes have the CRC-32 `found`."""
        return f"record {self.name or f'at byte {self.offset}'}: CRC-32 is {found:08x}, expected {self.crc:08x}"


@dataclass
class Stored:
    """A record and the shards in it.

    Attributes:
        record: where it is.
        owners: fqn and shard of every tensor that lies in it.
    """

    record: Record
    owners: list[tuple[str, Shard]] = field(default_factory=list)


def without_records(tensor: Tensor, records: Collection[Record]) -> Tensor:
    """The tensor without the shards that lie in some records; their regions are listed, as those of a lost file are."""
    if not records:
        return tensor
    gone = [any(Record.of(source) in records for source in shard.sources) for shard in tensor.shards]
    if not any(gone):
        return tensor
    pairs = zip(tensor.shards, gone, strict=True)
    kept = tuple(s._replace(source=None, item=None, encoded=None) if lost else s for s, lost in pairs)
    return replace(tensor, shards=kept)


def stored_records(tensors: Iterable[tuple[str, Tensor]]) -> list[Stored]:
    """Every record that a shard of some tensors, given with their fqns, lies in; in file order."""
    found: dict[Record, Stored] = {}
    for fqn, tensor in tensors:
        for shard in () if tensor.kind == "meta" else tensor.found:
            for source in shard.sources:
                record = Record.of(source)
                found.setdefault(record, Stored(record)).owners.append((fqn, shard))
    return [found[key] for key in sorted(found, key=lambda r: (str(r.path), r.offset))]


def read_pieces(file: File, offset: int, nbytes: int, buffer: memoryview | None = None) -> Iterator[memoryview]:
    """Read consecutive bytes piece by piece; each is gone when the next one is read.

    Args:
        file: to read.
        offset: byte offset of the first.
        nbytes: how many.
        buffer: where they go; one is made when it is None.

    Raises:
        ReadError: the file cannot be read, or became shorter.
    """
    buffer = memoryview(bytearray(min(CHUNK, nbytes))) if buffer is None else buffer
    end = offset + nbytes
    file.expect([(offset, end)])
    while offset < end:
        wanted = buffer[: min(len(buffer), end - offset)]
        file.read_all_into(offset, wanted)
        yield wanted
        offset += len(wanted)
