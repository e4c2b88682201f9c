"""The ways to lay a checkpoint out on disk: a file for each framework, or for each kind of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptools.training.layouts import (
    accelerate,
    composer,
    dcp,
    huggingface,
    lightning,
    olmo,
    snapshot,
    torchtitan,
    verl,
)
from ckptools.training.run import Run

SAVE: dict[str, Callable[[Run, Path], None]] = {
    "composer": composer.save_rank_files,
    "snapshot": snapshot.save,
    "verl": verl.save,
    "dcp": dcp.save,
    "composer-dcp": composer.save_dcp,
    "accelerate": accelerate.save,
    "lightning": lightning.save_trainer,
    "fabric": lightning.save_fabric,
    "torchtitan": torchtitan.save,
    "olmo": olmo.save,
    "huggingface": huggingface.save,
}
"""The function that writes this rank's files into a folder, by the name of the layout; a collective."""
