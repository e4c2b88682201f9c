"""Whole modules, as `torch.save(model)` pickles them: the state dict that is in one, without its class.

A pickled `nn.Module` is an object whose state has `_parameters`, `_buffers` and `_modules`, dicts by name. What
`state_dict()` would return follows from them: each parameter and each buffer that is no None and not among the
`_non_persistent_buffers_set`, under the names of the modules on the way, joined by dots. A tied weight has a name for
each place, as there. What a method of the class would add (`get_extra_state`, hooks) is code, and unknown here.

Ultralytics and others save such modules beside an optimizer, `{"model": <DetectionModel>, "ema": …}`. A module deeper
in the file is a model only where no other is: Lightning's hyperparameters hold losses and backbones.

Source: torch/nn/modules/module.py, `_save_to_state_dict` and `state_dict`, of torch 2.13; before 1.6 every buffer was
persistent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, nodes_in
from ckptools.model.values import Opaque
from ckptools.pickles import reader
from ckptools.pickles.foreign_names import classes_and_places
from ckptools.pickles.machine_state import PickleError
from ckptools.pickles.reader import Saved
from ckptools.pickles.repeated import RepeatedRecords
from ckptools.training_state.sections import find_sections

MAX_DEPTH = 100
"""Modules inside of modules."""

MAX_ENTRIES = 1_000_000
"""Names of the state dicts, and modules on the way; a module may lie in many places."""

NAME = 64
"""Characters of a name that count as one entry."""

MODULE_DICTS = ("_parameters", "_buffers", "_modules")


class ModuleState(OrderedDict[str, Any]):
    """The state dict of a whole module, and that `module` as the file has it, with its other attributes."""

    module: Opaque


def is_module(value: Any) -> bool:
    """Whether an object of a foreign class is an `nn.Module`, judged by its state."""
    state = value.state if isinstance(value, Opaque) else None
    return isinstance(state, dict) and all(isinstance(state.get(name), dict) for name in MODULE_DICTS)


def read_file(path: Path, repeated: RepeatedRecords | None = None, salvage: bool = False) -> Saved:
    """Read a torch.save file as `pickles.reader.read` does, with the state dicts of whole modules in their place.

    Raises:
        ReadError: it is cut, damaged, or no torch.save file.
    """
    saved = reader.read(path, repeated, salvage)
    if not saved.modules:
        return saved
    try:
        return saved._replace(tree=with_modules(saved.tree))
    except PickleError as error:
        raise ReadError(path, str(error)) from error


def with_modules(tree: Any) -> Any:
    """The tree with the state dict of each whole module that is a model in place of the module.

    Raises:
        PickleError: the modules unfold to more than a pickle can mean, or contain each other.
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
        """Replace modules with tensors that lie in dicts and lists, at most so many levels below the tree's own."""
        seen: set[int] = set()
        stack = [(tree, 0)]
        while stack:
            node, level = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
                if is_module(child):
                    node[key] = self._model(child)
                elif isinstance(child, (dict, list)) and level < depth:
                    stack.append((child, level + 1))

    def _model(self, module: Opaque) -> Any:
        """The state dict of a module; a module without tensors, such as a loss, stays what it is."""
        made = self.state_of(module)
        return made if any(isinstance(value, Tensor) for value in made.values()) else module

    def state_of(self, module: Opaque) -> ModuleState:
        made = ModuleState(self._entries(module))
        made.module = module
        # The walk is that of `nn.Module.state_dict()`, which leaves such a list of modules: their order is known.
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
    """One note for all whole modules: their classes may know more of them than their parameters and buffers."""
    modules: dict[str, list[KeyPath]] = {}
    for path, state in nodes_in(tree, (ModuleState,)):
        modules.setdefault(state.module.name, []).append(path)
    if modules:
        text = "a whole module is read as its parameters and buffers, without what its class may add: "
        yield Problem(Code.WHOLE_MODULE, text + classes_and_places(modules))
