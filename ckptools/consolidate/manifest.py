"""Manifests: sha256 of every tensor and every file of an output, as JSON beside it.

A tensor's digest is that of its full values in row-major, little-endian order, so it is the same for a sharded
checkpoint and for every file that was made of it with the same dtypes. A file's is that of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.consolidate.plan import Job
from ckptools.consolidate.stream import PIECE, tensor_bytes
from ckptools.consolidate.writers.layout import Layout
from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.threads import in_threads

SCHEMA = "ckptools/manifest/1"
MAX_MANIFEST = 256 << 20


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        tensors: by fqn: dtype, shape and sha256.
        files: by name: bytes and sha256.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]
    files: Mapping[str, tuple[int, str]]


def manifest_json(layout: Layout, targets: Sequence[int], threads: int) -> str:
    """The manifest of an output whose files are written and open."""
    digests = dict(in_threads(lambda jobs: _tensor_row(jobs, targets), _by_name(layout.jobs), threads))
    digests |= {name: digests[first] for name, first in layout.tied.items() if first in digests}
    names = [_file_name(layout, path) for path, _ in layout.files]
    sizes = [size for _, size in layout.files]
    sums = in_threads(lambda i: _sha256(targets[i], 0, sizes[i]), range(len(names)), threads)
    files = {n: {"bytes": b, "sha256": s} for n, b, s in zip(names, sizes, sums, strict=True)}
    return json.dumps({"schema": SCHEMA, "files": files, "tensors": digests}, indent=1) + "\n"


def _file_name(layout: Layout, path: Path) -> str:
    return path.name if layout.folder is None else f"{layout.folder.name}/{path.name}"


def _by_name(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs of each tensor in order; a DCP has one for every few rows."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.fqn, []).append(job)
    return list(found.values())


def _tensor_row(jobs: Sequence[Job], targets: Sequence[int]) -> tuple[str, dict[str, Any]]:
    digest = hashlib.sha256()
    for job in jobs:
        _update(digest, targets[job.file], job.offset, job.nbytes)
    first = jobs[0]
    rest = first.tensor.shape[1:]
    rows = [sum(j.tensor.shape[0] for j in jobs), *rest] if len(jobs) > 1 else list(first.tensor.shape)
    return first.fqn, {"dtype": first.dtype, "shape": rows, "sha256": digest.hexdigest()}


def _sha256(descriptor: int, start: int, nbytes: int) -> str:
    digest = hashlib.sha256()
    _update(digest, descriptor, start, nbytes)
    return digest.hexdigest()


def _update(digest: Any, descriptor: int, start: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        piece = os.pread(descriptor, min(PIECE, nbytes - done), start + done)
        if not piece:
            raise ReadError(None, f"the output ends at byte {start + done}; expected {nbytes - done} more")
        digest.update(piece)
        done += len(piece)


def tensor_digest(tensor: Tensor, files: OpenFiles) -> str:
    """sha256 of a tensor's values, wherever its shards lie."""
    digest = hashlib.sha256()
    for piece in tensor_bytes(tensor, tensor.dtype, files):
        digest.update(piece)
    return digest.hexdigest()


def file_digest(path: Path) -> tuple[int, str]:
    """Size and sha256 of a file.

    Raises:
        ReadError: it cannot be read.
    """
    with File(path) as file:
        return file.size, _sha256(file.fd, 0, file.size)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ReadError: it is none.
    """
    with File(path) as file:
        if file.size > MAX_MANIFEST:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_MANIFEST} are read")
        data = file.read(0, file.size)
    try:
        told = json.loads(data)
        tensors = {k: (str(v["dtype"]), tuple(v["shape"]), str(v["sha256"])) for k, v in told["tensors"].items()}
        files = {k: (int(v["bytes"]), str(v["sha256"])) for k, v in told["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReadError(path, "is no manifest of ckptools, which has tensors and files with their sha256") from error
    if told.get("schema") != SCHEMA:
        raise ReadError(path, f"is no manifest that this version reads; expected schema {SCHEMA}")
    return Manifest(tensors, files)
