"""`.pt`: a torch.save zip archive that plain `torch.load(path)` reads, with `mmap=True` too."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ckptools.consolidate.provenance import record_of
from ckptools.consolidate.writers.layout import (
    CrcOf,
    Framing,
    Job,
    OutputContents,
    OutputLayout,
    ReadBack,
    ReadTensor,
    WriteOptions,
    identity,
    output_dtype,
    quoted,
)
from ckptools.consolidate.writers.pickle_emitter import LEFT_OUT, BytesTensor, Emitter, Loadable
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import RefusedError
from ckptools.files.zip_archive import CENTRAL, DESCRIPTOR, EOCD, EOCD64, EOCD64_LOCATOR, LOCAL, MAX_32
from ckptools.model.provenance import FILE_NAME, Provenance
from ckptools.model.tensor import Tensor
from ckptools.model.tree import empty_like
from ckptools.tensor_io.checksums import crc32
from ckptools.text import KeyPath, fqn_of

# -- writer of torch.save's zip container: a place for every zip entry, and the bytes around the tensors ---------------
# Members are stored uncompressed and begin at multiples of 64 bytes, padded through the local header's extra field (tag
# `FB`), as torch's own writer does; sizes and CRC-32s are in both headers, so no data descriptor is needed. In a
# streamed archive a data descriptor follows each tensor, as in torch's own archives: only then is its CRC-32 known.
# Source: caffe2/serialize/inline_container.cc; zip64 by APPNOTE.TXT 4.5.3.


ALIGNMENT = 64
ROOT = "archive"
UTF8 = 1 << 11
SMALL = 1 << 10
"""Archives of pickles up to this many bytes are cached."""
DOS_DATE = (1 << 5) | 1
"""1980-01-01, the earliest date in a zip: the same input gives the same bytes."""


Named = tuple[str, bytes]
"""An entry without a tensor: its name without the root folder, and its bytes."""

Storage = int | bytes
"""The size of a storage whose bytes are copied, or the bytes themselves."""


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A zip entry: its name, the offsets of its header and payload, and its bytes.

    `data` is None for a tensor: its bytes are copied, and its CRC-32 is known only after that. `copied` is its number
    among the tensors. `described` is the size of the data descriptor after the payload; 0 without a descriptor.
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
    """A planned archive: its entries in order, with offsets from its own first byte, and its size in bytes."""

    records: tuple[ArchiveEntry, ...]
    nbytes: int

    @staticmethod
    def of(pickle: bytes, storages: Sequence[Storage], streamed: bool = False, beside: Sequence[Named] = ()) -> Archive:
        """Plan the archive of a pickle, its storages with the keys 0, 1, 2 and so on, and the entries `beside` them.

        If it is `streamed`, no byte depends on later ones.
        """
        # A DCP has many items with equal archives.
        plan = _planned if len(pickle) < SMALL and not beside else _planned.__wrapped__
        return plan(pickle, tuple(storages), streamed, tuple(beside))

    @property
    def starts(self) -> tuple[int, ...]:
        """Offsets of the storages whose bytes are copied."""
        return tuple(r.start for r in self.records if r.data is None)

    def framing(self, at: int, first_job: int) -> Iterator[Framing]:
        """Headers, small entries and the directory around the tensors' bytes, in as few pieces as possible.

        The archive begins at byte `at` of its file; job number `first_job` copies its first tensor.
        """
        begin, before = 0, 0
        for number, record in enumerate(self.records):
            if record.data is None:
                yield Framing(at + begin, partial(self._between, before, number + 1, first_job))
                begin, before = record.end, number + 1
        yield Framing(at + begin, partial(self._between, before, len(self.records), first_job))

    def _between(self, before: int, end: int, first_job: int, crc_of: CrcOf) -> bytes:
        """The bytes between the payload of entry `before - 1` and that of entry `end - 1`."""

        def crc(record: ArchiveEntry) -> int:
            return crc_of(first_job + record.copied) if record.data is None else crc32(record.data)

        data = bytearray(_descriptor(self.records[before - 1], crc) if before else b"")
        for record in self.records[before:end]:
            data += _local_header(record, crc) + (record.data or b"")
        if end == len(self.records):
            data += _directory(self.records, crc)
        return bytes(data)


CrcOfRecord = Callable[[ArchiveEntry], int]


@lru_cache(maxsize=256)
def _planned(pickle: bytes, storages: tuple[Storage, ...], streamed: bool, beside: tuple[Named, ...]) -> Archive:
    records = tuple(_place([("data.pkl", pickle), ("byteorder", b"little"), *beside], storages, streamed))
    return Archive(records, records[-1].end + len(_directory(records, lambda _: 0)))


def _place(small: Sequence[Named], storages: Sequence[Storage], streamed: bool) -> list[ArchiveEntry]:
    """Place the entries one after the other, every payload at a multiple of `ALIGNMENT`."""
    named: list[tuple[str, int, bytes | None]] = [(n, len(d), d) for n, d in small]
    for i, one in enumerate(storages):
        named.append((f"data/{i}", one, None) if isinstance(one, int) else (f"data/{i}", len(one), one))
    named.append(("version", 2, b"3\n"))
    placed: list[ArchiveEntry] = []
    at = copied = 0
    for name, size, data in named:
        full = f"{ROOT}/{name}".encode()
        # The extra field has at least its own tag and length, and the zip64 sizes of a large entry.
        least = at + LOCAL.size + len(full) + 4 + (20 if size >= MAX_32 else 0)
        start = -(-least // ALIGNMENT) * ALIGNMENT
        described = (24 if size >= MAX_32 else 16) if streamed and data is None else 0
        placed.append(ArchiveEntry(full, at, start, size, data, copied, described))
        at = start + size + described
        copied += data is None
    return placed


def _local_header(record: ArchiveEntry, crc_of: CrcOfRecord) -> bytes:
    big = record.size >= MAX_32
    # With a data descriptor CRC-32 and sizes are 0 here (APPNOTE.TXT 4.4.4, bit 3).
    stated, crc = (0, 0) if record.described else (record.size, crc_of(record))
    size = MAX_32 if big else stated
    extra = struct.pack("<HHQQ", 1, 16, stated, stated) if big else b""
    room = record.start - record.header - LOCAL.size - len(record.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", room) + b"Z" * room
    fixed = LOCAL.pack(
        b"PK\3\4", 45 if big else 20, record.flags, 0, 0, DOS_DATE, crc, size, size, len(record.name), len(extra)
    )
    return fixed + record.name + extra


def _descriptor(record: ArchiveEntry, crc_of: CrcOfRecord) -> bytes:
    """The data descriptor after an entry's payload; empty if it has none."""
    if not record.described:
        return b""
    form = "<4sLQQ" if record.described == 24 else "<4sLLL"
    return struct.pack(form, b"PK\7\x08", crc_of(record), record.size, record.size)


def _central_header(record: ArchiveEntry, crc: int) -> bytes:
    wide = [v for v in (record.size, record.size, record.header) if v >= MAX_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, header = min(record.size, MAX_32), min(record.header, MAX_32)
    fixed = CENTRAL.pack(
        b"PK\1\2", 45, 45 if wide else 20, record.flags, 0, 0, DOS_DATE, crc, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, header,
    )  # fmt: skip
    return fixed + record.name + extra


def _directory(records: Sequence[ArchiveEntry], crc_of: CrcOfRecord) -> bytes:
    central = b"".join(_central_header(record, crc_of(record)) for record in records)
    at, count = records[-1].end, len(records)
    end64 = EOCD64.pack(b"PK\6\6", EOCD64.size - 12, 45, 45, 0, 0, count, count, len(central), at)
    locator = EOCD64_LOCATOR.pack(b"PK\6\7", 0, at + len(central), 1)
    few = min(count, 0xFFFF)
    end = EOCD.pack(b"PK\5\6", 0, 0, few, few, min(len(central), MAX_32), min(at, MAX_32), 0)
    return central + end64 + locator + end


# -- the `.pt` ---------------------------------------------------------------------------------------------------------


def lay_out(selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    """Plan a `.pt` with the selection's tree; tied weights share one storage."""
    loadable = Loadable()
    tree = selection.tree if options.keep_types else loadable.value(selection.tree)
    if tree is LEFT_OUT:
        raise RefusedError(out, f"would hold nothing but {loadable.left_out[()]}")
    packed = Packed(tree, (), selection, options, record_of(selection, loadable.left_out))
    return OutputLayout(
        files=((out, packed.archive.nbytes),),
        jobs=packed.jobs(0, 0),
        framing=lambda _: packed.archive.framing(0, 0),
        read_back=packed.read_back,
        checksums=True,
        needs=packed.needs,
        notes=(loadable.note(),) if loadable.note() else (),
        left_out=loadable.left_out,
        tied={fqn_of(path): first for path, first in packed.tied.items() if path in selection.model_paths},
        load=f"import torch; state = torch.load({quoted(out)}{', weights_only=False' if packed.needs else ''})",
    )


class Packed:
    """The planned archive that torch.save would write for the node at `path` of a selection's tree.

    Every distinct tensor gets a storage, in tree order; tied ones share it. The `record` of the source becomes an entry
    of its own, which torch.load ignores.

    Attributes:
        tree: the node with the tensors of the output.
        stored: fqn, tensor and dtype of every storage that is copied, in order.
        tied: key paths of tensors that share the storage of an earlier one, with its fqn.
        needs: names in the pickle that `torch.load(weights_only=True)` does not accept.
        made_of: the source's tensor and the output dtype of each tensor of the tree, by its key path.
    """

    def __init__(
        self,
        tree: Any,
        path: KeyPath,
        selection: OutputContents,
        options: WriteOptions,
        record: Provenance | None = None,
    ) -> None:
        self.stored: list[tuple[str, Tensor, str]] = []
        self.tied: dict[KeyPath, str] = {}
        self.made_of: dict[KeyPath, tuple[Tensor, str]] = {}
        self._storages: list[Storage] = []
        self._known: dict[Any, tuple[str, str]] = {}
        self._keys: dict[int, str] = {}
        self.tree = self._typed(tree, path, selection, options.dtype)
        emitter = Emitter(lambda tensor: self._keys[id(tensor)])
        pickle = emitter.dump(self.tree)
        beside = ((FILE_NAME, record.to_json().encode("ascii")),) if record else ()
        self.archive = Archive.of(pickle, self._storages, options.streamed, beside)
        self.needs = tuple(emitter.needs)
        del self._storages, self._known, self._keys  # a DCP may have a million archives

    def _typed(self, node: Any, path: KeyPath, selection: OutputContents, dtype: str | None) -> Any:
        """Copy the tree with the tensors of the output: output dtype, own storage."""
        if isinstance(node, Tensor):
            return self._store(node, path, output_dtype(path, node, selection, dtype))
        if isinstance(node, BytesTensor):
            self._keys[id(node)] = self._new(node.data)
        if isinstance(node, dict):
            copied = empty_like(node)
            for key, value in node.items():
                copied[key] = self._typed(value, (*path, key), selection, dtype)
            return copied
        if type(node) in (list, tuple):
            return type(node)(self._typed(value, (*path, i), selection, dtype) for i, value in enumerate(node))
        return node

    def _store(self, tensor: Tensor, path: KeyPath, dtype: str) -> Tensor:
        written = replace(tensor, dtype=dtype)
        same = identity(tensor)
        key, first = self._known.get((same, dtype), ("", "")) if same is not None else ("", "")
        if key:
            self.tied[path] = first
        else:
            key = self._new(tensor.numel * ITEMSIZE[dtype])
            self._known[same, dtype] = (key, fqn_of(path))
            self.stored.append((fqn_of(path), tensor, dtype))
        self._keys[id(written)] = key
        self.made_of[path] = (tensor, dtype)
        return written

    def _new(self, storage: Storage) -> str:
        self._storages.append(storage)
        return str(len(self._storages) - 1)

    def jobs(self, file: int, at: int) -> tuple[Job, ...]:
        """The jobs for the tensors if the archive begins at byte `at` of an output file."""
        pairs = zip(self.stored, self.archive.starts, strict=True)
        return tuple(Job(fqn, tensor, dtype, file, at + start) for (fqn, tensor, dtype), start in pairs)

    @contextmanager
    def read_back(self, paths: Sequence[Path]) -> Iterator[ReadBack]:
        """Open the archive with plain `torch.load`; if it refuses, with harmless names allowed."""
        import torch

        from ckptools.torch_engine.offline import load_plain, load_shard

        loaded = load_shard(paths[0]) if self.needs else load_plain(paths[0])
        tensors = []
        for path, value in _side_by_side(self.tree, loaded, ()):
            if isinstance(value, torch.storage.TypedStorage):
                value = torch.empty(0, dtype=value.dtype).set_(value)
            tensors.append(ReadTensor(fqn_of(path), *self.made_of[path], partial(lambda loaded: loaded, value)))
        yield ReadBack(f"torch {torch.__version__}", tensors)


def _side_by_side(tree: Any, loaded: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every tensor's key path, with the value loaded there."""
    if isinstance(tree, Tensor):
        yield path, loaded
    elif isinstance(tree, dict):
        for (key, node), value in zip(tree.items(), loaded.values(), strict=True):
            yield from _side_by_side(node, value, (*path, key))
    elif type(tree) in (list, tuple):
        for number, (node, value) in enumerate(zip(tree, loaded, strict=True)):
            yield from _side_by_side(node, value, (*path, number))
