"""What can be asked of `create`, and what it answers. Plain data, free of torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.training import file_names, file_options, parallel_options
from ckptools.training.backends import BackendOptions
from ckptools.training.damage_records import Broken
from ckptools.training.file_options import FileOptions
from ckptools.training.launchers.options import LaunchOptions
from ckptools.training.losses import LOSSES
from ckptools.training.parallel_options import ParallelOptions
from ckptools.training.resume_options import ResumeOptions
from ckptools.training.simulation_options import SimulationOptions

STRATEGIES = ("ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2-tp", "hsdp-tp", "pipeline", "moe")
OPTIMIZERS = ("AdamW", "DecoupledAdamW")
SCHEDULERS = ("cosine", "lambda")

# Of each block, with moe.
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

# The layouts that take a state dict of FSDP1 which is not sharded; a sharded one goes into all that it is written with.
LAYOUTS_OF_STATE_DICT: dict[str, tuple[str, ...]] = {
    "local": ("composer", "accelerate"),
    "full": ("composer", "accelerate"),
}


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
    simulation: SimulationOptions = field(default_factory=SimulationOptions)
    files: FileOptions = field(default_factory=FileOptions)
    resuming: ResumeOptions = field(default_factory=ResumeOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def one_rank_has_all(self) -> bool:
        """Whether the whole state is on rank 0, which then writes alone where otherwise every rank writes its file."""
        return self.strategy == "ddp" or self.parallel.state_dict_type == "full"

    @property
    def several(self) -> bool:
        """Whether checkpoints of different steps lie beside one another, for their names tell the step."""
        name = self.files.name or file_names.NAMES[self.layout]
        return self.resuming.save_every is not None or file_names.tells_step(name)

    def completed(self) -> CreateOptions:
        """These options with what follows from them: verl saves DTensors, also with FSDP1; moe has experts."""
        parallel, size = self.parallel, self.size
        if self.layout == "verl" and self.strategy == "fsdp1":
            parallel = dataclasses.replace(parallel, dtensor=True)
        if self.strategy == "moe" and not size.experts:
            size = dataclasses.replace(size, experts=EXPERTS)
        return dataclasses.replace(self, parallel=parallel, size=size)


@dataclass(frozen=True)
class Created:
    """What `create` made.

    Attributes:
        out: the folder.
        files: every file of the checkpoint, sorted; `full.pt` is among them when it was asked for.
        losses: mean loss over all ranks, before each step.
        world_size: ranks that trained.
        nbytes: size of all files together.
        rank: of this process; 0 where `create` started the ranks itself.
        damage: what was done to the files on purpose, when it was asked for.
    """

    out: Path
    files: tuple[Path, ...]
    losses: tuple[float, ...]
    world_size: int
    nbytes: int
    rank: int
    damage: tuple[Broken, ...] = ()

    @property
    def first(self) -> Path:
        """What to open: the file of rank 0, or the folder where the layout has files of several kinds."""
        return opened_by(self.files)

    @property
    def left(self) -> Path:
        """What to open of files that were damaged on purpose, of which some may be gone."""
        there = [path for path in self.files if path.exists() and path.name not in (FULL_STATE, LOSSES)]
        return opened_by(there or self.files)


def opened_by(found: Iterable[Path]) -> Path:
    """Which of the files of a checkpoint to open: that of rank 0, or the folder where there are several kinds."""
    files = [path for path in found if path.name not in (FULL_STATE, LOSSES)]
    several = len({re.sub(r"\d+", "N", path.name) for path in files}) > 1
    return Path(os.path.commonpath([path.parent for path in files])) if several else files[0]


def check(options: CreateOptions) -> None:
    """Refuse what does not fit together.

    Raises:
        UsageError: an unknown word, a layout that does not go with the strategy, a number out of range.
    """
    _check_word("strategy", options.strategy, STRATEGIES)
    _check_word("layout", options.layout, tuple(LAYOUTS))
    _check_word("optimizer", options.optimizer, OPTIMIZERS)
    _check_word("scheduler", options.scheduler, SCHEDULERS)
    parallel_options.check(options.parallel, options.strategy)
    _check_layout(options)
    _check_files(options)
    options.resuming.check(options.steps, options.world_size)
    size = options.size
    counts = {name: getattr(size, name) for name in ("vocab", "width", "layers", "heads", "context")}
    counts |= {"steps": options.steps, "batch": options.batch}
    for name, value in counts.items():
        if value < 1:
            raise UsageError(None, f"--{name} is {value}, must be at least 1")
    if options.world_size is not None and options.world_size < 1:
        raise UsageError(None, f"--world-size is {options.world_size}, must be at least 1")
    if not 0 <= size.dropout < 1:
        raise UsageError(None, f"--dropout is {size.dropout}, must be at least 0 and below 1")
    if options.size.width % options.size.heads:
        raise UsageError(None, f"--width {options.size.width} does not divide by --heads {options.size.heads}")


def _check_word(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(None, f"--{name} {value} is not known; choose from {', '.join(known)}")


def _check_layout(options: CreateOptions) -> None:
    if options.strategy not in LAYOUTS[options.layout]:
        fitting = [name for name, strategies in LAYOUTS.items() if options.strategy in strategies]
        raise UsageError(
            None,
            f"--layout {options.layout} is not written with --strategy {options.strategy}; "
            f"with {options.strategy} choose from {', '.join(fitting)}",
        )
    kind = options.parallel.state_dict_type
    takers = LAYOUTS_OF_STATE_DICT.get(kind, tuple(LAYOUTS))
    if options.layout not in takers:
        raise UsageError(
            None, f"--layout {options.layout} takes no --state-dict-type {kind}; choose from {', '.join(takers)}"
        )


def _check_files(options: CreateOptions) -> None:
    if options.files.run_name is not None:
        file_names.check_run_name(options.files.run_name)
    file_options.check(options.files, options.layout)
    if options.files.name == FULL_STATE:
        raise UsageError(None, f"--name {FULL_STATE}: this is what --full writes; expected another name")
    if options.files.name is not None:
        one_writer = options.one_rank_has_all and options.layout in ("composer", "snapshot")
        file_names.check(options.files.name, options.layout, one_writer, run_name(options, 1))


def run_name(options: CreateOptions, world_size: int) -> str:
    """Name the run as was asked for, or after what it is."""
    return options.files.run_name or f"{options.strategy}-{world_size}-ranks"


_RECORDS: dict[str, type] = {
    "size": ModelSize,
    "parallel": ParallelOptions,
    "hardware": BackendOptions,
    "files": FileOptions,
    "resuming": ResumeOptions,
    "launch": LaunchOptions,
    "simulation": SimulationOptions,
}


def to_json(options: CreateOptions) -> str:
    """Write the options down for another process."""
    return json.dumps(dataclasses.asdict(options) | {"out": str(options.out)})


def from_json(text: str) -> CreateOptions:
    """Read what `to_json` wrote."""
    fields: dict[str, Any] = json.loads(text)
    fields["out"] = Path(fields["out"])
    return CreateOptions(**fields | {name: record(**fields[name]) for name, record in _RECORDS.items()})
