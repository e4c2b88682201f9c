"""Digests of a plan: two that are equal read the same bytes and write them to the same places."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptools._version import __version__
from ckptools.cluster.team import current
from ckptools.consolidate.plan import Job
from ckptools.consolidate.writers.layout import Layout
from ckptools.errors import RefusedError, original_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Shard


def plan_digests(checkpoint: Checkpoint, layout: Layout, texts: Mapping[Path, str]) -> dict[str, str]:
    """SHA-256 of each thing that a plan follows from, by its name: ckptools itself, the source's files, the plan."""
    files = ((str(f.path), f.status, f.nbytes, f.modified) for f in checkpoint.files)
    written = (*((str(path), size) for path, size in layout.files), *sorted((str(p), t) for p, t in texts.items()))
    return {
        "ckptools": __version__,
        "state of the source's files": _digest(files),
        "plan": _digest((*written, *map(_job, layout.jobs))),
    }


def _job(job: Job) -> tuple[object, ...]:
    tensor = job.tensor
    place = (job.fqn, job.dtype, job.file, job.offset)
    return (*place, tensor.dtype, tensor.shape, tensor.fill, tuple(map(_shard, tensor.shards)))


def _shard(shard: Shard) -> tuple[object, ...]:
    known = [(str(original_of(source.path)), *source[1:]) for source in shard.sources]
    coding = None if shard.encoded is None else (shard.encoded.coding, shard.encoded.box)
    return shard.box.offsets, shard.box.sizes, known, coding


def _digest(things: Iterable[object]) -> str:
    found = hashlib.sha256()
    for thing in things:
        found.update(f"{thing!r}\n".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_same_plan(own: Mapping[str, str]) -> None:
    """Refuse to go on where ranks have planned different things.

    Raises:
        RefusedError: one has another ckptools, other files, or another plan than rank 0.
    """
    team = current()
    every = team.gather(dict(own))
    for rank, other in enumerate(every):
        for thing, digest in every[0].items():
            if other[thing] != digest:
                text = f"{team.name(rank)} has another {thing} than rank 0; do all nodes see the same, unchanged files?"
                raise RefusedError(None, f"{text} Nothing was written")
