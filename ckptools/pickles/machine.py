"""A pickle machine to which a global is only ever a name.

It interprets the opcodes itself, so nothing that a pickle names is imported or called, and every length is
compared with the bytes that remain before anything is allocated. Where a pickle would call something, `rebuild`
decides: a known harmless shape is built by our own code, anything else becomes an `Opaque`.

Work and memory are linear in the size of the pickle, and the budgets below bound the rest. Opcodes are those of
protocols 0 to 5; source: Lib/pickletools.py.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, repeat
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.model.tree import CycleError, TreeLimitError, check_tree_limits
from ckptools.model.values import Cycle
from ckptools.pickles import object_opcodes  # noqa: F401 - it registers opcodes
from ckptools.pickles.classes import tensors, transformer_engine  # noqa: F401 - they register what tensors are made of
from ckptools.pickles.machine_state import BLOCK, CutError, Locate, MachineState, PickleError, Reader, UnusualError
from ckptools.pickles.opcodes import DISPATCH, Handler, Stop
from ckptools.pickles.repeated import RepeatedRecords
from ckptools.pickles.shard_runs import RunReader


class Machine(MachineState):
    """Interprets one pickle.

    Attributes:
        dispatch: the handler of each opcode.
    """

    dispatch: Sequence[Handler] = DISPATCH

    def __init__(
        self,
        data: bytes,
        locate: Locate | None = None,
        fast: bool = True,
        reader: Reader = RunReader,
        repeated: RepeatedRecords | None = None,
    ) -> None:
        super().__init__(data, locate, fast, reader, repeated or RepeatedRecords(limit=0))

    def load(self, at: int = 0) -> Any:
        """Interpret the pickle that begins at `at` up to its STOP and return what it describes.

        Raises:
            PickleError: the stream is cut, malformed or beyond the budgets.
        """
        try:
            tree = self._load(at)
            if not self.runs.has_unresolved_records(tree):
                return tree
        except (PickleError, UnusualError):
            if not self.runs.runs:
                raise
        # Something that skipping cannot decide: once more, opcode by opcode.
        self._start(fast=False)
        return self._load(at)

    def _load(self, at: int) -> Any:
        data, dispatch = self.data, self.dispatch
        try:
            for handled in count(BLOCK, BLOCK):
                for _ in repeat(None, BLOCK):
                    at = dispatch[data[at]](self, at + 1)
                self.check_sizes()
                self.check_opcodes(handled)
        except Stop as stop:
            self.stopped_at = stop.at
        except (IndexError, KeyError, struct.error) as error:
            if at >= len(data):
                raise CutError("the pickle ends without STOP") from error
            if at + 1 == len(data) or isinstance(error, struct.error):
                raise CutError(f"malformed pickle near byte {at}") from error
            raise PickleError(f"malformed pickle near byte {at}") from error
        except (PickleError, UnusualError):
            raise
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise PickleError(f"{_line(error)} (pickle byte {at})") from error
        if not self.stack:
            raise PickleError("the pickle ends with nothing on its stack")
        return self.pop()


def _line(error: Exception) -> str:
    """Python's message about a value that does not fit; replaced when it repeats the file's content at length."""
    text = str(error)
    return text if text.isprintable() and len(text) < 200 else f"malformed: {type(error).__name__}"


# -- within limits: the tree, or one line that says why there is none -------------------------------------------------


def load_checked(machine: Machine, path: Path, what: str) -> Any:
    """Run a pickle and check its tree against the limits; `what` names the pickle in errors.

    Raises:
        ReadError: it is damaged, or beyond the limits.
    """
    try:
        with gc_paused():
            tree = machine.load()
        tree = _checked(tree, machine)
    except (PickleError, TreeLimitError) as error:
        raise ReadError(path, f"{what}: {error}") from error
    return tree


def _checked(tree: Any, machine: Machine) -> Any:
    """The tree, within the budgets; where containers lie inside of themselves, cut there."""
    try:
        check_tree_limits(tree, machine.flat)
    except CycleError:
        tree = without_cycles(tree)
        check_tree_limits(tree)
    return tree


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many objects are made and none of them becomes garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# -- circles: where a container lies in itself, a `Cycle` says so -----------------------------------------------------


CONTAINERS = (dict, list, tuple)


def without_cycles(tree: Any) -> Any:
    """The tree with a `Cycle` in place of each container that is met again inside itself. Iterative, like all walks."""
    done: dict[int, Any] = {}
    path: dict[int, int] = {}
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            done[id(node)] = _remade(node, done, path)
            del path[id(node)]
        elif id(node) not in done and id(node) not in path and isinstance(node, CONTAINERS):
            path[id(node)] = len(path)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if isinstance(child, CONTAINERS)]
    return done.get(id(tree), tree)


def _children(node: Any) -> list[Any]:
    metadata = [node._metadata] if hasattr(node, "_metadata") else []
    return [*(node.values() if isinstance(node, dict) else node), *metadata]


def _remade(node: Any, done: dict[int, Any], path: dict[int, int]) -> Any:
    """The container with its children as they are now; one that is not done yet lies around this one.

    Args:
        node: the container.
        done: the containers that were remade, by `id`.
        path: the level of each container that this one lies in, and its own.
    """

    def now(child: Any) -> Any:
        if not isinstance(child, CONTAINERS):
            return child
        if id(child) in done:
            return done[id(child)]
        return Cycle(f"the {_kind(child)} that it lies in", levels=path[id(node)] - path[id(child)])

    if isinstance(node, tuple):
        children = [now(child) for child in node]
        return node if all(a is b for a, b in zip(children, node, strict=True)) else tuple(children)
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, CONTAINERS):
            node[key] = now(child)
    if hasattr(node, "_metadata") and now(node._metadata) is not node._metadata:
        del node._metadata
    return node


def _kind(node: Any) -> str:
    return "dict" if isinstance(node, dict) else "list" if isinstance(node, list) else "tuple"
