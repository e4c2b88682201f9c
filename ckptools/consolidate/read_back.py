"""The output, read back from the disk before it gets its name: is every tensor what its shards are?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckptools.consolidate.plan import Job
from ckptools.consolidate.stream import tensor_bytes
from ckptools.consolidate.writers.layout import Layout
from ckptools.errors import WriteError
from ckptools.files import OpenFiles
from ckptools.threads import in_threads

Progress = Callable[[int, str], None]


def compare(layout: Layout, targets: Sequence[int], files: OpenFiles, threads: int, progress: Progress) -> None:
    """Compare every tensor of the output with the shards that it was made of.

    Args:
        layout: what was written.
        targets: descriptors of the output files.
        files: where source files are opened.
        threads: how many tensors at once.
        progress: called with bytes compared and the tensor they belong to.

    Raises:
        WriteError: a tensor differs.
        ReadError: a source cannot be read any more.
    """
    for target in targets:
        _forget(target)

    def work(job: Job) -> None:
        at = job.offset
        for piece in tensor_bytes(job.tensor, job.dtype, files):
            if os.pread(targets[job.file], len(piece), at) != piece:
                text = f"{job.fqn}: read back from byte {at}, it is not what was written; nothing was kept"
                raise WriteError(layout.files[job.file][0], text)
            at += len(piece)
            progress(len(piece), job.fqn)

    in_threads(work, layout.jobs, threads)


def _forget(descriptor: int) -> None:
    """Bring a file to the disk and out of memory, so that reading it asks the disk."""
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
