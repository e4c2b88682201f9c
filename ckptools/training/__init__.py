"""Make a distributed checkpoint by a real training with torch: DDP, FSDP, tensor, pipeline or expert parallel.

    from ckptools.training import CreateOptions, create
    created = create(CreateOptions(out=Path("run"), strategy="fsdp1", world_size=4))

`create` starts the ranks itself through torch's elastic launcher; inside an outer `torchrun` the calling
process is one of the ranks already and trains as such. Importing this package does not import torch.
"""

from __future__ import annotations

from ckptools.training.options import CreateOptions, ModelSize
from ckptools.training.output import Created


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Train, save a checkpoint, and damage it if `options.damage` says so; see `ckptools.training.launch.create`."""
    from ckptools.training import launch

    return launch.create(options, verbose)


__all__ = ["create", "CreateOptions", "Created", "ModelSize"]
