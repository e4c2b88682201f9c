"""Open, check and consolidate distributed PyTorch checkpoints offline.

    import ckptools

    ck = ckptools.open("run7/ep0-ba11500-rank0.pt")   # structure only, no tensor bytes
    ck.model["blocks.0.up.weight"].load()             # reads only what it needs
    ck.consolidate("model.safetensors")
    shard = ckptools.load_shard("ep0-ba11500-rank0.pt")   # real ShardedTensors, no cluster

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# First: importing one of these modules later would set an attribute that hides the function of the same name.
import ckptools.consolidate
import ckptools.diff
import ckptools.doctor
import ckptools.match
import ckptools.report
import ckptools.stats
import ckptools.verify
import ckptools.watch
from ckptools._version import __version__ as __version__

if TYPE_CHECKING:
    from ckptools.api import (
        Checkpoint,
        CkptoolsError,
        Opaque,
        Problem,
        Shard,
        Tensor,
        checkpoints_in,
        consolidate,
        diff,
        doctor,
        load_shard,
        match,
        offline,
        open,
        report,
        stats,
        verify,
        watch,
    )
    from ckptools.loading.load import Loaded, StorageReader, load, load_state_dict
else:
    del ckptools, consolidate, diff, doctor, match, report, stats, verify, watch

__all__ = [
    "Checkpoint",
    "CkptoolsError",
    "Loaded",
    "Opaque",
    "Problem",
    "Shard",
    "StorageReader",
    "Tensor",
    "checkpoints_in",
    "consolidate",
    "diff",
    "doctor",
    "load",
    "load_shard",
    "load_state_dict",
    "match",
    "offline",
    "open",
    "report",
    "stats",
    "verify",
    "watch",
]


WITH_TORCH = ("Loaded", "StorageReader", "load", "load_state_dict")
"""Public names whose module imports torch; all others are in `ckptools.api`."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a command needs few of them, and starts in half the time."""
    if name not in __all__:
        raise AttributeError(f"module 'ckptools' has no attribute {name!r}")
    from ckptools import api

    if name in WITH_TORCH:
        from ckptools.loading import load as loading

        return globals().setdefault(name, getattr(loading, name))
    return globals().setdefault(name, getattr(api, name))


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
