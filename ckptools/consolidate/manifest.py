"""Manifests: SHA-256 of every tensor and every file of an output, as JSON beside it; `verify --manifest` compares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ckptools.consolidate.plan import Job
from ckptools.consolidate.writers.layout import Layout
from ckptools.tensor_io.digests import MANIFEST_SCHEMA, digest_of
from ckptools.tensor_io.shared_work import in_ranks


def manifest_json(layout: Layout, targets: Sequence[int], threads: int) -> str:
    """The manifest of an output whose files are written and open."""
    digests = dict(in_ranks(lambda jobs: _tensor_row(jobs, targets), _by_name(layout.jobs), threads, _nbytes))
    digests |= {name: digests[first] for name, first in layout.tied.items() if first in digests}
    names = [_file_name(layout, path) for path, _ in layout.files]
    sizes = [size for _, size in layout.files]
    sums = in_ranks(lambda i: digest_of([(targets[i], 0, sizes[i])]), range(len(names)), threads, sizes.__getitem__)
    files = {n: {"bytes": b, "sha256": s} for n, b, s in zip(names, sizes, sums, strict=True)}
    return json.dumps({"schema": MANIFEST_SCHEMA, "files": files, "tensors": digests}, indent=1) + "\n"


def _file_name(layout: Layout, path: Path) -> str:
    return path.name if layout.folder is None else f"{layout.folder.name}/{path.name}"


def _by_name(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs of each tensor in order; a DCP has one for every few rows."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.fqn, []).append(job)
    return list(found.values())


def _nbytes(jobs: Iterable[Job]) -> int:
    return sum(job.nbytes for job in jobs)


def _tensor_row(jobs: Sequence[Job], targets: Sequence[int]) -> tuple[str, dict[str, Any]]:
    digest = digest_of((targets[job.file], job.offset, job.nbytes) for job in jobs)
    first = jobs[0]
    rest = first.tensor.shape[1:]
    rows = [sum(j.tensor.shape[0] for j in jobs), *rest] if len(jobs) > 1 else list(first.tensor.shape)
    return first.fqn, {"dtype": first.dtype, "shape": rows, "sha256": digest}
