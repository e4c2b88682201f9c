"""`torchrun -m tests.loading.watched SCRIPT OUT [--stop]`: run a script, and keep what its `ckptools.load` loads.

After each `load`, rank 0 writes the whole model and its optimizer's whole state, as torch gathers them from all ranks.
With `--stop` the script ends there.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import ckptools

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
load = ckptools.load


def load_and_keep(model: Any, path: Any, optimizer: Any = None, **options: Any) -> Any:
    done = load(model, path, optimizer, **options)
    # The module and the optimizer that train, not what Fabric and Accelerate wrap around them.
    module, own = getattr(model, "_forward_module", model), getattr(optimizer, "optimizer", optimizer)
    kept: dict[str, Any] = {"model": get_model_state_dict(module, options=WHOLE), "step": done.step}
    if optimizer is not None:
        kept["optimizer"] = get_optimizer_state_dict(module, own, options=WHOLE)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(kept, sys.argv[2])
    if "--stop" in sys.argv:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        sys.exit()
    return done


if __name__ == "__main__":
    ckptools.load = load_and_keep
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path(sys.argv[1], run_name="__main__")
