"""What is plain in objects of foreign classes: a dict of their attributes, or a text for a member of an enum or a path.

An object is plain as far as its pickle is nothing but its attributes or its items: `argparse.Namespace`, dataclasses,
`SimpleNamespace`, OmegaConf's containers, tokenizers of one's own. What is none of this is left out, by name.
"""

from __future__ import annotations

from typing import Any

from ckptools.model.tensor import Tensor
from ckptools.model.values import OMEGACONF, Global, Lost, Opaque, plain
from ckptools.pickles.foreign_names import suspicious_names

MAX_DEPTH = 50
MAX_VALUES = 100_000
"""Levels and values of one object: what a foreign object holds has no other limit."""

PATHS = ("pathlib.", "pathlib._local.")
MEMBER = (str, int, float, bool)


class NotPlainError(ValueError):
    """An object is more than its attributes; the message says why."""


def as_plain(node: Opaque) -> Any:
    """The dicts, lists and texts that an object stands for.

    Raises:
        NotPlainError: it is more than these.
    """
    return _Plain().value(node, 0, frozenset())


class _Plain:
    def __init__(self) -> None:
        self.left = MAX_VALUES

    def value(self, node: Any, depth: int, above: frozenset[int]) -> Any:
        node, self.left = plain(node), self.left - 1
        if depth > MAX_DEPTH or self.left < 0 or id(node) in above:
            raise NotPlainError("it holds itself, or more than an object of settings does")
        if isinstance(node, Tensor):
            raise NotPlainError("a tensor is in it")
        inside = above | {id(node)}
        if isinstance(node, Opaque) and not isinstance(node, Lost):
            return self._object(node, depth, inside)
        if isinstance(node, dict):
            return {key: self.value(value, depth + 1, inside) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self.value(value, depth + 1, inside) for value in node)
        return node

    def _object(self, node: Opaque, depth: int, inside: frozenset[int]) -> Any:
        if suspicious_names((node.name,), {}):
            raise NotPlainError("its name could run code")
        if text := as_text(node):
            return text
        state = node.state[0] if type(node.state) is tuple and node.state[1:] == (None,) else node.state
        if node.name.startswith(OMEGACONF) and isinstance(state, dict) and "_content" in state:
            return self.value(state["_content"], depth + 1, inside)
        made_by = node.name in ("copyreg._reconstructor", "copy_reg._reconstructor") and len(node.args) == 3
        bare = not node.args or (made_by and node.args[2] is None)
        if isinstance(state, tuple) and len(state) == 2 and all(part is None or type(part) is dict for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}  # attributes, and those in slots
        if bare and not node.keywords and type(state) is dict and not node.items:
            return self.value(state, depth + 1, inside)
        raise NotPlainError("it is more than its attributes")


def as_text(node: Opaque) -> str:
    """A path, or a member of an enum such as `Phase('main')`, as text; "" for anything else."""
    args = node.args if isinstance(node.args, tuple) and not (node.state or node.items or node.keywords) else ()
    if node.name.startswith(PATHS) and all(isinstance(part, str) for part in args):
        root, rest = (args[0], args[1:]) if args[:1] == ("/",) else ("", args)
        return root + "/".join(rest) if args else "."
    if len(args) == 1 and isinstance(args[0], MEMBER) and not node.name.startswith(("torch.", "builtins.", "numpy.")):
        return f"{node.name.rpartition('.')[2]}({args[0]!r:.200})"
    return ""


def class_of(node: Opaque) -> str:
    """The dotted name of an object's class."""
    first = node.args[0] if node.name.endswith("._reconstructor") and node.args else None
    return first.dotted if isinstance(first, Global) else node.name
