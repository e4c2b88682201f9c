"""Stand-ins for Python's functions and numpy's arrays while the torch loader reads a file that is not trusted.

Each does only what a checkpoint needs, and refuses by name whatever else a file asks of it.

numpy's own way to rebuild arrays is not safe: `dtype.__setstate__` believes any state, so that a forged dtype
calls raw bytes of the file Python objects, and reading one element of the array ends the process or worse. Here the
pickle talks to two stand-ins that take numpy's place while the file is loaded; `finished` then puts real arrays and
dtypes where they are.

Source: numpy/_core/src/multiarray (`array_setstate`, `arraydescr_setstate`); tried with numpy 2.4.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import lru_cache
from math import prod
from typing import Any


class Refused(Exception):  # noqa: N818 - load_shard makes it a ForeignClassError
    """A file asks an allowed function for more than it may do; the text names what."""


def only_process_group_state(owner: Any, name: Any) -> type:
    """`getattr`, for the one nested class that protocol 2 cannot name otherwise."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if owner is ShardedTensor and name == "ProcessGroupState":
        return ShardedTensor.ProcessGroupState
    raise Refused(f"builtins.getattr(…, {name!r:.60})")


def only_empty_bytes(*args: Any) -> bytes:
    """`bytes()`, which is how protocol 2 spells `b""`; of a number it would be that much memory."""
    if args:
        raise Refused("builtins.bytes with arguments")
    return b""


def plain_dict(*_: Any) -> dict[Any, Any]:
    """`defaultdict`, which torch's loader cannot fill, without its default."""
    return {}


# -- numpy: plain numbers and text only, sizes checked ----------------------------------------------------------------


PLAIN = re.compile(r"[biufc]\d{1,2}|\?|[SU]\d{1,9}")
"""Codes of dtypes whose bytes are numbers, booleans or text."""


class Dtype:
    """Stands in for `numpy.dtype`.

    Attributes:
        code: numpy's code without byte order, such as `f8`.
        order: `<`, `>`, or `|` where it means nothing.
    """

    __slots__ = ("code", "order")

    def __init__(self, code: Any = "", align: Any = False, copy: Any = True) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else str(code)
        self.code = text.lstrip("<>|=")
        self.order = text[0] if text[:1] in ("<", ">") else "|"
        if not PLAIN.fullmatch(self.code):
            raise Refused(f"numpy.dtype({self.code!r:.40})")

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, subarray, field names, fields, itemsize, alignment, flags)
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise Refused(f"numpy.dtype({self.code!r:.40}) with fields")
        self.order = order

    def real(self) -> Any:
        """The numpy dtype."""
        import numpy as np

        return np.dtype(self.order.replace("|", "") + self.code)


@lru_cache(maxsize=1)
def array_class() -> Any:
    """The class that stands in for `numpy.ndarray`: an array that checks the state that it is given."""
    import numpy as np

    class CheckedArray(np.ndarray):
        """An array that is empty until it has taken its state."""

        def __new__(cls, *_: Any) -> Any:
            return super().__new__(cls, (0,), "u1")

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, data = state
            real = dtype.real() if isinstance(dtype, Dtype) else None
            data = data.encode("latin1") if isinstance(data, str) else data
            if real is None or not isinstance(data, bytes) or not all(type(n) is int and n >= 0 for n in shape):
                raise Refused("numpy.ndarray of Python objects")
            if prod(shape) * real.itemsize != len(data):
                raise Refused(f"numpy.ndarray of {prod(shape)} elements in {len(data)} bytes")
            checked: Any = (1, tuple(shape), real, bool(fortran), data)
            super().__setstate__(checked)

    return CheckedArray


def reconstruct(*_: Any) -> Any:
    """Stands in for `numpy.core.multiarray._reconstruct`: an empty array, whatever it is asked for."""
    return array_class()()


def scalar(dtype: Any, data: Any = b"") -> Any:
    """Stands in for `numpy.core.multiarray.scalar`."""
    import numpy as np

    real = dtype.real() if isinstance(dtype, Dtype) else None
    data = data.encode("latin1") if isinstance(data, str) else data
    if real is None or not isinstance(data, bytes) or len(data) != real.itemsize or not data:
        raise Refused("numpy scalar of a Python object")
    return np.frombuffer(data, real)[0]


def table() -> dict[str, Any]:
    """The stand-ins by the names that files use; numpy 2 has moved its core."""
    cores = ("numpy.core.multiarray", "numpy._core.multiarray")
    return {
        "numpy.ndarray": array_class(),
        "numpy.dtype": Dtype,
        **{f"{core}._reconstruct": reconstruct for core in cores},
        **{f"{core}.scalar": scalar for core in cores},
    }


def finished(tree: Any) -> Any:
    """Replace the stand-ins in a tree of dicts, lists and tuples by real arrays and dtypes, in place."""
    return _finished(tree, {})


def _finished(node: Any, done: dict[int, Any]) -> Any:
    if isinstance(node, Dtype):
        return node.real()
    if isinstance(node, array_class()):
        return _real_array(node)
    if type(node) not in (dict, OrderedDict, list, tuple):
        return node
    if id(node) not in done:
        done[id(node)] = node  # a container that contains itself is not entered again
        done[id(node)] = _refilled(node, done)
    return done[id(node)]


def _refilled(node: Any, done: dict[int, Any]) -> Any:
    if isinstance(node, dict):
        for key, value in node.items():
            node[key] = _finished(value, done)
        return node
    items = [_finished(item, done) for item in node]
    if isinstance(node, list):
        node[:] = items
        return node
    return tuple(items) if any(a is not b for a, b in zip(items, node, strict=True)) else node


def _real_array(array: Any) -> Any:
    import numpy as np

    return np.array(array, copy=True, subok=False)
