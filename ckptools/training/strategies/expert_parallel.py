"""Expert parallel: each rank has some of the experts, and tokens travel to the rank of theirs and back.

Every rank trains on data of its own. All but the experts is repeated on every rank, its gradients averaged as DDP does;
an expert is on one rank only, and gets its gradients from all ranks' tokens, for an all-to-all goes backward as well.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptools.training.model import Experts, MixtureOfExperts
from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy, device_of, forward_and_backward


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Leave each rank its experts; the model stays the object that it was."""
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            shard(module.experts, mesh)
            module.run = partial(run_on_their_ranks, mesh.get_group())
    return model


def shard(experts: Experts, mesh: DeviceMesh) -> None:
    """Cut the stacks along the dimension of the experts."""
    for name, param in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))


def run_on_their_ranks(group: dist.ProcessGroup, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
    """Send tokens to the ranks of their experts, take there those that came, and send them back; a collective.

    Args:
        group: the ranks that share the experts.
        experts: of this rank.
        tokens: features (n, width) of this rank, sorted by expert.
        counts: int64 (experts of all ranks), how many tokens each expert has.
    """
    # Row r is what this rank sends to rank r, and after the exchange what rank r sends here: a count per expert.
    sent = counts.view(group.size(), -1)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    there, here = sent.sum(1).tolist(), came.sum(1).tolist()
    arrived = all_to_all_single_autograd(tokens, here, there, group)
    # They arrive by rank, and within a rank by expert; the experts want all of the first before all of the second.
    expert = torch.arange(came.shape[1], device=came.device).repeat(group.size()).repeat_interleave(came.flatten())
    order = expert.argsort(stable=True)
    made = experts(arrived[order], came.sum(0))
    back: Tensor = all_to_all_single_autograd(made[order.argsort()], there, here, group)
    return back


def backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the gradients of the mean loss over all ranks; returns the loss of this rank, 0-d."""
    loss = forward_and_backward(model, tokens)
    for param in model.parameters():
        if param.grad is not None:
            if not isinstance(param, DTensor):
                dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    return loss


STRATEGY = Strategy(wrap, backward=backward)
