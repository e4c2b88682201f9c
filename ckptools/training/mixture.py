"""A mixture of experts: a router sends each token to one of several perceptrons, and each of them learns from its own.

The matrices of all experts are stacked in one parameter with a dimension for the expert, as torchtitan has them, so
that a checkpoint has the same names on any number of ranks, and experts on different ranks are shards of one DTensor.
(Megatron and DeepSpeed give every expert a name of its own, which only its rank saves.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ckptools.training.options import ModelSize


class Experts(nn.Module):
    """Perceptrons of one size: `up` is (experts, 4 × width + 1, width), `down` (experts, width, 4 × width + 1)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        hidden = 4 * size.width + 1
        self.up = nn.Parameter(uniform(size.experts, hidden, size.width))
        self.down = nn.Parameter(uniform(size.experts, size.width, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Take tokens (n, width), those of the first expert first, through their experts; returns the same shape.

        Args:
            tokens: features, sorted by expert.
            counts: int64 (experts), how many tokens each of the experts here has.
        """
        up, down = (param.to_local() if isinstance(param, DTensor) else param for param in (self.up, self.down))
        parts = enumerate(tokens.split(counts.tolist()))
        made = [functional.linear(functional.gelu(functional.linear(part, up[e])), down[e]) for e, part in parts]
        return torch.cat(made)


def uniform(experts: int, rows: int, columns: int) -> Tensor:
    """Draw matrices (experts, rows, columns) as `nn.Linear` does: uniform, within one over the root of its inputs."""
    return (torch.rand(experts, rows, columns) * 2 - 1) / math.sqrt(columns)


def run_here(experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
    """Take tokens through experts that are all on this rank; `Experts.forward` says what is what."""
    made: Tensor = experts(tokens, counts)
    return made


class MixtureOfExperts(nn.Module):
    """A router and its experts; one expert per token, and no noise, so that a token's way follows from the weights.

    Attributes:
        run: takes sorted tokens through the experts; where those are on other ranks, what sends the tokens there.
    """

    run: Callable[[Experts, Tensor, Tensor], Tensor]

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = Experts(size)
        self.run = run_here

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape.

        An expert's answer is scaled by how sure the router was, which is how the router learns.
        """
        tokens = x.flatten(0, 1)
        sure, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.router.out_features)
        made = self.run(self.experts, tokens[order], counts)
        out: Tensor = (made[order.argsort()] * sure[:, None]).view_as(x)
        return out
