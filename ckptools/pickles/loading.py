"""Running a pickle within its limits: the tree that it describes, or one line that says why there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.model.tree_limits import CycleError, TreeLimitError, check_tree_limits
from ckptools.pickles.cycles import without_cycles
from ckptools.pickles.limits import PickleError
from ckptools.pickles.machine import Machine


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
