"""Facts of a checkpoint other than its tensors: step, world size, files, given names, quantization. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.model.records import displayed
from ckptools.model.regions import Ints
from ckptools.text import clip_middle, few, plural, size

FILES_FOUND = "files found"
"""The source of a world size that no file states: the number of files, some of which may be lost."""


@displayed
class Fact(NamedTuple):
    """A value and its sources.

    Attributes:
        value: the value; None when it is unknown.
        sources: where the value is stated, such as `("file name", "state.timestamp.batch")`.
        agree: False when the sources contradict each other.
        at_least: whether the value is only a lower bound.
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
        """The value; None if it is only a lower bound."""
        return None if self.at_least else self.value

    def __int__(self) -> int:
        """The value, if it is a number."""
        return int(self.value)

    def __index__(self) -> int:
        return index(self.value)

    def __eq__(self, other: object) -> bool:
        """Equal to a fact with the same value and sources, and to its own value if that is a number."""
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
        part: the part of the checkpoint in it when a rank has several files (`model`, `optim`), else "".
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
        """Whether the file is present and not known to be damaged."""
        return self.status in ("read", "seen", "listed")

    def is_called(self, name: str) -> bool:
        """Whether a problem means this file by a name: the end of the file's path, with or without folders."""
        parts = Path(name).parts
        return bool(parts) and self.path.parts[-len(parts) :] == parts

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
    """Whether the format keeps names in the order of the module.

    Attributes:
        kept: whether it does.
        why: the reason, as the end of a sentence that begins with "since".
    """

    kept: bool
    why: str


@dataclass(frozen=True)
class GivenNames:
    """Names of parameters that the user gave, in the optimizer's order, in the module's, or both.

    Attributes:
        given_by: their source, for messages.
        listed: names in the optimizer's order, by param group; a single group if the groups are unknown.
        shapes: shape by name in the order of the module.
        buffers: whether `shapes` has the module's buffers too.
    """

    given_by: str
    listed: tuple[tuple[str, ...], ...] = ()
    shapes: Mapping[str, Ints] = field(default_factory=dict)
    buffers: bool = False


@displayed
class Scheme(NamedTuple):
    """A way in which some weights of a checkpoint are quantized.

    Attributes:
        words: its description for people: `fp8, block scales 16 x 16`.
        weights: number of weights quantized this way.
        stated_by: the file that states it; "" if it is inferred from the names and dtypes of the parts.
        known_by: suffixes of the names of the tensors that lie beside the codes: `weight_scale_inv`.
        dequantized: whether `consolidate --dequantize` can write the values.
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
        name: its path relative to the checkpoint's folder: `config.json`.
        content: its values by key.
        quantization: the quantization that the config or the `hf_quant_config.json` beside it states; empty if
            neither file states any.
        quantization_in: the file that states it.
        adapter: the content of PEFT's `adapter_config.json` beside it; empty where there is none.
        adapter_in: the file that has it, relative to the checkpoint's folder.
    """

    name: str
    content: Mapping[str, Any]
    quantization: Mapping[str, Any] = {}
    quantization_in: str = ""
    adapter: Mapping[str, Any] = {}
    adapter_in: str = ""
