"""One file per way to lay a checkpoint out on disk; each provides what `Layout` lists."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ckptools.training.layouts import (
    accelerate,
    composer,
    composer_dcp,
    dcp,
    fabric,
    huggingface,
    lightning,
    olmo,
    snapshot,
    torchtitan,
    verl,
)
from ckptools.training.run import Run


class Layout(Protocol):
    """What every module in this folder provides."""

    def save(self, run: Run, folder: Path) -> None:
        """Write this rank's files into `folder`; a collective."""


BY_NAME: dict[str, Layout] = {
    "composer": composer,
    "snapshot": snapshot,
    "verl": verl,
    "dcp": dcp,
    "composer-dcp": composer_dcp,
    "accelerate": accelerate,
    "lightning": lightning,
    "fabric": fabric,
    "torchtitan": torchtitan,
    "olmo": olmo,
    "huggingface": huggingface,
}
