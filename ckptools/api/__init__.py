"""What users hold: a checkpoint with its methods, lazy tensors that load, and the functions that open and write them.

Everything below returns data; this room gives it methods. It imports them where a method is called,
so that importing ckptools stays cheap.
"""

from __future__ import annotations

from ckptools.api.checkpoint import Checkpoint
from ckptools.api.diagnosis import doctor
from ckptools.api.notebook import show_in_notebooks
from ckptools.api.opening import checkpoints_in, consolidate, diff, open, report, verify
from ckptools.api.tensor import Tensor
from ckptools.errors import CkptoolsError
from ckptools.model.problems import Problem
from ckptools.model.tensor import Shard
from ckptools.model.values import Opaque
from ckptools.torch_engine.offline import load_shard, offline

show_in_notebooks()

__all__ = [
    "Checkpoint",
    "CkptoolsError",
    "Opaque",
    "Problem",
    "Shard",
    "Tensor",
    "checkpoints_in",
    "consolidate",
    "diff",
    "doctor",
    "load_shard",
    "offline",
    "open",
    "report",
    "verify",
]
