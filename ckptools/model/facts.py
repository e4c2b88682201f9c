"""The facts of a checkpoint beside its tensors: step, world size, files, given names, quantization. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.model.problems import displayed
from ckptools.model.regions import Ints
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

    def __int__(self) -> int:
        """The value, if it is a number."""
        return int(self.value)

    def __index__(self) -> int:
        return index(self.value)

    def __eq__(self, other: object) -> bool:
        """A fact equals a fact of the same value and sources, and a number that is its value."""
        if isinstance(other, (int, float)):
            return bool(self.value == other)
        return tuple(self) == tuple(other) if isinstance(other, Fact) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.value)

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


ADAPTER_CONFIG = "adapter_config.json"


class ModelConfig(NamedTuple):
    """The content of a `config.json`.

    Attributes:
        name: how it is called from the checkpoint's folder: `config.json`.
        content: its values by key.
        quantization: how the weights are quantized, by the config or by the `hf_quant_config.json` beside it; empty
            where neither says that they are.
        quantization_in: the file that says so.
        adapter: the content of PEFT's `adapter_config.json` beside it; empty where there is none.
    """

    name: str
    content: Mapping[str, Any]
    quantization: Mapping[str, Any] = {}
    quantization_in: str = ""
    adapter: Mapping[str, Any] = {}
