"""Running a plan to its end: copy, prove, and only then give the output its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptools.cluster.team import current
from ckptools.consolidate.execute import Executor
from ckptools.consolidate.journal import Done, Journal, Kept, is_written, take_read
from ckptools.consolidate.output import Replaced, check_unchanged
from ckptools.consolidate.shared_output import Output, opened_output, synced
from ckptools.consolidate.shares import Share, shares_of
from ckptools.consolidate.writers.layout import Layout
from ckptools.consolidate.written import Region, crcs_of
from ckptools.errors import WriteError
from ckptools.files.opening import OpenFiles
from ckptools.files.partial_files import PartialFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.progress import Progress, not_told
from ckptools.tensor_io.records import Record, stored_records
from ckptools.tensor_io.shared_work import in_ranks

NOTHING_REPLACED = Replaced()


@dataclass(frozen=True)
class Proofs:
    """What is done to an output before it gets its name.

    Attributes:
        sources: compare the sources with the checksums that they state, on the way.
        compare: read it back and compare it with the shards.
        manifest: where its digests go; None for nowhere.
    """

    sources: bool
    compare: bool
    manifest: Path | None

    @property
    def paths(self) -> list[Path]:
        """Files that this adds."""
        return [self.manifest] if self.manifest is not None else []


@dataclass(frozen=True)
class Seen:
    """What was seen while an output was written.

    Attributes:
        right: source records that have the CRC-32 that they state; None when they were not compared.
        odd: fqns of tensors in which NaN or infinity was seen, in order.
        read_back: how the output was read back and compared; empty when it was not.
    """

    right: frozenset[Record] | None
    odd: tuple[str, ...] = ()
    read_back: str = ""


def write(
    checkpoint: Checkpoint,
    layout: Layout,
    new_folder: Path | None,
    texts: Mapping[Path, str],
    files: OpenFiles,
    proofs: Proofs,
    jobs: int,
    progress: Progress | None,
    kept: Kept | None = None,
    earlier: Replaced = NOTHING_REPLACED,
) -> Seen:
    """Write a planned output; it appears whole, or not at all. `new_folder` is made for it; what is `earlier` goes.

    Of one that does not come to its end nothing stays, or what is `kept`, where the next run goes on.

    Raises:
        DamagedError: a source is not what its checksum says.
        ReadError: a source cannot be read, or changed meanwhile.
        WriteError: the output cannot be written, or is not what was written.
    """
    shares = shares_of(layout.jobs, current().world_size)
    with opened_output(layout, new_folder, kept) as output, ExitStack() as stack:
        done = _done(kept, layout, output, jobs)
        journal = Journal(kept.folder) if kept else None
        if journal is not None:
            stack.callback(journal.close)
        executor = Executor(output.targets, files, layout.checksums, proofs.sources, progress, done, journal)
        _take(done, layout, executor)
        regions = _copied(executor, layout, shares[current().rank], jobs)
        try:
            if output.partial is not None:
                layout.finish(output.targets, crcs_of(layout.jobs, regions, executor.checksums))
            synced(output.targets)
            told = _compared(layout, output, files, jobs, progress) if proofs.compare else ""
            added = {**texts, **_manifest(layout, output.targets, proofs, jobs)}
            if output.partial is not None:
                _publish(checkpoint, output.partial, added, earlier)
        except OSError as error:
            raise WriteError(layout.files[0][0], f"cannot write: {(error.strerror or '').lower()}") from error
    right = None if executor.records is None else frozenset(executor.records.right)
    odd = set[str]().union(*current().gather(executor.odd))
    return Seen(right, tuple(dict.fromkeys(job.fqn for job in layout.jobs if job.fqn in odd)), told)


def _copied(executor: Executor, layout: Layout, share: Share, threads: int) -> list[Region]:
    """Copy this rank's share, and return what all ranks have written."""
    with current().own_work():
        regions = executor.run(layout.jobs, threads, share)
    if executor.records is not None:
        stored = stored_records((job.fqn, job.tensor) for job in layout.jobs) if current().world_size > 1 else ()
        executor.records.compare(found.record for found in stored)
    return [*executor.done.regions, *(region for written in current().gather(regions) for region in written)]


def _done(kept: Kept | None, layout: Layout, output: Output, threads: int) -> Done:
    """What an earlier run has written, each region of it read again."""
    entries = current().gather(kept.entries() if kept and current().rank == 0 else [])[0]
    check = partial(is_written, layout.jobs, output.targets)
    right = in_ranks(check, entries, threads, lambda entry: entry.region.nbytes)
    return Done([entry for entry, is_right in zip(entries, right, strict=True) if is_right])


def _take(done: Done, layout: Layout, executor: Executor) -> None:
    """Take note of what an earlier run has seen of what it has written."""
    if executor.records is not None and done.entries:
        take_read(done.entries, layout.jobs, executor.records)
    executor.odd |= {layout.jobs[entry.region.job].fqn for entry in done.entries if entry.odd}


def _compared(layout: Layout, output: Output, files: OpenFiles, threads: int, progress: Progress | None) -> str:
    from ckptools.consolidate.read_back import compare

    return compare(layout, output.targets, output.paths, files, threads, progress or not_told)


def _publish(checkpoint: Checkpoint, partial: PartialFiles, texts: Mapping[Path, str], earlier: Replaced) -> None:
    for path, text in texts.items():
        partial.add_text(path, text)
    check_unchanged(checkpoint)
    partial.publish(earlier.first, earlier.last)


def _manifest(layout: Layout, targets: Sequence[int], proofs: Proofs, jobs: int) -> dict[Path, str]:
    """The output's manifest, if it is asked for."""
    if proofs.manifest is None:
        return {}
    from ckptools.consolidate.manifest import manifest_json

    return {proofs.manifest: manifest_json(layout, targets, jobs)}
