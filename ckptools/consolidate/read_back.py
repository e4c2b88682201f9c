"""The output, read back from the disk by its format's own library before it gets its name, and compared with shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.consolidate.writers.layout import Layout, ReadBack, ReadTensor
from ckptools.errors import CkptoolsError, WriteError
from ckptools.files.opening import OpenFiles
from ckptools.tensor_io.progress import Progress
from ckptools.tensor_io.shared_work import in_ranks
from ckptools.tensor_io.stream import tensor_bytes
from ckptools.text import plural

AT_ONCE = 512 << 20
"""Bytes of tensors after which the output is opened anew: what a library has mapped stays in memory until then."""


def compare(
    layout: Layout, targets: Sequence[int], paths: Sequence[Path], files: OpenFiles, threads: int, progress: Progress
) -> str:
    """Compare every tensor of the output with the shards that it was made of, byte for byte; return what was done.

    Memory is bounded by `AT_ONCE` and the largest tensor.

    Args:
        layout: what was written.
        targets: descriptors of the output files.
        paths: where they are now.
        files: where source files are opened.
        threads: how many tensors at once.
        progress: called with bytes compared and the tensor they belong to.

    Raises:
        WriteError: the library does not read it, or a tensor differs.
        ReadError: a source cannot be read any more.
    """
    for target in targets:
        _forget(target)
    done, by, names = 0, "", set()
    while True:
        try:
            with layout.read_back(paths) as found:
                by, total = found.by, len(found.tensors)
                some = _some(found.tensors[done:])
                names |= {tensor.fqn for tensor in some}
                in_ranks(partial(_compare, found, files, progress), some, threads, _weight)
        except MemoryError:
            raise
        except Exception as error:  # whatever a library says of a file that it does not read
            if isinstance(error, CkptoolsError) and error.path not in paths:
                raise
            said = error.reason if isinstance(error, CkptoolsError) and error.path == paths[0] else f"{error}"
            cause = said.partition("\n")[0] or type(error).__name__
            raise WriteError(layout.files[0][0], f"cannot be read back: {cause:.200}; nothing was kept") from error
        done += len(some)
        if done == total:
            return f"{plural(len(names), 'tensor')} read back by {by}, all equal"


def _some(tensors: Sequence[ReadTensor]) -> Sequence[ReadTensor]:
    """The first tensors, as many as are looked at before the output is opened anew."""
    nbytes = 0
    for count, tensor in enumerate(tensors):
        nbytes += tensor.tensor.nbytes
        if nbytes >= AT_ONCE:
            return tensors[: count + 1]
    return tensors


def _weight(tensor: ReadTensor) -> int:
    return tensor.tensor.nbytes


def _compare(found: ReadBack, files: OpenFiles, progress: Progress, expected: ReadTensor) -> None:
    import numpy as np

    tensor = expected.read()
    told = (f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape))
    if told != (expected.dtype, expected.tensor.shape):
        raise _wrong(expected, found, f"as {told[0]} {list(told[1])}")
    data, at = _bytes(tensor), 0
    for piece in tensor_bytes(expected.tensor, expected.dtype, files):
        if not np.array_equal(data[at : at + len(piece)], np.frombuffer(piece, "u1")):
            raise _wrong(expected, found, f"with other values from byte {at} on")
        at += len(piece)
        progress(len(piece), expected.fqn)


def _bytes(tensor: Any) -> Any:
    """The bytes of a torch tensor, as a numpy array that shares them."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _wrong(expected: ReadTensor, found: ReadBack, how: str) -> CkptoolsError:
    text = f"{expected.fqn}: read back by {found.by} {how}; it is not what was written, nothing was kept"
    return WriteError(None, text)


def _forget(descriptor: int) -> None:
    """Bring a file to the disk and out of memory, so that reading it asks the disk."""
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
