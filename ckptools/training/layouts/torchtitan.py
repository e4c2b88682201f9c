"""torchtitan's DCP folder: `step-{batch}/`, the model's fqns at the top, everything else under a name of its own.

`optimizer` is flat: `optimizer.state.<fqn>.<name>` and, for every parameter, `optimizer.param_groups.<fqn>.<option>`,
so that pipeline stages do not collide in group 0. `lr_scheduler` has `last_epoch` alone, `train_state` has step and
tokens, `dataloader.dp_rank_{n}` is pickled by torchtitan itself; its bytes are ours, the place in our own data.
torchtitan keeps no random states.
Source: torchtitan 0.3.0, components/checkpointer/dcp.py, components/optimizer, components/dataloader.py, trainer.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from ckptools.training.layouts.dcp import write
from ckptools.training.layouts.place import place_folder
from ckptools.training.run import Run


def save(run: Run, folder: Path) -> None:
    """Write the folder; a rank's data loader is that of its share of the data."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    share, shares = run.strategy.data_share(run.options)
    content: dict[str, Any] = {
        **get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=flat),
        "lr_scheduler": {"last_epoch": run.scheduler.last_epoch},
        "train_state": {"step": run.step, "ntokens_seen": run.samples * run.options.size.context},
        "dataloader": {f"dp_rank_{share}": pickle.dumps(position(run)), "world_size": shares},
    }
    write(content, place_folder(run, folder), run.options.files, DefaultSavePlanner())


def position(run: Run) -> dict[str, int]:
    """Say where in its share of the data a rank is."""
    return {"epoch": run.epoch, "sample_idx": run.batch_in_epoch * run.options.batch}
