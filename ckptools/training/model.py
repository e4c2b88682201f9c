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
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.optim.optimizer import ParamsT
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckptools.training.options import CreateOptions, ModelSize

# Second names of tied parameters, with the first name of each.
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

    Blocks are keyed by their number as text, so that a pipeline stage with only some of the blocks names them as the
    whole model does. A part that a stage lacks is None: `position` at all stages but the first, `head` at all but the
    last.
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

        In a pipeline, each stage passes features (batch, context, width) to the next.
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


# -- experts -----------------------------------------------------------------------------------------------------------


class MixtureOfExperts(nn.Module):
    """A router and its experts; one expert per token and no noise, so the weights alone decide on a token's expert.

    The router sends each token to one of several perceptrons, and each of them learns from its own. The matrices of all
    experts are stacked in one parameter with a dimension for the expert, as torchtitan has them, so that a checkpoint
    has the same names on any number of ranks, and experts on different ranks are shards of one DTensor. (Megatron and
    DeepSpeed give every expert a name of its own, which only its rank saves.)

    Attributes:
        run: passes sorted tokens through the experts; if experts are on other ranks, sends the tokens there and back.
    """

    run: Callable[[Experts, Tensor, Tensor], Tensor]

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = Experts(size)
        self.run = Experts.__call__

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape.

        An expert's output is scaled by the router's probability, from which the router learns.
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
        """Pass tokens (n, width), sorted by expert, through their experts; returns the same shape.

        `counts`, int64 (experts), has the number of tokens of each expert on this rank.
        """
        up, down = (param.to_local() if isinstance(param, DTensor) else param for param in (self.up, self.down))
        parts = enumerate(tokens.split(counts.tolist()))
        made = [functional.linear(functional.gelu(functional.linear(part, up[e])), down[e]) for e, part in parts]
        return torch.cat(made)


def uniform(experts: int, rows: int, columns: int) -> Tensor:
    """Draw matrices (experts, rows, columns) as `nn.Linear` does: uniform, within ± 1 / sqrt(columns)."""
    return (torch.rand(experts, rows, columns) * 2 - 1) / math.sqrt(columns)


# -- synthetic text that a model can learn within a few steps ----------------------------------------------------------
# A few common words follow one another by a fixed rule. While training, one word in ten is replaced by a random word:
# NumPy draws the place, Python the word, so that a run depends on every random state that a checkpoint keeps.


SEQUENCES = 1024
COMMON_WORDS = 16
NOISE = 0.1


def sequences(vocab: int, context: int, seed: int) -> Tensor:
    """Make the training set: int64 tokens (SEQUENCES, context + 1), as the last one needs a target too."""
    generator = torch.Generator().manual_seed(seed)
    common = min(COMMON_WORDS, vocab)
    words = torch.randint(common, (SEQUENCES, 1), generator=generator)
    return (words + 5 * torch.arange(context + 1)) % common


def with_noise(tokens: Tensor, vocab: int) -> Tensor:
    """Replace one token in ten by a random one; draws from NumPy's and Python's global generators."""
    noisy = torch.from_numpy(np.random.random(tokens.shape) < NOISE)
    tokens = tokens.clone()
    tokens[noisy] = torch.tensor([random.randrange(vocab) for _ in range(int(noisy.sum()))], dtype=tokens.dtype)
    return tokens


@dataclass(frozen=True)
class Position:
    """The progress of a run in its data.

    Attributes:
        epoch: whole passes over the training set.
        samples: sequences of the next pass that all ranks together have seen.
        exact: False if only the epoch is known.
    """

    epoch: int = 0
    samples: int = 0
    exact: bool = True

    def aligned(self, shares: int) -> Position:
        """Go back, by a few samples at most, to a position at which all `shares` have seen equally many samples."""
        samples = self.samples // shares * shares
        return Position(self.epoch, samples) if samples < SEQUENCES else Position(self.epoch + 1, 0)

    def after(self, samples: int, in_epoch: int) -> Position:
        """Move on by the samples that all ranks together have seen; a pass ends after `in_epoch` samples."""
        samples += self.samples
        return Position(self.epoch, samples) if samples < in_epoch else Position(self.epoch + 1, 0)


def position_after(steps: int, shares: int, batch: int) -> Position:
    """The position after a number of steps from the start, each with `batch` samples of every share."""
    per_share = -(-SEQUENCES // shares)
    epoch, batch_in_epoch = divmod(steps, -(-per_share // batch))
    return Position(epoch, batch_in_epoch * batch * shares)


class ShareSampler(DistributedSampler[int]):
    """A DistributedSampler that can begin in the middle of an epoch, as a resumed run must."""

    begin = 0

    def go_to(self, position: Position) -> None:
        """Shuffle for this epoch, and skip the samples of it that this share has seen."""
        self.set_epoch(position.epoch)
        self.begin = position.samples // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.begin, None)


Loader = DataLoader[tuple[Tensor, ...]]


def make_loader(options: CreateOptions, share: int, shares: int) -> Loader:
    """Make one of `shares` shares of the training set; every epoch shuffles anew, from the seed."""
    dataset = TensorDataset(sequences(options.size.vocab, options.size.context, options.seed))
    sampler = ShareSampler(dataset, shares, share, seed=options.seed)
    # Whenever a loader is iterated it draws a seed for its workers; it must not do so from the generator that a
    # checkpoint keeps.
    return DataLoader(dataset, batch_size=options.batch, sampler=sampler, generator=torch.Generator())


def batches(loader: Loader, position: Position) -> Iterator[tuple[Tensor, Position]]:
    """Yield int64 tokens (batch, context + 1) and the position after them; does not end."""
    sampler = cast("ShareSampler", loader.sampler)
    while True:
        sampler.go_to(position)
        for (tokens,) in loader:
            position = position.after(len(tokens) * sampler.num_replicas, sampler.total_size)
            yield tokens, position


# -- optimizers in two parameter groups, and learning rate schedules ---------------------------------------------------


LEARNING_RATE = 3e-3
WARMUP = 10
HORIZON = 100

# DecoupledAdamW does not multiply the decay by the learning rate, so the same pull needs a smaller number.
WEIGHT_DECAY = {"AdamW": 0.1, "DecoupledAdamW": 0.1 * LEARNING_RATE}

# FSDP1's name for a flat parameter, which the optimizer sees without `use_orig_params`.
FLAT_PARAMETER = "_flat_param"


class DecoupledAdamW(torch.optim.Optimizer):
    """Adam whose weight decay follows the schedule but not the size of the learning rate.

    Each step multiplies a parameter by `1 - weight_decay * lr / initial_lr`, where AdamW takes
    `1 - weight_decay * lr`. This is what Loshchilov and Hutter call the schedule multiplier η_t
    ("Decoupled Weight Decay Regularization", algorithm 2), and what Composer's optimizer of the same name does.

    State per parameter: `step` (float32, 0-d), `exp_avg` and `exp_avg_sq` (shaped as the parameter).
    Groups carry `lr`, `betas`, `eps`, `weight_decay`, `initial_lr`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = state["step"].item()
        param.mul_(1 - group["weight_decay"] * group["lr"] / group["initial_lr"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        spread = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**steps) + group["eps"]
        param.addcdiv_(state["exp_avg"], spread, value=-group["lr"] / (1 - beta1**steps))


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Name the matrices, which get weight decay; biases, norms and scales do not.

    Call this before FSDP wraps the model: FSDP1 flattens a rank's parameters, and then all of them look like vectors.
    """
    return frozenset(name for name, param in model.named_parameters() if param.ndim > 1)


def make_optimizer(
    kind: str, named: Iterable[tuple[str, nn.Parameter]], decayed: frozenset[str]
) -> torch.optim.Optimizer:
    """Make an optimizer with a group of parameters that decay and one of all others; frozen parameters are left out.

    `named` are parameters of the wrapped model under their plain fqns. A flat parameter of FSDP1 cannot be split
    between two groups, so it decays as a whole.
    """
    trained = [(name, param) for name, param in named if param.requires_grad]
    decayed |= {name for name, _ in trained if name.endswith(FLAT_PARAMETER)}
    groups: list[dict[str, Any]] = [
        {"params": [param for name, param in trained if name in decayed], "weight_decay": WEIGHT_DECAY[kind]},
        {"params": [param for name, param in trained if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if kind == "DecoupledAdamW":
        return DecoupledAdamW(groups, lr=LEARNING_RATE)
    # One kernel per parameter: fused and foreach kernels do not take every kind of DTensor.
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=False)


def trained_names(kind: str, model: nn.Module) -> list[str]:
    """List the parameters that an optimizer of a whole model trains, by their number in its state dict."""
    names = {param: name for name, param in model.named_parameters()}
    groups = make_optimizer(kind, model.named_parameters(), decayed_names(model)).param_groups
    return [names[param] for group in groups for param in group["params"]]


def make_scheduler(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Make a schedule that moves once per step: half a cosine over `HORIZON` steps or more, or a warm-up."""
    if kind == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(HORIZON, steps))
    return LambdaLR(optimizer, lr_lambda=lambda step: min(1.0, (step + 1) / WARMUP))


# -- the random number generators that a run draws from: Python's, NumPy's and torch's, on every rank its own ----------


RandomState = dict[str, Any]


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_random_states(device: torch.device) -> RandomState:
    """Take the state of this rank's generators: `{"python": tuple, "numpy": tuple, "torch": uint8 (5056,)}`.

    On a GPU also `cuda`, the state of that device.
    """
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def gather_random_states(device: torch.device) -> list[RandomState]:
    """Collect the states of every rank and its device on every rank, in the order of the ranks; a collective."""
    everyone: list[RandomState] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, capture_random_states(device))
    return everyone


def find_random_states(tree: Any) -> RandomState:
    """Find one rank's random states in nested dicts, lists and tuples by their form, whatever their keys are."""
    kind = _kind_of(tree)
    if kind:
        return {kind: tree}
    found: RandomState = {}
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        found = find_random_states(child) | found
    return found


def _kind_of(value: Any) -> str:
    """The generator whose state a value is: `python`, `numpy`, `torch` or `cuda`; empty for any other value.

    Python's state is `(3, 624 numbers and a position, None or a number)`, NumPy's `("MT19937", 624 numbers, a position,
    ...)`, torch's a uint8 tensor of 5056 elements on the CPU and 16 on a GPU.
    """
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple) and len(value[1]) == 625:
        return "python"
    if isinstance(value, tuple) and len(value) == 5 and value[0] == "MT19937":
        return "numpy"
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        return {5056: "torch", 16: "cuda"}.get(value.numel(), "")
    return ""


def first_of_shares(states: list[RandomState]) -> list[int]:
    """List the first rank of each share of the data, found by comparing the random states of all ranks.

    Ranks that hold pieces of one copy of the model see the same data, and draw the same noise for it from Python's and
    NumPy's generators. torch's generators may differ: a pipeline stage draws dropout for its own blocks only.
    """
    of_noise = [{kind: value for kind, value in state.items() if kind in ("python", "numpy")} for state in states]
    prints = [random_fingerprint(noise or state) for noise, state in zip(of_noise, states, strict=True)]
    return [rank for rank, each in enumerate(prints) if prints.index(each) == rank]


def own_random_states(
    states: list[RandomState], share: int, shares: int, rank: int | None = None
) -> RandomState | None:
    """Choose the saved random state that a rank goes on with: the state of its share; None for a new share.

    `rank` is given if ranks of a share draw different numbers and as many ranks saved: then, if the number of shares is
    unchanged, it is the rank's own state.
    """
    first = first_of_shares(states)
    if rank is not None and len(first) == shares:
        return states[rank]
    return states[first[share]] if share < len(first) else None


def random_fingerprint(state: RandomState) -> str:
    """Make a text that two states share only where they are equal."""
    values = (value.tolist() if isinstance(value, torch.Tensor) else value for _, value in sorted(state.items()))
    return "".join(map(repr, values))


def restore_random_states(state: RandomState, device: torch.device) -> None:
    """Set this rank's generators to a state that `capture_random_states` took; a generator not in it is left alone."""
    put: dict[str, Callable[[Any], Any]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    for kind in put.keys() & state.keys():
        put[kind](state[kind])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
