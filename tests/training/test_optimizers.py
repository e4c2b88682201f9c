from __future__ import annotations

import torch

from ckptools.training.model import DecoupledAdamW, Transformer, decayed_names, make_optimizer, make_scheduler
from ckptools.training.options import ModelSize


def stepped(optimizer_class: type[torch.optim.Optimizer], grad: float, **options: float) -> torch.Tensor:
    """Take three steps with one gradient."""
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = optimizer_class([param], lr=0.01, betas=(0.9, 0.95), **options)
    for _ in range(3):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    return param.detach()


def test_without_decay_it_is_adam() -> None:
    ours, theirs = (stepped(kind, 0.5, weight_decay=0) for kind in (DecoupledAdamW, torch.optim.AdamW))
    torch.testing.assert_close(ours, theirs)


def test_decay_is_not_multiplied_by_the_learning_rate() -> None:
    torch.testing.assert_close(stepped(DecoupledAdamW, 0.0, weight_decay=0.1), torch.tensor([1.0, -2.0, 3.0]) * 0.9**3)


def test_decay_follows_the_schedule() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = DecoupledAdamW([param], lr=0.01, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.005
    param.grad = torch.zeros(1)
    optimizer.step()
    assert param.item() == torch.tensor(0.95).item()


def test_two_groups_hold_every_trained_parameter_once() -> None:
    model = Transformer(ModelSize(layers=1))
    optimizer = make_optimizer("AdamW", model.named_parameters(), decayed_names(model))
    decay, rest = (len(group["params"]) for group in optimizer.param_groups)
    assert (decay, rest) == (6, 11)


def test_a_flat_parameter_holds_matrices_and_decays() -> None:
    flat = torch.nn.Parameter(torch.ones(7))
    named = [("blocks.0._flat_param", flat), ("position", torch.nn.Parameter(torch.ones(1), requires_grad=False))]
    (group,) = make_optimizer("AdamW", named, frozenset({"blocks.0.up.weight"})).param_groups
    assert (group["params"], group["weight_decay"] > 0) == ([flat], True)


def test_the_cosine_falls_to_the_end_of_a_long_run() -> None:
    optimizer = DecoupledAdamW([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    scheduler = make_scheduler("cosine", optimizer, steps=300)
    assert scheduler.state_dict()["T_max"] == 300
