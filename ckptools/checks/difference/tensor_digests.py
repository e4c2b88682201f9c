"""SHA-256 of the tensors of one side: taken of its shards, or as its file of digests has it."""

from __future__ import annotations

from collections.abc import Callable

from ckptools.checks.difference.sides import HeldTensor
from ckptools.checks.difference.tensor_values import copies_differ, read_for_digest
from ckptools.contents.value_digests import once
from ckptools.errors import CkptoolsError
from ckptools.files.opening import OpenFiles
from ckptools.tensor_io.digests import tensor_digest
from ckptools.tensor_io.fetch_ahead import Part

OWN_COPIES = "ranks hold different copies of it (verify names them)"


def sha256_of(held: HeldTensor, files: OpenFiles, progress: Callable[[int, str], None]) -> str:
    """SHA-256 of a tensor's values in row-major order, or why there is none."""
    if held.tensor is None or held.problem:
        return held.sha256 or held.problem or "has no digest"
    try:
        if copies_differ(held.tensor, files):
            return OWN_COPIES
        digest = tensor_digest(once(held.tensor), files)
    except CkptoolsError as error:
        return str(error)
    progress(held.tensor.nbytes, held.name)
    return digest


def parts_of(held: HeldTensor) -> list[Part]:
    """What taking its digest reads; nothing where that is there."""
    return [] if held.tensor is None else read_for_digest(held.tensor)


def nbytes_of(held: HeldTensor) -> int:
    """Bytes that are read for its digest; 0 where that is there."""
    return 0 if held.tensor is None else held.tensor.nbytes
