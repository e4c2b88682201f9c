"""A checkpoint, opened: the tree and what is known about it, and the views of it that people ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptools.model.problems import Problem
from ckptools.model.records import Fact, RankFile
from ckptools.model.tensor import Home, Rounded, Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.training_state import optimizers
from ckptools.training_state.given_names import GivenNames
from ckptools.training_state.module_order import ModuleOrder, believed, model_for_names
from ckptools.training_state.naming import named_when_read
from ckptools.training_state.optimizers import Optimizer
from ckptools.training_state.sections import Section, find_sections, is_flat_optimizer


@dataclass(frozen=True)
class ReadCost:
    """What opening it cost.

    Attributes:
        files: files read in full.
        seconds: wall time.
        nbytes: bytes read.
    """

    files: int
    seconds: float
    nbytes: int


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
        all_ranks: whether every rank's file was read, so that `tree` holds everybody's shards.
        compared: whether of files that were only looked at (`seen`) what tells rank, world size and step was compared.
        differing: key paths of values outside model, optimizer and scheduler that differ between the ranks; the
            tree holds the lowest rank's.
        per_rank: what each rank has at a key path, where the tree holds the lowest rank's: random states, positions in
            the data and what else differs outside model, optimizer and scheduler; tensors as that rank's file has them.
        bytes_expected: bytes that all files together should have; None when nothing tells.
        cost: what opening it cost.
        assumed_names: parameters whose optimizer state has a number in the files, and got its name by order when it
            was read.
        names_given: names for optimizer state that is keyed by number, which the user told.
        rounded: fp32 copies that round to weights if the layout that was found is right; verify and consolidate look.
        options: how it was opened, so that it can be opened again with all ranks.
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
    compared: bool = False
    differing: tuple[KeyPath, ...] = ()
    per_rank: Mapping[KeyPath, Mapping[int, Any]] = field(default_factory=dict, repr=False, compare=False)
    bytes_expected: int | None = None
    cost: ReadCost = ReadCost(0, 0.0, 0)
    assumed_names: frozenset[str] = field(default=frozenset(), repr=False)
    names_given: GivenNames | None = field(default=None, repr=False, compare=False)
    rounded: tuple[Rounded, ...] = field(default=(), repr=False)
    options: Any = field(default=None, repr=False, compare=False)

    @property
    def whole(self) -> bool | None:
        """Whether all of it is here and of one save; None where nothing wrong was seen, but not every file compared."""
        if any(p.severity == "error" for p in self.problems):
            return False
        looked_into = self.all_ranks or self.compared or not any(f.status == "seen" for f in self.files)
        return True if looked_into else None

    @property
    def raw(self) -> Any:
        """The tree as the file has it."""
        return self.tree

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose files are there and not cut."""
        return tuple(sorted({f.rank for f in self.files if f.rank is not None and f.status in ("read", "seen")}))

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The parts of the tree: model, optimizers, schedulers, RNG and the rest, in file order."""
        return find_sections(self.tree)

    def of_kind(self, kind: str) -> tuple[Section, ...]:
        """The sections of one kind."""
        return tuple(s for s in self.sections if s.kind == kind)

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The model's state dict: fqn to lazy tensor. Of several models the names are prefixed with the section."""
        models = self.of_kind("model")
        if len(models) == 1:
            return Values(self, models[0].path, models[0].value)
        joined = {f"{s.name}.{k}": v for s in models for k, v in Values(self, s.path, s.value).items()}
        return Values(self, (), joined)

    @cached_property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by class name or key, their state by fqn where names are known."""
        model = model_for_names([section.value for section in self.of_kind("model")], self.module_order)
        found: dict[str, Optimizer] = {}
        for section in self.of_kind("optimizer"):
            name = fqn_of(section.path[-1:]) or "optimizer"
            order = believed(self.module_order, model or {})
            optimizer = optimizers.describe(name, section.path, section.value, model, order, self.names_given)
            optimizer = replace(optimizer, naming=named_when_read(optimizer.naming, self.assumed_names))
            found[_free(found, optimizer.name)] = replace(optimizer, state=self._bound_state(section, optimizer))
        return found

    def _bound_state(self, section: Section, optimizer: Optimizer) -> Mapping[Any, Mapping[str, Any]]:
        if is_flat_optimizer(section.value):
            return optimizer.state
        ids = list(section.value["state"])
        paths = {optimizer.naming.names.get(i, i): (*section.path, "state", i) for i in ids}
        return {n: Values(self, paths[n], v) if isinstance(v, Mapping) else v for n, v in optimizer.state.items()}

    @cached_property
    def schedulers(self) -> Mapping[str, Any]:
        """The schedulers' states, by class name or key."""
        found: dict[str, Any] = {}
        for section in self.of_kind("scheduler"):
            found[_free(found, fqn_of(section.path[-1:]))] = section.value
        return found

    @property
    def rng(self) -> Any:
        """The saved RNG state as the file has it; None when it has none."""
        found = self.of_kind("rng")
        return found[0].value if len(found) == 1 else {s.name: s.value for s in found} or None

    def bind(self, path: KeyPath, tensor: Tensor) -> Tensor:
        """Give a tensor its place, so that shards in other ranks' files are found when its values are asked for."""
        complete = self.all_ranks or all(s.source is not None or s.item is not None for s in tensor.shards)
        return tensor if complete and tensor.shards else replace(tensor, home=Home(self.path, path, self.options))

    def verify(self, **options: Any) -> Any:
        """Check that it is whole, unharmed and coherent; see `ckptools.verify`."""
        from ckptools.checks.verifying import verify

        return verify(self, **options)

    def consolidate(self, out: str | Path, **options: Any) -> Any:
        """Write a `.pt`, `.safetensors` or DCP folder; see `ckptools.consolidate`."""
        from ckptools.api import consolidate

        return consolidate(self, out, **options)

    def __repr__(self) -> str:
        from ckptools.views.checkpoint_line import checkpoint_line

        return checkpoint_line(self)

    def _repr_html_(self) -> str:
        from ckptools.views.html import checkpoint_html

        return checkpoint_html(self)


def _free(taken: Mapping[str, Any], name: str) -> str:
    """`name`, or with a number when two sections are called the same."""
    number = 1
    while (free := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return free


class Values(Mapping[str, Any]):
    """A part of the tree with text keys; its tensors know where the rest of them is."""

    def __init__(self, checkpoint: Checkpoint, path: KeyPath, values: Mapping[Any, Any]) -> None:
        self._checkpoint, self._path, self._values = checkpoint, path, values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Tensor) and value.home is None:
            return self._checkpoint.bind((*self._path, key), value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return [str(k) for k in self._values]

    def __repr__(self) -> str:
        tensors = sum(isinstance(v, Tensor) for v in self._values.values())
        return f"<{fqn_of(self._path) or 'values'}: {len(self)} entries, {tensors} tensors>"

    def _repr_html_(self) -> str:
        from ckptools.views.html import values_html

        return values_html(self)
