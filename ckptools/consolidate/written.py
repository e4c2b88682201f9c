"""What was written of an output: consecutive bytes of its tensors, with their CRC-32, by whatever thread or rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptools.consolidate.plan import Job
from ckptools.errors import CkptoolsError
from ckptools.tensor_io.checksums import combine


class Region(NamedTuple):
    """Consecutive bytes of a tensor that were written.

    Attributes:
        job: number of the tensor in the plan.
        offset: byte offset of the first from the tensor's own first byte.
        nbytes: how many.
        crc: their CRC-32; 0 where no checksums are kept.
    """

    job: int
    offset: int
    nbytes: int
    crc: int

    @property
    def end(self) -> int:
        """One past the last."""
        return self.offset + self.nbytes


def joined(regions: Iterable[Region], checksums: bool) -> list[Region]:
    """The same bytes of one tensor in as few regions as they make, in order."""
    found: list[Region] = []
    for region in sorted(regions):
        if found and found[-1].end == region.offset:
            before = found.pop()
            crc = combine(before.crc, region.crc, region.nbytes) if checksums else 0
            region = Region(region.job, before.offset, before.nbytes + region.nbytes, crc)
        found.append(region)
    return found


def crcs_of(jobs: Sequence[Job], regions: Iterable[Region], checksums: bool) -> list[int]:
    """The CRC-32 of every tensor, of regions that make it up; 0 where no checksums are kept.

    Raises:
        CkptoolsError: some bytes were written by nobody, or twice.
    """
    found: list[list[Region]] = [[] for _ in jobs]
    for region in regions:
        found[region.job].append(region)
    return [_crc_of(job, joined(own, checksums)) for job, own in zip(jobs, found, strict=True)]


def _crc_of(job: Job, regions: Sequence[Region]) -> int:
    if not job.nbytes and not regions:
        return 0
    if len(regions) != 1 or (regions[0].offset, regions[0].nbytes) != (0, job.nbytes):
        told = ", ".join(f"{r.offset} to {r.end}" for r in regions[:8]) or "none"
        raise CkptoolsError(None, f"{job.fqn}: of {job.nbytes} bytes these were written: {told}; nothing was kept")
    return regions[0].crc
