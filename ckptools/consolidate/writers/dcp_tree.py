"""The tree of a DCP folder as torch's state_dict API expects it for training, and its flattened names.

The tree is that of torch.distributed.checkpoint.state_dict: `model` for `set_model_state_dict`, `optimizer` for
`set_optimizer_state_dict`, under fqns without the names of wrappers; everything else keeps its own path.
It is flattened as by DCP's default planner: dicts always, lists that contain tensors, dicts or such lists; everything
else is one value; keys become text; an empty dict is dropped. (Writing an empty dict would be worse: a loading planner
that finds a key which only the rules of torch 2.3 give takes the whole folder for one of that version.) The module
versions of a state dict (`_metadata`) have no place there.
Source: torch/distributed/checkpoint/{_traverse,_nested_dict,default_planner,state_dict}.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.consolidate.renaming import naming_notes, naming_of
from ckptools.consolidate.writers.layout import OutputContents
from ckptools.errors import RefusedError
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.text import first_few, plural
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.parameter_names import GIVE, Naming, ddp_prefix, without_wrappers
from ckptools.training_state.sections import GROUPS, STATE, Section, is_flat_optimizer, sections_of_kind

ObjectPath = tuple[str | int, ...]
"""Path of a value in the state dict; a number is an index of a list, a text a key of a dict."""

OF_ADAM = ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Hyperparameters that torch/optim/adam.py gained over time; `dcp.load` fails if a folder lacks them."""


NEEDS_NAMES = "torch's set_optimizer_state_dict takes names only; dcp.load takes numbers into optimizer.state_dict()"


@dataclass(frozen=True)
class Leaf:
    """One value of the flattened tree: a tensor, or a value without one.

    `source` is its key path in the selection's tree, `path` that in the state dict of the output.
    """

    source: KeyPath
    path: ObjectPath
    value: Any


@dataclass(frozen=True)
class _Move:
    """A section, at a key path of the selection's tree, that moves to the key `top` of the output.

    `naming` is that of an optimizer's parameters; `unwrap` removes the names of wrappers from an fqn.
    """

    section: Section
    at: KeyPath
    top: str
    naming: Naming
    unwrap: Callable[[str], str]

    def holds(self, path: KeyPath) -> bool:
        n = len(self.at)
        return path[:n] == self.at and (len(path) == n or path[n] in self.section.value)

    def name(self, key: Any) -> Any:
        """The name of a parameter in the output."""
        known = self.naming.names.get(key, key)
        return self.unwrap(known) if isinstance(known, str) else known

    def apply(self, leaf: Leaf) -> Leaf:
        first, *rest = leaf.path[len(self.at) :]
        value = leaf.value
        if self.top == "model":
            first = self.name(first)
        elif is_flat_optimizer(self.section.value):
            kind = STATE if str(first).startswith(STATE) else GROUPS
            first = kind + self.unwrap(str(first)[len(kind) :])
        elif first == "state" and rest:
            rest[0] = str(self.name(leaf.source[len(self.at) + 1]))
        elif first == "param_groups" and rest[1:] == ["params"] and isinstance(value, (list, tuple)):
            value = [self.name(i) for i in value]
        return Leaf(leaf.source, (self.top, first, *rest), value)


@dataclass(frozen=True)
class Arranged:
    """A tree, arranged for loading, with notes on changes to values, and the sections that move to top-level keys."""

    leaves: Sequence[Leaf]
    notes: Sequence[str]
    moves: Sequence[_Move]

    def name(self, path: KeyPath) -> str:
        """The fqn in the output for a key path of the selection's tree."""
        move = next((m for m in self.moves if len(path) > len(m.at) and m.holds(path)), None)
        plain = Leaf(path, tuple(k if isinstance(k, int) else str(k) for k in path), None)
        return fqn_of((move.apply(plain) if move else plain).path)


def arrange(selection: OutputContents, out: Path) -> Arranged:
    """Flatten a selection's tree, with its model and optimizer at the keys of torch's state_dict API."""
    moves = _moves(selection, out)
    flat = _Flattening([m.at for m in moves])
    leaves: dict[str, Leaf] = {}
    for leaf in flat.leaves(selection.tree, (), ()):
        move = next((m for m in moves if m.holds(leaf.source)), None)
        named = move.apply(leaf) if move else leaf
        if not named.path or not isinstance(named.path[0], str):
            raise RefusedError(out, f"a DCP holds a dict, and this is a {type(selection.tree).__name__}; write a .pt")
        fqn = fqn_of(named.path)
        if fqn in leaves:
            raise RefusedError(out, f"two values would be called {fqn}; write a .pt, which keeps the tree")
        leaves[fqn] = named
    placed = list(leaves.values())
    return Arranged(placed, [*_notes_on_moves(moves, placed), *flat.notes(moves)], moves)


class _Flattening:
    """Flatten a tree by the planner's rules. Every sequence on the path to a section `entered` is flattened too."""

    def __init__(self, entered: Iterable[KeyPath]) -> None:
        self.entered = list(entered)
        self._empty: list[KeyPath] = []
        self._odd: list[KeyPath] = []

    def leaves(self, node: Any, at: KeyPath, path: ObjectPath) -> Iterator[Leaf]:
        """Yield the single values."""
        if isinstance(node, dict):
            self._empty += [] if node else [at]
            self._odd += [(*at, key) for key in node if not isinstance(key, str)]
            for key, value in node.items():
                yield from self.leaves(value, (*at, key), (*path, str(key)))
        elif isinstance(node, (list, tuple)) and (
            _descended(node) or any(at == p[: len(at)] != p for p in self.entered)
        ):
            for i, value in enumerate(node):
                yield from self.leaves(value, (*at, i), (*path, i))
        else:
            yield Leaf(at, path, node)

    def notes(self, moves: Iterable[_Move]) -> Iterator[str]:
        """Notes on values that a DCP cannot keep as they were."""
        if self._empty:
            yield f"{plural(len(self._empty), 'empty dict')} left out, as DCP does ({_some(self._empty)})"
        ids = [(*m.at, "state") for m in moves if m.top == "optimizer"]
        odd = [p for p in self._odd if p[:-1] not in ids]
        if odd:
            yield f"{plural(len(odd), 'key')} became text, as DCP does ({_some(odd)})"


def _some(paths: list[KeyPath]) -> str:
    return first_few(list(map(fqn_of, paths)), 3)


def _descended(node: list[Any] | tuple[Any, ...]) -> bool:
    if type(node) is not list:
        return False
    return any(isinstance(v, (dict, Tensor)) or (isinstance(v, list) and _descended(v)) for v in node)


def _moves(selection: OutputContents, out: Path) -> list[_Move]:
    """The model and the optimizer to move; if there are several of a kind, each keeps its place."""
    moves = []
    for kind in ("model", "optimizer"):
        places = [(s, at) for s, at in selection.places if s.kind == kind]
        if len(places) == 1:
            section, at = places[0]
            naming = _of_one_kind(naming_of(selection, section), section, out)
            moves.append(_Move(section, at, kind, naming, _unwrapping(selection, section)))
    # A model at the root of the tree comes last: it takes the keys that no other section has.
    return sorted(moves, key=lambda m: -len(m.at))


def _of_one_kind(naming: Naming, section: Section, out: Path) -> Naming:
    """Name all parameters or none: neither torch's API nor `dcp.load` accepts a mix."""
    if section.kind != "optimizer" or is_flat_optimizer(section.value) or not naming.unnamed:
        return naming
    keys = [*section.value["state"], *(i for ids in group_ids(section.value) for i in ids)]
    if all(isinstance(key, int) or str(key).isdecimal() for key in keys):
        return naming._replace(names={}, unnamed=tuple(dict.fromkeys(keys)))
    lacking = f"{len(naming.unnamed)} of {len(set(keys))} parameters of the optimizer have no name"
    text = f"{lacking}, and nothing loads a mix of names and numbers; {GIVE}, or write a .pt, or --only model"
    raise RefusedError(out, text)


def _unwrapping(selection: OutputContents, section: Section) -> Callable[[str], str]:
    """The function that removes wrappers from names; a leading `module` only if every name of the model has it."""
    models = sections_of_kind(selection.source, "model")
    names = [selection.renamed.get(name, name) for name in models[0].value] if len(models) == 1 else []
    if not names and section.kind == "optimizer":
        names = list(naming_of(selection, section).names.values())
    leading = ddp_prefix([str(name) for name in names])
    return lambda name: without_wrappers(name).removeprefix(leading)


def _notes_on_moves(moves: Iterable[_Move], leaves: Iterable[Leaf]) -> Iterator[str]:
    moves = sorted(moves, key=lambda m: m.top)
    moved = [f"{m.top} is {fqn_of(m.section.path)}" for m in moves if m.section.path not in ((), (m.top,))]
    if moved:
        yield f"arranged for torch's state_dict API: {', '.join(moved)}"
    for move in moves:
        value = move.section.value
        keys = value if move.top == "model" else [] if is_flat_optimizer(value) else value["state"]
        names = (str(move.naming.names.get(k, k)) for k in keys)
        changed = next((n for n in names if move.unwrap(n) != n), None)
        if changed is not None:
            yield f"{move.top}: names of wrappers are taken out: {changed} is {move.unwrap(changed)}"
    for move in (m for m in moves if m.top == "optimizer"):
        yield from _notes_on_optimizer(move, [leaf for leaf in leaves if move.holds(leaf.source)])


def _notes_on_optimizer(move: _Move, leaves: Iterable[Leaf]) -> Iterator[str]:
    if is_flat_optimizer(move.section.value):
        yield "optimizer is flattened, as the source has it: load it with flatten_optimizer_state_dict=True"
        return
    yield from naming_notes(move.naming)
    if move.naming.unnamed and move.naming.by != "fqn":
        yield f"optimizer: {NEEDS_NAMES}"
    steps = [leaf for leaf in leaves if leaf.path[-1] == "step" and not isinstance(leaf.value, Tensor)]
    if steps:
        yield f"optimizer: step is a plain number for {plural(len(steps), 'parameter')}; torch makes tensors of them"
    yield from _notes_on_groups(move.section.value["param_groups"])


def _notes_on_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    adams = [group for group in groups if "betas" in group]
    lacking = [key for key in OF_ADAM if any(key not in group for group in adams)]
    if lacking:
        yield (
            f"optimizer: param groups lack {', '.join(lacking)}, which torch's Adam has by now: "
            "load with DefaultLoadPlanner(allow_partial_load=True)"
        )
