"""SHA-256 of tensors and of files, as manifests list them.

A tensor's digest is that of its full values in row-major, little-endian order, so it is the same for a sharded
checkpoint and for every file that was made of it with the same dtypes. A file's is that of its bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.records import read_pieces
from ckptools.tensor_io.stream import PIECE, tensor_bytes

MANIFEST_SCHEMA = "ckptools/manifest/1"
"""What a manifest says of itself."""


def tensor_digest(tensor: Tensor, files: OpenFiles) -> str:
    """SHA-256 of a tensor's values, wherever its shards lie.

    Raises:
        ReadError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for piece in tensor_bytes(tensor, tensor.dtype, files):
        digest.update(piece)
    return digest.hexdigest()


def file_digest(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file.

    Raises:
        ReadError: it cannot be read.
    """
    with File(path) as file:
        digest = hashlib.sha256()
        for piece in read_pieces(file, 0, file.size, memoryview(bytearray(PIECE))):
            digest.update(piece)
        return file.size, digest.hexdigest()


def digest_of(spans: Iterable[tuple[int, int, int]]) -> str:
    """SHA-256 of bytes of open files, one span behind the other.

    Args:
        spans: of each its file's descriptor, its first byte, and how many bytes it has.

    Raises:
        ReadError: a file ends before its span does.
    """
    digest = hashlib.sha256()
    for descriptor, start, nbytes in spans:
        done = 0
        while done < nbytes:
            piece = os.pread(descriptor, min(PIECE, nbytes - done), start + done)
            if not piece:
                raise ReadError(None, f"the output ends at byte {start + done}; expected {nbytes - done} more")
            digest.update(piece)
            done += len(piece)
    return digest.hexdigest()
