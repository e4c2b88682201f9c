"""Execution of a plan to its end: copy, check, and only then give the output its name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptools.cluster.team import current
from ckptools.consolidate.output_place import Replaced, check_unchanged
from ckptools.consolidate.publishing.execute import Executor
from ckptools.consolidate.publishing.journal import Done, Journal, Kept, is_written, take_read
from ckptools.consolidate.publishing.source_records import WrittenRegion, crcs_of
from ckptools.consolidate.shares import Share, shares_of
from ckptools.consolidate.writers.layout import OutputLayout
from ckptools.errors import WriteError
from ckptools.files.opening import OpenFiles
from ckptools.files.partial_files import PartialFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.checksums import Record, stored_records
from ckptools.tensor_io.fetch_ahead import in_ranks
from ckptools.tensor_io.threads import Progress, no_progress

NOTHING_REPLACED = Replaced()


@dataclass(frozen=True)
class Proofs:
    """Checks of an output before it gets its name.

    Attributes:
        sources: compare the sources with their stated checksums while reading.
        compare: read it back and compare it with the shards.
        manifest: file for its digests; None for none.
    """

    sources: bool
    compare: bool
    manifest: Path | None

    @property
    def paths(self) -> list[Path]:
        """Files that the checks add."""
        return [self.manifest] if self.manifest is not None else []


@dataclass(frozen=True)
class Seen:
    """Findings while an output was written.

    Attributes:
        right: source records that match their stated CRC-32; None if they were not compared.
        odd: fqns of tensors in which NaN or infinity was seen, in order.
        read_back: how the output was read back and compared; empty if it was not.
    """

    right: frozenset[Record] | None
    odd: tuple[str, ...] = ()
    read_back: str = ""


def write(
    checkpoint: Checkpoint,
    layout: OutputLayout,
    new_folder: Path | None,
    texts: Mapping[Path, str],
    files: OpenFiles,
    proofs: Proofs,
    jobs: int,
    progress: Progress | None,
    kept: Kept | None = None,
    earlier: Replaced = NOTHING_REPLACED,
) -> Seen:
    """Write a planned output; it appears whole, or not at all. Makes `new_folder` and removes `earlier` files.

    An unfinished output leaves no files, except those in `kept`, from which the next run continues.

    Raises:
        DamagedError: a source does not match its checksum.
        ReadError: a source cannot be read, or changed meanwhile.
        WriteError: the output cannot be written, or differs when read back.
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
            read_back = _compared(layout, output, files, jobs, progress) if proofs.compare else ""
            added = {**texts, **_manifest(layout, output.targets, proofs, jobs)}
            if output.partial is not None:
                _publish(checkpoint, output.partial, added, earlier)
        except OSError as error:
            raise WriteError(layout.files[0][0], f"cannot write: {(error.strerror or '').lower()}") from error
    right = None if executor.records is None else frozenset(executor.records.right)
    odd = set[str]().union(*current().gather(executor.odd))
    return Seen(right, tuple(dict.fromkeys(job.fqn for job in layout.jobs if job.fqn in odd)), read_back)


def _copied(executor: Executor, layout: OutputLayout, share: Share, threads: int) -> list[WrittenRegion]:
    """Copy this rank's share, and return the regions written by all ranks."""
    with current().own_work():
        regions = executor.run(layout.jobs, threads, share)
    if executor.records is not None:
        stored = stored_records((job.fqn, job.tensor) for job in layout.jobs) if current().world_size > 1 else ()
        executor.records.compare(found.record for found in stored)
    return [*executor.done.regions, *(region for written in current().gather(regions) for region in written)]


def _done(kept: Kept | None, layout: OutputLayout, output: OpenOutput, threads: int) -> Done:
    """The regions that an earlier run has written, each read again."""
    entries = current().gather(kept.entries() if kept and current().rank == 0 else [])[0]
    check = partial(is_written, layout.jobs, output.targets)
    right = in_ranks(check, entries, threads, lambda entry: entry.region.nbytes)
    return Done([entry for entry, is_right in zip(entries, right, strict=True) if is_right])


def _take(done: Done, layout: OutputLayout, executor: Executor) -> None:
    """Restore checksum and NaN findings from the journal."""
    if executor.records is not None and done.entries:
        take_read(done.entries, layout.jobs, executor.records)
    executor.odd |= {layout.jobs[entry.region.job].fqn for entry in done.entries if entry.odd}


def _compared(
    layout: OutputLayout, output: OpenOutput, files: OpenFiles, threads: int, progress: Progress | None
) -> str:
    from ckptools.consolidate.publishing.read_back import compare

    return compare(layout, output.targets, output.paths, files, threads, progress or no_progress)


def _publish(checkpoint: Checkpoint, partial: PartialFiles, texts: Mapping[Path, str], earlier: Replaced) -> None:
    for path, text in texts.items():
        partial.add_text(path, text)
    check_unchanged(checkpoint)
    partial.publish(earlier.first, earlier.last)


def _manifest(layout: OutputLayout, targets: Sequence[int], proofs: Proofs, jobs: int) -> dict[Path, str]:
    """The output's manifest, if it is asked for."""
    if proofs.manifest is None:
        return {}
    from ckptools.consolidate.publishing.read_back import manifest_json

    return {proofs.manifest: manifest_json(layout, targets, jobs)}


# -- open files of an output: rank 0 creates and names them, all ranks write into them --------------------------------


@dataclass(frozen=True)
class OpenOutput:
    """The files of an output, open under temporary names.

    Attributes:
        partial: gives them their final names; None on other ranks than 0.
        targets: their descriptors.
        paths: their current paths.
    """

    partial: PartialFiles | None
    targets: Sequence[int]
    paths: Sequence[Path]


@contextmanager
def opened_output(layout: OutputLayout, new_folder: Path | None, kept: Kept | None) -> Iterator[OpenOutput]:
    """Open the files of an output under their temporary names; at the end all ranks have closed them.

    Args:
        layout: the plan of the output.
        new_folder: a folder to make for them; None if it exists.
        kept: keeps unfinished files; None to remove them.

    Raises:
        RefusedError: the files kept by an earlier run belong to another plan.
        WriteError: a file cannot be made, or another rank does not see it.
    """
    with ExitStack() as stack:
        made = PartialFiles(kept.folder if kept else None)
        partial = stack.enter_context(made) if current().rank == 0 else None
        targets = [] if partial is None else _made(partial, layout, new_folder, kept)
        paths = current().gather([] if partial is None else [partial.place(path) for path, _ in layout.files])[0]
        if partial is None:
            with current().own_work():
                targets = [_opened(path, final, stack) for path, (final, _) in zip(paths, layout.files, strict=True)]
        yield OpenOutput(partial, targets, paths)


def _made(partial: PartialFiles, layout: OutputLayout, new_folder: Path | None, kept: Kept | None) -> list[int]:
    if new_folder is not None:
        partial.make_folder(new_folder)
    if kept is not None:
        kept.begin()
    if layout.folder is not None:
        partial.create_folder(layout.folder)
    return [partial.create(path, size) for path, size in layout.files]


def _opened(path: Path, final: Path, stack: ExitStack) -> int:
    """Open a file that rank 0 has made for writing until the end."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        why = (error.strerror or "").lower()
        raise WriteError(final, f"the file that rank 0 has made for it cannot be opened here: {why}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def synced(targets: Sequence[int]) -> None:
    """Flush the bytes written by every rank so that other ranks see them.

    Raises:
        OSError: the disk failed.
    """
    if current().world_size > 1:
        with current().own_work():
            for descriptor in targets:
                os.fsync(descriptor)
        current().gather(None)
