"""Pipeline parallel: each rank has a stage of the model, some blocks one after the other, and saves only that.

A batch is cut into microbatches, so that stages work at the same time: while the second computes the first microbatch,
the first computes the second (GPipe: all forward, then all backward). Features go to the next stage and gradients
come back by sends between two ranks; torch's schedule does that, with the shapes that it is given here.

The tied matrix is needed at both ends: the first stage looks tokens up in it, the last makes logits with it. Both have
it under the names of the whole model, add up their gradients after every batch, and so keep the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ckptools.training.model import Transformer
from ckptools.training.options import CreateOptions
from ckptools.training.strategies.strategy import Strategy, device_of, mean_loss
from ckptools.training.strategies.tensor_parallel import one_share


class Stage(NamedTuple):
    """How one rank takes a batch through the pipeline; `ends` are the first and the last rank, where those are two."""

    schedule: ScheduleGPipe
    ends: dist.ProcessGroup | None


def wrap(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Leave of the model what this rank's stage has; the model stays the object that it was."""
    assert isinstance(model, Transformer)
    rank, stages = dist.get_rank(), dist.get_world_size()
    shapes = _shapes(options, device_of(model))
    keep_stage(model, rank, stages)
    stage = PipelineStage(
        model,
        rank,
        stages,
        device_of(model),
        input_args=shapes[0 if rank == 0 else 1],
        output_args=shapes[2 if rank == stages - 1 else 1],
    )
    ends = dist.new_group([0, stages - 1]) if stages > 1 else None
    model.stage = Stage(ScheduleGPipe(stage, options.parallel.microbatches, mean_loss), ends)  # type: ignore[assignment]
    return model


def _shapes(options: CreateOptions, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make examples of what one microbatch is at the first stage, between stages, and behind the last.

    Without them the schedule would run every stage once to see: `seen` would count tokens that were not trained on.
    """
    size = options.size
    tokens = torch.zeros(options.batch // options.parallel.microbatches, size.context, dtype=torch.int64, device=device)
    features, logits = (tokens.new_zeros((*tokens.shape, n), dtype=torch.float32) for n in (size.width, size.vocab))
    return tokens, features.requires_grad_(), logits.requires_grad_()


def keep_stage(model: Transformer, stage: int, stages: int) -> None:
    """Drop what is of other stages: blocks are dealt evenly, the earlier stages have one more where they must."""
    layers = len(model.blocks)
    for number in range(layers):
        if not stage * layers <= number * stages < (stage + 1) * layers:
            del model.blocks[str(number)]
    if stage > 0:
        model.start = model.position = model.positions = model.seen = None  # type: ignore[assignment]
    if stage < stages - 1:
        model.norm = model.head = model.logit_scale = None  # type: ignore[assignment]
    if 0 < stage < stages - 1:
        model.emb = None  # type: ignore[assignment]


def backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Take one batch of int64 tokens (batch, context + 1) through all stages; every rank returns the mean loss, 0-d."""
    stage: Stage = model.stage  # type: ignore[assignment]
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    losses: list[Tensor] = []
    stage.schedule.step(
        *([tokens[:, :-1]] if first else []),
        target=tokens[:, 1:] if last else None,
        losses=losses if last else None,
    )
    if stage.ends is not None and (first or last):
        dist.all_reduce(model.emb.weight.grad, group=stage.ends)  # type: ignore[union-attr]
    loss = torch.stack(losses).mean() if last else torch.zeros((), device=tokens.device)
    dist.broadcast(loss, dist.get_world_size() - 1)
    return loss


STRATEGY = Strategy(wrap, data_share=one_share, backward=backward, in_parts=True)
