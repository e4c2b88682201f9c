"""The records that an output is made of, compared with their checksums before anything is planned.

On the way into an output every record is compared anyway. It is done first, for a second reading of the source, where
what is damaged is to be left out, and where nothing is to be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptools.consolidate.plan import Job
from ckptools.files import OpenFiles
from ckptools.model import Tensor
from ckptools.tensor_io.records import Progress, Record, damaged, stored


@dataclass(frozen=True)
class SourceChecksums:
    """The source's checksums, compared.

    Attributes:
        right: how many records have the CRC-32 that they state.
        without: how many state none.
    """

    right: int
    without: int


@dataclass(frozen=True)
class Compared:
    """Records that were compared with the CRC-32 that they state.

    Attributes:
        right: those that have it.
        damaged: those that have not, with the one that they have.
    """

    right: frozenset[Record] = frozenset()
    damaged: Mapping[Record, int] = field(default_factory=dict)


def compare(
    tensors: Iterable[tuple[str, Tensor]],
    files: OpenFiles,
    threads: int,
    progress: Progress,
    planned: Callable[[int], None],
) -> Compared:
    """Read every record that some tensors, given with their fqns, lie in, where it states a CRC-32.

    Raises:
        ReadError: a file cannot be read.
    """
    records = [found.record for found in stored(tensors) if found.record.crc]
    planned(sum(record.nbytes for record in records))
    wrong = damaged(records, files, threads, progress)
    return Compared(frozenset(records) - wrong.keys(), wrong)


def count(jobs: Iterable[Job], right: frozenset[Record]) -> SourceChecksums:
    """How many of the records that jobs read are right, and how many state no checksum."""
    records = {found.record for found in stored((job.fqn, job.tensor) for job in jobs) if found.record.nbytes}
    return SourceChecksums(len(records & right), sum(not record.crc for record in records))
