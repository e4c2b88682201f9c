"""The options of `create`, a record for each subject. Plain data, free of torch."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from ckptools.cluster.environment import DEFAULT_PORT
from ckptools.errors import UsageError
from ckptools.option import option

# -- file names by template, such as `{run_name}-ep{epoch}-ba{batch}-rank{rank}.pt` ------------------------------------
# The template is a path below OUT. It names the file where a layout has one per rank, or one in all; else the folder.
# `check` fills it in before training, for a world of 256 ranks on 16 nodes.


FIELDS = ("run_name", "epoch", "batch", "rank", "local_rank", "node_rank", "world_size")

OF_A_RANK = ("rank", "local_rank", "node_rank", "world_size")

# What each layout's file, or its folder, is called; nothing where the files lie in OUT itself.
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

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_PARTS = 4
MAX_BYTES = 255  # of one name, on the file systems of Linux, macOS and Windows

# `{batch:06d}`: zeros in front, so that names sort as numbers do.
_FORMAT = re.compile(r"(0?\d{1,2})?d?")

_NODES = _RANKS_PER_NODE = 16

Values = Mapping[str, "int | str"]


def name_of_any_rank(template: str, values: Values) -> str:
    """Make a regular expression for what the template names on any rank of any world, with the other values as here."""
    return "".join(
        re.escape(text)
        + (r"\d+" if field in OF_A_RANK else re.escape(f"{{{field}:{form}}}".format(**values)) if field else "")
        for text, field, form, _ in Formatter().parse(template)
    )


def tells_step(template: str) -> bool:
    """Whether checkpoints of two steps have different names."""
    return any(field == "batch" for _, field, _, _ in Formatter().parse(template))


def check_file_name(template: str, layout: str, one_writer: bool, run_name: str) -> None:
    """Refuse a template by which files would lie on each other, or outside of OUT.

    With `one_writer` only rank 0 writes, so that a rank in the name is not needed.

    Raises:
        UsageError: it is none, or does not fit the layout.
    """
    default = NAMES[layout]
    try:
        parsed = list(Formatter().parse(template))
    except ValueError:
        raise _error(template, "a brace without its other half; {{ and }} stand for braces") from None
    for _, word, form, conversion in parsed:
        if word is None:
            continue
        if word not in FIELDS:
            raise _error(template, f"{{{word}}} is not known; choose from {', '.join(f'{{{f}}}' for f in FIELDS)}")
        if conversion or (form and (word == "run_name" or not _FORMAT.fullmatch(form))):
            raise _error(template, f"how {{{word}}} is to be written is not known; expected {{batch:06d}} or the like")
    names = [template.format(**values) for values in _trial_world(run_name)]
    name = names[-1]
    if name.startswith("/"):
        raise _error(template, "is an absolute path; expected one below OUT")
    if name.count("/") >= MAX_PARTS:
        raise _error(template, f"has more than {MAX_PARTS} parts")
    for problem in filter(None, map(_part_problem, name.split("/"))):
        raise _error(template, problem)
    if "." in default and not names[0].endswith(SUFFIXES):
        raise _error(template, f"names a file, expected {', '.join(SUFFIXES)} at its end")
    if one_writer:
        return
    if "{rank}" in default and len(set(names)) < len(names):
        raise _error(template, "two ranks would write one file; expected {rank} in it, or {node_rank} and {local_rank}")
    if "{rank}" not in default and len(set(names)) > 1:
        raise _error(template, f"all ranks write into one folder with --layout {layout}; expected no rank in its name")


def check_run_name(name: str) -> None:
    """Refuse a run name that is no part of a file name.

    Raises:
        UsageError: it has a slash in it, or is hidden, empty or too long.
    """
    if "/" in name or (problem := _part_problem(name)):
        problem = "has a / in it" if "/" in name else problem
        raise UsageError(None, f"--run-name {name!r}: {problem}; expected one part of a file name")


def _error(template: str, text: str) -> UsageError:
    return UsageError(None, f"--name {template!r}: {text}")


def _part_problem(part: str) -> str | None:
    """The fault of one part of a path; None for none."""
    if not part:
        return "has an empty part"
    if part == "..":
        return "leads out of OUT by .."
    if part.startswith("."):
        return f"{part} would be hidden"
    if not part.isprintable() or "\\" in part:
        return "has a backslash or a character that cannot be printed"
    return f"has a part of more than {MAX_BYTES} bytes" if len(part.encode()) > MAX_BYTES else None


def _trial_world(run_name: str) -> Iterator[dict[str, int | str]]:
    """Yield what every rank of a large world would fill in."""
    world_size = _NODES * _RANKS_PER_NODE
    for rank in range(world_size):
        node_rank, local_rank = divmod(rank, _RANKS_PER_NODE)
        own = {"rank": rank, "local_rank": local_rank, "node_rank": node_rank}
        yield {"run_name": run_name, "epoch": 0, "batch": 1, **own, "world_size": world_size}


# -- the options -------------------------------------------------------------------------------------------------------


STRATEGIES = ("ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2-tp", "hsdp-tp", "pipeline", "moe")
OPTIMIZERS = ("AdamW", "DecoupledAdamW")
SCHEDULERS = ("cosine", "lambda")

# Of each block, with moe.
EXPERTS = 4

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

LOADS = ("each", "broadcast")
LAUNCHERS = ("elastic", "spawn")

BACKENDS = ("gloo", "nccl", "mpi")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ModelSize:
    """Size of the transformer. The defaults are odd, so that shards are uneven in any even world."""

    vocab: int = option(257, "Tokens in the vocabulary.", hidden=True)
    width: int = option(65, "Features of a token; must divide by --heads.", hidden=True)
    layers: int = option(3, "Blocks.", hidden=True)
    heads: int = option(5, "Attention heads.", hidden=True)
    context: int = option(31, "Tokens in a training sequence.", hidden=True)
    experts: int = option(
        0, f"Experts in place of each block's perceptron, with any strategy but tp. [with moe: {EXPERTS}]"
    )
    dropout: float = option(0.1, "Share of the features that a block drops while training.", hidden=True)


@dataclass(frozen=True)
class ParallelOptions:
    """Choices of the strategies; each is for some of them only."""

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
        """Ranks that cut each matrix where the others of the world shard or repeat it."""
        return self.tensor_parallel or 2


@dataclass(frozen=True)
class FileOptions:
    """The names of the files."""

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

    resume: str | None = option(None, "Go on from this checkpoint, or from the newest whole one in this folder.")
    load: str = option("each", f"How it is read: {' or '.join(LOADS)}, where rank 0 reads for all.")
    save_every: int | None = option(None, "Also save each time this many steps are done; folders are called step-N.")
    max_restarts: int = option(0, "When a rank dies, restart all from the last whole checkpoint, at most this often.")
    kill: str | None = option(None, "RANK:STEP: end this rank by SIGKILL once, after this many steps.")

    @property
    def keeps_losses(self) -> bool:
        """Whether the losses so far are saved too, as the run may end here and go on elsewhere."""
        return self.save_every is not None or self.resume is not None

    @property
    def killed(self) -> tuple[int, int] | None:
        """The rank to kill, and the steps that are done by then.

        Raises:
            UsageError: it is spelled otherwise.
        """
        if self.kill is None:
            return None
        rank, colon, step = self.kill.partition(":")
        if not (colon and rank.isdecimal() and step.isdecimal()):
            raise UsageError(None, f"--kill {self.kill} is not RANK:STEP, such as 1:3")
        return int(rank), int(step)

    def goes_on_in(self, out: Path) -> bool:
        """Whether the checkpoint to go on from lies where the next ones go."""
        return self.resume is not None and Path(self.resume).resolve().is_relative_to(out.resolve())


@dataclass(frozen=True)
class LaunchOptions:
    """Options for starting the ranks; inside an outer launcher most of it is known already."""

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

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks of each node, by node rank; empty where `nproc_per_node` is no list, or c10d makes other node ranks."""
        parts = (self.nproc_per_node or "").split(",")
        return tuple(map(int, parts)) if len(parts) > 1 and self.rdzv_backend != "c10d" else ()


@dataclass(frozen=True)
class BackendOptions:
    """Options for the backend of the collectives and the device of the tensors."""

    backend: str = option("auto", f"What carries the collectives: auto, {', '.join(BACKENDS)}; see --backends.")
    device: str = option("auto", "What the tensors are on: auto (GPUs where there are any), cpu or cuda.")


@dataclass(frozen=True)
class CreateOptions:
    """One training run and the way it is saved; `out` is the folder for the checkpoint, made if it is not there."""

    out: Path
    strategy: str = option("fsdp1", f"How the model is spread: {', '.join(STRATEGIES)}.")
    world_size: int | None = option(None, "Ranks. [default: 4, or what torchrun started]")
    steps: int = option(5, "Optimizer steps before it is saved.")
    layout: str = option("composer", f"How the files are laid out: {', '.join(LAYOUTS)}.")
    seed: int = option(0, "The same seed gives the same bytes in every tensor.")
    optimizer: str = option("AdamW", f"{' or '.join(OPTIMIZERS)}.")
    scheduler: str = option("cosine", f"How the learning rate moves: {', '.join(SCHEDULERS)}.")
    full: bool = option(False, "Also save full.pt, the state gathered by torch itself.")
    force: bool = option(False, "Replace a checkpoint of the same name in OUT.")
    damage: str = option("", "Damage what was saved, to see what shows it: truncate:2,bitflip:1,swap:0-3.", "--break")
    communication: bool = option(False, "Say what the ranks send each other in the last step.")
    batch: int = option(8, "Sequences per rank and step.", hidden=True)
    size: ModelSize = field(default_factory=ModelSize)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    hardware: BackendOptions = field(default_factory=BackendOptions)
    files: FileOptions = field(default_factory=FileOptions)
    resuming: ResumeOptions = field(default_factory=ResumeOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def one_rank_has_all(self) -> bool:
        """Whether the whole state is on rank 0, which then writes alone where otherwise every rank writes its file."""
        return self.strategy == "ddp" or self.parallel.state_dict_type == "full"

    @property
    def template(self) -> str:
        """The template of the file's or the folder's name, as was asked for or the layout's own."""
        return self.files.name or NAMES[self.layout]

    @property
    def several(self) -> bool:
        """Whether checkpoints of several steps lie beside each other, as their names have the step."""
        return self.resuming.save_every is not None or tells_step(self.template)

    def completed(self) -> CreateOptions:
        """These options with what follows from them: verl saves DTensors, also with FSDP1; moe has experts."""
        parallel, size = self.parallel, self.size
        if self.layout == "verl" and self.strategy == "fsdp1":
            parallel = dataclasses.replace(parallel, dtensor=True)
        if self.strategy == "moe" and not size.experts:
            size = dataclasses.replace(size, experts=EXPERTS)
        return dataclasses.replace(self, parallel=parallel, size=size)


def run_name(options: CreateOptions, world_size: int) -> str:
    """Name the run as was asked for, or after what it is."""
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
