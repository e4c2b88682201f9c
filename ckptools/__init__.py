"""Open, check and consolidate distributed PyTorch checkpoints offline."""

from __future__ import annotations

__version__ = "0.1.0"
