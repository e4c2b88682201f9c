"""Contents of FSDP1 flat parameters: explained exactly, or not at all.

A shape list is believed when, layout in order by one of torch's rules, it ends at the last element of every flat
parameter, and when each run that a file holds under a parameter's own name lies where the list puts it. The rules are
in `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from ckptools.formats.flat_parameters.flat_runs import Member, count, filled, is_ragged, layouts, runs_agree, storage_of
from ckptools.formats.shared.given import Shapes
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.training_state.parameter_names import is_flat_parameter, without_wrappers

MAX_DEPTH = 100
MAX_OUTER = 4
"""Outer modules that may be on one side only."""


class UnknownLayoutError(ValueError):
    """The flat parameters of a model cannot be taken apart; the message says why."""


@dataclass(frozen=True)
class Unit:
    """A module that FSDP wrapped, with the parameters in its flat parameter, in order.

    Attributes:
        key: name of the flat parameter in the model.
        tied: second names of members, with the first.
        original: whether it was saved with `use_orig_params`.
    """

    key: str
    flat: Tensor
    members: tuple[Member, ...]
    tied: Mapping[str, str]
    original: bool


def _path(key: str) -> str:
    """Path of the unit that a flat parameter belongs to; empty for the root."""
    return without_wrappers(key.rpartition(".")[0])


def _unit_of(name: str, paths: Container[str]) -> str | None:
    """The innermost of the units at `paths` that a parameter lies in."""
    for _ in range(MAX_DEPTH):
        name = name.rpartition(".")[0]
        if name in paths:
            return name
        if not name:
            return None
    raise UnknownLayoutError(f"a name of more than {MAX_DEPTH} modules")


def _renamings(shapes: Shapes, keys: Sequence[str]) -> Iterator[Shapes]:
    """The shapes under the names that the checkpoint may have for them: as they are, then with other outer modules.

    A checkpoint of Composer says `model.blocks.0`, one of DDP `module.blocks.0`, and a Hugging Face file `blocks.0`.
    """
    yield shapes
    for strip, add in product(("", *_outer(list(shapes.shapes))), ("", *_outer(keys))):
        if strip != add:
            yield Shapes(
                shapes.source,
                {add + k.removeprefix(strip): v for k, v in shapes.shapes.items()},
                {add + k.removeprefix(strip): add + v.removeprefix(strip) for k, v in shapes.tied.items()},
                shapes.order,
            )


def _outer(names: Sequence[str]) -> list[str]:
    """Paths of modules that all of the names lie in: `model.`."""
    first, *others = (name.split(".")[:-1] for name in names)
    depth = 0
    while depth < min(len(first), MAX_OUTER) and all(other[: depth + 1] == first[: depth + 1] for other in others):
        depth += 1
    return [".".join(first[: n + 1]) + "." for n in range(depth)]


def infer_flat_layout(model: Mapping[str, Any], given: Shapes | None, by_name: Shapes | None) -> list[Unit]:
    """Infer which parameters lie where in every flat parameter of a model's state dict, of all ranks or of one.

    Shapes are `given` from outside, or from an optimizer state keyed by name, which has the order too; the two must not
    contradict each other.

    Raises:
        UnknownLayoutError: the shapes are unknown, or they do not explain everything, or in more than one way.
    """
    if given is None:
        if by_name is None:
            raise UnknownLayoutError("no shapes are known")
        return _LayoutInference(model, by_name, by_name).units()
    cleaned = replace(given, shapes={without_wrappers(k): v for k, v in given.shapes.items()})
    keys = [without_wrappers(k) for k in model]
    first: UnknownLayoutError | None = None
    found: dict[str, list[Unit]] = {}
    for position, renamed in enumerate(_renamings(cleaned, keys)):
        try:
            units = _LayoutInference(model, renamed, by_name).units()
        except UnknownLayoutError as error:
            first = first or error
            continue
        if position == 0:
            return units
        found.setdefault(repr([u.members for u in units]), units)
    if len(found) > 1:
        raise UnknownLayoutError(f"{given.source}: its names fit in {len(found)} ways")
    if not found and first is not None:
        raise first
    return next(iter(found.values()))


class _LayoutInference:
    """One attempt to explain all flat parameters of a model."""

    def __init__(self, model: Mapping[str, Any], given: Shapes, by_name: Shapes | None) -> None:
        self.given, self.by_name = given, by_name
        self.flats = {k: t for k, t in model.items() if is_flat_parameter(k) and isinstance(t, Tensor)}
        self.paths = {_path(k): k for k in self.flats}
        self.storages = {k: {storage_of(s) for s in flat.found} for k, flat in self.flats.items()}
        self.runs: dict[str, dict[str, Tensor]] = {k: {} for k in self.flats}
        self.whole: set[str] = set()
        for key, value in model.items():
            if key not in self.flats:
                self._sort_in(key, value)

    def _sort_in(self, key: str, value: Any) -> None:
        name = without_wrappers(key)
        path = _unit_of(name, self.paths)
        if path is not None and isinstance(value, Tensor) and self._is_run(name, value, self.paths[path]):
            self.runs[self.paths[path]][key] = value
        else:
            self.whole.add(name)

    def _is_run(self, name: str, tensor: Tensor, flat: str) -> bool:
        """Whether a 1-D tensor is a rank's run of a flattened parameter, and no buffer or whole parameter."""
        if tensor.kind != "plain" or len(tensor.shape) != 1 or tensor.dtype != self.flats[flat].dtype:
            return False
        if is_ragged(tensor) or any(storage_of(s) in self.storages[flat] for s in tensor.found):
            return True
        shape = self.given.shapes.get(name)
        return shape is not None and prod(shape) != tensor.numel

    def units(self) -> list[Unit]:
        """Every unit, explained; at least one of their parameters has a shape."""
        units = [self._unit(key, flat) for key, flat in self.flats.items()]
        if not any(m.shape is not None for u in units for m in u.members):
            raise UnknownLayoutError(f"{self.given.source}: names none of the parameters of this checkpoint")
        return units

    def _unit(self, key: str, flat: Tensor) -> Unit:
        if len(flat.shape) != 1 or not all(s.source is None or s.source.contiguous for s in flat.shards):
            raise UnknownLayoutError(f"{key} is no 1-D tensor of consecutive elements")
        runs = self.runs[key]
        members, tied = self._named(flat, runs) if runs else self._listed(key)
        ways = {tuple(m.start for m in layout): layout for layout in layouts(members, flat, bool(runs))}
        fitting = [layout for layout in ways.values() if all(runs_agree(m, flat) for m in layout)]
        if len(fitting) != 1:
            raise UnknownLayoutError(self._misfit(key, flat, members, len(ways), len(fitting)))
        return Unit(key, flat, fitting[0], tied, bool(runs))

    def _misfit(self, key: str, flat: Tensor, members: Sequence[Member], ways: int, fitting: int) -> str:
        source = self.given.source
        if fitting:
            return f"{source}: the parameters of {key} fit in {fitting} ways"
        if ways:
            return f"{source}: the parameters of {key} do not lie where the ranks hold them"
        total = sum(m.numel for m in members)
        tied = "; of tied ones it must say so (a .pt that shares them, or in JSON the other's name for a shape)"
        text = f"{key} has {flat.numel} elements, the {len(members)} parameters that {source} names there have {total}"
        return text + (tied if total > flat.numel else "")

    def _named(self, flat: Tensor, runs: Mapping[str, Tensor]) -> tuple[list[Member], dict[str, str]]:
        """With `use_orig_params`: names and order from the file, and counted elements where the shape is unknown."""
        members: list[Member] = []
        tied: dict[str, str] = {}
        first: dict[Any, str] = {}
        for key, tensor in runs.items():
            where = tuple((s.rank, storage_of(s), s.source and s.source.offset, s.box.numel) for s in filled(tensor))
            if where and first.setdefault(where, key) != key:
                tied[key] = first[where]
                continue
            shape = self._shape(without_wrappers(key))
            numel = count(tensor, flat) if shape is None else prod(shape)
            members.append(Member(key, numel, shape, 0, tensor.found))
        return members, tied

    def _listed(self, key: str) -> tuple[list[Member], dict[str, str]]:
        """Without `use_orig_params`: names and order as given."""
        names = [n for n in self.given.shapes if _unit_of(n, self.paths) == _path(key) and n not in self.whole]
        tied = {n: first for n in names if (first := self.given.tied.get(n)) in names and first is not None}
        own = self._in_order(key, [n for n in names if n not in tied])
        return [Member(n, prod(self._shape(n) or ()), self._shape(n)) for n in own], tied

    def _in_order(self, key: str, names: list[str]) -> list[str]:
        """The names in the order in which they were flattened."""
        by_name = self.by_name if self.by_name and self.by_name.ordered else None
        known = [n for n in by_name.shapes if n in set(names)] if by_name else []
        if len(known) == len(names):
            if self.given.ordered and known != names:
                raise UnknownLayoutError(f"{self.given.source}: names {key} in another order than the optimizer state")
            return known
        if not self.given.ordered and len(names) > 1:
            raise UnknownLayoutError(
                f"{self.given.source}: has the shapes and not the order of the parameters: {self.given.order.why}; "
                "give a .pt of the module's own state dict, or a JSON of name to shape in module order"
            )
        return names

    def _shape(self, name: str) -> Ints | None:
        shape = self.given.shapes.get(name)
        other = self.by_name.shapes.get(name) if self.by_name else None
        if shape is not None and other is not None and shape != other:
            text = f"{name} has shape {list(shape)}, its optimizer state {list(other)}"
            raise UnknownLayoutError(f"{self.given.source}: {text}")
        return other if shape is None else shape
