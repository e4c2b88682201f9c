"""Execution of a plan to its end: copy, check, and only then give the output its name."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cluster.team import current
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.output_place import Replaced, check_unchanged
from ckptools.consolidate.publishing.execute import Executor
from ckptools.consolidate.publishing.source_records import Right, WrittenRegion, crcs_of
from ckptools.consolidate.writers.layout import OutputLayout
from ckptools.errors import WriteError
from ckptools.files.opening import OpenFiles
from ckptools.files.partial_files import PartialFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.checksums import stored_records
from ckptools.tensor_io.threads import Progress

if TYPE_CHECKING:
    from ckptools.consolidate.publishing.journal import Kept


@dataclass(frozen=True)
class WriteFindings:
    """Findings while an output was written.

    Attributes:
        right: source records that match their stated CRC-32, by file; None if they were not compared.
        odd: fqns of tensors in which NaN or infinity was seen, in order.
        read_back: how the output was read back and compared; empty if it was not.
    """

    right: Right | None
    odd: tuple[str, ...] = ()
    read_back: str = ""

    @classmethod
    def by(cls, executor: Executor, layout: OutputLayout, odd: Container[str], read_back: str) -> WriteFindings:
        """The findings of an executor, with those of other ranks on NaN and infinity."""
        right = None if executor.records is None else executor.records.offsets
        return cls(right, tuple(dict.fromkeys(job.fqn for job in layout.jobs if job.fqn in odd)), read_back)


def write(
    checkpoint: Checkpoint,
    layout: OutputLayout,
    new_folder: Path | None,
    texts: Mapping[Path, str | bytes],
    manifest: Path | None,
    files: OpenFiles,
    options: ConsolidateOptions,
    progress: Progress,
    kept: Kept | None,
    earlier: Replaced,
) -> WriteFindings:
    """Write a planned output; it appears whole, or not at all. Makes `new_folder` and removes `earlier` files.

    An unfinished output leaves no files, except those in `kept`, from which the next run continues.

    Raises:
        DamagedError: a source does not match its checksum.
        ReadError: a source cannot be read, or changed meanwhile.
        WriteError: the output cannot be written, or differs when read back.
    """
    with _opened_output(layout, new_folder, kept) as output, ExitStack() as stack:
        executor = _executor(layout, output, files, options, progress, kept, stack)
        regions = _copied(executor, layout, options.threads)
        try:
            if output.partial is not None:
                layout.finish(output.targets, crcs_of(layout.jobs, regions, executor.checksums))
            _synced(output.targets)
            read_back, added = "", dict(texts)
            if options.check:
                from ckptools.consolidate.publishing.read_back import compare

                read_back = compare(layout, output.targets, output.paths, files, options.threads, progress)
            if manifest is not None:
                from ckptools.consolidate.publishing.read_back import manifest_json

                added[manifest] = manifest_json(layout, output.targets, options.threads)
            if output.partial is not None:
                for path, text in added.items():
                    output.partial.add_text(path, text)
                check_unchanged(checkpoint)
                output.partial.publish(earlier.first, earlier.last)
        except OSError as error:
            raise WriteError(layout.files[0][0], f"cannot write: {(error.strerror or '').lower()}") from error
    return WriteFindings.by(executor, layout, set[str]().union(*current().gather(executor.odd)), read_back)


def _executor(
    layout: OutputLayout,
    output: _OpenOutput,
    files: OpenFiles,
    options: ConsolidateOptions,
    progress: Progress,
    kept: Kept | None,
    stack: ExitStack,
) -> Executor:
    """The executor of this rank's share, which goes on where an earlier run has stopped."""
    targets, team, compare = output.targets, current(), not options.unchecked
    if kept is None and team.world_size == 1:
        return Executor(targets, files, layout.checksums, compare, progress)
    from ckptools.consolidate.publishing.journal import Journal, take_done
    from ckptools.consolidate.shares import shares_of

    share = shares_of(layout.jobs, team.world_size)[team.rank]
    done = take_done(kept, layout.jobs, targets, options.threads)
    journal = Journal(kept.folder) if kept else None
    if journal is not None:
        stack.callback(journal.close)
    executor = Executor(targets, files, layout.checksums, compare, progress, share, done, journal)
    executor.odd |= done.restore(layout.jobs, executor.records)
    return executor


def _copied(executor: Executor, layout: OutputLayout, threads: int) -> list[WrittenRegion]:
    """Copy this rank's share, and return the regions written by all ranks."""
    with current().own_work():
        regions = executor.run(layout.jobs, threads)
    if executor.records is not None:
        stored = stored_records((job.fqn, job.tensor) for job in layout.jobs) if current().world_size > 1 else ()
        executor.records.compare(found.record for found in stored)
    earlier = executor.done.regions if executor.done else []
    return [*earlier, *(region for written in current().gather(regions) for region in written)]


@dataclass(frozen=True)
class _OpenOutput:
    """The files of an output, open under temporary names: their descriptors and current paths.

    Rank 0 creates them, all ranks write into them. `partial` gives them their final names; None on other ranks than 0.
    """

    partial: PartialFiles | None
    targets: Sequence[int]
    paths: Sequence[Path]


@contextmanager
def _opened_output(layout: OutputLayout, new_folder: Path | None, kept: Kept | None) -> Iterator[_OpenOutput]:
    """Open the files of an output under their temporary names; at the end all ranks have closed them.

    It makes `new_folder` for them. Unfinished files are removed, unless `kept` keeps them.
    """
    with ExitStack() as stack:
        made = PartialFiles(kept.folder if kept else None)
        partial = stack.enter_context(made) if current().rank == 0 else None
        targets = [] if partial is None else _made(partial, layout, new_folder, kept)
        paths = current().gather([] if partial is None else [partial.place(path) for path, _ in layout.files])[0]
        if partial is None:
            with current().own_work():
                targets = [_opened(path, final, stack) for path, (final, _) in zip(paths, layout.files, strict=True)]
        yield _OpenOutput(partial, targets, paths)


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


def _synced(targets: Sequence[int]) -> None:
    """Flush the bytes written by every rank so that other ranks see them."""
    if current().world_size > 1:
        with current().own_work():
            for descriptor in targets:
                os.fsync(descriptor)
        current().gather(None)
