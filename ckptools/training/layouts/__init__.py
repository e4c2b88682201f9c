"""The ways to lay a checkpoint out on disk: a file for each framework, or for each kind of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptools.training.layouts import accelerate, dcp, huggingface, lightning, rank_files
from ckptools.training.run import Run

SAVE: dict[str, Callable[[Run, Path], None]] = {
    "composer": rank_files.save_composer,
    "snapshot": rank_files.save_snapshot,
    "verl": rank_files.save_verl,
    "dcp": dcp.save,
    "composer-dcp": dcp.save_composer,
    "accelerate": accelerate.save,
    "lightning": lightning.save_trainer,
    "fabric": lightning.save_fabric,
    "torchtitan": dcp.save_torchtitan,
    "olmo": dcp.save_olmo,
    "huggingface": huggingface.save,
}
"""The function that writes this rank's files into a folder, by the name of the layout; a collective."""
