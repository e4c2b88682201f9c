"""The tensors of a DCP folder: every chunk in its place, and what of it can be told before a value is read.

Two ranks that hold the same chunk write it once, or, without collectives, each for itself: those are replicas of one
box, and are compared when they are put together. Files of one length from another save cannot be told by their names
or sizes; an item that does not begin where the metadata says is noticed at once, one that holds another dtype or shape
when it is located.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptools.dtypes import ITEMSIZE, QUANTIZED
from ckptools.errors import ReadError
from ckptools.files.compressed_items import CompressedItem
from ckptools.formats.dcp.files import DataFile
from ckptools.formats.dcp.items import MAGIC, ItemReader, in_safetensors
from ckptools.formats.dcp.metadata import Metadata, StoredItem, TensorMetadata
from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Item, Shard, Tensor, TensorKind, in_rank_order
from ckptools.model.values import Opaque, describe_for_error
from ckptools.pickles.tensors import WHY_NOT
from ckptools.tensor_io.dcp_items import compressed_item, ends_of
from ckptools.tensor_io.fetch_ahead import Part, count_requests, fetched, fetched_runs
from ckptools.text import few, first_few

MAX_PROBLEMS = 100
"""Tensors that are named one by one before they are counted."""


MAX_LOOKED_AT = 1000
"""Items of which the first bytes are looked at where not all ranks are asked for."""

MAX_REQUESTS = 64
"""Requests to a store that this may take."""

MAX_SECONDS = 0.3
"""Wall time that this may take."""

Place = tuple[Path, int]
"""A file, and the byte offset of an item in it."""


@dataclass
class _Found:
    """What is known of one tensor so far.

    Attributes:
        described: by the first metadata that has it.
        shards: its chunks, with their items.
        bad: what is wrong with it; nothing then puts it together.
        why_not: why ckptools does not put it together although nothing is wrong.
    """

    described: TensorMetadata
    shards: list[Shard] = field(default_factory=list)
    bad: str = ""
    why_not: str = ""


def read_tensors(
    metadata: Sequence[Metadata], here: Mapping[str, DataFile], items: ItemReader, locate: bool
) -> tuple[dict[str, Any], list[Problem]]:
    """Read the tensors of a DCP folder by fqn, and what is wrong with them.

    Args:
        metadata: one for all ranks, or one of each.
        here: the data files by the name that the metadata gives them.
        items: reads those files.
        locate: look into every item; otherwise only where the metadata does not tell where the values begin, or where
            none begins.
    """
    found: dict[str, _Found] = {}
    problems: list[Problem] = []
    for one in metadata:
        for fqn, described in one.tensors.items():
            tensor = found.setdefault(fqn, _Found(described))
            problems += _disagreement(fqn, tensor.described, described, one)
            _place(tensor, fqn, described, one, here)
    _refuse_shared_places(found)
    _locate(found, items, locate)
    problems += _problems(found)
    return {fqn: _tensor(fqn, tensor) for fqn, tensor in found.items()}, problems


def _disagreement(fqn: str, first: TensorMetadata, other: TensorMetadata, metadata: Metadata) -> Iterator[Problem]:
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        text = f"{other.dtype} {list(other.shape)}, the first rank has {first.dtype} {list(first.shape)}"
        yield Problem(Code.LAYOUT_DISAGREES, text, metadata.rank, fqn)


def _place(
    tensor: _Found, fqn: str, described: TensorMetadata, metadata: Metadata, here: Mapping[str, DataFile]
) -> None:
    """Add the chunks that one metadata describes."""
    tensor.why_not = tensor.why_not or _why_not(described)
    for box in described.boxes:
        key = fqn, box.offsets
        stored = metadata.stored.get(key)
        if stored is None or key in metadata.twice:
            tensor.bad = f"the metadata says {'twice' if stored else 'nowhere'} where its chunk {box} lies"
            continue
        file = here[stored.file]
        tensor.why_not = tensor.why_not or stored.unreadable
        tensor.bad = tensor.bad or _too_short(described, box, stored)
        tensor.shards.append(Shard(box, file.rank, None, _item(described, box, stored, file)))


def _item(described: TensorMetadata, box: Box, stored: StoredItem, file: DataFile) -> Item | None:
    """What to read for a chunk; None when that cannot be."""
    if described.dtype is None or stored.unreadable or not file.holds(stored.offset + stored.length):
        return None
    return Item(file.path, stored.offset, stored.length, described.dtype, box.sizes, stored.zstd)


def _why_not(described: TensorMetadata) -> str:
    if described.dtype is None:
        return f"its dtype is {described.stated_dtype}, which ckptools does not know"
    if described.dtype in QUANTIZED:
        return WHY_NOT["quantized"]
    return "" if described.layout == "strided" else WHY_NOT["sparse"]


def _too_short(described: TensorMetadata, box: Box, stored: StoredItem) -> str:
    nbytes = box.numel * ITEMSIZE.get(described.dtype or "", 0)
    if stored.transforms or stored.length >= nbytes:
        return ""
    return f"its chunk {box} has {nbytes} bytes, its item {stored.length}"


def _refuse_shared_places(found: Mapping[str, _Found]) -> None:
    """Mark tensors of which an item begins inside of another: each is written for itself, so one of them is wrong."""
    placed = sorted(
        (
            (shard.item.path, shard.item.offset, shard.item.offset + shard.item.length, fqn)
            for fqn, tensor in found.items()
            for shard in tensor.shards
            if shard.item is not None and not in_safetensors(shard)
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


def _out_of_place(found: Mapping[str, _Found], items: ItemReader) -> set[Place]:
    """Places where no item begins, of as many as can be looked at in a moment: the file is not the one that was saved.

    Of more than that, some all over the files.
    """
    listed = {
        (shard.item.path, shard.item.offset): shard.item
        for tensor in found.values()
        for shard in tensor.shards
        if shard.item is not None and not tensor.why_not and not in_safetensors(shard)
    }
    places = _far_apart([*sorted(listed)[:: len(listed) // MAX_LOOKED_AT + 1]])
    places = next(fetched_runs(places, _start_of))
    started, wrong = time.perf_counter(), set()
    for place in places:
        if time.perf_counter() - started > MAX_SECONDS:
            break
        try:
            begins = items.begins(listed[place])
        except ReadError:  # it says what is wrong when it is located
            begins = False
        if not begins:
            wrong.add(place)
    return wrong


def _start_of(place: Place) -> list[Part]:
    """The bytes by which the item at a place is known."""
    path, offset = place
    return [(path, offset, offset + MAGIC)]


def _far_apart(places: list[Place]) -> list[Place]:
    """As many of some places in files, all over them, as a store is asked for at once."""
    count = count_requests(part for place in places for part in _start_of(place))
    return places[:: (count - 1) // MAX_REQUESTS + 1] if count else places


def _locate(found: Mapping[str, _Found], items: ItemReader, everything: bool) -> None:
    """Give shards their sources, file by file: of all, or of those that must be read to know whether they are there."""
    suspects = set() if everything else _out_of_place(found, items)
    wanted = [
        (shard.item.path, shard.item.offset, fqn, i)
        for fqn, tensor in found.items()
        for i, shard in enumerate(tensor.shards)
        if shard.item is not None
        and not tensor.why_not
        and (everything or in_safetensors(shard) or (shard.item.path, shard.item.offset) in suspects)
    ]
    unpacked: set[Path] = set()
    for path, _, fqn, i in fetched(sorted(wanted), lambda one: _read_to_locate(found[one[2]].shards[one[3]])):
        tensor = found[fqn]
        try:
            if path not in unpacked:
                unpacked.add(path)
                parts = _packed_in(path, found, wanted)
                items.unpack(path, parts, sum(part.limit for part in parts))
            tensor.shards[i] = items.locate(fqn, tensor.shards[i])
        except ReadError as error:
            tensor.bad = tensor.bad or items.why(error)


def _read_to_locate(shard: Shard) -> list[Part]:
    """What locating a shard reads; those in safetensors share a header."""
    return [] if shard.item is None or in_safetensors(shard) else ends_of(shard.item)


def _packed_in(
    path: Path, found: Mapping[str, _Found], wanted: Sequence[tuple[Path, int, str, int]]
) -> list[CompressedItem]:
    """The compressed items of one file."""
    here = (found[fqn].shards[i].item for where, _, fqn, i in wanted if where == path)
    return [compressed_item(item) for item in here if item is not None and item.zstd]


def _tensor(fqn: str, found: _Found) -> Any:
    described = found.described
    if described.dtype is None:
        return Opaque(described.stated_dtype)
    note = found.bad or found.why_not
    kind: TensorKind = "chunks" if len(described.boxes) > 1 else "plain"
    if described.dtype in QUANTIZED or described.layout != "strided":
        kind = "quantized" if described.dtype in QUANTIZED else "sparse"
    shards, grad = in_rank_order(found.shards), described.requires_grad
    return Tensor(described.shape, described.dtype, shards, kind, requires_grad=grad, note=note)


def _problems(found: Mapping[str, _Found]) -> Iterator[Problem]:
    """What is wrong with single tensors, and one warning for each reason why some cannot be put together."""
    wrong = [p for fqn, tensor in found.items() for p in _problems_of(fqn, tensor)]
    yield from wrong[:MAX_PROBLEMS]
    if len(wrong) > MAX_PROBLEMS:
        yield Problem(Code.TENSOR_NOT_JOINED, f"{len(wrong) - MAX_PROBLEMS} more tensors are lost or wrong")
    reasons: dict[str, list[str]] = {}
    for fqn, tensor in found.items():
        if tensor.why_not:
            reasons.setdefault(tensor.why_not, []).append(fqn)
    for why, fqns in reasons.items():
        yield Problem(Code.TENSOR_NOT_JOINED, f"{few(fqns, 1)}: {why}", severity="warning")


def _problems_of(fqn: str, tensor: _Found) -> Iterator[Problem]:
    if tensor.bad:
        yield Problem(Code.TENSOR_NOT_JOINED, tensor.bad, None, fqn)
        return
    shape, boxes = tensor.described.shape, {s.box for s in tensor.shards}
    if len(boxes) == 1 and Box.whole(shape) in boxes:
        return
    try:
        covered = cover(shape, boxes)
    except TangledLayoutError as error:
        yield Problem(Code.TENSOR_NOT_JOINED, str(error), None, fqn)
        return
    if covered.outside:
        yield Problem(Code.TENSOR_OVERLAP, f"a chunk at {covered.outside[0]} outside of {list(shape)}", None, fqn)
    elif covered.overlaps:
        yield Problem(
            Code.TENSOR_OVERLAP, f"chunks {covered.overlaps[0][0]} and {covered.overlaps[0][1]} overlap", None, fqn
        )
    elif covered.missing:
        where = first_few(covered.gaps, 3)
        text = f"gap {where}: the metadata has no chunk for {covered.missing} of its {Box.whole(shape).numel} elements"
        yield Problem(Code.TENSOR_GAP, text, None, fqn)
