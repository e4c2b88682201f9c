"""Open, check and consolidate distributed PyTorch checkpoints offline.

    import ckptools

    ck = ckptools.open("run7/ep0-ba11500-rank0.pt")   # structure only, no tensor bytes
    ck.model["blocks.0.up.weight"].load()             # reads only what it needs
    ck.consolidate("model.safetensors")
    shard = ckptools.load_shard("ep0-ba11500-rank0.pt")   # real ShardedTensors, no cluster

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

from ckptools._version import __version__ as __version__
from ckptools.checks import verify
from ckptools.consolidate import consolidate
from ckptools.errors import CkptoolsError
from ckptools.formats import open_checkpoint as open
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.values import Opaque
from ckptools.torch_engine.offline import load_shard, offline

__all__ = [
    "Checkpoint",
    "CkptoolsError",
    "Opaque",
    "Problem",
    "Shard",
    "Tensor",
    "consolidate",
    "load_shard",
    "offline",
    "open",
    "verify",
]
