"""A callback for transformers' Trainer that verifies each checkpoint after it was saved.

Source of the events: transformers/trainer_callback.py, 5.x; `on_save` comes after the checkpoint was written.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class TransformersWatch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Starts `RunWatch.check` on the first rank after each save, and waits for the last check at the end of the run."""

    def __init__(self, run_watch: Any) -> None:
        self.run_watch = run_watch

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Verify the saved checkpoint."""
        if state.is_world_process_zero:
            self.run_watch.check()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Verify the last checkpoint, and wait for the result."""
        if state.is_world_process_zero:
            self.run_watch.check()
            self.run_watch.wait()
