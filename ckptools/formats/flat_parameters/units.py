"""Infer the contents of FSDP1 flat parameters: explained exactly, or not at all.

A shape list is believed if, laid out in order by one of torch's rules, it ends at the last element of every flat
parameter, and if each run that a file holds under a parameter's own name lies where the list puts it. The rules are
in `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from math import prod
from operator import add
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.formats.shared.given_names_and_shapes import Shapes
from ckptools.model.regions import Box, Ints, contiguous_strides, span_boxes
from ckptools.model.shards import Shard, Source, in_rank_order
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizers import is_flat_parameter
from ckptools.training_state.wrappers import without_wrappers

# -- runs of consecutive elements of a flattened tensor: as boxes of it, or as parameters in an FSDP1 flat parameter ---
# FSDP1, DeepSpeed and Megatron's optimizer have such runs. A run that begins or ends inside a row becomes several
# boxes, at most 2 * ndim - 1.

ALIGNMENTS = (2, 4, 8, 16)
"""Elements in 16 bytes, by size of dtype."""


class FlatRun(NamedTuple):
    """One rank's consecutive elements of a flattened tensor.

    Attributes:
        start: index of the first element in the flattened tensor.
        source: the flat tensor that holds them, 1-D and contiguous; None if its file was not read.
        at: index of the first element in `source`.
    """

    start: int
    length: int
    source: Source | None
    rank: int | None
    at: int = 0


class RunBox(NamedTuple):
    """A box of a tensor whose elements are consecutive in a flat tensor.

    Attributes:
        unread: the box as a shard of the tensor, without a source.
        at: index of its first element in the flat tensor.
        strides: of the box, packed, in elements.
    """

    unread: Shard
    at: int
    strides: Ints

    def shard_in(self, flat: Source | None) -> Shard:
        """A shard with the place of its bytes in a flat tensor; without a source if that tensor was not read."""
        if flat is None:
            return self.unread
        # Built in one step for speed: ZeRO-3 has a hundred thousand of them.
        offset, box = flat.offset + self.at * ITEMSIZE[flat.dtype], self.unread.box
        source = Source(flat.path, offset, flat.dtype, box.sizes, self.strides, flat.record, flat.record_span, flat.crc)
        return Shard(box, self.unread.rank, source)


def boxes_of(shape: Ints, start: int, length: int, rank: int | None, at: int = 0) -> Iterator[RunBox]:
    """The boxes of a run in a flattened tensor of `shape`; the run begins at element `at` of a rank's flat tensor."""
    for box, offset in span_boxes(shape, start, length):
        yield RunBox(Shard(box, rank, None), at + offset, contiguous_strides(box.sizes))


def shards_of(shape: Ints, run: FlatRun) -> list[Shard]:
    """The shards of a run of a flattened tensor of `shape`."""
    return [box.shard_in(run.source) for box in boxes_of(shape, run.start, run.length, run.rank, run.at)]


def shards_in(piece: Box, run: FlatRun) -> list[Shard]:
    """The shards of a run of a flattened piece, in the tensor of which `piece` is a box."""
    shards = shards_of(piece.sizes, run)
    return [s._replace(box=Box(tuple(map(add, piece.offsets, s.box.offsets)), s.box.sizes)) for s in shards]


def joined(shape: Ints, runs: Iterable[FlatRun]) -> tuple[Shard, ...]:
    """The shards of a tensor of `shape`, from the ranks' runs of its flattened form, in rank order."""
    return in_rank_order(shard for run in runs for shard in shards_of(shape, run))


def flat_source(value: Any) -> Source | None:
    """The source of a flat tensor; None for any other value than one row of consecutive elements."""
    if not isinstance(value, Tensor) or value.kind != "plain" or len(value.shape) != 1 or len(value.shards) != 1:
        return None
    source = value.shards[0].source
    return source if source is not None and source.contiguous else None


def is_ragged(tensor: Tensor) -> bool:
    """Whether ranks have different lengths under one key, so that it cannot be one replicated value."""
    return len({s.box for s in tensor.shards}) > 1


@dataclass(frozen=True)
class Member:
    """A parameter in a flat parameter.

    Attributes:
        shape: None when unknown.
        start: index of its first element in the flat parameter.
        runs: each rank's run under the parameter's own name; empty without `use_orig_params`.
    """

    key: str
    numel: int
    shape: Ints | None
    start: int = 0
    runs: tuple[Shard, ...] = ()


def filled(tensor: Tensor) -> list[Shard]:
    """The nonempty shards with a source."""
    return [s for s in tensor.found if s.box.numel]


def storage_of(shard: Shard) -> Any:
    """The file and zip entry of a shard; None without a source."""
    return shard.source and (shard.source.path, shard.source.record)


def count(tensor: Tensor, flat: Tensor) -> int:
    """Elements of a parameter, from its runs: each region of the flat parameter counts once (HSDP repeats regions)."""
    lengths = {s.rank: s.box.numel for s in tensor.found}
    by_region = {s.box: lengths.get(s.rank, 0) for s in flat.found}
    return sum(by_region.values())


def layouts(members: Sequence[Member], flat: Tensor, original: bool) -> Iterator[tuple[Member, ...]]:
    """Yield the layouts, one per rule of torch, that end exactly at the end of the flat parameter."""
    layout, total = end_to_end(members)
    if total == flat.numel:
        yield layout
    for alignment in ALIGNMENTS if original else ():
        layout, total = end_to_end(members, alignment)
        ranks = len({s.box for s in flat.shards}) or 1
        if -(-total // ranks) * ranks == flat.numel:
            yield layout


def end_to_end(members: Sequence[Member], alignment: int = 1) -> tuple[tuple[Member, ...], int]:
    """Lay parameters one after the other, each at a multiple of `alignment` elements; return also their end."""
    at, layout = 0, []
    for member in members:
        at = -(-at // alignment) * alignment
        layout.append(replace(member, start=at))
        at += member.numel
    return tuple(layout), at


def run_of(shard: Shard) -> FlatRun:
    """A shard of a flat parameter, converted to a run."""
    return FlatRun(shard.box.offsets[0], shard.box.sizes[0], shard.source, shard.rank)


def overlap(member: Member, run: FlatRun) -> tuple[int, int]:
    """The common range in the flat parameter: first index and one past the last; equal when empty."""
    low, high = max(member.start, run.start), min(member.start + member.numel, run.start + run.length)
    return low, max(low, high)


def runs_agree(member: Member, flat: Tensor) -> bool:
    """Whether each rank's run lies where the member's place implies."""
    if not member.runs:
        return True
    runs = {s.rank: s for s in member.runs}
    regions = {s.rank: s for s in flat.found}
    for rank in runs.keys() | regions.keys():
        low, high = overlap(member, run_of(regions[rank])) if rank in regions else (0, 0)
        run = runs.get(rank)
        numel = run.box.numel if run else 0
        if numel != high - low or (run and numel and not _at(run, regions[rank], low)):
            return False
    return True


def _at(run: Shard, region: Shard, start: int) -> bool:
    """Whether a run begins at an index of the flat parameter; True if it has a storage of its own."""
    if run.source is None or region.source is None or storage_of(run) != storage_of(region):
        return True
    at = region.source.offset + (start - region.box.offsets[0]) * ITEMSIZE[region.source.dtype]
    return run.source.offset == at


# -- infer which parameters a flat parameter contains ------------------------------------------------------------------


MAX_DEPTH = 100
MAX_OUTER = 4
"""Outer modules that only one of the two sides may have."""


class UnknownLayoutError(ValueError):
    """The flat parameters of a model cannot be split into parameters; the message says why."""


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
    """Path of the unit of a flat parameter; empty for the root."""
    return without_wrappers(key.rpartition(".")[0])


def _unit_of(name: str, paths: Container[str]) -> str | None:
    """The innermost of the units at `paths` that contains a parameter."""
    for _ in range(MAX_DEPTH):
        name = name.rpartition(".")[0]
        if name in paths:
            return name
        if not name:
            return None
    raise UnknownLayoutError(f"a name of more than {MAX_DEPTH} modules")


def _renamings(shapes: Shapes, keys: Sequence[str]) -> Iterator[Shapes]:
    """Yield the shapes under names that the checkpoint may use: unchanged, then with other outer modules.

    A checkpoint of Composer has `model.blocks.0`, one of DDP `module.blocks.0`, and a Hugging Face file `blocks.0`.
    """
    yield shapes
    for strip, put in product(("", *_outer(list(shapes.shapes))), ("", *_outer(keys))):
        if strip != put:
            yield Shapes(
                shapes.source,
                {put + k.removeprefix(strip): v for k, v in shapes.shapes.items()},
                {put + k.removeprefix(strip): put + v.removeprefix(strip) for k, v in shapes.tied.items()},
                shapes.order,
            )


def _outer(names: Sequence[str]) -> list[str]:
    """Paths of modules that contain all of the names: `model.`."""
    first, *others = (name.split(".")[:-1] for name in names)
    depth = 0
    while depth < min(len(first), MAX_OUTER) and all(other[: depth + 1] == first[: depth + 1] for other in others):
        depth += 1
    return [".".join(first[: n + 1]) + "." for n in range(depth)]


def infer_flat_layout(model: Mapping[str, Any], given: Shapes | None, by_name: Shapes | None) -> list[Unit]:
    """Infer the place of every parameter in the flat parameters of a model's state dict, of all ranks or of one.

    Shapes are `given` by the user, or come from an optimizer state keyed by name, which has the order too; the two must
    not contradict each other.

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
                name = without_wrappers(key)
                path = _unit_of(name, self.paths)
                if path is not None and isinstance(value, Tensor) and self._is_run(name, value, self.paths[path]):
                    self.runs[self.paths[path]][key] = value
                else:
                    self.whole.add(name)

    def _is_run(self, name: str, tensor: Tensor, flat: str) -> bool:
        """Whether a 1-D tensor is a rank's run of a flattened parameter, not a buffer or a whole parameter."""
        if tensor.kind != "plain" or len(tensor.shape) != 1 or tensor.dtype != self.flats[flat].dtype:
            return False
        if is_ragged(tensor) or any(storage_of(s) in self.storages[flat] for s in tensor.found):
            return True
        shape = self.given.shapes.get(name)
        return shape is not None and prod(shape) != tensor.numel

    def units(self) -> list[Unit]:
        """Every unit with its parameters; the shape of at least one parameter is known."""
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
        """With `use_orig_params`: names and order from the file, and counted elements if the shape is unknown."""
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


# -- search for the FSDP1 units of a model by the lengths of its flat parameters ---------------------------------------
# With `use_orig_params=False` an optimizer numbers flat parameters, and no file states their content. It follows from
# torch's rules:
#
# - A unit is a module. Its flat parameter holds the parameters of the module and of all modules in it, without those of
#   nested units, in the order of `named_modules()`: a module's own, then its children's; a tied one once.
# - `parameters()` lists the flat parameters in the same order of their modules, so an outer unit before nested ones. A
#   unit whose parameters are all in nested units has none.
# - A rank holds a chunk of ceil(elements / ranks), the last ones padded to that length.
# - Numbered modules of one list that are alike, name by name and shape by shape, are wrapped alike: every policy of
#   torch decides by class or by size. This is assumed; a user may wrap by hand in any way.
#
# Every such way to choose the units is tried, and one is taken only if no other gives the same lengths.
# Source: torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`, `_get_shard`), _init_utils.py
# (`_init_param_handle_from_module`), wrap.py.

MAX_STEPS = 500_000
"""At most this many combinations are tried; models of 1,000 parameters take some 10,000."""

MAX_WAYS = 32
"""At most this many ways to one state are kept."""

MAX_TIES = 6
"""Up to this many sets of equal parameters, every choice of tied ones is tried; beyond that, none, each, and all."""

Members = tuple[int, ...]
"""Parameters, by their index in the model."""

Units = tuple[tuple[int, Members], ...]
"""The parameters of each numbered flat parameter."""

Ways = dict[tuple[int, int], list[tuple[Members, Units]]]
"""By the next number and the count of elements outside of all units so far: their parameters, and the units so far."""

_States = dict[tuple[tuple[int, int], "Alike"], list[tuple[Members, Units]]]
Alike = tuple[tuple[int, Units], ...]
"""How each kind of numbered module of a list is wrapped, relative to its first number and parameter."""


@dataclass
class _Module:
    """A module of the model: its own parameters, with their local names, and its submodules."""

    own: list[tuple[int, str, Tensor]] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    @cached_property
    def members(self) -> dict[int, int]:
        """The module's parameters in the order of `named_modules`, each with its number among them."""
        inner = (i for child in self.children.values() for i in child.members)
        return {i: n for n, i in enumerate([*(i for i, _, _ in self.own), *inner])}

    @cached_property
    def numel(self) -> int:
        return sum(t.numel for _, _, t in self.own) + sum(child.numel for child in self.children.values())


def units_of(params: Mapping[str, Tensor], lengths: Sequence[int | None], ranks: int) -> list[Units]:
    """Find the ways, at most two, to wrap modules into units whose flat parameters have these lengths.

    `lengths` are the elements, with padding, of each flat parameter's chunk on one of the `ranks` that share it; None
    where unknown. The model's parameters are in module order, tied ones under each of their names.

    Raises:
        UnknownLayoutError: the names are not in the order of modules, or there are too many ways.
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
        """Ways to wrap a module and its submodules, if `number` is the next flat parameter's."""
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
        """Ways to wrap the submodules of a module that is not a unit itself."""
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
        """Extend the ways to wrap a list of modules by one more module."""
        found: _States = {}
        for ((number, left), alike), ways in before.items():
            for (after, more), others in self._ways(child, number).items():
                # Parameters that no flat parameter is long enough for are in none.
                if left + more > self.most:
                    continue
                for other, inner in others:
                    same = self._also(alike, child, number, inner) if numbered else alike
                    for members, units in ways if same is not None else ():
                        way = (members + other, units + inner)
                        self._keep(found, ((after, left + more), same), way)
        return found

    def _also(self, alike: Alike, child: _Module, number: int, units: Units) -> Alike | None:
        """The kinds of a list with one more module; None if another module of its kind is wrapped differently."""
        kind = self._kind(child)
        wrapped = tuple((k - number, tuple(child.members[i] for i in members)) for k, members in units)
        known = dict(alike)
        return tuple(sorted({**known, kind: wrapped}.items())) if known.get(kind, wrapped) == wrapped else None

    def _kind(self, module: _Module) -> int:
        """A number that modules of the same names and shapes share."""
        if id(module) not in self.kind_of:
            own = tuple((name, tensor.shape) for _, name, tensor in module.own)
            inner = tuple((name, self._kind(child)) for name, child in module.children.items())
            self.kind_of[id(module)] = self.kinds.setdefault((own, inner), len(self.kinds))
        return self.kind_of[id(module)]

    def _keep(self, found: dict[Any, list[tuple[Members, Units]]], state: Any, way: tuple[Members, Units]) -> None:
        """Add a way unless it is known; all ways are kept, because only the rest shows which of them fits."""
        ways = found.setdefault(state, [])
        if way not in ways:
            ways.append(way)
        self.budget[0] -= 1
        if self.budget[0] < 0 or len(ways) > MAX_WAYS:
            raise UnknownLayoutError("its modules could be units in too many ways to look through")


def _tyings(params: Mapping[str, Tensor]) -> Iterator[set[int]]:
    """Yield sets of parameters that may be second names of others.

    A tied parameter is saved under each of its names with the same bytes, as a tensor of its own.
    """
    alike: dict[Any, list[int]] = {}
    for i, tensor in enumerate(params.values()):
        stated = {(s.rank, s.box): s.source.crc for s in tensor.shards if s.source is not None and s.box.numel}
        checksums = None if 0 in stated.values() else frozenset(stated.items())
        alike.setdefault((tensor.shape, tensor.dtype, checksums), []).append(i)
    seconds = [set(same[1:]) for same in alike.values() if len(same) > 1]
    few = len(seconds) <= MAX_TIES
    for n in range(len(seconds) + 1) if few else sorted({0, 1, len(seconds)}):
        for chosen in combinations(seconds, n):
            yield set().union(*chosen)
