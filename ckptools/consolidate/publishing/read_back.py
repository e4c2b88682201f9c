"""Read a written output again: compare it with the shards, and compute SHA-256 for a manifest.

On a disk this is before the output gets its name, and the format's own library reads it to compare. A manifest lists
every tensor and every file as JSON beside the output; `verify --manifest` compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.consolidate.writers.layout import Job, OutputLayout, ReadBack, ReadTensor
from ckptools.errors import CkptoolsError, WriteError
from ckptools.files.opening import OpenFiles, path_of
from ckptools.model.records import grouped
from ckptools.tensor_io.fetch_ahead import Progress, begin_stage, in_ranks, in_threads
from ckptools.tensor_io.stream import MANIFEST_SCHEMA, digest_of, tensor_bytes
from ckptools.text import plural

AT_ONCE = 512 << 20
"""After this many bytes of tensors the output is closed and opened again: until then mapped bytes stay in memory."""


def compare(
    layout: OutputLayout,
    targets: Sequence[int],
    paths: Sequence[Path],
    files: OpenFiles,
    threads: int,
    progress: Progress,
) -> str:
    """Compare every tensor of the output with its shards, byte for byte; return a summary.

    Memory is bounded by `AT_ONCE` and the largest tensor. `targets` and `paths` are the output files' descriptors and
    current paths.

    Raises:
        WriteError: the library cannot read the output, or a tensor differs.
        ReadError: a source can no longer be read.
    """
    begin_stage(progress, "flushing to the disk")
    for target in targets:
        _forget(target)
    begin_stage(progress, "reading back")
    done, by, names = 0, "", set()
    while True:
        try:
            with layout.read_back(paths) as found:
                by, total = found.by, len(found.tensors)
                some = _some(found.tensors[done:])
                names |= {tensor.fqn for tensor in some}
                in_ranks(partial(_compare, found, files, progress), some, threads, lambda one: one.tensor.nbytes)
        except MemoryError:
            raise
        except Exception as error:  # any error of a library that cannot read the file
            if isinstance(error, CkptoolsError) and error.path not in paths:
                raise
            said = error.reason if isinstance(error, CkptoolsError) and error.path == paths[0] else f"{error}"
            cause = said.partition("\n")[0] or type(error).__name__
            raise WriteError(layout.files[0][0], f"cannot be read back: {cause:.200}; nothing was kept") from error
        done += len(some)
        if done == total:
            return f"{plural(len(names), 'tensor')} read back by {by}, all equal"


def _some(tensors: Sequence[ReadTensor]) -> Sequence[ReadTensor]:
    """The first tensors, of about `AT_ONCE` bytes, that are compared before the output is opened again."""
    nbytes = 0
    for count, tensor in enumerate(tensors):
        nbytes += tensor.tensor.nbytes
        if nbytes >= AT_ONCE:
            return tensors[: count + 1]
    return tensors


def _compare(found: ReadBack, files: OpenFiles, progress: Progress, expected: ReadTensor) -> None:
    import numpy as np
    import torch

    tensor = expected.read()
    dtype, shape = f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape)
    if (dtype, shape) != (expected.dtype, expected.tensor.shape):
        raise _wrong(expected, found, f"as {dtype} {list(shape)}")
    data, at = tensor.detach().reshape(-1).view(torch.uint8).numpy(), 0
    for piece in tensor_bytes(expected.tensor, expected.dtype, files):
        if not np.array_equal(data[at : at + len(piece)], np.frombuffer(piece, "u1")):
            raise _wrong(expected, found, f"with other values from byte {at} on")
        at += len(piece)
        progress(len(piece), expected.fqn)


def _wrong(expected: ReadTensor, found: ReadBack, how: str) -> CkptoolsError:
    text = f"{expected.fqn}: read back by {found.by} {how}; it is not what was written, nothing was kept"
    return WriteError(None, text)


def _forget(descriptor: int) -> None:
    """Flush a file and drop it from the page cache, so that it is read from the disk."""
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


# -- in a bucket -------------------------------------------------------------------------------------------------------


def compare_uploaded(
    layout: OutputLayout, crcs: Sequence[int], files: OpenFiles, threads: int, progress: Progress
) -> str:
    """Compare every byte of an output in a store with its source; return a summary."""
    paths = [path_of(str(path)) for path, _ in layout.files]
    begin_stage(progress, "reading back")
    with OpenFiles() as there:
        for number, (path, (_, size)) in enumerate(zip(paths, layout.files, strict=True)):
            with there.open(path) as file:
                if file.size != size:
                    text = f"the bucket has {file.size} bytes of it; {size} were sent, so it was removed"
                    raise WriteError(path, text)
                for piece in layout.framing(number):
                    expected = piece.data(crcs.__getitem__)
                    if file.read(piece.offset, len(expected)) != expected:
                        raise WriteError(path, f"differs in the bucket at byte {piece.offset}; it was removed")
        in_threads(partial(_compare_tensor, layout, paths, there, files, progress), range(len(layout.jobs)), threads)
    names = {job.fqn for job in layout.jobs}
    return f"{plural(len(names), 'tensor')} read back from the bucket, all equal"


def _compare_tensor(
    layout: OutputLayout, paths: Sequence[Path], there: OpenFiles, files: OpenFiles, progress: Progress, number: int
) -> None:
    job = layout.jobs[number]
    at = job.offset
    with there.open(paths[job.file]) as file:
        for piece in tensor_bytes(job.tensor, job.dtype, files):
            if file.read(at, len(piece)) != piece:
                raise WriteError(paths[job.file], f"{job.fqn} differs in the bucket at byte {at}; it was removed")
            at += len(piece)
            progress(len(piece), job.fqn)


# -- manifest ----------------------------------------------------------------------------------------------------------


def manifest_json(layout: OutputLayout, targets: Sequence[int], threads: int) -> str:
    """Make the manifest of an output whose files are written and open."""
    by_name = grouped(layout.jobs, lambda job: job.fqn)  # a DCP has a job for every few rows of a tensor
    rows = partial(_tensor_row, targets)
    digests = dict(in_ranks(rows, list(by_name.values()), threads, lambda jobs: sum(job.nbytes for job in jobs)))
    digests |= {name: digests[first] for name, first in layout.tied.items() if first in digests}
    folder = "" if layout.folder is None else f"{layout.folder.name}/"
    names = [f"{folder}{path.name}" for path, _ in layout.files]
    sizes = [size for _, size in layout.files]
    sums = in_ranks(lambda i: digest_of([(targets[i], 0, sizes[i])]), range(len(names)), threads, sizes.__getitem__)
    files = {n: {"bytes": b, "sha256": s} for n, b, s in zip(names, sizes, sums, strict=True)}
    return json.dumps({"schema": MANIFEST_SCHEMA, "files": files, "tensors": digests}, indent=1) + "\n"


def _tensor_row(targets: Sequence[int], jobs: Sequence[Job]) -> tuple[str, dict[str, Any]]:
    digest = digest_of((targets[job.file], job.offset, job.nbytes) for job in jobs)
    first = jobs[0]
    rest = first.tensor.shape[1:]
    rows = [sum(j.tensor.shape[0] for j in jobs), *rest] if len(jobs) > 1 else list(first.tensor.shape)
    return first.fqn, {"dtype": first.dtype, "shape": rows, "sha256": digest}
