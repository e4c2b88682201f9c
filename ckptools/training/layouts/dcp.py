"""torch.distributed.checkpoint: `.metadata` and one `__{rank}_0.distcp` per rank that has something to write."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptools.training.layouts.place import place_folder
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Save `{model, optim, scheduler, step}`, the optimizer under fqns.

    Where ranks have parameters of their own, each has other param groups too, and of one key DCP keeps one rank's
    value. Flat, every parameter has its hyperparameters under a key of its own: `optim.param_groups.<fqn>.lr`.
    """
    flat = StateDictOptions(flatten_optimizer_state_dict=run.strategy.in_parts)
    model, optim = get_state_dict(run.model, run.optimizer, options=flat)
    content = {"model": model, "optim": optim, "scheduler": run.scheduler.state_dict(), "step": run.step}
    dcp_save(content, checkpoint_id=place_folder(run, folder))
