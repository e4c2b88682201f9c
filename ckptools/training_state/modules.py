"""Whole modules, as `torch.save(model)` pickles them: their state dicts, extracted without their classes.

A pickled `nn.Module` is an object whose state has `_parameters`, `_buffers` and `_modules`, dicts by name. They
determine what `state_dict()` would return: each parameter, and each buffer that is not None and not in
`_non_persistent_buffers_set`, under the module names on its path, joined by dots. A tied weight has a name for each
place, as in `state_dict()`. What a method of the class would add (`get_extra_state`, hooks) is code, and unknown here.

Ultralytics and others save such modules beside an optimizer, `{"model": <DetectionModel>, "ema": …}`. A module deeper
in the file counts as a model only if there is no other: Lightning's hyperparameters hold losses and backbones.

Source: torch/nn/modules/module.py, `_save_to_state_dict` and `state_dict`, of torch 2.13; before 1.6 every buffer was
persistent.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, nodes_in
from ckptools.pickles import reader
from ckptools.pickles.foreign_names import classes_and_places
from ckptools.pickles.machine_state import PickleError, RepeatedRecords
from ckptools.pickles.reader import Saved
from ckptools.text import KeyPath
from ckptools.training_state.sections import find_sections

MAX_DEPTH = 100
"""Nested modules are followed to this depth."""

MAX_ENTRIES = 1_000_000
"""At most this many names and modules are unfolded; a module may occur in many places."""

NAME = 64
"""A name counts as one entry per this many characters."""

MODULE_DICTS = ("_parameters", "_buffers", "_modules")


class ModuleState(OrderedDict[str, Any]):
    """The state dict of a whole module; `module` is the pickled object, with its other attributes."""

    module: Opaque


def is_module(value: Any) -> bool:
    """Whether an object of a foreign class is an `nn.Module`, judged by its state."""
    state = value.state if isinstance(value, Opaque) else None
    return isinstance(state, dict) and all(isinstance(state.get(name), dict) for name in MODULE_DICTS)


def read_file(path: Path, repeated: RepeatedRecords | None = None, salvage: bool = False) -> Saved:
    """Read a torch.save file as `pickles.reader.read` does, with whole modules replaced by their state dicts.

    Raises:
        ReadError: it is cut, damaged, or not a torch.save file.
    """
    saved = reader.read(path, repeated, salvage)
    if not saved.modules:
        return saved
    try:
        return saved._replace(tree=with_modules(saved.tree))
    except PickleError as error:
        raise ReadError(path, str(error)) from error


def with_modules(tree: Any) -> Any:
    """Replace each whole module that is a model by its state dict.

    Raises:
        PickleError: the modules unfold to far more than the pickle contains, or contain each other.
    """
    unfolding = _Unfolding()
    if is_module(tree):
        return unfolding.state_of(tree)
    if isinstance(tree, (dict, list)):
        unfolding.replace(tree, 0)
        if not any(section.kind == "model" for section in find_sections(tree)):
            unfolding.replace(tree, MAX_DEPTH)
    return tree


class _Unfolding:
    def __init__(self) -> None:
        self.left = MAX_ENTRIES

    def replace(self, tree: Any, depth: int) -> None:
        """Replace modules with tensors by their state dicts, in dicts and lists at most `depth` levels deeper."""
        seen: set[int] = set()
        stack = [(tree, 0)]
        while stack:
            node, level = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
                if is_module(child):
                    made = self.state_of(child)  # a module without tensors, such as a loss, is kept
                    node[key] = made if any(isinstance(value, Tensor) for value in made.values()) else child
                elif isinstance(child, (dict, list)) and level < depth:
                    stack.append((child, level + 1))

    def state_of(self, module: Opaque) -> ModuleState:
        made = ModuleState(self._entries(module))
        made.module = module
        # This walk has the order of `nn.Module.state_dict()`, which writes the same list of modules.
        made._metadata = {name.rpartition(".")[0]: {} for name in made}  # type: ignore[attr-defined]
        return made

    def _entries(self, module: Opaque) -> Iterator[tuple[str, Any]]:
        stack: list[tuple[str, Opaque, int]] = [("", module, 0)]
        while stack:
            prefix, one, depth = stack.pop()
            own = list(_own(one.state))
            inside = [(name, child) for name, child in one.state["_modules"].items() if is_module(child)]
            self.left -= sum(1 + (len(prefix) + len(str(name))) // NAME for name, _ in (("", None), *own, *inside))
            if self.left < 0 or depth > MAX_DEPTH:
                raise PickleError("its modules unfold to far more than the pickle holds, or lie inside of themselves")
            yield from ((f"{prefix}{name}", value) for name, value in own)
            stack += reversed([(f"{prefix}{name}.", child, depth + 1) for name, child in inside])


def _own(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    passing = state.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, (set, frozenset, list)) else ()
    for named, left_out in ((state["_parameters"], ()), (state["_buffers"], passing)):
        yield from ((name, value) for name, value in named.items() if value is not None and name not in left_out)


def module_problems(tree: Any) -> Iterator[Problem]:
    """Yield one note for all whole modules: their classes may add more than parameters and buffers."""
    modules: dict[str, list[KeyPath]] = {}
    for path, state in nodes_in(tree, (ModuleState,)):
        modules.setdefault(state.module.name, []).append(path)
    if modules:
        text = "a whole module is read as its parameters and buffers, without what its class may add: "
        yield Problem(Code.WHOLE_MODULE, text + classes_and_places(modules))


# -- numbers in the names of a model: absent layers, layers with missing names, lost experts ---------------------------
# Works on names alone: `model.layers.3.mlp.up.weight` is `mlp.up.weight` of layer 3 of the stack `model.layers`.
# Numbers have gaps by design where a module without parameters lies between others (a ReLU), so a stack is judged only
# if its layers are alike, each of several modules, and its numbers are not evenly spaced such as 0, 2, 4. A layer may
# differ from the others by design too: missing names are odd only if more than half of the layers have them, and no
# second layer lacks the same names. A router has a row for each expert.


NUMBER = re.compile(r"(?:^|\.)(\d{1,5})\.")
MIN_LAYERS = 3
"""With fewer numbers, they may count something else, and the layers lie one level below."""

EXPERT = re.compile(r"experts?\.(?:[a-z_]+\.)?(?:expert_)?(\d{1,5})\.")
STACKED_EXPERTS = re.compile(r"experts\.[^.]+(?:\.weight)?$")
ROUTERS = ("gate.weight", "router.weight", "router.classifier.weight", "router.layer.weight", "gate.wg.weight")
"""Names of a router beside its experts. Source: transformers (Mixtral, DeepSeek, gpt-oss, Switch, DBRX), DeepSpeed."""


MAX_EXPERTS = 1 << 12


class Stack(NamedTuple):
    """The layers of a model that are numbered below one name, and the names in each layer."""

    name: str
    layers: Mapping[int, frozenset[str]]

    @property
    def usual(self) -> frozenset[str]:
        """The names that most layers have."""
        return Counter(self.layers.values()).most_common(1)[0][0]

    def whole_name(self, number: int) -> str:
        """The name of a layer."""
        return f"{self.name}.{number}" if self.name else str(number)


def stacks_of(names: Collection[str]) -> list[Stack]:
    """The stacks of numbered layers in a model's names; in a stack of one or two layers, also the stacks inside it."""
    found: list[Stack] = []
    waiting = {"": names}
    while waiting:
        before, some = waiting.popitem()
        stacks: dict[str, dict[int, list[str]]] = {}
        for numbered, rest in _by_layer(some).items():
            name, _, number = numbered[:-1].rpartition(".")
            stacks.setdefault(name, {})[int(number)] = rest
        for inner, layers in stacks.items():
            stack = f"{before}.{inner}" if before and inner else before or inner
            found.append(Stack(stack, {n: frozenset(rest) for n, rest in layers.items()}))
            if len(layers) < MIN_LAYERS:
                waiting |= {f"{stack}.{n}" if stack else str(n): rest for n, rest in layers.items()}
    return found


def _by_layer(names: Collection[str]) -> dict[str, list[str]]:
    """The rest of each name after its first number, by the part up to the number; built fast for 100,000 names."""
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name, found in zip(names, map(NUMBER.search, names), strict=True):
        if found:
            end = found.end()
            layers[name[:end]].append(name[end:])
    return layers


def absent_layers(stack: Stack) -> list[int]:
    """Absent numbers between the layers of a stack, if its layers are alike and of several modules."""
    return holes_in(stack) if _of_modules(stack.usual) else []


def holes_in(stack: Stack) -> list[int]:
    """Absent numbers between the layers of a stack, if its layers are alike and numbered without steps."""
    numbers = sorted(stack.layers)
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) < 2 or 2 * _count(stack, stack.usual) < len(numbers):
        return []
    return sorted(set(range(numbers[0], numbers[-1])) - set(numbers))


def lacking_layers(stack: Stack) -> dict[int, list[str]]:
    """The names that a layer lacks but more than half of the layers share, by the layer's number."""
    usual = stack.usual
    if not _of_modules(usual) or 2 * _count(stack, usual) <= len(stack.layers):
        return {}
    odd = {n: own for n, own in stack.layers.items() if own < usual and _count(stack, own) == 1}
    ends = {min(stack.layers), max(stack.layers)}
    return {n: sorted(usual - own) for n, own in odd.items() if n not in ends or _is_torn(own, usual)}


def _count(stack: Stack, kind: frozenset[str]) -> int:
    return sum(own == kind for own in stack.layers.values())


def _of_modules(names: Collection[str]) -> bool:
    """Whether a layer consists of two modules or more."""
    return len({name.partition(".")[0] for name in names if "." in name}) > 1


def _is_torn(own: frozenset[str], usual: frozenset[str]) -> bool:
    """Whether the first or last layer, which often has a module less, lacks part of a module or much of itself."""
    modules = {name.rpartition(".")[0].partition(".")[0] for name in own}
    lacking = usual - own
    return 4 * len(lacking) >= len(usual) or any(name.partition(".")[0] in modules for name in lacking)


class LayerExperts(NamedTuple):
    """The experts of one layer that are present, by number, and the number of rows of its router.

    Attributes:
        stacked: whether they are one tensor, in which no expert is lost alone.
    """

    name: str
    here: frozenset[int]
    rows: int
    stacked: bool

    @property
    def absent(self) -> list[int]:
        """The numbers of experts that the router has rows for and that are absent."""
        return sorted(set(range(self.rows)) - self.here)


def experts_of(model: Mapping[str, Any]) -> Iterator[LayerExperts]:
    """The experts of each layer that has a router for them."""
    here: dict[str, set[int]] = {}
    stacked: set[str] = set()
    for name in (name for name in model if "expert" in name):
        found = EXPERT.search(name)
        if found:
            here.setdefault(name[: found.start()], set()).add(int(found[1]))
            continue
        found, value = STACKED_EXPERTS.search(name), model[name]
        if found and isinstance(value, Tensor) and len(value.shape) == 3:
            here.setdefault(name[: found.start()], set()).update(range(min(value.shape[0], MAX_EXPERTS)))
            stacked.add(name[: found.start()])
    for module, numbers in here.items():
        routers = (model.get(module + router) for router in ROUTERS)
        sizes = [r.shape for r in routers if isinstance(r, Tensor) and len(r.shape) == 2]
        if sizes and len(numbers) not in sizes[0] and len(numbers) < sizes[0][0] <= MAX_EXPERTS:
            yield LayerExperts(f"{module}experts", frozenset(numbers), sizes[0][0], module in stacked)
        elif sizes:
            yield LayerExperts(f"{module}experts", frozenset(range(len(numbers))), len(numbers), module in stacked)
