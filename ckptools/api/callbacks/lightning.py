"""A callback for Lightning's Trainer that verifies each checkpoint after it was saved.

Source of the hooks: pytorch_lightning/callbacks/callback.py and trainer/connectors/checkpoint_connector.py, 2.6.
`on_save_checkpoint` is called before the checkpoint is written; when the next hook of the loop is called, it is.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    from pytorch_lightning import Callback


class LightningWatch(Callback):  # type: ignore[misc, unused-ignore]
    """Starts `RunWatch.check` on the first rank after each save, and waits for the last check at the end of the run."""

    def __init__(self, run_watch: Any) -> None:
        self.run_watch = run_watch
        self._saved = False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note that a checkpoint will be written."""
        self._saved = True

    def _check(self, trainer: Any) -> None:
        if self._saved and trainer.is_global_zero:
            self.run_watch.check()
        self._saved = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Verify a checkpoint saved after the previous batch."""
        self._check(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Verify a checkpoint saved at the end of the previous epoch."""
        self._check(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Verify the last checkpoint, and wait for the result."""
        self._check(trainer)
        if trainer.is_global_zero:
            self.run_watch.wait()
