"""An opened checkpoint: its tree, its files, and what is known of how it was saved. Data only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckptools.model.problems import Problem, displayed, to_dict
from ckptools.model.regions import Ints
from ckptools.model.tensor import Rounded
from ckptools.model.tree import KeyPath
from ckptools.text import clip, clip_middle, few, plural, printable, size

# -- what a Hugging Face `config.json` beside a checkpoint says of its model: the content of a JSON. Data only ---------


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


# -- the provenance of an output of `consolidate`: what it was made of, and which values are not from a checkpoint -----


SCHEMA = "ckptools/provenance/1"
KEY = "ckptools"
"""Its name in the metadata of a safetensors file."""

FILE_NAME = "ckptools.json"
"""Its name as an entry of a `.pt`, and as a file of a DCP folder."""

OTHER = "other"
"""The fill of a tensor with values of another checkpoint of the run."""

MAX_BYTES = 1 << 20
"""Bytes of a record that are read; what is written stays far below."""

MAX_NAMED = 200
"""Tensors that a record names of each kind; the others are counted, and all are in the side file."""

MAX_NAME, MAX_WHY, MAX_SOURCES = 400, 300, 8
"""Characters of a name and of a reason, and how many sources are named, each that of the one before."""


class Said(NamedTuple):
    """The record of a file as it stands there.

    Attributes:
        text: the JSON.
        fault: why the text cannot be had; "" where it can.
    """

    text: str
    fault: str = ""


@displayed
class Origin(NamedTuple):
    """A checkpoint that an output was made of.

    Attributes:
        name: what it was called, without a folder.
        format: name of its format.
        step: its training step; None when unknown.
        world_size: ranks that saved it; None when unknown.
    """

    name: str
    format: str
    step: int | None = None
    world_size: int | None = None

    def __str__(self) -> str:
        step = [] if self.step is None else [f"step {self.step}"]
        ranks = [] if self.world_size in (None, 1) else [plural(self.world_size or 0, "rank")]
        return ", ".join([clip_middle(printable(self.name), 80), *step, *ranks])

    def _summary(self) -> str:
        return str(self)


class Filled(NamedTuple):
    """A tensor with values that were in no file.

    Attributes:
        name: fqn in the output.
        fill: `nan` or `zero`, which stands in their place; `other` for values of another checkpoint of the run.
        elements: how many there are of them.
        numel: elements of the tensor.
        origin: that other checkpoint in words, such as `ep0-ba4-rank0.pt, step 4, 2 ranks`.
    """

    name: str
    fill: str
    elements: int
    numel: int
    origin: str = ""


class LeftOut(NamedTuple):
    """Something that the source has, or should have, and the output has not.

    Attributes:
        name: fqn that it would have; "" where not even that is known.
        why: the reason.
        lost: whether the source had lost it; else the format has no place for it.
    """

    name: str
    why: str
    lost: bool


@displayed
@dataclass(frozen=True)
class Provenance:
    """The origin of an output, and the values in it that differ from what was saved.

    Attributes:
        version: of the ckptools that wrote it.
        part: what of the source it holds: `model`, `optimizer`, `all`, or a glob of names.
        sources: the checkpoint that it was made of; behind it what that was made of, and so on.
        filled: tensors with values that were in no file.
        left_out: what the output lacks.
        more_filled: tensors with such values that are not named.
        more_lost: things that the source had lost, and are not named.
        unsure: why the source may have held more than is known, so that the output may lack it.
    """

    version: str
    part: str
    sources: tuple[Origin, ...]
    filled: tuple[Filled, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    more_filled: int = 0
    more_lost: int = 0
    unsure: tuple[str, ...] = ()

    @property
    def by(self) -> str:
        """The writer of it and the sources of its source: `by ckptools 0.1.0; that of ep0-ba5, step 5`."""
        before = [f"that of {source}" for source in self.sources[1:]]
        return "; ".join([f"by ckptools {clip(printable(self.version), 40)}", *before])

    def __str__(self) -> str:
        return ", ".join([*map(str, self.sources[:1]), self.by])

    def to_dict(self) -> dict[str, Any]:
        """As `inspect --json` has it."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {
            "ckptools": self.version,
            "part": self.part,
            "sources": [source._asdict() for source in self.sources],
            "filled": len(self.filled) + self.more_filled,
            "lost": sum(one.lost for one in self.left_out) + self.more_lost,
            "left_out": sum(not one.lost for one in self.left_out),
        }

    def _summary(self) -> str:
        return str(self)

    def to_json(self) -> str:
        """The record as it is written: at most `MAX_NAMED` names of a kind, so that it stays below `MAX_BYTES`."""
        filled, more_filled = _within(self.filled, self.more_filled)
        lost, more_lost = _within([one for one in self.left_out if one.lost], self.more_lost)
        others, _ = _within([one for one in self.left_out if not one.lost], 0)
        made = {
            "schema": SCHEMA,
            "ckptools": self.version,
            "part": clip(self.part, MAX_NAME),
            "sources": [_clipped(one)._asdict() for one in self.sources[:MAX_SOURCES]],
            "filled": [_without_empty(one) for one in filled],
            "left_out": [one._replace(why=clip(one.why, MAX_WHY))._asdict() for one in (*lost, *others)],
            "more_filled": more_filled,
            "more_lost": more_lost,
            **({"unsure": [{"why": clip(why, MAX_WHY)} for why in self.unsure[:MAX_NAMED]]} if self.unsure else {}),
        }
        return json.dumps(made, separators=(",", ":"), ensure_ascii=True)


def _without_empty(one: Filled) -> dict[str, Any]:
    """The fields as they are written: the origin only where there is one."""
    made = one._replace(origin=clip(one.origin, MAX_NAME))._asdict()
    return made if one.origin else {name: value for name, value in made.items() if name != "origin"}


def _clipped(origin: Origin) -> Origin:
    return origin._replace(name=clip_middle(origin.name, MAX_NAME), format=clip(origin.format, MAX_NAME))


def _within(entries: Sequence[Any], more: int) -> tuple[list[Any], int]:
    """The entries that are named, and the number of the others."""
    kept = [one for one in entries if len(one.name) <= MAX_NAME][:MAX_NAMED]
    return kept, more + len(entries) - len(kept)


def joined(records: Iterable[Provenance]) -> Provenance | None:
    """The record of an output in several files: what any of them says; None where none says anything."""
    found = list(dict.fromkeys(records))
    if len(found) < 2:
        return found[0] if found else None
    first = next((record for record in found if record.sources), found[0])
    return Provenance(
        first.version,
        first.part,
        first.sources,
        tuple(dict.fromkeys(one for record in found for one in record.filled)),
        tuple(dict.fromkeys(one for record in found for one in record.left_out)),
        max(record.more_filled for record in found),
        max(record.more_lost for record in found),
        tuple(dict.fromkeys(why for record in found for why in record.unsure)),
    )


# -- the side file `OUT.left-out.json`, which lists what was not written and every hole that was filled ----------------


LEFT_OUT_SCHEMA = "ckptools/left-out/1"
MAX_SIDE_FILE = 16 << 20
"""Bytes of a side file that are read."""

MAX_LISTED = 5000
"""At most this many things of each kind are named."""


def of_side_file(made: Any) -> Provenance:
    """Parse a side file: only filled and missing values, without a source.

    Raises:
        KeyError, TypeError, ValueError: it is no such file.
    """
    if not isinstance(made, dict) or made.get("schema") != LEFT_OUT_SCHEMA:
        raise ValueError(f"expected {LEFT_OUT_SCHEMA}")
    holes = {_name(one): one for one in made["missing"]}
    filled = [_filled(name, one) for name, one in holes.items() if one["filled_with"] is not None]
    left_out = [LeftOut(_name(one), _text(one["why"]), _lost(one, holes)) for one in made["left_out"]]
    lost = [one for one in left_out if one.lost]
    kept = [*lost[:MAX_LISTED], *(one for one in left_out if not one.lost)]
    more_filled, more_lost = (max(len(found) - MAX_LISTED, 0) for found in (filled, lost))
    unsure = tuple(_text(one["why"]) for one in made.get("unsure", ()))[:MAX_LISTED]
    return Provenance("", "", (), tuple(filled[:MAX_LISTED]), tuple(kept), more_filled, more_lost, unsure)


def _lost(one: dict[str, Any], holes: dict[str, Any]) -> bool:
    """Whether the source had lost it; older side files do not say, and list a hole instead."""
    return one["lost"] is True if "lost" in one else _name(one) in holes


def _filled(name: str, one: dict[str, Any]) -> Filled:
    if one["filled_with"] not in ("nan", "zero", OTHER):
        raise ValueError("filled with neither nan nor zero, nor from another checkpoint")
    holes = sum(prod(map(_size, region["sizes"])) for region in one["regions"])
    elements = _size(one.get("elements", holes))
    return Filled(name, one["filled_with"], elements, _size(one.get("numel", elements)), _text(one.get("origin", "")))


def _name(one: dict[str, Any]) -> str:
    return _text(one["name"])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a size that is no number")
    return value


# -- an opened checkpoint ----------------------------------------------------------------------------------------------


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
