"""The records that an output is made of, compared with their checksums before anything is planned, and tensors without
those that are damaged.

On the way into an output every record is compared anyway. It is done first, for a second reading of the source, where
what is damaged is to be left out, and where nothing is to be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptools.consolidate.plan import Job
from ckptools.errors import original_of
from ckptools.files.opening import OpenFiles
from ckptools.model.consolidation import SourceChecksums
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.progress import Progress
from ckptools.tensor_io.records import Record, damaged_records, stored_records, without_records
from ckptools.text import and_others, plural


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
    records = [found.record for found in stored_records(tensors) if found.record.crc]
    planned(sum(record.nbytes for record in records))
    wrong = damaged_records(records, files, threads, progress)
    return Compared(frozenset(records) - wrong.keys(), wrong)


def count(jobs: Iterable[Job], right: frozenset[Record]) -> SourceChecksums:
    """How many of the records that jobs read are right, and how many state no checksum."""
    records = {found.record for found in stored_records((job.fqn, job.tensor) for job in jobs) if found.record.nbytes}
    return SourceChecksums(len(records & right), sum(not record.crc for record in records))


def without_damaged(tensor: Tensor, fqn: str, damage: Mapping[Record, int]) -> tuple[Tensor, Problem | None]:
    """The tensor without the bytes that lie in damaged records, and the first of these; None when there is none.

    Args:
        tensor: the tensor.
        fqn: its name.
        damage: records, with the CRC-32 that they have.
    """
    if not damage:
        return tensor, None
    wrong = [(shard, Record.of(source)) for shard in tensor.found for source in shard.sources]
    wrong = [(shard, record) for shard, record in wrong if record in damage]
    if not wrong:
        return tensor, None
    first, record = wrong[0]
    more = f" and {plural(len(wrong) - 1, 'more shard')}" if len(wrong) > 1 else ""
    text = f"{first.box}{more}: {original_of(record.path).name} is damaged: {record.damage(damage[record])}"
    return without_records(tensor, damage), Problem(Code.BAD_CHECKSUM, text, first.rank, fqn)


def spared_note(damage: Sequence[Problem]) -> list[str]:
    """The note that a right copy was taken in the place of a damaged one."""
    if not damage:
        return []
    return [f"{damage[0]}{and_others(len(damage) - 1)}; another rank's copy is right, and is written"]
