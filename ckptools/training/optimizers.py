"""Optimizers in two parameter groups, and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from torch.optim.optimizer import ParamsT

LEARNING_RATE = 3e-3
WARMUP = 10
HORIZON = 100

# DecoupledAdamW does not multiply the decay by the learning rate, so the same pull needs a smaller number.
WEIGHT_DECAY = {"AdamW": 0.1, "DecoupledAdamW": 0.1 * LEARNING_RATE}

# How FSDP1 calls what the optimizer sees without `use_orig_params`.
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

    Ask before FSDP wraps the model: FSDP1 flattens what a rank holds, and then everything looks like a vector.
    """
    return frozenset(name for name, param in model.named_parameters() if param.ndim > 1)


def make_optimizer(
    kind: str, named: Iterable[tuple[str, nn.Parameter]], decayed: frozenset[str]
) -> torch.optim.Optimizer:
    """Make an optimizer with a group for what decays and one for the rest; frozen parameters are in neither.

    `named` are parameters of the wrapped model under their plain fqns. A flat parameter of FSDP1 cannot be in two
    groups: where the model has such, there is one, and all of it decays.
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
    """List what an optimizer of a whole model trains, in its order: a state dict calls them 0, 1, 2 and so on."""
    names = {param: name for name, param in model.named_parameters()}
    groups = make_optimizer(kind, model.named_parameters(), decayed_names(model)).param_groups
    return [names[param] for group in groups for param in group["params"]]


def make_scheduler(kind: str, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """Make a schedule that moves once per step: half a cosine over `HORIZON` steps or more, or a warm-up."""
    if kind == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(HORIZON, steps))
    return LambdaLR(optimizer, lr_lambda=lambda step: min(1.0, (step + 1) / WARMUP))
