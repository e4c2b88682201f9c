"""JSON files beside an output: what is not a tensor, and what was left out.

JSON has fewer types than a checkpoint: a value that it cannot hold becomes `{"$type": …}` with its parts, a key that
is no text is written as in Python and listed under `$keys`, and NaN and infinities become text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from math import isfinite
from typing import Any

from ckptools.consolidate.selection import Selection
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of, tensors_in
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Size, TorchName

_TENSOR = object()


def values_json(tree: Any) -> str | None:
    """Everything in a tree that is not a tensor; None when there is nothing."""
    pruned = _encoded(tree)
    if pruned is _TENSOR or _hollow(pruned):
        return None
    return json.dumps({"schema": "ckptools/model/values/1", "values": pruned}, indent=2, allow_nan=False) + "\n"


def left_out_json(selection: Selection, name_of: Callable[[KeyPath], str] = fqn_of) -> str:
    """What was not written: key path, name and reason; and every hole, with what it was filled with, if it was.

    Those that were filled when the source was written are listed too, without their regions.
    """
    left_out, filled = selection.left_out, selection.filled
    written = dict(tensors_in(selection.tree))
    rows = [{**_named(path, name_of), "why": why, "lost": path in selection.lost} for path, why in left_out.items()]
    holes = [
        {
            **_named(path, name_of),
            "filled_with": filled if filled and path not in left_out else None,
            **({"numel": written[path].numel} if path in written else {}),
            "regions": [{"offsets": list(b.offsets), "sizes": list(b.sizes)} for b in boxes],
        }
        for path, boxes in selection.missing.items()
    ]
    earlier = [
        {**_named(path, name_of), "filled_with": one.fill, "numel": one.numel, "elements": one.elements, "regions": []}
        for path, one in selection.carried.items()
        if path not in left_out
    ]
    rows += [{"path": [], "name": p.tensor or "", "why": p.message, "lost": True} for p in selection.passed_over]
    made = {"schema": "ckptools/left-out/1", "left_out": rows, "missing": [*holes, *earlier]}
    return json.dumps(made, indent=2) + "\n"


def _named(path: KeyPath, name_of: Callable[[KeyPath], str]) -> dict[str, object]:
    return {"path": [str(k) for k in path], "name": name_of(path)}


def _hollow(node: Any) -> bool:
    """Whether nothing but emptied containers is left."""
    if isinstance(node, dict):
        return all(_hollow(v) for v in node.values())
    return False


def _encoded(node: Any) -> Any:
    if isinstance(node, Tensor):
        return _TENSOR
    if isinstance(node, Mapping):
        return _dict(node)
    if type(node) is list:
        return [None if (v := _encoded(item)) is _TENSOR else v for item in node]
    return _scalar(node)


def _dict(node: Mapping[Any, Any]) -> dict[str, Any]:
    encoded: dict[str, Any] = {}
    odd: dict[str, str] = {}
    for key, value in node.items():
        item = _encoded(value)
        if item is _TENSOR:
            continue
        name = key if isinstance(key, str) else repr(key)
        if not isinstance(key, str):
            odd[name] = type(key).__name__
        encoded[name] = item
    return {**encoded, "$keys": odd} if odd else encoded


def _scalar(node: Any) -> Any:
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, float):
        return node if isfinite(node) else {"$type": "float", "value": repr(node)}
    for kind, name, parts in _TYPES:
        if isinstance(node, kind):
            return {"$type": name, **{k: _encoded(v) for k, v in parts(node).items()}}
    return {"$type": type(node).__name__, "value": repr(node)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_TYPES: tuple[tuple[Any, str, Any], ...] = (
    (Size, "torch.Size", lambda v: {"sizes": list(v)}),
    (tuple, "tuple", lambda v: {"items": [None if isinstance(i, Tensor) else i for i in v]}),
    ((set, frozenset), "set", lambda v: {"items": sorted(v, key=repr)}),
    (timedelta, "timedelta", lambda v: {"days": v.days, "seconds": v.seconds, "microseconds": v.microseconds}),
    ((datetime, date), "datetime", lambda v: {"iso": v.isoformat()}),
    (complex, "complex", lambda v: {"real": v.real, "imag": v.imag}),
    ((bytes, bytearray), "bytes", lambda v: {"base64": _base64(bytes(v))}),
    (NumpyArray, "numpy.ndarray", lambda v: {"dtype": v.dtype, "shape": list(v.shape), "base64": _base64(v.data)}),
    (NumpyScalar, "numpy.scalar", lambda v: {"dtype": v.dtype, "base64": _base64(v.data)}),
    (NumpyDtype, "numpy.dtype", lambda v: {"dtype": v.dtype}),
    (Device, "torch.device", lambda v: {"device": str(v)}),
    (TorchName, "torch", lambda v: {"name": v.name}),
    (Global, "name", lambda v: {"name": v.dotted}),
)
