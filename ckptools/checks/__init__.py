"""Is a checkpoint whole, unharmed and coherent? One file per subject; nothing is written and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.model.verification import Verification


def verify(checkpoint: Checkpoint | str | Path, **options: Any) -> Verification:
    """Check whether a checkpoint is whole, unharmed and coherent; options as in `ckptools.checks.verifying.verify`."""
    from ckptools.checks.verifying import verify as check

    return check(checkpoint, **options)
