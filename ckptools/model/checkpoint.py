"""An opened checkpoint: its tree, its files, and what is known of how it was saved. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.model.model_config import ModelConfig
from ckptools.model.problems import Problem
from ckptools.model.provenance import Filled, Provenance
from ckptools.model.records import displayed
from ckptools.model.regions import Ints
from ckptools.model.tensor import Rounded
from ckptools.model.tree import KeyPath
from ckptools.text import clip_middle, few, plural, size


@displayed
class Fact(NamedTuple):
    """A value and where it comes from.

    Attributes:
        value: the value; None when it is unknown.
        sources: what says so, such as `("file name", "state.timestamp.batch")`.
        agree: False when the sources contradict each other.
        at_least: whether it may be more than the value, which is all that the sources prove.
    """

    value: Any
    sources: tuple[str, ...] = ()
    agree: bool = True
    at_least: bool = False

    @property
    def words(self) -> str:
        """The value for people: `4`, `at least 2`."""
        return f"at least {self.value}" if self.at_least else str(self.value)

    @property
    def exact(self) -> Any:
        """The value; None where it may be more."""
        return None if self.at_least else self.value

    def _summary(self) -> str:
        return f"{self.words}: {few(self.sources) or 'stated nowhere'}{'' if self.agree else '; CONTRADICTED'}"


@displayed
class RankFile(NamedTuple):
    """One file of the checkpoint.

    Attributes:
        path: the file, as found.
        rank: its rank, from the content if that states it, else from the name; None for a monolithic file.
        part: what of the checkpoint it holds when a rank has several files (`model`, `optim`), else "".
        status: `read` in full, `seen` (directory checked only), `listed` (in a store, only its
            name and size are known), `cut`, `missing`, or `bad`.
        nbytes: size in bytes, 0 when missing.
        modified: file time, seconds since 1970; None when missing, 0 when unknown.
    """

    path: Path
    rank: int | None
    part: str
    status: Literal["read", "seen", "listed", "cut", "missing", "bad"]
    nbytes: int
    modified: float | None

    @property
    def is_here(self) -> bool:
        """Whether it is there, and nothing wrong is known of it."""
        return self.status in ("read", "seen", "listed")

    def _summary(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}: "
        return f"{rank}{self.status}, {size(self.nbytes)}, {clip_middle(self.path.name, 60)}"


class ReadCost(NamedTuple):
    """The cost of opening a checkpoint.

    Attributes:
        files: files read in full.
        seconds: wall time.
        nbytes: bytes read.
    """

    files: int
    seconds: float
    nbytes: int


NOTHING_READ = ReadCost(0, 0.0, 0)


class ModuleOrder(NamedTuple):
    """Whether names stand in the order of the module.

    Attributes:
        kept: whether they do.
        why: what kept the order or lost it, as the end of a sentence that begins with "since".
    """

    kept: bool
    why: str


@dataclass(frozen=True)
class GivenNames:
    """Names of parameters that the user gave, in the optimizer's order, in the module's, or both.

    Attributes:
        given_by: where they come from, for messages.
        listed: names in the optimizer's order, by param group; one group stands for all where groups are not known.
        shapes: shape by name in the order of the module.
        buffers: whether `shapes` has the module's buffers too.
    """

    given_by: str
    listed: tuple[tuple[str, ...], ...] = ()
    shapes: Mapping[str, Ints] = field(default_factory=dict)
    buffers: bool = False


@displayed
class Scheme(NamedTuple):
    """One way in which weights of a checkpoint are quantized.

    Attributes:
        words: what it is, for people: `fp8, block scales 16 x 16`.
        weights: how many are stored so.
        stated_by: the file that says so; "" where only the names and dtypes of the parts do.
        known_by: the ends of the names of the parts that lie beside the codes: `weight_scale_inv`.
        dequantized: whether `consolidate --dequantize` writes their values.
    """

    words: str
    weights: int
    stated_by: str
    known_by: tuple[str, ...]
    dequantized: bool

    def _summary(self) -> str:
        return f"{self.words}: {plural(self.weights, 'weight')}"


@dataclass(frozen=True)
class Checkpoint:
    """A distributed checkpoint: a tree of plain values whose tensors are lazy, and what is known of how it was saved.

    Attributes:
        path: what was opened.
        name: what it is called, without rank and suffix: `ep0-ba5`.
        format: name of the format's module, such as `rank_files`.
        saved_as: for people: `per-rank .pt, ShardedTensor (FSDP1)`.
        tree: nested dicts, lists and tuples; leaves are plain values, `Tensor` or `Opaque`.
        files: every rank file, found or missing, in rank order.
        world_size: ranks it was saved by, and what says so.
        step: training step, and what says so.
        module_order: whether the format keeps the order in which the module has its parameters, and why.
        problems: what is wrong, the worst first; `Code` explains their codes.
        names: dotted names of every class and function that the files mention.
        all_ranks: whether every rank's file was read, so that `tree` has the shards of all ranks.
        differing: key paths of values outside model, optimizer and scheduler that differ between the ranks; the
            tree holds the lowest rank's.
        per_rank: what each rank has at a key path, where the tree holds the lowest rank's: random states, positions in
            the data and what else differs outside model, optimizer and scheduler; tensors as that rank's file has them.
        unequal: the same where all should have one value, where only some have any (`Absent` stands for the others),
            and where a foreign object holds other values: to look at, while `per_rank` is kept in what is written.
        bytes_expected: bytes that all files together should have; None when unknown.
        cost: what opening it cost.
        assumed_names: parameters whose optimizer state has a number in the files, and got its name by order when it
            was read.
        names_given: names that the user gave for optimizer state that is keyed by number.
        rounded: fp32 copies that round to weights if the layout that was found is right; verify and consolidate look.
        stated_digests: SHA-256 of files beside each other, as one of them states it; `verify --deep` compares.
        in_parts: whether ranks' files hold parameters of their own, such as stages of a pipeline.
        text_keys: whether its format makes a text of every key of a dict, so that 1 and "1" look the same in it.
        stated_versions: of what wrote it, as files beside it state them, by where: `config.json.transformers_version`.
        provenance: what it was made of, where `consolidate` wrote it; None where its files do not say.
        config: what a Hugging Face `config.json` beside it says of its model; None without one.
        quantized: how its quantized weights are stored, for each way how many; see `training_state.quantized_weights`.
        hollow: tensors with zeros that lie in holes of sparse files and were never written.
        options: how it was opened, so that it can be opened again with all ranks.
        worked_out: what was worked out of it once, by name: its sections, its optimizers.
    """

    path: Path
    name: str
    format: str
    saved_as: str
    tree: Any = field(repr=False)
    files: tuple[RankFile, ...] = field(repr=False)
    world_size: Fact
    step: Fact
    module_order: ModuleOrder = field(repr=False)
    problems: tuple[Problem, ...] = ()
    names: tuple[str, ...] = field(default=(), repr=False)
    all_ranks: bool = True
    differing: tuple[KeyPath, ...] = ()
    per_rank: Mapping[KeyPath, Mapping[int, Any]] = field(default_factory=dict, repr=False, compare=False)
    unequal: Mapping[KeyPath, Mapping[int, Any]] = field(default_factory=dict, repr=False, compare=False)
    bytes_expected: int | None = None
    cost: ReadCost = NOTHING_READ
    assumed_names: frozenset[str] = field(default=frozenset(), repr=False)
    names_given: GivenNames | None = field(default=None, repr=False, compare=False)
    rounded: tuple[Rounded, ...] = field(default=(), repr=False)
    stated_digests: Mapping[Path, str] = field(default_factory=dict, repr=False, compare=False)
    in_parts: bool = False
    text_keys: bool = False
    stated_versions: Mapping[str, str] = field(default_factory=dict, repr=False)
    provenance: Provenance | None = field(default=None, repr=False)
    config: ModelConfig | None = field(default=None, repr=False, compare=False)
    quantized: tuple[Scheme, ...] = field(default=(), repr=False)
    hollow: tuple[Filled, ...] = field(default=(), repr=False)
    options: Any = field(default=None, repr=False, compare=False)
    worked_out: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def structure_read(self) -> bool:
        """Whether the structure of every file was read, and not only that of some."""
        return self.all_ranks or all(f.status not in ("seen", "listed") for f in self.files)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose files are there and not cut."""
        return tuple(sorted({f.rank for f in self.files if f.rank is not None and f.is_here}))
