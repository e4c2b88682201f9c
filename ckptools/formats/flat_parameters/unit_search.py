"""Search for the FSDP1 units of a model by the lengths of its flat parameters.

With `use_orig_params=False` an optimizer numbers flat parameters, and no file says what is in them. torch's rules do:

- A unit is a module. Its flat parameter holds the parameters of the module and of all modules in it, those of nested
  units left out, in the order of `named_modules()`: a module's own, then its children's; a tied one once.
- `parameters()` lists the flat parameters in the same order of their modules, so an outer unit before those in it. A
  unit whose parameters are all in nested ones has none.
- A rank holds a chunk of ceil(elements / ranks), the last ones padded to that length.
- Numbered modules of one list that are alike, name by name and shape by shape, are wrapped alike: every policy that
  torch has decides by class or by size. This is assumed; a user can wrap by hand as he likes.

Every such way to choose the units is looked through, and one is taken only when no other gives the same lengths.
Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`, `_get_shard`), _init_utils.py
(`_init_param_handle_from_module`), wrap.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from ckptools.formats.flat_parameters.units import MAX_DEPTH, UnknownLayoutError
from ckptools.model.tensor import Tensor

MAX_STEPS = 500_000
"""Most combinations that are tried; models of 1,000 parameters take some 10,000."""

MAX_WAYS = 32
"""Most ways to one state that are kept."""

MAX_TIES = 6
"""Up to this many sets of equal parameters, every choice of tied ones is tried; above, none, each, and all."""

Members = tuple[int, ...]
"""Parameters, by their place in the model."""

Units = tuple[tuple[int, Members], ...]
"""The parameters of each numbered flat parameter."""

Ways = dict[tuple[int, int], list[tuple[Members, Units]]]
"""By the next number and the count of elements in no unit yet: their parameters, and the units so far."""

_States = dict[tuple[tuple[int, int], "Alike"], list[tuple[Members, Units]]]
Alike = tuple[tuple[int, Units], ...]
"""How each kind of numbered module of a list is wrapped, counted from its first number and parameter."""


@dataclass
class _Module:
    """A module of the model: its own parameters, with their names in it, and the modules in it."""

    own: list[tuple[int, str, Tensor]] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    @cached_property
    def members(self) -> dict[int, int]:
        """Its parameters as `named_modules` meets them, each with its number among them."""
        inner = (i for child in self.children.values() for i in child.members)
        return {i: n for n, i in enumerate([*(i for i, _, _ in self.own), *inner])}

    @cached_property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(t.numel for _, _, t in self.own) + sum(child.numel for child in self.children.values())


def units_of(params: Mapping[str, Tensor], lengths: Sequence[int | None], ranks: int) -> list[Units]:
    """The ways, at most two, to wrap modules into units whose flat parameters have these lengths.

    Lengths are the elements, with padding, of the chunk of each flat parameter on one of the `ranks` that share it;
    None where unknown. The model's parameters are in module order, tied ones under each of their names.

    Raises:
        UnknownLayoutError: the names do not come in the order of modules, or there is too much to look through.
    """
    found: dict[Units, None] = {}
    budget = [MAX_STEPS]
    for second in _tyings(params):
        root = _modules([(i, name, t) for i, (name, t) in enumerate(params.items()) if i not in second])
        found |= dict.fromkeys(_UnitSearch(root, lengths, ranks, budget).units())
        if len(found) > 1:
            break
    return list(found)[:2]


def _modules(params: Sequence[tuple[int, str, Tensor]]) -> _Module:
    root = _Module()
    for i, name, tensor in params:
        *path, last = name.split(".")
        if len(path) > MAX_DEPTH:
            raise UnknownLayoutError(f"a name of more than {MAX_DEPTH} modules")
        module = root
        for part in path:
            module = module.children.setdefault(part, _Module())
        module.own.append((i, last, tensor))
    if list(root.members) != [i for i, _, _ in params]:
        raise UnknownLayoutError("the model's names do not come in the order of its modules")
    return root


class _UnitSearch:
    """One search through all ways to choose units among modules."""

    def __init__(self, root: _Module, lengths: Sequence[int | None], ranks: int, budget: list[int]) -> None:
        self.root, self.lengths, self.ranks, self.budget = root, lengths, ranks, budget
        known = [n for n in lengths if n is not None]
        complete = len(known) == len(lengths)
        self.least = (min(known) - 1) * ranks + 1 if complete else 1
        self.most = max(known) * ranks if complete else root.numel
        self.inside: dict[tuple[int, int], Ways] = {}
        self.kinds: dict[Any, int] = {}
        self.kind_of: dict[int, int] = {}

    def units(self) -> list[Units]:
        """The ways that use every number and leave no parameter over."""
        return [units for _, units in self._ways(self.root, 0).get((len(self.lengths), 0), [])]

    def _ways(self, module: _Module, number: int) -> Ways:
        """Ways to wrap a module and all in it, when `number` is the next flat parameter's."""
        if module.numel < self.least:
            return {(number, module.numel): [(tuple(module.members), ())]}
        found: Ways = {state: list(ways) for state, ways in self._inside(module, number).items()}
        if number == len(self.lengths):
            return found
        length = self.lengths[number]
        for (after, left), ways in self._inside(module, number + 1).items():
            if left and length in (None, -(-left // self.ranks)):
                for members, units in ways:
                    self._keep(found, (after, 0), ((), ((number, members), *units)))
        return found

    def _inside(self, module: _Module, number: int) -> Ways:
        """The same for a module that is no unit."""
        key = id(module), number
        if key not in self.inside:
            own, numel = tuple(i for i, _, _ in module.own), sum(t.numel for _, _, t in module.own)
            states: _States = {((number, numel), ()): [(own, ())]}
            for name, child in module.children.items():
                states = self._followed(states, child, name.isdecimal())
            found: Ways = {}
            for (state, _), ways in states.items():
                for way in ways:
                    self._keep(found, state, way)
            self.inside[key] = found
        return self.inside[key]

    def _followed(self, before: _States, child: _Module, numbered: bool) -> _States:
        """Extend the ways to wrap a list of modules by one more."""
        found: _States = {}
        for ((number, left), alike), ways in before.items():
            for (after, more), others in self._ways(child, number).items():
                # What no flat parameter is long enough for is in none.
                if left + more > self.most:
                    continue
                for other, inner in others:
                    same = self._also(alike, child, number, inner) if numbered else alike
                    for members, units in ways if same is not None else ():
                        way = (members + other, units + inner)
                        self._keep(found, ((after, left + more), same), way)
        return found

    def _also(self, alike: Alike, child: _Module, number: int, units: Units) -> Alike | None:
        """The kinds of a list with one more module; None when one of its kind is wrapped in another way."""
        kind = self._kind(child)
        wrapped = tuple((k - number, tuple(child.members[i] for i in members)) for k, members in units)
        known = dict(alike)
        return tuple(sorted({**known, kind: wrapped}.items())) if known.get(kind, wrapped) == wrapped else None

    def _kind(self, module: _Module) -> int:
        """A number that modules of the same names and shapes have in common."""
        if id(module) not in self.kind_of:
            own = tuple((name, tensor.shape) for _, name, tensor in module.own)
            inner = tuple((name, self._kind(child)) for name, child in module.children.items())
            self.kind_of[id(module)] = self.kinds.setdefault((own, inner), len(self.kinds))
        return self.kind_of[id(module)]

    def _keep(self, found: dict[Any, list[tuple[Members, Units]]], state: Any, way: tuple[Members, Units]) -> None:
        """Add a way that is another one. None is dropped: which of them go with what follows is not known yet."""
        ways = found.setdefault(state, [])
        if way not in ways:
            ways.append(way)
        self.budget[0] -= 1
        if self.budget[0] < 0 or len(ways) > MAX_WAYS:
            raise UnknownLayoutError("its modules could be units in too many ways to look through")


def _tyings(params: Mapping[str, Tensor]) -> Iterator[set[int]]:
    """Parameters that may be second names of others, choice by choice.

    A tied parameter is saved under each of its names with the same bytes, as a tensor of its own.
    """
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(params.values()):
        alike.setdefault((tensor.shape, tensor.dtype, _checksums(tensor)), []).append(i)
    seconds = [set(same[1:]) for same in alike.values() if len(same) > 1]
    few = len(seconds) <= MAX_TIES
    for n in range(len(seconds) + 1) if few else sorted({0, 1, len(seconds)}):
        for chosen in combinations(seconds, n):
            yield set().union(*chosen)


def _checksums(tensor: Tensor) -> Any:
    stated = {(s.rank, s.box): s.source.crc for s in tensor.shards if s.source is not None and s.box.numel}
    return None if 0 in stated.values() else frozenset(stated.items())
