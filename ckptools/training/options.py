"""The options of `create`, and which of them go together.

This module does not import torch, so that a mistake is found before anything starts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from math import prod
from pathlib import Path
from string import Formatter
from typing import Any

from ckptools.cluster.environment import DEFAULT_PORT
from ckptools.errors import UsageError
from ckptools.model.regions import chunk
from ckptools.option import option
from ckptools.text import parse_bytes

# -- the options -------------------------------------------------------------------------------------------------------


STRATEGIES = ("ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2-tp", "hsdp-tp", "pipeline", "moe")
DEFAULT_WORLD_SIZE = 4
"""Ranks of one node, or of all nodes, unless the user or a launcher says another number."""

OPTIMIZERS = ("AdamW", "DecoupledAdamW")
SCHEDULERS = ("cosine", "lambda")

# Experts of each block with the strategy moe, by default.
EXPERTS = 4

# File of the gathered state; its name fits no rank file's pattern.
FULL_STATE = "full.pt"

# The strategies that each layout is written with outside ckptools.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "composer": STRATEGIES,
    "snapshot": ("ddp",),
    "verl": ("fsdp1", "fsdp2", "hsdp"),
    "dcp": STRATEGIES,
    "composer-dcp": ("fsdp1", "fsdp2", "hsdp"),
    "accelerate": ("ddp", "fsdp1", "fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp"),
    "lightning": ("ddp", "fsdp1", "fsdp2", "tp", "fsdp2-tp"),
    "fabric": ("ddp", "fsdp1", "fsdp2", "tp", "fsdp2-tp"),
    "torchtitan": ("ddp", "fsdp2", "hsdp", "tp", "fsdp2-tp", "hsdp-tp", "pipeline", "moe"),
    "olmo": ("ddp", "fsdp2", "hsdp", "tp", "fsdp2-tp", "hsdp-tp"),
    "huggingface": STRATEGIES,
}

# The template for the name of each layout's file or folder; empty if the files lie in OUT itself.
NAMES: dict[str, str] = {
    "composer": "ep{epoch}-ba{batch}-rank{rank}.pt",
    "snapshot": "snapshot.pt",
    "verl": "",
    "dcp": "",
    "composer-dcp": "ep{epoch}-ba{batch}",
    "accelerate": "",
    "lightning": "epoch={epoch}-step={batch}.ckpt",
    "fabric": "step-{batch}.ckpt",
    "torchtitan": "step-{batch}",
    "olmo": "step{batch}",
    "huggingface": "",
}

LAUNCHERS = ("elastic", "spawn")

BACKENDS = ("gloo", "nccl")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ModelSize:
    """Size of the transformer. The defaults are odd, so that shards are uneven in any even world."""

    heading = "Model"
    vocab: int = option(257, "Tokens in the vocabulary.")
    width: int = option(65, "Features of a token; must divide by --heads.")
    layers: int = option(3, "Blocks.")
    heads: int = option(5, "Attention heads.")
    context: int = option(31, "Tokens in a training sequence.")
    experts: int = option(
        0, f"Experts in place of each block's perceptron, with any strategy but tp. [with moe: {EXPERTS}]"
    )
    dropout: float = option(0.1, "Share of the features that a block drops while training.")


@dataclass(frozen=True)
class ParallelOptions:
    """Options of the strategies; each option is for some strategies only."""

    heading = "Strategy"
    sharding: str = option("full", "fsdp1: full, grad-op (weights stay whole until backward), hybrid (in replicas).")
    use_orig_params: bool = option(True, "fsdp1: the optimizer sees parameters, not one flat one per unit.")
    state_dict_type: str = option("sharded", "fsdp1: sharded, local (flat pieces), full (rank 0 has all).")
    dtensor: bool = option(False, "fsdp1: DTensor in the files instead of ShardedTensor.")
    precision: str = option("fp32", "fp32, or bf16: computed in bfloat16, kept and saved in float32.")
    tensor_parallel: int | None = option(None, "Ranks that cut each matrix. [default: all with tp, 2 over fsdp2]")
    replicas: int = option(2, "Copies of the shards, with hsdp, hsdp-tp and --sharding hybrid.")
    microbatches: int = option(4, "Parts of a batch that are under way at once, with pipeline.")

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that cut each matrix, with strategies that also shard or replicate it."""
        return self.tensor_parallel or 2


@dataclass(frozen=True)
class FileOptions:
    """Options for the names and contents of a checkpoint's files."""

    heading = "Files"
    name: str | None = option(
        None,
        "Template of the file's name, or of the folder's where a layout is a folder: a path below OUT with "
        "{run_name}, {epoch}, {batch}, {rank}, {local_rank}, {node_rank} or {world_size} in it.",
    )
    run_name: str | None = option(None, "What {run_name} stands for. [default: such as fsdp1-4-ranks]")
    files_per_rank: str = option("one", "DCP: one file for all that a rank writes, or several, one for each item.")
    items: str = option("torch", "DCP: tensors as archives of torch.save, or all of a file as safetensors.")
    async_save: bool = option(False, "DCP: write from a copy, in the background.")
    save_distributed: bool = option(
        False, "huggingface: every rank writes its own shards, by DCP; else rank 0 gathers the model and writes it."
    )
    consolidated: bool = option(True, "huggingface: with --save-distributed, join the shards to whole files too.")
    max_shard_size: str | None = option(None, "huggingface: bytes of tensors per file, such as 200KB or 5GB.")


@dataclass(frozen=True)
class ResumeOptions:
    """Options for saving on the way, and for ranks that die."""

    heading = "Resuming"
    resume: str | None = option(
        None, "Go on from this checkpoint, or from the newest whole one in this folder.", common=True, metavar="PATH"
    )
    save_every: int | None = option(
        None, "Also save each time this many steps are done; folders are called step-N.", common=True
    )
    max_restarts: int = option(0, "When a rank dies, restart all from the last whole checkpoint, at most this often.")
    kill: str | None = option(None, "RANK:STEP: end this rank by SIGKILL once, after this many steps.")

    @property
    def keeps_losses(self) -> bool:
        """Whether the losses so far are saved too, as the run may end here and go on elsewhere."""
        return self.save_every is not None or self.resume is not None

    @property
    def killed(self) -> tuple[int, int] | None:
        """The rank to kill, and the number of steps after which; None if no rank is to be killed.

        Raises:
            UsageError: the option is not RANK:STEP.
        """
        if self.kill is None:
            return None
        rank, colon, step = self.kill.partition(":")
        if not (colon and rank.isdecimal() and step.isdecimal()):
            raise UsageError(None, f"--kill {self.kill}: expected RANK:STEP, such as 1:3")
        return int(rank), int(step)

    def goes_on_in(self, out: Path) -> bool:
        """Whether the checkpoint to resume from lies in `out`, the folder of the next checkpoints."""
        return self.resume is not None and Path(self.resume).resolve().is_relative_to(out.resolve())


@dataclass(frozen=True)
class LaunchOptions:
    """Options for starting the ranks; an outer launcher already decides most of them."""

    heading = "Launching"
    launcher: str | None = option(None, f"What starts the ranks: {', '.join(LAUNCHERS)}. [default: elastic]")
    nnodes: int | None = option(None, "Nodes; run the command on each. [default: 1]")
    node_rank: int | None = option(None, "Which of the nodes this is, from 0.")
    nproc_per_node: str | None = option(
        None, "Ranks on this node, or of all nodes as a list (2,1), or auto, cpu, gpu. [default: the world size]"
    )
    master_addr: str | None = option(None, "Address of node 0.")
    master_port: int | None = option(None, f"Port on node 0. [default: {DEFAULT_PORT}; one node takes a free one]")
    rdzv_endpoint: str | None = option(None, "HOST:PORT where nodes meet; goes before --master-addr and -port.")
    rdzv_backend: str | None = option(
        None, "How nodes get their ranks: static by --node-rank, c10d among themselves. [default: static]"
    )
    rdzv_id: str | None = option(None, "Name of the run, the same on every node; other runs may use the same endpoint.")
    world_size_from: str = option(
        "env", "How init_process_group learns rank and world size: env (left to the environment), argument."
    )
    timeout: float = option(300.0, "Seconds in which every node and rank must have come.")
    local_rank: int | None = option(
        None, "Passed by torch.distributed.launch.", flag="--local-rank --local_rank", hidden=True
    )


@dataclass(frozen=True)
class BackendOptions:
    """Options for the backend of the collectives and the device of the tensors."""

    heading = "Hardware"
    backend: str = option("auto", f"What carries the collectives: auto, {', '.join(BACKENDS)}; see --backends.")
    device: str = option("auto", "What the tensors are on: auto (GPUs where there are any), cpu or cuda.")


@dataclass(frozen=True)
class CreateOptions:
    """One training run and the layout of its checkpoint; the folder `out` is made if it does not exist."""

    out: Path
    strategy: str = option("fsdp1", f"How the model is spread: {', '.join(STRATEGIES)}.", common=True, metavar="NAME")
    world_size: int | None = option(
        None, f"Ranks. [default: {DEFAULT_WORLD_SIZE}, or what torchrun started]", common=True
    )
    steps: int = option(5, "Optimizer steps before it is saved.", common=True)
    layout: str = option("composer", f"How the files are laid out: {', '.join(LAYOUTS)}.", common=True, metavar="NAME")
    seed: int = option(0, "The same seed gives the same bytes in every tensor.", common=True)
    optimizer: str = option("AdamW", f"{' or '.join(OPTIMIZERS)}.")
    scheduler: str = option("cosine", f"How the learning rate moves: {', '.join(SCHEDULERS)}.")
    full: bool = option(False, "Also save full.pt, the state gathered by torch itself.")
    force: bool = option(False, "Replace a checkpoint of the same name in OUT.", common=True)
    damage: str = option(
        "",
        "Damage what was saved, to see what shows it: truncate:2,bitflip:1,swap:0-3.",
        flag="--break",
        common=True,
        metavar="WHAT",
    )
    communication: bool = option(False, "Say what the ranks send each other in the last step.")
    batch: int = option(8, "Sequences per rank and step.")
    size: ModelSize = field(default_factory=ModelSize)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    hardware: BackendOptions = field(default_factory=BackendOptions)
    files: FileOptions = field(default_factory=FileOptions)
    resuming: ResumeOptions = field(default_factory=ResumeOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def one_rank_has_all(self) -> bool:
        """Whether rank 0 has the whole state, and so writes alone in layouts in which else every rank writes a file."""
        return self.strategy == "ddp" or self.parallel.state_dict_type == "full"

    @property
    def template(self) -> str:
        """The template of the file's or the folder's name, given by the user or the layout's own."""
        return self.files.name or NAMES[self.layout]

    @property
    def several(self) -> bool:
        """Whether checkpoints of several steps can lie side by side, because their names have the step."""
        return self.resuming.save_every is not None or tells_step(self.template)

    def completed(self) -> CreateOptions:
        """Set the options that follow from others: verl saves DTensors, also with FSDP1; moe has experts."""
        parallel, size = self.parallel, self.size
        if self.layout == "verl" and self.strategy == "fsdp1":
            parallel = dataclasses.replace(parallel, dtensor=True)
        if self.strategy == "moe" and not size.experts:
            size = dataclasses.replace(size, experts=EXPERTS)
        return dataclasses.replace(self, parallel=parallel, size=size)


def flat(record: Any) -> dict[str, Any]:
    """Return every option of a record, and of the records in it, by name."""
    found: dict[str, Any] = {}
    for name, value in vars(record).items():
        found |= flat(value) if dataclasses.is_dataclass(value) else {name: value}
    return found


def run_name(options: CreateOptions, world_size: int) -> str:
    """The name of the run: given by the user, or made of its strategy and number of ranks."""
    return options.files.run_name or f"{options.strategy}-{world_size}-ranks"


def to_json(options: CreateOptions) -> str:
    """Write the options down for another process."""
    return json.dumps(dataclasses.asdict(options) | {"out": str(options.out)})


def from_json(text: str) -> CreateOptions:
    """Read what `to_json` wrote."""
    fields: dict[str, Any] = json.loads(text)
    records: dict[str, Any] = {known.name: known.default_factory for known in dataclasses.fields(CreateOptions)}
    found = {name: records[name](**value) if isinstance(value, dict) else value for name, value in fields.items()}
    return CreateOptions(**found | {"out": Path(fields["out"])})


# -- which options go together -----------------------------------------------------------------------------------------


WORDS: dict[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "layout": tuple(LAYOUTS),
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "sharding": ("full", "grad-op", "hybrid"),
    "state_dict_type": ("sharded", "local", "full"),
    "precision": ("fp32", "bf16"),
    "files_per_rank": ("one", "several"),
    "items": ("torch", "safetensors"),
    "launcher": LAUNCHERS,
    "rdzv_backend": ("static", "c10d"),
    "world_size_from": ("env", "argument"),
    "backend": ("auto", *BACKENDS),
    "device": ("auto", *DEVICES),
}
"""All values that an option may have."""

LEAST = {
    **dict.fromkeys(("vocab", "width", "layers", "heads", "context", "steps", "batch", "world_size"), 1),
    **dict.fromkeys(("tensor_parallel", "replicas", "save_every", "nnodes"), 1),
    **dict.fromkeys(("experts", "max_restarts"), 0),
}
"""The smallest number that an option may have."""

FSDP1, DCP, HUGGING_FACE = ("fsdp1",), ("dcp", "torchtitan", "olmo"), ("huggingface",)
WITH_TENSOR_PARALLEL = ("tp", "fsdp2-tp", "hsdp-tp")

NEEDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "sharding": {"strategy": FSDP1},
    "use_orig_params": {"strategy": FSDP1},
    "state_dict_type": {"strategy": FSDP1, "layout": ("composer", "accelerate")},
    "dtensor": {"strategy": FSDP1},
    "precision": {"strategy": ("ddp", "fsdp1", "fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp")},
    "tensor_parallel": {"strategy": WITH_TENSOR_PARALLEL},
    "replicas": {"strategy": ("fsdp1", "hsdp", "hsdp-tp")},
    "files_per_rank": {"layout": DCP},
    "items": {"layout": ("dcp",)},
    "async_save": {"layout": DCP},
    "save_distributed": {"layout": HUGGING_FACE},
    "consolidated": {"layout": HUGGING_FACE, "save_distributed": (True,)},
    "max_shard_size": {"layout": HUGGING_FACE},
}
"""For an option that differs from its default: the other options that it needs, with the values that these may have."""


def check_options(options: CreateOptions) -> None:
    """Refuse options that do not fit together, whatever the number of ranks.

    Raises:
        UsageError: an unknown word, a number out of range, an option that goes with another.
    """
    for fault in _all_faults(options):
        raise UsageError(None, fault)
    resume = options.resuming.resume
    if resume is not None and not Path(resume).exists():
        raise UsageError(Path(resume), "no such file or folder to go on from")


def _all_faults(options: CreateOptions, remedies: bool = True) -> Iterator[str]:
    """Yield the faults of options, each with an option that would make them work, unless no `remedies` are wanted."""
    found = _faults(flat(options), flat(CreateOptions(options.out)))
    for fault, needed in chain(found, ((fault, None) for fault in _more_faults(options))):
        yield fault + (_remedy(options, *needed) if needed and remedies else "")


def _remedy(options: CreateOptions, name: str, values: tuple[Any, ...]) -> str:
    """Name the first value of an option with which all options go together; "" if there is none."""
    for value in values if name in ("strategy", "layout") else ():
        changed = dataclasses.replace(options, **{name: value})
        ranks = options.world_size or DEFAULT_WORLD_SIZE
        if not any(chain(_all_faults(changed, remedies=False), _world_faults(changed, ranks))):
            return f"; add --{name} {value}"
    return ""


def _faults(
    given: dict[str, Any], defaults: dict[str, Any]
) -> Iterator[tuple[str, tuple[str, tuple[Any, ...]] | None]]:
    """Yield the faults of options by the three tables, each with the option that is needed and its fitting values."""
    flags = {name: f"--{name.replace('_', '-')}" for name in given}
    for name, value in given.items():
        if value is not None and value not in WORDS.get(name, (value,)):
            yield f"{flags[name]} {value} is not known; choose from {', '.join(WORDS[name])}", None
        if value is not None and name in LEAST and value < LEAST[name]:
            yield f"{flags[name]} {value}: must be at least {LEAST[name]}", None
    for name in (name for name in NEEDS if given[name] != defaults[name]):
        own = f"--no{flags[name][1:]}" if given[name] is False else flags[name]
        for other, fitting in NEEDS[name].items():
            if given[other] not in fitting and fitting == (True,):
                yield f"{own} goes with {flags[other]}; add {flags[other]}", None
            elif given[other] not in fitting:
                yield f"{own} goes with {flags[other]} {', '.join(fitting)}, not {given[other]}", (other, fitting)


def _more_faults(options: CreateOptions) -> Iterator[str]:
    """Yield the faults of options for which there is no table."""
    parallel, strategy, size = options.parallel, options.strategy, options.size
    launch, files = options.launch, options.files
    if strategy not in LAYOUTS[options.layout]:
        known = ", ".join(name for name, strategies in LAYOUTS.items() if strategy in strategies)
        text = f"--layout {options.layout} is not written with --strategy {strategy}"
        yield f"{text}, but with {', '.join(LAYOUTS[options.layout])}; with {strategy} choose from {known}"
    # torch refuses these on some ranks only, while the other ranks wait.
    if parallel.state_dict_type == "local" and parallel.dtensor:
        yield "--state-dict-type local does not go with --dtensor: flat pieces are no DTensors"
    if parallel.state_dict_type == "local" and parallel.sharding == "hybrid":
        text = "--state-dict-type local does not go with --sharding hybrid: torch writes it for one group of all ranks"
        yield f"{text}; choose --state-dict-type sharded or full"
    if strategy == "fsdp1" and parallel.sharding != "hybrid" and parallel.replicas != ParallelOptions.replicas:
        yield f"--replicas goes with --sharding hybrid, not {parallel.sharding}; add --sharding hybrid"
    if files.run_name is not None:
        fault = "has a / in it" if "/" in files.run_name else _part_fault(files.run_name)
        if fault:
            yield f"--run-name {files.run_name!r}: {fault}; expected one part of a file name"
    if files.max_shard_size is not None and parse_bytes(files.max_shard_size) is None:
        yield f"--max-shard-size {files.max_shard_size}: expected a size such as 5GB or 500MiB"
    if files.name == FULL_STATE:
        yield f"--name {FULL_STATE}: this is what --full writes; expected another name"
    if files.name is not None:
        one_writer = options.one_rank_has_all and options.layout in ("composer", "snapshot")
        faults = name_faults(files.name, options.layout, one_writer, run_name(options, 1))
        yield from (f"--name {files.name!r}: {fault}" for fault in faults)
    rank, step = options.resuming.killed or (0, 1)
    if options.world_size is not None and rank >= options.world_size:
        yield f"--kill {options.resuming.kill}: there is no rank {rank} of {options.world_size}, counted from 0"
    if not 1 <= step <= options.steps:
        yield f"--kill {options.resuming.kill}: there is no step {step}; --steps is {options.steps}"
    if not 0 <= size.dropout < 1:
        yield f"--dropout {size.dropout}: must be at least 0 and below 1"
    if size.width % size.heads:
        fitting = -(-size.width // size.heads) * size.heads
        yield f"--width {size.width} does not divide by --heads {size.heads}; try --width {fitting}"
    if launch.master_port is not None and not 0 < launch.master_port < 2**16:
        yield f"--master-port {launch.master_port}: must be from 1 to 65535"
    if not launch.timeout > 0:
        yield f"--timeout {launch.timeout:g}: must be more than 0 seconds"


def check_torch(options: CreateOptions) -> None:
    """Refuse options that this torch does not have yet; imports torch.

    Raises:
        UsageError: an option needs a later torch.
    """
    import torch

    later = f"needs a later torch than {torch.__version__}"
    # Up to 2.6 FSDP2 asks for streams, which a CPU does not have.
    if options.strategy in ("fsdp2", "hsdp", "fsdp2-tp", "hsdp-tp") and not hasattr(torch.cpu.Stream, "record_event"):
        raise UsageError(None, f"--strategy {options.strategy} on a CPU {later}; fsdp1 and ddp do not")
    if options.files.items == "torch" and not options.files.save_distributed:
        return
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import filesystem

    if options.files.items == "safetensors" and not hasattr(filesystem, "SerializationFormat"):
        raise UsageError(None, f"--items safetensors {later}; --items torch does not")
    writer = getattr(checkpoint, "HuggingFaceStorageWriter", None)
    if options.files.save_distributed and (writer is None or "save_distributed" not in signature(writer).parameters):
        raise UsageError(None, f"--save-distributed {later}; without it rank 0 writes")


# -- which numbers of ranks a strategy takes ---------------------------------------------------------------------------


def check_world_size(options: CreateOptions, world_size: int) -> None:
    """Refuse a world that does not divide into the groups that the strategy makes.

    Raises:
        UsageError: the world size does not divide, or is too large for the model.
    """
    for fault in _world_faults(options, world_size):
        raise UsageError(None, fault)


def _world_faults(options: CreateOptions, world_size: int) -> Iterator[str]:
    strategy, parallel, size = options.strategy, options.parallel, options.size
    cuts, replicas, experts = parallel.tensor_parallel, parallel.replicas, size.experts
    twice = strategy in ("fsdp2-tp", "hsdp-tp")
    if strategy == "tp" and cuts not in (None, world_size):
        yield (
            f"--strategy tp cuts over all {world_size} ranks, not over --tensor-parallel {cuts}; "
            "groups of fewer ranks than there are come with --strategy fsdp2-tp"
        )
    if strategy in WITH_TENSOR_PARALLEL:
        ranks = parallel.tensor_parallel_size if twice else world_size
        # Some rank may have an empty part, but torch's optimizers take no matrix with fewer rows than ranks.
        for name, rows in {"width": size.width, "vocab": size.vocab}.items():
            if rows < ranks:
                yield f"--{name} {rows} cannot be cut over {ranks} ranks; try --{name} {ranks} or more"
        if experts:
            yield f"--strategy {strategy} cuts perceptrons, not --experts; leave them out, or take --strategy moe"
    if strategy == "pipeline":
        # The last stage has the head, so that it may be without a block; every other stage needs a block.
        if world_size > size.layers + 1:
            stages = f"--strategy pipeline has {world_size} stages for {size.layers} blocks"
            yield f"{stages}; try --layers {world_size - 1} or more"
        if parallel.microbatches < 1 or options.batch % parallel.microbatches:
            yield f"--batch {options.batch} does not divide into --microbatches {parallel.microbatches}"
    if strategy == "moe" and experts % world_size:
        fitting = -(-experts // world_size) * world_size
        yield f"--experts {experts} does not divide by {world_size} ranks; try --experts {fitting}"
    groups = {"tensor-parallel": parallel.tensor_parallel_size} if twice else {}
    if strategy in ("hsdp", "hsdp-tp") or parallel.sharding == "hybrid":
        groups["replicas"] = replicas
    group = prod(groups.values())
    if world_size % group:
        words = " times ".join(f"--{name} {number}" for name, number in groups.items())
        fitting = -(-world_size // group) * group
        yield f"--world-size {world_size} does not divide by {words}; try --world-size {fitting}"
    if twice:
        yield from _faults_of_two_cuts(options, world_size // group)
    if parallel.sharding == "hybrid" and replicas == world_size > 1:
        # In a group of one rank FSDP1 changes to NO_SHARD, and the replicas drift apart.
        yield (
            f"--sharding hybrid with --replicas {world_size} leaves one rank to each replica, and FSDP1 then averages "
            f"no gradients; try --world-size {2 * world_size}, or --strategy hsdp"
        )


def _faults_of_two_cuts(options: CreateOptions, shards: int) -> Iterator[str]:
    """Yield a fault if DTensor misplaces rows that tensor parallel cuts and FSDP2 cuts again (torch 2.13).

    A DTensor's placements say: take a shard's part of each tensor-parallel piece, one after the other, and cut these
    rows over the tensor-parallel ranks. If pieces are uneven, FSDP2 may have given a rank another part.
    """
    cuts, size = options.parallel.tensor_parallel_size, options.size
    for name, value, rows in (
        ("vocab", size.vocab, size.vocab),
        ("width", size.width, 3 * size.width),
        ("width", size.width, 4 * size.width + 1),
    ):
        for shard in range(shards):
            pieces = [chunk(chunk(rows, cuts, cut)[1], shards, shard)[1] for cut in range(cuts)]
            if pieces != [chunk(sum(pieces), cuts, cut)[1] for cut in range(cuts)]:
                yield (
                    f"--strategy {options.strategy} with --{name} {value}: torch's DTensor does not describe {rows} "
                    f"rows that {cuts} ranks cut and {shards} ranks cut again; try another --{name} or --world-size"
                )


# -- file names by template, such as `{run_name}-ep{epoch}-ba{batch}-rank{rank}.pt` ------------------------------------
# The template is a path below OUT. It names the file where a layout has one per rank, or one in all; else the folder.


OF_A_RANK = ("rank", "local_rank", "node_rank", "world_size")
FIELDS = ("run_name", "epoch", "batch", *OF_A_RANK)

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_PARTS = 4
MAX_BYTES = 255  # of one name, on the file systems of Linux, macOS and Windows

# `{batch:06d}`: zeros in front, so that names sort as numbers do.
_FORMAT = re.compile(r"(0?\d{1,2})?d?")


def name_of_any_rank(template: str, values: Mapping[str, int | str]) -> str:
    """Make a regular expression for a template's names on any rank of any world; other `values` are as given."""
    return "".join(
        re.escape(text)
        + (r"\d+" if field in OF_A_RANK else re.escape(f"{{{field}:{form}}}".format(**values)) if field else "")
        for text, field, form, _ in Formatter().parse(template)
    )


def tells_step(template: str) -> bool:
    """Whether checkpoints of two steps have different names."""
    return any(field == "batch" for _, field, _, _ in Formatter().parse(template))


def name_faults(template: str, layout: str, one_writer: bool, run_name: str) -> Iterator[str]:
    """Yield the faults of a template, such as files that would overwrite each other or lie outside of OUT.

    With `one_writer` only rank 0 writes, so that a rank in the name is not needed.
    """
    try:
        parsed = list(Formatter().parse(template))
    except ValueError:
        yield "a brace without its other half; {{ and }} stand for braces"
        return
    for _, word, form, conversion in parsed:
        if word is not None and word not in FIELDS:
            yield f"{{{word}}} is not known; choose from {', '.join(f'{{{field}}}' for field in FIELDS)}"
        if word and (conversion or (form and (word == "run_name" or not _FORMAT.fullmatch(form)))):
            yield f"how {{{word}}} is to be written is not known; expected {{batch:06d}} or the like"
    # The names on every rank of a large world: 16 ranks on each of 16 nodes.
    common = {"run_name": run_name, "epoch": 0, "batch": 1, "world_size": 256}
    ranks = [{"rank": rank, "node_rank": rank // 16, "local_rank": rank % 16} for rank in range(256)]
    names = [template.format(**common, **rank) for rank in ranks]
    parts = names[-1].split("/")
    if names[-1].startswith("/"):
        yield "is an absolute path; expected one below OUT"
    if len(parts) > MAX_PARTS:
        yield f"has more than {MAX_PARTS} parts"
    yield from filter(None, map(_part_fault, parts))
    default = NAMES[layout]
    if "." in default and not names[0].endswith(SUFFIXES):
        yield f"names a file, expected {', '.join(SUFFIXES)} at its end"
    if "{rank}" in default and len(set(names)) < len(names) and not one_writer:
        yield "two ranks would write one file; expected {rank} in it, or {node_rank} and {local_rank}"
    if "{rank}" not in default and len(set(names)) > 1 and not one_writer:
        yield f"all ranks write into one folder with --layout {layout}; expected no rank in its name"


def _part_fault(part: str) -> str | None:
    """The fault of one part of a path; None if it has no fault."""
    if not part:
        return "has an empty part"
    if part == "..":
        return "leads out of OUT by .."
    if part.startswith("."):
        return f"{part} would be hidden"
    if not part.isprintable() or "\\" in part:
        return "has a backslash or a character that cannot be printed"
    return f"has a part of more than {MAX_BYTES} bytes" if len(part.encode()) > MAX_BYTES else None
