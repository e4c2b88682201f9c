"""A small transformer that holds every kind of tensor that makes a checkpoint awkward.

| what | where |
|---|---|
| tied weight | `head.weight` is `emb.weight` |
| frozen parameter | `position`, sinusoidal |
| fewer rows than ranks | `start`, shape (1, width); `blocks.N.attn.head_scale`, shape (heads,) |
| integer buffer | `positions`, int64 (context,) |
| 0-d buffers | `logit_scale`, float32; `seen`, int64, counts the tokens of one rank |
| odd sizes | vocabulary, width and 4 × width + 1 |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ckptools.training.options import ModelSize

# Second names of parameters, and what they are tied to.
TIED = {"head.weight": "emb.weight"}


class Attention(nn.Module):
    """Causal self-attention with one learned scale per head."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.head_scale = nn.Parameter(torch.ones(size.heads))
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scaled = mixed * self.head_scale[:, None, None]
        out: Tensor = self.out(scaled.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, or experts, each behind a layer norm; the unit that FSDP wraps."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        hidden = 4 * size.width + 1
        self.norm1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        if size.experts:
            self.moe = MixtureOfExperts(size)
        else:
            self.up = nn.Linear(size.width, hidden)
            self.down = nn.Linear(hidden, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        x = x + self.dropout(self.attn(self.norm1(x)))
        normed = self.norm2(x)
        made = self.moe(normed) if hasattr(self, "moe") else self.down(functional.gelu(self.up(normed)))
        out: Tensor = x + self.dropout(made)
        return out


class Transformer(nn.Module):
    """A language model; call it with tokens to get logits.

    Blocks are keyed by their number as text, so that a stage of a pipeline that has only some of them calls them as
    the whole model does. What a stage has not is None: `position` at all but the first, `head` at all but the last.
    """

    position: nn.Parameter | None
    head: nn.Linear | None
    positions: Tensor
    logit_scale: Tensor
    seen: Tensor

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.emb = nn.Embedding(size.vocab, size.width)
        self.start = nn.Parameter(torch.zeros(1, size.width))
        self.position = nn.Parameter(sinusoids(size.context, size.width), requires_grad=False)
        self.blocks = nn.ModuleDict({str(number): Block(size) for number in range(size.layers)})
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("positions", torch.arange(size.context))
        # Embeddings start at unit variance; tied to the head, they need this to give logits near one.
        self.register_buffer("logit_scale", torch.tensor(size.width**-0.5))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """Map int64 tokens (batch, context) to logits (batch, context, vocab).

        Between stages of a pipeline go features (batch, context, width).
        """
        if self.position is not None:
            x = self.embed(x, self.position)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x)) * self.logit_scale

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Map int64 tokens (batch, context) to features (batch, context, width)."""
        self.seen += tokens.numel()
        x = self.emb(tokens) + position[self.positions]
        return torch.cat([x[:, :1] + self.start, x[:, 1:]], 1)


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position vectors, float32 (length, width), as in "Attention is all you need", section 3.5."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].contiguous()


# -- experts ----------------------------------------------------------------------------------------------------------


class MixtureOfExperts(nn.Module):
    """A router and its experts; one expert per token, and no noise, so that a token's way follows from the weights.

    The router sends each token to one of several perceptrons, and each of them learns from its own. The matrices of all
    experts are stacked in one parameter with a dimension for the expert, as torchtitan has them, so that a checkpoint
    has the same names on any number of ranks, and experts on different ranks are shards of one DTensor. (Megatron and
    DeepSpeed give every expert a name of its own, which only its rank saves.)

    Attributes:
        run: takes sorted tokens through the experts; where those are on other ranks, what sends the tokens there.
    """

    run: Callable[[Experts, Tensor, Tensor], Tensor]

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = Experts(size)
        self.run = Experts.__call__

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


class Experts(nn.Module):
    """Perceptrons of one size: `up` is (experts, 4 × width + 1, width), `down` (experts, width, 4 × width + 1)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        hidden = 4 * size.width + 1
        self.up = nn.Parameter(uniform(size.experts, hidden, size.width))
        self.down = nn.Parameter(uniform(size.experts, size.width, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Take tokens (n, width), those of the first expert first, through their experts; returns the same shape.

        `counts`, int64 (experts), are how many tokens each of the experts here has.
        """
        up, down = (param.to_local() if isinstance(param, DTensor) else param for param in (self.up, self.down))
        parts = enumerate(tokens.split(counts.tolist()))
        made = [functional.linear(functional.gelu(functional.linear(part, up[e])), down[e]) for e, part in parts]
        return torch.cat(made)


def uniform(experts: int, rows: int, columns: int) -> Tensor:
    """Draw matrices (experts, rows, columns) as `nn.Linear` does: uniform, within one over the root of its inputs."""
    return (torch.rand(experts, rows, columns) * 2 - 1) / math.sqrt(columns)
