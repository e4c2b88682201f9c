"""The Python interface: a checkpoint with its methods, lazy tensors that load, and functions that open and write them.

Everything below returns data; this room gives it methods. It imports them where a method is called,
so that importing ckptools stays cheap.
"""

from __future__ import annotations

from typing import Any

from ckptools.api.checkpoint import Checkpoint
from ckptools.api.functions import consolidate, diff, doctor, report, verify
from ckptools.api.opening import checkpoints_in, open
from ckptools.api.tensor import Tensor
from ckptools.errors import CkptoolsError
from ckptools.model.problems import Problem
from ckptools.model.records import show_with
from ckptools.model.tensor import Shard
from ckptools.model.values import Opaque
from ckptools.torch_engine.offline import load_shard, offline


def _html_of(value: Any) -> str:
    from ckptools.api.notebook_html import html_of

    return html_of(value)


def _markdown_of(rows: Any) -> str:
    from ckptools.display.row_table import rows_text

    return rows_text(rows, "github")


show_with(_html_of, _markdown_of)

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
