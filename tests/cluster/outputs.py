"""What each rank of a job runs: python -m tests.cluster.outputs SOURCE DAMAGED FOLDER

writes outputs of every kind, made of SOURCE, into FOLDER, and there what is said of it and of DAMAGED.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ckptools
from ckptools.cluster.environment import derive
from ckptools.cluster.ranks import joined
from ckptools.cluster.team import current

OUTPUTS = {
    "all.pt": {"check": True},
    "one.safetensors": {"manifest": True},
    "many.safetensors": {"max_shard_size": 5000, "dtype": "bfloat16"},
    "all.dcp": {"max_shard_size": 20_000, "check": True},
}


def write(source: Path, damaged: Path, folder: Path) -> None:
    """Write everything."""
    for name, options in OUTPUTS.items():
        ckptools.consolidate(source, folder / name, **options)
    a, b = (ckptools.open(path, all_ranks=True) for path in (source, damaged))
    b.write_digests(folder / "digests.json")
    told = [
        *ckptools.verify(b, deep=True, values=True).checks,
        *ckptools.verify(source, manifest=folder / "one.safetensors.manifest.json").checks,
        *a.stats(histogram=True).rows,
        *a.moments().rows,
        *ckptools.diff(a, b, values=True).rows,
    ]
    (folder / f"told-{current().rank}.txt").write_text("\n".join(map(repr, told)))


if __name__ == "__main__":
    with joined(derive(os.environ), "outputs", print):
        write(*map(Path, sys.argv[1:]))
    os._exit(0)
