"""What the ranks of a hollow checkpoint hold: a model in bfloat16 and AdamW's state, as FSDP2 cuts them, before step 1.

The values of every tensor with dimensions are holes. What has none, the step counts, is true: nothing was trained, so
they are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptools.training.hollow.shapes import Shapes
from ckptools.training.options import CreateOptions, run_name

DTYPE = torch.bfloat16
"""Of parameters, and of the moments: AdamW gives them the dtype of their parameter."""

MOMENTS = ("exp_avg", "exp_avg_sq")

NOTE = "holes: written by ckptools create --hollow, no values"
"""What a hollow checkpoint says of itself."""


@dataclass(frozen=True)
class HollowRun:
    """A checkpoint in the making.

    Attributes:
        options: checked already.
        shapes: of the parameters.
        world_size: ranks.
    """

    options: CreateOptions
    shapes: Shapes
    world_size: int

    def rows(self, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
        """The first row of a rank's shard and how many it has, as `torch.chunk` cuts: all alike, the last ones less."""
        each = -(-shape[0] // self.world_size)
        first = min(rank * each, shape[0])
        return first, min(each, shape[0] - first)

    def ranks_alike(self) -> list[range]:
        """Spans of ranks whose shards have the same shapes."""
        heights = {shape[0] for shape in self.shapes.values()}
        spans: list[range] = []
        last: object = None
        for rank in range(self.world_size):
            cut = {height: self.rows((height,), rank)[1] for height in heights}
            spans = [*spans[:-1], range(spans[-1].start, rank + 1)] if cut == last else [*spans, range(rank, rank + 1)]
            last = cut
        return spans

    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of AdamW with torch's own defaults, the parameters by name."""
        optimizer = torch.optim.AdamW([torch.empty(1, device="meta")])
        (group,) = optimizer.state_dict()["param_groups"]
        return [group | {"params": list(self.shapes)}]

    def facts(self) -> dict[str, Any]:
        """What is said of the run."""
        known = {"torch_version": str(torch.__version__), "world_size": self.world_size, "values": NOTE}
        return known | {"run_name": run_name(self.options, self.world_size)}


def empty(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """A tensor that nothing is written into, so that it takes no memory however large."""
    return torch.empty(shape, dtype=DTYPE, device=device)
