"""Execution of a plan into a bucket: stream the output in bounded memory; it appears when it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ckptools.cluster.team import current
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.output_place import check_unchanged, replaced
from ckptools.consolidate.publishing.execute import Executor
from ckptools.consolidate.publishing.multipart import MultipartOutput, remote
from ckptools.consolidate.publishing.publish import Seen
from ckptools.consolidate.publishing.source_records import crcs_of
from ckptools.consolidate.writers.layout import OutputLayout
from ckptools.errors import CkptoolsError, UsageError, WriteError
from ckptools.files.location import path_of
from ckptools.files.opening import OpenFiles
from ckptools.files.remote.path import refreshed
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.stream import tensor_bytes
from ckptools.tensor_io.threads import Progress, in_threads, no_progress
from ckptools.text import plural


def check_can_upload(out: Path, options: ConsolidateOptions) -> None:
    """Refuse options that need random access to an unfinished output.

    Raises:
        UsageError: such an option was given.
    """
    if options.resume:
        raise UsageError(out, "--resume needs an output on a disk; of one in a bucket nothing is kept")
    if options.manifest:
        raise UsageError(out, "--manifest needs an output on a disk, which is read again for it")
    if current().world_size > 1:
        raise UsageError(out, "several processes need an output on a disk; in a bucket one process writes it")


def upload(
    checkpoint: Checkpoint,
    out: Path,
    layout: OutputLayout,
    texts: Mapping[Path, str],
    files: OpenFiles,
    options: ConsolidateOptions,
    progress: Progress | None,
) -> Seen:
    """Write a planned output to a bucket; it appears whole, or not at all.

    Raises:
        DamagedError: a source does not match its checksum.
        ReadError: a source cannot be read, or changed meanwhile.
        WriteError: the output cannot be written, or differs when read back.
    """
    summary = ""
    with MultipartOutput(layout) as output:
        executor = Executor(output.targets, files, True, not options.unchecked, progress)
        regions = executor.run(layout.jobs, options.threads)
        if executor.records is not None:
            executor.records.compare()
        output.sent()
        for job, read, sent in zip(layout.jobs, crcs_of(layout.jobs, regions, True), output.crcs, strict=True):
            if read != sent:
                raise CkptoolsError(layout.files[job.file][0], f"{job.fqn}: other bytes were sent than were read")
        check_unchanged(checkpoint)
        refreshed(remote(out))
        output.publish(texts, options.force, replaced(checkpoint, out, layout, options.force, texts))
        if options.check:
            summary = _read_back(layout, output, files, options.threads, progress or no_progress)
    right = None if executor.records is None else frozenset(executor.records.right)
    return Seen(right, tuple(dict.fromkeys(job.fqn for job in layout.jobs if job.fqn in executor.odd)), summary)


def _read_back(
    layout: OutputLayout, output: MultipartOutput, files: OpenFiles, threads: int, progress: Progress
) -> str:
    """Compare every byte of the output in the store with its source; return a summary.

    Raises:
        WriteError: a byte differs; the output is removed.
        ReadError: the output or a source cannot be read.
    """
    refreshed(remote(layout.files[0][0]))
    paths = [path_of(str(path)) for path, _ in layout.files]
    with OpenFiles() as there:
        try:
            _compare_framing(layout, output.crcs, paths, there)
            compare = partial(_compare_tensor, layout, paths, there, files, progress)
            in_threads(compare, range(len(layout.jobs)), threads)
        except WriteError:
            output.remove()
            raise
    names = {job.fqn for job in layout.jobs}
    return f"{plural(len(names), 'tensor')} read back from the bucket, all equal"


def _compare_framing(layout: OutputLayout, crcs: list[int], paths: list[Path], there: OpenFiles) -> None:
    for number, (path, (_, size)) in enumerate(zip(paths, layout.files, strict=True)):
        with there.open(path) as file:
            if file.size != size:
                raise WriteError(path, f"the bucket has {file.size} bytes of it; {size} were sent, so it was removed")
            for piece in layout.framing(number):
                expected = piece.data(crcs.__getitem__)
                if file.read(piece.offset, len(expected)) != expected:
                    raise WriteError(path, f"differs in the bucket at byte {piece.offset}; it was removed")


def _compare_tensor(
    layout: OutputLayout, paths: list[Path], there: OpenFiles, files: OpenFiles, progress: Progress, number: int
) -> None:
    job = layout.jobs[number]
    at = job.offset
    with there.open(paths[job.file]) as file:
        for piece in tensor_bytes(job.tensor, job.dtype, files):
            if file.read(at, len(piece)) != piece:
                raise WriteError(paths[job.file], f"{job.fqn} differs in the bucket at byte {at}; it was removed")
            at += len(piece)
            progress(len(piece), job.fqn)
