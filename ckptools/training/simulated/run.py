"""`--simulate-world` from the options to the files. Free of torch until it writes."""

from __future__ import annotations

import dataclasses
import uuid
from concurrent.futures.process import BrokenProcessPool
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cluster.environment import calm_torch
from ckptools.cluster.waiting import say_nothing
from ckptools.errors import UsageError, WriteError
from ckptools.formats.shared.given import shapes_from_json
from ckptools.text import first_line, plural
from ckptools.training import option_checks, output, worker, world_sizes
from ckptools.training.options import (
    CreateOptions,
    FileOptions,
    LaunchOptions,
    ModelSize,
    ParallelOptions,
    ResumeOptions,
)
from ckptools.training.output import Created

if TYPE_CHECKING:
    from ckptools.training.simulated.hollow_rank_files import Shapes

# What a world can be simulated with, and the layouts of which every rank writes files of its own.
SIMULATED: dict[str, tuple[str, ...]] = {
    "fsdp1": ("composer",),
    "fsdp2": ("composer", "verl"),
    "hsdp": ("composer", "verl"),
    **dict.fromkeys(("tp", "fsdp2-tp", "hsdp-tp"), ("composer",)),
}

# The same with --hollow.
HOLLOW: dict[str, tuple[str, ...]] = {"fsdp2": ("composer", "dcp", "huggingface")}


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Write the files of some ranks of a world that is not there; with `verbose`, lines about it to stdout.

    Raises:
        UsageError: the options do not fit together.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a file could not be written.
    """
    options = _sized(_check(options).completed())
    world_sizes.check(options, options.world_size or 1)
    hollow = options.simulation.hollow
    shapes = shapes_from(hollow) if hollow else {}
    calm_torch()
    option_checks.check_torch(options)
    report = worker.say if verbose else say_nothing
    for line in _explanation(options, shapes):
        report(line)
    with output.open_partial_folder(options.out, uuid.uuid4().hex) as partial:
        try:
            losses: list[float] = []
            if shapes:
                from ckptools.training.simulated import hollow_writing

                hollow_writing.write_ranks(options, shapes, partial, report)
            else:
                from ckptools.training.simulated import world

                losses = world.write_ranks(options, partial, report)
            files = output.finish(partial, options.out)
        except (OSError, RuntimeError, BrokenProcessPool) as error:
            # torch reports a full disk as a RuntimeError.
            raise WriteError(options.out, f"could not be written: {first_line(error)}") from error
        output.remove_older(options.out, files)
    nbytes = sum(path.stat().st_size for path in files)
    return Created(options.out, files, tuple(losses), options.world_size or 1, nbytes, rank=0)


def _explanation(options: CreateOptions, shapes: Shapes) -> list[str]:
    """Describe the files that will be written, and which of their content is true."""
    world_size, simulation = options.world_size or 1, options.simulation
    ranks = len(simulation.ranks_written)
    if shapes:
        count = sum(prod(shape) for shape in shapes.values())
        whose = "the whole model" if options.layout == "huggingface" else f"{ranks} of {world_size} ranks"
        return [
            f"{whose}, hollow: {plural(len(shapes), 'parameter')} of {count:,} elements, bfloat16; no training",
            "values: none, holes that read as zeros and take no space; names, shapes and layout are true",
        ]
    own = "one random state stands for those of all ranks" if simulation.tiny else "random states are freshly seeded"
    return [
        f"one process for {ranks} of {world_size} ranks, by torch's fake process group; {options.strategy}",
        f"values: true, those of a run of one process, cut as {world_size} ranks hold them; {own}",
    ]


def _check(options: CreateOptions) -> CreateOptions:
    """Return the options with the world size in its place."""
    simulation, world_size = options.simulation, options.simulation.simulate_world or 0
    option_checks.check_least("simulate-world", world_size)
    option_checks.check_least("jobs", simulation.jobs)
    option_checks.check_least("replicas", options.parallel.replicas)
    option_checks.check_least("tensor-parallel", options.parallel.tensor_parallel)
    if options.world_size not in (None, world_size):
        raise UsageError(None, f"--world-size is {options.world_size}, --simulate-world {world_size}; leave one out")
    _check_kind(options)
    if (options.damage, options.resuming, options.launch) != ("", ResumeOptions(), LaunchOptions()):
        raise UsageError(None, "--simulate-world starts no ranks, so options to launch, resume or break do not apply")
    mesh = ParallelOptions(tensor_parallel=options.parallel.tensor_parallel, replicas=options.parallel.replicas)
    if options.parallel != mesh:
        raise UsageError(None, "--simulate-world takes --replicas and --tensor-parallel; leave out how else it is cut")
    option_checks.check(options)
    simulation.ranks_written  # noqa: B018  # raises where there is no such rank
    output.refuse_existing(options.out, options.force)
    return dataclasses.replace(options, world_size=world_size)


def _check_kind(options: CreateOptions) -> None:
    """Refuse what cannot be simulated, and options that --hollow has no use for."""
    hollow = options.simulation.hollow is not None
    kinds, command = (HOLLOW, "--hollow") if hollow else (SIMULATED, "--simulate-world")
    if options.layout not in kinds.get(options.strategy, ()):
        known = f"--layout {' or '.join(own)}" if (own := kinds.get(options.strategy)) else f"with {', '.join(kinds)}"
        why = "" if hollow else " (a DCP is planned by all ranks, and a fake group has none; but see --hollow)"
        raise UsageError(None, f"{command} writes no {options.layout} with {options.strategy}, only {known}{why}")
    if hollow and (options.full or options.simulation.tiny or options.size != ModelSize()):
        raise UsageError(None, "--hollow trains no model; leave out --full, --tiny and the size of one")
    plain = FileOptions(options.files.name, options.files.run_name, max_shard_size=options.files.max_shard_size)
    if hollow and options.files != plain:
        raise UsageError(None, "--hollow writes one file per rank, or whole files; leave out how they are cut else")


def _sized(options: CreateOptions) -> CreateOptions:
    """Make the model small with `--tiny`: one block, and an embedding of which each rank has two rows, the last one.

    Of replicas each has all of them. What is cut twice is even: see `world_sizes`.
    """
    if not options.simulation.tiny:
        return options
    parallel, twice = options.parallel, options.strategy in ("fsdp2-tp", "hsdp-tp")
    shards = (options.world_size or 1) // (parallel.replicas if options.strategy in ("hsdp", "hsdp-tp") else 1)
    cuts = parallel.tensor_parallel_size if twice else shards if options.strategy == "tp" else 1
    size = ModelSize(
        vocab=max(2 * shards - (not twice), 1), width=max(16, cuts + cuts % 2), layers=1, heads=2, context=15
    )
    return dataclasses.replace(options, size=size)


VOCABULARY = 128_256
"""Tokens that Llama 3 knows."""

# Of the `config.json` of Meta-Llama-3-8B and Meta-Llama-3-70B: 8 key and value heads of 128 features each.
KNOWN = {
    "llama3-8b": (32, 4096, 14336, 1024),
    "llama3-70b": (80, 8192, 28672, 1024),
}


def shapes_from(source: str) -> Shapes:
    """The shapes of a model that is known by its name, or those in a JSON of name to shape.

    Raises:
        UsageError: it is neither, or has nothing that could be cut.
        ReadError: the file is no JSON of name to shape.
    """
    if source in KNOWN:
        return llama3(*KNOWN[source])
    path = Path(source)
    if not path.is_file():
        raise UsageError(None, f"--hollow {source}: expected {', '.join(KNOWN)}, or a JSON file of name to shape")
    stated = shapes_from_json(path)
    found = {name: tuple(shape) for name, shape in stated.shapes.items() if name not in stated.tied}
    for name, shape in found.items():
        if not shape or 0 in shape:
            raise UsageError(path, f"{name}: {list(shape)} cannot be cut over ranks; expected sizes of at least 1")
    return found


def llama3(layers: int, hidden: int, intermediate: int, key_rows: int) -> Shapes:
    """Parameters of a Llama 3 model, by the names and in the order of `transformers.LlamaForCausalLM`.

    `key_rows` are those of `k_proj` and `v_proj`: `num_key_value_heads` times the size of a head.
    """
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_rows, hidden),
        "self_attn.v_proj": (key_rows, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    blocks = {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in block.items()}
    ends = {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    return {"model.embed_tokens.weight": (VOCABULARY, hidden)} | blocks | ends
