"""The ways to spread a model over ranks, a part of this file for each kind. None of them knows a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ckptools.training.model import Block, Experts, MixtureOfExperts, Transformer
from ckptools.training.options import CreateOptions, ParallelOptions
from ckptools.training_state.wrappers import without_ddp

# -- the record of a strategy, and DDP, the simplest strategy ----------------------------------------------------------


StateDict = dict[str, Any]


def device_of(model: nn.Module) -> torch.device:
    """The device of the model, on which its shards stay: the rank's own GPU, or the CPU."""
    return next(model.parameters()).device


def forward_and_backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the gradients of one batch of int64 tokens (batch, context + 1); returns the mean loss, 0-d."""
    loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.detach()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Take the mean cross entropy of logits (batch, context, vocab) against int64 targets (batch, context); 0-d."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Strategy:
    """A way to spread a model over the ranks. All functions are collectives: every rank must call them.

    Attributes:
        wrap: spreads a model that every rank has built alike.
        model_state: returns the model's state that this rank saves, under plain fqns: parameters as DTensors, buffers
            as plain tensors.
        optimizer_state: returns the optimizer's state that this rank saves, under fqns: moments as DTensors, `step` a
            plain 0-d tensor.
        together: the ranks that hold pieces of one copy of the model and so see the same data: each rank `alone`, the
            ranks of a tensor-parallel `group`, or `all`.
        backward: takes one batch through the model and leaves the gradients; returns the loss.
        in_parts: whether ranks have parameters of their own, so that only all ranks together have the whole state.
    """

    wrap: Callable[[nn.Module, CreateOptions], nn.Module]
    model_state: Callable[[nn.Module], StateDict] = get_model_state_dict
    optimizer_state: Callable[[nn.Module, optim.Optimizer], StateDict] = get_optimizer_state_dict
    together: Literal["alone", "group", "all"] = "alone"
    backward: Callable[[nn.Module, Tensor], Tensor] = forward_and_backward
    in_parts: bool = False

    def data_share(self, options: CreateOptions) -> tuple[int, int]:
        """Return which share of the data this rank trains on, and how many shares there are."""
        world_size = dist.get_world_size()
        ranks = {"alone": 1, "group": options.parallel.tensor_parallel_size, "all": world_size}[self.together]
        return dist.get_rank() // ranks, world_size // ranks


def wrap_ddp(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Wrap in DistributedDataParallel; with bf16 the forward pass casts where that is safe, and backward follows it."""
    if options.parallel.precision == "bf16":
        autocast = torch.autocast(device_of(model).type, torch.bfloat16)
        model.forward = autocast(model.forward)
    return DistributedDataParallel(model)


def without_wrapper(model: nn.Module) -> StateDict:
    """Return full tensors without the prefix `module.`, as Composer and torch's own tutorials save them."""
    wrapped: nn.Module = model.module  # type: ignore[assignment]
    return wrapped.state_dict()


# -- expert parallel: each rank has some of the experts, and tokens travel to the rank of their expert and back --------
# All other modules are repeated on every rank, and their gradients averaged as DDP does. An expert is on one rank only,
# and gets its gradients from all ranks' tokens, because the backward pass has an all-to-all as well.


def wrap_experts(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Cut the experts over the ranks; `model` is changed in place and returned."""
    mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            for name, param in list(module.experts.named_parameters()):
                module.experts.register_parameter(
                    name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
                )
            module.run = partial(run_on_their_ranks, mesh.get_group())
    return model


def run_on_their_ranks(group: dist.ProcessGroup, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
    """Send tokens to the ranks of their experts, run the experts there, and send the results back; a collective.

    Args:
        group: the ranks that share the experts.
        experts: the experts of this rank.
        tokens: features (n, width) of this rank, sorted by expert.
        counts: int64 (experts of all ranks), how many tokens each expert has.
    """
    # A count per expert: row r of `sent` is for tokens from here to rank r, row r of `came` for tokens from rank r.
    sent = counts.view(group.size(), -1)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    there, here = sent.sum(1).tolist(), came.sum(1).tolist()
    arrived = all_to_all_single_autograd(tokens, here, there, group)
    # Tokens arrive sorted by rank, and within a rank by expert; the experts take tokens sorted by expert alone.
    expert = torch.arange(came.shape[1], device=came.device).repeat(group.size()).repeat_interleave(came.flatten())
    order = expert.argsort(stable=True)
    made = experts(arrived[order], came.sum(0))
    back: Tensor = all_to_all_single_autograd(made[order.argsort()], there, here, group)
    return back


def backward_of_experts(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the gradients of the mean loss over all ranks; returns the loss of this rank, 0-d."""
    loss = forward_and_backward(model, tokens)
    for param in model.parameters():
        if param.grad is not None:
            if not isinstance(param, DTensor):
                dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    return loss


# -- both of torch's fully sharded data parallels: each rank holds a part of every parameter ---------------------------
# In FullyShardedDataParallel, the first FSDP, parameters are slices of one flat tensor per wrapped unit. The type of
# state dict decides what a rank then saves:
#
# | type | without a device mesh | with one |
# |---|---|---|
# | sharded | ShardedTensor, cut along dim 0 | DTensor |
# | local | the flat tensors as they are, without names and shapes of the parameters in them | refused by torch |
# | full | whole tensors, on rank 0; the other ranks' state dicts are empty | the same |
#
# With `use_orig_params` the optimizer sees views of the flat tensors under the parameters' names. Without, it sees the
# flat tensors: a flat tensor may not mix frozen and trained parameters, nor parameters with and without weight decay.
#
# With `fully_shard`, the second FSDP, every parameter is a DTensor, cut along dim 0, over all ranks or in rows of them.
#
# Rows are hybrid sharding (HSDP), a mesh of two dimensions with the shards of a whole model in every row. Ranks of a
# row gather parameters from one another, often, over the fast links of a node; ranks of a column hold equal shards and
# average gradients once per step. In the files a parameter lies as `(Replicate(), Shard(0))`.


SHARDINGS = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}

# Sums and buffers stay float32: a buffer that FSDP1 casts to bfloat16 is saved with the precision of bfloat16.
PRECISIONS_1 = {
    "fp32": None,
    "bf16": MixedPrecision(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=True),
}


def wrap_units(model: nn.Module, unit: type[nn.Module], parallel: ParallelOptions | None = None) -> nn.Module:
    """Wrap each module of the class `unit`, and the root with all other modules; choose the type of state dict."""
    parallel = parallel or ParallelOptions()
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        sharding_strategy=SHARDINGS[parallel.sharding],
        mixed_precision=PRECISIONS_1[parallel.precision],
        use_orig_params=parallel.use_orig_params,
        # A flat parameter is trained as a whole; frozen parameters stay outside of it, whole on every rank.
        ignored_states=None if parallel.use_orig_params else [p for p in model.parameters() if not p.requires_grad],
        device_id=device_of(model),
        **_ranks(model, parallel),
    )
    # On the CPU "offloading" copies nothing, and the tensors are then views of a buffer that FSDP1 frees.
    offload, kind = device_of(model).type != "cpu", parallel.state_dict_type
    configs: Any = {
        "sharded": (ShardedStateDictConfig(offload), ShardedOptimStateDictConfig(offload)),
        "local": (LocalStateDictConfig(offload), LocalOptimStateDictConfig(offload)),
        "full": (FullStateDictConfig(offload, rank0_only=True), FullOptimStateDictConfig(offload, rank0_only=True)),
    }[kind]
    wrapped.set_state_dict_type(wrapped, StateDictType[f"{kind.upper()}_STATE_DICT"], *configs)
    return wrapped


def _ranks(model: nn.Module, parallel: ParallelOptions) -> dict[str, Any]:
    """FSDP1's arguments for the ranks that share shards: a device mesh, process groups, or neither for all ranks."""
    if parallel.sharding != "hybrid":
        mesh = init_device_mesh(device_of(model).type, (dist.get_world_size(),)) if parallel.dtensor else None
        return {"device_mesh": mesh}
    shape = (parallel.replicas, dist.get_world_size() // parallel.replicas)
    mesh = init_device_mesh(device_of(model).type, shape, mesh_dim_names=("replicate", "shard"))
    if parallel.dtensor:
        return {"device_mesh": mesh}
    return {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}


# -- tensor parallel: every matrix is cut, and each rank of a group multiplies with its own part of it -----------------
# All ranks of a group see the same data and draw the same random numbers. Features that went through a cut matrix
# become whole again by a collective: an all-reduce after rows, an all-gather after columns if all of them are needed.
#
# With FSDP2, tensor parallel is one of two dimensions of a mesh, or of three if the shards have replicas (HSDP). Tensor
# parallel cuts first, within neighbouring ranks; FSDP2 then cuts the parts. A matrix that both cut along dim 0 lies in
# the files as `(_StridedShard(0), Shard(0))`: FSDP's dimension comes first in the mesh though its cut came second.


def plan(layers: int) -> dict[str, ParallelStyle]:
    """The way to cut each matrix; parameters that are not named stay whole on every rank: norms, scales, `start`.

    The perceptron is the pattern to know: `up` is cut by its outputs and `down` by its inputs, so that between them
    no rank needs another rank's features. They are a DTensor in between (`use_local_output=False`), because a hidden
    size that does not divide makes parts of unequal length, and a plain tensor does not know the size of the whole.

    Attention is the pattern's exception. To cut it between heads, heads must divide by the group's size (5 do not), and
    the rows of `qkv` must lie head by head (they are all queries, then all keys, then all values). So the matrices
    are cut without regard to heads, the output of `qkv` is gathered, and every rank mixes all heads.
    """
    styles: dict[str, ParallelStyle] = {
        "emb": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(layers):
        block = f"blocks.{layer}"
        styles |= {
            f"{block}.attn.qkv": ColwiseParallel(output_layouts=Replicate()),
            f"{block}.attn.out": RowwiseParallel(input_layouts=Replicate()),
            f"{block}.up": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            f"{block}.down": RowwiseParallel(),
        }
    return styles


# Parameters are cast when they are gathered; the shards that the optimizer moves, and gradients' sums, stay float32.
PRECISIONS_2 = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def wrap_on_mesh(names: tuple[str, ...], model: nn.Module, options: CreateOptions) -> nn.Module:
    """Arrange the ranks in a mesh with dimensions of these names; cut over `tp`, then shard over the others.

    `model` is changed in place and returned.
    """
    parallel, world_size = options.parallel, dist.get_world_size()
    sizes = {"replicate": parallel.replicas, "tp": parallel.tensor_parallel_size if len(names) > 1 else world_size}
    shards = world_size // prod(sizes.get(name, 1) for name in names)
    shape = tuple(sizes.get(name, shards) for name in names)
    # FSDP2 alone needs no name for its one dimension.
    mesh = init_device_mesh(device_of(model).type, shape, mesh_dim_names=None if names == ("dp",) else names)
    if "tp" in names:
        # All ranks have built the same model, so that each cuts its own and receives no values; since torch 2.7.
        own: Any = {"src_data_rank": None} if "src_data_rank" in signature(parallelize_module).parameters else {}
        parallelize_module(model, mesh["tp"], plan(options.size.layers), **own)
        # Both were cut along the vocabulary, each as a parameter of its own: tie them again.
        model.head.weight = model.emb.weight  # type: ignore[union-attr]
    if sharding := tuple(name for name in names if name != "tp"):
        over, policy = mesh[sharding] if "tp" in names else mesh, PRECISIONS_2[parallel.precision]
        # Each block, and the root with all other modules.
        for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
            fully_shard(module, mesh=over, mp_policy=policy)
    return model


# -- pipeline parallel: each rank has a stage of the model, some blocks one after the other, and saves only that -------
# torch's GPipe schedule cuts a batch into microbatches, all forward, then all backward, and sends features and
# gradients between neighbouring ranks, with the shapes that it is given here.
#
# The tied matrix is needed at both ends: the first stage looks tokens up in it, the last makes logits with it. Both
# have it under the names of the whole model, add up their gradients after every batch, and so keep the same bits.


class Stage(NamedTuple):
    """How one rank takes a batch through the pipeline; `ends` is the group of the first and the last rank."""

    schedule: ScheduleGPipe
    ends: dist.ProcessGroup | None


def wrap_stages(model: nn.Module, options: CreateOptions) -> nn.Module:
    """Reduce the model to the modules of this rank's stage; `model` is changed in place and returned."""
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
    """Make example tensors of one microbatch: the input of the first stage, between stages, the output of the last.

    Without them the schedule would run every stage once to find the shapes, and `seen` would count tokens that were not
    trained on.
    """
    size = options.size
    tokens = torch.zeros(options.batch // options.parallel.microbatches, size.context, dtype=torch.int64, device=device)
    features, logits = (tokens.new_zeros((*tokens.shape, n), dtype=torch.float32) for n in (size.width, size.vocab))
    return tokens, features.requires_grad_(), logits.requires_grad_()


def keep_stage(model: Transformer, stage: int, stages: int) -> None:
    """Drop the modules of other stages; blocks are dealt evenly, with one more for earlier stages if they must."""
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


def backward_of_stages(model: nn.Module, tokens: Tensor) -> Tensor:
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


# -- strategies by name ------------------------------------------------------------------------------------------------


BY_NAME: dict[str, Strategy] = {
    # The optimizer's own state dict: parameters are integers, in the order of the groups.
    "ddp": Strategy(wrap_ddp, without_wrapper, lambda _, optimizer: optimizer.state_dict()),
    # In the type of state dict that was chosen; with the local type the moments are sharded tensors.
    "fsdp1": Strategy(
        lambda model, options: wrap_units(model, Block, options.parallel),
        lambda model: model.state_dict(),
        FullyShardedDataParallel.optim_state_dict,
    ),
    "fsdp2": Strategy(partial(wrap_on_mesh, ("dp",))),
    "hsdp": Strategy(partial(wrap_on_mesh, ("replicate", "shard"))),
    "tp": Strategy(partial(wrap_on_mesh, ("tp",)), together="all"),
    "fsdp2-tp": Strategy(partial(wrap_on_mesh, ("dp", "tp")), together="group"),
    "hsdp-tp": Strategy(partial(wrap_on_mesh, ("replicate", "shard", "tp")), together="group"),
    "pipeline": Strategy(wrap_stages, together="all", backward=backward_of_stages, in_parts=True),
    "moe": Strategy(wrap_experts, backward=backward_of_experts),
}


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the wrapped model's parameters under the fqns that they had before wrapping."""
    for name, param in model.named_parameters():
        yield without_ddp(name), param
