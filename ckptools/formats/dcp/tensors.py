"""The tensors of a DCP folder: every chunk in its place, and what of it can be told before a value is read.

Two ranks that hold the same chunk write it once, or, without collectives, each for itself: those are replicas of one
box, and are compared when they are put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ckptools.dtypes import QUANTIZED
from ckptools.formats.dcp.files import DataFile
from ckptools.formats.dcp.items import ItemReader, in_safetensors
from ckptools.formats.dcp.locate import Found, Locator
from ckptools.formats.dcp.metadata import Metadata, StoredItem, TensorMetadata
from ckptools.formats.dcp.other_files import Suspect
from ckptools.model.cover import TangledLayoutError, cover
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Item, Shard, Tensor, TensorKind, in_rank_order
from ckptools.model.values import Opaque, describe_for_error
from ckptools.pickles.tensors import WHY_NOT
from ckptools.text import first_few

MAX_PROBLEMS = 100
"""Tensors that are named one by one before they are counted."""


@dataclass(frozen=True)
class TensorsRead:
    """The tensors of a DCP folder.

    Attributes:
        by_fqn: as far as they can be read.
        problems: what is wrong with them.
        suspects: items that are damaged, or not those that the metadata lists.
        all_seen: whether every item was looked into that need not be unpacked.
    """

    by_fqn: Mapping[str, Any]
    problems: Sequence[Problem]
    suspects: Sequence[Suspect]
    all_seen: bool


def read_tensors(
    metadata: Sequence[Metadata], here: Mapping[str, DataFile], items: ItemReader, everything: bool
) -> TensorsRead:
    """Read the tensors of a DCP folder.

    Args:
        metadata: one for all ranks, or one of each.
        here: the data files by the name that the metadata gives them.
        items: reads those files.
        everything: look into every item, however many they are.
    """
    found: dict[str, Found] = {}
    problems: list[Problem] = []
    for one in metadata:
        for fqn, described in one.tensors.items():
            tensor = found.setdefault(fqn, Found(described))
            problems += _disagreement(fqn, tensor.described, described, one)
            _place(tensor, fqn, described, one, here)
    _refuse_shared_places(found)
    locator = Locator(found, items)
    locator.locate(everything)
    problems += _problems(found)
    tensors = {fqn: _tensor(fqn, tensor) for fqn, tensor in found.items()}
    return TensorsRead(tensors, problems, locator.suspects, locator.all_seen)


def _disagreement(fqn: str, first: TensorMetadata, other: TensorMetadata, metadata: Metadata) -> Iterator[Problem]:
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        text = f"{other.dtype} {list(other.shape)}, the first rank has {first.dtype} {list(first.shape)}"
        yield Problem(Code.LAYOUT_DISAGREES, text, metadata.rank, fqn)


def _place(
    tensor: Found, fqn: str, described: TensorMetadata, metadata: Metadata, here: Mapping[str, DataFile]
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


def _refuse_shared_places(found: Mapping[str, Found]) -> None:
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


def _tensor(fqn: str, found: Found) -> Any:
    described = found.described
    if described.dtype is None:
        return Opaque(described.stated_dtype)
    note = found.bad or found.why_not or found.encoded
    kind: TensorKind = "chunks" if len(described.boxes) > 1 else "quantized" if found.encoded else "plain"
    if described.dtype in QUANTIZED or described.layout != "strided":
        kind = "quantized" if described.dtype in QUANTIZED else "sparse"
    shards, grad = in_rank_order(found.shards), described.requires_grad
    return Tensor(described.shape, described.dtype, shards, kind, requires_grad=grad, note=note)


def _problems(found: Mapping[str, Found]) -> Iterator[Problem]:
    """What is wrong with single tensors."""
    wrong = [p for fqn, tensor in found.items() for p in _problems_of(fqn, tensor)]
    yield from wrong[:MAX_PROBLEMS]
    if len(wrong) > MAX_PROBLEMS:
        yield Problem(
            Code.TENSOR_NOT_JOINED, f"{len(wrong) - MAX_PROBLEMS} more tensors are lost or wrong", severity="error"
        )


def _problems_of(fqn: str, tensor: Found) -> Iterator[Problem]:
    if tensor.bad:
        yield Problem(Code.TENSOR_NOT_JOINED, tensor.bad, None, fqn, "error")
        return
    shape, boxes = tensor.described.shape, {s.box for s in tensor.shards}
    if len(boxes) == 1 and Box.whole(shape) in boxes:
        return
    try:
        covered = cover(shape, boxes)
    except TangledLayoutError as error:
        yield Problem(Code.TENSOR_NOT_JOINED, str(error), None, fqn, "error")
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
