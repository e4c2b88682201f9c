"""What plain `torch.load(path)` makes: every other value of a tree becomes the nearest one that it does.

From torch 2.6 on, torch.load makes only what is on a list of its own: tensors, torch's small types, numbers, text,
dicts and the like, nothing of numpy or datetime. Nothing becomes something else without a word: `Loadable.told` has it.
Source: torch/_weights_only_unpickler.py of torch 2.6 and 2.13; c10/core/Device.cpp for the kinds of devices.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterator
from datetime import date, datetime, timedelta
from typing import Any

from ckptools.consolidate.writers.numpy_values import python_value, torch_value
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import Device, NumpyArray, NumpyDtype, NumpyScalar, Size, TorchName
from ckptools.text import clip, plural

LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
DEVICES = (
    "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
    "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
)  # fmt: skip
MAX_INT_BYTES = 255
"""What the one opcode for long integers that torch.load knows has room for."""

LEFT_OUT = object()
"""Stands for a value that there is nothing near to."""


class Loadable:
    """Copies a tree into one that plain torch.load makes.

    Attributes:
        left_out: what has no place in it, by key path: why.
    """

    def __init__(self) -> None:
        self.left_out: dict[KeyPath, str] = {}
        self._became: dict[tuple[str, str], list[KeyPath]] = {}

    def value(self, node: Any, path: KeyPath = ()) -> Any:
        """Copy what is at `path`; `LEFT_OUT` when nothing stands for it."""
        if isinstance(node, Tensor):
            return node
        if isinstance(node, dict):
            return self._dict(node, path)
        if type(node) in (list, tuple):
            # A place in a sequence has a meaning, so what is left out leaves None there.
            items = [self.value(item, (*path, i)) for i, item in enumerate(node)]
            return type(node)(None if item is LEFT_OUT else item for item in items)
        if isinstance(node, (set, frozenset)):
            return self._set(node, path)
        return self._leaf(node, path)

    def told(self) -> str:
        """What became something else, in one line; empty when nothing did."""
        kinds = [_counted(kind, what, paths) for (kind, what), paths in self._became.items()]
        return f"so that plain torch.load reads it, {', '.join(kinds)}; --keep-types keeps them" if kinds else ""

    def _note(self, kind: str, became: str, path: KeyPath) -> None:
        self._became.setdefault((kind, became), []).append(path)

    # -- containers ------------------------------------------------------------------------------------------

    def _dict(self, node: dict[Any, Any], path: KeyPath) -> dict[Any, Any]:
        if isinstance(node, defaultdict):
            self._note("defaultdict", "a dict", path)
        copied: dict[Any, Any] = next((kind() for kind in (OrderedDict, Counter) if isinstance(node, kind)), {})
        if isinstance(copied, OrderedDict) and hasattr(node, "_metadata"):
            copied._metadata = self.value(node._metadata, (*path, "_metadata"))  # type: ignore[attr-defined]
        for old, value in node.items():
            place = (*path, old)
            key = self._key(old, place)
            if key in copied or (key is not old and key != old and key in node):
                self.left_out[place] = f"its key would be {key!r:.60}, as another one is"
                continue
            kept = self.value(value, place)
            if kept is not LEFT_OUT:
                copied[key] = kept
        return copied

    def _set(self, node: set[Any] | frozenset[Any], path: KeyPath) -> set[Any]:
        if isinstance(node, frozenset):
            self._note("frozenset", "a set", path)
        return {self._key(item, path) for item in node}

    def _key(self, node: Any, path: KeyPath) -> Any:
        """What stands for a key, or for an item of a set: something that can be one."""
        if type(node) is tuple:
            return tuple(self._key(item, path) for item in node)
        if isinstance(node, frozenset):
            self._note("frozenset", "a tuple", path)
            return tuple(self._key(item, path) for item in sorted(node, key=repr))
        kept = self._leaf(node, path)
        if kept is not LEFT_OUT and isinstance(kept, Hashable):
            return kept
        self.left_out.pop(path, None)
        self._note("odd key", "text", path)
        return repr(node)

    # -- leaves ----------------------------------------------------------------------------------------------

    def _leaf(self, node: Any, path: KeyPath) -> Any:
        for kind, became, value in _nearest(node):
            if value is None:
                self.left_out[path] = f"{kind}, which plain torch.load does not make; --keep-types keeps it"
                return LEFT_OUT
            self._note(kind, became, path)
            return value
        return node


def _counted(kind: str, became: str, paths: list[KeyPath]) -> str:
    first, many = clip(fqn_of(paths[0]), 60), len(paths) > 1
    became = f"{became.removeprefix('a ')}s" if many and became.startswith("a ") else became
    return f"{plural(len(paths), kind)} became {became} ({first}{' …' if many else ''})"


def _nearest(node: Any) -> Iterator[tuple[str, str, Any]]:
    """What a value is, what becomes of it, and that; the last is None where nothing does. Nothing if it may stay."""
    if type(node) is int and node.bit_length() // 8 + 1 > MAX_INT_BYTES:
        yield f"integer of over {MAX_INT_BYTES} bytes", "text", hex(node)
    elif isinstance(node, timedelta):
        yield "timedelta", "seconds", node.total_seconds()
    elif isinstance(node, (datetime, date)):
        yield type(node).__name__, "text", node.isoformat()
    elif isinstance(node, NumpyArray):
        value = torch_value(node)
        named = "numpy array" if value is not None else f"a numpy array of {node.dtype}"
        yield named, "a list" if isinstance(value, list) else "a tensor", value
    elif isinstance(node, NumpyScalar):
        value = python_value(node)
        yield "numpy scalar" if value is not None else f"a numpy scalar of {node.dtype}", "Python's", value
    elif isinstance(node, NumpyDtype):
        yield "numpy dtype", "text", node.dtype
    elif isinstance(node, TorchName) and node.name not in LAYOUTS:
        yield f"torch.{node.name}", "text", f"torch.{node.name}"
    elif isinstance(node, Device) and not _is_known(node):
        yield f"device of type {node.type:.20}", "text", str(node)
    elif isinstance(node, Size) and any(not -(1 << 63) <= n < 1 << 63 for n in node):
        yield "size beyond 64 bits", "a tuple", tuple(node)


def _is_known(device: Device) -> bool:
    return device.type in DEVICES and (device.index is None or 0 <= device.index < 128)
