"""The bytes of tensors, read once: do their checksums hold, and are they finite numbers?

Checksums are those that the container carries: a CRC-32 for each record of a torch.save archive, so also for each
item of a DCP. torch never compares them, so a flipped bit loads in silence. safetensors has none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.checkpoint import Checkpoint
from ckptools.errors import original_of
from ckptools.files import OpenFiles
from ckptools.model import Problem, Shard, Tensor, fqn_of, tensors_in

CHUNK = 4 << 20
"""Bytes held at a time; a multiple of every element's width."""


@dataclass
class Record:
    """A storage in a file, and the shards that see it.

    Attributes:
        path: the file.
        name: the container's name for it.
        offset: byte offset of its first byte.
        nbytes: how long it is.
        crc: CRC-32 that the container states; 0 when it states none.
        owners: fqn and shard of every tensor that lies in it.
    """

    path: Path
    name: str
    offset: int
    nbytes: int
    crc: int
    owners: list[tuple[str, Shard]] = field(default_factory=list)

    @property
    def floating(self) -> bool:
        """Whether it may hold NaN."""
        return any(s.source is not None and _scannable(s.source.dtype) for _, s in self.owners)


def records_of(ck: Checkpoint) -> list[Record]:
    """Every storage that a tensor of the checkpoint lies in, in file order."""
    found: dict[tuple[Path, int, int], Record] = {}
    for path, tensor in tensors_in(ck.tree):
        for shard in _shards(tensor):
            source = shard.source
            if source is None:
                continue
            start, nbytes = source.record_span
            key = (source.path, start, nbytes)
            if key not in found:
                found[key] = Record(source.path, source.record, start, nbytes, source.crc)
            found[key].owners.append((fqn_of(path), shard))
    return [found[key] for key in sorted(found, key=lambda k: (str(k[0]), k[1]))]


def _shards(tensor: Tensor) -> Iterable[Shard]:
    return () if tensor.kind == "meta" else tensor.found


@dataclass(frozen=True)
class Findings:
    """What reading one record told.

    Attributes:
        checksum: the record does not have the CRC-32 that its container states.
        values: tensors in it with NaN or infinities.
        nbytes: bytes read.
    """

    checksum: tuple[Problem, ...]
    values: tuple[Problem, ...]
    nbytes: int


def read_record(record: Record, files: OpenFiles, deep: bool, values: bool) -> Findings:
    """Read a record once, for its checksum, its values, or both.

    Raises:
        ReadError: the file cannot be read, or became shorter.
    """
    check = deep and record.crc != 0
    scan = values and record.floating
    if not check and not scan:
        return Findings((), (), 0)
    crc, odd = 0, False
    for piece in _pieces(record, files):
        crc = zlib.crc32(piece, crc) if check else 0
        odd = odd or (scan and _may_be_odd(piece, record))
    wrong = (_wrong_checksum(record, crc),) if check and crc != record.crc else ()
    return Findings(wrong, tuple(_odd_values(record, files)) if odd else (), record.nbytes)


def _pieces(record: Record, files: OpenFiles) -> Iterator[bytes]:
    with files.open(record.path) as file:
        for at in range(0, record.nbytes, CHUNK):
            yield file.read(record.offset + at, min(CHUNK, record.nbytes - at))


def _wrong_checksum(record: Record, crc: int) -> Problem:
    fqn, shard = record.owners[0]
    more = f" and {len(record.owners) - 1} more" if len(record.owners) > 1 else ""
    file = original_of(record.path).name
    text = f"{file} {record.name} {shard.box}{more}: CRC-32 is {crc:08x}, expected {record.crc:08x}"
    return Problem("CK004", "error", text, shard.rank, fqn)


EXPONENTS = {
    "float64": 0x7FF0_0000_0000_0000, "float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F, "complex64": 0x7F80_0000, "complex128": 0x7FF0_0000_0000_0000,
}  # fmt: skip
"""Bits that are all set in NaN and infinity, and in nothing else."""

NAN_CODES = {"float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF}
"""8-bit formats that have one NaN and no infinity."""

WIDTHS = {"float64": 8, "complex128": 8, "float32": 4, "complex64": 4, "float16": 2, "bfloat16": 2}


def odd_mask(data: Any, dtype: str) -> Any:
    """Which elements of raw bytes are NaN or infinite, as a flat boolean array; complex numbers count as two."""
    import numpy as np

    raw = np.frombuffer(data, f"<u{WIDTHS.get(dtype, 1)}")
    if dtype in NAN_CODES:
        return raw == NAN_CODES[dtype]
    mask = raw.dtype.type(EXPONENTS[dtype])
    return (raw & mask) == mask


def _may_be_odd(piece: bytes, record: Record) -> bool:
    """Whether something in a piece looks like NaN or infinity to one of the dtypes that see it."""
    dtypes = {s.source.dtype for _, s in record.owners if s.source is not None}
    return any(_scannable(d) and bool(odd_mask(_whole_elements(piece, d), d).any()) for d in dtypes)


def _whole_elements(piece: bytes, dtype: str) -> memoryview:
    width = WIDTHS.get(dtype, 1)
    return memoryview(piece)[: len(piece) // width * width]


def _scannable(dtype: str) -> bool:
    return dtype in EXPONENTS or dtype in NAN_CODES


def _odd_values(record: Record, files: OpenFiles) -> Iterator[Problem]:
    """Look again at each tensor alone: a storage may hold padding, and elements that no tensor sees."""
    from ckptools.arrays import read_shard

    for fqn, shard in record.owners:
        if shard.source is None or not _scannable(shard.source.dtype):
            continue
        data = read_shard(shard, files).tobytes()
        mask = odd_mask(data, shard.source.dtype)
        if mask.any():
            yield _odd_problem(fqn, shard, data, mask)


def _odd_problem(fqn: str, shard: Shard, data: bytes, mask: Any) -> Problem:
    assert shard.source is not None
    parts = 2 if shard.source.dtype.startswith("complex") else 1
    first, count = int(mask.argmax()) // parts, int(mask.reshape(-1, parts).any(axis=1).sum())
    nans = _nans(data, shard.source.dtype, mask) if parts == 1 else count
    kinds = [f"{nans} NaN"] if nans else []
    kinds += [f"{count - nans} Inf"] if count > nans else []
    place = [o + i for o, i in zip(shard.box.offsets, _index(first, shard.box.sizes), strict=True)]
    return Problem("CK201", "error", f"{', '.join(kinds)}, first at {place}", shard.rank, fqn)


def _nans(data: bytes, dtype: str, mask: Any) -> int:
    """How many of the odd elements have a fraction that is not zero, which makes them NaN and not infinity."""
    import numpy as np

    if dtype in NAN_CODES or dtype == "float8_e4m3fn":
        return int(mask.sum())
    raw = np.frombuffer(data, f"<u{WIDTHS.get(dtype, 1)}")
    sign = 1 << (8 * raw.dtype.itemsize - 1)
    fraction = raw.dtype.type(sign - 1 & ~EXPONENTS[dtype])
    return int(((raw & fraction) != 0)[mask].sum())


def _index(flat: int, sizes: tuple[int, ...]) -> list[int]:
    index: list[int] = []
    for n in reversed(sizes):
        flat, place = divmod(flat, n)
        index.insert(0, place)
    return index
