"""Find foreign classes in a checkpoint's pickles, and names that could run code.

ckptools runs none of them. They are reported so that a user knows what another program would run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Lost, Opaque
from ckptools.text import KeyPath, and_more, clip_middle, fqn_of, plural

MAX_VISITED = 2_000_000
"""Containers and foreign objects that are visited; the content of a foreign object has no other limit."""

RUNNERS = frozenset((
    "os", "posix", "nt", "subprocess", "sys", "pty", "ctypes", "runpy", "importlib", "builtins", "__builtin__",
    "socket", "shutil",
))  # fmt: skip
"""Modules with functions that run code. A class of a package may hide one behind a dot, so any part counts."""

LOADERS = frozenset((
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "code", "codeop", "pdb", "bdb",
    "timeit", "webbrowser", "operator", "_operator", "multiprocessing", "asyncio", "http", "urllib", "requests",
    "zipimport", "pkgutil", "pydoc", "tempfile", "pip", "commands",
))  # fmt: skip
"""Modules that load or start programs; only as a top-level module, because packages use these words too."""

CALLS = (
    "torch.hub",
    "torch.load",
    "torch.serialization.load",
    "torch.storage._load_from_bytes",
    "torch.jit",
    "torch.utils.collect_env",
    "torch.utils._config_module",
    "torch._inductor",
    "torch._dynamo",
    "torch.distributed.rpc",
    "numpy.load",
    "numpy.testing",
    "numpy.f2py",
    "types.CodeType",
    "types.FunctionType",
    "functools.reduce",
)
"""Functions, and modules with functions, that run their arguments."""

HARMLESS = frozenset((
    "set", "frozenset", "dict", "list", "tuple", "int", "float", "complex", "bool", "str", "bytes", "bytearray",
    "long", "unicode", "object", "slice", "range", "xrange", "type", "Ellipsis", "NotImplemented", "NoneType",
    "basestring", "memoryview", "property", "staticmethod", "classmethod", "super", "enumerate", "reversed", "zip",
))  # fmt: skip
"""Builtins that hold values; `xrange`, `long` and `unicode` are protocol 2's names of Python 3's builtins."""

MAX_NAME = 100
"""Characters of a name in a line."""

MAX_NAMED = 3
"""Classes that a line lists."""


def foreign_classes(tree: Any) -> dict[str, list[KeyPath]]:
    """The key paths of foreign objects by class name, including nested objects."""
    found: dict[str, list[KeyPath]] = {}
    for path, value in _foreign(tree):
        if not isinstance(value, Lost):
            found.setdefault(value.name, []).append(path)
    return found


def _foreign(tree: Any) -> Iterator[tuple[KeyPath, Opaque]]:
    """Walk every value once, however often it is shared.

    Values inside a foreign object get the object's own path: a tree has a bounded depth, but the content of such
    objects has not.
    """
    seen: set[int] = set()
    stack: list[tuple[KeyPath, Any, bool]] = [((), tree, False)]
    while stack and len(seen) < MAX_VISITED:
        path, node, inside = stack.pop()
        if not isinstance(node, (Mapping, list, tuple, Opaque)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Opaque):
            yield path, node
            inside = True
        children = ((path if inside else (*path, key), child, inside) for key, child in _children(node))
        stack += reversed([child for child in children if not isinstance(child[1], Tensor)])


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, Opaque):
        return ((None, part) for part in node.parts())
    return node.items() if isinstance(node, Mapping) else enumerate(node)


def suspicious_names(names: Sequence[str], foreign: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that could run code in a real unpickler.

    Args:
        names: dotted names of all that the pickles mention.
        foreign: the result of `foreign_classes`.
    """
    return tuple(name for name in names if _suspicious(name) and not _of_torch(name, names, foreign))


def _suspicious(name: str) -> bool:
    module, _, last = name.rpartition(".")
    parts = name.split(".")
    if module in ("builtins", "__builtin__"):
        return last not in HARMLESS and not last.endswith(("Error", "Exception", "Warning"))
    hidden = any(p in RUNNERS or (p.startswith("__") and p.endswith("__") and p != "__main__") for p in parts)
    return hidden or parts[0] in LOADERS or any(name == c or name.startswith(f"{c}.") for c in CALLS)


def _of_torch(name: str, names: Sequence[str], foreign: Mapping[str, Any]) -> bool:
    """Whether the name is `getattr` as tensors' pickles use it: to name an attribute of the tensor's class.

    Any other call of it would have stayed in the tree as a foreign object.
    """
    inside = (".ShardedTensor.ProcessGroupState", "Tensor._make_in_reduce_ex")
    called = any(n.endswith(inside) for n in names) and name not in foreign
    return name in ("builtins.getattr", "__builtin__.getattr") and called


def unsafe_names(names: Sequence[str], tree: Any) -> Iterator[Problem]:
    """Yield one warning for each name that could run code.

    Args:
        names: dotted names of all that the pickles mention.
        tree: the tree of the pickles.
    """
    if any(map(_suspicious, names)):
        yield from _unsafe(suspicious_names(names, foreign_classes(tree)))


def _unsafe(suspicious: Iterable[str]) -> Iterator[Problem]:
    for name in suspicious:
        text = f"the pickle names {clip_middle(name, MAX_NAME)}, which could run code; ckptools ran nothing"
        yield Problem(Code.UNSAFE_NAME, text)


def foreign_problems(foreign: Mapping[str, Sequence[KeyPath]], suspicious: Iterable[str]) -> Iterator[Problem]:
    """Yield one warning per suspicious name, then one note for all foreign classes."""
    yield from _unsafe(suspicious)
    if foreign:
        which = "a foreign class" if len(foreign) == 1 else f"{len(foreign)} foreign classes"
        yield Problem(Code.FOREIGN_CLASSES, f"{which}, kept as data and not loaded: {classes_and_places(foreign)}")


def classes_and_places(classes: Mapping[str, Sequence[KeyPath]]) -> str:
    """List the first few classes, each with its first place: `pkg.Config at state.config and 2 more places`."""
    some = islice(classes.items(), MAX_NAMED)
    named = ", ".join(f"{clip_middle(name, MAX_NAME)} at {_where(paths)}" for name, paths in some)
    return named + and_more(len(classes) - MAX_NAMED)


def _where(paths: Sequence[KeyPath]) -> str:
    more = f" and {plural(len(paths) - 1, 'more place')}" if len(paths) > 1 else ""
    return (clip_middle(fqn_of(paths[0]), MAX_NAME) or "the top") + more
