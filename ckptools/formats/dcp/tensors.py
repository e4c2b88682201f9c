"""The tensors of a DCP folder: every chunk in its place, and the faults found without reading values.

Two ranks with the same chunk write it once, or, without collectives, each for itself: those are replicas of one box,
and are compared when they are put together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import add, attrgetter, le
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import QUANTIZED
from ckptools.errors import ReadError
from ckptools.files import compressed
from ckptools.files.compressed import CompressedItem
from ckptools.formats.dcp.files import SuspectFile
from ckptools.formats.dcp.items import ItemReader, in_safetensors
from ckptools.formats.dcp.locator import FoundTensor, Locator
from ckptools.formats.dcp.metadata import DcpMetadata, StoredItem, StoredItems, TensorMetadata
from ckptools.formats.shared.checkpoint_builder import StatedFile
from ckptools.formats.shared.merge import Merge
from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.extents import ExtentFile, Extents, extent_file, take
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor, TensorKind
from ckptools.model.tree import Lost, Opaque, describe_for_error
from ckptools.option import spelled
from ckptools.pickles.classes.tensors import WHY_NOT
from ckptools.tensor_io.fetch_ahead import Part, fetched
from ckptools.text import KeyPath, first_few

# -- the tensors -------------------------------------------------------------------------------------------------------


MAX_PROBLEMS = 100
"""At most this many tensors are named, the others counted."""


@dataclass(frozen=True)
class TensorsRead:
    """The tensors of a DCP folder.

    Attributes:
        by_fqn: the tensors that can be read.
        suspects: items that are damaged, or contradict the metadata.
        all_seen: whether every uncompressed item was read.
    """

    by_fqn: Mapping[str, Any]
    problems: Sequence[Problem]
    suspects: Sequence[SuspectFile]
    all_seen: bool


def read_tensors(
    metadata: Sequence[DcpMetadata], here: Mapping[str, StatedFile], items: ItemReader, everything: bool
) -> TensorsRead:
    """Read the tensors of a DCP folder.

    Args:
        metadata: one for all ranks, or one per rank.
        here: the data files by their names in the metadata.
        items: reads those files.
        everything: read every item, however many there are.
    """
    found: dict[str, FoundTensor] = {}
    problems: list[Problem] = []
    files = {name: _holding_files(file) for name, file in here.items()}
    for one in metadata:
        for fqn, described in one.tensors.items():
            tensor = found.setdefault(fqn, FoundTensor(described, Extents(described.dtype or "")))
            first, shape = tensor.described, described.shape
            if (first.shape, first.dtype) != (shape, described.dtype):
                text = f"{described.dtype} {list(shape)}, the first rank has {first.dtype} {list(first.shape)}"
                problems.append(Problem(Code.LAYOUT_DISAGREES, text, one.rank, fqn))
            _place(tensor, fqn, described, one, files)
    _refuse_shared_places(found, _files_with_overlaps(metadata, here))
    locator = Locator(found, items)
    locator.locate(everything)
    wrong = [problem for fqn, tensor in found.items() for problem in _problems_of(fqn, tensor)]
    problems += wrong[:MAX_PROBLEMS]
    if len(wrong) > MAX_PROBLEMS:
        text = f"{len(wrong) - MAX_PROBLEMS} more tensors are lost or wrong"
        problems.append(Problem(Code.TENSOR_NOT_JOINED, text, severity="error"))
    tensors = {fqn: _tensor(fqn, tensor) for fqn, tensor in found.items()}
    return TensorsRead(tensors, problems, locator.suspects, locator.all_seen)


class _HoldingFiles(NamedTuple):
    """The `ExtentFile`s of a data file: for plain items, for compressed ones, and for those that cannot be read.

    Attributes:
        end: one past the last byte that can be read.
    """

    plain: ExtentFile
    zstd: ExtentFile
    lost: ExtentFile
    end: int


def _holding_files(file: StatedFile) -> _HoldingFiles:
    end = -1 if file.size is None or file.fault is not None else file.size
    plain, zstd = extent_file(file.path, file.rank), extent_file(file.path, file.rank, zstd=True)
    return _HoldingFiles(plain, zstd, extent_file(None, file.rank), end)


def _place(
    tensor: FoundTensor, fqn: str, described: TensorMetadata, metadata: DcpMetadata, files: Mapping[str, _HoldingFiles]
) -> None:
    """Add the chunks that one metadata describes to a tensor."""
    tensor.why_not = tensor.why_not or _why_not(described)
    stored, shards = metadata.stored, tensor.shards
    if _place_all(shards, fqn, described, stored, files):
        return
    found, twice = stored.of(fqn)
    for offsets, sizes in zip(described.offsets, described.sizes, strict=True):
        item = found.get(offsets)
        if item is None or offsets in twice:
            how = "nowhere" if item is None else "twice"
            tensor.bad = f"the metadata says {how} where its chunk {Box(offsets, sizes)} lies"
            continue
        start, length, file = stored.starts[item], stored.lengths[item], files[stored.files[item]]
        readable = described.dtype is not None and start + length <= file.end
        holder = file.plain if readable else file.lost
        if item in stored.transforms:
            why_not = stored[item].unreadable
            tensor.why_not = tensor.why_not or why_not
            holder = file.lost if why_not or not readable else file.zstd
        shards.offsets.append(offsets)
        shards.sizes.append(sizes)
        shards.files.append(holder)
        shards.starts.append(start)
        shards.lengths.append(length)
        if holder.path is not None and described.dtype != shards.dtype:  # another rank states another dtype
            shard = shards[-1]
            assert shard.item is not None and described.dtype is not None
            shards.located[len(shards) - 1] = shard._replace(item=shard.item._replace(dtype=described.dtype))


def _place_all(
    shards: Extents, fqn: str, described: TensorMetadata, stored: StoredItems, files: Mapping[str, _HoldingFiles]
) -> bool:
    """Add chunks by column, if each has one plain, readable item in the same order; return whether they were added."""
    items = stored.items_of(fqn)
    offsets = take(stored.offsets, items)
    ordered = tuple(offsets) == described.offsets and len({*offsets}) == len(offsets)
    if not ordered or stored.transforms or described.dtype is None or described.dtype != shards.dtype:
        return False
    starts, lengths = take(stored.starts, items), take(stored.lengths, items)
    of_item = list(map(files.__getitem__, take(stored.files, items)))
    if not all(map(le, map(add, starts, lengths), map(attrgetter("end"), of_item))):
        return False
    shards.offsets += described.offsets
    shards.sizes += described.sizes
    shards.files += map(attrgetter("plain"), of_item)
    shards.starts += starts
    shards.lengths += lengths
    return True


def _why_not(described: TensorMetadata) -> str:
    if described.dtype is None:
        return f"its dtype is {described.stated_dtype}, which ckptools does not know"
    if described.dtype in QUANTIZED:
        return WHY_NOT["quantized"]
    return "" if described.layout == "strided" else WHY_NOT["sparse"]


def _files_with_overlaps(metadata: Sequence[DcpMetadata], here: Mapping[str, StatedFile]) -> set[Path]:
    """Files in which an item begins before another has ended, which also holds for one safetensors blob's tensors."""
    listed: dict[str, list[tuple[StoredItems, Sequence[int]]]] = {}
    for one in metadata:
        for name, items in one.stored.by_file().items():
            listed.setdefault(name, []).append((one.stored, items))
    return {here[name].path for name, parts in listed.items() if _overlap(parts)}


def _overlap(parts: Sequence[tuple[StoredItems, Sequence[int]]]) -> bool:
    """Whether an item begins before another has ended, among the items of several metadata in one file."""
    starts = [start for stored, items in parts for start in take(stored.starts, items)]
    ends = [*map(add, starts, [n for stored, items in parts for n in take(stored.lengths, items)])]
    if all(map(le, ends, islice(starts, 1, None))):  # true for consecutive items of a file
        return False
    return any(after[0] < before[1] for before, after in pairwise(sorted(zip(starts, ends, strict=True))))


def _refuse_shared_places(found: Mapping[str, FoundTensor], files: Collection[Path]) -> None:
    """Mark tensors with an item that begins inside another: items never overlap, so one of them is wrong."""
    placed = sorted(
        (
            (shard.item.path, shard.item.offset, shard.item.offset + shard.item.length, fqn)
            for fqn, tensor in (found.items() if files else ())
            for shard in tensor.shards
            if shard.item is not None and shard.item.path in files and not in_safetensors(shard)
        ),
        key=lambda p: p[:3],
    )
    for before, after in pairwise(placed):
        if before[0] == after[0] and after[1] < before[2]:
            for fqn, other in ((before[3], after), (after[3], before)):
                found[fqn].bad = (
                    f"an item of it shares bytes with one of {describe_for_error(other[3])}, "
                    f"at {other[1]} of {other[0].name}"
                )


def _tensor(fqn: str, found: FoundTensor) -> Any:
    described = found.described
    if described.dtype is None:
        return Opaque(described.stated_dtype)
    note = found.bad or found.why_not or found.encoded
    kind: TensorKind = "chunks" if len(described.offsets) > 1 else "quantized" if found.encoded else "plain"
    if described.dtype in QUANTIZED or described.layout != "strided":
        kind = "quantized" if described.dtype in QUANTIZED else "sparse"
    shards = found.shards.in_rank_order()
    return Tensor(described.shape, described.dtype, shards, kind, requires_grad=described.requires_grad, note=note)


def _problems_of(fqn: str, tensor: FoundTensor) -> Iterator[Problem]:
    if tensor.bad:
        yield Problem(Code.TENSOR_NOT_JOINED, tensor.bad, None, fqn, "error")
        return
    shape = tensor.described.shape
    if tensor.shards.lie_in_a_row(shape):
        return
    try:
        covered = cover(shape, tensor.shards.boxes)
    except TangledLayoutError as error:
        yield Problem(Code.TENSOR_NOT_JOINED, str(error), None, fqn, "error")
        return
    if covered.outside:
        yield Problem(Code.TENSOR_OVERLAP, f"a chunk at {covered.outside[0]} outside of {list(shape)}", None, fqn)
    elif covered.overlaps:
        one, other = covered.overlaps[0]
        yield Problem(Code.TENSOR_OVERLAP, f"chunks {one} and {other} overlap", None, fqn)
    elif covered.missing:
        where = first_few(covered.gaps, 3)
        text = f"gap {where}: the metadata has no chunk for {covered.missing} of its {Box.whole(shape).numel} elements"
        yield Problem(Code.TENSOR_GAP, text, None, fqn)


# -- the pickled objects of a DCP folder: hyperparameters, schedulers, RNG states, data loaders ------------------------
# Each is a torch.save archive of one value (a custom planner may have written a bare pickle), and thousands of them are
# the same number. They are read inertly; an unreadable one becomes a `Lost` and a problem.

MAX_SEEN = 64 << 20
"""At most this many bytes of objects are read unless everything is asked for."""

MAX_UNPACKED = 256 << 20
"""At most this many bytes of unpacked objects per file; they stay in memory."""

MAX_LOST = 100
"""At most this many lost objects are named, the others counted."""


def read_objects(
    metadata: Sequence[DcpMetadata],
    here: Mapping[str, StatedFile],
    items: ItemReader,
    everything: bool,
    merge: Merge,
    paths: Mapping[str, KeyPath],
) -> tuple[dict[str, Any], list[Problem], list[SuspectFile]]:
    """Read the pickled objects of a DCP folder by fqn, with the problems of lost ones, and suspect items.

    Args:
        metadata: one for all ranks, or one per rank.
        here: the data files by their names in the metadata.
        items: reads those files.
        everything: read large ones too.
        merge: compares the values of several ranks for one object.
        paths: key path in the nested state, by fqn.
    """
    reading = _Objects(here, items, None if everything else MAX_SEEN)
    wanted = [(*_place_of_object(one, fqn), fqn, one.rank or 0) for one in metadata for fqn in one.objects]
    values: dict[str, list[tuple[int, Any]]] = {}
    reading.unpack(stored for stored, *_ in wanted)
    wanted.sort(key=lambda w: (w[0].file, w[0].offset))
    for stored, twice, fqn, rank in fetched(wanted, lambda w: reading.part(w[0])):
        values.setdefault(fqn, []).append((rank, reading.value(fqn, stored, twice)))
    # A single copy belongs to no rank in particular: merging would assign it to rank 0.
    joined = {
        fqn: merge.trees(sorted(ranked, key=lambda r: r[0]), paths.get(fqn, (fqn,)))
        if len(ranked) > 1
        else ranked[0][1]
        for fqn, ranked in values.items()
    }
    return joined, reading.problems(), reading.suspects


def _place_of_object(metadata: DcpMetadata, fqn: str) -> tuple[StoredItem, bool]:
    """The place of an object, and whether the metadata states two places."""
    found, twice = metadata.stored.of(fqn)
    return metadata.stored[found[None]] if None in found else _NOWHERE, None in twice


def _packed(stored: StoredItem) -> CompressedItem:
    return CompressedItem(stored.offset, stored.length, MAX_UNPACKED)


_NOWHERE = StoredItem("", 0, 0)


class _Objects:
    def __init__(self, here: Mapping[str, StatedFile], items: ItemReader, budget: int | None) -> None:
        self.here, self.items, self.budget = here, items, budget
        self.lost: list[Problem] = []
        self.unread = 0
        self.suspects: list[SuspectFile] = []

    def unpack(self, wanted: Iterable[StoredItem]) -> None:
        packed: dict[str, list[CompressedItem]] = {}
        for stored in wanted:
            file = self.here.get(stored.file)
            if stored.zstd and not stored.unreadable and file is not None and file.holds(stored.offset + stored.length):
                packed.setdefault(stored.file, []).append(_packed(stored))
        for name, parts in packed.items():
            compressed.unpack(self.items.open(self.here[name].path), parts, MAX_UNPACKED)

    def part(self, stored: StoredItem) -> list[Part]:
        file, end = self.here.get(stored.file), stored.offset + stored.length
        read = file is not None and file.holds(end) and (self.budget is None or self.budget > 0)
        return [(file.path, stored.offset, end)] if file is not None and read else []

    def value(self, fqn: str, stored: StoredItem, twice: bool) -> Any:
        """Return an object, or its stand-in."""
        file = self.here.get(stored.file)
        if file is None or twice:
            return self._lost(fqn, f"the metadata says {'twice' if twice else 'nowhere'} where it lies")
        if not file.holds(stored.offset + stored.length):
            return self._lost(fqn, f"lies in {stored.file}, which is {file.state}", file)
        if stored.unreadable:
            return self._lost(fqn, stored.unreadable, file)
        if self.budget is not None:
            self.budget -= stored.length
            if self.budget < 0:
                self.unread += 1
                return Lost("not read")
        try:
            if stored.zstd:
                return self.items.unpacked_value(file.path, _packed(stored))
            return self.items.value(file.path, stored.offset, stored.length)
        except ReadError as error:
            self.suspects.append(SuspectFile(fqn, file.path, stored, error))
            return self._lost(fqn, self.items.why(error), file)

    def _lost(self, fqn: str, why: str, file: StatedFile | None = None) -> Lost:
        rank, names = (None, ()) if file is None else (file.rank, (file.path.name,))
        self.lost.append(Problem(Code.VALUE_LOST, why, rank, fqn, files=names))
        return Lost("lost")

    def problems(self) -> list[Problem]:
        problems = self.lost[:MAX_LOST]
        if len(self.lost) > MAX_LOST:
            problems.append(Problem(Code.VALUE_LOST, f"{len(self.lost) - MAX_LOST} more objects are lost"))
        if self.unread:
            text = f"{self.unread} large objects were not read; {spelled('all-ranks', True)} reads them"
            problems.append(Problem(Code.VALUE_LOST, text, severity="note"))
        return problems
