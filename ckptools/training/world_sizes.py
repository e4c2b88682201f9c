"""Which numbers of ranks a strategy takes. Free of torch, so that a mistake is said before anything starts."""

from __future__ import annotations

from math import prod

from ckptools.errors import UsageError
from ckptools.model.regions import chunk
from ckptools.training.option_checks import check_least
from ckptools.training.options import CreateOptions

WITH_TENSOR_PARALLEL = ("tp", "fsdp2-tp", "hsdp-tp")


def check(options: CreateOptions, world_size: int) -> None:
    """Refuse a world that does not divide into the groups that the strategy makes.

    Raises:
        UsageError: it does not, or an option is of another strategy.
    """
    size = options.parallel.tensor_parallel
    if size is not None and options.strategy not in WITH_TENSOR_PARALLEL:
        _refuse(f"--tensor-parallel goes with --strategy {', '.join(WITH_TENSOR_PARALLEL)}, not {options.strategy}")
    check_least("tensor-parallel", size)
    if options.strategy == "tp" and size not in (None, world_size):
        _refuse(
            f"--strategy tp cuts over all {world_size} ranks, not over --tensor-parallel {size}; "
            "groups of fewer ranks than there are come with --strategy fsdp2-tp"
        )
    if options.strategy in WITH_TENSOR_PARALLEL:
        _check_matrices(options, world_size if options.strategy == "tp" else options.parallel.tensor_parallel_size)
    if options.strategy == "pipeline":
        _check_stages(options, world_size)
    _check_experts(options, world_size)
    _check_mesh(options, world_size)
    if options.strategy in ("fsdp2-tp", "hsdp-tp"):
        _check_twice_cut(options, world_size)
    if options.parallel.sharding == "hybrid" and options.parallel.replicas == world_size > 1:
        # FSDP1 turns to NO_SHARD then, in a group of one rank, and the replicas drift apart.
        _refuse(
            f"--sharding hybrid with --replicas {world_size} leaves one rank to each replica, and FSDP1 then averages "
            f"no gradients; try --world-size {2 * world_size}, or --strategy hsdp"
        )


def _check_mesh(options: CreateOptions, world_size: int) -> None:
    """Check the groups by which the world must divide; a strategy that takes all ranks as one has none."""
    sizes = {}
    if options.strategy in ("fsdp2-tp", "hsdp-tp"):
        sizes["tensor-parallel"] = options.parallel.tensor_parallel_size
    if options.strategy in ("hsdp", "hsdp-tp") or options.parallel.sharding == "hybrid":
        sizes["replicas"] = options.parallel.replicas
    for name, size in sizes.items():
        check_least(name, size)
    group = prod(sizes.values())
    if world_size % group:
        words = " times ".join(f"--{name} {size}" for name, size in sizes.items())
        fitting = -(-world_size // group) * group
        _refuse(f"--world-size {world_size} does not divide by {words}; try --world-size {fitting}")


def _check_matrices(options: CreateOptions, ranks: int) -> None:
    """Some rank may have an empty part, but torch's optimizers do not take a matrix with fewer rows than ranks."""
    for name in ("width", "vocab"):
        rows = getattr(options.size, name)
        if rows < ranks:
            _refuse(f"--{name} {rows} cannot be cut over {ranks} ranks; try --{name} {ranks} or more")


def _check_twice_cut(options: CreateOptions, world_size: int) -> None:
    """Rows that tensor parallel cuts and FSDP2 cuts again must lie as DTensor says of them (torch 2.13).

    A DTensor's placements say: take your part of each tensor-parallel piece, one after the other, and cut all of that
    over the tensor-parallel ranks. Where pieces are uneven, that is not always the part that FSDP2 has given a rank.
    """
    cuts = options.parallel.tensor_parallel_size
    shards = world_size // cuts // (options.parallel.replicas if options.strategy == "hsdp-tp" else 1)
    size = options.size
    for name, value, rows in (
        ("vocab", size.vocab, size.vocab),
        ("width", size.width, 3 * size.width),
        ("width", size.width, 4 * size.width + 1),
    ):
        if not all(_lies_as_said(rows, cuts, shards, shard) for shard in range(shards)):
            _refuse(
                f"--strategy {options.strategy} with --{name} {value}: torch's DTensor does not describe {rows} rows "
                f"that {cuts} ranks cut and {shards} ranks cut again; try another --{name} or --world-size"
            )


def _lies_as_said(rows: int, cuts: int, shards: int, shard: int) -> bool:
    sizes = [chunk(chunk(rows, cuts, cut)[1], shards, shard)[1] for cut in range(cuts)]
    return sizes == [chunk(sum(sizes), cuts, cut)[1] for cut in range(cuts)]


def _check_stages(options: CreateOptions, world_size: int) -> None:
    """The last stage has the head, so that it may go without a block; every other needs one."""
    layers, batch, parts = options.size.layers, options.batch, options.parallel.microbatches
    if world_size > layers + 1:
        _refuse(
            f"--strategy pipeline has {world_size} stages for {layers} blocks; try --layers {world_size - 1} or more"
        )
    if parts < 1 or batch % parts:
        _refuse(f"--batch {batch} does not divide into --microbatches {parts}")


def _check_experts(options: CreateOptions, world_size: int) -> None:
    experts = options.size.experts
    check_least("experts", experts, 0)
    if experts and options.strategy in WITH_TENSOR_PARALLEL:
        _refuse(
            f"--strategy {options.strategy} cuts perceptrons, not --experts; leave them out, or take --strategy moe"
        )
    if options.strategy == "moe" and experts % world_size:
        fitting = -(-experts // world_size) * world_size
        _refuse(f"--experts {experts} does not divide by {world_size} ranks; try --experts {fitting}")


def _refuse(text: str) -> None:
    raise UsageError(None, text)
