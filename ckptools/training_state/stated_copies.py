"""Copies that ranks hold of one region, compared by the checksums that their files state: no bytes are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptools.dtypes import ITEMSIZE
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import vote
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.training_state.rank_own import Shared
from ckptools.training_state.sections import sections_of, tensors_of


def copy_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Tensors that ranks should share, and whose copies differ by the CRC-32 that each file states of its own."""
    if any(p.kind is Code.ONE_OF_SEVERAL for p in ck.problems):
        return  # files that are slices of tensors look like copies that differ
    shared = Shared(sections_of(ck))
    for section in sections_of(ck):
        found = [p for path, tensor in tensors_of([section]) if shared.holds(path) for p in _of_tensor(path, tensor)]
        for odd in dict.fromkeys(p.ranks for p in found):
            first, *others = (p for p in found if p.ranks == odd)
            more = f"; and {len(others)} more regions or tensors of {section.name or 'it'}" if others else ""
            yield replace(first, message=f"{first.message}{more}")


def _of_tensor(path: KeyPath, tensor: Tensor) -> Iterator[Problem]:
    if not tensor.note and len({s.box for s in tensor.found}) < len(tensor.found):
        by_box: dict[Box, list[Shard]] = {}
        for shard in tensor.found:
            by_box.setdefault(shard.box, []).append(shard)
        yield from (p for box, shards in by_box.items() for p in _differing(fqn_of(path), box, shards))


def _differing(fqn: str, box: Box, shards: Sequence[Shard]) -> Iterator[Problem]:
    stated = [(shard.rank, crc) for shard in shards if shard.rank is not None and (crc := _stated(shard))]
    found = vote(stated, lambda a, b: a == b)
    if not found.agree:
        told = found.by_rank(lambda crc: f"{crc:08x}")
        text = f"{box}: copies differ by the CRC-32 that their files state ({told})"
        yield Problem(Code.COPIES_DIFFER, text, found.odd[0] if found.odd else None, fqn, ranks=found.odd)


def _stated(shard: Shard) -> int:
    """The CRC-32 of a shard that is all of its record; 0 where none is stated of it alone."""
    source = shard.source
    if source is None or shard.encoded is not None or not source.contiguous:
        return 0
    return source.crc if source.record_span[1] == shard.box.numel * ITEMSIZE[source.dtype] else 0
